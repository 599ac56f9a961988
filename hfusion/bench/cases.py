"""The cases of the sub-benchmark ``fuse``: models with batches of random data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hfusion.bench import derivative_models, models


@dataclass(frozen=True)
class FuseCase:
    """One model with one batch. Every field can be pickled: worker processes build the case again.

    ``make_batch`` returns (inputs, target); ``loss(output, target)`` is a scalar; ``tolerance`` is the
    relative difference of a loss, after a few float32 Adam steps, that still counts as agreement. ``make_base``
    creates the frozen base that all members share, which is passed to ``make_model``; without it, ``make_model`` takes
    no argument. ``attention``: whether the model calls attention. ``make_functional`` makes the same model with
    derivatives by torch.func, where vmap and torch.compile cannot take those of ``make_model``.
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


def drawn(batch: int, noise: int, size: int) -> tuple[Tensor, Tensor]:
    """Noise [batch, noise, 1, 1], the second half as the first, and other images [batch, 3, size, size] for each."""
    generator = torch.Generator().manual_seed(0)
    inputs = torch.randn(batch - batch // 2, noise, 1, 1, generator=generator)
    images = torch.rand(batch, 3, size, size, generator=generator).mul_(2).sub_(1)
    return torch.cat([inputs, inputs])[:batch], images


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

CASES = (
    FuseCase(
        "mlp-small",
        "MLP 64-128-128-10, batch 32",
        partial(models.mlp, 64, 128, 128, 10),
        partial(classified, 32, 64),
    ),
    FuseCase(
        "mlp-large",
        "MLP 784-512-512-10, batch 128",
        partial(models.mlp, 784, 512, 512, 10),
        partial(classified, 128, 784),
    ),
    FuseCase(
        "cnn",
        "three convolutions with BatchNorm, 28x28, batch 32",
        models.cnn,
        partial(classified, 32, 1, 28, 28),
        tolerance=_WITH_BATCH_NORM,
    ),
    FuseCase(
        "resnet8",
        "ResNet-8, 32x32, batch 32",
        models.ResNet8,
        partial(classified, 32, 3, 32, 32),
        tolerance=_WITH_BATCH_NORM,
    ),
    FuseCase(
        "pointnet",
        "PointNet-like, 256 points, batch 8",
        models.PointNet,
        partial(classified, 8, 3, 256),
        tolerance=_WITH_BATCH_NORM,
    ),
    FuseCase(
        "mobilenet-v2",
        "MobileNetV2-like, 32x32, batch 16",
        partial(models.MobileNet, 2),
        partial(classified, 16, 3, 32, 32),
        tolerance=_WITH_BATCH_NORM,
    ),
    FuseCase(
        "mobilenet-v3",
        "MobileNetV3-like, 32x32, batch 16",
        partial(models.MobileNet, 3),
        partial(classified, 16, 3, 32, 32),
        tolerance=_WITH_BATCH_NORM,
    ),
    FuseCase(
        "dcgan",
        "DCGAN's generator, 32x32, batch 16",
        models.dcgan,
        partial(drawn, 16, 64, 32),
        loss=F.mse_loss,
        tolerance=_WITH_BATCH_NORM,
    ),
    FuseCase(
        "transformer",
        "transformer LM d=64, 2 layers, 4 heads, sequence 32, batch 16",
        partial(models.TransformerLM, vocabulary=64, width=64, layers=2, heads=4, length=32),
        partial(tokens, 16, 32, 64),
        attention=True,
    ),
    FuseCase(
        "bert",
        "BERT-like encoder d=64, 2 layers, 4 heads, sequence 32 with padding, batch 16",
        partial(models.Bert, vocabulary=64, width=64, layers=2, heads=4, length=32),
        partial(sentences, 16, 32, 64),
        attention=True,
    ),
    FuseCase(
        "lstm",
        "LSTM hidden 64, sequence 32, batch 32",
        partial(models.RecurrentClassifier, nn.LSTM, 32, 64),
        partial(classified, 32, 32, 32),
    ),
    FuseCase(
        "gru",
        "GRU hidden 64, sequence 32, batch 32",
        partial(models.RecurrentClassifier, nn.GRU, 32, 64),
        partial(classified, 32, 32, 32),
    ),
    FuseCase(
        "lora",
        "adapters of rank 8 on one frozen base, 6 layers of 256, batch 32",
        partial(models.lora_classifier, width=256, rank=8),
        partial(classified, 32, 256),
        make_base=partial(models.frozen, 256, 6),
    ),
    FuseCase(
        "pinn",
        "residual of Burgers' equation, MLP 2-64-64-1, 256 points",
        partial(derivative_models.Pinn, 64),
        partial(fitted, (256, 2), (256, 1)),
        loss=F.mse_loss,
        make_functional=partial(derivative_models.FunctionalPinn, 64),
    ),
    FuseCase(
        "forces",
        "gradient of an energy of 8 atoms' distances, MLP 1-64-64-1, batch 16",
        partial(derivative_models.Forces, 64),
        partial(fitted, (16, 8, 3), (16, 8, 3)),
        loss=F.mse_loss,
        make_functional=partial(derivative_models.FunctionalForces, 64),
    ),
    FuseCase(
        "hessian",
        "Hessian of an MLP 3-64-64-1, batch 128",
        partial(derivative_models.Curvature, 3, 64),
        partial(fitted, (128, 3), (128, 3, 3)),
        loss=F.mse_loss,
        make_functional=partial(derivative_models.FunctionalCurvature, 3, 64),
    ),
)
