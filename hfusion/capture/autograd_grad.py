"""Derivatives that a forward takes by `torch.autograd.grad`, as operators of its graph.

Autograd reads tensors that it saved itself, which a trace before dispatch does not know. So the operators between the
inputs and the outputs of such a call are taken from the graph so far, their vector-Jacobian product is traced below
autograd, and its operators are called again in the trace. They can be differentiated like any others.
"""

from __future__ import annotations

import operator
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.fx.experimental.proxy_tensor import (
    disable_proxy_modes_tracing,
    get_proxy_mode,
    get_proxy_slot,
    make_fx,
    track_tensor_tree,
)

from hfusion.core.errors import FusionError
from hfusion.ops.rule import is_random
from hfusion.passes.candidates import by_name
from hfusion.torch_private.autograd_engine import set_grad_enabled
from hfusion.torch_private.dispatch_modes import DisableTorchFunction, has_transforms_active
from hfusion.torch_private.operator_tables import decomposition_table
from hfusion.torch_private.replaced_functions import autograd_grad_replaced

aten = torch.ops.aten
_NORMALIZATIONS = frozenset(
    {aten.native_layer_norm.default, aten.native_group_norm.default, aten.native_batch_norm.default}
)


@contextmanager
def derivatives_traced() -> Iterator[None]:
    """Context manager: in an export in this thread, let `torch.autograd.grad` add operators to the graph.

    `torch.autograd.grad` then raises FusionError for derivatives that cannot be written as operators.
    """
    thread_id = threading.get_ident()

    def traced(
        run: Callable[..., Any],
        outputs: Any,
        gradients: Any,
        keep: bool,
        create: bool,
        inputs: Any,
        *args: Any,
        **options: Any,
    ) -> Any:
        mode: Any = get_proxy_mode()
        traces = threading.get_ident() == thread_id and mode is not None and mode.pre_dispatch
        if not traces or options.get("accumulate_grad", False) or has_transforms_active():
            # A call by another thread, by a trace below autograd, by backward(), or inside a transform of torch.func.
            return run(outputs, gradients, keep, create, inputs, *args, **options)
        allow_unused = args[0] if args else options.get("allow_unused", False)
        derivatives = _gradients(mode.tracer, tuple(outputs), tuple(gradients), tuple(inputs), allow_unused)
        return tuple(derivative if create or derivative is None else derivative.detach() for derivative in derivatives)

    with autograd_grad_replaced(lambda run: partial(traced, run)):
        yield


def _gradients(
    tracer: Any, outputs: Sequence[Tensor], seeds: Sequence[Any], inputs: Sequence[Any], allow_unused: bool
) -> list[Tensor | None]:
    """Return the vector-Jacobian product of ``seeds`` for each input, by operators that the tracer records."""
    if not all(isinstance(tensor, Tensor) for tensor in (*outputs, *seeds, *inputs)):
        raise FusionError("forward calls torch.autograd.grad for what is no tensor, or for outputs without a gradient")
    ends, sources = _nodes(tracer, outputs), _nodes(tracer, inputs)
    between = _between(tracer.graph, ends, sources)
    product = _Product(between, sources, ends)
    live = {slot.proxy.node: tensor for tensor, slot in tracer.tensor_tracker.items()}

    def bound(node: fx.Node) -> Any:
        """Return the value of a node: the tensor of forward, or a new one that the trace maps to it."""
        value = node.meta["val"]
        if node in live or not isinstance(value, Tensor):
            return live.get(node, value)
        with disable_proxy_modes_tracing(), DisableTorchFunction():
            twin = value.detach()
            twin.requires_grad_(twin.is_floating_point() or twin.is_complex())
        track_tensor_tree(twin, fx.Proxy(node, tracer), constant=None, tracer=tracer)
        live[node] = twin
        return twin

    with disable_proxy_modes_tracing(), DisableTorchFunction(), torch.enable_grad():
        args = [
            [operand.detach() for operand in inputs],
            [_value(n) for n in product.others],
            [operand.detach() for operand in seeds],
        ]
        module = make_fx(product, decomposition_table=_decompositions())(*args)
    if not allow_unused and not all(product.source_is_used):
        raise RuntimeError("One of the differentiated Tensors appears to not have been used in the graph.")
    arguments = [*inputs, *map(bound, product.others), *seeds]
    values = dict(zip(module.graph.find_nodes(op="placeholder"), arguments, strict=True))
    for node in list(module.graph.nodes):
        if node.name in product.repeats:
            with module.graph.inserting_before(node):
                repeated = module.graph.placeholder(f"{node.name}_repeated")
            node.replace_all_uses_with(repeated)
            values[repeated] = bound(product.repeats[node.name])
        elif node.target is aten.detach.default:
            # Autograd detaches values that it saved; later derivatives must flow through them.
            node.replace_all_uses_with(node.args[0])
    module.graph.eliminate_dead_code()
    results = iter(fx.Interpreter(module).run(initial_env=values))
    return [next(results) if is_used else None for is_used in product.source_is_used]


class _Product:
    """The vector-Jacobian product of the operators ``between`` sources and ends, as a function that can be traced.

    Attributes:
        others: the other nodes that these operators read.
        source_is_used: after a call, for each source, whether the ends depend on it.
        repeats: after a trace, the original node for the name of each traced node that repeats an operator.
    """

    def __init__(self, between: Sequence[fx.Node], sources: Sequence[fx.Node], ends: Sequence[fx.Node]) -> None:
        self._between, self._sources, self._end_nodes = between, sources, ends
        read = [*(node for call in between for node in call.all_input_nodes), *ends]
        inside = {*between, *sources}
        self.others = [node for node in dict.fromkeys(read) if node not in inside]
        self.source_is_used: list[bool] = []
        self.repeats: dict[str, fx.Node] = {}

    def __call__(self, inputs: Sequence[Tensor], others: Sequence[Any], seeds: Sequence[Tensor]) -> list[Tensor]:
        leaves = [tensor.detach().requires_grad_() for tensor in inputs]
        nodes = [*self.others, *self._sources]
        values: dict[fx.Node, Any] = dict(zip(nodes, [*others, *leaves], strict=True))
        for node in self._between:
            target: Any = node.target
            args, kwargs = fx.node.map_arg((node.args, node.kwargs), values.__getitem__)
            values[node] = target(*args, **kwargs)
            self._note(node, values[node])
        ends = [(values[node], seed) for node, seed in zip(self._end_nodes, seeds, strict=True)]
        derivatives: Sequence[Tensor | None] = [None] * len(leaves)
        if ends := [(end, seed) for end, seed in ends if end.requires_grad]:
            outputs, gradients = zip(*ends, strict=True)
            create = get_proxy_mode() is None
            derivatives = torch.autograd.grad(outputs, leaves, gradients, create_graph=create, allow_unused=True)
        self.source_is_used = [gradient is not None for gradient in derivatives]
        return [gradient for gradient in derivatives if gradient is not None]

    def _note(self, node: fx.Node, value: Any) -> None:
        mode = get_proxy_mode()
        if mode is not None and isinstance(value, Tensor):
            slot: Any = get_proxy_slot(value, mode.tracer, None)
            if slot is not None:
                self.repeats[slot.proxy.node.name] = node


def _value(node: fx.Node) -> Any:
    value = node.meta["val"]
    return value.detach() if isinstance(value, Tensor) else value


def _nodes(tracer: Any, tensors: Sequence[Tensor]) -> list[fx.Node]:
    slots: list[Any] = [get_proxy_slot(tensor, tracer, None) for tensor in tensors]
    if None in slots:
        raise FusionError("forward calls torch.autograd.grad for a tensor that is no value of its graph")
    return [slot.proxy.node for slot in slots]


def _between(graph: fx.Graph, ends: Sequence[fx.Node], sources: Sequence[fx.Node]) -> list[fx.Node]:
    """Return the operators through which the ends depend on the sources, in their order."""
    enabled, reached, following = True, set(sources), list[fx.Node]()
    for node in graph.nodes:
        if node.target is set_grad_enabled:
            enabled = bool(node.args[0])
        elif enabled and node not in reached and not reached.isdisjoint(node.all_input_nodes):
            reached.add(node)
            following.append(node)
    dependencies, operators = set(ends), list[fx.Node]()
    for node in reversed(following):
        if node in dependencies:
            operators.append(node)
            dependencies.update(node.all_input_nodes)
    for node in following:
        _check_operator(node, node in dependencies)
    return operators[::-1]


def _check_operator(node: fx.Node, between: bool) -> None:
    target = node.target
    if isinstance(target, OpOverload):
        if target._schema.is_mutable:
            raise FusionError(f"forward takes a derivative through {target}, which writes in place")
        if between and is_random(target, by_name(target, node.args, node.kwargs)):
            raise FusionError(f"forward takes a derivative through {target}, which draws random numbers")
    elif between and target is not operator.getitem:
        raise FusionError(f"forward takes a derivative through {target}, which is no operator of ATen")


@cache
def _decompositions() -> dict[Any, Callable[..., Any]]:
    """Return decompositions of backward operators into operators that can be differentiated again.

    Normalizations are decomposed, too: their derivatives use the saved statistics, which autograd treats as constants.
    """
    rules = {op: rule for op, rule in decomposition_table.items() if isinstance(op, OpOverload)}
    return {op: rule for op, rule in rules.items() if op in _NORMALIZATIONS or "backward" in str(op)}
