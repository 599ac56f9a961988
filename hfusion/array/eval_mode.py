"""Train and eval of arrays whose members override them, and a context in which an array is in eval mode."""

from __future__ import annotations

import types
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeAlias, TypeVar

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils._python_dispatch import TorchDispatchMode

from hfusion.array.array_description import ArrayState, renewed
from hfusion.capture.attribute_fingerprint import modeless_fingerprint
from hfusion.capture.compare_models import check_alone
from hfusion.capture.registered_tensors import tensors, ties
from hfusion.core.errors import FusionError
from hfusion.core.tree import leaves

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule


def switch_mode(fused: FusedModule, path: str, set_mode: ModeSetter) -> None:
    """Call the members' own train or eval and adopt its effects. Raises FusionError if an array cannot hold them."""
    fused._split()
    members = _copies(fused)
    before = tuple(map(modeless_fingerprint, members))
    effects = ModeChange(members, fused._array.comparison.shared).run(path, set_mode)
    stacks = fused.stacks
    with torch.no_grad():
        for (name, index), tensor in effects.moved.items():
            stacks[name].detach()[index].copy_(tensor)
    changed = {name: trained for name, trained in effects.trained.items() if stacks[name].requires_grad != trained}
    for name, trained in changed.items():
        stacks[name].requires_grad_(trained)
    _adopt(fused, before, effects, members)
    fused._views.renew(fused, changed)


def _copies(fused: FusedModule) -> list[nn.Module]:
    """Return the members as new modules around their rows, in the members' modes."""
    models = [fused._member(row) for row in range(len(fused))]
    for row, member in fused._views.members.items():
        for path, module in models[row].named_modules():
            module.training = member.modules[path].training
    return models


def _adopt(fused: FusedModule, before: tuple[Any, ...], effects: ModeEffects, members: Sequence[nn.Module]) -> None:
    """Adopt the flags and attributes in ``effects``. The programs of each state are cached."""
    for path, training in effects.training.items():
        fused.get_submodule(path).training = training
    if effects.contents == before:
        return
    states = fused._states
    states.setdefault(before, ArrayState(fused._number, fused._array, fused._compiler))
    if effects.contents not in states:
        fused._array = renewed(fused._array, effects.contents, members)
        states[effects.contents] = ArrayState(next(fused._numbers), fused._array, fused._new_compiler())
    fused._enter(states[effects.contents])


@contextmanager
def evaluating(fused: FusedModule) -> Iterator[None]:
    """Context manager: see `FusedModule.evaluating`."""
    fused._split()
    modes = [(branch, branch.training) for branch in fused._branches]
    member_modes = {row: member.training for row, member in fused._views.members.items()}
    state = ArrayState(fused._number, fused._array, fused._compiler)
    has_own = own_modes(fused._array.skeletons[0])
    if has_own:
        members = _copies(fused)
        before = tuple(map(modeless_fingerprint, members))
        trained = {name: tensor.requires_grad for name, tensor in fused.stacks.items()}
        change = ModeChange(members, fused._array.comparison.shared)
        effects = change.run("", lambda module: module.eval())
        if effects.moved or effects.written or effects.trained != trained:
            change.undo()
            raise FusionError(
                f"the own eval of {fused._original} changes parameters or buffers, and this evaluation uses them as "
                "training has them; evaluate the trained models by themselves"
            )
        _adopt(fused, before, effects, members)
        fused._views.renew(fused, {})
    else:
        fused.eval()
    try:
        yield
    finally:
        for branch, training in modes:
            branch.training = training
        fused._enter(state)
        if has_own:
            fused._views.renew(fused, {})
        fused._views.set_modes(fused, member_modes)


# Train and eval of an array whose members override them: a frozen backbone, a teacher, adapters that merge.

ModeSetter: TypeAlias = Callable[[nn.Module], object]

T = TypeVar("T")


def own_modes(model: nn.Module) -> bool:
    """Return whether a module of ``model`` overrides train or eval."""
    return any(_overrides_mode(module) for module in model.modules())


def _overrides_mode(module: nn.Module) -> bool:
    kind = type(module)
    overridden = kind.train is not nn.Module.train or kind.eval is not nn.Module.eval
    return overridden or "train" in vars(module) or "eval" in vars(module)


@dataclass(frozen=True)
class ModeEffects:
    """Changes that a method made to the members, equal for all except ``contents``, one value per member.

    ``moved``: tensors by key and member that are not in the memory of their row; ``written``: keys of rows written
    in place.
    """

    training: dict[str, bool]
    trained: dict[str, bool]
    contents: tuple[Any, ...]
    moved: dict[tuple[str, int], Tensor]
    written: frozenset[str]


@dataclass(eq=False)
class ModeChange:
    """A mode change that can be undone. ``views[b]``: member b around its rows. ``shared``: keys of shared tensors."""

    views: Sequence[nn.Module]
    shared: frozenset[str]
    backups: list[tuple[str, Tensor, Tensor]] = field(default_factory=list)

    def run(self, path: str, set_mode: ModeSetter) -> ModeEffects:
        """Apply ``set_mode`` to the module at ``path`` of every member.

        Raises:
            FusionError: members differ in the effects, or an array cannot represent them; rows are then as before.
        """
        try:
            effects = [self._apply_to_member(index, view, path, set_mode) for index, view in enumerate(self.views)]
            return ModeEffects(
                _alike([effect.training for effect in effects], "module {} is left in train mode"),
                _alike([effect.trained for effect in effects], "{} is left to be trained"),
                tuple(effect.contents[0] for effect in effects),
                {key: tensor for effect in effects for key, tensor in effect.moved.items()},
                frozenset(name for name, _, _ in self.backups),
            )
        except BaseException:
            self.undo()
            raise

    def undo(self) -> None:
        """Restore every row."""
        with torch.no_grad():
            for _, row, before in reversed(self.backups):
                row.copy_(before)
        self.backups.clear()

    def _apply_to_member(self, index: int, view: nn.Module, path: str, set_mode: ModeSetter) -> ModeEffects:
        before = _structure(view)
        rows = {name: tensor.detach() for name, tensor in tensors(view)}
        for module in view.get_submodule(path).modules():
            _check_bound(index, module)
        with _Writes(index, rows, self.shared, self.backups):
            set_mode(view.get_submodule(path))
        check_alone(index, view)
        if _structure(view) != before:
            raise FusionError(
                f"the own train or eval of model {index} ({type(view).__name__}) changes its modules, or shapes, "
                "dtypes or devices of its tensors, which an array cannot follow; call it on the models, then fuse them"
            )
        moved = {(name, index): t.detach() for name, t in tensors(view) if not _lies_in(t, rows[name])}
        for name, _ in moved:
            if name in self.shared:
                raise FusionError(_shared_write(index, name))
        training = {path: module.training for path, module in view.named_modules(remove_duplicate=False)}
        trained = {name: tensor.requires_grad for name, tensor in tensors(view)}
        return ModeEffects(training, trained, (modeless_fingerprint(view),), moved, frozenset())


def _structure(view: nn.Module) -> Any:
    named = dict(tensors(view))
    kinds = {name: (t.shape, t.dtype, t.device, isinstance(t, nn.Parameter)) for name, t in named.items()}
    modules = [(path, type(module)) for path, module in view.named_modules(remove_duplicate=False)]
    return modules, kinds, ties(named)


def _lies_in(tensor: Tensor, row: Tensor) -> bool:
    return tensor.data_ptr() == row.data_ptr() and tensor.stride() == row.stride()


def _check_bound(index: int, module: nn.Module) -> None:
    """Raise a FusionError if train or eval was set on the instance and is not bound to it, so cannot be copied."""
    for name in ("train", "eval"):
        method = vars(module).get(name)
        if method is not None and not (isinstance(method, types.MethodType) and method.__self__ is module):
            raise FusionError(
                f"model {index}: {name} of {type(module).__name__} was set to {method}, which does not work on copies "
                "of the module. Define it in the class, or set types.MethodType(function, module)."
            )


def _alike(flags: Sequence[Mapping[str, bool]], template: str) -> dict[str, bool]:
    """Return the changes common to all members. Raises FusionError if they differ."""
    for index, other in enumerate(flags):
        for name, flag in flags[0].items():
            if other[name] != flag:
                effect = template.format(name or "(root)")
                raise FusionError(
                    f"after the members' own train or eval {effect} by model {0 if flag else index}, but not by model "
                    f"{index if flag else 0}; fuse only models whose train and eval do the same"
                )
    return dict(flags[0])


def _shared_write(index: int, name: str) -> str:
    return (
        f"the own train or eval of model {index} writes into {name}, which all members share; "
        "give each model its own copy of it before fusing"
    )


class _Writes(TorchDispatchMode):
    """Backs up a member's rows before they are overwritten; refuses writes into tensors that all members share."""

    def __init__(
        self,
        index: int,
        rows: Mapping[str, Tensor],
        shared: frozenset[str],
        backups: list[tuple[str, Tensor, Tensor]],
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._index, self._rows, self._shared, self._backups = index, rows, shared, backups
        self._backed_up: set[str] = set()

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        for tensor in _written(func, args, kwargs):
            for name, row in self._rows.items():
                if _overlaps(tensor, row):
                    self._back_up(name, row)
        return func(*args, **kwargs)

    def _back_up(self, name: str, row: Tensor) -> None:
        if name in self._shared:
            raise FusionError(_shared_write(self._index, name))
        if name not in self._backed_up:
            self._backed_up.add(name)
            self._backups.append((name, row, row.clone()))


def _written(func: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Iterator[Tensor]:
    for position, parameter in enumerate(func._schema.arguments):
        if parameter.alias_info is not None and parameter.alias_info.is_write:
            argument = args[position] if position < len(args) else kwargs.get(parameter.name)
            yield from leaves(argument, Tensor)


def _overlaps(tensor: Tensor, row: Tensor) -> bool:
    """Return whether a tensor starts inside a row, or the row inside the tensor."""
    if tensor.device != row.device or not tensor.numel() or not row.numel():
        return False
    a, b = tensor.data_ptr(), row.data_ptr()
    return b <= a < b + row.nbytes or a <= b < a + tensor.nbytes
