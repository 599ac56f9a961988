"""From a call of an array to the program that computes it: captured when first needed, kept per signature."""

from __future__ import annotations

import enum
import inspect
import types
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from hfusion.capture.intercept import WHOLE, Island
from hfusion.capture.member import Member, VaryingSizes, capture_member
from hfusion.capture.opaque import RULES as OPAQUE_RULES
from hfusion.capture.own_code import OpaqueCall, OtherSizes
from hfusion.compiler.sandbox import apart
from hfusion.compiler.unbatchable import module_path, unbatchable
from hfusion.core.calls import StackedInput, is_stacked
from hfusion.core.errors import FusionError
from hfusion.core.exclusive import tracing
from hfusion.core.guards import fixed
from hfusion.core.layout import Layout
from hfusion.core.program import Capture, Kind, Program, Slot, input_dims
from hfusion.core.usage import watched
from hfusion.ops import RULES as ATEN_RULES
from hfusion.ops.rule import merge
from hfusion.passes.align import align, select
from hfusion.passes.batch import batch
from hfusion.passes.candidates import Unbatchable
from hfusion.passes.cost.measure import Measured
from hfusion.passes.cost.price import Model
from hfusion.passes.cost.times import times_on
from hfusion.passes.effects import written_inputs
from hfusion.passes.layouts import Choice, choose
from hfusion.passes.regions import regions

# What a call may hold: tensors, and values that cannot change while a program built on them is kept.
_NUMBERS = (str, int, float, complex, bytes, enum.Enum, types.NoneType)
_NAMES = (type, types.FunctionType, types.BuiltinFunctionType, torch.dtype, torch.device, torch.memory_format)
BATCHED = (Tensor, StackedInput)
_LEAVES = (*BATCHED, *_NUMBERS, *_NAMES)


# Programs of one kind of call that hold for one size each; for further sizes, what needs to know them runs member by
# member. And of any sizes: beyond so many, all of forward does.
MAX_CLOSED = 2
MAX_PROGRAMS = 8

# Kinds of calls whose program is told at a glance; those of others by its guards.
MOST_KEYS = 4096

RULES = merge(ATEN_RULES, OPAQUE_RULES)
UNKNOWN = VaryingSizes()

# A tensor that may be replaced: where it is looked up, a mapping and the key in it.
Place: TypeAlias = tuple[Mapping[str, Any], str]


@dataclass(frozen=True)
class Arguments:
    """The arguments of a call, flat: tensors, `StackedInput` and plain values, and how they were nested."""

    leaves: tuple[Any, ...]
    spec: Any

    @staticmethod
    def of(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Arguments:
        if not kwargs and all(isinstance(a, BATCHED) for a in args):
            return Arguments(args, len(args))
        leaves, spec = pytree.tree_flatten((args, dict(kwargs)), is_leaf=is_stacked)
        for leaf in leaves:
            if not isinstance(leaf, _LEAVES):
                raise ValueError(
                    f"an argument is or holds a {type(leaf).__name__}; give tensors, numbers, strings, None, and nests "
                    "of these that torch.utils._pytree knows"
                )
        return Arguments(tuple(leaves), spec)

    @property
    def key(self) -> Any:
        """Hashable: two calls with one key run one program."""
        return (self.spec, *map(_leaf_key, self.leaves))

    @property
    def loose_key(self) -> Any:
        """As `key`, but blind to sizes: calls with one loose key may share a capture."""
        return (self.spec, *map(_loose_key, self.leaves))

    def of_member(self, member: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """What member ``member`` is called with."""
        rows = [leaf.tensor[member] if is_stacked(leaf) else leaf for leaf in self.leaves]
        if isinstance(self.spec, int):
            return tuple(rows), {}
        args, kwargs = pytree.tree_unflatten(rows, self.spec)
        return args, kwargs

    @property
    def shapes(self) -> list[tuple[int, ...]]:
        """Of the leaves as a member sees them; empty for what is no tensor."""
        return [_shape(leaf) for leaf in self.leaves]

    @property
    def values(self) -> list[Any]:
        """What the program takes."""
        return [leaf.tensor if isinstance(leaf, StackedInput) else leaf for leaf in self.leaves]


def _shape(leaf: Any) -> tuple[int, ...]:
    if isinstance(leaf, StackedInput):
        return tuple(leaf.tensor.shape[1:])
    return tuple(leaf.shape) if isinstance(leaf, Tensor) else ()


def _leaf_key(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return (leaf.shape, leaf.dtype, leaf.device, leaf.requires_grad)
    if isinstance(leaf, StackedInput):
        return (leaf.tensor.shape, leaf.tensor.dtype, leaf.tensor.device, leaf.tensor.requires_grad, True)
    return (type(leaf), leaf)


def _loose_key(leaf: Any) -> Any:
    tensor = leaf.tensor if is_stacked(leaf) else leaf
    if isinstance(tensor, Tensor):
        return (tensor.dim(), tensor.dtype, tensor.device, tensor.requires_grad, is_stacked(leaf))
    return (type(leaf), leaf)


@dataclass(frozen=True)
class ArraySpec:
    """What is compiled: ``member(b)`` gives member b as a live module.

    ``loops``: what cannot be captured runs in a loop over members, at the smallest submodule; otherwise it is an error.
    ``tune``: ways to run operators are measured, not estimated.
    """

    name: str
    members: int
    variants: tuple[int, ...]
    shared: frozenset[str]
    member: Callable[[int], nn.Module]
    loops: bool = True
    tune: bool = False


@dataclass(frozen=True)
class Compiled:
    """A program with what it was made of.

    ``graph`` is the members' common graph, ``constants`` the tensors that the program holds by itself, ``opaque`` the
    calls that run the members' own code; ``modes`` as of `Capture`.
    """

    program: Program
    graph: fx.Graph
    constants: dict[str, Tensor]
    opaque: tuple[OpaqueCall, ...]
    guards: Callable[[Sequence[Sequence[Any]]], bool]
    modes: Mapping[str, bool] = field(default_factory=dict)

    @property
    def written(self) -> frozenset[str]:
        """The keys of buffers that forward may write to."""
        placeholders = [node for node in self.graph.nodes if node.op == "placeholder"]
        names = {n: slot.name for n, slot in zip(placeholders, self.program.slots, strict=True)}
        found = {names[node] for call in self.graph.nodes for node in written_inputs(call) if node in names}
        own = {f"{call.place}.{key}".strip(".") for call in self.opaque for key in call.changing}
        return frozenset(found | own)

    @property
    def foretells(self) -> bool:
        """Whether sizes of what runs member by member are taken to follow from those of the inputs."""
        return any(call.foretells for call in self.opaque)

    @property
    def dims(self) -> list[frozenset[int]]:
        """For each input, the dims whose sizes are left open."""
        return input_dims(self.graph, self.program.slots)


@dataclass
class Met:
    """The sizes of one kind of call: ``dims[k]`` are the dims of leaf k that were met with two sizes."""

    first: tuple[tuple[int, ...], ...]
    dims: tuple[set[int], ...]

    @staticmethod
    def of(shapes: Sequence[tuple[int, ...]]) -> Met:
        return Met(tuple(shapes), tuple(set() for _ in shapes))

    def meet(self, shapes: Sequence[tuple[int, ...]]) -> None:
        for dims, first, now in zip(self.dims, self.first, shapes, strict=True):
            dims.update(dim for dim, (a, b) in enumerate(zip(first, now, strict=True)) if a != b)

    def closed_in(self, compiled: Compiled) -> bool:
        """Whether a program holds for one size only of what was met with two; that of a single one always does."""
        placeholders = compiled.graph.find_nodes(op="placeholder")
        pairs = zip(placeholders, compiled.program.slots, strict=True)
        examples = [node.meta.get("val") for node, slot in pairs if slot.kind is Kind.INPUT]
        return any(
            (size := fixed(example.shape[dim])) is not None and size > 1
            for example, dims in zip(examples, self.dims, strict=True)
            for dim in dims
        )


@dataclass
class Compiler:
    """The programs of one subject, per training pattern and signature.

    The first is for the sizes that it was made for, but for the number of samples. What is met with two sizes is left
    open in those to come, as long as the compiler ``opens`` sizes.
    """

    subject: ArraySpec
    programs: dict[Any, Compiled] = field(default_factory=dict)
    families: dict[Any, list[Compiled]] = field(default_factory=dict)
    met: dict[Any, Met] = field(default_factory=dict)
    opens: bool = True
    whole: dict[Any, str] = field(default_factory=dict)
    refused: dict[Any, str] = field(default_factory=dict)
    kin: Callable[[Any, Arguments], Compiled | None] | None = None
    """Makes a program without a capture, of one of another array with the like members; None if there is none."""

    def find(self, training: Any, arguments: Arguments) -> Compiled | None:
        """The program for this call if there is one already; also for sizes not met before, where the guards hold."""
        key = (training, arguments.key)
        found = self.programs.get(key)
        if found is None:
            found = self.fitting(training, arguments)
            if found is not None:
                self._keep(key, found)
        return found

    def _keep(self, key: Any, found: Compiled) -> None:
        if len(self.programs) == MOST_KEYS:
            self.programs.clear()
        self.programs[key] = found

    def fitting(self, training: Any, arguments: Arguments) -> Compiled | None:
        """The program whose guards hold for the sizes of this call, if there is one."""
        shapes = arguments.shapes
        family = self.families.get((training, arguments.loose_key), [])
        # The latest is the most general, but for those in which more runs member by member.
        fitting = (compiled for compiled in reversed(family) if compiled.guards(shapes))
        return min(fitting, key=lambda compiled: len(compiled.opaque), default=None)

    def get(self, training: Any, arguments: Arguments) -> Compiled:
        """The program for this call, made if there is none. Raises FusionError."""
        found = self.find(training, arguments)
        if found is not None:
            return found
        with tracing:
            # Another thread may have made it meanwhile.
            return self.find(training, arguments) or self.make(training, arguments)

    def make(self, training: Any, arguments: Arguments) -> Compiled:
        """Capture, align and batch; raises FusionError where that is impossible."""
        loose = arguments.loose_key
        shapes = arguments.shapes
        met = self.met.setdefault(loose, Met.of(shapes))
        met.meet(shapes)
        family = self.families.setdefault((training, loose), [])
        many = sum(map(met.closed_in, family)) >= MAX_CLOSED
        if many and loose in self.refused:
            raise FusionError(self.refused[loose])
        if len(family) >= MAX_PROGRAMS:
            self.whole.setdefault(loose, f"sizes vary, and {MAX_PROGRAMS} programs did not serve all of them")
        sizes = VaryingSizes(met.dims, many, self.whole.get(loose, "")) if self.opens else UNKNOWN
        related = self.kin(training, arguments) if self.kin is not None and not sizes.whole else None
        try:
            with apart():
                compiled = related or compile_array(self.subject, arguments, _any_training(training), sizes)
        except FusionError as error:
            if many:
                self.refused[loose] = str(error)
            raise
        self._keep((training, arguments.key), compiled)
        family.append(compiled)
        return compiled

    def distrust(self, training: Any, arguments: Arguments, compiled: Compiled, why: str) -> None:
        """Forget a program that foretold other sizes than there are; from here on none is foretold."""
        loose = arguments.loose_key
        self.whole[loose] = why
        self.programs = {key: found for key, found in self.programs.items() if found is not compiled}
        self.families[training, loose].remove(compiled)

    def clear(self) -> None:
        self.programs.clear()
        self.families.clear()


def _any_training(training: Any) -> bool:
    return any(flag is True for flag in training) if isinstance(training, tuple) else bool(training)


def compile_array(subject: ArraySpec, arguments: Arguments, training: bool, sizes: VaryingSizes = UNKNOWN) -> Compiled:
    """The program of ``subject`` for calls like ``arguments``, and for other ``sizes`` of its leaves.

    A submodule with an operator that no array can compute runs in a loop over members, as one that no graph can hold.
    """
    check_members(subject.members, arguments)
    _check_signature(subject, arguments)
    looped: dict[Island, str] = {WHOLE: sizes.whole} if sizes.whole else {}
    while True:
        captured = _captured(subject, arguments, sizes, looped)
        try:
            return _batched(subject, captured, training)
        except Unbatchable as error:
            more = {Island(module_path(error.node)): str(error)}
            more |= unbatchable(captured.graph, captured.layouts, subject.members, RULES)
            if not subject.loops or not more.keys() - looped.keys():
                raise
            looped |= more


@dataclass(frozen=True)
class _Captured:
    """The members' common graph, with the layouts of its placeholders; ``first`` is the capture of one of them."""

    first: Capture
    graph: fx.Graph
    layouts: tuple[Layout, ...]
    constants: dict[str, Tensor]
    calls: tuple[OpaqueCall, ...]
    guards: Callable[[Sequence[Sequence[Any]]], bool]


def _captured(subject: ArraySpec, arguments: Arguments, sizes: VaryingSizes, looped: Mapping[Island, str]) -> _Captured:
    members = representatives(subject.variants)
    found = [_captured_member(subject, member, arguments, sizes, looped) for member in members]
    captures = [one for one, _ in found]
    first = captures[0]
    if any(c.modes != first.modes for c in captures):
        raise FusionError(
            f"forward of {subject.name} changes train and eval modes, other ones in some members than in all"
        )
    graph = align([c.graph for c in captures], subject.variants) if len(captures) > 1 else first.graph
    constants, differing = _constants(captures, subject.variants)
    layouts = tuple(_layout(slot, subject, arguments, differing) for slot in first.slots)
    calls = tuple(call for _, calls in found for call in calls)

    # Of the captures nothing more, as they hold tensors.
    held = [c.guards for c in captures]

    def guards(shapes: Sequence[Sequence[Any]]) -> bool:
        return all(hold(shapes) for hold in held)

    return _Captured(first, graph, layouts, constants, calls, guards)


def _batched(subject: ArraySpec, captured: _Captured, training: bool) -> Compiled:
    graph, layouts, first = captured.graph, captured.layouts, captured.first
    choices = choose_ways(graph, layouts, subject.members, subject.tune)
    module = batch(graph, layouts, subject.members, RULES, choices)
    code = regions(module, subject.members)
    program = Program(subject.name, subject.members, training, module, code, first.slots, layouts, first.out_spec)
    return Compiled(program, graph, captured.constants, captured.calls, captured.guards, first.modes)


def of_member(compiled: Compiled, member: int) -> Compiled:
    """What one member computes, as the program of an array of one."""
    program, graph = compiled.program, select(compiled.graph, member)
    module = batch(graph, program.layouts, 1, RULES, choose_ways(graph, program.layouts, 1, tune=False))
    return replace(compiled, program=replace(program, members=1, module=module, code=module), graph=graph)


def choose_ways(graph: fx.Graph, layouts: Sequence[Layout], members: int, tune: bool) -> dict[fx.Node, Choice]:
    """How each operator runs in an array of ``members``."""
    model = Model.of(graph, members)
    if not tune:
        return choose(graph, layouts, members, RULES, model)
    with times_on(model.device) as times:
        return choose(graph, layouts, members, RULES, Measured(model, times))


@dataclass(frozen=True, eq=False)
class BoundProgram:
    """A program, and where the tensors are found that it takes before its inputs."""

    compiled: Compiled
    places: tuple[Place, ...]

    @staticmethod
    def of(compiled: Compiled, owner: nn.Module) -> BoundProgram:
        """The program with the tensors of ``owner``."""
        slots = compiled.program.slots
        return BoundProgram(
            compiled, tuple(_place(slot, owner, compiled) for slot in slots if slot.kind is not Kind.INPUT)
        )

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """Of the tensors at ``places``."""
        program = self.compiled.program
        pairs = zip(program.slots, program.layouts, strict=True)
        return tuple(layout for slot, layout in pairs if slot.kind is not Kind.INPUT)


def bind(compiled: Compiled, owner: nn.Module) -> Callable[[list[Any]], Any]:
    """The program as a function of its inputs; its tensors are looked up in ``owner`` at every call.

    So a conversion of ``owner`` to another dtype or device, and loading, are seen.
    """
    places = BoundProgram.of(compiled, owner).places
    run, spec = compiled.program.run, compiled.program.out_spec
    if compiled.opaque:
        run = watched(run)
    single = spec.is_leaf()
    if compiled.foretells:
        run = _undone(run, compiled)

    def call(inputs: list[Any]) -> Any:
        outputs = run(*[holder[name] for holder, name in places], *inputs)
        return outputs[0] if single else pytree.tree_unflatten(outputs, spec)

    return call


def _undone(run: Callable[..., Any], compiled: Compiled) -> Callable[..., Any]:
    """``run``, which leaves no trace in buffers where sizes are others than foretold."""
    written = [k for k, slot in enumerate(compiled.program.slots) if slot.name in compiled.written]

    def call(*values: Any) -> Any:
        before = [(values[k].detach(), values[k].detach().clone()) for k in written]
        try:
            return run(*values)
        except OtherSizes:
            for tensor, kept in before:
                tensor.copy_(kept)
            raise

    return call


def _place(slot: Slot, owner: nn.Module, compiled: Compiled) -> Place:
    if slot.kind is Kind.CONSTANT:
        return compiled.constants, slot.name
    path, _, leaf = slot.name.rpartition(".")
    module = owner.get_submodule(path)
    return (module._parameters if slot.kind is Kind.PARAMETER else module._buffers), leaf


def representatives(variants: Sequence[int]) -> list[int]:
    """The first member of every variant."""
    return [variants.index(variant) for variant in range(max(variants) + 1)]


def _captured_member(
    subject: ArraySpec, member: int, arguments: Arguments, sizes: VaryingSizes, looped: Mapping[Island, str]
) -> tuple[Capture, list[OpaqueCall]]:
    """One member's graph, and the calls in it that stay in a loop over members, among them those of ``looped``."""

    def bodies() -> list[nn.Module]:
        return [subject.member(index) for index in range(subject.members)]

    one = Member(subject.member(member), *arguments.of_member(member), bodies)
    try:
        return capture_member(one, sizes, looped, subject.loops)
    except FusionError as error:
        if not subject.loops:
            raise
        raise FusionError(f"{subject.name}, model {member}: {error}") from error.__cause__


def _check_signature(subject: ArraySpec, arguments: Arguments) -> None:
    """Raise a ValueError where forward does not take such arguments."""
    args, kwargs = arguments.of_member(0)
    signature = inspect.signature(subject.member(0).forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        given = ", ".join(["..."] * len(args) + [f"{name}=..." for name in kwargs])
        raise ValueError(f"{subject.name}.forward{signature} cannot be called as forward({given}): {error}") from error


def check_members(members: int, arguments: Arguments) -> None:
    for leaf in arguments.leaves:
        if isinstance(leaf, StackedInput) and leaf.tensor.shape[0] != members:
            raise ValueError(
                f"hf.stacked input has leading size {leaf.tensor.shape[0]} (shape {tuple(leaf.tensor.shape)}), "
                f"but the array has {members} members; give it one row per member"
            )


def _constants(captures: Sequence[Capture], variants: Sequence[int]) -> tuple[dict[str, Tensor], frozenset[str]]:
    """The captures' own tensors, stacked per member where they differ; and the names of those."""
    constants, differing = {}, set()
    for name, tensor in captures[0].constants.items():
        rows = [c.constants[name] for c in captures]
        _check_alike(name, rows, variants)
        if all(torch.equal(row, tensor) for row in rows):
            constants[name] = tensor.detach()
        else:
            constants[name] = torch.stack([rows[v] for v in variants]).detach()
            differing.add(name)
    return constants, frozenset(differing)


def _check_alike(name: str, rows: Sequence[Tensor], variants: Sequence[int]) -> None:
    for v, row in enumerate(rows):
        if (row.shape, row.dtype, row.device) != (rows[0].shape, rows[0].dtype, rows[0].device):
            kinds = [f"{tuple(r.shape)} {r.dtype} on {r.device}" for r in (rows[0], row)]
            raise FusionError(
                f"the tensor {name} is {kinds[0]} in model 0, {kinds[1]} in model {variants.index(v)}; make them equal"
            )


def _layout(slot: Slot, subject: ArraySpec, arguments: Arguments, differing: frozenset[str]) -> Layout:
    if slot.kind is Kind.INPUT:
        return Layout.STACKED if is_stacked(arguments.leaves[int(slot.name)]) else Layout.SHARED
    if slot.kind is Kind.CONSTANT:
        return Layout.STACKED if slot.name in differing else Layout.SHARED
    return Layout.SHARED if slot.name in subject.shared else Layout.STACKED
