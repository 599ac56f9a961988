"""The models that the benchmark trains, written as their users write them, with batches of random data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn


@dataclass(frozen=True)
class Case:
    """One model with one batch. Every field can be pickled: worker processes build the case again.

    ``make_batch`` returns (inputs, target); ``loss(output, target)`` is a scalar; ``tolerance`` is the
    relative difference of a loss, after a few float32 Adam steps, that still counts as agreement.
    """

    name: str
    about: str
    make_model: Callable[[], nn.Module]
    make_batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    tolerance: float = 1e-3


def mlp(*sizes: int) -> nn.Module:
    """Linear layers ``sizes[0] -> sizes[1] -> ...`` with ReLU between them."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    """Three convolutions with BatchNorm for images [N, 1, 28, 28]; logits [N, 10]."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, padding=1),
        nn.BatchNorm2d(16),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(16, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.MaxPool2d(2),
        nn.Conv2d(32, 32, 3, padding=1),
        nn.BatchNorm2d(32),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(32 * 7 * 7, 10),
    )


class ResidualBlock(nn.Module):
    """He et al., "Deep residual learning for image recognition" (2015), the basic block."""

    def __init__(self, channels_in: int, channels: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels_in, channels, 3, stride=stride, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.conv2 = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)
        self.shortcut = nn.Sequential()
        if stride != 1 or channels_in != channels:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels_in, channels, 1, stride=stride, bias=False), nn.BatchNorm2d(channels)
            )

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        h = self.bn2(self.conv2(h))
        return F.relu(h + self.shortcut(x))


class ResNet8(nn.Module):
    """A stem and three residual blocks, 16 to 64 channels, for images [N, 3, 32, 32]; logits [N, 10]."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, padding=1, bias=False), nn.BatchNorm2d(16), nn.ReLU())
        self.blocks = nn.Sequential(ResidualBlock(16, 16, 1), ResidualBlock(16, 32, 2), ResidualBlock(32, 64, 2))
        self.fc = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.blocks(self.stem(x))
        return self.fc(F.adaptive_avg_pool2d(h, 1).flatten(1))  # type: ignore[no-any-return]


class PointNet(nn.Module):
    """A shared MLP over points [N, 3, P] and a maximum over them; logits [N, 10].

    After Qi et al., "PointNet: deep learning on point sets" (2017), without the transform networks.
    """

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.bn1 = nn.Conv1d(3, 32, 1), nn.BatchNorm1d(32)
        self.conv2, self.bn2 = nn.Conv1d(32, 64, 1), nn.BatchNorm1d(64)
        self.conv3, self.bn3 = nn.Conv1d(64, 128, 1), nn.BatchNorm1d(128)
        self.fc1, self.fc2 = nn.Linear(128, 64), nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.bn1(self.conv1(x)))
        h = F.relu(self.bn2(self.conv2(h)))
        h = self.bn3(self.conv3(h)).max(dim=2).values
        return self.fc2(F.relu(self.fc1(h)))  # type: ignore[no-any-return]


class Block(nn.Module):
    """A pre-norm transformer block with causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def attend(self, x: Tensor) -> Tensor:
        batch, length, width = x.shape
        qkv = self.qkv(x).view(batch, length, 3, self.heads, width // self.heads)
        q, k, v = (part.transpose(1, 2) for part in qkv.unbind(2))
        h = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        return self.out(h.transpose(1, 2).reshape(batch, length, width))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attend(self.norm1(x))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class TransformerLM(nn.Module):
    """Tokens [N, T] -> logits of the next token [N * T, vocabulary]."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(Block(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h)).flatten(0, 1)  # type: ignore[no-any-return]


class LstmClassifier(nn.Module):
    """Sequences [N, T, features] -> logits [N, 10] from the last state of an LSTM."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.lstm = nn.LSTM(features, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.lstm(x)
        return self.fc(states[:, -1])  # type: ignore[no-any-return]


def classified(*shape: int) -> tuple[Tensor, Tensor]:
    """Normal inputs of ``shape`` and targets [shape[0]] out of ten classes, always the same, see `contradict`."""
    generator = torch.Generator().manual_seed(0)
    inputs, target = torch.randn(shape, generator=generator), torch.randint(10, shape[:1], generator=generator)
    return contradict(inputs, target, 10)


def tokens(batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Random tokens [batch, length] and the tokens that follow them [batch * length], always the same."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(vocabulary, (batch, length + 1), generator=generator)
    inputs, target = contradict(text[:, :-1].contiguous(), text[:, 1:].contiguous(), vocabulary)
    return inputs, target.flatten()


def contradict(inputs: Tensor, target: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The second half of the samples is the first half again, with other targets, so that no model learns them all.

    Else a model that is timed for long enough knows its batch by heart, and its gradients become denormal numbers, with
    which a processor computes many times slower: the time would tell how often a contender had run.
    """
    half = len(inputs) // 2
    inputs[half : 2 * half] = inputs[:half]
    target[half : 2 * half] = (target[:half] + 1) % classes
    return inputs, target


# BatchNorm divides by the spread of a batch, and Adam by the size of a gradient that may be rounding noise.
_WITH_BATCH_NORM = 2e-2

CASES = (
    Case(
        "mlp-small",
        "MLP 64-128-128-10, batch 32",
        partial(mlp, 64, 128, 128, 10),
        partial(classified, 32, 64),
    ),
    Case(
        "mlp-large",
        "MLP 784-512-512-10, batch 128",
        partial(mlp, 784, 512, 512, 10),
        partial(classified, 128, 784),
    ),
    Case(
        "cnn",
        "three convolutions with BatchNorm, 28x28, batch 32",
        cnn,
        partial(classified, 32, 1, 28, 28),
        tolerance=_WITH_BATCH_NORM,
    ),
    Case(
        "resnet8",
        "ResNet-8, 32x32, batch 32",
        ResNet8,
        partial(classified, 32, 3, 32, 32),
        tolerance=_WITH_BATCH_NORM,
    ),
    Case(
        "pointnet",
        "PointNet-like, 256 points, batch 8",
        PointNet,
        partial(classified, 8, 3, 256),
        tolerance=_WITH_BATCH_NORM,
    ),
    Case(
        "transformer",
        "transformer LM d=64, 2 layers, 4 heads, sequence 32, batch 16",
        partial(TransformerLM, vocabulary=64, width=64, layers=2, heads=4, length=32),
        partial(tokens, 16, 32, 64),
    ),
    Case(
        "lstm",
        "LSTM hidden 64, sequence 32, batch 32",
        partial(LstmClassifier, 32, 64),
        partial(classified, 32, 32, 32),
    ),
)
