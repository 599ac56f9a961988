"""The autograd engine: the current backward pass, its nodes, saved-tensor hooks, and the profiler."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.grad_mode import _unsafe_preserve_version_counter as preserve_version_counters

# What is imported here for other files.
__all__ = ["preserve_version_counters"]

_engine: Any = torch._C._autograd
AccumulateGrad: Any = torch._C._functions.AccumulateGrad  # type: ignore[attr-defined]
# The call by which exported graphs enter and leave `torch.no_grad`.
set_grad_enabled: Any = torch._C._set_grad_enabled
# Returns the number of the backward pass that this thread is in, -1 outside of one.
backward_id = torch._C._current_graph_task_id
# Returns whether `torch.profiler` records.
is_profiling: Callable[[], bool] = _engine._profiler_enabled


def at_end_of_backward(callback: Callable[[], None]) -> None:
    """Call ``callback`` at the end of the backward pass that this thread is in."""
    engine: Any = torch.autograd.Variable._execution_engine
    engine.queue_callback(callback)


def backward_gradients(total: Tensor, tensors: Sequence[Tensor]) -> list[Tensor | None]:
    """Return the gradients that ``total.backward()`` gives to ``tensors``. No `grad` attribute is changed.

    torch.autograd.grad lacks what the backward of a custom function adds to parameters by a backward() of its own.
    Reentrant checkpoints do this, and refuse torch.autograd.grad.
    """
    nodes = nodes_behind([total.grad_fn])
    accumulating = {*tensors, *(node.variable for node in nodes if isinstance(node, AccumulateGrad))}
    outer_grads = [(tensor, tensor.grad) for tensor in accumulating if tensor.is_leaf]
    for tensor in accumulating:
        if tensor.is_leaf:
            tensor.grad = None
        else:
            tensor.retain_grad()
    try:
        total.backward()
        return [tensor.grad for tensor in tensors]
    finally:
        for tensor, grad in outer_grads:
            tensor.grad = grad


def nodes_behind(nodes: Iterable[Any], last: type = AccumulateGrad) -> set[Any]:
    """Return ``nodes`` of a graph and those that they depend on, but none behind a node of the class ``last``."""
    waiting, visited = list(nodes), set[Any]()
    while waiting:
        node = waiting.pop()
        if node is not None and node not in visited:
            visited.add(node)
            waiting += [] if isinstance(node, last) else [source for source, _ in node.next_functions]
    return visited


def backward_node(function: type[torch.autograd.Function]) -> type:
    """Return the class of the nodes that ``function`` adds to graphs."""
    node: type = function._backward_cls
    return node


@contextmanager
def without_saved_tensor_hooks() -> Iterator[None]:
    """Context manager: disable saved-tensor hooks that are set outside, such as those of a checkpoint."""
    outer = []
    while (hooks := _engine._top_saved_tensors_default_hooks(True)) is not None:
        outer.append(hooks)
        _engine._pop_saved_tensors_default_hooks()
    try:
        yield
    finally:
        for pack, unpack in reversed(outer):
            _engine._push_saved_tensors_default_hooks(pack, unpack)
