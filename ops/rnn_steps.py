"""Recurrent layers of all members at once on an accelerator, a time step at a time.

cuDNN computes the layer of one member, and a loop over members leaves most of a GPU idle. Here the inputs of all steps
are one product, and each step is one product of all members' hidden states and one fused cell of torch's. Backward is
written out, so that weights get their gradients from one product over all steps.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hfusion.core.layout import Layout, Listed
from hfusion.ops.lowering import family
from hfusion.ops.random import dropout_stacked
from hfusion.ops.rule import Call, RuleTable, Site, Value, call_per_member, has_per_member
from hfusion.ops.saved import GATES_TWICE
from hfusion.torch_private.dispatch_modes import in_transform, is_wrapped
from hfusion.torch_private.operator_tables import has_device_kernel

aten = torch.ops.aten

# From as many members on a step of all takes less time than a step of each by cuDNN.
MIN_MEMBERS = 8

State: TypeAlias = tuple[Tensor, Tensor | None]
"""Hidden state ``[B*N, H]``, and the cell state of an LSTM."""

_definitions = torch.library.Library("hfusion_rnn", "DEF")
_definitions.define(
    "steps(Tensor sums, Tensor h, Tensor? c, Tensor w_hidden, Tensor? b_hidden, str kind, bool reverse) "
    "-> (Tensor, Tensor, Tensor)"
)
_definitions.define(
    "steps_backward(Tensor d_y, Tensor? d_c, Tensor y, Tensor h, Tensor cells, Tensor? c, Tensor kept, "
    "Tensor w_hidden, str kind, bool reverse) -> (Tensor, Tensor, Tensor, Tensor)"
)

# The number of values of hidden size that a cell keeps for backward.
_KEPT = {"lstm": 4, "gru": 5, "rnn_tanh": 0, "rnn_relu": 0}


def _fused(kind: str, device: torch.device) -> bool:
    """True if torch has fused kernels of the cell for the device, as on CUDA and ROCm."""
    return kind in ("lstm", "gru") and has_device_kernel(f"aten::_thnn_fused_{kind}_cell", device)


def _cell(kind: str, fused: bool, sums: Tensor, hidden: Tensor, state: State) -> tuple[State, Tensor]:
    """Return the next state of a cell and the tensor that its backward needs; gates as in torch.nn.LSTM and GRU."""
    h, c = state
    if kind == "lstm":
        assert c is not None
        if fused:
            h, c, workspace = aten._thnn_fused_lstm_cell(sums, hidden, c)
            return (h, c), workspace
        first, forget, values, last = (sums + hidden).chunk(4, -1)
        first, forget, values, last = first.sigmoid(), forget.sigmoid(), values.tanh(), last.sigmoid()
        c = forget * c + first * values
        return (last * c.tanh(), c), torch.cat((first, forget, values, last), -1)
    if kind == "gru":
        if fused:
            h, workspace = aten._thnn_fused_gru_cell(sums, hidden, h)
            return (h, None), workspace
        (r, z, n), (r_hidden, z_hidden, n_hidden) = sums.chunk(3, -1), hidden.chunk(3, -1)
        r, z = (r + r_hidden).sigmoid(), (z + z_hidden).sigmoid()
        n = (n + r * n_hidden).tanh()
        return (n + z * (h - n), None), torch.cat((r, z, n, h, n_hidden), -1)
    h = (sums + hidden).tanh() if kind == "rnn_tanh" else (sums + hidden).relu()
    return (h, None), h[:, :0]


def _cell_backward(
    kind: str, fused: bool, d_h: Tensor, d_c: Tensor | None, before: State, after: State, workspace: Tensor
) -> tuple[Tensor, Tensor, Tensor | None, Tensor | None]:
    """Return the gradients of both sums, of the hidden state (apart from the sums' share), and of the cell state."""
    if kind == "lstm":
        assert d_c is not None
        assert before[1] is not None
        assert after[1] is not None
        if fused:
            d_sums, d_c, _ = aten._thnn_fused_lstm_cell_backward_impl(d_h, d_c, before[1], after[1], workspace, False)
            return d_sums, d_sums, None, d_c
        first, forget, values, last = workspace.chunk(4, -1)
        reached = after[1].tanh()
        d_c = d_c + d_h * last * (1 - reached * reached)
        d_sums = torch.cat(
            (
                d_c * values * first * (1 - first),
                d_c * before[1] * forget * (1 - forget),
                d_c * first * (1 - values * values),
                d_h * reached * last * (1 - last),
            ),
            -1,
        )
        return d_sums, d_sums, None, d_c * forget
    if kind == "gru":
        if fused:
            d_sums, d_hidden, d_direct, _, _ = aten._thnn_fused_gru_cell_backward(d_h, workspace, False)
            return d_sums, d_hidden, d_direct, None
        r, z, n, h, n_hidden = workspace.chunk(5, -1)
        d_n = d_h * (1 - z) * (1 - n * n)
        d_r, d_z = d_n * n_hidden * r * (1 - r), d_h * (h - n) * z * (1 - z)
        return torch.cat((d_r, d_z, d_n), -1), torch.cat((d_r, d_z, d_n * r), -1), d_h * z, None
    h = after[0]
    d_sums = d_h * (1 - h * h) if kind == "rnn_tanh" else d_h * (h > 0)
    return d_sums, d_sums, None, None


def _order(count: int, reverse: bool) -> range:
    return range(count - 1, -1, -1) if reverse else range(count)


def steps_of_all(
    sums: Tensor, h: Tensor, c: Tensor | None, w_hidden: Tensor, b_hidden: Tensor | None, kind: str, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Hidden states ``[T, B, N, H]``, cell states, and what backward needs; arguments as of `Steps`."""
    count, members, samples, _ = sums.shape
    weights, bias = w_hidden.mT, None if b_hidden is None else b_hidden.unsqueeze(1)
    fused = _fused(kind, sums.device)
    state: State = (h.reshape(members * samples, -1), None if c is None else c.reshape(members * samples, -1))
    results: list[tuple[Tensor, ...]] = []
    for step in _order(count, reverse):
        before = state[0].view(members, samples, -1)
        hidden = torch.bmm(before, weights) if bias is None else torch.baddbmm(bias, before, weights)
        state, workspace = _cell(kind, fused, sums[step].flatten(0, 1), hidden.flatten(0, 1), state)
        results.append((state[0], workspace) if state[1] is None else (state[0], workspace, state[1]))
    if reverse:
        results.reverse()
    y, workspace, *cells = (
        torch.stack(column).view(count, members, samples, column[0].shape[-1]) for column in zip(*results, strict=True)
    )
    return y, cells[0] if cells else y.new_empty(0), workspace


def _steps_backward(
    d_y: Tensor,
    d_c: Tensor | None,
    y: Tensor,
    h: Tensor,
    cells: Tensor,
    c: Tensor | None,
    workspace: Tensor,
    w_hidden: Tensor,
    kind: str,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    count, members, samples, size = y.shape
    fused, rows = _fused(kind, y.device), (members * samples, size)
    order = list(_order(count, reverse))

    def state_after(index: int) -> State:
        if index < 0:
            return h.reshape(rows), None if c is None else c.reshape(rows)
        step = order[index]
        return y[step].view(rows), None if c is None else cells[step].view(rows)

    gradients: list[tuple[Tensor, Tensor]] = []
    d_h = d_y[order[-1]].reshape(rows)
    d_c = None if d_c is None else d_c.reshape(rows)
    for index in range(count - 1, -1, -1):
        arguments = state_after(index - 1), state_after(index), workspace[order[index]].flatten(0, 1)
        d_sums, d_hidden, d_direct, d_c = _cell_backward(kind, fused, d_h, d_c, *arguments)
        gradients.append((d_sums, d_hidden))
        d_gates = d_hidden.view(members, samples, -1)
        if index:
            d_h = torch.baddbmm(d_y[order[index - 1]], d_gates, w_hidden).view(rows)
        else:
            d_h = torch.bmm(d_gates, w_hidden).view(rows)
        if d_direct is not None:
            d_h = d_h + d_direct
    if not reverse:
        gradients.reverse()
    d_sums, d_hidden = (
        torch.stack(column).view(count, members, samples, -1) for column in zip(*gradients, strict=True)
    )
    state = (members, samples, size)
    return (
        d_sums,
        d_hidden if kind == "gru" else y.new_empty(0),
        d_h.view(state),
        y.new_empty(0) if d_c is None else d_c.view(state),
    )


def _fake_steps(
    sums: Tensor, h: Tensor, c: Tensor | None, w_hidden: Tensor, b_hidden: Tensor | None, kind: str, reverse: bool
) -> tuple[Tensor, Tensor, Tensor]:
    y = sums.new_empty(*sums.shape[:-1], w_hidden.shape[-1])
    cells = torch.empty_like(y) if kind == "lstm" else y.new_empty(0)
    return y, cells, y.new_empty(*y.shape[:-1], _KEPT[kind] * y.shape[-1])


def _fake_backward(
    d_y: Tensor,
    d_c: Tensor | None,
    y: Tensor,
    h: Tensor,
    cells: Tensor,
    c: Tensor | None,
    workspace: Tensor,
    w_hidden: Tensor,
    kind: str,
    reverse: bool,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    d_sums = y.new_empty(*y.shape[:-1], w_hidden.shape[-2])
    d_hidden = torch.empty_like(d_sums) if kind == "gru" else y.new_empty(0)
    state = y.new_empty(y.shape[1:])
    return d_sums, d_hidden, state, y.new_empty(0) if c is None else torch.empty_like(state)


_definitions.impl("steps", steps_of_all, "CompositeExplicitAutograd")
_definitions.impl("steps_backward", _steps_backward, "CompositeExplicitAutograd")
torch.library.register_fake("hfusion_rnn::steps", _fake_steps, lib=_definitions)
torch.library.register_fake("hfusion_rnn::steps_backward", _fake_backward, lib=_definitions)


class Steps(torch.autograd.Function):
    """A layer in one direction, from the products ``[T, B, N, G*H]`` of its inputs, biases added.

    States ``[B, N, H]``, weights ``[B, G*H, H]``, and of a GRU the biases ``[B, G*H]`` of its hidden state. Gives the
    hidden states ``[T, B, N, H]`` of all steps, and the last cell state.
    """

    @staticmethod
    def forward(
        ctx: Any,
        kind: str,
        reverse: bool,
        sums: Tensor,
        h: Tensor,
        c: Tensor | None,
        w_hidden: Tensor,
        b_hidden: Tensor | None,
    ) -> tuple[Tensor, Tensor | None]:
        operators: Any = torch.ops.hfusion_rnn
        y, cells, workspace = operators.steps(sums, h, c, w_hidden, b_hidden, kind, reverse)
        ctx.kind, ctx.reverse, ctx.biased = kind, reverse, b_hidden is not None
        ctx.save_for_backward(y, h, cells, c, workspace, w_hidden)
        return y, None if c is None else cells[0 if reverse else -1].clone()

    @staticmethod
    def backward(ctx: Any, d_y: Tensor, d_c: Tensor | None) -> Any:
        operators: Any = torch.ops.hfusion_rnn
        y, h, cells, c, workspace, w_hidden = ctx.saved_tensors
        saved = (y, h, cells, c, workspace, w_hidden)
        d_sums, d_hidden, d_h, d_c = operators.steps_backward(d_y.contiguous(), d_c, *saved, ctx.kind, ctx.reverse)
        if ctx.kind != "gru":
            d_hidden = d_sums
        before = torch.cat([y[1:], h[None]] if ctx.reverse else [h[None], y[:-1]])
        d_weights = torch.bmm(d_hidden.permute(1, 3, 0, 2).flatten(2), before.transpose(0, 1).flatten(1, 2))
        d_biases = d_hidden.sum((0, 2)) if ctx.biased else None
        gradients = [d_sums, d_h, d_weights, *(d for d in (d_biases, d_c) if d is not None and d.numel())]
        if torch.is_grad_enabled():
            gradients = list(FirstDerivatives.apply(len(gradients), *gradients, y, w_hidden))  # type: ignore[no-untyped-call]
        d_sums, d_h, d_weights, *others = gradients
        d_biases = others.pop(0) if ctx.biased else None
        return None, None, d_sums, d_h, others[0] if others else None, d_weights, d_biases


class FirstDerivatives(torch.autograd.Function):
    """Return the first ``count`` operands, which are gradients; raise an error if they are differentiated again."""

    @staticmethod
    def forward(ctx: Any, count: int, *operands: Tensor) -> tuple[Tensor, ...]:
        return tuple(operand.clone() for operand in operands[:count])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        raise RuntimeError(
            "second derivatives of recurrent layers are not available on an accelerator, as cuDNN has none: compute "
            "them on the CPU"
        )


def recurrent(
    site: Site, kind: str, input: Value, states: Sequence[Value], params: Sequence[Value], options: Mapping[str, Any]
) -> Call | None:
    """Compute `torch.nn.LSTM`, `torch.nn.GRU` or `torch.nn.RNN`; None for projections, and on a CPU."""
    supported = input.example.is_floating_point() and has_all_weights(params, options)
    on_host = input.example.device.type == "cpu"
    if on_host or not supported or site.members < MIN_MEMBERS or has_per_member(options):
        return None
    operands = [v if v.shared else v.to(Layout.STACKED) for v in (input, *states)]
    weights = [p.to(Layout.STACKED) for p in params]
    arguments = (kind, site.members, operands[0], operands[1:], weights)
    return site.call(recurrent_stacked, arguments, Layout.STACKED, "members as batch", options, saves=GATES_TWICE)


def recurrent_stacked(
    kind: str, members: int, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], **options: Any
) -> tuple[Tensor, ...]:
    """Output ``[B, T, N, D*H]`` or ``[B, N, T, D*H]``, last states ``[B, L*D, N, H]``; D directions, L layers.

    Input and first states are of one member, for all, or stacked; weights are stacked.
    """
    if torch.compiler.is_compiling() or in_transform() or any(map(is_wrapped, (x, *states, *weights))):
        return run_per_member(kind, members, x, states, weights, options)
    device = x.device.type
    if torch.is_autocast_enabled(device):
        dtype = torch.get_autocast_dtype(device)
        x, states, weights = x.to(dtype), [s.to(dtype) for s in states], [w.to(dtype) for w in weights]
        with torch.autocast(device, enabled=False):
            return recurrent_stacked(kind, members, x, states, weights, **options)
    gru = kind == "gru"

    def layer(reverse: bool, values: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> Sequence[Tensor]:
        w_input, w_hidden, *biases = weights
        h, *cell = (state.expand(members, *state.shape[-2:]) for state in states)
        # The candidate of a GRU is scaled between its two biases.
        added = None if not biases else biases[0] if gru else biases[0] + biases[1]
        b_hidden = biases[1] if biases and gru else None
        sums = _products(values, w_input, added)
        y, c = Steps.apply(  # type: ignore[no-untyped-call]
            kind, reverse, sums, h, cell[0] if cell else None, w_hidden, b_hidden
        )
        last = y[0 if reverse else -1]
        return y.transpose(0, 1), last, *([] if c is None else [c])

    return through_layers(layer, members, x, states, weights, options)


def rnn(site: Site, input: Value, hx: Value, params: Sequence[Value], **options: Any) -> Call | None:
    return recurrent(site, family(site.target), input, [hx], params, options)


def _products(x: Tensor, weights: Tensor, biases: Tensor | None) -> Tensor:
    """``[T, B, N, G*H]`` of inputs ``[T, N, I]``, the same for all members, or ``[B, T, N, I]``."""
    members, features = len(weights), x.shape[-1]
    if x.dim() == 3:
        flat = x.reshape(-1, features) @ weights.reshape(-1, features).mT
        sums = flat.view(*x.shape[:2], members, -1).transpose(1, 2)
    else:
        sums = torch.bmm(x.flatten(1, 2), weights.mT).view(*x.shape[:3], -1).transpose(0, 1)
    return (sums if biases is None else sums + biases.unsqueeze(1)).contiguous()


RULES: RuleTable = {aten.rnn_tanh.input: rnn, aten.rnn_relu.input: rnn}


# The parts that all computations of recurrent layers share: layers and directions, and the loop over members.

Layer: TypeAlias = Callable[[bool, Tensor, Sequence[Tensor], Sequence[Tensor]], Sequence[Tensor]]
"""From ``reverse``, inputs, first states and weights of a layer in one direction: ``[B, T, N, H]``, and last states."""


def through_layers(
    layer: Layer,
    members: int,
    x: Tensor,
    states: Sequence[Tensor],
    weights: Sequence[Tensor],
    options: Mapping[str, Any],
) -> tuple[Tensor, ...]:
    """Compute all layers and directions, with dropout between layers; arguments as of torch's operators."""
    directions, count = (2 if options["bidirectional"] else 1), (4 if options["has_biases"] else 2)
    values = x.transpose(-3, -2) if options["batch_first"] else x
    lasts: list[list[Tensor]] = [[] for _ in states]
    for index in range(options["num_layers"]):
        outputs: list[Tensor] = []
        for position in range(index * directions, (index + 1) * directions):
            first, layer_weights = (
                [state.select(-3, position) for state in states],
                weights[count * position : count * (position + 1)],
            )
            output, *after = layer(position % directions == 1, values, first, layer_weights)
            outputs.append(output)
            for column, state in zip(lasts, after, strict=True):
                column.append(state)
        values = outputs[0] if directions == 1 else torch.cat(outputs, -1)
        if options["dropout"] and options["train"] and index + 1 < options["num_layers"]:
            values = dropout_stacked(values, float(options["dropout"]), members, False, False)
    y = values.transpose(-3, -2) if options["batch_first"] else values
    return y, *(torch.stack(column, 1) for column in lasts)


def run_per_member(
    kind: str, members: int, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor], options: Mapping[str, Any]
) -> tuple[Tensor, ...]:
    """Compute the layers by torch's own operator, member by member."""
    params = [Listed(weight.unbind()) for weight in weights]
    member_x, *member_states = (tensor if tensor.dim() == 3 else Listed(tensor.unbind()) for tensor in (x, *states))
    target = getattr(aten, kind).input
    rows = call_per_member(
        target,
        members,
        (member_x, member_states if kind == "lstm" else member_states[0], params, *options.values()),
        {},
    )
    return tuple(torch.stack(parts) for parts in zip(*rows, strict=True))


def has_all_weights(params: Sequence[object], options: Mapping[str, Any]) -> bool:
    """Return whether each layer and direction has its two matrices, its biases if there are any, and no projection."""
    per_layer = (4 if options["has_biases"] else 2) * (2 if options["bidirectional"] else 1)
    layers: int = options["num_layers"]
    return len(params) == per_layer * layers


def differentiable_gradients(
    results: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    inputs: Sequence[Tensor | None],
    needs_grad: Sequence[bool],
) -> list[Tensor | None]:
    """Return the gradients of the inputs, of which higher derivatives can be taken; None where ``needs_grad`` is False.

    Args:
        results: computed from ``inputs`` by torch's operators.
        grads: the gradient of each result, None where it has none.
    """
    pairs = [(result, grad) for result, grad in zip(results, grads, strict=True) if grad is not None]
    required_inputs = [
        tensor for tensor, required in zip(inputs, needs_grad, strict=True) if required and tensor is not None
    ]
    outputs, seeds = zip(*pairs, strict=True)
    gradients = iter(torch.autograd.grad(outputs, required_inputs, seeds, create_graph=True, allow_unused=True))
    return [next(gradients) if required else None for required in needs_grad]
