"""From the graph of a step to what inductor compiles it to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, fx

from hfusion.core.silence import silence_tracers
from hfusion.device.backend import random_states_kept
from hfusion.step.entry import entry_of
from hfusion.step.row_entry import with_row_entries
from hfusion.step.step_graph import StepGraph, written_inputs

_CONVOLUTION = torch.ops.aten.convolution.default

# Bytes from one pixel to the next from which on inductor's transposes cost more than its convolutions gain, measured.
_LONG_ROW = 1 << 11


def build(graph: StepGraph, own: Sequence[Tensor], batch: Sequence[Tensor]) -> Callable[..., Sequence[Tensor]]:
    """``graph.module`` compiled by inductor and tried once on tensors ``own``, on copies of the buffers.

    Raises what inductor raises, and where there is no C++ compiler; also what its code raises.
    """
    # Imported late: most programs never compile, and inductor takes a second to import.
    from torch._inductor import compile as inductor

    kind = graph.examples[0].device.type
    options = cpu_options(graph.module) if kind == "cpu" else {}
    with silence_tracers(), torch.no_grad(), torch.autocast(kind, enabled=False):
        with with_row_entries():
            run: Callable[..., Sequence[Tensor]] = inductor(graph.module, [e.detach() for e in graph.examples], options)
        written = written_inputs(graph.module.graph)
        kept = [tensor.clone() if index in written else tensor for index, tensor in enumerate(own)]
        batch = [*batch, *(torch.zeros(seeds.shape, dtype=seeds.dtype) for seeds in graph.drawn)]
        with random_states_kept():
            given = _results(run, kept, batch)
        entry = entry_of(run, len(own) + len(batch), len(given) - len(kept))
        if entry is not None:
            again = [tensor.clone() if index in written else tensor for index, tensor in enumerate(own)]
            with random_states_kept():
                # Past the wrappers around it there must be the same bits.
                if all(map(_same_bits, _results(entry, again, batch), given)):
                    return entry
    return run


def _results(run: Callable[..., Sequence[Tensor]], own: Sequence[Tensor], batch: Sequence[Tensor]) -> list[Tensor]:
    """What a program gives, and the tensors that it may have written to."""
    return [*run(*own, *batch), *own]


def _same_bits(ours: Tensor, theirs: Tensor) -> bool:
    if (ours.shape, ours.stride(), ours.dtype) != (theirs.shape, theirs.stride(), theirs.dtype):
        return False
    return bool(((ours == theirs) | ((ours != ours) & (theirs != theirs))).all())


def cpu_options(module: fx.GraphModule) -> dict[str, Any]:
    """How inductor compiles a program for the CPU.

    Operators are called from C++: small ones take less time than Python to call them. Inductor would also run all
    convolutions channels-last; those that stand here channels-first with long rows, as the grouped ones of many
    members, it then transposes by strides of a page.
    """
    convolutions = [node.meta["val"] for node in module.graph.nodes if node.target is _CONVOLUTION]
    wide = any(out.stride(1) > 1 and out.shape[1] * out.element_size() >= _LONG_ROW for out in convolutions)
    return {"cpp_wrapper": True, "layout_optimization": not wide}
