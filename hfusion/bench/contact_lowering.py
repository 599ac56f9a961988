"""Times of ``contact``: operators in each way in which they can run, which were chosen without a time of a GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from statistics import median
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.bench import timing
from hfusion.bench.command_line import named
from hfusion.bench.contact_item import CheckResult, ContactItem, ContactStatus, computes

MEMBERS = 16
QUICK = ("linear-64", "lstm-64")
ROUNDS, SLOT = 5, 0.05


@dataclass(frozen=True)
class LayerCase:
    """A layer of an array, and the shape of a member's input."""

    name: str
    make: Callable[[], nn.Module]
    shape: tuple[int, ...]


class DroppedAttention(nn.Module):
    """Attention with dropout of an input ``[N, heads, T, width]`` that is projected."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.project = nn.Linear(width, 3 * width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x).chunk(3, -1)
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.1 if self.training else 0.0)


class RecurrentOutputs(nn.Module):
    """The outputs of a recurrent layer."""

    def __init__(self, kind: type[nn.LSTM] | type[nn.GRU], hidden: int) -> None:
        super().__init__()
        self.layer = kind(hidden, hidden, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)[0]  # type: ignore[no-any-return]


def _convolution(channels: int, size: int, kernel: int = 3, groups: int = 1) -> LayerCase:
    make = partial(nn.Conv2d, channels, channels, kernel, padding=kernel // 2, groups=groups)
    kind = "depthwise" if groups > 1 else f"conv{kernel}"
    return LayerCase(f"{kind}-{channels}x{size}x{size}", make, (32, channels, size, size))


LAYERS = (
    _convolution(16, 32),
    _convolution(64, 16),
    _convolution(256, 8),
    _convolution(64, 16, kernel=1),
    _convolution(64, 16, groups=64),
    LayerCase("batchnorm-64x16x16", partial(nn.BatchNorm2d, 64), (32, 64, 16, 16)),
    LayerCase("linear-64", partial(nn.Linear, 64, 64), (32, 64)),
    LayerCase("linear-1024", partial(nn.Linear, 1024, 1024), (128, 1024)),
    LayerCase("attention-dropout-128", partial(DroppedAttention, 64), (4, 4, 128, 64)),
    LayerCase("attention-dropout-1024", partial(DroppedAttention, 64), (2, 4, 1024, 64)),
    LayerCase("lstm-64", partial(RecurrentOutputs, nn.LSTM, 64), (32, 32, 64)),
    LayerCase("lstm-512", partial(RecurrentOutputs, nn.LSTM, 512), (32, 64, 512)),
    LayerCase("gru-64", partial(RecurrentOutputs, nn.GRU, 64), (32, 32, 64)),
)


def lowering_items(quick: bool) -> Iterator[ContactItem]:
    """Yield the times of each layer."""
    for layer in named(LAYERS, QUICK) if quick else LAYERS:
        yield ContactItem(f"lowering {layer.name}", partial(time_layer, layer), limit=90.0, exclusive=True)


def time_layer(layer: LayerCase, device: torch.device) -> CheckResult:
    """Time forward and backward of an array as estimated and as measured, and of its members in a loop.

    `hfusion.fuse` compares outputs and gradients with those of the members; the measuring gives the time of each way.
    """
    models = [layer.make().to(device) for _ in range(MEMBERS)]
    inputs = torch.randn(MEMBERS, *layer.shape, device=device)
    check = computes(device)
    arrays = {name: hf.fuse(models, verify=check, tune=tune) for name, tune in (("hfusion", False), ("tuned", True))}

    def loop() -> list[Tensor]:
        return [model(x) for model, x in zip(models, inputs, strict=True)]

    steps = {"loop": partial(_differentiate, loop, [param for model in models for param in model.parameters()])}
    for name, array in arrays.items():
        steps[name] = partial(_differentiate, partial(array, hf.stacked(inputs)), list(array.parameters()))
    seconds = timing.interleave(steps, rounds=ROUNDS, slot=SLOT, device=device, tick=lambda: None)
    milliseconds = {name: round(1e3 * median(times), 4) for name, times in seconds.items()}
    operators = [
        {
            "operator": row.operator,
            "count": row.count,
            "chosen": str(row.lowering),
            "estimated ms": 1e3 * row.cost.estimate,
            "measured ms": None if row.cost.measured is None else 1e3 * row.cost.measured,
            "others ms": {str(lowering): 1e3 * lost for lowering, lost in row.cost.lost.items()},
        }
        for part in arrays["tuned"].report().parts
        for row in part.rows
    ]
    summary = ", ".join(f"{name} {time:.3g} ms" for name, time in milliseconds.items())
    status = ContactStatus.OK if check else ContactStatus.NOT_COMPUTED
    return CheckResult(status, summary=summary, values={"ms": milliseconds, "operators": operators})


def _differentiate(forward: Callable[[], Any], parameters: list[Tensor]) -> None:
    output = forward()
    outputs = output if isinstance(output, list) else [output]
    torch.autograd.grad(outputs, parameters, [torch.ones_like(tensor) for tensor in outputs])
