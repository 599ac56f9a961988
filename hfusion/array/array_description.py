"""Facts of a fused module about its members."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
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
        """Equal for models of one structure."""
        return tuple(self.modules.items()), tuple(self.shapes.items())


# A skeleton never changes.
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
    """Facts of a fused module about its members.

    ``skeletons[v]`` is a model of variant v without tensors; ``origins`` remembers whose parameters were fused.
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
        return tuple(structure_of(each).shapes for each in self.skeletons)

    @cached_property
    def own_modules(self) -> tuple[dict[str, tuple[str, str]], ...]:
        """The classes of the modules of each variant, by path: the Python module and the name in it."""
        return tuple(structure_of(each).modules for each in self.skeletons)

    @cached_property
    def row_shapes(self) -> dict[str, torch.Size]:
        """The shape of a row of each stack that members' own tensors do not all fill."""
        return row_shapes(self.own_shapes)

    @cached_property
    def structures(self) -> tuple[Any, ...]:
        """A key of the modules and shapes of each variant: equal for those that differ in attributes only."""
        return tuple(structure_of(each).key for each in self.skeletons)

    @cached_property
    def has_variants(self) -> bool:
        """Whether members differ in submodules."""
        return bool(self.row_shapes) or any(own != self.own_modules[0] for own in self.own_modules)

    def shapes_of(self, name: str) -> tuple[torch.Size | None, ...]:
        """The shape of tensor ``name`` in each member, None where it has none; empty where all fill their rows."""
        if name not in self.row_shapes:
            return ()
        return tuple(self.own_shapes[variant].get(name) for variant in self.comparison.variants)

    def __getstate__(self) -> dict[str, Any]:
        cached = ("own_shapes", "own_modules", "row_shapes", "structures", "has_variants")
        return {**{key: value for key, value in vars(self).items() if key not in cached}, "origins": None}

    def __deepcopy__(self, memo: dict[int, Any]) -> Array:
        skeletons = tuple(module_copy(skeleton, memo) for skeleton in self.skeletons)
        return replace(self, skeletons=skeletons, origins=WeakIdKeyDictionary())

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state, origins=WeakIdKeyDictionary())


@dataclass(frozen=True, eq=False)
class ArrayState:
    """The members with such Python attributes as a train or eval of their own has left, and the programs for them."""

    number: int
    array: Array
    compiler: Compiler


def renewed(array: Array, found: Sequence[Any], views: Sequence[nn.Module]) -> Array:
    """``array`` of members that have changed; ``found[b]`` is what forward can read of member b besides tensors."""
    prints: dict[Any, int] = {}
    variants = tuple(prints.setdefault(content, len(prints)) for content in found)
    skeletons = tuple(skeleton(variants.index(v), views[variants.index(v)]) for v in range(len(prints)))
    return replace(array, skeletons=skeletons, comparison=replace(array.comparison, variants=variants))


def mark_tensors(array: Array, named: Mapping[str, Tensor]) -> None:
    """Mark the array's tensors as its own, and give parameters what users have set on those of the members."""
    padded: frozenset[str] = getattr(array.skeletons[0], "padded", frozenset())
    for name, tensor in named.items():
        shapes, stacked = array.shapes_of(name), name not in array.comparison.shared
        mark(tensor, Membership(name, array.members, stacked, bool(shapes) or name in padded, shapes=shapes))
    same = same_marks(array.skeletons)
    variants = [dict(skeleton.named_parameters()) for skeleton in array.skeletons]
    for name in dict.fromkeys(name for parameters in variants for name in parameters):
        mark_stack(named[name], name, [parameters[name] for parameters in variants if name in parameters], same)


def check_one_structure(fused: Any, what: str) -> None:
    """Raise a FusionError where members differ in submodules, with which ``what`` does not go together."""
    array: Array = fused._array
    if not array.has_variants:
        return
    first = array.own_modules[0]
    pairs = [(number, path) for number, own in enumerate(array.own_modules) for path in [*first, *own]]
    apart = next((pair for pair in pairs if first.get(pair[1]) != array.own_modules[pair[0]].get(pair[1])), None)
    if apart is None:
        key, shapes = next((key, array.shapes_of(key)) for key in array.row_shapes)
        differs = f"{key} has the shapes {[None if shape is None else tuple(shape) for shape in shapes]}"
    else:
        number, path = apart
        member = array.comparison.variants.index(number)
        kinds = _named_apart(first.get(path), array.own_modules[number].get(path))
        differs = f"{path} is {kinds[0]} in member 0 and {kinds[1]} in member {member}"
    raise FusionError(
        f"members of a fused {fused._original} differ in submodules ({differs}), with which {what} cannot be "
        "combined; give the models to hf.Population, which makes an array of those of each structure"
    )


def _named_apart(*classes: tuple[str, str] | None) -> list[str]:
    """Names of classes, with their Python modules where these are all that differs."""
    alike = len({None if each is None else each[1] for each in classes}) == 1
    return ["missing" if each is None else ".".join(each) if alike else each[1] for each in classes]


def row_copy(tensor: Tensor, index: int | None, shape: Sequence[int] | None = None) -> Tensor:
    if index is not None:
        check_whole_stack(tensor, TAKE_BEFORE)
    row = tensor.detach() if index is None else tensor.detach()[index]
    row = (row if shape is None else leading(row, shape)).clone(memory_format=torch.contiguous_format)
    return nn.Parameter(row, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else row


def member_rows(
    array: Array, index: int, stacks: Mapping[str, Tensor], shared: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Copies of the tensors of member ``index``, by key; those of ``shared`` as they are."""
    own = array.own_shapes[array.comparison.variants[index]]
    return {name: shared[name] if name in shared else row_copy(stacks[name], index, own[name]) for name in own}


def empty_stack(tensor: Tensor, members: int, shape: Sequence[int] | None = None) -> Tensor:
    """Room ``[B, *shape]`` for tensors like ``tensor``, contiguous; a parameter if it is one.

    ``shape``: of a row that members' own do not all fill, which begins as zeros; by default that of ``tensor``.
    """
    room = torch.empty if shape is None else torch.zeros
    stack = room(members, *(tensor.shape if shape is None else shape), dtype=tensor.dtype, device=tensor.device)
    return nn.Parameter(stack, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else stack


def stack_of(rows: Sequence[Tensor | None], like: Tensor, shape: Sequence[int] | None) -> Tensor:
    """Return the stack of ``rows``, None for a member without one. ``like``, ``shape``: as of `empty_stack`."""
    stack = empty_stack(like, len(rows), shape)
    for place, row in zip(stack.detach(), rows, strict=True):
        if row is not None:
            leading(place, row.shape).copy_(row.detach())
    return stack


def partly_written(name: str) -> FusionError:
    """Of a program that writes to a buffer that only some members share, or another tensor."""
    return FusionError(
        f"forward writes into the buffer {name}, which some models share but not all, or which lies in the memory of "
        "another tensor of the model; give each its own, by copy.deepcopy or clone()"
    )
