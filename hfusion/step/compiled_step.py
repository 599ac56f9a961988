"""Compiled steps: one program for the whole array, or one for a block of members, called once per block.

Convolutions on a CPU are faster in a loop over members, but a program for the whole array would compile them B times.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from hfusion.capture.python_reads import recurrent
from hfusion.compiler.arguments import BATCHED
from hfusion.compiler.compiled_program import BoundProgram, Location
from hfusion.core.guards import Guards, open_dims
from hfusion.core.member_random import draws_random, new_seeds
from hfusion.core.member_table import blocks_of
from hfusion.core.memory import distance, norm
from hfusion.core.program import describe_value
from hfusion.device.backend import random_states_kept
from hfusion.device.team import Team
from hfusion.ops.rule import hint
from hfusion.passes.align import scalars
from hfusion.passes.inductor_rewrites import copy_overlapping_writes
from hfusion.step.program_cache import BlockProgram, NoProgram
from hfusion.step.step_graph import StepCall, StepGraph, StepSource, Tensors, captured_dims, trace, written_inputs
from hfusion.torch_private.inductor import compile_graph, entry_of, last_pass, quick_inductor, with_row_entries
from hfusion.torch_private.replaced_functions import silence_tracers

# The most looped calls of a forward that are compiled as one program: with 32, a CNN took 1.3 times as long.
MAX_LOOPED_CALLS = 16
# The most programs of one step, if members differ in scalars.
MAX_KINDS = 4
# The most operators of one program: Inductor takes about 0.1 s per operator on two cores.
MAX_OPERATORS = 4000
# In training, oneDNN's kernel returns an undefined tensor, on which Inductor's code fails when it runs.
_NOT_COMPILED = frozenset({torch.ops.aten.mkldnn_rnn_layer.default})


class Unprofitable(Exception):
    """A step should not be compiled, because it does not pay or would fail; the message gives the reason."""


@dataclass(eq=False)
class BlocksStep:
    """One program for every kind of block of ``size`` members, called once per block; block k runs ``kinds[k]``.

    The last block may be smaller. It is valid for calls of the captured forward and loss whose sizes pass `fits`.

    Attributes:
        params: all parameters, including those without a gradient.
    """

    programs: tuple[BlockProgram, ...]
    kinds: tuple[int, ...]
    size: int
    tensors: Tensors
    params: tuple[Location, ...]

    @property
    def parts(self) -> tuple[tuple[BlockProgram, ...], tuple[int, ...], int, Tensors, tuple[Location, ...]]:
        """Its fields, of which a step that runs otherwise is made."""
        return self.programs, self.kinds, self.size, self.tensors, self.params

    @property
    def team(self) -> Team | None:
        """The threads that it runs on, besides torch's."""
        return None

    @property
    def operators(self) -> Sequence[Any]:
        return [operator for program in self.programs for operator in program.operators]

    @property
    def how(self) -> str:
        """How it runs, for reports."""
        count = len(self.programs[0].operators)
        programs = "one program" if len(self.programs) == 1 else f"{len(self.programs)} programs"
        if len(self.kinds) == 1:
            return f"{programs} of {count} operators"
        sizes = list(dict.fromkeys(len(rows) for rows in self.blocks))
        unit = "member" if self.size == 1 else f"{self.size}" if len(sizes) == 1 else "block"
        subject = "a member" if self.size == 1 else f"{' and '.join(map(str, sizes))} members"
        return f"{programs} of {count} operators for {subject}, called once per {unit}"

    @property
    def seeded(self) -> bool:
        """True if its programs take seeds for random numbers."""
        return self.programs[0].seeded

    @property
    def trained(self) -> tuple[int, ...]:
        """The indices of the tensors that get a gradient."""
        return self.programs[0].trained

    @property
    def blocks(self) -> list[range]:
        """The members of each block."""
        return blocks_of(self.tensors.members, self.size)

    def fits(self, call: StepCall) -> bool:
        blocks = self.blocks
        firsts = (blocks[self.kinds.index(kind)] for kind in range(len(self.programs)))
        pairs = zip(self.programs, firsts, strict=True)
        return all(p.guards([tensor.shape for tensor in call.of_rows(rows).batch()]) for p, rows in pairs)

    def step(self, call: StepCall) -> Tensor:
        """Write gradients and buffers, and return the losses ``[B]``."""
        clear(self.params)
        tensors = self.tensors.all()
        batch = [*call.batch(), *([new_seeds(self.tensors.members)] if self.seeded else [])]
        if len(self.kinds) == 1:
            with torch.no_grad():
                losses, *grads = self.programs[0].run(*tensors, *batch)
        else:
            losses, grads = self._blocks_in_turn(call, tensors, batch)
        for index, grad in zip(self.trained, grads, strict=True):
            tensors[index].grad = grad
        return losses

    def _blocks_in_turn(
        self, call: StepCall, tensors: Sequence[Tensor], batch: Sequence[Tensor]
    ) -> tuple[Tensor, list[Tensor]]:
        """Return the losses, and the gradients of the trained tensors."""
        stacked = [*self.tensors.stacked, *call.stacked, *[True] * self.seeded]
        pairs = zip((*tensors, *batch), stacked, strict=True)
        columns = [t.detach().split(self.size) if s else (t,) * len(self.kinds) for t, s in pairs]
        stacks = [k for k, index in enumerate(self.trained) if stacked[index]]
        # Gradients that blocks overwrite completely need not be zeroed.
        grads = [
            (torch.empty_like if stacked[index] else torch.zeros_like)(
                tensors[index].detach(), memory_format=torch.contiguous_format
            )
            for index in self.trained
        ]

        def run(rows: range, kind: int, inputs: Sequence[Tensor]) -> Tensor:
            # The gradients of a block are freed before the next one runs.
            block_losses, *block_grads = self.programs[kind].run(*inputs)
            if stacks:
                mine = [grads[k][rows.start : rows.stop] for k in stacks]
                torch._foreach_copy_(mine, [block_grads[k] for k in stacks])
            for k in set(range(len(grads))).difference(stacks):
                grads[k] += block_grads[k]
            return block_losses

        with torch.no_grad():
            losses = list(map(run, self.blocks, self.kinds, zip(*columns, strict=True)))
        return torch.cat(losses), grads


def clear(params: Sequence[Location]) -> None:
    # Frees the old gradients, so that new ones can reuse their memory, which is still in the cache.
    for holder, name in params:
        holder[name].grad = None


def block_sources(
    forward: BoundProgram, loss: BoundProgram, call: StepCall, size: int | None
) -> tuple[list[StepSource], list[int], int]:
    """Divide a step into blocks of ``size`` members; None for all. Loops over many calls take one at a time.

    Returns the sources of different programs, for each block the index of its source, and the members of a block.
    Raises Unprofitable if it should not be compiled.
    """
    if recurrent(forward.compiled.graph) or recurrent(loss.compiled.graph):
        raise Unprofitable(
            "a program writes out every step of a recurrent layer, and it has a recurrent layer over a length that "
            "varies; give one length, padded, to have it compiled"
        )
    members = forward.compiled.program.members
    if size is None or size >= members:
        sources, kinds, size = [StepSource.of(forward, loss, call)], [0], members
    else:
        if why := too_many_kinds(forward, loss, size):
            raise Unprofitable(why)
        ranges = blocks_of(members, size)
        differing = [scalars_of(forward, loss, rows) for rows in ranges]
        firsts = {kind: ranges[differing.index(kind)] for kind in differing}
        sources = [StepSource.of(forward, loss, call, rows) for rows in firsts.values()]
        kinds = list(map(list(firsts).index, differing))
    if size > 1 and sources[0].forward.looped_calls > MAX_LOOPED_CALLS:
        return block_sources(forward, loss, call, 1)
    return sources, kinds, size


def too_many_kinds(forward: BoundProgram, loss: BoundProgram, size: int) -> str:
    """Return the reason against programs for blocks of ``size`` members; empty if there is none."""
    blocks = blocks_of(forward.compiled.program.members, size)
    count = len({scalars_of(forward, loss, rows) for rows in blocks})
    how = "one by one" if size == 1 else f"{size} at once"
    why = f"members run {how}, each kind by a program of its own, and scalars differ in {count} ways"
    return f"{why}; at most {MAX_KINDS} are worth it" if count > MAX_KINDS else ""


def scalars_of(forward: BoundProgram, loss: BoundProgram, rows: range) -> tuple[Any, ...]:
    """Return, for each of ``rows``, the scalars in which members differ; equal blocks share a program."""
    values = [v for compiled in (forward.compiled, loss.compiled) for v in scalars(compiled.graph)]
    return tuple(tuple(repr(per_member[member]) for per_member in values) for member in rows)


def compile_program(source: StepSource) -> BlockProgram | NoProgram:
    """Trace and compile the program of ``source``, or return why that would not pay.

    Raises any error of tracing or compiling.
    """
    graph, call = trace(source), source.call
    dynamic_dims = captured_dims(source.forward, source.loss, call)
    operators = [node.target for node in graph.module.graph.nodes if node.op == "call_function"]
    # If only the target's sizes vary, the other sizes may come from other arrays that use the same loss.
    if any(dims - {0} for dims in dynamic_dims[: sum(isinstance(leaf, BATCHED) for leaf in call.inputs.leaves)]):
        rows = zip(dynamic_dims, call.stacked, map(open_dims, graph.batch), call.batch(), strict=True)
        specialized = [
            f"dim {dim} of {tensor.dtype} {list(tensor.shape)}"
            for dims, stacked, remaining, tensor in rows
            for dim in sorted(dim + stacked for dim in dims if dim)
            if dim not in remaining
        ]
        if specialized:
            return NoProgram(
                f"its sizes vary, and a program would hold for one size only of {' and of '.join(specialized)}, "
                "which an operator needs to know"
            )
    if refused := sorted(str(operator) for operator in _NOT_COMPILED & set(operators)):
        return NoProgram(f"inductor cannot call {', '.join(refused)}, by which recurrent layers run")
    if len(operators) > MAX_OPERATORS:
        return NoProgram(f"the step has {len(operators)} operators, and compilation pays up to {MAX_OPERATORS}")
    run = build(graph, source.values, call.batch())
    return BlockProgram(run, graph.trained, operators, Guards(graph.batch), bool(graph.seeds))


# Compile the graph of a step with Inductor, and check the program.


class WrongProgram(Exception):
    """A compiled program does not compute what its graph computes; the message names the difference."""


def build(graph: StepGraph, tensors: Sequence[Tensor], batch: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile ``graph.module`` with Inductor, and check it on ``tensors`` and ``batch``, copying written tensors.

    Raises WrongProgram if results are wrong, and whatever Inductor raises, such as without a C++ compiler, or its code.
    """
    kind = graph.examples[0].device.type
    # Calls of small operators take less time from C++ than from Python.
    options = {"post_grad_custom_post_pass": last_pass(copy_overlapping_writes), "cpp_wrapper": kind == "cpu"}
    with silence_tracers(), torch.no_grad(), torch.autocast(kind, enabled=False):
        with with_row_entries(), quick_inductor():
            run = compile_graph(graph.module, [e.detach() for e in graph.examples], options)
        run = entry_of(run, len(graph.examples), 1 + len(graph.trained)) or run
        written = written_inputs(graph.module.graph)

        def fresh() -> list[Tensor]:
            return [tensor.clone() if index in written else tensor for index, tensor in enumerate(tensors)]

        batch = [*batch, *(torch.zeros(seeds.shape, dtype=seeds.dtype, device="cpu") for seeds in graph.seeds)]
        # Programs draw from torch's global generator without the dispatcher, in any thread.
        with random_states_kept():
            results = _results(run, fresh(), batch)
        if not any(draws_random(node.target) for node in graph.module.graph.nodes):
            by_operator, generator = ByOperator(graph.module).run, torch.Generator().manual_seed(0)

            def nearby() -> list[Tensor]:
                return _results(by_operator, *([shaken(t, generator) for t in tensors] for tensors in (fresh(), batch)))

            problem = disagreement(graph, results, _results(by_operator, fresh(), batch), nearby)
            if problem:
                raise WrongProgram(f"what torch.compile made of it is wrong: {problem}")
    return run


def _results(run: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], batch: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of a program, in host memory, and the tensors that it may have written.

    Outputs move to host memory because two programs are compared, but memory plans count one set of gradients.
    """
    return [*(output.cpu() for output in run(*tensors, *batch)), *tensors]


# Check that a program compiled by Inductor computes the same as its graph.

# Perturbed inputs that are tried. A value that rounds to either side of zero changes its sign in about half of them.
_NEARBY = 12
# Inputs are perturbed by this power of the dtype's eps: 54 eps of float32, 3 of bfloat16. In a small CNN, whose program
# normalizes a batch differently, 8 eps were too few to flip a ReLU at zero that the program had flipped.
_OFF = 3 / 4
# A program may differ by this multiple of what the perturbed inputs change in the graph's own results.
_AS_MUCH = 2.0


class ByOperator(fx.Interpreter):
    """Interprets a graph for Inductor. Views become reshapes: Inductor ignores the strides that a view requires."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        views = (torch.ops.aten.view.default, torch.ops.aten._unsafe_view.default)
        return super().call_function(torch.ops.aten.reshape.default if target in views else target, args, kwargs)

    def fetch_args_kwargs_from_env(self, n: fx.Node) -> Any:
        """Return the arguments of a node; in the memory order of the trace for operators that need exact strides."""
        exact = torch.Tag.needs_exact_strides in getattr(n.target, "tags", ())

        def fetch(operand: fx.Node) -> Any:
            value = self.env[operand]
            return _in_order(value, operand.meta["val"]) if exact and isinstance(value, Tensor) else value

        return fx.map_arg((n.args, n.kwargs), fetch)


def _in_order(tensor: Tensor, example: Tensor) -> Tensor:
    """Return ``tensor`` with its dims in the same memory order as those of ``example``."""
    strides = [hint(stride) or 0 for stride in example.stride()]
    order = sorted(range(tensor.dim()), key=lambda dim: -strides[dim])
    return tensor.permute(order).contiguous().permute([order.index(dim) for dim in range(tensor.dim())])


def disagreement(
    graph: StepGraph, actual: Sequence[Tensor], expected: Sequence[Tensor], nearby: Callable[[], Sequence[Tensor]]
) -> str:
    """Describe the first result that differs from the graph's by more than rounding; empty if there is none.

    A program sums in another order, and may flip a ReLU at zero, so norms of differences are compared. A relative
    difference above the cube root of eps, 0.5% in float32, indicates an error, with two exceptions. Gradients that
    consist of rounding errors only, such as that of a bias before a BatchNorm, are compared with the largest gradient.
    And a result may differ as much as the graph's own result changes if its inputs are perturbed by rounding.

    Args:
        actual: results of the compiled program: losses, gradients, written tensors.
        expected: results of the graph for the same inputs.
        nearby: returns the graph's results for freshly perturbed inputs at each call.
    """
    rounding = max(_rounding(node.meta.get("val")) for node in graph.module.graph.nodes)
    limit, gradients = rounding ** (1 / 3), expected[1 : 1 + len(graph.trained)]
    least = limit * max(1.0, *map(norm, gradients))

    def gaps(results: Sequence[Tensor]) -> list[float]:
        """Return relative differences; 0 where the graph's own result is not finite."""
        pairs = zip(results, expected, strict=True)
        return [
            distance(a, b) / max(norm(b), least) if a is not b and bool(torch.isfinite(b).all()) else 0.0
            for a, b in pairs
        ]

    found = gaps(actual)
    if all(gap <= limit for gap in found):
        return ""
    names = ["the losses", *(f"the gradient of tensor {k}" for k in graph.trained)]
    names += [f"tensor {k} after it" for k in range(len(actual) - len(names))]
    moved = map(max, zip(*(gaps(nearby()) for _ in range(_NEARBY)), strict=True))
    for name, gap, most, result, reference in zip(names, found, moved, actual, expected, strict=True):
        if not gap <= max(limit, _AS_MUCH * most):
            kind = describe_value(reference, None, 0)
            return f"{name}, {kind} of norm {norm(reference):.3g}, differs by {distance(result, reference):.3g}"
    return ""


def shaken(tensor: Tensor, generator: torch.Generator) -> Tensor:
    """Return ``tensor`` with each number changed randomly by a few eps of its dtype; zeros stay zeros."""
    if not (most := _rounding(tensor) ** _OFF):
        return tensor
    noise = 2 * torch.rand(tensor.shape, dtype=torch.float64, generator=generator, device="cpu") - 1
    changed: Tensor = tensor.detach().cpu() * (1 + most * noise)
    return changed.to(tensor.device, tensor.dtype)


def _rounding(value: object) -> float:
    """Return eps of the dtype of a floating-point or complex tensor; 0 for everything else."""
    if not isinstance(value, Tensor) or not (value.is_floating_point() or value.is_complex()):
        return 0.0
    return torch.finfo(value.dtype).eps
