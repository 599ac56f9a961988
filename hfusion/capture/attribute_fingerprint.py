"""The Python attributes that forward can read, as hashable values."""

from __future__ import annotations

import hashlib
import types
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from hfusion.capture.hooks import hooks_of, is_intercepted, is_recipe, options, recomputed
from hfusion.capture.registered_tensors import is_array, tensors
from hfusion.core.errors import FusionError
from hfusion.core.membership import marks
from hfusion.core.python_values import (
    PLAIN,
    Compound,
    IdentityRef,
    KeyReader,
    Link,
    attributes,
    is_python_mapping,
    items,
    parts,
    read_attribute,
)

if TYPE_CHECKING:
    from hfusion.capture.python_reads import SizeUse

# The references of nn.RNNBase to its own parameters are renewed by its forward.
# Modules of an array refer to it by ``_array_position``.
_OWN = frozenset(nn.Module().__dict__) | {"_flat_weights", "_flat_weight_refs", "_array_position"}

# The code of a graph module is compared as that of its class.
_OF_GRAPH = _OWN | frozenset(vars(fx.GraphModule(nn.Module(), fx.Graph())))


def fingerprint(model: nn.Module) -> Any:
    """Return all that forward can read besides parameters and buffers, as a hashable value; equal means same graph.

    An attribute that cannot be compared by value counts as different in every model, which is always right: such
    models are captured one by one.

    Raises:
        FusionError: an attribute holds a submodule, or a tensor to be trained, that is not registered.
    """
    flags = tuple((path, module.training) for path, module in model.named_modules(remove_duplicate=False))
    return flags, modeless_fingerprint(model)


def modeless_fingerprint(model: nn.Module) -> Any:
    """Return the same as `fingerprint`, without train and eval modes."""
    arrays = tuple((path, m.fingerprint()) for path, m in model.named_modules() if is_array(m))
    classes = tuple(
        (path, type(m).__module__, type(m).__qualname__) for path, m in model.named_modules(remove_duplicate=False)
    )
    shapes = tuple((name, tensor.shape) for name, tensor in tensors(model))
    attributes = tuple(_attributes(model, _content).items())
    return attributes, tuple(_closures(model)), tuple(_hooks(model)), arrays, classes, shapes


def value_keys(names: Mapping[int, str], values: Sequence[Any]) -> list[Any]:
    """Return the keys of ``values``, attributes of a model, as `modeless_fingerprint` reads them.

    Args:
        names: the `registered_names` of the model.
    """
    reader = _AttributeReader(names, _content)
    return [reader.read(value, "") for value in values]


def registered_names(model: nn.Module) -> dict[int, str]:
    """Return the names of the model's own tensors and modules, by id."""
    named = {id(tensor): name for name, tensor in tensors(model)}
    return named | {id(module): path for path, module in model.named_modules()}


def _hooks(model: nn.Module) -> Iterator[Any]:
    """The hooks that are a part of forward, in a comparable form."""
    reader = _AttributeReader({}, _content)
    for path, module in model.named_modules():
        for hook in hooks_of(module):
            yield path, reader.read(options(hook), f"{path}.hook")


def _closures(model: nn.Module) -> Iterator[Any]:
    """Yield the closures of functions of the modules' classes, which differ where a class is made per model."""
    reader = _AttributeReader({}, _content)
    for path, module in model.named_modules(remove_duplicate=False):
        classes = type(module).__mro__[: type(module).__mro__.index(nn.Module)]
        own = [owner for owner in classes if not owner.__module__.startswith("torch.")]
        for kind, name, function in ((owner, *item) for owner in own for item in vars(owner).items()):
            if isinstance(function, types.FunctionType) and name != "__init__":
                cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
                values = [cell.cell_contents for free, cell in cells if free != "__class__"]
                if kind is not type(module) or "<locals>" not in kind.__qualname__:
                    values = [value for value in values if isinstance(value, PLAIN)]
                if values:
                    yield path, name, reader.read(values, f"{path}.{name}")


def contents(model: nn.Module) -> dict[str, Any]:
    """Return every Python attribute of ``model`` and its submodules by path, as hashable values."""
    return _attributes(model, lambda tensor, where: (*_digest(tensor), tensor.requires_grad))


def _attributes(model: nn.Module, read_tensor: Callable[[Tensor, str], Any]) -> dict[str, Any]:
    reader = _AttributeReader(registered_names(model), read_tensor)
    marked = {name: reader.read(value, name) for name, value in tensor_marks(model).items()}
    return marked | {
        f"{path}.{name}".strip("."): reader.read(value, f"{path}.{name}")
        for path, module in model.named_modules(remove_duplicate=False)
        for name, value in python_attributes(module)
    }


def python_attributes(module: nn.Module) -> Iterator[tuple[str, Any]]:
    """Yield the attributes that the author of a module set: no registered tensors, submodules or attributes of torch.

    Attributes that hooks recompute before each forward are left out, and so are all attributes of an array.
    """
    torch_names = (_OF_GRAPH if isinstance(module, fx.GraphModule) else _OWN) | recomputed(module)
    if is_array(module):
        return
    for name, value in list(vars(module).items()):
        if name not in torch_names and not is_intercepted(value):
            yield name, value


def tensor_marks(model: nn.Module) -> dict[str, Any]:
    """Return the attributes that users set on tensors of ``model``, keyed like ``0.weight.no_decay``."""
    return {f"{name}.{key}": value for name, tensor in tensors(model) for key, value in marks(tensor).items()}


def same_marks(models: Sequence[nn.Module]) -> frozenset[str]:
    """Return the names of `tensor_marks` that all ``models`` have, with equal values."""
    marked = [tensor_marks(model) for model in models]
    if not any(marked):
        return frozenset()
    read = [{key: value for key, value in contents(model).items() if key in marked[0]} for model in models]
    return frozenset(key for key in marked[0] if all(key in other and other[key] == read[0][key] for other in read))


# The attribute that marks copies of results, which have no history; a deep copy keeps the mark.
_RESULT = "hfusion_result"

# Classes that keep ``object``'s methods are copied by their attributes alone.
_REDUCE = ("__reduce_ex__", "__reduce__", "__getstate__")


@dataclass(frozen=True)
class RegisteredKey:
    """The key of one of the model's own tensors or modules."""

    name: str


class _AttributeReader(KeyReader):
    """Reads attributes by value. Raises FusionError for values that copies of the model would share with it.

    Args:
        registered: the names of the model's own tensors and modules, by id.
        read_tensor: returns the key of a tensor.
    """

    def __init__(self, registered: Mapping[int, str], read_tensor: Callable[[Tensor, str], Any]) -> None:
        super().__init__()
        self._registered, self._read_tensor = registered, read_tensor

    def leaf(self, value: Any, path: str) -> Any:
        if id(value) in self._registered and isinstance(value, Tensor | nn.Module):
            return RegisteredKey(self._registered[id(value)])
        if isinstance(value, type):
            return "class", value
        if isinstance(value, types.ModuleType):
            return "file", value.__name__
        if is_recipe(value):
            return "recipe", type(value).__qualname__
        if type(value) in (weakref.ref, *weakref.ProxyTypes):
            return self._weak(value, path)
        return None

    def _weak(self, value: Any, path: str) -> Any:
        held = value() if isinstance(value, weakref.ref) else value.__repr__.__self__
        if isinstance(held, Tensor | nn.Module):
            raise FusionError(
                f"attribute {path.strip('.')} is a weak reference to {type(held).__name__}, which a copy of the model "
                "does not follow; keep the object itself in a list"
            )
        return "weak", self.read(held, path)

    def read_new(self, value: Any, path: str) -> Any:
        if isinstance(value, Tensor):
            held = [(Link.ATTRIBUTE, name, part) for name, part in marks(value).items() if name != _RESULT]
            key = self._read_tensor(value, path)
            return self.compound(key, held, path) if held else key
        if isinstance(value, nn.Module):
            self._check_holds_registered(value, path)
            return self.compound((type(value), value.training), attributes(value), path)
        if isinstance(value, torch.Generator):
            return "generator", value.get_state().numpy().tobytes()
        if isinstance(value, fx.Graph):
            # It may remember a module whose forward it was traced from.
            return "graph", str(value)
        if isinstance(value, types.FunctionType):
            self._check_closed_over(value, path)
            return self.compound(("function", value.__code__), attributes(value), path)
        if isinstance(value, types.BuiltinFunctionType | torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            return "function", IdentityRef(value)
        if isinstance(value, types.MethodType):
            return self.compound(("method", value.__func__.__qualname__), attributes(value), path)
        if isinstance(value, list | tuple | deque):
            held = items(value)
            return self.compound((type(value).__qualname__, len(held)), held + attributes(value), path)
        if isinstance(value, dict | set | frozenset):
            return self.compound(type(value).__qualname__, parts(value), path)
        if is_python_mapping(value):
            # The attributes of other mappings than dicts are the mapping itself.
            return self.compound(type(value).__qualname__, items(value), path)
        return self._object(value, path)

    def _check_holds_registered(self, module: nn.Module, path: str) -> None:
        """Raise FusionError if an unregistered module has tensors that are not in registered modules."""
        for part in module.modules():
            held = (*part._parameters.values(), *part._buffers.values())
            if id(part) not in self._registered and any(tensor is not None for tensor in held):
                raise FusionError(
                    f"attribute {path.strip('.')} holds a module, {type(module).__name__}, that is not registered as "
                    "a submodule, or is held by a closure, which a copy of the model shares with the model; keep "
                    "submodules in nn.ModuleList or nn.ModuleDict, and closures over a model out of it"
                )

    def _check_closed_over(self, function: types.FunctionType, path: str) -> None:
        """Raise FusionError if a function holds a registered tensor: copies of the function would share it."""
        held = [part for link, _, part in attributes(function) if link is not Link.ATTRIBUTE]
        for leaf in pytree.tree_leaves(held):
            if isinstance(leaf, Tensor) and id(leaf) in self._registered:
                name = self._registered[id(leaf)]
                raise FusionError(
                    f"attribute {path.strip('.')} is a function that holds {name} in a closure or a "
                    "default, which a copy of the model shares with the model; let a method read it from self"
                )

    def _object(self, value: Any, path: str) -> Any:
        """Read an object by its attributes and its pickled state, or by identity if it has neither."""
        # First, since it makes the dict of a functools.partial, which is a part of what that is reduced to.
        held = attributes(value)
        reduced: Any = ()
        try:
            with warnings.catch_warnings(action="ignore"):
                reduced = value.__reduce_ex__(4)
        except Exception:
            if read_attribute(value, "__dict__", None) is None:
                return type(value).__qualname__, id(value)
        if any(getattr(type(value), name) is not getattr(object, name) for name in _REDUCE):
            state = [list(part) if isinstance(part, Iterator) else part for part in reduced[1:]]
            held += [(Link.ATTRIBUTE, f"__reduce__[{k}]", part) for k, part in enumerate(state)]
        return self.compound(type(value), held, path)


def results(model: nn.Module) -> dict[str, Tensor]:
    """Return the tensors in Python attributes of ``model`` that an earlier call left with a history, by their paths."""
    left: dict[str, Tensor] = {}

    def read(tensor: Tensor, where: str) -> None:
        if tensor.grad_fn is not None or hasattr(tensor, _RESULT):
            left[where.strip(".")] = tensor

    _attributes(model, read)
    return left


def copied_result(tensor: Tensor) -> Tensor:
    """Copy a tensor with history that forward left in an attribute, as a leaf that requires grad and is marked."""
    copied = tensor.detach().clone().requires_grad_()
    setattr(copied, _RESULT, True)
    return copied


def _content(value: Tensor, where: str) -> Any:
    if value.grad_fn is not None or hasattr(value, _RESULT):
        # Left by an earlier call: capture refuses a forward that reads it.
        return ("result", tuple(value.shape), value.dtype)
    if value.requires_grad:
        raise FusionError(
            f"attribute {where.strip('.')} is a tensor that requires grad but no parameter; make it an nn.Parameter"
        )
    return _digest(value)


def _digest(value: Tensor) -> Any:
    """Return shape, dtype and a hash of the values of a tensor."""
    if value.layout is not torch.strided or value.is_meta:
        return ("tensor", id(value))
    content = value.detach().cpu().resolve_conj().resolve_neg().flatten().clone().view(torch.uint8)
    digest = hashlib.sha256(content.numpy().tobytes()).hexdigest()
    return ("tensor", tuple(value.shape), value.dtype, digest)


# The Python attributes in which members differ: described for messages, and the numbers among them by name.

# Number of attributes that a message names, and of characters of a value that it shows.
_MOST, _LETTERS = 3, 60
# What a key names on the way to a number, with the text of a name in a message.
_STEPS = {Link.ATTRIBUTE: ".{}", Link.KEY: "[{}]", Link.INDEX: "[{}]"}
_ITEMS = {Link.ATTRIBUTE: "{}={}", Link.KEY: "{}: {}"}


def differing_attributes(models: Sequence[nn.Module], others: Sequence[nn.Module], names: tuple[str, str]) -> str:
    """Describe the attributes in which each of ``models`` differs from each of ``others``; empty if there are none.

    ``names``: what to call the first model of each group, such as ``("model 0", "model 2")``.
    """
    lines = [*_unlike_attributes(models, others, names), *_unlike_closures(models[0], others[0], names)]
    more = f" and {len(lines) - _MOST} more" if len(lines) > _MOST else ""
    return ", ".join(lines[:_MOST]) + more


def _unlike_attributes(
    models: Sequence[nn.Module], others: Sequence[nn.Module], names: tuple[str, str]
) -> Iterator[str]:
    of_models, of_others = ([contents(model) for model in group] for group in (models, others))
    values, other_values = of_models[0], of_others[0]
    differing = [
        key
        for key in {**values, **other_values}
        if {held.get(key) for held in of_models}.isdisjoint(held.get(key) for held in of_others)
    ]
    for key in sorted(differing, key=lambda key: isinstance(_number(values.get(key)), float)):
        if key not in values or key not in other_values:
            has, lacks = names if key in values else names[::-1]
            yield f"{has} has an attribute {key} that {lacks} lacks"
        else:
            path, a, b = next(_unlike(values[key], other_values[key]))
            where = key + "".join(_STEPS[link].format(name) for link, name in path)
            yield f"{where} is {_shown(a)} in {names[0]} and {_shown(b)} in {names[1]}"


def _unlike(key: Any, other: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[tuple[Any, ...], Any, Any]]:
    """Yield the innermost parts in which two keys of values differ, after the links and names that lead there."""
    if key == other:
        return
    if isinstance(key, Compound) and isinstance(other, Compound) and key.kind == other.kind:
        (places, parts), (other_places, other_parts) = (
            tuple(zip(*k.parts, strict=True)) or ((), ()) for k in (key, other)
        )
        if places == other_places and all(link in _STEPS for link, _ in places):
            for place, part, other_part in zip(places, parts, other_parts, strict=True):
                yield from _unlike(part, other_part, (*path, place))
            return
    yield path, key, other


def _number(key: Any) -> Any:
    """Return the number of which ``key`` is the key; None for the key of anything else."""
    if isinstance(key, Compound) or not (isinstance(key, tuple) and isinstance(key[0], type)):
        return None
    kind = next((kind for kind in (int, float, complex) if issubclass(key[0], kind)), None)
    return None if kind is None else kind(key[1])


def _shown(key: Any) -> str:
    """Return the value of ``key`` as a short text."""
    text = _text(key)
    return text if len(text) <= _LETTERS else f"{text[: _LETTERS - 3]}..."


def _text(key: Any) -> str:
    if isinstance(key, RegisteredKey):
        return key.name
    if isinstance(key, Compound) and isinstance(key.kind, tuple) and key.kind[0] == "function":
        return f"{key.kind[1].co_qualname} (line {key.kind[1].co_firstlineno})"
    if isinstance(key, Compound):
        kind = key.kind[0] if isinstance(key.kind, tuple) else key.kind
        held = ", ".join(_ITEMS.get(link, "{1}").format(name, _text(part)) for (link, name), part in key.parts)
        return f"{getattr(kind, '__qualname__', kind)}({held})"
    held = key[1].held if isinstance(key[1], IdentityRef) else key[1]
    if _number(key) is not None:
        return str(held)
    return repr(held) if isinstance(key[0], type) else getattr(held, "__name__", f"{key[0]} {held}")


def _unlike_closures(model: nn.Module, other: nn.Module, names: tuple[str, str]) -> Iterator[str]:
    """Describe functions of classes that were created per model, if their closures hold different values."""
    closures, other_closures = (
        {closure[:2]: closure for closure in modeless_fingerprint(side)[1]} for side in (model, other)
    )
    for (path, name), closure in closures.items():
        if other_closures.get((path, name)) != closure:
            yield f"{name} of module {path or '(root)'} is closed over other values in {names[0]} than in {names[1]}"


def numbers_meet_sizes(uses: Sequence[SizeUse], model: nn.Module, others: Sequence[nn.Module]) -> bool:
    """Return whether code may have combined a number in which ``others`` differ from ``model`` with a size that varies.

    Code of torch takes numbers as they are, that of the user may have computed them.
    """
    if not uses:
        return False
    numbers, names = set[Any](), set[str]()
    values, closed = contents(model), modeless_fingerprint(model)[1:]
    for other in others:
        other_values = contents(other)
        if values.keys() != other_values.keys() or modeless_fingerprint(other)[1:] != closed:
            return True
        unlike = [(key, *parts) for key in values for parts in _unlike(values[key], other_values[key])]
        for key, steps, a, b in unlike:
            if _number(a) is None or _number(b) is None:
                return True
            numbers.add(_number(a))
            # Items have the name of the attribute that they are in.
            names.add([key.rpartition(".")[2], *(step for link, step in steps if link is Link.ATTRIBUTE)][-1])
    return any(
        use.number in numbers
        if use.in_torch
        else not use.attribute or use.attribute in names or _is_computed(model, use.attribute)
        for use in uses
    )


def _is_computed(model: nn.Module, attribute: str) -> bool:
    """Return whether reading ``attribute`` of a module, or of an object in it, may run code, such as a property."""
    held = (part for module in model.modules() for part in (module, *vars(module).values()))
    kinds = {type(part) for part in held if not isinstance(part, Tensor)}
    own_getters = ("__getattr__" in vars(base) for kind in kinds for base in kind.__mro__ if base is not nn.Module)
    return any(hasattr(kind, attribute) for kind in kinds) or any(own_getters)
