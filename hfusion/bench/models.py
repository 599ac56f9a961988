"""The models that the benchmarks train, written as their users write them.

Those whose forward takes derivatives have two forms: by `torch.autograd.grad`, and by torch.func.
"""

from __future__ import annotations

from collections.abc import Iterable
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import grad, grad_and_value, hessian, vmap


def mlp(*sizes: int) -> nn.Module:
    """Linear layers ``sizes[0] -> sizes[1] -> ...`` with ReLU between them."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise(sizes):
        layers += [nn.Linear(fan_in, fan_out), nn.ReLU()]
    return nn.Sequential(*layers[:-1])


def cnn() -> nn.Module:
    """Three convolutions with BatchNorm for images [N, 1, 28, 28]; logits [N, 10]."""
    layers: list[nn.Module] = []
    for fan_in, fan_out in pairwise([1, 16, 32, 32]):
        layers += [nn.Conv2d(fan_in, fan_out, 3, padding=1), nn.BatchNorm2d(fan_out), nn.ReLU(), nn.MaxPool2d(2)]
    # No pooling behind the last one.
    return nn.Sequential(*layers[:-1], nn.Flatten(), nn.Linear(32 * 7 * 7, 10))


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


ACTIVATIONS: dict[int, type[nn.Module]] = {2: nn.ReLU6, 3: nn.Hardswish}


class Squeeze(nn.Module):
    """Weights for the channels from their means (Hu et al., "Squeeze-and-excitation networks", 2017)."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.reduce, self.expand = nn.Conv2d(channels, channels // 4, 1), nn.Conv2d(channels // 4, channels, 1)

    def forward(self, x: Tensor) -> Tensor:
        h = F.relu(self.reduce(F.adaptive_avg_pool2d(x, 1)))
        return x * F.hardsigmoid(self.expand(h))


class InvertedResidual(nn.Module):
    """Wide inside, one filter per channel, narrow outside, where the shortcut is.

    Sandler et al., "MobileNetV2" (2018); version 3 as in Howard et al., "Searching for MobileNetV3" (2019).
    """

    def __init__(self, channels_in: int, channels: int, stride: int, expand: int, version: int) -> None:
        super().__init__()
        wide = channels_in * expand
        act = ACTIVATIONS[version]
        self.shortcut = stride == 1 and channels_in == channels
        self.body = nn.Sequential(
            nn.Conv2d(channels_in, wide, 1, bias=False),
            nn.BatchNorm2d(wide),
            act(),
            nn.Conv2d(wide, wide, 3, stride=stride, padding=1, groups=wide, bias=False),
            nn.BatchNorm2d(wide),
            act(),
            Squeeze(wide) if version == 3 else nn.Identity(),
            nn.Conv2d(wide, channels, 1, bias=False),
            nn.BatchNorm2d(channels),
        )

    def forward(self, x: Tensor) -> Tensor:
        h = self.body(x)
        return x + h if self.shortcut else h  # type: ignore[no-any-return]


class MobileNet(nn.Module):
    """A stem, five inverted residuals and a head in the manner of MobileNet ``version`` 2 or 3.

    Images [N, 3, 32, 32] -> logits [N, 10].
    """

    def __init__(self, version: int) -> None:
        super().__init__()
        act = ACTIVATIONS[version]
        self.stem = nn.Sequential(nn.Conv2d(3, 16, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(16), act())
        shapes = [(16, 16, 1), (16, 24, 2), (24, 24, 1), (24, 32, 2), (32, 32, 1)]
        self.blocks = nn.Sequential(*(InvertedResidual(*shape, expand=4, version=version) for shape in shapes))
        self.head = nn.Sequential(nn.Conv2d(32, 128, 1, bias=False), nn.BatchNorm2d(128), act())
        self.fc = nn.Linear(128, 10)

    def forward(self, x: Tensor) -> Tensor:
        h = self.head(self.blocks(self.stem(x)))
        return self.fc(F.adaptive_avg_pool2d(h, 1).flatten(1))  # type: ignore[no-any-return]


def dcgan() -> nn.Module:
    """A generator of images [N, 3, 32, 32] from noise [N, 64, 1, 1].

    Radford et al., "Unsupervised representation learning with deep convolutional GANs" (2015).
    """
    layers: list[nn.Module] = []
    for fan_in, fan_out, stride, padding in ((64, 64, 1, 0), (64, 32, 2, 1), (32, 16, 2, 1)):
        layers.append(nn.ConvTranspose2d(fan_in, fan_out, 4, stride, padding, bias=False))
        layers += [nn.BatchNorm2d(fan_out), nn.ReLU()]
    return nn.Sequential(*layers, nn.ConvTranspose2d(16, 3, 4, stride=2, padding=1, bias=False), nn.Tanh())


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


def attend(qkv: Tensor, heads: int, mask: Tensor | None = None) -> Tensor:
    """Self-attention of queries, keys and values [N, T, 3 * width] -> [N, T, width].

    ``mask``, broadcast to [N, heads, T, T], selects the tokens to attend to; without one attention is causal.
    """
    batch, length, width = qkv.shape
    parts = qkv.view(batch, length, 3, heads, width // 3 // heads).unbind(2)
    q, k, v = (part.transpose(1, 2) for part in parts)
    h = F.scaled_dot_product_attention(q, k, v, attn_mask=mask, is_causal=mask is None)
    return h.transpose(1, 2).reshape(batch, length, width // 3)


class TransformerBlock(nn.Module):
    """A pre-norm transformer block with causal self-attention."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.out(attend(self.qkv(self.norm1(x)), self.heads))
        return x + self.mlp(self.norm2(x))  # type: ignore[no-any-return]


class TransformerLM(nn.Module):
    """Tokens [N, T] -> logits of the next token [N * T, vocabulary]."""

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.blocks = nn.ModuleList(TransformerBlock(width, heads) for _ in range(layers))
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, tokens: Tensor) -> Tensor:
        h = self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device))
        for block in self.blocks:
            h = block(h)
        return self.head(self.norm(h)).flatten(0, 1)  # type: ignore[no-any-return]


class EncoderBlock(TransformerBlock):
    """A post-norm transformer block, as in BERT."""

    def forward(self, x: Tensor, mask: Tensor | None = None) -> Tensor:
        x = self.norm1(x + self.out(attend(self.qkv(x), self.heads, mask)))
        return self.norm2(x + self.mlp(x))  # type: ignore[no-any-return]


class Bert(nn.Module):
    """Tokens [N, T], padded by zeros -> logits [N, 10] from the first token.

    After Devlin et al., "BERT: pre-training of deep bidirectional transformers" (2018).
    """

    def __init__(self, vocabulary: int, width: int, layers: int, heads: int, length: int) -> None:
        super().__init__()
        self.token = nn.Embedding(vocabulary, width)
        self.position = nn.Embedding(length, width)
        self.norm = nn.LayerNorm(width)
        self.blocks = nn.ModuleList(EncoderBlock(width, heads) for _ in range(layers))
        self.pooler, self.fc = nn.Linear(width, width), nn.Linear(width, 10)

    def forward(self, tokens: Tensor) -> Tensor:
        mask = (tokens != 0)[:, None, None, :]
        h = self.norm(self.token(tokens) + self.position(torch.arange(tokens.shape[1], device=tokens.device)))
        for block in self.blocks:
            h = block(h, mask)
        return self.fc(torch.tanh(self.pooler(h[:, 0])))  # type: ignore[no-any-return]


class RecurrentClassifier(nn.Module):
    """Sequences [N, T, features] -> logits [N, 10] from the last state of a recurrent ``layer``."""

    def __init__(self, layer: type[nn.LSTM] | type[nn.GRU], features: int, hidden: int) -> None:
        super().__init__()
        self.rnn = layer(features, hidden, batch_first=True)
        self.fc = nn.Linear(hidden, 10)

    def forward(self, x: Tensor) -> Tensor:
        states, _ = self.rnn(x)
        return self.fc(states[:, -1])  # type: ignore[no-any-return]


class Adapted(nn.Module):
    """A frozen Linear with a trained correction of low rank (Hu et al., "LoRA", 2021)."""

    def __init__(self, base: nn.Linear, rank: int) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Linear(base.in_features, rank, bias=False)
        self.up = nn.Linear(rank, base.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return F.relu(self.base(x) + self.up(self.down(x)))


def frozen(width: int, layers: int) -> list[nn.Linear]:
    """A base for `lora`."""
    return [nn.Linear(width, width).requires_grad_(False) for _ in range(layers)]


def lora(base: Iterable[nn.Linear], rank: int) -> nn.Sequential:
    """An adapter of each layer of ``base``, which is the same object in all that are made of it."""
    return nn.Sequential(*(Adapted(layer, rank) for layer in base))


def lora_classifier(base: Iterable[nn.Linear], width: int, rank: int) -> nn.Module:
    """Adapters and a trained head: features [N, width] -> logits [N, 10]."""
    return lora(base, rank).append(nn.Linear(width, 10))


# Models whose forward takes derivatives


def _mlp(features: int, hidden: int) -> nn.Sequential:
    layers = [nn.Linear(features, hidden), nn.Tanh(), nn.Linear(hidden, hidden), nn.Tanh(), nn.Linear(hidden, 1)]
    return nn.Sequential(*layers)


class Pinn(nn.Module):
    """Points (x, t) [N, 2] -> residual [N, 1] of Burgers' equation, u_t + u u_x - 0.01 u_xx.

    After Raissi et al., "Physics-informed neural networks" (2019).
    """

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.net = _mlp(2, hidden)

    def forward(self, points: Tensor) -> Tensor:
        points = points.detach().requires_grad_()
        u = self.net(points)
        (first,) = torch.autograd.grad(u.sum(), points, create_graph=True)
        (second,) = torch.autograd.grad(first[:, 0].sum(), points, create_graph=True)
        return first[:, 1:] + u * first[:, :1] - 0.01 * second[:, :1]  # type: ignore[no-any-return]


class FunctionalPinn(Pinn):
    """The same, a point at a time under vmap."""

    def forward(self, points: Tensor) -> Tensor:
        def u(point: Tensor) -> Tensor:
            return self.net(point).squeeze(-1)  # type: ignore[no-any-return]

        def slope(point: Tensor) -> tuple[Tensor, Tensor]:
            first, value = grad_and_value(u)(point)
            return first[0], first[1] + value * first[0]

        def residual(point: Tensor) -> Tensor:
            second, rest = grad(slope, has_aux=True)(point)
            return rest - 0.01 * second[0]  # type: ignore[no-any-return]

        return vmap(residual)(points)[:, None]


class Forces(nn.Module):
    """Positions [N, atoms, 3] -> forces [N, atoms, 3]: minus the gradient of an energy of all pairs' distances."""

    def __init__(self, hidden: int) -> None:
        super().__init__()
        self.net = _mlp(1, hidden)

    def energy(self, positions: Tensor) -> Tensor:
        """Positions [..., atoms, 3] -> energies [...]."""
        between = positions.unsqueeze(-2) - positions.unsqueeze(-3)
        # An atom's distance to itself has a gradient, too.
        squares = between.square().sum(-1, keepdim=True) + 1e-2
        return self.net(squares.rsqrt()).sum((-1, -2, -3))  # type: ignore[no-any-return]

    def forward(self, positions: Tensor) -> Tensor:
        positions = positions.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.energy(positions).sum(), positions, create_graph=True)
        return -gradient


class FunctionalForces(Forces):
    """The same by torch.func."""

    def forward(self, positions: Tensor) -> Tensor:
        return -grad(lambda moved: self.energy(moved).sum())(positions)  # type: ignore[no-any-return]


class Curvature(nn.Module):
    """Inputs [N, features] -> Hessians [N, features, features] of a scalar function."""

    def __init__(self, features: int, hidden: int) -> None:
        super().__init__()
        self.features, self.net = features, _mlp(features, hidden)

    def forward(self, x: Tensor) -> Tensor:
        x = x.detach().requires_grad_()
        (gradient,) = torch.autograd.grad(self.net(x).sum(), x, create_graph=True)
        rows = [torch.autograd.grad(gradient[:, row].sum(), x, create_graph=True)[0] for row in range(self.features)]
        return torch.stack(rows, 1)


class FunctionalCurvature(Curvature):
    """The same by `torch.func.hessian`."""

    def forward(self, x: Tensor) -> Tensor:
        def value(sample: Tensor) -> Tensor:
            return self.net(sample).squeeze(-1)  # type: ignore[no-any-return]

        return vmap(hessian(value))(x)  # type: ignore[no-any-return]
