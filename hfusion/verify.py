"""The self-check: on the first training batch the members' original code must give what the program gives.

Outputs, and gradients of a random projection of them, are compared member by member, on a few samples of the batch
where its size may vary. Random draws of the program are replayed through the members' code. Where a first comparison in
the models' own precision fails, both run again in float64, as rounding alone can change the gradients of a deep network
by a tenth. Where the graph holds a narrower dtype by itself, what rounding may change is measured instead: the members
run with parameters moved by one rounding step.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch._ops import OpOverload
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hfusion.compare import tensors
from hfusion.compile import Arguments, Compiled
from hfusion.errors import FusionError
from hfusion.inputs import StackedInput
from hfusion.locate import first_difference
from hfusion.ops.rule import is_random
from hfusion.passes.candidates import by_name
from hfusion.program import Kind
from hfusion.random import recording

TIGHT = {torch.float64: 1e-9, torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 3e-3}
WIDE = 1e-7
GRADIENTS = 10.0
FEW = 4
WORST = 2
NOISE_FACTOR = 50.0
NOISE_RUNS = 3


class _Unmatched(Exception):
    """The member's code draws other random numbers than the program."""


@dataclass(frozen=True)
class Subject:
    """What is checked: the program, the tensors of the array by key, and the way to member b around other tensors."""

    compiled: Compiled
    stacks: Mapping[str, Tensor]
    shared: frozenset[str]
    around: Callable[[int, Mapping[str, Tensor]], nn.Module]
    arguments: Arguments


Outcome = dict[str, Tensor]


def verify(subject: Subject) -> str:
    """Compare every member; returns what was found, for the report.

    Raises:
        FusionError: a member's output or gradient differs beyond rounding; names the member, the tensor and the node.
    """
    members = subject.compiled.program.members
    if subject.compiled.opaque:
        return "self-check left out: the array runs members' own code, which may keep state"
    subject = _shortened(subject)
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())), torch.enable_grad():
        try:
            suspects = _suspects(subject, TIGHT, range(members))
            if suspects and not _agrees_wide(subject, _worst(suspects)):
                _check_noise(subject, suspects)
        except _Unmatched as reason:
            return f"self-check left out: {reason}"
    return f"self-check passed: outputs and gradients of {members} members"


@dataclass(frozen=True)
class Suspect:
    """A member's tensor that differs from the original code by ``difference``, relative."""

    member: int
    name: str
    difference: float


def _worst(suspects: Sequence[Suspect]) -> list[int]:
    """The members that differ most: float64 is slow, and what rounding explains for them it explains for all."""
    ordered = sorted(suspects, key=lambda suspect: -suspect.difference)
    return list(dict.fromkeys(suspect.member for suspect in ordered))[:WORST]


def _suspects(subject: Subject, limits: Mapping[torch.dtype, float], members: Sequence[int]) -> list[Suspect]:
    """Which of ``members``, and their tensors, whose difference from the original code is beyond ``limits``."""
    with recording() as draws:
        ours = _array_outcome(subject)
    found = []
    for member in members:
        theirs = _member_outcome(subject, member, draws, 0)
        for name, difference in _differences(subject, member, ours, theirs).items():
            looser = GRADIENTS if name.startswith("gradient of ") else 1.0
            if difference > looser * limits.get(theirs[name].dtype, 1e-2):
                found.append(Suspect(member, name, difference))
    return found


def _differences(subject: Subject, member: int, ours: Outcome, theirs: Outcome) -> dict[str, float]:
    private = {n: t for n, t in theirs.items() if n in ours and n.removeprefix("gradient of ") not in subject.shared}
    floor = _floor(theirs)
    return {name: _difference(ours[name][member], expected, floor) for name, expected in private.items()}


def _floor(theirs: Outcome) -> float:
    """What counts as nothing: a gradient that is zero but for rounding, as that of a bias before a BatchNorm."""
    norms = [float(t.double().norm()) for name, t in theirs.items() if name.startswith("gradient of ")]
    return 1e-4 * max((norm for norm in norms if math.isfinite(norm)), default=0.0)


def _agrees_wide(subject: Subject, members: Sequence[int]) -> bool:
    """Whether the difference vanishes in float64. False also where the graph cannot run in float64."""
    try:
        return not _suspects(_widened(subject), {torch.float64: WIDE}, members)
    except RuntimeError:
        return False


def _shortened(subject: Subject) -> Subject:
    """The same with a few samples, where the batch size may vary: the check should cost little."""
    graph = subject.compiled.graph
    examples = [node.meta.get("val") for node in graph.nodes if node.op == "placeholder"]
    slots = subject.compiled.program.slots
    inputs = [e for e, slot in zip(examples, slots, strict=True) if slot.kind is Kind.INPUT]
    leaves = [_first(leaf, e) for leaf, e in zip(subject.arguments.leaves, inputs, strict=True)]
    short = replace(subject, arguments=Arguments(tuple(leaves), subject.arguments.spec))
    rows, _ = pytree.tree_flatten(short.arguments.of_member(0))
    return short if subject.compiled.guards(rows) else subject


def _first(leaf: Any, example: Any) -> Any:
    if isinstance(leaf, StackedInput):
        return (
            StackedInput(_first(leaf.tensor.transpose(0, 1), example).transpose(0, 1))
            if leaf.tensor.dim() > 1
            else leaf
        )
    varies = isinstance(example, Tensor) and example.dim() > 0 and not isinstance(example.shape[0], int)
    return leaf[:FEW] if varies else leaf


def _widened(subject: Subject) -> Subject:
    once: dict[int, Tensor] = {}
    stacks = {name: once.setdefault(id(t), _wide(t)) for name, t in subject.stacks.items()}
    leaves = tuple(
        StackedInput(_wide(leaf.tensor)) if isinstance(leaf, StackedInput) else _wide(leaf)
        for leaf in subject.arguments.leaves
    )
    constants = {name: _wide(t) for name, t in subject.compiled.constants.items()}
    compiled = replace(subject.compiled, constants=constants)
    return replace(subject, compiled=compiled, stacks=stacks, arguments=Arguments(leaves, subject.arguments.spec))


def _wide(value: Any) -> Any:
    if not isinstance(value, Tensor) or not value.is_floating_point():
        return value
    wide = value.detach().double()
    return nn.Parameter(wide, value.requires_grad) if isinstance(value, nn.Parameter) else wide


def _check_noise(subject: Subject, suspects: Sequence[Suspect]) -> None:
    """Raise for suspects that differ by far more than one rounding step of the parameters explains."""
    with recording() as draws:
        ours = _array_outcome(subject)
    for member in sorted({suspect.member for suspect in suspects}):
        theirs = _member_outcome(subject, member, draws, 0)
        noise = [_member_outcome(subject, member, draws, run) for run in range(1, NOISE_RUNS + 1)]
        differences = _differences(subject, member, ours, theirs)
        for name in (suspect.name for suspect in suspects if suspect.member == member):
            allowed = NOISE_FACTOR * max(_difference(n[name], theirs[name]) for n in noise)
            if differences[name] > allowed:
                raise FusionError(
                    f"self-check: {name} of model {member} differs from its original code by {differences[name]:.2e} "
                    f"relative (rounding explains {allowed:.2e}); {_culprit(subject, member)}. Please report the "
                    "operator; fuse(..., verify=False) skips this check, at your own risk"
                )


def _array_outcome(subject: Subject) -> Outcome:
    given, leaves = _program_inputs(subject)
    program = subject.compiled.program
    return _outcome(program.run(*given), leaves, program.members)


def _program_inputs(subject: Subject) -> tuple[list[Any], dict[str, Tensor]]:
    """The program's inputs with fresh leaves for parameters and copies of buffers; and those by key."""
    once: dict[int, Tensor] = {}
    leaves = {name: once.setdefault(id(t), _leaf(t)) for name, t in subject.stacks.items()}
    held = {**leaves, **subject.compiled.constants}
    inputs = iter(subject.arguments.values)
    slots = subject.compiled.program.slots
    return [next(inputs) if slot.kind is Kind.INPUT else held[slot.name] for slot in slots], leaves


def _leaf(tensor: Tensor) -> Tensor:
    """A parameter's values under another leaf; a buffer's copy, as forward may write to it."""
    if isinstance(tensor, nn.Parameter):
        return tensor.detach().requires_grad_(tensor.requires_grad)
    return tensor.detach().clone()


def _outcome(outputs: Sequence[Any], leaves: Mapping[str, Tensor], members: int | None) -> Outcome:
    """Outputs, buffers after the run, and gradients, by name; ``members`` is None for one member alone."""
    found = {f"output {k}": o for k, o in enumerate(outputs) if isinstance(o, Tensor) and o.is_floating_point()}
    total = sum((_projected(o, members) for o in found.values() if o.requires_grad), start=torch.zeros(()))
    trained = {name: t for name, t in leaves.items() if t.requires_grad}
    grads = (
        torch.autograd.grad(total, list(trained.values()), allow_unused=True) if total.requires_grad and trained else ()
    )
    outcome = {name: o.detach() for name, o in found.items()}
    outcome |= {f"gradient of {n}": g for n, g in zip(trained, grads, strict=False) if g is not None}
    outcome |= {n: t for n, t in leaves.items() if not isinstance(t, nn.Parameter) and not t.requires_grad}
    return {name: t for name, t in outcome.items() if t.is_floating_point()}


def _projected(output: Tensor, members: int | None) -> Tensor:
    """A fixed random projection, the same for every member, so that all parameters get a gradient."""
    shape = output.shape if members is None else output.shape[1:]
    generator = torch.Generator().manual_seed(len(shape))
    weights = torch.randn(shape, generator=generator, dtype=torch.float32).to(output.device, output.dtype)
    return (output * weights).sum().cpu()


def _culprit(subject: Subject, member: int) -> str:
    """Words for the first node where the program and the member's graph part."""
    given, _ = _program_inputs(subject)
    return first_difference(subject.compiled.program, subject.compiled.graph, given, member, _difference)


def _member_outcome(subject: Subject, member: int, draws: Sequence[Tensor], perturbation: int) -> Outcome:
    rows: dict[str, Tensor] = {}
    for name, stack in subject.stacks.items():
        row = stack.detach() if name in subject.shared else stack.detach()[member]
        rows[name] = _moved(row, perturbation).requires_grad_(stack.requires_grad)
    leaves = {
        n: nn.Parameter(t, t.requires_grad) if isinstance(subject.stacks[n], nn.Parameter) else t
        for n, t in rows.items()
    }
    model = subject.around(member, leaves)
    args, kwargs = subject.arguments.of_member(member)
    with _replayed(draws, member):
        outputs = pytree.tree_leaves(model(*args, **kwargs))
    own = dict(tensors(model))
    return _outcome(outputs, own, None)


def _moved(tensor: Tensor, run: int) -> Tensor:
    """A copy, for ``run`` > 0 with every value moved by at most one rounding step."""
    if run == 0 or not tensor.is_floating_point():
        return tensor.clone()
    generator = torch.Generator().manual_seed(run)
    step = torch.randint(-1, 2, tensor.shape, generator=generator).to(tensor.device, tensor.dtype)
    return tensor * (1 + step * torch.finfo(tensor.dtype).eps)


def _difference(ours: Tensor, theirs: Tensor, floor: float = 0.0) -> float:
    """The norm of the difference over the norm, at least ``floor``; equal non-finite values count as equal."""
    same = (ours == theirs) | (ours.isnan() & theirs.isnan())
    zero = torch.zeros_like(theirs)
    gap = float(torch.where(same, zero, ours - theirs).double().norm())
    size = float(torch.where(theirs.isfinite(), theirs, zero).double().norm())
    return 0.0 if gap == 0.0 else gap / max(size, floor, torch.finfo(theirs.dtype).eps)


class _Replay(TorchDispatchMode):
    """Gives one member's row of the recorded draws in place of every random operator."""

    def __init__(self, draws: Sequence[Tensor], member: int) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._rows = iter([draw[member] for draw in draws])

    def __torch_dispatch__(self, func: OpOverload, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if not is_random(func, by_name(func, args, kwargs or {})):
            return func(*args, **(kwargs or {}))
        row = next(self._rows, None)
        if row is None:
            raise _Unmatched(f"a member's {func} draws random numbers that the program draws elsewhere")
        return self._given(func, row, args)

    def _given(self, func: OpOverload, row: Tensor, args: Any) -> Any:
        if func is torch.ops.aten.native_dropout.default:
            x, p, _ = args
            return x * row * (0.0 if p == 1 else 1 / (1 - p)), row.bool()
        if func._schema.is_mutable:
            if args[0].shape != row.shape:
                raise _Unmatched(f"a member's {func} draws {tuple(args[0].shape)}, the program {tuple(row.shape)}")
            return args[0].copy_(row)
        return row.clone()

    @property
    def left(self) -> int:
        return len(list(self._rows))


@contextmanager
def _replayed(draws: Sequence[Tensor], member: int) -> Iterator[None]:
    replay = _Replay(draws, member)
    with replay:
        yield
    if replay.left:
        raise _Unmatched(f"model {member} draws fewer random numbers than the program")
