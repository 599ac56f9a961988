"""Models of a few numbers, one for each kind of forward that matters, with what all of them are trained by."""

from __future__ import annotations

import copy
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils import _pytree as pytree

from tests import zoo
from tests.alone import Branch
from tests.forwards.table import Sevenfold

WIDTH = 5


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).tanh()).tanh())


class Gated(nn.Module):
    """A GRU over the inputs as a sequence."""

    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.GRU(1, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(x[:, :, None])[0][:, -1])


class Numbers(nn.Module):
    """Reads numbers of its own."""

    def __init__(self, kind: int) -> None:
        super().__init__()
        self.slope, self.norm = 0.1 * (kind % 3), nn.LayerNorm(5, eps=(1e-5, 1e-2)[kind % 2])
        self.first, self.last = nn.Linear(5, 5), nn.Linear(5, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.leaky_relu(self.norm(self.first(x)), self.slope) * (1 + self.slope))


class OwnGradient(nn.Module):
    """A gradient written by hand."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, 4), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(Sevenfold.apply(self.first(x).tanh()))


class Spectrum(nn.Module):
    """Complex numbers inside and in the output."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.phase = nn.Linear(5, 4), nn.Parameter(torch.randn(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.fft.rfft(self.first(x)) * torch.exp(1j * self.phase)


class Words(nn.Module):
    """An embedding with a row of padding."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.last = nn.Embedding(9, 4, padding_idx=0), nn.Linear(4, 3)

    def forward(self, ids: Tensor) -> Tensor:
        return self.last(self.words(ids).mean(1))


BASE = nn.Linear(5, 5).double().requires_grad_(False)
# The same in every process, so that a walk can be made again.
BASE.load_state_dict({n: torch.arange(t.numel()).sin().reshape(t.shape) / 2 for n, t in BASE.state_dict().items()})
SHARED = {id(tensor): tensor for tensor in BASE.parameters()}


class Adapter(nn.Module):
    """Trains a low rank beside a frozen layer that all members share."""

    def __init__(self) -> None:
        super().__init__()
        self.base, self.last = BASE, nn.Linear(5, 3)
        self.down, self.up = nn.Parameter(torch.randn(2, 5)), nn.Parameter(torch.randn(5, 2))

    def forward(self, x: Tensor) -> Tensor:
        return self.last(F.gelu(self.base(x) + x @ self.down.T @ self.up.T))


class Idle(nn.Module):
    """Has a parameter that forward does not use, and counts the batches that it has seen."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.unused = nn.Linear(5, 3), nn.Parameter(torch.ones(2))
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        return self.first(x) / (1 + 0.1 * self.seen.detach())


ACTIVATIONS: list[Callable[[], nn.Module]] = [nn.LeakyReLU, nn.PReLU, nn.Tanh]


def ablation(kind: int) -> nn.Module:
    """Members differ in a submodule."""
    return nn.Sequential(nn.Linear(5, 4), ACTIVATIONS[kind % 3](), nn.Linear(4, 3))


def normed() -> nn.Module:
    """Running statistics; no bias before them, whose gradient is rounding that an optimizer makes large."""
    return nn.Sequential(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.LeakyReLU(0.1), nn.Linear(6, 3))


def dropping(kind: int) -> nn.Module:
    """Draws at each call, and drops an element once in 10^12: arrays and members alone draw differently."""
    return nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Dropout(1e-12 * (1 + kind % 2)), nn.Linear(6, 3))


def convolved() -> nn.Module:
    return nn.Sequential(
        nn.Unflatten(1, (1, 5)), nn.Conv1d(1, 3, 3, bias=False), nn.GroupNorm(1, 3), nn.Sigmoid(), nn.Flatten(),
        nn.Linear(9, 3),
    )  # fmt: skip


def weight_normed() -> nn.Module:
    return nn.Sequential(parametrizations.weight_norm(nn.Linear(5, 4)), nn.Tanh(), nn.Linear(4, 3))


@dataclass(frozen=True)
class Entry:
    """A model of the zoo.

    Attributes:
        make: makes one in float32; members of other kinds have other numbers or submodules.
        draw: an input batch of ``n`` samples.
        floats: whether inputs are floating-point numbers, which can be NaN.
        alike: whether all kinds can share an array.
        cannot: acts that are impossible in plain torch, too.
    """

    name: str
    make: Callable[[int], nn.Module]
    draw: Callable[[int], Tensor] = lambda n: torch.randn(n, WIDTH, dtype=torch.float64)
    floats: bool = True
    alike: bool = True
    cannot: frozenset[str] = frozenset()

    def __str__(self) -> str:
        return self.name

    def model(self, kind: int, depth: int = 0) -> nn.Module:
        """Make a float64 model; one of another ``depth`` is of another class."""
        made = self.make(kind)
        for level in range(depth):
            made = Scaled(made, 1 + 0.1 * level)
        return made.double()


class Scaled(nn.Module):
    """A model whose outputs are multiplied by a number that is trained."""

    def __init__(self, inner: nn.Module, gain: float) -> None:
        super().__init__()
        self.inner, self.gain = inner, nn.Parameter(torch.tensor(gain))

    def forward(self, x: Tensor) -> Any:
        return pytree.tree_map(lambda leaf: leaf * self.gain, self.inner(x))


def of(make: Callable[[], nn.Module]) -> Callable[[int], nn.Module]:
    return lambda kind: make()


CAST = frozenset({"cast"})
ZOO: dict[str, Entry] = {
    entry.name: entry
    for entry in (
        Entry("mlp", lambda kind: nn.Sequential(nn.Linear(5, 6), nn.ReLU(), nn.Linear(6, 3))),
        Entry("batch norm", of(normed)),
        Entry("dropout", dropping),
        Entry("lstm", of(zoo.Recurrent), zoo.normal(4, 3)),
        Entry("gru", of(Gated)),
        Entry("attention", of(zoo.Attention), lambda n: torch.randint(11, (n, 5)), floats=False),
        Entry("encoder", of(zoo.encoder), zoo.normal(3, 8)),
        Entry("tied", of(Tied)),
        Entry("frozen base", lambda kind: nn.Sequential(BASE, nn.GELU(), nn.Linear(5, 3)), cannot=CAST),
        Entry("adapter", of(Adapter), cannot=CAST),
        Entry("writer", of(zoo.Writer), zoo.normal(4), cannot=frozenset({"cast", "freeze", "freeze one"})),
        Entry("numbers", Numbers),
        Entry("value branch", of(zoo.Branching), zoo.normal(4)),
        Entry("loop", of(lambda: Branch(5, 3))),
        Entry("parametrized", of(weight_normed), cannot=frozenset({"pickle"})),
        Entry("own gradient", of(OwnGradient)),
        Entry("complex", of(Spectrum), cannot=CAST),
        Entry("padding", of(Words), lambda n: torch.randint(9, (n, 4)), floats=False),
        Entry("unused", of(Idle)),
        Entry("convolution", of(convolved)),
        Entry("ablation", ablation, alike=False),
    )
}


OVERFLOWS = 1e300


def loss(output: Any, target: Tensor, reduction: str = "mean") -> Tensor:
    """A loss that reaches every output: target ``[N]``, one value for each sample before the reduction.

    A target of `OVERFLOWS` gives a finite loss, whose gradient is infinite if it is multiplied by a large scale.
    """
    values, overflows = torch.zeros_like(target), target == OVERFLOWS
    targets = target.masked_fill(overflows, 0.0)
    for place, leaf in enumerate(pytree.tree_leaves(output)):
        real = torch.view_as_real(leaf) if leaf.is_complex() else leaf
        score = real.flatten(1).sin().mean(1) * (1 + 0.3 * place)
        values = values + torch.where(overflows, score * OVERFLOWS, (score - targets) ** 2)
    return values.mean() if reduction == "mean" else values


def own_copy(model: nn.Module) -> nn.Module:
    """Return a copy with the same frozen base."""
    return copy.deepcopy(model, dict(SHARED))
