"""The checker of invariants that graphs must satisfy after every pass.

Nothing here runs unless `hfusion.core.stages` enables it. Programs of arrays are run on fake tensors: every value
must have the shape, dtype and layout that its node records, and every view must be one.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload

from hfusion.core.layout import Layout, Listed, lift, lift_packed
from hfusion.core.stages import BrokenProgram
from hfusion.core.tree import leaves
from hfusion.device.backend import accelerators, draws_kept
from hfusion.ops.lowering import View
from hfusion.ops.rule import hint
from hfusion.passes.batch import SCALARS
from hfusion.passes.functional import OPAQUE
from hfusion.passes.side_effects import has_effect
from hfusion.passes.views import writes
from hfusion.torch_private.dispatch_modes import (
    DataDependentOutputException,
    DynamicOutputShapeException,
    FakeTensorMode,
    UnsupportedFakeTensorException,
)
from hfusion.torch_private.replaced_functions import silence_tracers

# Errors of operators whose results cannot be inferred with fake tensors.
_UNTOLD = (
    NotImplementedError,
    UnsupportedFakeTensorException,
    DataDependentOutputException,
    DynamicOutputShapeException,
)

# Operators that read values without raising an error, although fake tensors have no values.
_READING = frozenset({torch.ops.aten.tensor_split.tensor_indices_or_sections})


def check_member(graph: fx.Graph, writable: Collection[str]) -> None:
    """A member's graph: calls alone, each with an example of its value, that write to nothing but ``writable`` inputs.

    An input is written to by ``copy_``.
    """
    check_links(graph)
    for node in graph.nodes:
        _need(node.op in ("placeholder", "call_function", "output"), node, f"is {node.op}, not a call")
        if node.op != "output":
            computes = node.op == "placeholder" or isinstance(node.target, OpOverload)
            _need("val" in node.meta or not computes, node, "has no example of its value")
        # Members' own code writes to what it owns.
        if node.op == "call_function" and writes(node) and node.target is not OPAQUE:
            tensor = node.args[0]
            plain = node.target is torch.ops.aten.copy_.default and isinstance(tensor, fx.Node)
            _need(plain and tensor.name in writable, node, "writes to what is no buffer or parameter")


def check_array(module: fx.GraphModule, members: int) -> None:
    """The graph of an array as `hfusion.passes.batch` writes it."""
    graph = module.graph
    check_links(graph)
    for node in graph.nodes:
        _need(node.op in ("placeholder", "call_function", "output"), node, f"is {node.op}, not a call")
        if node.op == "output":
            continue
        _need(isinstance(node.meta.get("layout"), Layout), node, "tells no layout")
        if node.op == "call_function":
            lowering = node.meta.get("lowering")
            _need(lowering is not None, node, "tells no lowering")
            _need(lowering.fn is node.target, node, f"calls {node.target}, its lowering {lowering.fn}")
            _need(lowering.layout is node.meta["layout"], node, f"is {node.meta['layout']}, not {lowering.layout}")
            _need("origin" in node.meta or bool(node.meta.get("transition")), node, "has no operator as its origin")
    if any(getattr(node.meta.get("origin"), "target", None) in _READING for node in graph.nodes):
        return
    placeholders = graph.find_nodes(op="placeholder")
    with fakes():
        inputs = [_like(node.meta.get("example"), node.meta["layout"], members) for node in placeholders]
        _Fake(module, members).run(*inputs)


def check_links(graph: fx.Graph) -> None:
    """Any graph: its nodes take values of earlier nodes, and call what exists."""
    try:
        graph.lint()
    except RuntimeError as error:
        raise BrokenProgram(str(error)) from error


def _need(held: bool, node: fx.Node, why: str) -> None:
    if not held:
        raise BrokenProgram(f"{node.name} {why}")


@contextmanager
def fakes() -> Iterator[FakeTensorMode]:
    """Context manager: fake tensors without gradients, tracer warnings and autocast; the random state is restored."""
    with ExitStack() as stack:
        stack.enter_context(draws_kept())
        for kind in {"cpu", *(device.type for device in accelerators())}:
            stack.enter_context(torch.autocast(kind, enabled=False))
        for context in (torch.inference_mode(False), torch.no_grad(), silence_tracers()):
            stack.enter_context(context)
        yield stack.enter_context(FakeTensorMode())


def _like(example: Any, layout: Layout, members: int) -> Any:
    """Return the array's fake value in ``layout`` for ``example``, the value that one member sees."""
    if isinstance(example, list | tuple):
        return [_like(part, layout, members) for part in example]
    if not isinstance(example, Tensor):
        return _number(example)
    if layout is Layout.LISTED:
        return Listed(_like(example, Layout.SHARED, members) for _ in range(members))
    return torch.empty(_shape(example, layout, members), dtype=example.dtype, device=example.device)


def _shape(example: Tensor, layout: Layout, members: int) -> tuple[int, ...]:
    sizes = [_number(size) for size in example.shape]
    if layout is Layout.STACKED:
        sizes = [members, *sizes]
    elif layout is Layout.PACKED:
        sizes[1] *= members
    return tuple(sizes)


def _number(number: Any) -> Any:
    """Return ``number``; if it is symbolic, its value at capture, or 1 if that is not known."""
    value = hint(number) if isinstance(number, torch.SymInt) else number
    return 1 if value is None else value


def _kind(tensor: Tensor) -> tuple[str, int]:
    return str(tensor.dtype), tensor.dim()


class _Fake(fx.Interpreter):
    """Runs an array's graph on fake tensors, and compares every value with the metadata of its node."""

    def __init__(self, module: fx.GraphModule, members: int) -> None:
        super().__init__(module)
        self.members = members

    def run_node(self, n: fx.Node) -> Any:
        if n.op != "call_function" or n.meta["lowering"] is SCALARS:
            return super().run_node(n)
        layout, example = n.meta["layout"], n.meta.get("example")
        if getattr(n.meta.get("origin"), "target", None) is OPAQUE:
            return _like(example, layout, self.members)
        try:
            value = super().run_node(n)
        except _UNTOLD:
            return _like(example, layout, self.members)
        if n.target not in (lift, lift_packed) and _sized(example):
            self._compare(n, value, example, layout)
        self._check_view(n, value)
        return value

    def _compare(self, node: fx.Node, value: Any, example: Any, layout: Layout) -> None:
        members = self.members
        expected = list(leaves(_like(example, layout, members), Tensor))
        values = list(leaves(value, Tensor))
        expected_metadata, actual_metadata = [_describe(x) for x in expected], [_describe(x) for x in values]
        matches = actual_metadata == expected_metadata
        if layout is Layout.LISTED:
            # Members may be nested in parts, or parts in members; and their numbers, as the k of topk, decide on sizes.
            matches = sorted(map(_kind, values)) == sorted(map(_kind, expected))
        _need(
            matches,
            node,
            f"gives {actual_metadata}; {layout.value} of {members} members, it must give {expected_metadata}",
        )

    def _check_view(self, node: fx.Node, value: Any) -> None:
        """Raise unless the result shares memory with an operand exactly if the lowering declares a view."""
        view = node.meta["lowering"].view
        if view not in (View.ALWAYS, View.NEVER) or (has_effect(node.meta.get("origin", node)) and view is View.NEVER):
            return
        operands = [self.env[source] for source in node.all_input_nodes]
        operand_storages = {_storage(x) for x in leaves(operands, Tensor)}
        result_storages = {_storage(x) for x in leaves(value, Tensor) if x.numel()}
        if view is View.NEVER:
            _need(
                not operand_storages & result_storages, node, "shares memory with an operand, which its lowering denies"
            )
        else:
            _need(result_storages <= operand_storages, node, "is a copy, but its lowering declares a view")


def _sized(example: Any) -> bool:
    """True if all sizes are known; sizes that depend on values of tensors are not."""
    return all(hint(size) is not None for x in leaves(example, Tensor) for size in x.shape)


def _describe(value: Any) -> str:
    return f"{value.dtype}{list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__


def _storage(tensor: Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
