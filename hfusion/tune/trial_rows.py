"""Trials in the process that trains them, and a trial in plain torch, where an array would not be faster."""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from hfusion.capture.registered_tensors import tensors
from hfusion.checkpoint import files
from hfusion.checkpoint.json_tree import decode, encode
from hfusion.core.calls import call_arguments
from hfusion.core.membership import Membership, mark, unmark
from hfusion.core.step_arguments import Compile, check_losses
from hfusion.optim.lr_scheduler import PerMember
from hfusion.population.evaluation import evaluating_model, member_metrics, with_row
from hfusion.tune.loaders import Loaders, batches_on, seeded
from hfusion.tune.space import (
    ArrayChoices,
    MakeScheduler,
    SweepTrial,
    optimizer_with,
)
from hfusion.tune.study import check_plateaus, metric_values
from hfusion.tune.sweep_folder import KEEP


@dataclass(frozen=True, eq=False)
class SweepRecipe:
    """Functions, loaders and options with which all trials of a sweep are trained.

    Attributes:
        objectives: the number of values that the metric returns.
        scheduler: makes a scheduler from the optimizer of one member and the values that its trial chose.
        every_step: schedulers step after each update, not after each epoch.
    """

    loss: Callable[..., Any]
    loaders: Loaders
    eval_loader: Iterable[Any] | None
    metric: Callable[..., Any] | None
    device: torch.device
    compile: Compile
    scheduler: MakeScheduler | None = None
    every_step: bool = False
    objectives: int = 1

    @property
    def evaluates(self) -> bool:
        """True if the value of a trial needs an evaluation, instead of its mean training loss."""
        return self.metric is not None or self.eval_loader is not None

    def judged(self, choices: ArrayChoices) -> tuple[str, Iterable[Any]]:
        """Return the loader to evaluate an array on, after its name in errors."""
        if self.eval_loader is None:
            return "loader", self.loaders.loader(choices.loader)
        return "eval_loader", self.eval_loader


class TrialRows(ABC):
    """Trials that are trained together: those of an array, or a single one in plain torch.

    Both also have the methods ``join``, ``leave``, ``save`` and ``restore``, which `SweepWorkers` calls by name.

    Args:
        stopping: returns whether to end an epoch immediately.
    """

    def __init__(self, recipe: SweepRecipe, choices: ArrayChoices, stopping: Callable[[], bool]) -> None:
        self._recipe, self._stopping, self._choices = recipe, stopping, choices
        self._loader = recipe.loaders.loader(choices.loader)
        self._loss = partial(recipe.loss, **choices.loss) if choices.loss else recipe.loss

    def epoch(self, seed: int, evaluates: bool = True) -> dict[str, tuple[float, ...]]:
        """Train all trials for an epoch under a seed, and return their values by tag; NaN for those that diverged.

        evaluates: False if no values are needed after this epoch; they are then empty.
        """
        recipe, losses = self._recipe, list[Tensor]()
        with seeded(self._loader, seed), torch.enable_grad():
            for inputs, target in batches_on("loader", self._loader, recipe.device):
                if self._stopping():
                    raise KeyboardInterrupt
                loss, updates = self._step(inputs, target)
                losses.append(loss)
                if updates and recipe.every_step:
                    self._schedule(loss)
            # The last update of an epoch may be of fewer minibatches.
            if self._flush() and recipe.every_step:
                self._schedule(losses[-1])
        trained = torch.stack(losses).double().mean(0)
        members, bad = self._members(), self._diverged(trained)
        values: dict[int, tuple[float, ...]] = {row: (value,) for row, value in enumerate(trained.tolist())}
        if evaluates and recipe.evaluates and len(bad) < len(members):
            role, loader = recipe.judged(self._choices)
            with seeded(loader, seed):
                values = self._measured(recipe.metric or self._loss, batches_on(role, loader, recipe.device))
        if not recipe.every_step:
            watched = [values.get(row, (math.nan,))[0] for row in range(len(trained))]
            self._schedule(torch.tensor(watched, dtype=torch.float64, device="cpu"))
        failed = (math.nan,) * recipe.objectives
        return {tag: failed if row in bad else values[row] if evaluates else () for row, tag in members.items()}

    @property
    def _convert(self) -> Callable[[Any], tuple[float, ...]]:
        return partial(metric_values, self._recipe.objectives)

    def _check_schedules(self, kinds: Sequence[str]) -> None:
        """Raise ValueError for a scheduler that watches one value, if there are several objectives."""
        if not self._recipe.every_step:
            check_plateaus(self._recipe.objectives, kinds)

    @abstractmethod
    def _members(self) -> dict[int, str]:
        """Return the tags of the trials by row."""

    @abstractmethod
    def _step(self, inputs: Any, target: Any) -> tuple[Tensor, bool]:
        """Train for one minibatch. Return losses ``[rows]``, and whether that made an update."""

    @abstractmethod
    def _flush(self) -> bool:
        """Make the update of minibatches that are fewer than ``accumulate``; return whether there were any."""

    @abstractmethod
    def _diverged(self, trained: Tensor) -> Collection[int]:
        """Return the rows whose losses, gradients or weights are not finite, and free the gradients of all.

        Nobody needs them until the next epoch. ``trained``: mean losses ``[rows]``.
        """

    @abstractmethod
    def _schedule(self, values: Tensor) -> None:
        """Step the schedulers. ``values [rows]`` are for ReduceLROnPlateau."""

    @abstractmethod
    def _measured(self, metric: Callable[..., Any], batches: Iterable[Any]) -> dict[int, tuple[float, ...]]:
        """Return the values of a metric in eval mode by row."""


class PlainTrial(TrialRows):
    """One trial in plain torch. Its optimizer is one of hf.optim, which takes less time than torch's fused ones."""

    def join(self, new: Sequence[SweepTrial]) -> None:
        """Begin with a trial."""
        (member,) = new
        suggestion, choices = member.suggestion, self._choices
        self._tag, self._model = member.tag, member.model
        for name, param in self._model.named_parameters():
            mark(param, Membership(name, 1, stacked=False, standalone=True))
        make = optimizer_with(choices.optimizer, choices.options, [suggestion.hypers])
        self._optimizer = make(list(self._model.parameters()))
        self._clip = suggestion.clip_norm if choices.clips else None
        schedule, self._scheduler = self._recipe.scheduler, None
        if schedule is not None:
            self._scheduler = PerMember(self._optimizer, partial(schedule, **suggestion.scheduler))
            self._check_schedules(self._scheduler.kinds)
        self._trained = [param for group in self._optimizer.param_groups for param in group["params"]]
        # Minibatches since the last update, and epochs, which number the saves.
        self._calls = self._epochs = 0

    def leave(self, tag: str) -> nn.Module:
        """Return the model on the CPU."""
        self._model.zero_grad()
        for param in self._model.parameters():
            unmark(param)
        return self._model.cpu()

    def save(self, folder: Path) -> Path:
        """Save the trial, and return the path of the save."""
        found: dict[str, Tensor] = {}
        state = {
            "tensors": dict(tensors(self._model)),
            "optimizer": self._optimizer.state_dict(),
            "scheduler": None if self._scheduler is None else self._scheduler.state_dict(),
        }
        body = {"epochs": self._epochs, "trial": encode(state, found, "trial")}
        saved_tensors = {name: tensor.detach().cpu().clone() for name, tensor in found.items()}
        return files.write(folder, body, saved_tensors, step=self._epochs, keep=KEEP)

    @torch.no_grad()
    def restore(self, saved: Path, members: Sequence[SweepTrial]) -> None:
        """Restore a trial from a save."""
        self.join(members)
        content = files.read(saved)
        self._epochs, state = content.body["epochs"], decode(content.body["trial"], content.tensors)
        for name, tensor in tensors(self._model):
            tensor.copy_(state["tensors"][name])
        self._optimizer.load_state_dict(state["optimizer"])
        if self._scheduler is not None:
            self._scheduler.load_state_dict(state["scheduler"])

    def _members(self) -> dict[int, str]:
        return {0: self._tag}

    def _step(self, inputs: Any, target: Any) -> tuple[Tensor, bool]:
        if not self._calls:
            self._clear_gradients()
        args, kwargs = call_arguments(inputs, {})
        loss, accumulate = self._loss(self._model(*args, **kwargs), target), self._choices.accumulate
        check_losses(loss)
        with torch.autocast(self._recipe.device.type, enabled=False):
            (loss / accumulate if accumulate > 1 else loss).backward()
        self._calls += 1
        return loss.detach().reshape(1), self._calls == accumulate and self._flush()

    def _flush(self) -> bool:
        if not self._calls:
            return False
        self._calls = 0
        if self._clip is not None and self._clip < math.inf:
            nn.utils.clip_grad_norm_(self._model.parameters(), self._clip)
        self._optimizer.step()
        return True

    def _clear_gradients(self) -> None:
        # The optimizer's own method takes 7% of a small step, as it speaks to the profiler.
        for param in self._trained:
            param.grad = None

    def _diverged(self, trained: Tensor) -> Collection[int]:
        self._epochs += 1
        self._clear_gradients()
        # Parameters also show gradients that were not finite.
        finite = all(bool(value.isfinite().all()) for value in (trained, *self._trained))
        return () if finite else (0,)

    def _schedule(self, values: Tensor) -> None:
        if self._scheduler is not None:
            self._scheduler.step(metrics=values)

    @torch.no_grad()
    def _measured(self, metric: Callable[..., Any], batches: Iterable[Any]) -> dict[int, tuple[float, ...]]:
        outputs = []
        with evaluating_model(self._model):
            for inputs, target in batches:
                args, kwargs = call_arguments(inputs, {})
                outputs.append((with_row(self._model(*args, **kwargs)), target))
        return member_metrics(outputs, metric, {0: self._tag}, convert=self._convert)
