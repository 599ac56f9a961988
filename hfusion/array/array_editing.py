"""The members of an array without their tensors, and how members are removed, added and overwritten."""

from __future__ import annotations

import itertools
from collections import OrderedDict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from typing import TYPE_CHECKING, Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.nn.parameter import is_lazy
from torch.utils.weak import WeakIdKeyDictionary

from hfusion.capture.attribute_fingerprint import modeless_fingerprint, numbers_meet_sizes, same_marks
from hfusion.capture.capture_member import VaryingSizes
from hfusion.capture.compare_models import Comparison, Sharing, check_alone, check_pair
from hfusion.capture.registered_tensors import tensors
from hfusion.capture.skeleton import skeleton
from hfusion.compiler.arguments import Arguments, is_tensors
from hfusion.compiler.compiled_program import UNKNOWN, ArraySpec, Compiled, of_rows
from hfusion.compiler.compiler import Compiler
from hfusion.compiler.fill_scalars import OperatorTrace, changes_between, may_be_sizes, trace_operators
from hfusion.core.errors import FusionError
from hfusion.core.fingerprint import read_model, tensors_of
from hfusion.core.gradient_usage import absent_rows, mark_absent
from hfusion.core.member_table import moved_rows
from hfusion.core.membership import TAKE_BEFORE, Membership, check_whole_stack, mark, mark_stack
from hfusion.core.memory import has_address, module_copy
from hfusion.device.backend import active_autocast
from hfusion.passes.align import Unexplained, differ_in
from hfusion.torch_private.export_state import uncompiled

if TYPE_CHECKING:
    from hfusion.array.module import FusedModule


# Maximum number of arrangements of members whose programs are cached; the least recently used is dropped first.
MAX_STATES = 32
# The numbers of states; 0 is that of a new array.
_numbers = itertools.count(1)

Source: TypeAlias = int | nn.Module
"""The source of a member: its former row, or a model that joins the array."""


def rearrange(fused: FusedModule, sources: Sequence[Source]) -> None:
    """Rearrange the array so that member b becomes ``sources[b]``, with its tensors, scalars and programs.

    Raises:
        FusionError: a model that cannot be fused with the members; the array is as it was.
    """
    sources = [uncompiled(source) for source in sources]
    if sources == list(range(len(fused))):
        return
    check_movable(fused, "Keep, copy, append and put members")
    joining = check_joining(fused, sources)
    fused._split()
    before, added = fused._array, dict[Any, nn.Module]()
    held, contents = before.contents, list[Any]()
    for index, source in enumerate(sources):
        if isinstance(source, int):
            contents.append(held[source])
            continue
        content = modeless_fingerprint(source)
        if content not in held and content not in added:
            # Fingerprint the skeleton, as for other members: attributes compared by identity differ in a copy.
            new_skeleton = skeleton(index, source)
            content = _content(new_skeleton)
            added[content] = new_skeleton
        contents.append(content)
    after = before.of_contents(contents, added)
    comparison = replace(after.comparison, partly=after.comparison.partly | partly_shared(joining))
    after = replace(after, comparison=comparison)
    fused._origins = _moved_origins(fused._origins, sources)
    move_stacks(fused, sources, after)
    enter(fused, contents, after)
    fused._mark()
    fused._views.rearranged(fused, sources)


def check_movable(fused: FusedModule, remedy: str) -> None:
    """Raise a FusionError if rows of a tensor cannot be moved; ``remedy``: what to do before it was replaced."""
    for name, tensor in tensors(fused):
        if not has_address(tensor) and not tensor.is_meta:
            raise FusionError(
                f"{name} must be a tensor whose rows can be moved, got {type(tensor).__name__}. {remedy} before "
                "fully_shard or whatever replaced it."
            )


# The fingerprints of skeletons, which never change.
_contents: WeakKeyDictionary[nn.Module, Any] = WeakKeyDictionary()


def _content(skeleton: nn.Module) -> Any:
    if skeleton not in _contents:
        _contents[skeleton] = modeless_fingerprint(skeleton)
    return _contents[skeleton]


def find_new_rows(sources: Sequence[Source]) -> dict[int, int]:
    """Return the new rows of the members that remain: a copied member keeps its row if it remains there."""
    new_rows: dict[int, int] = {}
    for index, source in enumerate(sources):
        if isinstance(source, int) and (source not in new_rows or source == index):
            new_rows[source] = index
    return new_rows


def _moved_origins(before: WeakIdKeyDictionary, sources: Sequence[Source]) -> WeakIdKeyDictionary:
    """Return the member and key of original parameters, ``before``, after a rearrangement to ``sources``."""
    origins, new_rows = WeakIdKeyDictionary(), find_new_rows(sources)
    for index, source in enumerate(sources):
        for name, parameter in source.named_parameters() if isinstance(source, nn.Module) else ():
            origins.setdefault(parameter, (index, name))
    for parameter, (member, name) in before.items():
        if member in new_rows:
            origins[parameter] = (new_rows[member], name)
    return origins


def enter(fused: FusedModule, contents: Sequence[Any], array: Array) -> None:
    """Switch to ``array``, with the compiler cached for members with fingerprints ``contents``, or a new one."""
    states, after = fused._states, tuple(contents)
    states.setdefault(fused._array.contents, ArrayState(fused._number, fused._array, fused._compiler))
    state = states.pop(after, None)
    fused._array = array
    if state is None:
        compiler = fused._new_compiler()
        compiler.opens = fused._compiler.opens
        compiler.kin = Kin(fused, compiler, after)
        state = ArrayState(next(_numbers), array, compiler)
    # The most recently used state comes last.
    states[after] = ArrayState(state.number, array, state.compiler)
    while len(states) > MAX_STATES:
        del states[next(iter(states))]
    fused._enter(states[after])


def written_keys(fused: FusedModule) -> frozenset[str]:
    """Return the keys of the tensors that forward writes to in the programs compiled so far."""
    families = [family for compiler in fused._compilers() for family in compiler.families.values()]
    return frozenset(key for family in families for compiled in family for key in compiled.written)


def changed_tensors(fused: FusedModule) -> dict[str, Tensor]:
    """Return the tensors of an array that training may change: frozen parameters only if forward writes to them.

    A tied tensor is under each of its keys.
    """
    written = written_keys(fused)

    def is_frozen(name: str, tensor: Tensor) -> bool:
        return isinstance(tensor, nn.Parameter) and not tensor.requires_grad and name not in written

    return {name: tensor for name, tensor in tensors(fused) if not is_frozen(name, tensor)}


# Rearrange the stacks of an array whose members leave, join or are overwritten.


@torch.no_grad()
def move_stacks(fused: FusedModule, sources: Sequence[Source], after: Array) -> None:
    """Rearrange each stack of an array to rows ``sources``, as the array ``after`` describes."""
    joining = {index: dict(tensors(source)) for index, source in enumerate(sources) if isinstance(source, nn.Module)}
    visited = set[int]()
    for name, stack in tensors(fused):
        if name in after.comparison.shared or name not in after.shapes or id(stack) in visited:
            continue
        visited.add(id(stack))
        grad, old_shape = stack.grad, stack.shape
        stack.grad = None
        moved = moved_rows(stack.detach(), sources, {index: named[name] for index, named in joining.items()})
        resize(stack, moved, moved.shape == old_shape)
        if grad is not None:
            absent = absent_rows(grad)
            stays = [isinstance(s, int) and (absent is None or not absent[s]) for s in sources]
            stack.grad = moved_rows(grad, sources, dict.fromkeys(joining))
            mark_absent(stack.grad, ~torch.tensor(stays, device="cpu"))


def resize(tensor: Tensor, moved: Tensor, in_place: bool) -> None:
    """Replace the data of ``tensor`` by ``moved``, unless ``in_place``: then it has been written in place."""
    if not in_place:
        # Autograd's node that accumulates into the tensor, which outputs that are still there hold, knows its old
        # shape, also while the tensor is frozen; torch forgets it where the dtype changes (as of 2.11 to 2.13,
        # `VariableHooks::set_data`).
        other_dtype = torch.float64 if tensor.dtype is torch.float32 else torch.float32
        tensor.data = torch.empty(0, dtype=other_dtype, device=tensor.device)
        tensor.data = moved
    # Values that autograd saved of the tensor have changed.
    increment_version(tensor)


# Models that join an array: what they must have in common with its members.


def check_joining(fused: FusedModule, sources: Sequence[Source]) -> dict[int, nn.Module]:
    """Check joining models against the members, and return them by their new rows. Raises FusionError."""
    joining = {index: source for index, source in enumerate(sources) if isinstance(source, nn.Module)}
    stranger = next((s for s in sources if not isinstance(s, int | nn.Module)), None)
    if stranger is not None:
        raise FusionError(f"only torch.nn.Modules can join an array, got {type(stranger).__name__}")
    for index, model in joining.items():
        check_alone(index, model)
    stacks = dict(tensors(fused))
    for index, model in joining.items():
        check_pair(fused._member(0), index or "0 that joins", model)
        named = dict(tensors(model))
        for name in fused._array.comparison.shared:
            own, other = stacks[name], named[name]
            same = own.data_ptr() == other.data_ptr() and own.stride() == other.stride()
            if not same and not torch.equal(own.detach(), other.detach()):
                raise FusionError(
                    f"{name} is one tensor for all members of the array, and model {index} has another value there; "
                    f"give it the array's own, fused[0].{name}, or fuse a new array in which members have their own"
                )
    return joining


def partly_shared(joining: Mapping[int, nn.Module]) -> frozenset[str]:
    """Return the keys of tensors that joining models share. Raises FusionError for a shared trained parameter."""
    sharing = Sharing()
    for index, model in enumerate(joining.values()):
        sharing.add(index, model)
    if len(joining) > 1:
        named = dict(next(iter(joining.values())).named_parameters(remove_duplicate=False))
        for name in sorted(sharing.keys):
            if name in named and named[name].requires_grad:
                raise FusionError(
                    f"{name} is one object in all models that join, and is trained; give each its own, by copy.deepcopy"
                )
    return sharing.partly | (sharing.keys if len(joining) > 1 else frozenset())


# Programs of changed members are derived from those of earlier members, without a capture.

# Maximum number of cached traces of members; the oldest is dropped first.
MAX_TRACES = 64


@dataclass(frozen=True, eq=False)
class Kin:
    """Derives programs for the members of an array from those of its earlier members, or of related arrays.

    Attributes:
        compiler: the compiler of ``fused`` for these members.
        contents: ``contents[b]`` is the fingerprint of member b without its tensors.
        whole: the array whose members these are, if it is another one.
    """

    fused: FusedModule
    compiler: Compiler
    contents: tuple[Any, ...]
    whole: FusedModule | None = None

    def __call__(self, modes: Any, arguments: Arguments) -> Compiled | None:
        required, fused, whole = set(self.contents), self.fused, self.whole
        earlier = [
            (contents, program)
            for contents, state in reversed(fused._states.items())
            if state.compiler is not self.compiler and (program := state.compiler.fitting(modes, arguments)) is not None
        ]
        donors = list(earlier)
        # The first entry numbers what an array's forward has read, in the order in which that array has met it.
        if whole is not None and (own := whole._modes(arguments))[1:] == modes[1:]:
            related = whole._compiler.fitting(own, arguments)
            if related is not None and whole._situations.state == fused._situations.state:
                donors.append((whole._array.contents, related))
        for contents, program in donors:
            if required <= set(contents):
                derived = of_rows(program, list(map(contents.index, self.contents)), self.compiler.subject)
                trust(program, derived)
                return derived
        filled = (self._filled(contents, program, modes, arguments) for contents, program in earlier)
        return next((program for program in filled if program is not None), None)

    def _filled(self, contents: Sequence[Any], program: Compiled, modes: Any, arguments: Arguments) -> Compiled | None:
        """Return ``program`` with the numbers of members that differ from earlier ones; None if that is impossible."""
        row = next((row for row, content in enumerate(self.contents) if content in contents), None)
        if row is None or program.opaque or not program.calls:
            return None
        base_trace = self._trace(row, modes, arguments)
        joining = {content: b for b, content in enumerate(self.contents) if content not in contents}
        traces = {content: self._trace(b, modes, arguments) for content, b in joining.items()}
        if base_trace is None or any(
            trace is None or not base_trace.same_structure(trace) for trace in traces.values()
        ):
            return None
        models = [self.fused._member(b) for b in (row, *joining.values())] if program.size_uses else []
        if models and numbers_meet_sizes(program.size_uses, models[0], models[1:]):
            return None
        try:
            by_content = {
                c: changes_between(program.calls, base_trace, trace) for c, trace in traces.items() if trace is not None
            }
            if any(may_be_sizes(program.calls, changes) for changes in by_content.values()):
                return None
            base = contents.index(self.contents[row])
            rows = [base if content in joining else contents.index(content) for content in self.contents]
            changes = {b: by_content[content] for b, content in enumerate(self.contents) if content in joining}
            derived = of_rows(program, rows, self.compiler.subject, changes)
        except Unexplained:
            return None
        # Where members differed before, these values are checked.
        if all(differ_in(program.graph, member_changes) for member_changes in changes.values()):
            trust(program, derived)
            return derived
        try:
            self.fused.check(derived, arguments)
        except FusionError:
            return None
        return derived

    def _trace(self, row: int, modes: Any, arguments: Arguments) -> OperatorTrace | None:
        """Return the operator trace of the member in ``row``, cached by its content; None if it has none."""
        fused, key, traces = self.fused, (self.contents[row], modes, arguments.key), self.fused._traces
        if key not in traces:
            shared = fused._array.comparison.shared
            copies = {name: row_copy(t, None if name in shared else row) for name, t in fused.stacks.items()}
            args, kwargs = arguments.of_member(row)
            traces[key] = trace_operators(fused._around(row, copies), args, kwargs)
            if len(traces) > MAX_TRACES:
                del traces[next(iter(traces))]
        return traces[key]


def trust(checked: Compiled, derived: Compiled) -> None:
    """Let ``derived`` inherit the self-check of ``checked``, its source, if both run every operator alike."""
    # A check with a single member cannot show that members are kept apart.
    enough = checked.program.members >= min(derived.program.members, 2)
    nodes = [compiled.program.module.graph.nodes for compiled in (checked, derived)]
    lowered = [[(node.target, node.meta.get("lowering")) for node in of_program] for of_program in nodes]
    if enough and checked.found.check and lowered[0] == lowered[1]:
        derived.found.check = checked.found.check


# Description of an array: the structure of its members, and how their tensors are stacked.


@dataclass(frozen=True)
class Array:
    """Description of the members of a fused module.

    ``skeletons[v]`` is a model of variant v without tensors.
    """

    members: int
    skeletons: tuple[nn.Module, ...]
    comparison: Comparison
    verify: bool

    def __post_init__(self) -> None:
        if not isinstance(self.verify, bool):
            raise ValueError(f"verify must be True or False, got {self.verify!r}")

    @cached_property
    def shapes(self) -> dict[str, torch.Size]:
        """The shape of each tensor of a member, by key."""
        return {name: tensor.shape for name, tensor in tensors(self.skeletons[0])}

    @property
    def contents(self) -> tuple[Any, ...]:
        """The fingerprint of each member without its tensors."""
        contents = list(map(_content, self.skeletons))
        return tuple([contents[variant] for variant in self.comparison.variants])

    def of_contents(self, contents: Sequence[Any], added: Mapping[Any, nn.Module]) -> Array:
        """Return the array of members with the fingerprints ``contents``. ``added``: skeletons of new ones."""
        skeletons = {**dict(zip(map(_content, self.skeletons), self.skeletons, strict=True)), **added}
        distinct = list(dict.fromkeys(contents))
        comparison = replace(self.comparison, variants=tuple(map(distinct.index, contents)))
        kept = tuple(skeletons[content] for content in distinct)
        return replace(self, members=len(contents), skeletons=kept, comparison=comparison)

    def check_stacks(self, stacks: Mapping[str, Tensor]) -> None:
        """Raise FusionError if a stack was given a row shape that is not its members', for example by ``.data``."""
        for name, stack in stacks.items():
            is_stacked = name in self.shapes and name not in self.comparison.shared
            if is_stacked and not is_lazy(stack) and stack.shape[1:] != self.shapes[name]:
                raise FusionError(
                    f"The stack of {name} has the shape {tuple(stack.shape)}, but members have "
                    f"{tuple(self.shapes[name])} "
                    "each: it was given other memory, for example by .data. Unfuse the array, resize the members, and "
                    "fuse them again."
                )

    def __deepcopy__(self, memo: dict[int, Any]) -> Array:
        skeletons = tuple(module_copy(skeleton, memo) for skeleton in self.skeletons)
        return replace(self, skeletons=skeletons)


@dataclass(frozen=True, eq=False)
class ArrayState:
    """A state of the members (their variants and Python attributes), with the programs compiled for it."""

    number: int
    array: Array
    compiler: Compiler


def mark_tensors(array: Array, named: Mapping[str, Tensor]) -> None:
    """Mark the array's tensors as its own, and copy classes and attributes of members' parameters to the stacks."""
    padded: frozenset[str] = getattr(array.skeletons[0], "padded", frozenset())
    for name, tensor in named.items():
        mark(tensor, Membership(name, array.members, name not in array.comparison.shared, name in padded))
    common = same_marks(array.skeletons)
    variants = [dict(tensors(skeleton)) for skeleton in array.skeletons]
    for name in variants[0]:
        mark_stack(named[name], name, [held[name] for held in variants], common)


def check_valued(stacks: Iterable[Tensor]) -> None:
    """Raise a FusionError for an array on the meta device."""
    if any(stack.is_meta for stack in stacks):
        raise FusionError("the array is on the meta device, without values: move it by to_empty(device=...)")


def row_copy(tensor: Tensor, index: int | None) -> Tensor:
    if index is not None:
        check_whole_stack(tensor, TAKE_BEFORE)
    row = tensor.detach() if index is None else tensor.detach()[index]
    row = row.clone(memory_format=torch.contiguous_format)
    return nn.Parameter(row, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else row


def empty_stack(tensor: Tensor, members: int) -> Tensor:
    """Return a contiguous stack ``[members, *shape]`` for tensors like ``tensor``; a parameter if ``tensor`` is one."""
    stack = torch.empty(members, *tensor.shape, dtype=tensor.dtype, device=tensor.device)
    return nn.Parameter(stack, requires_grad=tensor.requires_grad) if isinstance(tensor, nn.Parameter) else stack


# Programs that the arrays of many tasks share: models that read the same are captured and checked once.

# Maximum number of cached programs.
MAX_PROGRAMS = 64

Make = Callable[[ArraySpec, Arguments, bool, VaryingSizes], Compiled]


# Each with the skeletons of the array it was compiled for, kept alive so that no id in the key is reused.
_programs: OrderedDict[Any, tuple[Compiled, tuple[nn.Module, ...]]] = OrderedDict()


def share_programs(fused: FusedModule) -> None:
    """Let ``fused`` use the programs of earlier arrays whose members read the same, and later ones use its own."""
    compiler = fused._compiler
    if not isinstance(compiler.make_program, partial) or compiler.make_program.func is not _made_once:
        compiler.make_program = partial(_made_once, fused, compiler.make_program)


def _made_once(
    fused: FusedModule, make: Make, subject: ArraySpec, arguments: Arguments, training: bool, sizes: VaryingSizes
) -> Compiled:
    key = _key(fused, subject, arguments, sizes)
    if key in _programs:
        _programs.move_to_end(key)
        return _programs[key][0]
    compiled = make(subject, arguments, training, sizes)
    # Programs that run members' own code depend on these very members.
    if key is not None and not compiled.opaque and not subject.looped:
        _programs[key] = compiled, fused._array.skeletons
        if len(_programs) > MAX_PROGRAMS:
            _programs.popitem(last=False)
    return compiled


def _key(fused: FusedModule, subject: ArraySpec, arguments: Arguments, sizes: VaryingSizes) -> Any:
    """Return all that a program depends on, hashable; None where the reads of forward are unknown."""
    array = fused._array
    if subject.looped or sizes != UNKNOWN:
        return None
    values = [leaf for leaf in arguments.leaves if not is_tensors(leaf)]
    states = [read_model(skeleton, *values) for skeleton in array.skeletons]
    if any(state is None or any(True for _ in tensors_of(state)) for state in states):
        return None
    leaves = [leaf.tensor if hasattr(leaf, "tensor") else leaf for leaf in arguments.leaves]
    ties = tuple(next(index for index, other in enumerate(leaves) if other is leaf) for leaf in leaves)
    return (
        tuple(states),
        fused.fingerprint(),
        fused._situations.state,
        tuple(branch.training for branch in fused._branches),
        tuple(
            (name, type(t), t.shape, t.dtype, t.stride(), t.device, t.requires_grad) for name, t in fused.stacks.items()
        ),
        (arguments.key, arguments.memory_orders, ties),
        (subject.device, subject.loops, array.verify),
        (torch.get_default_dtype(), torch.get_default_device(), torch.are_deterministic_algorithms_enabled()),
        (active_autocast(), torch.is_grad_enabled(), torch.is_inference_mode_enabled()),
    )
