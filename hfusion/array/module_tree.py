"""The tree of a fused module: the members' modules with stacked tensors, under the same names."""

from __future__ import annotations

import copy
import functools
import threading
import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from hfusion.array.member_views import switch_mode
from hfusion.capture.export_context import apart
from hfusion.core.errors import FusionError
from hfusion.core.membership import mark, membership
from hfusion.torch_private.replaced_functions import replaced

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule

STATE = frozenset(
    {
        "_original",
        "_array",
        "_branches",
        "_origins",
        "_compiler",
        "_real",
        "_refusals",
        "_has_padded",
        "_loops",
        "_traces",
        "_methods",
        "_is_method",
        "_find_program_name",
        "_untraced",
        "_states",
        "_number",
        "_has_warned",
        "_situations",
        "_array_position",
        "_on_program",
        "_views",
        "_is_part",
        "_idle",
    }
)
_STANDARD = frozenset(nn.Module().__dict__)


class Tree(nn.Module):
    """One of the members' modules in a fused module: its stacked tensors and submodules, under the same names.

    ``original`` is its class.
    """

    def __init__(self, original: str) -> None:
        super().__init__()
        self._original = original

    def __setattr__(self, name: str, value: Any) -> None:
        if name in STATE:
            # Bypass nn.Module, which would refuse the name if a member has a submodule or tensor of this name.
            object.__setattr__(self, name, value)
            return
        if self._is_captured(name) or (name in self._modules and value is not self._modules[name]):
            raise FusionError(
                f"setting {name} on a fused {self._original} would have no effect on what it computes; "
                "set it on the models of unfuse(), and fuse them again"
            )
        if isinstance(value, nn.Module) and name not in self._modules:
            raise _added(name, self)
        if name in self._buffers:
            self._check_replacement(name, value)
        super().__setattr__(name, value)

    def _is_captured(self, name: str) -> bool:
        """Return whether ``name`` is an attribute that the members' forward may read, whose value was captured."""
        array, path, _ = (None, "", False) if name in _STANDARD else self._root()
        if array is None:
            return False
        return any(name in fixed_attributes(module) for module in modules_by_path(array._array.skeletons)[path])

    def _ties(self, name: str, tensor: Tensor | None) -> list[str]:
        """Return the keys in the array under which ``tensor`` occurs, besides that of ``name`` here."""
        array = self._root()[0]
        return [
            f"{path}.{key}".strip(".")
            for path, tree in (() if array is None or tensor is None else array.named_modules())
            for key, held in (*tree._parameters.items(), *tree._buffers.items())
            if held is tensor and (tree is not self or key != name)
        ]

    def _check_replacement(self, name: str, tensor: Any) -> None:
        """Raise a FusionError if ``tensor`` cannot replace the tensor called ``name``."""
        before = self._parameters.get(name, self._buffers.get(name))
        shapes = [f"of shape {tuple(x.shape)}" if isinstance(x, Tensor) else str(x) for x in (before, tensor)]
        if shapes[0] != shapes[1]:
            raise FusionError(
                f"{name} of a fused {self._original} is {shapes[0]}, as what it computes was "
                f"captured, and cannot become {shapes[1]}; do so on the models of unfuse(), and fuse "
                "them again"
            )
        if isinstance(before, Tensor) and before.dtype != tensor.dtype:
            raise FusionError(
                f"{name} of a fused {self._original} is {before.dtype}, and cannot become {tensor.dtype} by itself; "
                "convert the array, by fused.to(dtype)"
            )
        if tensor is not before and (keys := self._ties(name, tensor)):
            raise FusionError(
                f"{name} of a fused {self._original} cannot become one tensor with {keys[0]}, as what it computes was "
                "captured; tie the models before fusing, or those of unfuse(), and fuse them again"
            )
        if tensor is not before and (ties := self._ties(name, before)):
            raise FusionError(
                f"{name} of a fused {self._original} is one tensor with {', '.join(ties)}, as what it computes was "
                "captured, and cannot become another; write into it, or untie the models of unfuse() and fuse them "
                "again"
            )

    def __delattr__(self, name: str) -> None:
        if any(name in table for table in (self._parameters, self._buffers, self._modules)):
            raise FusionError(
                f"{name} of a fused {self._original} cannot be deleted or reparametrized, as what it computes was "
                "captured; do so on the models of unfuse(), and fuse them again"
            )
        super().__delattr__(name)

    def _load_from_state_dict(self, state_dict: Any, prefix: str, metadata: Any, *rest: Any) -> None:
        for name in (*self._parameters, *self._buffers) if metadata.get("assign_to_params_buffers") else ():
            if ties := self._ties(name, self._parameters.get(name, self._buffers.get(name))):
                raise FusionError(
                    f"load_state_dict(assign=True) would make {prefix}{name} and {', '.join(ties)} of a fused module, "
                    "which are one tensor, two; leave out assign=True"
                )
        super()._load_from_state_dict(state_dict, prefix, metadata, *rest)

    def register_parameter(self, name: str, param: nn.Parameter | None) -> None:
        """Replace a parameter, as `torch.nn.Module` does. Raises FusionError for a new name or another shape."""
        if name not in self._parameters:
            raise _added(name, self)
        before = self._parameters[name]
        self._check_replacement(name, param)
        super().register_parameter(name, param)
        old_mark = None if before is None else membership(before)
        if param is not None and old_mark is not None and membership(param) is None:
            mark(param, old_mark)
        if param is not before:
            self._replaced()

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Same as torch.nn.Module. Raises FusionError if the tensor cannot replace an existing one."""
        before = self._buffers.get(name)
        if name in self._buffers:
            self._check_replacement(name, tensor)
        super().register_buffer(name, tensor, persistent)
        if before is not None and tensor is not before:
            self._replaced()

    def parameters(self, recurse: bool = True) -> Iterator[nn.Parameter]:
        """Same as torch.nn.Module, from a list of modules: walking the tree would be slower than a small update."""
        branches: list[nn.Module] | None = self.__dict__.get("_branches") if recurse else None
        if branches is None:
            return super().parameters(recurse)
        named = (param for branch in branches for param in branch._parameters.values() if param is not None)
        return iter({id(param): param for param in named}.values())

    def named_buffers(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, Tensor]]:
        """Same as torch.nn.Module, without walking the tree of an array that has no buffers."""
        branches: list[nn.Module] | None = self.__dict__.get("_branches")
        if branches is not None and not any(branch._buffers for branch in branches):
            return iter(())
        return super().named_buffers(*args, **kwargs)

    def get_submodule(self, target: str) -> nn.Module:
        """Same as torch.nn.Module, also if a submodule has the name of a method."""
        module: nn.Module = self
        for name in target.split(".") if target else ():
            child = module._modules.get(name)
            if child is None:
                raise AttributeError(f"the fused {self._original} has no submodule {target}")
            module = child
        return module

    def train(self, mode: bool = True) -> Tree:
        """Same as torch.nn.Module, for all members. If members override train or eval, their methods are called."""
        return self._switched(lambda module: module.train(mode), mode)

    def eval(self) -> Tree:
        """See `train`."""
        return self._switched(lambda module: module.eval(), False)

    def _switched(self, set_mode: Callable[[nn.Module], object], mode: bool) -> Tree:
        array, path, overrides = self._root()
        if array is not None and overrides:
            switch_mode(array, path, set_mode)
            return self
        for module in self.modules():
            module.training = mode
        if array is not None:
            array._views.to_all(path, set_mode)
        return self

    def requires_grad_(self, requires_grad: bool = True) -> Tree:
        """Same as torch.nn.Module, for all members."""
        super().requires_grad_(requires_grad)
        array, path, _ = self._root()
        if array is not None:
            array._views.to_all(path, lambda module: module.requires_grad_(requires_grad))
            array._split()
        return self

    def state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Same as torch.nn.Module, including tensors that were assigned to members."""
        array = self._root()[0]
        if array is not None:
            array._split()
        return super().state_dict(*args, **kwargs)

    def training_by_path(self) -> dict[str, bool]:
        """Return whether each module is in train mode, by path."""
        return {path: module.training for path, module in self.named_modules(remove_duplicate=False)}

    def _root(self) -> tuple[Any, str, bool]:
        """Return the array (None during construction), the path in it, and whether members override train or eval."""
        root, path, overrides = self.__dict__.get("_array_position") or (None, "", False)
        return (None if root is None else root()), path, overrides

    def _replaced(self) -> None:
        """Update the array after a tensor has been replaced."""
        array = self._root()[0]
        if array is not None:
            array._mark()
            array._views.follow(array)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_array_position"}

    def extra_repr(self) -> str:
        return ", ".join(
            f"{name} {tuple(t.shape)}"
            for name, t in [*self._parameters.items(), *self._buffers.items()]
            if t is not None
        )

    def _get_name(self) -> str:
        return f"Fused[{self._original}]"


class Branch(Tree):
    """A submodule of a fused module: a container of tensors, which cannot be called or hooked alone."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        raise FusionError(
            f"a fused {self._original} cannot be called by itself; call the whole fused module, or a member's: fused[i]"
        )

    def add_module(self, name: str, module: nn.Module | None) -> None:
        raise _added(name, self)

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        if name not in self._buffers:
            raise _added(name, self)
        super().register_buffer(name, tensor, persistent)

    def register_forward_hook(self, *args: Any, **kwargs: Any) -> Any:
        raise FusionError(
            f"hooks on the {self._original} inside a fused module never run; register them on the fused module itself"
        )

    register_forward_pre_hook = register_forward_hook
    register_full_backward_hook = register_forward_hook
    register_full_backward_pre_hook = register_forward_hook
    register_backward_hook = register_forward_hook


def _added(name: str, tree: Tree) -> FusionError:
    return FusionError(
        f"{name}, added to a fused {tree._original}, would have no effect on what it computes; add it to the models of "
        "unfuse(), and fuse them again"
    )


def fixed_attributes(module: nn.Module) -> frozenset[str]:
    """Return the attributes of a module and its classes that forward may read, whose values are captured."""
    classes = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
    named = {
        name
        for kind in classes
        for name, value in vars(kind).items()
        if not name.startswith("__") and (isinstance(value, property) or not hasattr(type(value), "__get__"))
    }
    return frozenset(named.union(vars(module)) - _STANDARD)


def modules_by_path(skeletons: Sequence[nn.Module]) -> dict[str, tuple[nn.Module, ...]]:
    """Return the modules of the members' ``skeletons`` at each path, parents first."""
    columns = zip(*(skeleton.named_modules(remove_duplicate=False) for skeleton in skeletons), strict=True)
    return {column[0][0]: tuple(module for _, module in column) for column in columns}


def grow(branch: Tree, skeletons: Sequence[nn.Module], stacks: Mapping[str, Tensor]) -> None:
    """Give ``branch`` the tree of ``skeletons`` with the tensors of ``stacks``; submodules used twice stay one."""
    grown: dict[tuple[int, ...], Branch] = {}
    branch.training = skeletons[0].training
    for path, modules in modules_by_path(skeletons).items():
        target: Tree = branch
        if path:
            parent, _, leaf = path.rpartition(".")
            target = grown.setdefault(tuple(map(id, modules)), Branch(type(modules[0]).__name__))
            target.training = modules[0].training
            branch.get_submodule(parent)._modules[leaf] = target
        prefix = f"{path}." if path else ""
        target._non_persistent_buffers_set = {name for module in modules for name in module._non_persistent_buffers_set}
        for module in modules:
            for table, source in ((target._parameters, module._parameters), (target._buffers, module._buffers)):
                for name in source:
                    if table.get(name) is None:
                        table[name] = stacks.get(prefix + name)  # type: ignore[assignment]


def method_names(model: nn.Module) -> frozenset[str]:
    """Return the names of the methods that the authors of the class of ``model`` wrote, without those of torch."""
    kinds = type(model).__mro__[: type(model).__mro__.index(nn.Module)]
    return frozenset(
        name
        for kind in kinds
        if kind.__module__.partition(".")[0] != "torch"
        for name, value in vars(kind).items()
        if isinstance(value, types.FunctionType) and not name.startswith("__")
    )


# Methods of the members other than forward, called on an array like forward: captured, batched and checked.

_SHARED = ("_parameters", "_buffers", "_modules", "_non_persistent_buffers_set")


def array_of_method(fused: FusedModule, name: str) -> FusedModule:
    """Return a new array around the tensors of ``fused`` whose forward is the members' method ``name``."""
    with apart():
        skeletons = tuple(map(copy.deepcopy, fused._array.skeletons))
    for skeleton in skeletons:
        kind: Any = type(skeleton)
        skeleton.__class__ = _class_with_forward(kind, getattr(kind, name))
    array = type(fused).__new__(type(fused))
    nn.Module.__init__(array)
    # Share the dict objects themselves, so that both arrays see replaced tensors.
    vars(array).update({key: vars(fused)[key] for key in _SHARED})
    array._original = f"{fused._original}.{name}"
    array._array = replace(fused._array, skeletons=skeletons)
    array._prepare()
    array._is_part = array._is_method = True
    array._real = fused._real
    fused._own_branches(fused._array)
    return array


@functools.lru_cache(maxsize=256)
def _class_with_forward(kind: type[nn.Module], method: Callable[..., Any]) -> type[nn.Module]:
    """Return a subclass of ``kind`` whose forward runs ``method``; inside it, forward is that of ``kind``."""
    running = threading.local()

    @functools.wraps(method)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if getattr(running, "inside", None) is self:
            return kind.forward(self, *args, **kwargs)
        with replaced(running, {"inside": self}):
            return method(self, *args, **kwargs)

    namespace = {"forward": forward, "__module__": kind.__module__, "__qualname__": kind.__qualname__}
    return type(kind.__name__, (kind,), namespace)
