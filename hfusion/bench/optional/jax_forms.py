"""Models of the benchmark in JAX: functions of a member's parameters, by their names in torch, and of one batch.

Each gives the logits. BatchNorm normalises by the batch, as in training, and keeps no running statistics.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

Array = Any
Parameters = dict[str, Array]
Form = Callable[[Parameters, Array], Array]

EPS = 1e-5
HEADS = 4


def linear(p: Parameters, name: str, x: Array) -> Array:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def conv(p: Parameters, name: str, x: Array, stride: int = 1, padding: int = 1) -> Array:
    """A convolution over images [N, C, H, W], with a bias if there is one."""
    pads = [(padding, padding)] * 2
    layout = ("NCHW", "OIHW", "NCHW")
    y = jax.lax.conv_general_dilated(x, p[f"{name}.weight"], (stride, stride), pads, dimension_numbers=layout)
    bias = p.get(f"{name}.bias")
    return y if bias is None else y + bias[:, None, None]


def batch_norm(p: Parameters, name: str, x: Array) -> Array:
    """Over [N, C, ...], by the statistics of the batch."""
    axes = (0, *range(2, x.ndim))
    shape = (-1,) + (1,) * (x.ndim - 2)
    scaled = (x - x.mean(axes, keepdims=True)) * jax.lax.rsqrt(x.var(axes, keepdims=True) + EPS)
    return scaled * p[f"{name}.weight"].reshape(shape) + p[f"{name}.bias"].reshape(shape)


def layer_norm(p: Parameters, name: str, x: Array) -> Array:
    scaled = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + EPS)
    return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]


def max_pool(x: Array) -> Array:
    """A maximum over squares of two by two."""
    window = (1, 1, 2, 2)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")


def mlp(p: Parameters, x: Array) -> Array:
    layers = sorted({int(name.split(".")[0]) for name in p})
    for layer in layers[:-1]:
        x = jax.nn.relu(linear(p, str(layer), x))
    return linear(p, str(layers[-1]), x)


def cnn(p: Parameters, x: Array) -> Array:
    h = max_pool(jax.nn.relu(batch_norm(p, "1", conv(p, "0", x))))
    h = max_pool(jax.nn.relu(batch_norm(p, "5", conv(p, "4", h))))
    h = jax.nn.relu(batch_norm(p, "9", conv(p, "8", h)))
    return linear(p, "12", h.reshape(len(h), -1))


def resnet8(p: Parameters, x: Array) -> Array:
    h = jax.nn.relu(batch_norm(p, "stem.1", conv(p, "stem.0", x)))
    for block, stride in (("blocks.0", 1), ("blocks.1", 2), ("blocks.2", 2)):
        inner = jax.nn.relu(batch_norm(p, f"{block}.bn1", conv(p, f"{block}.conv1", h, stride)))
        inner = batch_norm(p, f"{block}.bn2", conv(p, f"{block}.conv2", inner))
        if f"{block}.shortcut.0.weight" in p:
            h = batch_norm(p, f"{block}.shortcut.1", conv(p, f"{block}.shortcut.0", h, stride, padding=0))
        h = jax.nn.relu(inner + h)
    return linear(p, "fc", h.mean((2, 3)))


def pointnet(p: Parameters, x: Array) -> Array:
    for layer in (1, 2, 3):
        # A convolution of width 1: one product for all points.
        x = jnp.einsum("oi,nip->nop", p[f"conv{layer}.weight"][:, :, 0], x) + p[f"conv{layer}.bias"][:, None]
        x = batch_norm(p, f"bn{layer}", x)
        x = jax.nn.relu(x) if layer < 3 else x
    return linear(p, "fc2", jax.nn.relu(linear(p, "fc1", x.max(2))))


def transformer(p: Parameters, x: Array) -> Array:
    h = p["token.weight"][x] + p["position.weight"][: x.shape[1]]
    layers = len({name.split(".")[1] for name in p if name.startswith("blocks.")})
    for block in (f"blocks.{layer}" for layer in range(layers)):
        h = h + linear(p, f"{block}.out", _attend(linear(p, f"{block}.qkv", layer_norm(p, f"{block}.norm1", h))))
        inner = jax.nn.gelu(linear(p, f"{block}.mlp.0", layer_norm(p, f"{block}.norm2", h)), approximate=False)
        h = h + linear(p, f"{block}.mlp.2", inner)
    logits = linear(p, "head", layer_norm(p, "norm", h))
    return logits.reshape(-1, logits.shape[-1])


def _attend(qkv: Array) -> Array:
    batch, length, width = qkv.shape
    q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, HEADS, width // 3 // HEADS), 2, 0)
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / jnp.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("nhqk,nkhd->nqhd", weights, v).reshape(batch, length, width // 3)


def lstm(p: Parameters, x: Array) -> Array:
    bias = p["rnn.bias_ih_l0"] + p["rnn.bias_hh_l0"]
    gates_of_inputs = jnp.moveaxis(x, 1, 0) @ p["rnn.weight_ih_l0"].T + bias

    def cell(state: tuple[Array, Array], input_gates: Array) -> tuple[tuple[Array, Array], None]:
        hidden, memory = state
        into, forget, new, out = jnp.split(input_gates + hidden @ p["rnn.weight_hh_l0"].T, 4, axis=-1)
        memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(into) * jnp.tanh(new)
        return (jax.nn.sigmoid(out) * jnp.tanh(memory), memory), None

    zero = jnp.zeros((len(x), p["rnn.weight_hh_l0"].shape[1]))
    (hidden, _), _ = jax.lax.scan(cell, (zero, zero), gates_of_inputs)
    return linear(p, "fc", hidden)


# By the names of the benchmark's cases.
FORMS: dict[str, Form] = {
    "mlp-small": mlp,
    "mlp-large": mlp,
    "cnn": cnn,
    "resnet8": resnet8,
    "pointnet": pointnet,
    "transformer": transformer,
    "lstm": lstm,
}
