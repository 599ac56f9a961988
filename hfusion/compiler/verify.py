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
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import repeat
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch._ops import OpOverload
from torch.fx.node import map_arg
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hfusion.capture.eager_runs import (
    GRADIENT,
    Outcome,
    differences,
    excesses,
    fixed_projection,
    gradients_of,
    own_leaf,
)
from hfusion.capture.export_context import without_trace
from hfusion.capture.registered_tensors import tensors
from hfusion.compiler.arguments import Arguments, map_leaf
from hfusion.compiler.compiled_program import Compiled
from hfusion.core.calls import Ragged, StackedInput
from hfusion.core.errors import FusionError
from hfusion.core.guards import open_dims
from hfusion.core.layout import Layout, Listed
from hfusion.core.member_random import draws_random, recording
from hfusion.core.memory import copies_in_like_memory, fills_stretch, is_plain, relative_difference
from hfusion.core.program import Kind, source_line
from hfusion.core.tree import leaves
from hfusion.device.backend import computes_by_tf32
from hfusion.ops.random import ELEMENTWISE, FACTORIES
from hfusion.ops.rule import is_random
from hfusion.passes.align import scalars, select
from hfusion.passes.candidates import by_name
from hfusion.passes.functional import OPAQUE
from hfusion.passes.side_effects import FailedCheck

TIGHT = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
WIDE = 1e-7
WORST = 2
NOISE_FACTOR = 50.0
NOISE_RUNS = 3
# The members that are compared at least, or all if there are fewer; and the values of one kind that are distinguished.
MIN_COMPARED, MAX_VALUES = 8, 8


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
        """The members that are compared, in ascending order, the same for the same program.

        All members of a program compute the same operators, except for the differences that `scalars` of its graph
        returns: the numbers of each member at an operator, and operators that only some members run. For each of these,
        one member per value is compared if there are few values, else those with the least and the greatest. The first
        and the last member, and some between them, are always compared; all are if some code runs member by member.
        """
        members = self.compiled.program.members
        if members <= MIN_COMPARED or self.compiled.opaque:
            return list(range(members))
        columns = [self.variants, *scalars(self.compiled.graph)]
        spread = {round(step * (members - 1) / (MIN_COMPARED - 1)) for step in range(MIN_COMPARED)}
        return sorted(spread.union(*map(_distinct, columns)))


def verify(subject: CheckedArray) -> str:
    """Compare the members, or some of them in a large array, and return a summary for the report.

    Raises:
        FusionError: a member's output or gradient differs beyond rounding; names the member, the tensor and the node.
    """
    members = subject.compiled.program.members
    if any(call.is_whole and not call.asks_class for call in subject.compiled.opaque):
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
            if any(call.asks_class for call in calls):
                raise FusionError(
                    "forward runs member by member, where parameters are plain tensors, and reads the class of one "
                    "by type() or __class__: ask isinstance(parameter, nn.Parameter), which holds there, too"
                ) from error
            raise
    compared = "" if len(subject.members) == members else f"{len(subject.members)} of "
    return f"self-check passed: outputs and gradients of {compared}{members} members"


def _check(subject: CheckedArray) -> None:
    """Compare on a few samples, or on all if a few do not suffice."""
    few = shortened(subject.compiled, subject.arguments)
    if few is not None:
        try:
            return _compare(replace(subject, arguments=few))
        except Exception as error:
            # Code that cannot run on fewer samples, or whose own check fails on them, says nothing of the batch.
            if isinstance(error, Unmatched | FusionError) and not isinstance(error, FailedCheck):
                raise
    return _compare(subject)


def _compare(subject: CheckedArray) -> None:
    suspects = _suspects(subject, allowed_differences(subject.compiled, subject.stacks), subject.members)
    if suspects:
        # float64 is slow, and if rounding explains the members that differ most, it explains all.
        ordered = sorted(suspects, key=lambda suspect: -suspect.difference)
        worst = list(dict.fromkeys(suspect.member for suspect in ordered))[:WORST]
        try:
            wide = _suspects(_widened(subject), {torch.float64: WIDE}, worst)
        except RuntimeError:
            # The graph cannot run in float64.
            wide = suspects
        if wide:
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


def _suspects(subject: CheckedArray, limits: Mapping[torch.dtype, float], members: Sequence[int]) -> list[Suspect]:
    """Return the tensors of ``members`` that differ from the original code by more than ``limits``.

    Raises:
        FusionError: an output that is no tensor differs.
    """
    with recording() as draws:
        fused = _array_outcome(subject)
    suspects = []
    for member in members:
        original = _member_outcome(subject, member, draws, 0)
        rows = _rows(subject, member, fused, original)
        for name, gap in excesses(rows, original, limits):
            if name.startswith("output ") and not isinstance(original.get(name), Tensor):
                raise FusionError(
                    f"self-check: {name} of model {member} is {rows.get(name)!r}, and {original.get(name)!r} by its "
                    "original code. A program keeps what is no tensor: let forward return a tensor"
                )
            suspects.append(Suspect(member, name, gap))
    return suspects


def _rows(subject: CheckedArray, member: int, fused: Outcome, original: Outcome) -> Outcome:
    """Return what the outcome of an array has of ``member``, in the dtypes of the original code."""
    rows: Outcome = {}
    for name, value in fused.items():
        row = value[member] if isinstance(value, Tensor | Ragged | Listed) else value
        dtype = getattr(original.get(name), "dtype", None)
        rows[name] = row.to(dtype) if isinstance(row, Tensor) and dtype is not None else row
    return rows


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
        moved = [_member_outcome(subject, member, draws, run) for run in range(1, NOISE_RUNS + 1)]
        noise = [dict(differences(outcome, original)) for outcome in moved]
        gaps = dict(differences(_rows(subject, member, fused, original), original))
        for name in (suspect.name for suspect in suspects if suspect.member == member):
            allowed = NOISE_FACTOR * max(of_run.get(name, 0.0) for of_run in noise)
            if gaps.get(name, 0.0) > allowed:
                raise FusionError(
                    f"self-check: {name} of model {member} differs from its original code by {gaps[name]:.2e} "
                    f"relative (rounding explains {allowed:.2e}); {_first_difference(subject, member)}. Please "
                    "report the operator; fuse(..., verify=False) skips this check, at your own risk"
                )


def _array_outcome(subject: CheckedArray) -> Outcome:
    values, leaves = _program_inputs(subject)
    program = subject.compiled.program
    leaf_ids = set(map(id, leaves.values()))
    inputs = [value for value in values if id(value) not in leaf_ids]
    return _outcome(subject, program.run(*values), leaves, inputs, nullcontext(), stacked=True)


def _program_inputs(subject: CheckedArray) -> tuple[list[Any], dict[str, Tensor]]:
    """Return the program's inputs, with new leaves for parameters and copies of buffers, and these leaves by key."""
    leaf_by_id: dict[int, Tensor] = {}
    # Eager fallbacks may write into any tensor.
    names = subject.stacks.keys() if subject.compiled.opaque else subject.compiled.written
    written = {id(subject.stacks[name]) for name in names}
    leaves = {
        name: leaf_by_id.setdefault(id(t), own_leaf(t, copied=id(t) in written)) for name, t in subject.stacks.items()
    }
    held = {**leaves, **subject.compiled.constants}
    inputs = iter(_copied(subject.arguments).values)
    slots = subject.compiled.program.slots
    return [next(inputs) if slot.kind is Kind.INPUT else held[slot.name] for slot in slots], leaves


def _outcome(
    subject: CheckedArray,
    outputs: Sequence[Any],
    held: Mapping[str, Tensor],
    inputs: Sequence[Any],
    backward: AbstractContextManager[Any],
    stacked: bool,
) -> Outcome:
    """Return outputs, gradients, and buffers and other tensors that forward writes to, by name; no integers.

    Tensors that members share are left out. Gradients of ``inputs`` are computed if the user's backward computes them,
    too: without them, torch 2.13 crashes in the backward of a channels_last GroupNorm.

    Args:
        held: the tensors of the array or of a member after the call.
        stacked: whether outputs have a row for each member.
    """
    stacks, written = subject.stacks, subject.compiled.written
    outcome: Outcome = {f"output {k}": output for k, output in enumerate(outputs)}
    outcome |= {n: t for n, t in held.items() if n in written or not isinstance(stacks[n], nn.Parameter)}
    outcome = {n: value for n, value in outcome.items() if n not in subject.shared and _is_compared(value)}
    parts: list[Tensor] = []
    for output in outputs:
        rows = output if isinstance(output, Ragged) else [output]
        dense = [row for row in rows if isinstance(row, Tensor) and row.is_floating_point() and row.requires_grad]
        parts += [fixed_projection(row, stacked=stacked and not isinstance(output, Ragged)) for row in dense]
    # Without buffers that only forward makes require a gradient.
    trained = {n: t for n, t in held.items() if t.requires_grad and stacks[n].requires_grad}
    others = {f"input {k}": t for k, t in enumerate(inputs) if isinstance(t, Tensor) and t.requires_grad}
    if parts and trained:
        with backward:
            gradients = gradients_of(parts, trained | others)
        private = {f"{GRADIENT}{name}" for name in trained.keys() - subject.shared}
        outcome |= {name: gradient for name, gradient in gradients.items() if name in private}
    return {name: map_leaf(value, Tensor.detach) for name, value in outcome.items()}


def _is_compared(value: Any) -> bool:
    """Return whether the self-check compares a value of a member: integers of tensors may differ by rounding."""
    example = value[0] if isinstance(value, Ragged) else value
    return not isinstance(example, Tensor) or example.is_floating_point()


def _member_outcome(subject: CheckedArray, member: int, draws: Sequence[Tensor], perturbation: int) -> Outcome:
    rows: dict[str, Tensor] = {}
    for name, stack in subject.stacks.items():
        row = _moved(stack.detach() if name in subject.shared else stack.detach()[member], perturbation)
        is_parameter = isinstance(stack, nn.Parameter)
        rows[name] = nn.Parameter(row, stack.requires_grad) if is_parameter else row.requires_grad_(stack.requires_grad)
    model = subject.around(member, rows)
    args, kwargs = _copied(subject.arguments).of_member(member)
    replay = Replay(draws, member)
    with replay.forward():
        outputs = pytree.tree_leaves(model(*args, **kwargs))
    inputs = pytree.tree_leaves((args, kwargs))
    return _outcome(subject, outputs, dict(tensors(model)), inputs, replay.backward(), stacked=False)


def _repeats(subject: CheckedArray, member: int) -> bool:
    """True if the member's own code returns the same result in two runs."""
    with recording() as draws:
        _array_outcome(subject)
    first, second = (_member_outcome(subject, member, draws, 0) for _ in range(2))
    return not any(gap for _, gap in differences(first, second))


def _moved(tensor: Tensor, run: int) -> Tensor:
    """Return a copy; for ``run`` > 0, every value is moved by at most one rounding step."""
    if run == 0 or not tensor.is_floating_point():
        return tensor.clone()
    generator = torch.Generator(device="cpu").manual_seed(run)
    step = torch.randint(-1, 2, tensor.shape, generator=generator, device="cpu").to(tensor.device, tensor.dtype)
    # The rounding step of the narrowest dtype that it is computed in, autocast included.
    kind = tensor.device.type
    cast = [torch.get_autocast_dtype(kind)] if torch.is_autocast_enabled(kind) else []
    return tensor * (1 + step * float(max(torch.finfo(dtype).eps for dtype in (tensor.dtype, *cast))))


def _distinct(column: Sequence[Any]) -> list[int]:
    """Return members that represent the different values of a column ``[B]``."""
    first: dict[Any, int] = {}
    for member, value in enumerate(column):
        first.setdefault(repr(value), member)
    finite = [m for m in first.values() if isinstance(column[m], int | float) and math.isfinite(column[m])]
    if len(first) <= MAX_VALUES or not finite:
        return list(first.values())[:MAX_VALUES]
    others = [member for member in first.values() if member not in finite]
    # The value nearest to zero, too, since zero often switches something off.
    extremes = (choose(finite, key=column.__getitem__) for choose in (min, max))
    return [*others[:MAX_VALUES], *extremes, min(finite, key=lambda member: abs(column[member]))]


FEW = 4


def shortened(compiled: Compiled, arguments: Arguments) -> Arguments | None:
    """Return the first samples of ``arguments``, with the same memory order of dims, which forward may read.

    None if the program does not hold for fewer samples, looks up samples, or takes slices of wider tensors.
    """
    rows = [leaf.tensor[0] if isinstance(leaf, StackedInput) else leaf for leaf in arguments.leaves]
    slices = any(isinstance(row, Tensor) and is_plain(row) and not fills_stretch(row) for row in rows)
    if slices or looks_up_samples(compiled.graph):
        return None
    short = Arguments(tuple(map(_first, arguments.leaves, compiled.dims)), arguments.spec)
    return short if compiled.guards(short.shapes) else None


def _first(leaf: Any, dims: frozenset[int]) -> Any:
    """Return the first samples of a leaf of which ``dims`` may vary."""
    if 0 not in dims:
        return leaf
    if isinstance(leaf, StackedInput):
        return StackedInput(_first(leaf.tensor.transpose(0, 1), dims).transpose(0, 1))
    return leaf[:FEW] if leaf.is_contiguous() else leaf[:FEW].clone()


def looks_up_samples(graph: fx.Graph) -> bool:
    """Return whether integers may be indices into a dim whose size varies: beside such a tensor in one operator.

    An example are the edges of a graph passed with its nodes: with fewer nodes some edges would be out of range.
    """
    for node in graph.nodes:
        if isinstance(node.target, OpOverload) and torch.Tag.pointwise not in node.target.tags:
            operands = leaves([operand.meta.get("val") for operand in node.all_input_nodes], Tensor)
            indices = {k for k, x in enumerate(operands) if not x.is_floating_point() and x.dtype is not torch.bool}
            vary = {k for k, x in enumerate(operands) if open_dims(x)}
            if any(vary - {k} for k in indices):
                return True
    return False


LIMIT = 1e-3


def _first_difference(subject: CheckedArray, member: int) -> str:
    """Run the program and the member's graph, and describe the first node where they differ."""
    program, graph, (inputs, _) = subject.compiled.program, subject.compiled.graph, _program_inputs(subject)
    run = fx.Interpreter(program.module, garbage_collect_values=False)
    # Copied, since the program writes into buffers.
    input_copies = [value.clone() if isinstance(value, Tensor) else value for value in inputs]
    env: dict[fx.Node, Any] = {}
    with torch.no_grad():
        run.run(*inputs)
        computed = {n.meta["origin"]: n for n in program.module.graph.nodes if "origin" in n.meta}
        given = map(row, input_copies, program.layouts, repeat(member), repeat(program.members))
        for node, origin in zip(select(graph, member).nodes, graph.nodes, strict=True):
            if node.op == "placeholder":
                env[node] = next(given)
            elif node.op == "call_function":
                args, kwargs = map_arg((node.args, node.kwargs), env.__getitem__)
                fused = computed[origin]
                expected = env[node] = row(run.env[fused], fused.meta["layout"], member, program.members)
                if not draws_random(node.target):
                    expected = node.target(*args, **kwargs)
                floating = isinstance(expected, Tensor) and expected.is_floating_point()
                if floating and relative_difference(env[node], expected, torch.finfo(expected.dtype).eps) > LIMIT:
                    return f"the first node that differs is {node.name} = {node.target} at {source_line(node)}"
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


# Replay the random draws of a program in a member's code.

aten = torch.ops.aten

# Operators whose whole result is drawn, by name; in place they have the same name, and an underscore.
_DRAWN = {target.overloadpacket.__name__ for target in (*ELEMENTWISE, *FACTORIES)}
_DRAWN |= {"randperm", "multinomial", "_standard_gamma", "_sample_dirichlet"}
_RRELU = (aten.rrelu_with_noise.default, aten.rrelu_with_noise_.default)


class Unmatched(Exception):
    """The member's code draws other random numbers than the program."""


class Replay:
    """Gives the random operators of one member's code the member's rows of ``draws``, in order.

    A backward that runs a part of forward again, as a checkpoint does, restores the state of torch's random numbers.
    That state identifies the rows to give again.
    """

    def __init__(self, draws: Sequence[Tensor], member: int) -> None:
        self._rows = iter([drawn[member] for drawn in draws])
        self._rows_by_state: dict[bytes, Tensor] = {}
        self._state = _state()

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Context manager: random operators return the next rows. Raises Unmatched if rows remain at the end."""
        self._state = _state()
        with _Replaced(self._next):
            yield
        if next(self._rows, None) is not None:
            raise Unmatched("a member draws fewer random numbers than the program")

    def backward(self) -> AbstractContextManager[Any]:
        """Return a context manager in which random operators return the same rows as in forward."""
        return _Replaced(self._forward_row)

    def _next(self, func: OpOverload) -> Tensor:
        if _state() != self._state:
            raise FusionError(
                f"forward sets the state of torch's random numbers before {func}, which a fused array would lose; "
                "draw from the numbers as they are, or keep what is drawn in a buffer"
            )
        row = next(self._rows, None)
        if row is None:
            raise Unmatched(f"a member's {func} draws random numbers that the program draws elsewhere")
        self._rows_by_state[self._state] = row
        self._state = _advanced()
        return row

    def _forward_row(self, func: OpOverload) -> Tensor:
        row = self._rows_by_state.get(_state())
        if row is None:
            raise Unmatched(f"a member's backward draws random numbers, by {func}")
        _advanced()
        return row


def _state() -> bytes:
    state: bytes = torch.get_rng_state().numpy().tobytes()
    return state


def _advanced() -> bytes:
    """Draw one number, and return the new random state."""
    torch.rand((), device="cpu")
    return _state()


class _Replaced(TorchDispatchMode):
    """Replaces the draws of every random operator ``func`` by ``row(func)``."""

    def __init__(self, row: Any) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._row = row

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        arguments = by_name(func, args, kwargs)
        if not is_random(func, arguments):
            return func(*args, **kwargs)
        row = self._row(func)
        if func is aten.native_dropout.default:
            return _native_dropout(func, row, arguments["input"], arguments["p"])
        if func in _RRELU:
            return _rrelu(func, row, arguments["self"], arguments["noise"])
        if func.overloadpacket.__name__.removesuffix("_") not in _DRAWN:
            raise Unmatched(f"a member's {func} draws what cannot be given to it")
        return _overwritten(func, row, args, kwargs)


def _overwritten(func: OpOverload, row: Tensor, args: Any, kwargs: Any) -> Tensor:
    """Return the result of the operator with its draws replaced by ``row``, in place for in-place operators."""
    state = torch.get_rng_state()
    drawn: Tensor = func(*args, **kwargs)
    torch.set_rng_state(state)
    _check_shape(func, row, drawn)
    return drawn.copy_(row)


def _native_dropout(func: OpOverload, row: Tensor, x: Tensor, p: float) -> tuple[Tensor, Tensor]:
    _check_shape(func, row, x)
    return x * row * (0.0 if p == 1 else 1 / (1 - p)), row.bool()


def _rrelu(func: OpOverload, row: Tensor, x: Tensor, noise: Tensor) -> Tensor:
    _check_shape(func, row, x)
    noise.copy_(row)
    return x.mul_(row) if func is aten.rrelu_with_noise_.default else x * row


def _check_shape(func: OpOverload, row: Tensor, drawn: Tensor) -> None:
    if drawn.shape != row.shape:
        raise Unmatched(f"a member's {func} draws {tuple(drawn.shape)}, the program {tuple(row.shape)}")
