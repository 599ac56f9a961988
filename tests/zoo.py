"""Small models as people write them, for tests of the whole way: one for every kind of trap."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Residual(nn.Module):
    def __init__(self, channels: int) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(channels)

    def forward(self, x: Tensor) -> Tensor:
        h = self.norm(self.conv(x))
        h += x
        return F.relu(h, inplace=True)


class ConvNet(nn.Module):
    """In-place activations, BatchNorm, skip connections, pooling."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.BatchNorm2d(4), nn.ReLU(inplace=True))
        self.block = Residual(4)
        self.head = nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = F.max_pool2d(self.block(self.stem(x)), 2)
        return self.head(h.mean(dim=(2, 3)))


class Depthwise(nn.Module):
    """Grouped and pointwise convolutions with squeeze-and-excitation, as MobileNet."""

    def __init__(self) -> None:
        super().__init__()
        self.expand = nn.Conv2d(3, 6, 1)
        self.depthwise = nn.Conv2d(6, 6, 3, padding=1, groups=6)
        self.norm = nn.BatchNorm2d(6)
        self.squeeze = nn.Conv2d(6, 2, 1)
        self.excite = nn.Conv2d(2, 6, 1)
        self.out = nn.Linear(6, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = F.hardswish(self.norm(self.depthwise(self.expand(x))))
        gate = F.hardsigmoid(self.excite(F.relu(self.squeeze(F.adaptive_avg_pool2d(h, 1)))))
        return self.out(F.adaptive_avg_pool2d(h * gate, 1).flatten(1))


class Decoder(nn.Module):
    """Transposed convolutions and GroupNorm, as a generator."""

    def __init__(self) -> None:
        super().__init__()
        self.lift = nn.Linear(4, 4 * 2 * 2)
        self.up = nn.ConvTranspose2d(4, 4, 4, stride=2, padding=1)
        self.norm = nn.GroupNorm(2, 4)
        self.out = nn.ConvTranspose2d(4, 1, 4, stride=2, padding=1)

    def forward(self, z: Tensor) -> Tensor:
        h = self.lift(z).view(-1, 4, 2, 2)
        return torch.tanh(self.out(F.leaky_relu(self.norm(self.up(h)), 0.2)))


class Points(nn.Module):
    """Conv1d and a maximum over points."""

    def __init__(self) -> None:
        super().__init__()
        self.features = nn.Sequential(nn.Conv1d(3, 6, 1), nn.BatchNorm1d(6), nn.ReLU(), nn.Conv1d(6, 8, 1))
        self.norm = nn.BatchNorm1d(8)
        self.out = nn.Linear(8, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.norm(torch.max(self.features(x), 2)[0]))


class Attention(nn.Module):
    """A tied, causal language model with positions in a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.token = nn.Embedding(11, 8)
        self.register_buffer("position", torch.randn(6, 8))
        self.norm = nn.LayerNorm(8)
        self.qkv = nn.Linear(8, 24)
        self.mix = nn.Linear(8, 8)
        self.out = nn.Linear(8, 11, bias=False)
        self.out.weight = self.token.weight

    def forward(self, ids: Tensor) -> Tensor:
        n, t = ids.shape
        x = self.token(ids) + self.position[:t]
        q, k, v = self.qkv(self.norm(x)).view(n, t, 3, 2, 4).permute(2, 0, 3, 1, 4).unbind(0)
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.mix(h.transpose(1, 2).reshape(n, t, 8))
        return self.out(F.gelu(x))


class Recurrent(nn.Module):
    """An LSTM, which no batching rule covers."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(3, 5, batch_first=True)
        self.out = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        h, _ = self.lstm(x)
        return self.out(h[:, -1])


class Writer(nn.Module):
    """Writes through views, a no_grad running mean, constants, einsum."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(4, 5))
        self.register_buffer("mean", torch.zeros(5))
        self.scale = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0], dtype=torch.float64)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        h = torch.einsum("ni,io->no", x, self.weight)
        with torch.no_grad():
            self.mean.mul_(0.9).add_(h.mean(0), alpha=0.1)
        h = h - self.mean
        y = h * self.scale
        y[:, 1:3] = 0.5
        y[:, 0].mul_(2.0)
        return {"y": y, "h": h}


class Branching(nn.Module):
    """Branches on values in one submodule, which must run member by member."""

    class Gate(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(5, 5)

        def forward(self, x: Tensor) -> Tensor:
            y = self.linear(x)
            return y * 2 if y.sum() > 0 else torch.sin(y)

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 5)
        self.gate = Branching.Gate()
        self.last = nn.Linear(5, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.gate(torch.relu(self.first(x))))


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 6), nn.Tanh(), nn.Linear(6, 3))


def normed_mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.SiLU(), nn.LayerNorm(6), nn.Linear(6, 2))


def encoder() -> nn.Module:
    layer = nn.TransformerEncoderLayer(8, 2, 12, dropout=0.0, batch_first=True)
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)


@dataclass(frozen=True)
class Model:
    """A model and how to draw an input batch of ``n`` for it."""

    name: str
    make: Callable[[], nn.Module]
    draw: Callable[[int], Tensor]

    def __str__(self) -> str:
        return self.name


def normal(*shape: int) -> Callable[[int], Tensor]:
    return lambda n: torch.randn(n, *shape, dtype=torch.float64)


MODELS = [
    Model("mlp", mlp, normal(4)),
    Model("normed_mlp", normed_mlp, normal(4)),
    Model("convnet", ConvNet, normal(2, 8, 8)),
    Model("depthwise", Depthwise, normal(3, 5, 5)),
    Model("decoder", Decoder, normal(4)),
    Model("points", Points, normal(3, 7)),
    Model("attention", Attention, lambda n: torch.randint(11, (n, 5))),
    Model("encoder", encoder, normal(5, 8)),
    Model("recurrent", Recurrent, normal(4, 3)),
    Model("writer", Writer, normal(4)),
    Model("branching", Branching, normal(4)),
]
