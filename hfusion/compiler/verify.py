"""The self-check: on the first training batch the program must agree with the members' original code.

Outputs, and gradients of a fixed projection of them, are compared member by member, on a few samples of the batch
where its size may vary; of large arrays a few members. Random draws of the program are replayed through the members'
code. If a first comparison in the models' own precision fails, both run again in float64, as rounding alone can
change the gradients of a deep network by a tenth. If the graph itself contains a narrower dtype, the effect of
rounding is measured instead: the members run with parameters moved by one rounding step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from hfusion.capture.eager_runs import fixed_projection
from hfusion.capture.export_context import without_trace
from hfusion.capture.fallback_runtime import OpaqueCall
from hfusion.capture.python_reads import EXACT_CLASS
from hfusion.capture.reachable_code import names_of
from hfusion.capture.registered_tensors import tensors
from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import Compiled
from hfusion.compiler.replay import Replay, Unmatched
from hfusion.core import memory
from hfusion.core.calls import Ragged, StackedInput
from hfusion.core.copies import copies_in_like_memory, fills_stretch
from hfusion.core.errors import FusionError
from hfusion.core.layout import Layout, same_value, values_of
from hfusion.core.member_random import draws_random, recording
from hfusion.core.memory import is_plain, norm
from hfusion.core.program import Kind, source_line
from hfusion.core.tree import leaves
from hfusion.device.backend import computes_by_tf32
from hfusion.ops.rule import MemberScalars
from hfusion.passes.align import scalars
from hfusion.passes.functional import OPAQUE
from hfusion.passes.side_effects import FailedCheck
from hfusion.torch_private.autograd_engine import backward_gradients

TIGHT = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
WIDE = 1e-7
GRADIENTS = 10.0
WORST = 2
NOISE_FACTOR = 50.0
NOISE_RUNS = 3


@dataclass(frozen=True)
class CheckedArray:
    """The array to check: its program, its tensors by key, and a function that returns member b with other tensors.

    ``variants``: for each member, the index of its set of Python numbers.
    """

    compiled: Compiled
    stacks: Mapping[str, Tensor]
    shared: frozenset[str]
    around: Callable[[int, Mapping[str, Tensor]], nn.Module]
    arguments: Arguments
    variants: tuple[int, ...]

    @cached_property
    def members(self) -> list[int]:
        """The members that are compared."""
        return checked_members(self.compiled, self.variants)


# Values by name. In the outcome of an array, outputs whose shapes differ between members are `Ragged`, and different
# values that are no tensors are `Listed`.
Outcome = dict[str, Any]


def verify(subject: CheckedArray) -> str:
    """Compare the members, or some of them in a large array, and return a summary for the report.

    Raises:
        FusionError: a member's output or gradient differs beyond rounding; names the member, the tensor and the node.
    """
    members = subject.compiled.program.members
    if any(call.path == "forward" and not _asks_class(call) for call in subject.compiled.opaque):
        return "self-check left out: the whole forward runs as the members' own code"
    with without_trace():
        try:
            _check(subject)
        except Unmatched as reason:
            return f"self-check left out: {reason}"
        except FailedCheck:
            raise
        except FusionError as error:
            calls = subject.compiled.opaque
            if calls and not all(_repeats(subject, member) for member in range(members)):
                return "self-check left out: members' own code gives another result at every run"
            if any(map(_asks_class, calls)):
                raise FusionError(
                    "forward runs member by member, where parameters are plain tensors, and reads the class of one "
                    "by type() or __class__: ask isinstance(parameter, nn.Parameter), which holds there, too"
                ) from error
            raise
    compared = "" if len(subject.members) == members else f"{len(subject.members)} of "
    return f"self-check passed: outputs and gradients of {compared}{members} members"


def _asks_class(call: OpaqueCall) -> bool:
    """True if members' own code may distinguish a parameter from the plain tensor that replaces it in a loop."""
    names = names_of(call.bodies[:1])
    return "Parameter" in names and not names.isdisjoint(EXACT_CLASS)


def _check(subject: CheckedArray) -> None:
    """Compare on a few samples, or on all if a few do not suffice."""
    few = shortened(subject.compiled, subject.arguments)
    if few is not None:
        try:
            return _compare(replace(subject, arguments=few))
        except FailedCheck:
            # A check in forward may fail only because there are fewer samples.
            pass
        except (Unmatched, FusionError):
            raise
        except Exception:
            # Code that cannot run on fewer samples says nothing of the batch; that is checked next.
            pass
    return _compare(subject)


def _compare(subject: CheckedArray) -> None:
    suspects = _suspects(subject, allowed_differences(subject.compiled, subject.stacks), subject.members)
    if suspects and not _agrees_wide(subject, _worst(suspects)):
        _check_noise(subject, suspects)


def allowed_differences(compiled: Compiled, stacks: Mapping[str, Tensor]) -> Mapping[torch.dtype, float]:
    """Return the largest allowed relative differences. With TF32, float32 gets that of float16, which is as exact."""
    graphs = compiled.graph, compiled.program.module.graph
    operators = {str(node.target) for graph in graphs for node in graph.nodes if node.op == "call_function"}
    # Eager fallbacks may call any operator.
    operators |= {"conv", "rnn", "linear"} if compiled.opaque else set()
    devices = {stack.device for stack in stacks.values()}
    rounded = any(computes_by_tf32(device, operators) for device in devices)
    return {**TIGHT, torch.float32: TIGHT[torch.float16]} if rounded else TIGHT


@dataclass(frozen=True)
class Suspect:
    """A member's tensor that differs from the original code by ``difference``, relative."""

    member: int
    name: str
    difference: float


def _worst(suspects: Sequence[Suspect]) -> list[int]:
    """Return the members that differ most. float64 is slow, and if rounding explains them, it explains all."""
    ordered = sorted(suspects, key=lambda suspect: -suspect.difference)
    return list(dict.fromkeys(suspect.member for suspect in ordered))[:WORST]


def _suspects(subject: CheckedArray, limits: Mapping[torch.dtype, float], members: Sequence[int]) -> list[Suspect]:
    """Return the tensors of ``members`` that differ from the original code by more than ``limits``."""
    with recording() as draws:
        fused = _array_outcome(subject)
    suspects = []
    for member in members:
        original = _member_outcome(subject, member, draws, 0)
        _check_values(member, fused, original)
        for name, difference in _differences(subject, member, fused, original).items():
            looser = GRADIENTS if name.startswith("gradient of ") else 1.0
            if difference > looser * limits.get(original[name].dtype, 1e-2):
                suspects.append(Suspect(member, name, difference))
    return suspects


def _check_values(member: int, fused: Outcome, original: Outcome) -> None:
    """Raise FusionError if an output that is no tensor differs from that of the original code."""
    for name, expected in original.items():
        value = values_of(fused.get(name), member + 1)[member]
        if not isinstance(expected, Tensor) and not same_value(value, expected):
            raise FusionError(
                f"self-check: {name} of model {member} is {value!r}, and {expected!r} by its original code. A program "
                "keeps what is no tensor: let forward return a tensor"
            )


def _differences(subject: CheckedArray, member: int, fused: Outcome, original: Outcome) -> dict[str, float]:
    names = [name for name, value in original.items() if isinstance(value, Tensor)]
    private = [name for name in names if name.removeprefix("gradient of ") not in subject.shared]
    floor = _floor(original)
    differences_by_name = {}
    for name in private:
        expected = original[name]
        # A gradient that is missing in the array counts as zero.
        none = name not in fused and name.startswith("gradient of ")
        if name in fused or none:
            row = torch.zeros_like(expected) if none else fused[name][member]
            differences_by_name[name] = relative_difference(row, expected, floor)
    return differences_by_name


def _floor(original: Outcome) -> float:
    """Return the norm below which a gradient counts as zero, like that of a bias before a BatchNorm."""
    return 1e-4 * max((norm(t) for name, t in original.items() if name.startswith("gradient of ")), default=0.0)


def _agrees_wide(subject: CheckedArray, members: Sequence[int]) -> bool:
    """True if the difference vanishes in float64. False also if the graph cannot run in float64."""
    try:
        return not _suspects(_widened(subject), {torch.float64: WIDE}, members)
    except RuntimeError:
        return False


def _widened(subject: CheckedArray) -> CheckedArray:
    wide_by_id: dict[int, Tensor] = {}
    stacks = {name: wide_by_id.setdefault(id(t), _wide(t)) for name, t in subject.stacks.items()}
    arguments = subject.arguments.mapped(_wide)
    constants = {name: _wide(t) for name, t in subject.compiled.constants.items()}
    compiled = replace(subject.compiled, constants=constants)
    return replace(subject, compiled=compiled, stacks=stacks, arguments=arguments)


def _wide(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    wide = value.detach().double()
    if isinstance(value, nn.Parameter):
        return nn.Parameter(wide, value.requires_grad)
    return wide.clone().requires_grad_() if value.requires_grad else wide


def _copied(arguments: Arguments) -> Arguments:
    """Return copies of the arguments, so that the caller's are not written to."""
    tensors = [value for value in arguments.values if isinstance(value, Tensor)]
    copies = iter(copies_in_like_memory(tensors))
    return arguments.mapped(lambda _: next(copies))


def _check_noise(subject: CheckedArray, suspects: Sequence[Suspect]) -> None:
    """Raise for suspects that differ by far more than one rounding step of the parameters explains."""
    with recording() as draws:
        fused = _array_outcome(subject)
    for member in sorted({suspect.member for suspect in suspects}):
        original = _member_outcome(subject, member, draws, 0)
        noise = [_member_outcome(subject, member, draws, run) for run in range(1, NOISE_RUNS + 1)]
        differences = _differences(subject, member, fused, original)
        for name in (suspect.name for suspect in suspects if suspect.member == member):
            allowed = NOISE_FACTOR * max(relative_difference(n[name], original[name]) for n in noise)
            if differences[name] > allowed:
                raise FusionError(
                    f"self-check: {name} of model {member} differs from its original code by {differences[name]:.2e} "
                    f"relative (rounding explains {allowed:.2e}); {_first_difference(subject, member)}. Please "
                    "report the operator; fuse(..., verify=False) skips this check, at your own risk"
                )


def _array_outcome(subject: CheckedArray) -> Outcome:
    values, leaves = _program_inputs(subject)
    program = subject.compiled.program
    leaf_ids = set(map(id, leaves.values()))
    inputs = [value for value in values if id(value) not in leaf_ids]
    outputs = program.run(*values)
    return _outcome(outputs, _trained(subject, leaves), _state(subject, leaves), inputs, program.members, nullcontext())


def _trained(subject: CheckedArray, leaves: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the leaves with a gradient in the array, without buffers that only forward makes require grad."""
    return {name: leaf for name, leaf in leaves.items() if leaf.requires_grad and subject.stacks[name].requires_grad}


def _state(subject: CheckedArray, leaves: Mapping[str, Tensor]) -> Outcome:
    """Return the values of buffers, and of the parameters that forward writes to."""
    written, stacks = subject.compiled.written, subject.stacks
    return {n: t.detach() for n, t in leaves.items() if n in written or not isinstance(stacks[n], nn.Parameter)}


def _program_inputs(subject: CheckedArray) -> tuple[list[Any], dict[str, Tensor]]:
    """Return the program's inputs, with new leaves for parameters and copies of buffers, and these leaves by key."""
    leaf_by_id: dict[int, Tensor] = {}
    # Eager fallbacks may write into any tensor.
    names = subject.stacks.keys() if subject.compiled.opaque else subject.compiled.written
    written = {id(subject.stacks[name]) for name in names}
    leaves = {name: leaf_by_id.setdefault(id(t), _leaf(t, id(t) in written)) for name, t in subject.stacks.items()}
    held = {**leaves, **subject.compiled.constants}
    inputs = iter(_copied(subject.arguments).values)
    slots = subject.compiled.program.slots
    return [next(inputs) if slot.kind is Kind.INPUT else held[slot.name] for slot in slots], leaves


def _leaf(tensor: Tensor, written: bool) -> Tensor:
    """Return a new leaf with the values of a parameter or buffer; copied if it is a buffer or may be written to."""
    values = tensor.detach()
    copied = written or not isinstance(tensor, nn.Parameter)
    return (values.clone() if copied else values).requires_grad_(tensor.requires_grad)


def _outcome(
    outputs: Sequence[Any],
    trained: Mapping[str, Tensor],
    state: Outcome,
    inputs: Sequence[Any],
    members: int | None,
    backward: AbstractContextManager[Any],
) -> Outcome:
    """Return outputs, the tensors in ``state`` and gradients of ``trained``, by name. ``members``: None for one member.

    Gradients of ``inputs`` are computed if the user's backward computes them, too: without them, torch 2.13 crashes in
    the backward of a channels_last GroupNorm.
    """
    dense = {f"output {k}": o for k, o in enumerate(outputs) if isinstance(o, Tensor) and o.is_floating_point()}
    listed = {f"output {k}": o for k, o in enumerate(outputs) if isinstance(o, Ragged) and o[0].is_floating_point()}
    projected = [fixed_projection(o, stacked=members is not None).cpu() for o in dense.values() if o.requires_grad]
    projected += [fixed_projection(row).cpu() for o in listed.values() for row in o if row.requires_grad]
    total = sum(projected, start=torch.zeros((), device="cpu"))
    grad_inputs = [*trained.values(), *(t for t in inputs if isinstance(t, Tensor) and t.requires_grad)]
    with backward:
        grads = backward_gradients(total, grad_inputs) if total.requires_grad and trained else ()
    outcome: Outcome = {f"output {k}": o for k, o in enumerate(outputs) if not isinstance(o, Tensor | Ragged)}
    outcome |= {name: o.detach() for name, o in dense.items()}
    outcome |= {name: o.map(Tensor.detach) for name, o in listed.items()}
    outcome |= {
        f"gradient of {n}": g.to_dense() if g.is_sparse else g
        for n, g in zip(trained, grads, strict=False)
        if g is not None
    }
    outcome |= state
    return {name: t for name, t in outcome.items() if not isinstance(t, Tensor) or t.is_floating_point()}


def _member_outcome(subject: CheckedArray, member: int, draws: Sequence[Tensor], perturbation: int) -> Outcome:
    rows: dict[str, Tensor] = {}
    for name, stack in subject.stacks.items():
        row = stack.detach() if name in subject.shared else stack.detach()[member]
        rows[name] = _moved(row, perturbation).requires_grad_(stack.requires_grad)
    leaves = {
        n: nn.Parameter(t, t.requires_grad) if isinstance(subject.stacks[n], nn.Parameter) else t
        for n, t in rows.items()
    }
    model = subject.around(member, leaves)
    args, kwargs = _copied(subject.arguments).of_member(member)
    replay = Replay(draws, member)
    with replay.forward():
        outputs = pytree.tree_leaves(model(*args, **kwargs))
    model_tensors = dict(tensors(model))
    inputs = pytree.tree_leaves((args, kwargs))
    return _outcome(
        outputs, _trained(subject, model_tensors), _state(subject, model_tensors), inputs, None, replay.backward()
    )


def _repeats(subject: CheckedArray, member: int) -> bool:
    """True if the member's own code returns the same result in two runs."""
    with recording() as draws:
        _array_outcome(subject)
    first, second = (_member_outcome(subject, member, draws, 0) for _ in range(2))
    pairs = [(value, second[name]) for name, value in first.items()]
    return all(relative_difference(a, b) == 0.0 if isinstance(a, Tensor) else same_value(a, b) for a, b in pairs)


def _moved(tensor: Tensor, run: int) -> Tensor:
    """Return a copy; for ``run`` > 0, every value is moved by at most one rounding step."""
    if run == 0 or not tensor.is_floating_point():
        return tensor.clone()
    generator = torch.Generator(device="cpu").manual_seed(run)
    step = torch.randint(-1, 2, tensor.shape, generator=generator, device="cpu").to(tensor.device, tensor.dtype)
    return tensor * (1 + step * _rounding(tensor))


def _rounding(tensor: Tensor) -> float:
    """Return the rounding step of ``tensor`` in the narrowest dtype that it is computed in, autocast included."""
    kind = tensor.device.type
    cast = [torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else []
    return float(max(torch.finfo(dtype).eps for dtype in (tensor.dtype, *cast)))


def relative_difference(actual: Tensor, expected: Tensor, floor: float = 0.0) -> float:
    """Return the norm of the difference, divided by the norm of ``expected`` or a lower bound: ``floor`` or the eps."""
    return memory.relative_difference(actual, expected, max(floor, torch.finfo(expected.dtype).eps))


# Largest number of members of which all are compared.
MAX_COMPARED_WHOLE = 16
# The least number of members compared in larger arrays, and of values of one kind that are distinguished.
MIN_COMPARED, MAX_VALUES = 8, 8


def checked_members(compiled: Compiled, variants: Sequence[int]) -> list[int]:
    """Return the members to compare, in ascending order, the same for the same program.

    All members of a program compute the same operators, except for the differences that `scalars` of its graph returns:
    the numbers of each member at an operator, and operators that only some members run. For each of these, one member
    per value is compared if there are few values, else those with the least and the greatest. The first and the last
    member, and some between them, are always compared; all members are if some code runs member by member.

    Args:
        variants: for each member, the index of its set of Python numbers.
    """
    members = compiled.program.members
    if members <= MAX_COMPARED_WHOLE or compiled.opaque:
        return list(range(members))
    columns = [tuple(variants), *scalars(compiled.graph)]
    spread = {round(step * (members - 1) / (MIN_COMPARED - 1)) for step in range(MIN_COMPARED)}
    return sorted(spread.union(*map(_distinct, columns)))


def _distinct(column: Sequence[Any]) -> Iterator[int]:
    """Yield members that represent the different values of a column ``[B]``."""
    first: dict[Any, int] = {}
    for member, value in enumerate(column):
        first.setdefault(repr(value), member)
    if len(first) <= MAX_VALUES:
        yield from first.values()
        return
    numbers = [member for member, value in enumerate(column) if isinstance(value, int | float)]
    kinds: dict[Any, int] = {}
    for member, value in enumerate(column):
        kinds.setdefault((type(value), isinstance(value, float) and not math.isfinite(value)), member)
    yield from kinds.values()
    ordered = sorted((member for member in numbers if math.isfinite(column[member])), key=column.__getitem__)
    yield from (*ordered[:1], *ordered[-1:])
    # The value nearest to zero, since zero often switches something off.
    yield from (min(ordered, key=lambda member: abs(column[member])),) if ordered else ()


FEW = 4


def shortened(compiled: Compiled, arguments: Arguments) -> Arguments | None:
    """Return the first samples of ``arguments``, with the same memory order of dims, which forward may read.

    None if the program does not hold for fewer samples, looks up samples, or takes slices of wider tensors.
    """
    slots = compiled.program.slots
    placeholders = [node for node in compiled.graph.nodes if node.op == "placeholder"]
    inputs = [node for node, slot in zip(placeholders, slots, strict=True) if slot.kind is Kind.INPUT]
    rows = [leaf.tensor[0] if isinstance(leaf, StackedInput) else leaf for leaf in arguments.leaves]
    slices = any(isinstance(row, Tensor) and is_plain(row) and not fills_stretch(row) for row in rows)
    if slices or looks_up_samples(compiled.graph, inputs):
        return None
    pairs = zip(arguments.leaves, inputs, strict=True)
    short = Arguments(tuple(_first(leaf, node.meta.get("val")) for leaf, node in pairs), arguments.spec)
    return short if compiled.guards(short.shapes) else None


def _first(leaf: Any, example: Any) -> Any:
    if isinstance(leaf, StackedInput):
        rows = leaf.tensor
        return StackedInput(_first(rows.transpose(0, 1), example).transpose(0, 1)) if rows.dim() > 1 else leaf
    varies = isinstance(example, Tensor) and example.dim() > 0 and not isinstance(example.shape[0], int)
    if not varies:
        return leaf
    return leaf[:FEW] if leaf.is_contiguous() else leaf[:FEW].clone()


def looks_up_samples(graph: fx.Graph, inputs: list[fx.Node]) -> bool:
    """Return whether integers computed from ``inputs`` may be indices into a dim whose size varies.

    An example are the edges of a graph passed with its nodes: with fewer nodes some edges would be out of range.
    """
    derived = set(inputs)
    for node in graph.nodes:
        if node.op != "call_function":
            continue
        operands = [a for a in leaves((node.args, node.kwargs), fx.Node) if not _looks_alike(node, a)]
        for k, operand in enumerate(operands):
            if operand in derived and _integers(operand) and any(map(_varies, operands[:k] + operands[k + 1 :])):
                return True
        if any(a in derived for a in node.all_input_nodes):
            derived.add(node)
    return False


def _looks_alike(node: fx.Node, operand: fx.Node) -> bool:
    """Return whether the call is pointwise in the operand or views it, and so cannot use its values as indices."""
    target = node.target
    if not isinstance(target, OpOverload):
        return True
    if torch.Tag.pointwise in target.tags:
        return True
    first = target._schema.arguments[0].alias_info if target._schema.arguments else None
    return first is not None and not first.is_write and node.args[0] is operand


def _integers(node: fx.Node) -> bool:
    example = node.meta.get("val")
    kinds = [e.dtype for e in leaves(example, Tensor)]
    return any(not k.is_floating_point and not k.is_complex and k is not torch.bool for k in kinds)


def _varies(node: fx.Node) -> bool:
    """Return whether a value is a dynamic size, or has one."""
    example = node.meta.get("val")
    if isinstance(example, torch.SymInt):
        return True
    return any(not isinstance(size, int) for e in leaves(example, Tensor) for size in e.shape)


LIMIT = 1e-3


class _ValueRecorder(fx.Interpreter):
    """Runs a program, and records values and layouts by the nodes of the member's graph that they belong to."""

    def __init__(self, module: fx.GraphModule) -> None:
        super().__init__(module, garbage_collect_values=False)
        self.values: dict[fx.Node, tuple[Any, Layout]] = {}

    def run_node(self, n: fx.Node) -> Any:
        value = super().run_node(n)
        if "origin" in n.meta:
            self.values[n.meta["origin"]] = (value, n.meta["layout"])
        return value


def _first_difference(subject: CheckedArray, member: int) -> str:
    """Run the program and the member's graph, and describe the first node where they differ."""
    program, graph, (inputs, _) = subject.compiled.program, subject.compiled.graph, _program_inputs(subject)
    recorder = _ValueRecorder(program.module)
    # Copied, since the program writes into buffers.
    input_copies = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    with torch.no_grad():
        recorder.run(*inputs)
    env: dict[fx.Node, Any] = {}
    placeholders = zip(graph.find_nodes(op="placeholder"), input_copies, program.layouts, strict=True)
    for node, value, layout in placeholders:
        env[node] = row(value, layout, member, program.members)
    for node in graph.nodes:
        if node.op == "output":
            break
        if node.op == "placeholder":
            continue
        fused_value = row(*recorder.values[node], member, program.members)
        if draws_random(node.target):
            env[node] = fused_value
            continue
        env[node] = expected = _evaluate(node, env, member)
        floating = isinstance(expected, Tensor) and expected.is_floating_point()
        if floating and relative_difference(fused_value, expected) > LIMIT:
            return f"the first node that differs is {node.name} = {node.target} at {source_line(node)}"
        env[node] = fused_value
    looped = ", or what runs in a loop over members does" if graph.find_nodes(op="call_function", target=OPAQUE) else ""
    return (
        f"no node of forward differs by itself: a gradient does, or the capture differs from the original code{looped}"
    )


def row(value: Any, layout: Layout, member: int, members: int) -> Any:
    """Return the part of a value that belongs to ``member``."""
    if isinstance(value, list | tuple) and layout is not Layout.LISTED:
        return type(value)(row(part, layout, member, members) for part in value)
    if layout is Layout.SHARED or not isinstance(value, Tensor | tuple):
        return value
    if layout is Layout.PACKED:
        return value.chunk(members, 1)[member]  # type: ignore[union-attr]
    return value[member]


def _evaluate(node: fx.Node, env: dict[fx.Node, Any], member: int) -> Any:
    args, kwargs = node.meta.get("arguments", (node.args, node.kwargs))

    def fill(item: Any) -> Any:
        if isinstance(item, fx.Node):
            return env[item]
        if isinstance(item, MemberScalars):
            return item.values[member]
        if isinstance(item, dict):
            return {name: fill(part) for name, part in item.items()}
        if isinstance(item, list | tuple):
            return [fill(part) for part in item] if isinstance(item, list) else tuple(fill(part) for part in item)
        return item

    with torch.no_grad():
        return node.target(*fill(args), **fill(kwargs))  # type: ignore[operator]
