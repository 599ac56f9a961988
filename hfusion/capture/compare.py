"""Prove that models have one shape, and tell in words where they do not."""

from __future__ import annotations

import hashlib
import pickle
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.nn.parameter import UninitializedBuffer, UninitializedParameter
from torch.nn.utils import parametrize
from torch.utils.weak import WeakIdKeyDictionary

from hfusion.capture.intercept import is_intercepted
from hfusion.core.errors import FusionError

# The references of nn.RNNBase to its own parameters are renewed by its forward.
_OWN = frozenset(nn.Module().__dict__) | {"_flat_weights", "_flat_weight_refs"}
# The code of a graph module is compared as that of its class.
_OF_GRAPH = _OWN | frozenset(vars(fx.GraphModule(nn.Module(), fx.Graph())))
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_TENSOR_HOOKS = ("_backward_hooks", "_post_accumulate_grad_hooks")


@dataclass(frozen=True)
class Comparison:
    """What comparing B models found.

    ``variants[b]`` numbers member b's set of scalars (dropout p, eps, ...): members of one variant share a capture.
    ``shared`` are the keys of the tensors that are one object in all models, ``partly`` those of buffers that are one
    object in some: an array keeps a row of those for each member, so none may write to them.
    """

    variants: tuple[int, ...]
    shared: frozenset[str]
    partly: frozenset[str] = frozenset()

    def of_members(self, chosen: Sequence[int]) -> tuple[Comparison, list[int]]:
        """The same of some of the members; and which of the variants are left, in their new order."""
        left = list(dict.fromkeys(self.variants[member] for member in chosen))
        variants = tuple(left.index(self.variants[member]) for member in chosen)
        return Comparison(variants, self.shared, self.partly), left


def compare(models: Sequence[nn.Module]) -> Comparison:
    """Check that ``models`` can be fused.

    Raises:
        FusionError: the first difference, or the first thing that fusion cannot honour, with the model's index, the
            module path, the values and the remedy.
    """
    _check_list(models)
    for index, model in enumerate(models):
        check_alone(index, model)
    for index, model in enumerate(models[1:], start=1):
        check_pair(models[0], index, model)
    prints: dict[Any, int] = {}
    variants = tuple(prints.setdefault(fingerprint(model), len(prints)) for model in models)
    sharing = Sharing()
    for index, model in enumerate(models):
        sharing.add(index, model)
    _check_memory(models)
    return Comparison(variants, sharing.keys, sharing.partly)


def tensors(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Parameters, then buffers, of ``model`` by key; a tensor with two names comes twice."""
    yield from model.named_parameters(remove_duplicate=False)
    yield from model.named_buffers(remove_duplicate=False)


def _check_list(models: Sequence[nn.Module]) -> None:
    if not isinstance(models, Sequence | nn.ModuleList) or isinstance(models, str):
        raise FusionError(f"fuse takes a list of modules, not {type(models).__name__}; write fuse([model, ...])")
    if len(models) == 0:
        raise FusionError("fuse got an empty list; give it at least one model")
    first: dict[int, int] = {}
    for index, model in enumerate(models):
        if not isinstance(model, nn.Module):
            raise FusionError(f"model {index} is {type(model).__name__}, not a torch.nn.Module")
        if id(model) in first:
            raise FusionError(
                f"models {first[id(model)]} and {index} are one object; give each member its own, by copy.deepcopy"
            )
        first[id(model)] = index


def check_pair(model: nn.Module, index: int, other: nn.Module) -> None:
    """Raise a FusionError where ``other``, model ``index``, has another structure than ``model``, model 0."""
    _check_modules(model, index, other)
    _check_tensors(model, index, other)


def check_alone(index: int, model: nn.Module) -> None:
    """Raise a FusionError where ``model`` holds what a fused array cannot honour."""
    where = f"model {index}"
    if isinstance(model, torch.jit.ScriptModule | nn.DataParallel | nn.parallel.DistributedDataParallel):
        raise FusionError(f"{where} is a {type(model).__name__}; fuse the plain module inside it")
    for name, tensor in tensors(model):
        if isinstance(tensor, UninitializedParameter | UninitializedBuffer):
            raise FusionError(f"{where}: {name} is not initialized; run the lazy module once before fusing")
    for path, module in model.named_modules():
        for hooks in _HOOKS:
            if getattr(module, hooks):
                hook = next(iter(getattr(module, hooks).values()))
                raise FusionError(
                    f"{where}, module {path or '(root)'} ({type(module).__name__}) has a hook in {hooks}: {hook}; "
                    "a fused array does not run members' hooks: remove it, or register it on the fused module"
                )
    for name, tensor in tensors(model):
        if tensor.layout is not torch.strided or tensor.is_meta:
            raise FusionError(f"{where}: {name} is {tensor.layout} on {tensor.device}; only dense tensors are fused")
        if any(getattr(tensor, hooks, None) for hooks in _TENSOR_HOOKS):
            raise FusionError(f"{where}: {name} has a tensor hook, which a fused array would not run; remove it")


def _check_modules(model: nn.Module, index: int, other: nn.Module) -> None:
    ours = dict(model.named_modules(remove_duplicate=False))
    theirs = dict(other.named_modules(remove_duplicate=False))
    for path, module in theirs.items():
        _same_class(ours.get(path), path, index, module)
    missing = [path for path in ours if path not in theirs]
    if missing:
        raise FusionError(f"model {index} has no module {missing[0]}, which model 0 has")


def _same_class(mine: nn.Module | None, path: str, index: int, module: nn.Module) -> None:
    where = path or "(root)"
    if mine is None:
        raise FusionError(f"model {index} has a module {where} ({type(module).__name__}) that model 0 lacks")
    if not _alike(_class(mine), _class(module)):
        names = (_class(mine).__name__, _class(module).__name__)
        other = f"{names[1]}, a class with other code," if names[0] == names[1] else names[1]
        raise FusionError(
            f"module {where} is {names[0]} in model 0 and {other} in model {index}; only models of one structure are "
            "fused"
        )
    if mine.training != module.training:
        raise FusionError(
            f"module {where} is in {_mode(mine)} mode in model 0 and in {_mode(module)} mode in model {index}; "
            "call train() or eval() on all models first"
        )


def _class(module: nn.Module) -> type[nn.Module]:
    if parametrize.is_parametrized(module):
        return parametrize.type_before_parametrizations(module)
    return type(module)


def _alike(mine: type, theirs: type) -> bool:
    """Whether two classes are one, or were made twice by the same code, as a graph module's is for every instance."""
    if mine is theirs:
        return True
    if (mine.__module__, mine.__qualname__) != (theirs.__module__, theirs.__qualname__):
        return False
    if len(mine.__bases__) != len(theirs.__bases__) or not all(map(_alike, mine.__bases__, theirs.__bases__)):
        return False
    ours, others = ({k: _code(v) for k, v in vars(c).items() if k not in _MADE} for c in (mine, theirs))
    return ours == others


# What a class statement puts into every class, and what `torch.fx` keeps there.
_MADE = frozenset({"__dict__", "__weakref__", "__doc__", "__module__", "__qualname__", "_fx_wrapped"})


def _code(value: Any) -> Any:
    """What a function does, without the values it was closed over; `fingerprint` holds those."""
    if isinstance(value, types.FunctionType):
        return value.__code__
    if isinstance(value, staticmethod | classmethod):
        return (type(value), _code(value.__func__))
    if isinstance(value, property):
        return tuple(map(_code, (value.fget, value.fset, value.fdel)))
    return value if isinstance(value, _PLAIN | float | complex | None) else type(value)


def _mode(module: nn.Module) -> str:
    return "train" if module.training else "eval"


def _check_tensors(model: nn.Module, index: int, other: nn.Module) -> None:
    ours, theirs = dict(tensors(model)), dict(tensors(other))
    for name in [*theirs, *ours]:
        if (name in ours) != (name in theirs):
            has, lacks = (0, index) if name in ours else (index, 0)
            raise FusionError(f"model {has} has a tensor {name} that model {lacks} lacks")
    for name, mine in ours.items():
        tensor = theirs[name]
        for what in ("shape", "dtype", "device", "requires_grad"):
            a, b = getattr(mine, what), getattr(tensor, what)
            if a != b:
                a, b = (tuple(a), tuple(b)) if what == "shape" else (a, b)
                raise FusionError(f"{name} has {what} {a} in model 0 and {b} in model {index}; make them equal")
    if ties(ours) != ties(theirs):
        raise FusionError(f"model 0 and model {index} tie different tensors: {ties(ours)} and {ties(theirs)}")


def ties(named: Mapping[str, Tensor]) -> dict[str, str]:
    """The names of tied tensors, each with the first name of the same tensor."""
    first: dict[int, str] = {}
    return {name: first[id(t)] for name, t in named.items() if first.setdefault(id(t), name) != name}


def _check_memory(models: Sequence[nn.Module]) -> None:
    """Raise a FusionError where a model's training would change another's parameters unseen."""
    places: dict[tuple[torch.device, int], tuple[int, str, Tensor]] = {}
    for index, model in enumerate(models):
        for name, parameter in model.named_parameters():
            if not parameter.requires_grad or not parameter.numel():
                continue
            other, what, met = places.setdefault((parameter.device, parameter.data_ptr()), (index, name, parameter))
            if met is not parameter and other != index:
                raise FusionError(
                    f"{what} of model {other} and {name} of model {index} lie in the same memory, so that training one "
                    "changes the other; give each model its own, by copy.deepcopy"
                )


class Sharing:
    """Which tensors are one object in several models; learnt model by model, of which none is kept alive.

    ``keys``: those of tensors that are one object in all; ``partly``: those of buffers that are one object in some.
    """

    def __init__(self) -> None:
        self.keys: frozenset[str] = frozenset()
        self.partly: frozenset[str] = frozenset()
        self._first: dict[str, Tensor] = {}
        self._owners = WeakIdKeyDictionary()

    def add(self, index: int, model: nn.Module) -> None:
        """Look at model ``index``; the first must have been the first.

        Raises:
            FusionError: a tensor that is trained is one object in some models but not in all.
        """
        named = dict(tensors(model))
        if index == 0:
            self._first = named
        same = frozenset(name for name, tensor in named.items() if index and self._first[name] is tensor)
        keys = same if index == 1 else self.keys & same
        met = frozenset(name for name, tensor in named.items() if self._owners.get(tensor, index) != index)
        some = ((self.keys | same | met) - keys) if index else frozenset()
        for name in sorted(some):
            if isinstance(named[name], nn.Parameter) and (named[name].requires_grad or self._first[name].requires_grad):
                raise FusionError(
                    f"{name} is one object in some models but not in all, and is trained; "
                    "share it among all members or among none"
                )
        self.keys = keys
        self.partly |= frozenset(name for name in some if not isinstance(named[name], nn.Parameter))
        for tensor in named.values():
            self._owners.setdefault(tensor, index)


def fingerprint(model: nn.Module) -> Any:
    """All that forward can read besides parameters and buffers, as a hashable value; equal means same graph.

    An attribute that cannot be compared by value counts as different in every model, which is always right: such
    models are captured one by one.

    Raises:
        FusionError: an attribute holds a submodule, or a tensor to be trained, that is not registered.
    """
    flags = tuple((path, module.training) for path, module in model.named_modules(remove_duplicate=False))
    return flags, modeless_fingerprint(model)


def modeless_fingerprint(model: nn.Module) -> Any:
    """As `fingerprint`, but for train and eval modes."""
    return tuple(_attributes(model, _content).items()), tuple(_closures(model))


def _closures(model: nn.Module) -> Iterator[Any]:
    """What the functions of classes that are made per instance were closed over, in a comparable form."""
    reader = _AttributeReader({}, _content, {})
    for path, module in model.named_modules(remove_duplicate=False):
        for name, function in vars(type(module)).items() if "<locals>" in type(module).__qualname__ else ():
            if isinstance(function, types.FunctionType) and name != "__init__":
                cells = zip(function.__code__.co_freevars, function.__closure__ or (), strict=True)
                values = [cell.cell_contents for free, cell in cells if free != "__class__"]
                if values:
                    yield path, name, reader.read(values, f"{path}.{name}")


def contents(model: nn.Module) -> dict[str, Any]:
    """Every Python attribute of ``model`` and its submodules by path, as a hashable value."""
    return _attributes(model, lambda tensor, where: (*_digest(tensor), tensor.requires_grad))


def _attributes(model: nn.Module, read_tensor: Callable[[Tensor, str], Any]) -> dict[str, Any]:
    known = {id(tensor): name for name, tensor in tensors(model)}
    known |= {id(module): path for path, module in model.named_modules()}
    reader = _AttributeReader(known, read_tensor, {})
    return {
        f"{path}.{name}".strip("."): reader.read(value, f"{path}.{name}")
        for path, module in model.named_modules(remove_duplicate=False)
        for name, value in vars(module).items()
        if name not in (_OF_GRAPH if isinstance(module, fx.GraphModule) else _OWN) and not is_intercepted(value)
    }


_PLAIN = str | bool | int | bytes | torch.dtype | torch.device | torch.Size | type


@dataclass(frozen=True)
class _AttributeReader:
    """Turns Python values into hashable ones. ``known`` are the model's own tensors and modules; ``met`` holds every
    object read so far, which keeps cycles short and ids from being used again."""

    known: Mapping[int, str]
    read_tensor: Callable[[Tensor, str], Any]
    met: dict[int, tuple[int, Any]]

    def read(self, value: Any, where: str) -> Any:
        if id(value) in self.known and isinstance(value, Tensor | nn.Module):
            return ("own", self.known[id(value)])
        if value is None or isinstance(value, _PLAIN):
            return (type(value).__name__, value)
        if isinstance(value, types.ModuleType):
            return ("file", value.__name__)
        if isinstance(value, float | complex):
            return ("number", repr(value))
        if type(value) in (weakref.ref, *weakref.ProxyTypes):
            return self._weak(value, where)
        if id(value) in self.met:
            return ("again", self.met[id(value)][0])
        self.met[id(value)] = (len(self.met), value)
        return self._read_new(value, where)

    def _weak(self, value: Any, where: str) -> Any:
        held = value() if isinstance(value, weakref.ref) else value.__repr__.__self__
        if isinstance(held, Tensor | nn.Module):
            raise FusionError(
                f"attribute {where.strip('.')} is a weak reference to a {type(held).__name__}, which a copy of the "
                "model does not follow; keep the object itself in a list"
            )
        return ("weak", self.read(held, where))

    def _read_new(self, value: Any, where: str) -> Any:
        if isinstance(value, Tensor):
            return self.read_tensor(value, where)
        if isinstance(value, nn.Module) and next(tensors(value), None) is None:
            return (type(value), value.training, self.read(vars(value), where))
        if isinstance(value, nn.Module):
            raise FusionError(
                f"attribute {where.strip('.')} holds a {type(value).__name__} that is not registered as a submodule, "
                "or is held by a closure, which a copy of the model shares with the model; keep submodules in "
                "nn.ModuleList or nn.ModuleDict, and closures over a model out of it"
            )
        if isinstance(value, torch.Generator):
            return ("generator", value.get_state().numpy().tobytes())
        if isinstance(value, Mapping):
            return ("mapping", tuple((repr(k), self.read(v, f"{where}.{k}")) for k, v in value.items()))
        if isinstance(value, list | tuple):
            parts = tuple(self.read(v, f"{where}.{k}") for k, v in enumerate(_items(value)))
            return (type(value).__name__, parts)
        if isinstance(value, set | frozenset):
            return ("set", frozenset(self.read(v, where) for v in value))
        if isinstance(value, types.FunctionType):
            cells = [cell.cell_contents for cell in value.__closure__ or ()]
            return (
                "function",
                value.__code__,
                self.read([cells, value.__defaults__, value.__kwdefaults__], where),
            )
        if isinstance(value, types.BuiltinFunctionType | torch._ops.OpOverload | torch._ops.OpOverloadPacket):
            return ("function", id(value))
        if isinstance(value, types.MethodType):
            return ("method", value.__func__.__qualname__, self.read(value.__self__, where))
        return self._object(value, where)

    def _object(self, value: Any, where: str) -> Any:
        """An object by its attributes and by what pickling would keep; by identity where it has neither."""
        parts = [vars(value)] if hasattr(value, "__dict__") else []
        try:
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                reduced = value.__reduce_ex__(4)
        except (TypeError, AttributeError, ValueError, RuntimeError, pickle.PicklingError):
            reduced = ()
        parts += [list(part) if isinstance(part, Iterator) else part for part in reduced[1:]]
        return (type(value).__qualname__, self.read(parts, where) if parts else id(value))


def results(model: nn.Module) -> list[Tensor]:
    """The tensors in Python attributes that a computation with gradients left there."""
    found: list[Tensor] = []
    _attributes(model, lambda tensor, where: found.append(tensor) if tensor.grad_fn is not None else None)
    return found


def _items(value: list[Any] | tuple[Any, ...]) -> Iterator[Any]:
    """As list and tuple iterate, which classes that derive from them may forbid."""
    return list.__iter__(value) if isinstance(value, list) else tuple.__iter__(value)


def _content(value: Tensor, where: str) -> Any:
    if value.grad_fn is not None:
        # Left by an earlier call: capture refuses a forward that reads it.
        return ("result", tuple(value.shape), value.dtype)
    if value.requires_grad:
        raise FusionError(
            f"attribute {where.strip('.')} is a tensor that requires grad but no parameter; make it an nn.Parameter"
        )
    return _digest(value)


def _digest(value: Tensor) -> Any:
    """A tensor by its value."""
    if value.layout is not torch.strided or value.is_meta:
        return ("tensor", id(value))
    content = value.detach().cpu().resolve_conj().resolve_neg().flatten().clone().view(torch.uint8)
    digest = hashlib.sha256(content.numpy().tobytes()).hexdigest()
    return ("tensor", tuple(value.shape), value.dtype, digest)
