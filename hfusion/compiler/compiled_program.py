"""The program of an array for one kind of call: capture the members, align their graphs, batch the operators."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from typing import Any, TypeAlias
from weakref import WeakKeyDictionary

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree
from torch.utils._pytree import TreeSpec

from hfusion.capture.attribute_fingerprint import differing_attributes
from hfusion.capture.capture_member import Member, VaryingSizes, alike, capture_member, module_path
from hfusion.capture.fallback_runtime import RULES as OPAQUE_RULES
from hfusion.capture.fallback_runtime import OpaqueCall, bind_fallbacks
from hfusion.capture.hooks import WHOLE, Island
from hfusion.capture.registered_tensors import holder_of
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.fill_scalars import capture_variants
from hfusion.core.calls import StackedInput, is_stacked
from hfusion.core.errors import ForwardsDiffer, FusionError, KeepsState
from hfusion.core.gradient_usage import watched
from hfusion.core.guards import AllHold
from hfusion.core.layout import Layout
from hfusion.core.program import Capture, Kind, Program, Slot, describe_graph, input_dims, writable
from hfusion.core.stages import stage
from hfusion.device.calibrate import compute_rates
from hfusion.ops import RULES as ATEN_RULES
from hfusion.ops.rule import MemberScalars
from hfusion.ops.rule import merge as merge_tables
from hfusion.passes.align import Changes, Unexplained, align, fill_rows
from hfusion.passes.batch import batch
from hfusion.passes.candidates import Unbatchable
from hfusion.passes.check import check_array, check_member
from hfusion.passes.cost.price import Model
from hfusion.passes.layouts import Choice, choose
from hfusion.passes.regions import regions
from hfusion.passes.side_effects import RULES as EXPECT_RULES
from hfusion.passes.side_effects import expectations, written_slots
from hfusion.torch_private.dispatch_modes import in_transform

RULES = merge_tables(ATEN_RULES, OPAQUE_RULES, EXPECT_RULES)

UNKNOWN = VaryingSizes()


@dataclass(frozen=True)
class ArraySpec:
    """The array to compile.

    Attributes:
        member: ``member(b)`` returns member b as a live module.
        loops: whether the smallest submodules that cannot be captured run in a loop over members, or are an error.
        device: where the program will run, if that is not the device of the tensors.
        looped: submodules that run in a loop in any case, with the reasons; it may grow.
    """

    name: str
    members: int
    variants: tuple[int, ...]
    shared: frozenset[str]
    member: Callable[[int], nn.Module]
    loops: bool = True
    device: torch.device | None = None
    looped: Mapping[Island, str] = field(default_factory=dict)


@dataclass
class Findings:
    """What has been found out about a program since it was compiled.

    Attributes:
        check: the result of the self-check; empty before it.
        calls: how many calls were counted, see `hfusion.core.stages.RECHECKED`.
        samples: the dims of samples of its outputs, or why it takes no padded batches; None if it was not asked.
        runs: the program as a function, by array (see `bind`).
    """

    check: str = ""
    calls: int = 0
    samples: tuple[int | None, ...] | str | None = None
    runs: WeakKeyDictionary[nn.Module, Callable[[list[Any]], Any]] = field(default_factory=WeakKeyDictionary)


@dataclass(frozen=True)
class Compiled:
    """A program with the graph it was compiled from.

    ``graph`` is the members' common graph, ``constants`` the tensors that the program holds, ``opaque`` the calls of
    eager fallbacks; for ``modes`` see `Capture`.
    """

    program: Program
    graph: fx.Graph
    constants: dict[str, Tensor]
    opaque: tuple[OpaqueCall, ...]
    guards: Callable[[Sequence[Sequence[Any]]], bool]
    modes: Mapping[str, bool] = field(default_factory=dict)
    memory_orders: tuple[Any, ...] | None = None
    """The `Arguments.memory_orders` of inputs that the program is valid for; None if it is valid for all."""
    origin: object = field(default_factory=object)
    """The same object in all programs that were derived from one capture, for any members."""
    calls: tuple[Any, ...] = ()
    size_uses: tuple[Any, ...] = ()
    """``calls`` and ``size_uses`` of `Capture`, for members that join with other numbers."""
    found: Findings = field(default_factory=Findings, init=False, compare=False)

    @cached_property
    def written(self) -> frozenset[str]:
        """The keys of buffers and parameters that forward may write to."""
        fallback_writes = {f"{call.island.path}.{key}".strip(".") for call in self.opaque for key in call.changing}
        return written_slots(self.graph, self.program.slots) | fallback_writes

    @cached_property
    def value_bytes(self) -> int:
        """The bytes of all values in one member's forward, with the batch of the capture."""
        return sum(Model.of(self.graph, 1).bytes.values())

    @property
    def checks(self) -> Sequence[str]:
        """The lines of the checks in forward that only raise, which the program makes for all members."""
        return expectations(self.graph)

    @property
    def dims(self) -> list[frozenset[int]]:
        """The dynamic dims of each input."""
        return input_dims(self.graph, self.program.slots)


def compile_array(subject: ArraySpec, arguments: Arguments, training: bool, sizes: VaryingSizes = UNKNOWN) -> Compiled:
    """Compile the program of ``subject`` for calls like ``arguments``, whose ``sizes`` may vary.

    A submodule with an operator that cannot be batched runs in a loop over members, like one that cannot be captured.
    """
    check_members(subject.members, arguments)
    _check_signature(subject, arguments)
    looped: dict[Island, str] = {WHOLE: sizes.whole} if sizes.whole else dict(subject.looped)
    while True:
        try:
            return _compiled(subject, arguments, training, sizes, looped)
        except Unbatchable as error:
            more = dict.fromkeys(alike(subject.member(0), Island(module_path(error.node))), str(error))
            if not subject.loops or not more.keys() - looped.keys():
                raise
            looped |= more


def _compiled(
    subject: ArraySpec, arguments: Arguments, training: bool, sizes: VaryingSizes, looped: Mapping[Island, str]
) -> Compiled:
    """Capture the members, with the submodules ``looped`` left out, align their graphs, and batch the operators."""
    # The first member of every variant.
    members = [subject.variants.index(variant) for variant in range(max(subject.variants) + 1)]

    # Where one member must loop over its whole forward, such as for a NaN among the results, all do.
    whole: dict[Island, str] = {}

    def capture(variant: int) -> Capture:
        member = members[variant]
        try:
            captured = capture_member(_member(subject, member, arguments), sizes, whole or looped, subject.loops)
        except FusionError as error:
            if not subject.loops or isinstance(error, KeepsState):
                raise
            raise FusionError(f"{subject.name}, model {member}: {error}") from error.__cause__
        whole.update((WHOLE, call.why) for call in captured.opaque if call.is_whole)
        return captured

    if looped or sizes.open:
        captures = [capture(variant) for variant in range(len(members))]
    else:
        captures = capture_variants(len(members), lambda k: _member(subject, members[k], arguments), capture)
    if whole:
        # Those that were captured before the first that loops.
        captures = [
            captured if any(call.is_whole for call in captured.opaque) else capture(variant)
            for variant, captured in enumerate(captures)
        ]
    graph, constants, differing = common_graph(captures, subject.variants, subject.name, subject.member)
    slots = captures[0].slots
    described = partial(describe_graph, f"all members of {subject.name}", graph)
    stage(subject.name, "aligned", described, lambda: check_member(graph, writable(graph, slots)))
    layouts = tuple(_layout(slot, subject, arguments, differing) for slot in slots)
    # Only the guards of the captures are kept, since captures hold tensors.
    guards = AllHold(tuple({id(c.guards): c.guards for c in captures}.values()))
    needs_strides = any(capture.needs_strides for capture in captures)
    uses = tuple(dict.fromkeys(use for capture in captures for use in capture.size_uses))
    opaque = tuple(call for capture in captures for call in capture.opaque)
    choices = choose_ways(graph, layouts, subject.members, subject.device)
    module = batch(graph, layouts, subject.members, RULES, choices)
    if opaque:
        bind_fallbacks(module, subject.member, subject.members)
    code = regions(module, subject.members)
    program = Program(subject.name, subject.members, training, module, code, slots, layouts, captures[0].out_spec)
    look_at(program)
    return Compiled(
        program,
        graph,
        constants,
        opaque,
        guards,
        captures[0].modes,
        arguments.memory_orders if needs_strides else None,
        calls=captures[0].calls,
        size_uses=uses,
    )


def look_at(program: Program) -> None:
    """Dump the last two stages of ``program``, and check the first of them, if that is enabled."""
    module, code = program.module, program.code
    stage(program.name, "batched", lambda: str(program), lambda: check_array(module, program.members))
    text = partial(describe_graph, f"the code of {program.name}", code, program.members)
    stage(program.name, "gathered", text, lambda: None)


def choose_ways(
    graph: fx.Graph, layouts: Sequence[Layout], members: int, device: torch.device | None = None
) -> dict[fx.Node, Choice]:
    """Choose how each operator runs in an array of ``members``, on ``device`` or on that of the graph."""
    model = Model.of(graph, members, None if device is None else compute_rates(device))
    return choose(graph, layouts, members, RULES, model)


def _member(subject: ArraySpec, member: int, arguments: Arguments) -> Member:
    return Member(subject.member(member), *arguments.of_member(member))


def _check_signature(subject: ArraySpec, arguments: Arguments) -> None:
    """Raise ValueError if forward does not take these arguments, and FusionError if there is no forward."""
    args, kwargs = arguments.of_member(0)
    member = subject.member(0)
    if type(member).forward is nn.Module.forward and "forward" not in vars(member):
        raise FusionError(
            f"{subject.name} defines no forward, so that an array of it cannot be called; call another method of its "
            "members, fused.method(...) or fused.call('method', ...)"
        )
    signature = inspect.signature(member.forward)
    try:
        signature.bind(*args, **kwargs)
    except TypeError as error:
        call_arguments = ", ".join(["..."] * len(args) + [f"{name}=..." for name in kwargs])
        remedy = "; a dict gives keyword arguments: in a tuple it is an argument itself" if kwargs and not args else ""
        raise ValueError(
            f"{subject.name}.forward{signature} cannot be called as forward({call_arguments}): {error}{remedy}"
        ) from error


def check_members(members: int, arguments: Arguments) -> None:
    """Raise ValueError if a stacked argument has another number of members."""
    for leaf in arguments.leaves:
        if isinstance(leaf, StackedInput) and leaf.tensor.shape[0] != members:
            raise ValueError(
                f"hf.stacked input has leading size {leaf.tensor.shape[0]} (shape {tuple(leaf.tensor.shape)}), "
                f"but the array has {members} members; give it one row per member"
            )


def _layout(slot: Slot, subject: ArraySpec, arguments: Arguments, differing: frozenset[str]) -> Layout:
    if slot.kind is Kind.INPUT:
        return Layout.STACKED if is_stacked(arguments.leaves[int(slot.name)]) else Layout.SHARED
    if slot.kind is Kind.CONSTANT:
        return Layout.STACKED if slot.name in differing else Layout.SHARED
    return Layout.SHARED if slot.name in subject.shared else Layout.STACKED


# Build one graph for members with the same operators, or raise an error that names the member that differs.

# Largest number of models per group whose attributes are compared with another group.
_COMPARED = 8
# Largest number of members that a message names.
_NAMED = 6


def common_graph(
    captures: Sequence[Capture], variants: Sequence[int], name: str, member: Callable[[int], nn.Module]
) -> tuple[fx.Graph, dict[str, Tensor], frozenset[str]]:
    """Combine the graphs of all variants of an array into one.

    Args:
        member: ``member(b)`` returns member b.

    Returns: the graph, the constants that it holds, and the names of those that differ between members and are stacked.

    Raises:
        ForwardsDiffer: members do different things; the message names the attributes in which they differ.
    """
    if len(captures) == 1:
        # Cached programs must not keep the user's tensors alive, so they hold aliases of them.
        return captures[0].graph, {name: tensor.detach() for name, tensor in captures[0].constants.items()}, frozenset()
    try:
        return _aligned(captures, variants), *_constants(captures, variants)
    except FusionError as error:
        groups = _alike(captures)
        if len(groups) == 1:
            raise
        rows = [tuple(row for row, variant in enumerate(variants) if variant in group) for group in groups]
        first_models, second_models = (
            [member(variants.index(variant)) for variant in group[:_COMPARED]] for group in groups[:2]
        )
        attributes = differing_attributes(first_models, second_models, (f"model {rows[0][0]}", f"model {rows[1][0]}"))
        raise ForwardsDiffer(
            f"the models of {name} do different things in forward: "
            + (f"{attributes}; " if attributes else "")
            + f"{error}. Fuse {' and '.join(map(_named, rows))} by themselves, or make them equal; "
            "hf.Population, hf.train and hf.sweep make an array of each",
            tuple(rows),
        ) from error


def _aligned(captures: Sequence[Capture], variants: Sequence[int]) -> fx.Graph:
    """Return the common graph. Raises FusionError if members do different things."""
    first = captures[0]
    graph = align([capture.graph for capture in captures], variants)
    for variant, capture in enumerate(captures):
        model = variants.index(variant)
        for attribute in ("out_spec", "modes", "slots"):
            reference, other = getattr(first, attribute), getattr(capture, attribute)
            if reference != other:
                words = {"out_spec": "returns", "modes": "sets train and eval modes", "slots": "reads"}[attribute]
                raise FusionError(
                    f"forward {words} {_shown(reference)} in model 0 and {_shown(other)} in model {model}"
                )
        for name, tensor in first.constants.items():
            kinds = [f"{tuple(t.shape)} {t.dtype} on {t.device}" for t in (tensor, capture.constants[name])]
            if kinds[0] != kinds[1]:
                raise FusionError(f"the tensor {name} is {kinds[0]} in model 0, {kinds[1]} in model {model}")
    return graph


def _constants(captures: Sequence[Capture], variants: Sequence[int]) -> tuple[dict[str, Tensor], frozenset[str]]:
    """Return the constants of the captures, stacked per member if they differ, and the names of the stacked ones."""
    constants, differing = {}, set()
    for name, tensor in captures[0].constants.items():
        rows = [c.constants[name] for c in captures]
        if all(torch.equal(row, tensor) for row in rows):
            constants[name] = tensor.detach()
        else:
            constants[name] = torch.stack([rows[v] for v in variants]).detach()
            differing.add(name)
    return constants, frozenset(differing)


def _shown(value: Any) -> str:
    return "a tensor" if isinstance(value, TreeSpec) and value.is_leaf() else " ".join(str(value).split())


def _alike(captures: Sequence[Capture]) -> list[list[int]]:
    """Group variants that run the same operators, in the order of the first variant of each group."""
    groups: list[list[int]] = []
    for variant, capture in enumerate(captures):
        for group in groups:
            try:
                _aligned([captures[group[0]], capture], (0, 1))
            except FusionError:
                continue
            group.append(variant)
            break
        else:
            groups.append([variant])
    return groups


def _named(rows: Sequence[int]) -> str:
    shown = ", ".join(map(str, rows[:_NAMED])) + (", ..." if len(rows) > _NAMED else "")
    return f"model{'s' if len(rows) > 1 else ''} {shown}"


# A program bound to the tensors of a module, which are looked up at every call, so that they may be replaced.

# Where a tensor that may be replaced is looked up: a mapping, and the key in it.
Location: TypeAlias = tuple[Mapping[str, Any], str]


@dataclass(frozen=True, eq=False)
class BoundProgram:
    """A program, and the locations of the tensors that it takes before its inputs.

    ``failed``: in a step with checks, the entry "members" shows for which members a check of forward failed.
    """

    compiled: Compiled
    locations: tuple[Location, ...]
    failed: dict[str, Tensor] = field(default_factory=dict)

    @staticmethod
    def of(compiled: Compiled, owner: nn.Module) -> BoundProgram:
        """Bind a program to the tensors of ``owner``."""
        locations: list[Location] = []
        for slot in compiled.program.slots:
            if slot.kind is Kind.CONSTANT:
                locations.append((compiled.constants, slot.name))
            elif slot.kind is not Kind.INPUT:
                holder, name, _ = holder_of(owner, slot.name)
                locations.append((holder, name))
        return BoundProgram(compiled, tuple(locations))

    @property
    def looped_calls(self) -> int:
        """The number of calls of single members' operators in the program."""
        program = self.compiled.program
        nodes = program.module.graph.nodes
        loops = [n for n in nodes if n.meta.get("layout") is Layout.LISTED and not n.meta.get("transition")]
        return program.members * len(loops)

    @property
    def layouts(self) -> tuple[Layout, ...]:
        """The layouts of the tensors in ``locations``."""
        program = self.compiled.program
        pairs = zip(program.slots, program.layouts, strict=True)
        return tuple(layout for slot, layout in pairs if slot.kind is not Kind.INPUT)


def bind(compiled: Compiled, owner: nn.Module) -> Callable[[list[Any]], Any]:
    """Return the program as a function of its inputs; its tensors are looked up in ``owner`` at every call.

    Calls thus use the new tensors after ``owner`` was converted or loaded.
    """
    locations = BoundProgram.of(compiled, owner).locations
    run, spec = compiled.program.run, compiled.program.out_spec
    if compiled.opaque:
        run = watched(run)
    single = spec.is_leaf()
    # Submodules that loop are expected to do what their recorded calls did.
    may_fail = bool(compiled.checks) or not all(call.is_whole for call in compiled.opaque)
    undone = _undone(run, compiled)

    def call(inputs: list[Any]) -> Any:
        values = [holder[name] for holder, name in locations]
        outputs = (undone if may_fail or in_transform() else run)(*values, *inputs)
        return outputs[0] if single else pytree.tree_unflatten(outputs, spec)

    return call


def _undone(run: Callable[..., Any], compiled: Compiled) -> Callable[..., Any]:
    """Return ``run`` with written tensors restored if it fails, as by a check, so that the members can run instead."""
    written = [k for k, slot in enumerate(compiled.program.slots) if slot.name in compiled.written]

    def call(*values: Any) -> Any:
        snapshots = [(values[k].detach(), values[k].detach().clone()) for k in written]
        try:
            return run(*values)
        except Exception:
            for tensor, saved in snapshots:
                tensor.copy_(saved)
            raise

    return call


# Derive the program of an array whose members have left, joined or been copied, without a new capture.


def of_rows(
    compiled: Compiled,
    rows: Sequence[int],
    subject: ArraySpec | None = None,
    changes: Mapping[int, Changes] | None = None,
) -> Compiled:
    """Return the program of ``subject``, whose member b equals member ``rows[b]`` of ``compiled`` except for tensors.

    Args:
        subject: None if no member runs code of its own.
        changes: the numbers in which a member of ``subject`` differs from that member of ``compiled``, by member.

    Raises:
        Unexplained: changes that cannot be located in the graph.
    """
    program, members = compiled.program, len(rows)
    graph, tensors = fill_rows(compiled.graph, rows, changes or {})
    if tensors:
        raise Unexplained("a tensor that forward makes has other values")
    if compiled.opaque and subject is None:
        raise ValueError("members that run their own code are needed as modules")
    slots = zip(program.slots, program.layouts, strict=True)
    stacked = {slot.name for slot, layout in slots if slot.name in compiled.constants and layout is Layout.STACKED}
    constants = {n: t[list(rows)] if n in stacked else t for n, t in compiled.constants.items()}
    choices = _choices(compiled, graph) if members == program.members else None
    if choices is None:
        choices = choose_ways(graph, program.layouts, members)
    module = batch(graph, program.layouts, members, RULES, choices)
    if compiled.opaque and subject is not None:
        bind_fallbacks(module, subject.member, members)
    new_program = replace(program, members=members, module=module, code=regions(module, members))
    look_at(new_program)
    return replace(compiled, program=new_program, graph=graph, constants=constants)


def _choices(compiled: Compiled, graph: fx.Graph) -> dict[fx.Node, Choice] | None:
    """Return the choices of a program for the nodes of ``graph``; None if members differ at other nodes there."""
    chosen = {n.meta["origin"]: n.meta["choice"] for n in compiled.program.module.graph.nodes if "choice" in n.meta}
    pairs = list(zip(compiled.graph.nodes, graph.nodes, strict=True))
    if any(_varies(old.meta.get("arguments")) != _varies(new.meta.get("arguments")) for old, new in pairs):
        return None
    return {new: chosen[old] for old, new in pairs if old in chosen}


def _varies(nest: Any) -> Any:
    """Return the nest of a call's arguments as bools: True for scalars that differ between members."""
    if isinstance(nest, dict):
        return tuple(map(_varies, nest.values()))
    if isinstance(nest, list | tuple):
        return tuple(map(_varies, nest))
    return isinstance(nest, MemberScalars)
