"""A group of one member that is in no array: its model runs in eager torch."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from contextlib import ExitStack
from typing import Any, cast

import torch
from torch import Tensor, nn

from hfusion.array.fuse import fuse
from hfusion.array.member_functions import MemberFunction
from hfusion.core.calls import call_arguments
from hfusion.core.loss_checks import check_losses
from hfusion.device.backend import active_autocast
from hfusion.optim import FusedOptimizer
from hfusion.population.accumulation import weighted
from hfusion.population.group_options import GroupOptions
from hfusion.population.plain_module import PlainModule, of_row
from hfusion.population.sample_weights import sample_weighted
from hfusion.population.training_group import TrainingGroup


class PlainStep:
    """A training step of a `PlainModule` by autograd, with the interface of `hfusion.train_step`'s steps."""

    compilations = 0

    def __init__(self, module: PlainModule, loss: Callable[..., Any], optimizer: FusedOptimizer) -> None:
        self._module, self._loss, self._optimizer = module, loss, optimizer
        self.update: Callable[[Tensor], object] = lambda losses: optimizer.step()
        self.expected_calls: set[str] = set()
        self.known_calls: set[str] = set()
        self.keys: Tensor | None = None
        self.idle: frozenset[int] = frozenset()
        self.at_once: int | None = None
        # A single member cannot be divided.
        self.budget = None

    def __call__(self, inputs: Any, target: Any, **keywords: Any) -> Tensor:
        """Losses ``[1]`` of one step. Raises ValueError for a loss that is no single number with a gradient."""
        args, kwargs = call_arguments(inputs, keywords)
        if not isinstance(inputs, Tensor) or kwargs:
            args, kwargs = of_row(args), of_row(kwargs)
        if not isinstance(target, Tensor):
            target = of_row(target)
        self._module.zero_grad()
        with torch.enable_grad():
            loss = self._loss(self._module.model(*args, **kwargs), target)
            check_losses(loss, trains=any(param.requires_grad for param in self._module.parameters()))
            with ExitStack() as stack:
                # As torch advises: an autocast is for forward and loss.
                for kind, _ in active_autocast() or ():
                    stack.enter_context(torch.autocast(kind, enabled=False))
                if loss.requires_grad:
                    loss.backward()
        step_losses: Tensor = loss.detach().reshape(1)
        self.update(step_losses)
        return step_losses


class PlainMember(TrainingGroup):
    """A group of one member that is never captured, checked or compiled.

    Its optimizer is one of hf.optim over the parameters of the model, which takes less time for one model than the
    fused optimizers of torch; so its state is that of a row of an array, to the bit.
    """

    is_plain = True

    def _make_step(self, expected_calls: Iterable[str]) -> None:
        function = sample_weighted(self._function) if self._samples else self._function
        loss = weighted(function) if self._weighs else function
        step = PlainStep(cast(PlainModule, self.fused), loss, self.optimizer)
        step.update = self._computed
        self._step = cast(Any, step)

    @property
    def active_rows(self) -> list[int]:
        """The member's row, unless it is frozen or has left, or nothing of it is trained."""
        trains = any(parameter.requires_grad for parameter in self.fused.parameters())
        return [row for row in self._roll.live if trains and not bool(self._roll.frozen[row])]

    def hold_buffers(self) -> None:
        module = cast(PlainModule, self.fused)
        module.settle()
        if module.has_buffers:
            super().hold_buffers()

    def _run_each(self, fn: MemberFunction, rows: list[int], *args: Any, **kwargs: Any) -> None:
        fn(cast(PlainModule, self.fused).model, *of_row(args), **of_row(kwargs))


def group_of(
    models: Sequence[nn.Module], options: GroupOptions, origins: Sequence[int], shared: Collection[int]
) -> TrainingGroup:
    """Return a group of ``models``: an array, or a plain member if there is one. Raises FusionError.

    ``origins``: see `TrainingGroup`. ``shared``: ids of frozen parameters that members of other groups hold, too.
    """
    if len(models) == 1:
        return PlainMember(PlainModule(models[0], shared), options, origins)
    return TrainingGroup(fuse(list(models)), options, origins)
