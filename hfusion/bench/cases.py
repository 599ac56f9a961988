"""The cases of ``fuse``: models with batches of random data; members of a case as a workload, and their losses."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfusion.bench import models


@dataclass(frozen=True)
class FuseCase:
    """One model with one batch. Every field can be pickled: worker processes build the case again.

    Attributes:
        make_model: makes the model; takes the base if there is one.
        make_batch: returns (inputs, target).
        loss: of (output, target), a scalar.
        tolerance: the relative difference of a loss, after a few float32 Adam steps, that still counts as agreement.
        make_base: makes the frozen base that all members share.
        attention: whether the model calls attention.
        make_functional: makes the same model with derivatives by torch.func, where vmap and torch.compile cannot take
            those of ``make_model``.
    """

    name: str
    about: str
    make_model: Callable[..., nn.Module]
    make_batch: Callable[[], tuple[Tensor, Tensor]]
    loss: Callable[[Tensor, Tensor], Tensor] = F.cross_entropy
    tolerance: float = 1e-3
    make_base: Callable[[], list[nn.Linear]] | None = None
    attention: bool = False
    make_functional: Callable[[], nn.Module] | None = None


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


def sentences(batch: int, length: int, vocabulary: int) -> tuple[Tensor, Tensor]:
    """Random tokens [batch, length], zeros after lengths of their own, and targets [batch] out of ten classes."""
    generator = torch.Generator().manual_seed(0)
    text = torch.randint(1, vocabulary, (batch, length), generator=generator)
    lengths = torch.randint(length // 4, length + 1, (batch, 1), generator=generator)
    text[torch.arange(length) >= lengths] = 0
    return contradict(text, torch.randint(10, (batch,), generator=generator), 10)


def fitted(shape: tuple[int, ...], target_shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
    """Normal inputs of ``shape``, the second half as the first, and other normal targets of a shape for each."""
    generator = torch.Generator().manual_seed(0)
    inputs, target = torch.randn(shape, generator=generator), torch.randn(target_shape, generator=generator)
    _repeat(inputs)
    return inputs, target


def _repeat(inputs: Tensor) -> int:
    """Write the first half of the samples into the second; return how many these are."""
    half = len(inputs) // 2
    inputs[half : 2 * half] = inputs[:half]
    return half


def contradict(inputs: Tensor, target: Tensor, classes: int) -> tuple[Tensor, Tensor]:
    """The second half of the samples is the first half again, with other targets, so that no model learns them all.

    Else a model that is timed for long enough knows its batch by heart, and its gradients become denormal numbers, with
    which a processor computes many times slower: the time would tell how often a contender had run.
    """
    half = _repeat(inputs)
    target[half : 2 * half] = (target[:half] + 1) % classes
    return inputs, target


# BatchNorm divides by the spread of a batch, and Adam by the size of a gradient that may be rounding noise.
_WITH_BATCH_NORM = 2e-2


def _classifier(name: str, about: str, make_model: Callable[..., nn.Module], *shape: int, **fields: Any) -> FuseCase:
    return FuseCase(name, about, make_model, partial(classified, *shape), **fields)


def _batch_norm(name: str, about: str, make_model: Callable[..., nn.Module], *shape: int) -> FuseCase:
    return _classifier(name, about, make_model, *shape, tolerance=_WITH_BATCH_NORM)


def _attention(name: str, about: str, model: type[nn.Module], make_batch: Callable[..., Any]) -> FuseCase:
    make_model = partial(model, vocabulary=64, width=64, layers=2, heads=4, length=32)
    return FuseCase(name, about, make_model, partial(make_batch, 16, 32, 64), attention=True)


def _derivatives(name: str, about: str, model: str, sizes: tuple[int, ...], *shapes: tuple[int, ...]) -> FuseCase:
    by_autograd, functional = (partial(getattr(models, form), *sizes) for form in (model, f"Functional{model}"))
    return FuseCase(name, about, by_autograd, partial(fitted, *shapes), F.mse_loss, make_functional=functional)


CASES = (
    _classifier("mlp-small", "MLP 64-128-128-10, batch 32", partial(models.mlp, 64, 128, 128, 10), 32, 64),
    _classifier("mlp-large", "MLP 784-512-512-10, batch 128", partial(models.mlp, 784, 512, 512, 10), 128, 784),
    _batch_norm("cnn", "three convolutions with BatchNorm, 28x28, batch 32", models.cnn, 32, 1, 28, 28),
    _batch_norm("resnet8", "ResNet-8, 32x32, batch 32", models.ResNet8, 32, 3, 32, 32),
    _batch_norm("pointnet", "PointNet-like, 256 points, batch 8", models.PointNet, 8, 3, 256),
    _batch_norm("mobilenet-v2", "MobileNetV2-like, 32x32, batch 16", partial(models.MobileNet, 2), 16, 3, 32, 32),
    _batch_norm("mobilenet-v3", "MobileNetV3-like, 32x32, batch 16", partial(models.MobileNet, 3), 16, 3, 32, 32),
    FuseCase(
        "dcgan",
        "DCGAN's generator, 32x32, batch 16",
        models.dcgan,
        partial(fitted, (16, 64, 1, 1), (16, 3, 32, 32)),
        F.mse_loss,
        _WITH_BATCH_NORM,
    ),
    _attention(
        "transformer", "transformer LM d=64, 2 layers, 4 heads, sequence 32, batch 16", models.TransformerLM, tokens
    ),
    _attention(
        "bert", "BERT-like encoder d=64, 2 layers, 4 heads, sequence 32 with padding, batch 16", models.Bert, sentences
    ),
    _classifier(
        "lstm",
        "LSTM hidden 64, sequence 32, batch 32",
        partial(models.RecurrentClassifier, nn.LSTM, 32, 64),
        32,
        32,
        32,
    ),
    _classifier(
        "gru", "GRU hidden 64, sequence 32, batch 32", partial(models.RecurrentClassifier, nn.GRU, 32, 64), 32, 32, 32
    ),
    _classifier(
        "lora",
        "adapters of rank 8 on one frozen base, 6 layers of 256, batch 32",
        partial(models.lora_classifier, width=256, rank=8),
        *(32, 256),
        make_base=partial(models.frozen, 256, 6),
    ),
    _derivatives("pinn", "residual of Burgers' equation, MLP 2-64-64-1, 256 points", "Pinn", (64,), (256, 2), (256, 1)),
    _derivatives(
        "forces", "forces of an energy of 8 atoms, MLP 1-64-64-1, batch 16", "Forces", (64,), (16, 8, 3), (16, 8, 3)
    ),
    _derivatives("hessian", "Hessian of an MLP 3-64-64-1, batch 128", "Curvature", (3, 64), (128, 3), (128, 3, 3)),
)


# Members of a case

# bfloat16 keeps 8 bits, and contenders round at different places.
WITH_AMP = 5e-2
# Of what members share; theirs count from 0.
BASE_SEED = 1 << 20


class Unavailable(Exception):
    """This contender cannot run this workload; the message is the reason, shown in its cell."""


def error_line(error: Exception) -> str:
    """Return the class of an error and the first line of its message."""
    lines = str(error).strip().splitlines()
    return f"{type(error).__name__}: {lines[0]}" if lines else type(error).__name__


class Disagreement(Exception):
    """A contender computes other losses than members trained one by one; its time would mean nothing."""


@dataclass(frozen=True)
class Workload:
    """``members`` models of ``case``, each with its own seed and its own learning rate.

    Attributes:
        amp: forward and loss run under autocast to this dtype.
        one_rate: all members have the rate of the first.
    """

    case: FuseCase
    members: int
    device: torch.device
    amp: torch.dtype | None = None
    one_rate: bool = False

    @property
    def rates(self) -> tuple[float, ...]:
        """One learning rate per member, from 3e-4 up to 3e-3 in equal ratios."""
        if self.one_rate:
            return (3e-4,) * self.members
        steps = max(self.members - 1, 1)
        return tuple(3e-4 * 10 ** (member / steps) for member in range(self.members))

    @property
    def tolerance(self) -> float:
        """The relative difference of a loss that still counts as agreement."""
        return self.case.tolerance if self.amp is None else max(self.case.tolerance, WITH_AMP)

    def models(self, chosen: Iterable[int] | None = None) -> list[nn.Module]:
        """Return new models of the ``chosen`` members, or of all, in training mode; always the same weights.

        The base that they share, if the case has one, is one object in all models of a call.
        """
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(BASE_SEED)
            base = () if self.case.make_base is None else (self.case.make_base(),)
            return [self._model(member, *base) for member in (range(self.members) if chosen is None else chosen)]

    def functional(self) -> Workload:
        """Return the workload with models whose forward takes derivatives by torch.func, if it takes any."""
        make_model = self.case.make_functional or self.case.make_model
        return replace(self, case=replace(self.case, make_model=make_model))

    def _model(self, member: int, *base: object) -> nn.Module:
        torch.manual_seed(member)
        return self.case.make_model(*base).to(self.device)

    def autocast(self) -> AbstractContextManager[object]:
        """Return the context of forward and loss: autocast with ``amp``, else none."""
        return nullcontext() if self.amp is None else torch.autocast(self.device.type, dtype=self.amp)

    def batch(self) -> tuple[Tensor, Tensor]:
        """Return the inputs and the target that all members share."""
        inputs, target = self.case.make_batch()
        return inputs.to(self.device), target.to(self.device)


@dataclass(frozen=True)
class Running:
    """A contender that is ready to train.

    Attributes:
        step: does one whole training step of all members (zero gradients, forward, loss, backward, Adam), and returns
            the members' losses.
        close: frees what it holds.
        cores: how many it keeps busy when torch runs one thread.
        note: what it does differently from the others.
    """

    step: Callable[[], Tensor | Sequence[Tensor]]
    close: Callable[[], None] = lambda: None
    cores: int = 1
    note: str = ""


@dataclass(frozen=True)
class Contender:
    """A way to do the same as others.

    Attributes:
        start: returns what is ready to run, for ``fuse`` a `Running` of a `Workload`. Raises Unavailable if it cannot.
        one_rate: all members have one learning rate.
    """

    name: str
    about: str
    start: Callable[..., Any]
    one_rate: bool = False


def losses(running: Running, steps: int) -> Tensor:
    """Train for ``steps`` steps, and return the losses [steps, B] as float64 on the CPU."""
    rows = []
    for _ in range(steps):
        row = running.step()
        rows.append(row if isinstance(row, Tensor) else torch.stack(list(row)))
    return torch.stack([row.detach().cpu().double() for row in rows])


def check_agreement(name: str, expected: Tensor, actual: Tensor, tolerance: float) -> None:
    """Compare losses [steps, B] of contender ``name`` with those of the serial loop.

    Raises Disagreement with the first step and member whose relative difference is above ``tolerance``, or
    not a number.
    """
    if expected.shape != actual.shape:
        raise Disagreement(f"{name}: losses [steps, B] of shape {[*actual.shape]}, serial {[*expected.shape]}")
    difference = (actual - expected).abs() / expected.abs().clamp_min(1e-12)
    wrong = ~(difference <= tolerance)
    if not wrong.any():
        return
    step, member = (int(i) for i in wrong.nonzero()[0])
    raise Disagreement(
        f"{name}: member {member} has loss {actual[step, member]:.6g} at step {step}, "
        f"trained alone {expected[step, member]:.6g} "
        f"(relative difference {difference[step, member]:.1e}, tolerated {tolerance:.0e})"
    )
