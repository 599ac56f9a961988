"""Small tensors that a graph holds, such as the members' rates of dropout, written out as numbers.

A compiler of whole graphs hands a tensor to its code as one more input. With numbers instead, the code is all there is
to the program: it can be kept on disk, and called by any thread.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, fx

# Largest number of elements: larger tensors do not hold numbers of members, and take longer to compile.
MAX_ELEMENTS = 256


def inline_constants(module: fx.GraphModule) -> fx.GraphModule:
    """Rewrite ``module``, an ATen graph with fake tensors in ``meta["val"]``; values stay the same, bit for bit."""
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        held = getattr(module, str(node.target), None) if node.op == "get_attr" else None
        if _small(held):
            assert isinstance(held, Tensor)
            env[node] = graph.call_function(written_out, (held.flatten().tolist(), list(held.shape), held.dtype))
            env[node].meta.update(node.meta)
        else:
            env[node] = graph.node_copy(node, env.__getitem__)
    graph.lint()
    return fx.GraphModule(module, graph)


def written_out(values: Sequence[float], shape: Sequence[int], dtype: torch.dtype) -> Tensor:
    """The tensor of these values, on the CPU."""
    return torch.cat([torch.full((1,), value, dtype=dtype, device="cpu") for value in values]).view(shape)


def _small(held: object) -> bool:
    """True for a small CPU tensor whose values can be written as numbers in the code."""
    return (
        isinstance(held, Tensor)
        and held.device.type == "cpu"
        and 0 < held.numel() <= MAX_ELEMENTS
        and held.dtype in (torch.float32, torch.float64, torch.int64, torch.bool)
    )
