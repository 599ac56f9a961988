"""LSTMs and GRUs of all members at once, on a CPU.

Every time step is one product for all members, of inputs and hidden states side by side in memory, and one pass of a
kernel over the sums (``rnn.c``). Autograd would keep and walk a dozen operators for each step; here the backward is
written out, and the weights get their gradients from one product over all steps.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hfusion.core.layout import Layout
from hfusion.device import native
from hfusion.device.team import torch_library
from hfusion.ops.rnn_steps import (
    differentiable_gradients,
    has_all_weights,
    recurrent,
    run_per_member,
    steps_of_all,
    through_layers,
)
from hfusion.ops.rule import Call, RuleTable, Site, Value, has_per_member, hint
from hfusion.ops.saved import GATES
from hfusion.torch_private.dispatch_modes import FakeTensor, disable_current_modes, in_transform, is_wrapped

aten = torch.ops.aten

SOURCE = Path(__file__).with_name("rnn.c")

# output, hidden state, cell state.
Results: TypeAlias = tuple[Tensor, Tensor, Tensor]

# Numbers in one member's matrices of a layer up to which they stay in a cache from step to step, all members' in turn;
# above it torch's own loop over the members is faster, measured.
MAX_WEIGHTS = 1 << 19
# Products of one member's step up to which torch's forward spends more time around them than with them. Without a
# backward there is nothing else to win.
FEW_PRODUCTS = 1 << 17

# Not for the tensors that the caller passes, whose strides the kernels need.
_EXACT = (torch.Tag.needs_exact_strides,)
_STATES = "Tensor x, Tensor h, Tensor c, Tensor weights, int reverse"
_GRADS = "Tensor d_y, Tensor d_h, Tensor d_c, int reverse, int to_the_first"
_definitions = torch.library.Library("hfusion_lstm", "DEF")
_definitions.define(f"steps({_STATES}) -> (Tensor, Tensor, Tensor, Tensor)", tags=_EXACT)
_definitions.define(
    f"steps_backward(Tensor gates, Tensor cells, Tensor w_hidden, {_GRADS}) -> (Tensor, Tensor, Tensor)", tags=_EXACT
)

# What rnn.c calls, in its order.
_FUNCTIONS = (
    "aoti_torch_dtype_float64",
    "aoti_torch_device_type_cpu",
    "aoti_torch_get_dtype",
    "aoti_torch_get_data_ptr",
    "aoti_torch_get_dim",
    "aoti_torch_get_sizes",
    "aoti_torch_get_strides",
    "aoti_torch_empty_strided",
    "aoti_torch__reinterpret_tensor",
    "aoti_torch_cpu_bmm_out",
    "aoti_torch_delete_tensor_object",
    "aoti_torch_check",
    "aoti_torch_library_init_impl",
    "aoti_torch_library_impl",
    "omp_get_max_threads",
)


def _steps(x: Tensor, h: Tensor, c: Tensor, weights: Tensor, reverse: int) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    (steps, samples), (members, width), size = x.shape[-3:-1], weights.shape[:2], h.shape[-1]
    return (
        x.new_empty(members, steps, samples, width),
        x.new_empty(members, steps, samples, size),
        x.new_empty(steps, members, samples, 4 * size),
        x.new_empty(steps + 1, members, samples, size),
    )


def _steps_backward(
    gates: Tensor,
    cells: Tensor,
    w_hidden: Tensor,
    d_y: Tensor,
    d_h: Tensor,
    d_c: Tensor,
    reverse: int,
    to_the_first: int,
) -> tuple[Tensor, Tensor, Tensor]:
    steps, members, samples, sums = gates.shape
    state = (members, samples, w_hidden.shape[-1])
    return gates.new_empty(members, steps, samples, sums), gates.new_empty(state), gates.new_empty(state)


torch.library.register_fake("hfusion_lstm::steps", _steps, lib=_definitions)
torch.library.register_fake("hfusion_lstm::steps_backward", _steps_backward, lib=_definitions)


def kernels() -> str:
    """Let torch call the kernels; empty if it can, else in words why not."""
    library = native.library(SOURCE)
    return library if isinstance(library, str) else _registered()


@cache
def _registered() -> str:
    """Register the kernels by the C functions of Inductor's runtime; return why that fails, else an empty string."""
    library = native.library(SOURCE)
    assert not isinstance(library, str), library
    try:
        torch_functions = torch_library()
        addresses = [ctypes.cast(getattr(torch_functions, name), ctypes.c_void_p).value for name in _FUNCTIONS]
    except (OSError, AttributeError) as error:
        return f"torch is built in another way than expected: {error}"
    address_array = (ctypes.c_void_p * len(addresses))(*addresses)
    return "torch takes no operators in C" if library.rnn_register(address_array) else ""


def is_large(params: Sequence[Value]) -> bool:
    """Return whether a layer's matrices have more than `MAX_WEIGHTS` numbers."""
    sizes = [p.example.numel() for p in params if p.rank == 2]
    return any(sum(pair) > MAX_WEIGHTS for pair in zip(sizes[::2], sizes[1::2], strict=False))


def lstm(site: Site, input: Value, hx: Sequence[Value], params: Sequence[Value], **options: Any) -> Call | None:
    """Compute `torch.nn.LSTM`. Projections, and calls that the kernels do not support, use torch's operator."""
    if input.example.device.type != "cpu":
        return recurrent(site, "lstm", input, hx, params, options)
    x = input.example
    supported = x.dtype in native.TYPES and has_all_weights(params, options)
    if has_per_member(options) or not supported or is_large(params) or kernels():
        return None
    samples = hint(x.shape[0 if options["batch_first"] else 1]) or 1
    matrices = [p.example.numel() for p in params if p.rank == 2]
    if not options["train"] and samples * sum(matrices[:2]) > FEW_PRODUCTS:
        return None
    operands = [v if v.shared else v.to(Layout.STACKED) for v in (input, *hx)]
    weights = [p.to(Layout.STACKED) for p in params]
    return site.call(
        lstm_stacked, (site.members, *operands, weights), Layout.STACKED, "members as batch", options, saves=GATES
    )


def lstm_stacked(
    members: int, x: Tensor, h: Tensor, c: Tensor, weights: Sequence[Tensor], **options: Any
) -> tuple[Tensor, ...]:
    """Output ``[B, T, N, D*H]`` or ``[B, N, T, D*H]``, last states ``[B, L*D, N, H]``; D directions, L layers.

    Input and first states are of one member, for all, or stacked; weights are stacked. Under autocast the operands are
    rounded to its dtype and the sums are float32, as in oneDNN's kernel.
    """
    tensors = (x, h, c, *weights)
    trained = torch.is_grad_enabled() and any(tensor.requires_grad for tensor in tensors)
    few = h.shape[-2] * (weights[0][0].numel() + weights[1][0].numel()) <= FEW_PRODUCTS
    if torch.is_autocast_enabled("cpu") and (trained or few):
        lower = torch.get_autocast_dtype("cpu")
        dtypes = _dtypes_under_autocast(lower, (x.dtype, h.dtype, c.dtype, weights[0].dtype))
        rounded = [tensor.to(lower).float() if tensor.dtype is not torch.float64 else tensor for tensor in tensors]
        if dtypes is not None and runs(rounded):
            with torch.autocast("cpu", enabled=False):
                results = lstm_stacked(members, rounded[0], rounded[1], rounded[2], rounded[3:], **options)
            return tuple(result.to(dtype) for result, dtype in zip(results, dtypes, strict=True))
    if not (trained or few) or torch.is_autocast_enabled("cpu") or not runs(tensors):
        return run_per_member("lstm", members, x, (h, c), weights, options)

    def layer(reverse: bool, values: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> Results:
        matrices_and_biases = [*weights, None, None][:4]
        results: Results = LstmLayer.apply(reverse, values, *states, *matrices_and_biases)  # type: ignore[no-untyped-call]
        return results

    return through_layers(layer, members, x, (h, c), weights, options)


@cache
def _dtypes_under_autocast(lower: torch.dtype, dtypes: tuple[torch.dtype, ...]) -> tuple[torch.dtype, ...] | None:
    """The dtypes of the results of torch's operator under autocast to ``lower``; None if this processor cannot run it.

    Args:
        dtypes: the dtypes of the input, the first states and the weights.
    """
    with disable_current_modes(), torch.autocast("cpu", lower):
        x, h, c = (torch.zeros(1, 1, 1, dtype=dtype, device="cpu") for dtype in dtypes[:3])
        weight = torch.zeros(4, 1, dtype=dtypes[3], device="cpu")
        try:
            results = aten.lstm.input(x, [h, c], [weight, weight], False, 1, 0.0, True, False, False)
        except RuntimeError:
            return None
    return tuple(result.dtype for result in results)


def runs(tensors: Sequence[Tensor]) -> bool:
    """True if the kernels can run on these tensors, and autograd needs no more than their backward."""
    first = tensors[0]
    return (
        not torch.compiler.is_compiling()
        and not in_transform()
        and not kernels()
        and first.numel() > 0
        and first.dtype in native.TYPES
        and all(_plain(tensor) and tensor.is_cpu and tensor.dtype is first.dtype for tensor in tensors)
    )


def _plain(tensor: Tensor) -> bool:
    """True for a plain or fake tensor, outside of the transforms of torch.func, whose address a kernel can use."""
    return type(tensor) in (Tensor, torch.nn.Parameter, FakeTensor) and not is_wrapped(tensor)


class LstmLayer(torch.autograd.Function):
    """One layer in one direction: ``x [T, N, I]`` or ``[B, T, N, I]``, states ``[N, H]`` or ``[B, N, H]``.

    Weights ``[B, 4*H, I]`` and ``[B, 4*H, H]``, biases ``[B, 4*H]`` or None. Gives the hidden states of all steps
    ``[B, T, N, H]`` and the last states ``[B, N, H]``. Hochreiter and Schmidhuber (1997), gates as in `torch.nn.LSTM`.
    """

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def forward(
        ctx: Any,
        reverse: bool,
        x: Tensor,
        h: Tensor,
        c: Tensor,
        w_input: Tensor,
        w_hidden: Tensor,
        b_input: Tensor | None,
        b_hidden: Tensor | None,
    ) -> Results:
        operators: Any = torch.ops.hfusion_lstm
        weights = _weights(w_input, w_hidden, b_input, b_hidden)
        operands = [tensor if tensor.stride(-1) == 1 else tensor.contiguous() for tensor in (x, h, c)]
        rows, y, gates, cells = operators.steps(*operands, weights, int(reverse))
        ctx.reverse = reverse
        ctx.save_for_backward(x, h, c, w_input, w_hidden, b_input, b_hidden, rows, gates, cells)
        ctx.set_materialize_grads(False)
        return y, y[:, 0 if reverse else -1].clone(), cells[-1].clone()

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")  # type: ignore[untyped-decorator]
    def backward(ctx: Any, *grads: Tensor | None) -> Any:
        *inputs, rows, gates, cells = ctx.saved_tensors
        needs_grad = ctx.needs_input_grad[1:]
        if torch.is_grad_enabled():
            return None, *_differentiable(ctx.reverse, inputs, needs_grad, grads)
        x, h, c, w_input, w_hidden, *_ = inputs
        sums, before, carry = _sums(ctx.reverse, grads, w_hidden, gates, cells, needs_grad[1])
        flat = sums.flatten(1, 2)
        d_x = torch.bmm(flat, w_input).view(*sums.shape[:3], -1) if needs_grad[0] else None
        first = [reduced(grad, like) for grad, like in ((d_x, x), (before, h), (carry, c))]
        if not any(needs_grad[3:]):
            return None, *first, None, None, None, None
        products = torch.bmm(rows.flatten(1, 2).mT, flat)
        features, size = x.shape[-1], w_hidden.shape[-1]
        bias = products[:, -1] if any(needs_grad[5:]) else None
        return (
            None,
            *(grad if required else None for grad, required in zip(first, needs_grad, strict=False)),
            products[:, :features].mT.contiguous() if needs_grad[3] else None,
            products[:, features : features + size].mT.contiguous() if needs_grad[4] else None,
            bias.clone() if bias is not None and needs_grad[5] else None,
            bias.clone() if bias is not None and needs_grad[6] else None,
        )


def _weights(w_input: Tensor, w_hidden: Tensor, b_input: Tensor | None, b_hidden: Tensor | None) -> Tensor:
    """Return one factor ``[B, K, 4*H]`` for inputs, hidden states and, for the biases, a column of ones."""
    parts = [w_input.mT, w_hidden.mT]
    if b_input is not None and b_hidden is not None:
        parts.append((b_input + b_hidden).unsqueeze(1))
    return torch.cat(parts, 1)


def _sums(
    reverse: bool, grads: Sequence[Tensor | None], w_hidden: Tensor, gates: Tensor, cells: Tensor, to_the_first: bool
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of the sums ``[B, T, N, 4*H]`` that the gates are functions of, and of the first states ``[B, N, H]``.

    That of the hidden state is right only if it shall go ``to_the_first``.
    """
    steps, members, samples, sums = gates.shape
    operators: Any = torch.ops.hfusion_lstm
    shapes = ((members, steps, samples, sums // 4), cells.shape[1:], cells.shape[1:])
    materialized_grads = [
        gates.new_zeros(shape) if grad is None else grad.contiguous() for grad, shape in zip(grads, shapes, strict=True)
    ]
    gradients: tuple[Tensor, Tensor, Tensor] = operators.steps_backward(
        gates, cells, w_hidden.contiguous(), *materialized_grads, int(reverse), int(to_the_first)
    )
    return gradients


def reduced(grad: Tensor | None, like: Tensor) -> Tensor | None:
    """The sum over the members where they had one value in common."""
    return grad if grad is None or grad.dim() == like.dim() else grad.sum(0)


def _differentiable(
    reverse: bool, inputs: Sequence[Tensor | None], needs_grad: Sequence[bool], grads: Sequence[Tensor | None]
) -> list[Tensor | None]:
    """The gradients by torch's own operator, of which higher derivatives can be taken where it has them."""
    x, h, c, *weights = inputs
    assert x is not None
    assert h is not None
    assert c is not None
    stacks = [weight for weight in weights if weight is not None]
    options = (len(stacks) == 4, 1, 0.0, True, False, False)
    turned = x.flip(-3) if reverse else x
    named = ("has_biases", "num_layers", "dropout", "train", "bidirectional", "batch_first")
    states = h.unsqueeze(-3), c.unsqueeze(-3)
    y, *lasts = run_per_member("lstm", len(stacks[0]), turned, states, stacks, dict(zip(named, options, strict=True)))
    results = [y.flip(1) if reverse else y, *(last.squeeze(1) for last in lasts)]
    return differentiable_gradients(results, grads, inputs, needs_grad)


# GRUs of all members at once, on a CPU. The inputs of all time steps are one product, each step is one product of all
# members' hidden states and one pass of a kernel.

_gru_definitions = torch.library.Library("hfusion_gru", "DEF")
_gru_definitions.define(
    "steps(Tensor sums, Tensor h, Tensor weights, int reverse) -> (Tensor, Tensor, Tensor)", tags=_EXACT
)
_gru_definitions.define(
    "steps_backward(Tensor gates, Tensor rows, Tensor w_hidden, Tensor d_y, Tensor d_h, int reverse) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    tags=_EXACT,
)


def _gru_steps(sums: Tensor, h: Tensor, weights: Tensor, reverse: int) -> tuple[Tensor, Tensor, Tensor]:
    (members, steps, samples), (width, gates) = sums.shape[:3], weights.shape[1:]
    return (
        sums.new_empty(members, steps, samples, width),
        sums.new_empty(members, steps, samples, gates // 3),
        sums.new_empty(steps, members, samples, gates // 3 * 4),
    )


def _gru_steps_backward(
    gates: Tensor, rows: Tensor, w_hidden: Tensor, d_y: Tensor, d_h: Tensor, reverse: int
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    sums, state = (*d_y.shape[:3], w_hidden.shape[1]), d_h.shape
    return gates.new_empty(sums), gates.new_empty(sums), gates.new_empty(state), gates.new_empty(state)


torch.library.register_fake("hfusion_gru::steps", _gru_steps, lib=_gru_definitions)
torch.library.register_fake("hfusion_gru::steps_backward", _gru_steps_backward, lib=_gru_definitions)


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
    return through_layers(_gru_layer, members, x, (h,), weights, options)


def _gru_layer(reverse: bool, x: Tensor, states: Sequence[Tensor], weights: Sequence[Tensor]) -> Sequence[Tensor]:
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
            return None, *_gru_differentiable(ctx.reverse, inputs, needs_grad, (d_y, d_last))
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


def _gru_differentiable(
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


RULES: RuleTable = {aten.lstm.input: lstm, aten.gru.input: gru}
