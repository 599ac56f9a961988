"""Compile the graph of a step with Inductor, and check the program."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from hfusion.core.member_random import draws_random
from hfusion.core.program import describe_value
from hfusion.device.backend import random_states_kept
from hfusion.step.check_compiled import ByOperator, disagreement, result_names, shaken
from hfusion.step.step_graph import StepGraph, written_inputs
from hfusion.torch_private.cpp_block_entry import with_row_entries
from hfusion.torch_private.cpp_entry import entry_of
from hfusion.torch_private.inductor_patches import quick_inductor
from hfusion.torch_private.inductor_settings import compile_graph
from hfusion.torch_private.tracer_warnings import silence_tracers


class WrongProgram(Exception):
    """A compiled program does not compute what its graph computes; the message names the difference."""


def build(graph: StepGraph, tensors: Sequence[Tensor], batch: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """Compile ``graph.module`` with Inductor, and check it on ``tensors`` and ``batch``, copying written tensors.

    Raises WrongProgram if results are wrong, and whatever Inductor raises, such as without a C++ compiler, or its code.
    """
    # Imported late: it imports Inductor.
    from hfusion.step.aliased_writes import CopiesOfOverlaps

    kind = graph.examples[0].device.type
    # Calls of small operators take less time from C++ than from Python.
    options: dict[str, Any] = {"post_grad_custom_post_pass": CopiesOfOverlaps(), "cpp_wrapper": kind == "cpu"}
    with silence_tracers(), torch.no_grad(), torch.autocast(kind, enabled=False):
        with with_row_entries(), quick_inductor():
            run = compile_graph(graph.module, [e.detach() for e in graph.examples], options)
        written = written_inputs(graph.module.graph)

        def fresh() -> list[Tensor]:
            return [tensor.clone() if index in written else tensor for index, tensor in enumerate(tensors)]

        batch = [*batch, *(torch.zeros(seeds.shape, dtype=seeds.dtype, device="cpu") for seeds in graph.drawn)]
        # Programs draw from torch's global generator without the dispatcher, in any thread.
        with random_states_kept():
            results = _results(run, fresh(), batch)
        if not any(draws_random(node.target) for node in graph.module.graph.nodes):
            by_operator, generator = ByOperator(graph.module).run, torch.Generator().manual_seed(0)

            def nearby() -> list[Tensor]:
                return _results(by_operator, shaken(fresh(), generator), shaken(batch, generator))

            problem = disagreement(graph, results, _results(by_operator, fresh(), batch), nearby)
            if problem:
                raise WrongProgram(f"what torch.compile made of it is wrong: {problem}")
        entry = entry_of(run, len(tensors) + len(batch), len(results) - len(tensors))
        if entry is None:
            return run

        def rerun_program(call: Callable[..., Sequence[Tensor]]) -> list[Tensor]:
            with random_states_kept():
                return _results(call, fresh(), batch)

        # Without torch's wrappers, the program must give the same bits.
        difference = _difference(graph, rerun_program(entry), results)
        repeats = not difference or not _difference(graph, rerun_program(run), results)
    if not difference:
        return entry
    warnings.warn(_fallback(difference, repeats), stacklevel=2)
    return run


def _fallback(difference: str, repeats: bool) -> str:
    """Return the warning for a program that needs torch's wrappers; ``repeats``: whether with them its bits repeat."""
    why = (
        f"called past torch's wrappers, its program gives {difference}"
        if repeats
        else f"its program gives other bits each time, such as {difference}; an operator in it sums in no fixed order"
    )
    remedy = (
        "report it with the versions of torch and of the C++ compiler"
        if repeats
        else "torch.use_deterministic_algorithms(True) names the operator"
    )
    return f"a compiled step runs through torch's wrappers, in one part, exact but slower: {why}; {remedy}"


def _difference(graph: StepGraph, results: Sequence[Tensor], references: Sequence[Tensor]) -> str:
    """Describe the first difference between results of a step; empty if all bits are equal."""
    for name, actual, expected in zip(result_names(graph, len(results)), results, references, strict=True):
        if _same_bits(actual, expected):
            continue
        kinds = [
            f"{describe_value(tensor, None, 0)} of strides {list(tensor.stride())}" for tensor in (actual, expected)
        ]
        if kinds[0] != kinds[1]:
            return f"{name} as {kinds[0]} instead of {kinds[1]}"
        index = tuple(((actual != expected) & ((actual == actual) | (expected == expected))).nonzero()[0].tolist())
        return f"{actual[index].item()!r} instead of {expected[index].item()!r} in {name}, {kinds[0]}, at {list(index)}"
    return ""


def _results(run: Callable[..., Sequence[Tensor]], tensors: Sequence[Tensor], batch: Sequence[Tensor]) -> list[Tensor]:
    """Return the outputs of a program, in host memory, and the tensors that it may have written.

    Outputs move to host memory because two programs are compared, but memory plans count one set of gradients.
    """
    return [*(output.cpu() for output in run(*tensors, *batch)), *tensors]


def _same_bits(result: Tensor, reference: Tensor) -> bool:
    if (result.shape, result.stride(), result.dtype) != (reference.shape, reference.stride(), reference.dtype):
        return False
    return bool(((result == reference) | ((result != result) & (reference != reference))).all())
