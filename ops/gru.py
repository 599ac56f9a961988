"""GRUs of all members at once, on a CPU.

The inputs of all time steps are one product. Each step is one product of all members' hidden states and one pass of a
kernel (``rnn.c``); the backward is written out, as that of LSTMs.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from hfusion.core.layout import Layout
from hfusion.device import native
from hfusion.ops.rnn import is_large, kernels, reduced, runs
from hfusion.ops.rnn_steps import (
    differentiable_gradients,
    has_all_weights,
    recurrent,
    run_per_member,
    steps_of_all,
    through_layers,
)
from hfusion.ops.rule import Call, RuleTable, Site, Value, has_per_member
from hfusion.ops.saved import GATES

aten = torch.ops.aten

_EXACT = (torch.Tag.needs_exact_strides,)
_definitions = torch.library.Library("hfusion_gru", "DEF")
_definitions.define(
    "steps(Tensor sums, Tensor h, Tensor weights, int reverse) -> (Tensor, Tensor, Tensor)", tags=_EXACT
)
_definitions.define(
    "steps_backward(Tensor gates, Tensor rows, Tensor w_hidden, Tensor d_y, Tensor d_h, int reverse) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=_EXACT,
)


def _steps(sums: Tensor, h: Tensor, weights: Tensor, reverse: int) -> tuple[Tensor, Tensor, Tensor]:
    (members, steps, samples), (width, gates) = sums.shape[:3], weights.shape[1:]
    return (
        sums.new_empty(members, steps, samples, width),
        sums.new_empty(members, steps, samples, gates // 3),
        sums.new_empty(steps, members, samples, gates // 3 * 4),
    )


def _steps_backward(
    gates: Tensor, rows: Tensor, w_hidden: Tensor, d_y: Tensor, d_h: Tensor, reverse: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums, state = (*d_y.shape[:3], w_hidden.shape[1]), d_h.shape
    return gates.new_empty(sums), gates.new_empty(sums), gates.new_empty(state), gates.new_empty(state)


torch.library.register_fake("hfusion_gru::steps", _steps, lib=_definitions)
torch.library.register_fake("hfusion_gru::steps_backward", _steps_backward, lib=_definitions)


def gru(site: Site, input: Value, hx: Value, params: Sequence[Value], **options: Any) -> Call | None:
    """Compute `torch.nn.GRU`. Calls that the kernels do not support use torch's operator."""
    if input.example.device.type != "cpu":
        return recurrent(site, "gru", input, [hx], params, options)
    supported = input.example.dtype in native.TYPES and has_all_weights(params, options)
    if has_per_member(options) or not supported or is_large(params) or kernels():
        return None
    x, h = (v if v.shared else v.to(Layout.STACKED) for v in (input, hx))
    arguments = (site.members, x, h, [p.to(Layout.STACKED) for p in params])
    return site.call(gru_stacked, arguments, Layout.STACKED, "members as batch", options, saves=GATES)


def gru_stacked(members: int, x: Tensor, h: Tensor, weights: Sequence[Tensor], **options: Any) -> tuple[Tensor, ...]:
    """Output ``[B, T, N, D*H]`` or ``[B, N, T, D*H]``, last states ``[B, L*D, N, H]``; D directions, L layers.

    Input and first states are of one member, for all, or stacked; weights are stacked.
    """
    if torch.is_autocast_enabled("cpu") or not runs((x, h, *weights)):
        return run_per_member("gru", members, x, (h,), weights, options)
    return through_layers(_layer, members, x, (h,), weights, options)


def _layer(reverse: bool, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> Sequence[Tensor]:
    w_input, w_hidden, *biases = weights
    rows = x.flatten(-3, -2)
    rows = rows.expand(len(w_input), *rows.shape[-2:])
    sums = torch.baddbmm(biases[0].unsqueeze(1), rows, w_input.mT) if biases else torch.bmm(rows, w_input.mT)
    b_hidden = biases[1] if biases else None
    results: Sequence[Tensor] = GruLayer.apply(  # type: ignore[no-untyped-call]
        reverse, sums.view(len(w_input), *x.shape[-3:-1], -1), states[0], w_hidden, b_hidden
    )
    return results


class GruLayer(torch.autograd.Function):
    """One layer in one direction, from the products ``[B, T, N, 3*H]`` of its inputs, biases added.

    First state ``[N, H]`` or ``[B, N, H]``, weights ``[B, 3*H, H]``, biases ``[B, 3*H]`` or None. Gives the hidden
    states of all steps ``[B, T, N, H]`` and the last one ``[B, N, H]``. Cho et al. (2014), gates as in `torch.nn.GRU`.
    """

    @staticmethod
    def forward(
        ctx: Any, reverse: bool, sums: Tensor, h: Tensor, w_hidden: Tensor, b_hidden: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        operators: Any = torch.ops.hfusion_gru
        weights = w_hidden.mT if b_hidden is None else torch.cat((w_hidden.mT, b_hidden.unsqueeze(1)), 1)
        rows, y, gates = operators.steps(sums.contiguous(), h.contiguous(), weights.contiguous(), int(reverse))
        ctx.reverse = reverse
        ctx.save_for_backward(sums, h, w_hidden, b_hidden, rows, gates)
        ctx.set_materialize_grads(False)
        return y, y[:, 0 if reverse else -1].clone()

    @staticmethod
    def backward(ctx: Any, d_y: Tensor | None, d_last: Tensor | None) -> Any:
        *inputs, rows, gates = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return None, *_differentiable(ctx.reverse, inputs, needs_grad, (d_y, d_last))
        sums, h, w_hidden, _ = inputs
        size, operators = w_hidden.shape[-1], torch.ops.hfusion_gru
        d_y = sums.new_zeros(*sums.shape[:3], size) if d_y is None else d_y.contiguous()
        d_last = sums.new_zeros(len(sums), *h.shape[-2:]) if d_last is None else d_last.contiguous()
        d_sums, d_own, by_product, beside = operators.steps_backward(
            gates, rows, w_hidden.contiguous(), d_y, d_last, int(ctx.reverse)
        )
        products = torch.bmm(rows.flatten(1, 2).mT, d_own.flatten(1, 2)) if any(needs_grad[2:]) else None
        return (
            None,
            d_sums if needs_grad[0] else None,
            reduced(by_product + beside, h) if needs_grad[1] else None,
            products[:, :size].mT.contiguous() if products is not None and needs_grad[2] else None,
            products[:, size].clone() if products is not None and needs_grad[3] else None,
        )


def _differentiable(
    reverse: bool, inputs: Sequence[Tensor | None], needs_grad: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients by torch's operators, of which higher derivatives can be taken."""
    sums, h, w_hidden, b_hidden = inputs
    assert sums is not None
    assert h is not None
    assert w_hidden is not None
    first = h.expand(len(sums), *h.shape[-2:])
    y, *_ = steps_of_all(sums.transpose(0, 1), first, None, w_hidden, b_hidden, "gru", reverse)
    results = y.transpose(0, 1), y[0 if reverse else -1]
    return differentiable_gradients(results, grads, inputs, needs_grad)


RULES: RuleTable = {aten.gru.input: gru}
