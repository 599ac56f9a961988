"""Description of an array: the structure of its members, and how their tensors are stacked."""

from __future__ import annotations

import pickle
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from hfusion.capture.attribute_fingerprint import same_marks
from hfusion.capture.compare_models import Comparison
from hfusion.capture.registered_tensors import tensors
from hfusion.capture.skeleton import skeleton
from hfusion.capture.variant_structures import row_shapes
from hfusion.compiler.compiler import Compiler
from hfusion.core.copies import module_copy
from hfusion.core.errors import FusionError
from hfusion.core.membership import TAKE_BEFORE, Membership, check_whole_stack, mark
from hfusion.core.parameter_attributes import mark_stack
from hfusion.core.row_indices import leading


@dataclass(frozen=True, eq=False)
class Structure:
    """The structure of a model.

    Attributes:
        modules: the class of each module, by path: the Python module and the name in it.
        shapes: the shape of each tensor, by key.
    """

    modules: dict[str, tuple[str, str]]
    shapes: dict[str, torch.Size]

    @cached_property
    def key(self) -> Any:
        """A hashable key that is equal for models of the same structure."""
        return tuple(self.modules.items()), tuple(self.shapes.items())


# Never invalidated, as a skeleton never changes.
_structures: WeakKeyDictionary[nn.Module, Structure] = WeakKeyDictionary()


def structure_of(skeleton: nn.Module) -> Structure:
    """Return the structure of a skeleton."""
    if skeleton not in _structures:
        named = skeleton.named_modules(remove_duplicate=False)
        modules = {path: (type(module).__module__, type(module).__qualname__) for path, module in named}
        _structures[skeleton] = Structure(modules, {name: tensor.shape for name, tensor in tensors(skeleton)})
    return _structures[skeleton]


@dataclass(frozen=True)
class Array:
    """Description of the members of a fused module.

    ``skeletons[v]`` is a model of variant v without tensors; ``origins`` maps original parameters to member and key.
    """

    members: int
    skeletons: tuple[nn.Module, ...]
    comparison: Comparison
    verify: bool
    tune: bool = False
    origins: WeakIdKeyDictionary = field(default_factory=WeakIdKeyDictionary)

    @cached_property
    def own_shapes(self) -> tuple[dict[str, torch.Size], ...]:
        """The shapes of the tensors of each variant, by key."""
        return tuple(structure_of(skeleton).shapes for skeleton in self.skeletons)

    @cached_property
    def own_modules(self) -> tuple[dict[str, tuple[str, str]], ...]:
        """The classes of the modules of each variant, by path: the Python module and the name in it."""
        return tuple(structure_of(skeleton).modules for skeleton in self.skeletons)

    @cached_property
    def row_shapes(self) -> dict[str, torch.Size]:
        """The row shape of each stack in which some members' tensors are smaller than a row, or missing."""
        return row_shapes(self.own_shapes)

    @cached_property
    def structures(self) -> tuple[Any, ...]:
        """For each variant, a key of its modules and shapes, equal for variants that differ in attributes only."""
        return tuple(structure_of(skeleton).key for skeleton in self.skeletons)

    @cached_property
    def has_variants(self) -> bool:
        """True if members differ in submodules."""
        return bool(self.row_shapes) or any(modules != self.own_modules[0] for modules in self.own_modules)

    def shapes_of(self, name: str) -> tuple[torch.Size | None, ...]:
        """Return the shape of tensor ``name`` in each member (None: missing), or () if every member fills its row."""
        if name not in self.row_shapes:
            return ()
        return tuple(self.own_shapes[variant].get(name) for variant in self.comparison.variants)

    def check_stacks(self, stacks: Mapping[str, Tensor]) -> None:
        """Raise FusionError if a stack was given a row shape that is not its members', for example by ``.data``."""
        shapes = {name: shape for own in self.own_shapes for name, shape in own.items()} | self.row_shapes
        for name, stack in stacks.items():
            is_stacked = name in shapes and name not in self.comparison.shared
            if is_stacked and not is_lazy(stack) and stack.shape[1:] != shapes[name]:
                raise FusionError(
                    f"The stack of {name} has the shape {tuple(stack.shape)}, but members have {tuple(shapes[name])} "
                    "each: it was given other memory, for example by .data. Unfuse the array, resize the members, and "
                    "fuse them again."
                )

    def __getstate__(self) -> dict[str, Any]:
        for model in self.skeletons:
            _check_pickle(model)
        cached = ("own_shapes", "own_modules", "row_shapes", "structures", "has_variants")
        return {**{key: value for key, value in vars(self).items() if key not in cached}, "origins": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Array:
        skeletons = tuple(module_copy(skeleton, memo) for skeleton in self.skeletons)
        return replace(self, skeletons=skeletons, origins=WeakIdKeyDictionary())

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, origins=WeakIdKeyDictionary())


_PICKLING = ("__reduce_ex__", "__reduce__", "__getstate__", "__setstate__")


def _check_pickle(model: nn.Module) -> None:
    """Raise FusionError if the classes of a skeleton pickle themselves by values, which its tensors do not have."""
    parts = model.modules()
    own = {type(p) for p in parts if any(getattr(type(p), n) is not getattr(nn.Module, n) for n in _PICKLING)}
    if not own:
        return
    try:
        pickled = pickle.dumps(model)
    except Exception:
        # The pickler in use may know more, as cloudpickle does of local classes. If not, it raises the same error.
        return
    try:
        pickle.loads(pickled)
    except Exception as error:
        names = ", ".join(sorted(cls.__name__ for cls in own))
        raise FusionError(
            f"This array cannot be pickled: the pickling of {names} reads values of tensors, which the array keeps in "
            "stacks. Pickle the modules of unfuse(), or use hf.save."
        ) from error


@dataclass(frozen=True, eq=False)
class ArrayState:
    """A state of the members (their variants and Python attributes), with the programs compiled for it."""

    number: int
    array: Array
    compiler: Compiler


def renewed(array: Array, contents: Sequence[Any], views: Sequence[nn.Module]) -> Array:
    """Return ``array`` for changed members. ``contents[b]``: all that forward can read of member b besides tensors."""
    prints: dict[Any, int] = {}
    variants = tuple(prints.setdefault(content, len(prints)) for content in contents)
    skeletons = tuple(skeleton(variants.index(v), views[variants.index(v)]) for v in range(len(prints)))
    return replace(array, skeletons=skeletons, comparison=replace(array.comparison, variants=variants))


def mark_tensors(array: Array, named: Mapping[str, Tensor]) -> None:
    """Mark the array's tensors as its own, and copy classes and attributes of members' parameters to the stacks."""
    padded: frozenset[str] = getattr(array.skeletons[0], "padded", frozenset())
    for name, tensor in named.items():
        shapes, stacked = array.shapes_of(name), name not in array.comparison.shared
        mark(tensor, Membership(name, array.members, stacked, bool(shapes) or name in padded, shapes=shapes))
    common = same_marks(array.skeletons)
    variants = [dict(tensors(skeleton)) for skeleton in array.skeletons]
    for name in dict.fromkeys(name for held in variants for name in held):
        mark_stack(named[name], name, [held[name] for held in variants if name in held], common)


def check_one_structure(fused: Any, feature: str) -> None:
    """Raise a FusionError if members differ in submodules, which ``feature`` does not support."""
    array: Array = fused._array
    if not array.has_variants:
        return
    first = array.own_modules[0]
    pairs = [(number, path) for number, modules in enumerate(array.own_modules) for path in [*first, *modules]]
    difference = next((pair for pair in pairs if first.get(pair[1]) != array.own_modules[pair[0]].get(pair[1])), None)
    if difference is None:
        key, shapes = next((key, array.shapes_of(key)) for key in array.row_shapes)
        differs = f"{key} has the shapes {[None if shape is None else tuple(shape) for shape in shapes]}"
    else:
        number, path = difference
        member = array.comparison.variants.index(number)
        kinds = _named_apart(first.get(path), array.own_modules[number].get(path))
        differs = f"{path} is {kinds[0]} in member 0 and {kinds[1]} in member {member}"
    raise FusionError(
        f"members of a fused {fused._original} differ in submodules ({differs}), with which {feature} cannot be "
        "combined; give the models to hf.Population, which makes an array of those of each structure"
    )


def _named_apart(*classes: tuple[str, str] | None) -> list[str]:
    """Return the names of classes, with their Python modules if the names alone are equal."""
    alike = len({None if kind is None else kind[1] for kind in classes}) == 1
    return ["missing" if kind is None else ".".join(kind) if alike else kind[1] for kind in classes]


def row_copy(tensor: Tensor, index: int | None, shape: Sequence[int] | None = None) -> Tensor:
    if index is not None:
        check_whole_stack(tensor, TAKE_BEFORE)
    row = tensor.detach() if index is None else tensor.detach()[index]
    row = (row if shape is None else leading(row, shape)).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(row, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else row


def member_rows(
    array: Array, index: int, stacks: Mapping[str, Tensor], shared: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Return copies of the tensors of member ``index``, by key; tensors in ``shared`` are not copied."""
    shapes = array.own_shapes[array.comparison.variants[index]]
    array.check_stacks(stacks)
    return {name: shared[name] if name in shared else row_copy(stacks[name], index, shapes[name]) for name in shapes}


def empty_stack(tensor: Tensor, members: int, shape: Sequence[int] | None = None) -> Tensor:
    """Return a contiguous stack ``[members, *shape]`` for tensors like ``tensor``; a parameter if ``tensor`` is one.

    ``shape``: the row shape if some members' tensors are smaller; the stack is then zero. Default: that of ``tensor``.
    """
    room = torch.empty if shape is None else torch.zeros
    stack = room(members, *(tensor.shape if shape is None else shape), dtype=tensor.dtype, device=tensor.device)
    return nn.Parameter(stack, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else stack


def stack_of(rows: Sequence[Tensor | None], like: Tensor, shape: Sequence[int] | None) -> Tensor:
    """Stack ``rows``, which hold None for a member without the tensor. ``like``, ``shape``: see `empty_stack`."""
    stack = empty_stack(like, len(rows), shape)
    for target, row in zip(stack.detach(), rows, strict=True):
        if row is not None:
            leading(target, row.shape).copy_(row.detach())
    return stack


def partly_written(name: str) -> FusionError:
    """Return the error for a write to a buffer that only some members share, or that aliases another tensor."""
    return FusionError(
        f"forward writes into the buffer {name}, which some models share but not all, or which lies in the memory of "
        "another tensor of the model; give each its own, by copy.deepcopy or clone()"
    )
