"""Members trained one after the other: the usual code, and the baseline of the comparisons."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from hfusion.bench.workload import Running, Unavailable, Workload

LossOf = Callable[[nn.Module, Tensor, Tensor], Tensor]
_CONVOLUTIONS = (nn.Conv2d, nn.ConvTranspose2d)


@dataclass(frozen=True)
class SerialLoop:
    """Some members of a workload, each with an optimizer of its own."""

    models: tuple[nn.Module, ...]
    optimizers: tuple[torch.optim.Adam, ...]
    inputs: Tensor
    target: Tensor
    loss_of: LossOf

    @classmethod
    def of(
        cls, workload: Workload, members: Iterable[int], fused: bool = False, channels_last: bool = False
    ) -> SerialLoop:
        """The given members, in eager mode.

        ``fused``: with torch's fused Adam. ``channels_last``: weights and inputs of convolutions in that memory format;
        raises Unavailable where there are no convolutions of images.
        """
        chosen = tuple(members)
        models, (inputs, target) = tuple(workload.models(chosen)), workload.batch()
        if channels_last:
            check_convolutions(models[0])
            # torch's types have no stub for this argument alone.
            models = tuple(model.to(memory_format=torch.channels_last) for model in models)  # type: ignore[call-overload]
            inputs = inputs.to(memory_format=torch.channels_last)
        optimizers = tuple(
            torch.optim.Adam(trained(model), lr=workload.rates[member], fused=fused or None)
            for model, member in zip(models, chosen, strict=True)
        )
        return cls(models, optimizers, inputs, target, loss_of=_loss_of(workload))

    def step(self) -> list[Tensor]:
        """One training step of each member; their losses, scalars."""
        losses = []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.zero_grad()
            loss = self.loss_of(model, self.inputs, self.target)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses


def check_convolutions(model: nn.Module) -> None:
    """Raises Unavailable where a model has no convolution of images, whose memory format matters."""
    if not any(isinstance(module, _CONVOLUTIONS) for module in model.modules()):
        raise Unavailable("has no convolution of images")


def trained(model: nn.Module) -> list[nn.Parameter]:
    """The parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def _loss_of(workload: Workload) -> LossOf:
    loss = workload.case.loss

    def loss_of(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        return loss(model(inputs), target)

    def under_autocast(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
        with workload.autocast():
            return loss(model(inputs), target)

    return loss_of if workload.amp is None else under_autocast


def start(workload: Workload, channels_last: bool = False) -> Running:
    """The eager loop."""
    return Running(SerialLoop.of(workload, range(workload.members), channels_last=channels_last).step)


def start_channels_last(workload: Workload) -> Running:
    """The same, convolutions in channels_last."""
    return start(workload, channels_last=True)
