"""Members that leave, join, and are written over, in an array that lives."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, TypeAlias, cast
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.utils.weak import WeakIdKeyDictionary

from hfusion.array.program_reuse import Kin
from hfusion.capture.attribute_values import modeless_fingerprint
from hfusion.capture.compare import Comparison, Sharing, check_alone, check_pair
from hfusion.capture.named import tensors
from hfusion.capture.skeleton import skeleton
from hfusion.compiler.compiler import Compiler
from hfusion.core.errors import FusionError
from hfusion.core.gradient_usage import absent_rows, mark_absent
from hfusion.core.memory import has_address
from hfusion.core.row_indices import check_once, copied, kept, moved_rows, rows_of

if TYPE_CHECKING:
    from hfusion.array.array_state import Array
    from hfusion.array.module import FusedModule

# Arrangements of members whose programs are kept; the oldest go first.
MAX_STATES = 32

Source: TypeAlias = int | nn.Module
"""Where a member comes from: the row that it had, or a model that joins."""


class Rows(nn.Module):
    """Operations of a fused module on its members."""

    def __len__(self) -> int:
        raise NotImplementedError

    @property
    def stacks(self) -> dict[str, Tensor]:
        """The array's own tensors by key, also where others stand in their places for a while."""
        return dict(cast("FusedModule", self)._real)

    @property
    def why_apart(self) -> str:
        """Why members are computed in groups, as they differ in modes or hooks; empty where they are not."""
        split = cast("FusedModule", self)._split()
        return "" if split is None else f"members are computed apart: {split.why}"

    def keep(self, rows: Sequence[int]) -> None:
        """Become the array of members ``rows``, in this order, in place; the others are gone, and so is their memory.

        Parameters stay the same objects, with gradients; each now holds ``[len(rows), *shape]`` in new memory. A member
        ``fused[i]`` is found at its new row; one that is gone keeps its last values. What was captured serves the
        members that are left. An optimizer of hf.optim follows by its own ``keep(rows)``; another optimizer that has
        state is to be made anew.

        Raises:
            ValueError: no rows, a row twice, or a row that is none.
        """
        rearrange(self, kept(rows, len(self)))

    def copy(self, src: int | Sequence[int], dst: int | Sequence[int]) -> None:
        """Write members ``src`` over members ``dst``, in place: parameters, buffers, gradients, and scalars.

        ``src`` is one member or as many as ``dst``; all are read before one is written. See ``keep`` for optimizers.

        Raises:
            ValueError: a row that is none, one that is written twice, or other numbers of ``src`` and ``dst``.
        """
        rearrange(self, copied(src, dst, len(self)))

    def append(self, models: Sequence[nn.Module]) -> None:
        """Let ``models`` join as the last members, in place; they stay as they are, their tensors are copied.

        A tensor that all members share must have the same values in them. They have no gradient until the next
        backward. Only what differs from all members in scalars, such as dropout p, is captured. See ``keep`` for
        parameters, views and optimizers.

        Raises:
            FusionError: no models, or models that cannot be fused with the members; the array is as it was.
        """
        rearrange(self, [*range(len(self)), *listed(models)])

    def put(self, rows: int | Sequence[int], models: nn.Module | Sequence[nn.Module]) -> None:
        """Let ``models`` take the places of the members ``rows``, in place; see ``append``.

        Raises:
            ValueError: a row that is none or comes twice, or another number of models.
            FusionError: models that cannot be fused with the members; the array is as it was.
        """
        rearrange(self, placed(rows, models, len(self)))


def listed(models: Sequence[nn.Module]) -> list[nn.Module]:
    """The models that join. Raises FusionError where there are none."""
    if isinstance(models, nn.Module) or not isinstance(models, Sequence) or len(models) == 0:
        raise FusionError(f"append takes a list of one model or more, not {type(models).__name__}: append([model])")
    return list(models)


def placed(rows: int | Sequence[int], models: nn.Module | Sequence[nn.Module], members: int) -> list[Source]:
    """The sources where ``models`` take the places of ``rows``. Raises ValueError."""
    targets = rows_of(rows, members)
    given = [models] if isinstance(models, nn.Module) else list(models)
    if len(given) != len(targets):
        raise ValueError(f"put of {len(given)} models into {len(targets)} rows: give one for each of {targets}")
    check_once(targets)
    sources: list[Source] = list(range(members))
    for row, model in zip(targets, given, strict=True):
        sources[row] = model
    return sources


def rearrange(array: Rows, sources: Sequence[Source]) -> None:
    """Let member b of the array be ``sources[b]``: tensors, scalars and programs.

    Raises:
        FusionError: a model that cannot be fused with the members; the array is as it was.
    """
    from hfusion.array.array_state import check_one_structure

    fused = cast("FusedModule", array)
    if list(sources) == list(range(len(fused))):
        return
    for name, tensor in tensors(fused):
        if not has_address(tensor) and not tensor.is_meta:
            raise FusionError(
                f"{name} is a {type(tensor).__name__}, whose rows cannot be moved here: keep, copy, append and put "
                "members before fully_shard or whatever replaced it"
            )
    check_one_structure(fused, "keep, copy, append or put")
    joining = _check_joining(fused, sources)
    members = len(fused)
    fused._split()
    fused._views.settle()
    kinds, partly = Kinds.of(fused), fused._array.comparison.partly
    for index, model in joining.items():
        kinds.add(index, model)
    after = _array(fused._array, sources, kinds, partly | _partly(joining))
    _move_tensors(fused, sources)
    enter(fused, kinds.contents, kinds.after(sources), after)
    fused._mark()
    fused._views.rearranged(fused, sources, members)


def _check_joining(fused: FusedModule, sources: Sequence[Source]) -> dict[int, nn.Module]:
    """The models that join, by their new rows, checked against the members. Raises FusionError."""
    joining = {index: source for index, source in enumerate(sources) if isinstance(source, nn.Module)}
    stranger = next((s for s in sources if not isinstance(s, int | nn.Module)), None)
    if stranger is not None:
        raise FusionError(f"a {type(stranger).__name__} cannot join an array; give torch.nn.Modules")
    if not joining:
        return joining
    first, own = fused._member(0), dict(tensors(fused))
    for index, model in joining.items():
        check_alone(index, model)
        check_pair(first, index, model)
        for name in fused._array.comparison.shared:
            _check_shared(name, own[name], index, model)
    return joining


def _check_shared(name: str, own: Tensor, index: int, model: nn.Module) -> None:
    given = dict(tensors(model))[name]
    if own.data_ptr() == given.data_ptr() and own.stride() == given.stride():
        return
    if not torch.equal(own.detach(), given.detach()):
        raise FusionError(
            f"{name} is one tensor for all members of the array, and model {index} has another value there; give it "
            f"the array's own, fused[0].{name}, or fuse an array anew in which members have their own"
        )


def _partly(joining: Mapping[int, nn.Module]) -> frozenset[str]:
    """The buffers that are one object in several models that join. Raises FusionError for what is trained."""
    sharing = Sharing()
    for place, model in enumerate(joining.values()):
        sharing.add(place, model)
    if len(joining) > 1:
        named = dict(next(iter(joining.values())).named_parameters(remove_duplicate=False))
        for name in sorted(sharing.keys):
            if name in named and named[name].requires_grad:
                raise FusionError(
                    f"{name} is one object in all models that join, and is trained; give each its own, by copy.deepcopy"
                )
    return sharing.partly | (sharing.keys if len(joining) > 1 else frozenset())


# What forward can read of a skeleton besides tensors; it never changes.
_contents: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def _content(skeleton: nn.Module) -> Any:
    if skeleton not in _contents:
        _contents[skeleton] = modeless_fingerprint(skeleton)
    return _contents[skeleton]


@dataclass
class Kinds:
    """The members by what they are but for their tensors: ``contents[b]``, and a skeleton of each content."""

    contents: list[Any]
    skeletons: dict[Any, nn.Module]
    joined: dict[int, Any]

    @staticmethod
    def of(fused: FusedModule) -> Kinds:
        array = fused._array
        found = [_content(each) for each in array.skeletons]
        return Kinds([found[v] for v in array.comparison.variants], dict(zip(found, array.skeletons, strict=True)), {})

    def add(self, index: int, model: nn.Module) -> None:
        """A model that joins as member ``index``."""
        content = modeless_fingerprint(model)
        if content not in self.skeletons:
            made = skeleton(index, model)
            # As of the others: a copy may differ from its model where an attribute has no value but an identity.
            content = _content(made)
            self.skeletons[content] = made
        self.joined[index] = content

    def after(self, sources: Sequence[Source]) -> tuple[Any, ...]:
        """The contents of the members to be."""
        return tuple(
            self.contents[source] if isinstance(source, int) else self.joined[index]
            for index, source in enumerate(sources)
        )


def _array(array: Array, sources: Sequence[Source], kinds: Kinds, partly: frozenset[str]) -> Array:
    contents = kinds.after(sources)
    once = list(dict.fromkeys(contents))
    comparison = Comparison(tuple(once.index(one) for one in contents), array.comparison.shared, partly)
    made = replace(
        array,
        members=len(sources),
        skeletons=tuple(kinds.skeletons[content] for content in once),
        comparison=comparison,
        origins=WeakIdKeyDictionary(),
    )
    places: dict[int, int] = {}
    for index, source in enumerate(sources):
        if isinstance(source, int):
            # Who is copied stays where it was; the copy is of no model.
            if source not in places or source == index:
                places[source] = index
        else:
            for name, parameter in source.named_parameters():
                made.origins.setdefault(parameter, (index, name))
    for parameter, (member, name) in array.origins.items():
        if member in places:
            made.origins[parameter] = (places[member], name)
    return made


@torch.no_grad()
def _move_tensors(fused: FusedModule, sources: Sequence[Source]) -> None:
    shared = fused._array.comparison.shared
    joining = {index: dict(tensors(source)) for index, source in enumerate(sources) if isinstance(source, nn.Module)}
    met: set[int] = set()
    for name, tensor in tensors(fused):
        if name in shared or id(tensor) in met:
            continue
        met.add(id(tensor))
        given = {index: own[name] for index, own in joining.items()}
        grad = tensor.grad
        tensor.grad = None
        resize(tensor, moved_rows(tensor.detach(), sources, given), len(sources) == len(fused))
        if grad is not None:
            tensor.grad = _moved_grad(grad, sources, joining)


def resize(tensor: Tensor, moved: Tensor, same: bool) -> None:
    """Let ``tensor`` hold ``moved``, in the same memory or, of another number of members, in other memory."""
    if not same:
        if tensor.requires_grad:
            # Autograd's node that accumulates into the tensor, which outputs that are still there hold, knows its
            # old shape; torch forgets it where the dtype changes (as of 2.11 to 2.13, `VariableHooks::set_data`).
            other = torch.float64 if tensor.dtype is torch.float32 else torch.float32
            tensor.data = torch.empty(0, dtype=other, device=tensor.device)
        tensor.data = moved
    # What autograd saved of it has changed.
    increment_version(tensor)


def _moved_grad(grad: Tensor, sources: Sequence[Source], joining: Mapping[int, Any]) -> Tensor:
    absent = absent_rows(grad)
    gone = torch.tensor([False if absent is None or not isinstance(s, int) else bool(absent[s]) for s in sources])
    gone[list(joining)] = True
    found = moved_rows(grad, sources, dict.fromkeys(joining))
    mark_absent(found, gone)
    return found


def enter(fused: FusedModule, before: Sequence[Any], after: Sequence[Any], array: Array) -> None:
    """The programs of members of contents ``after``: those of such members before, or new ones."""
    from hfusion.array.array_state import ArrayState

    states, after = fused._states, tuple(after)
    states.setdefault(tuple(before), ArrayState(fused._number, fused._array, fused._compiler))
    found = states.pop(after, None)
    fused._array = array
    if found is None:
        compiler = fused._new_compiler()
        compiler.opens = fused._compiler.opens
        compiler.kin = Kin(fused, compiler, after)
        found = ArrayState(next(fused._numbers), array, compiler)
    # The latest last.
    states[after] = ArrayState(found.number, array, found.compiler)
    while len(states) > MAX_STATES:
        _drop(fused, states.pop(next(iter(states))).compiler)
    fused._enter(states[after])
    fused._number_buffers.restart()


def written_keys(fused: FusedModule) -> frozenset[str]:
    """The keys of the tensors that forward writes to, in the programs that there are."""
    families = [family for compiler in fused._compilers() for family in compiler.families.values()]
    return frozenset(key for family in families for compiled in family for key in compiled.written)


def _drop(fused: FusedModule, compiler: Compiler) -> None:
    for compiled in (compiled for family in compiler.families.values() for compiled in family):
        fused._bound.pop(id(compiled), None)
        fused._checks.pop(id(compiled), None)
