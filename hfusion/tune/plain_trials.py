"""Trials that are trained one after another in plain torch, because an array would not be faster."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import ReduceLROnPlateau

from hfusion.capture.registered_tensors import tensors
from hfusion.checkpoint import files
from hfusion.checkpoint.json_tree import decode, encode
from hfusion.core.calls import call_arguments
from hfusion.core.loss_checks import check_losses
from hfusion.core.membership import Membership, mark
from hfusion.optim import FusedOptimizer
from hfusion.optim.hyper import read
from hfusion.population.evaluation import member_metrics
from hfusion.torch_private.module_hooks import step_alone
from hfusion.tune.chosen_optimizer import MakeOptimizer, optimizer_with
from hfusion.tune.loaders import batches_on, seeded
from hfusion.tune.objectives import MetricValues, check_plateaus
from hfusion.tune.space import ArrayChoices, TrialModel
from hfusion.tune.sweep_folder import KEEP
from hfusion.tune.training_setup import EpochResult, SweepRecipe

# Optimizers for which torch has ``fused=True`` on a CPU: one call updates all parameters.
_FUSED = (torch.optim.Adam, torch.optim.AdamW, torch.optim.SGD, torch.optim.Adagrad)


def torch_optimizer(make: MakeOptimizer, model: nn.Module) -> Optimizer | None:
    """Return the torch optimizer of ``model`` that corresponds to the hf.optim optimizer that ``make`` returns.

    None if torch has no counterpart.
    """
    stand_ins = {}
    for name, param in model.named_parameters():
        empty = nn.Parameter(torch.empty(1, *param.shape, dtype=param.dtype, device="meta"), param.requires_grad)
        stand_ins[id(mark(empty, Membership(name, 1, True)))] = empty, param
    fused = make([empty for empty, _ in stand_ins.values()])
    kind = vars(type(fused)).get("torch_class") if isinstance(fused, FusedOptimizer) else None
    if kind is None or any(id(empty) not in stand_ins for group in fused.param_groups for empty in group["params"]):
        return None
    groups = [
        {**_numbers(fused, group), "params": [stand_ins[id(empty)][1] for empty in group["params"]]}
        for group in fused.param_groups
    ]
    optimizer: Optimizer = kind(groups)
    for group in optimizer.param_groups:
        # Adagrad begins all groups with its default, not with their own values.
        for state in (optimizer.state[param] for param in group["params"] if "initial_accumulator_value" in group):
            state["sum"].fill_(group["initial_accumulator_value"])
    parameters = [param for group in groups for param in group["params"]]
    if kind in _FUSED and all(p.device.type == "cpu" and p.is_floating_point() for p in parameters):
        for group in optimizer.param_groups:
            group["fused"] = True
    return optimizer


def _numbers(optimizer: Any, group: MutableMapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters and options of a param group of one member, as torch expects them."""
    numbers: dict[str, Any] = {key: group[key] for key in optimizer.options if key in group}
    _, columns = read(group, optimizer.hypers, 1)
    for hyper, (value,) in zip(optimizer.hypers, columns, strict=True):
        if hyper.index is None:
            numbers[hyper.key] = float(value)
        else:
            numbers[hyper.key] = (*numbers.get(hyper.key, ())[: hyper.index], float(value))
    return numbers


class PlainTrial:
    """A trial in training: its model, torch optimizer and torch scheduler."""

    def __init__(self, member: TrialModel, recipe: SweepRecipe, choices: ArrayChoices) -> None:
        suggestion = member.suggestion
        self.model = member.model
        optimizer = torch_optimizer(optimizer_with(choices.optimizer, choices.options, [suggestion.hypers]), self.model)
        assert optimizer is not None, "such trials are an array"
        self.optimizer, self.clip = optimizer, suggestion.clip_norm if choices.clips else None
        self.scheduler = None if recipe.scheduler is None else recipe.scheduler(optimizer, **suggestion.scheduler)
        # Torch warns if a scheduler steps before the optimizer. After a restart it has not seen the earlier steps.
        optimizer._opt_called = True  # type: ignore[attr-defined]
        self._clipped = [param for group in optimizer.param_groups for param in group["params"]]

    def zero_grad(self) -> None:
        """Clear the gradients. The optimizer's own method takes 7% of a small step, as it speaks to the profiler."""
        for param in self._clipped:
            param.grad = None

    def update(self) -> None:
        """Clip the gradients, and step the optimizer."""
        if self.clip is not None and self.clip < math.inf:
            nn.utils.clip_grad_norm_(self.model.parameters(), self.clip)
        step_alone(self.optimizer)

    def schedule(self, value: float) -> None:
        """Step the scheduler, if there is one. ``value`` is for ReduceLROnPlateau."""
        if self.scheduler is not None:
            self.scheduler.step(*[value] if isinstance(self.scheduler, ReduceLROnPlateau) else [])

    @property
    def is_finite(self) -> bool:
        """Return whether all parameters are finite, which also detects gradients that were not."""
        return all(bool(param.isfinite().all()) for param in self._clipped)

    def state(self) -> dict[str, Any]:
        """Return the state of the model, optimizer and scheduler. The model's tensors are on the CPU."""
        return {
            "tensors": {name: tensor.detach().cpu() for name, tensor in tensors(self.model)},
            "optimizer": self.optimizer.state_dict(),
            "scheduler": None if self.scheduler is None else self.scheduler.state_dict(),
        }

    @torch.no_grad()
    def load(self, state: dict[str, Any]) -> None:
        """Load a state that `state` returned."""
        for name, tensor in tensors(self.model):
            tensor.copy_(state["tensors"][name])
        self.optimizer.load_state_dict(state["optimizer"])
        if self.scheduler is not None:
            self.scheduler.load_state_dict(state["scheduler"])


@dataclass(frozen=True)
class TrainedEpoch:
    """One trial's ``values`` after an epoch of ``steps`` minibatches, and the seconds of the epoch."""

    values: tuple[float, ...]
    seconds: float
    steps: int


class PlainTrials:
    """Trials with the same choices, trained separately. The methods are named as in `TrialRows`.

    Args:
        stopping: returns whether to end an epoch immediately.

    Attributes:
        trials: the trials in this process, by tag.
        epochs: epochs trained here, the number of a save.
    """

    def __init__(self, recipe: SweepRecipe, choices: ArrayChoices, stopping: Callable[[], bool]) -> None:
        self._recipe, self._choices, self._stopping = recipe, choices, stopping
        self._loader, self._loss = recipe.loaders.loader(choices.loader), recipe.loss_of(choices)
        self.trials: dict[str, PlainTrial] = {}
        self.epochs = 0

    def join(self, new: Sequence[TrialModel], states: Mapping[str, dict[str, Any]] | None = None) -> None:
        """Add trials. ``states``: by tag, the saved states from which some of them continue."""
        for member in new:
            trial = PlainTrial(member, self._recipe, self._choices)
            if not self._recipe.every_step:
                check_plateaus(self._recipe.objectives, [type(trial.scheduler).__name__])
            if states is not None and member.tag in states:
                trial.load(states[member.tag])
            self.trials[member.tag] = trial

    def epoch(self, seed: int, evaluates: bool = True) -> EpochResult:
        """Train each trial for an epoch under a seed, and evaluate it; as `TrialRows.epoch`."""
        return self.result({tag: self.train(tag, seed, evaluates) for tag in self.trials})

    def result(self, trained: Mapping[str, TrainedEpoch]) -> EpochResult:
        """Return the result of an epoch of all trials. ``trained``: by tag, also of trials in other processes."""
        self.epochs += 1
        steps = max((epoch.steps for epoch in trained.values()), default=1)
        values = {tag: epoch.values for tag, epoch in trained.items()}
        return EpochResult(values, sum(epoch.seconds for epoch in trained.values()), steps)

    def train(self, tag: str, seed: int, evaluates: bool = True) -> TrainedEpoch:
        """Train one trial for an epoch under a seed, and evaluate it."""
        began, trial = time.perf_counter(), self.trials[tag]
        losses = self._trained(trial, seed)
        trial.zero_grad()
        if not math.isfinite(float(losses.sum())) or not trial.is_finite:
            values = (math.nan,) * self._recipe.objectives
        else:
            mean = float(losses.mean())
            values = self._judged(tag, trial, mean, seed) if evaluates else ()
            if not self._recipe.every_step:
                trial.schedule(values[0] if values else mean)
        return TrainedEpoch(values, time.perf_counter() - began, max(1, len(losses)))

    def states(self) -> dict[str, dict[str, Any]]:
        """Return the states of all trials by tag, see `PlainTrial.state`."""
        return {tag: trial.state() for tag, trial in self.trials.items()}

    def _trained(self, trial: PlainTrial, seed: int) -> Tensor:
        """Train one trial for an epoch, and return the losses of its minibatches in float64."""
        recipe, accumulate, losses, done = self._recipe, self._choices.accumulate, list[Tensor](), 0

        def update() -> None:
            trial.update()
            if recipe.every_step:
                trial.schedule(float(losses[-1]))

        with seeded(self._loader, seed), torch.enable_grad():
            for inputs, target in batches_on("loader", self._loader, recipe.device):
                if self._stopping():
                    raise KeyboardInterrupt
                if not done:
                    trial.zero_grad()
                args, kwargs = call_arguments(inputs, {})
                loss = self._loss(trial.model(*args, **kwargs), target)
                check_losses(loss)
                losses.append(loss.detach())
                with torch.autocast(recipe.device.type, enabled=False):
                    (loss / accumulate if accumulate > 1 else loss).backward()
                done = (done + 1) % accumulate
                if not done:
                    update()
            # The last update of an epoch may be of fewer minibatches.
            if done:
                update()
        return torch.stack(losses).double()

    def _judged(self, tag: str, trial: PlainTrial, loss: float, seed: int) -> tuple[float, ...]:
        """Return the values of a trial after an epoch: its mean ``loss``, unless the sweep evaluates."""
        if not self._recipe.evaluates:
            return (loss,)
        role, loader = self._recipe.judged(self._choices)
        with seeded(loader, seed):
            outputs = _outputs(trial.model, batches_on(role, loader, self._recipe.device))
        metric, count = self._recipe.metric or self._loss, self._recipe.objectives
        if count == 1:
            return (member_metrics(outputs, metric, {0: tag})[0],)
        values = MetricValues(metric, count)
        return values.noted[int(member_metrics(outputs, values.metric, {0: tag})[0])]

    def leave(self, tag: str) -> nn.Module:
        """Remove a trial that ends, and return its model on the CPU."""
        model = self.trials.pop(tag).model
        model.zero_grad()
        return model.cpu()

    def discard(self, tag: str) -> None:
        """Remove a trial that ends."""
        del self.trials[tag]

    def save(self, folder: Path) -> Path:
        """Save all trials, and return the path of the save."""
        found: dict[str, Tensor] = {}
        body = {"epochs": self.epochs, "trials": encode(self.states(), found, "trials")}
        saved_tensors = {name: tensor.detach().cpu().clone() for name, tensor in found.items()}
        return files.write(folder, body, saved_tensors, step=self.epochs, keep=KEEP)

    def restore(self, saved: Path, members: Sequence[TrialModel]) -> None:
        """Restore trials from a save."""
        content = files.read(saved)
        self.epochs = content.body["epochs"]
        self.join(members, decode(content.body["trials"], content.tensors))


@torch.no_grad()
def _outputs(model: nn.Module, batches: Iterable[tuple[Any, Any]]) -> list[tuple[Any, Any]]:
    """Return the model's outputs in eval mode, with a leading dim of one member, and the targets."""
    modes = [(module, module.training) for module in model.modules()]
    model.eval()
    try:
        pairs = []
        for inputs, target in batches:
            args, kwargs = call_arguments(inputs, {})
            outputs = model(*args, **kwargs)
            pairs.append((torch.utils._pytree.tree_map_only(Tensor, lambda leaf: leaf.unsqueeze(0), outputs), target))
        return pairs
    finally:
        for module, training in modes:
            module.training = training
