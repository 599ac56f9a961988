"""Trials in the process that trains them, as an array or in plain torch, and the minibatches that they share."""

from __future__ import annotations

import copy
import math
import time
from collections.abc import Callable, Collection, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.capture.compare_models import check_alone
from hfusion.capture.registered_tensors import tensors
from hfusion.checkpoint import files
from hfusion.checkpoint.json_tree import decode, encode
from hfusion.core.calls import call_arguments
from hfusion.core.errors import PlanError
from hfusion.core.membership import Membership, mark, unmark
from hfusion.core.step_arguments import Compile, check_losses
from hfusion.device.backend import draws_kept, seed_in_use
from hfusion.optim.lr_scheduler import Make, PerMember
from hfusion.population.evaluation import evaluate, evaluating_model, member_metrics, number, with_row
from hfusion.tasks.reading import generators, generators_kept, length, reading, restart_workers
from hfusion.tune.space import (
    ArrayChoices,
    MakeModel,
    MakeOptimizer,
    MakeScheduler,
    Suggestion,
    SweepTrial,
    optimizer_with,
    same_values,
)
from hfusion.tune.study import KEEP


class Loaders:
    """Returns the loader for values of the space. Trials with equal values share a loader.

    Args:
        loader: minibatches that can be read again for every epoch, or a function that returns them.
        seed: the function is called after ``torch.manual_seed(seed)``.
    """

    def __init__(self, loader: Iterable[Any] | Callable[..., Iterable[Any]], seed: int = 0) -> None:
        self._source: Any = loader
        # None if the loader itself was given.
        self.function = None if isinstance(loader, Iterable) or not callable(loader) else loader
        self._seed = seed
        self._created_loaders: list[tuple[Mapping[str, Any], Iterable[Any]]] = []

    def loader(self, values: Mapping[str, Any]) -> Iterable[Any]:
        """Return the loader for these arguments of the function. Raises PlanError if it returns no loader."""
        if self.function is None:
            return self._source  # type: ignore[no-any-return]
        for cached_values, loader in self._created_loaders:
            if same_values(cached_values, values):
                return loader
        with draws_kept():
            torch.manual_seed(self._seed)
            created: Any = self.function(**values)
        if not isinstance(created, Iterable) or isinstance(created, Iterator):
            arguments = ", ".join(f"{name}={value!r}" for name, value in values.items())
            raise PlanError(
                f"loader({arguments}) gave {type(created).__name__}: return minibatches that can be read again for "
                "every epoch, such as a DataLoader"
            )
        self._created_loaders.append((dict(values), created))
        return created

    def __getstate__(self) -> dict[str, Any]:
        """Return the state for other processes, which create their own loaders."""
        return {**vars(self), "_created_loaders": []}


# Reading of the minibatches of an epoch, under a seed and on a device.


@contextmanager
def seeded(loader: Iterable[Any], seed: int) -> Iterator[None]:
    """Context manager: seed torch with ``seed``, and restore its state at the end.

    The loader's generators are seeded with ``seed`` and their own seeds, so that those have an effect.
    """
    restart_workers(loader)
    with draws_kept(), generators_kept(loader):
        seed_in_use(seed)
        for generator in generators(loader):
            generator.manual_seed((generator.initial_seed() + seed) % 2**64)
        yield


def batches_on(role: str, loader: Iterable[Any], device: torch.device) -> Generator[tuple[Any, Any]]:
    """Yield the minibatches of a loader on a device. Raises PlanError if there are none, or one is not a pair."""
    count = 0
    with reading(loader) as batches:
        for count, batch in enumerate(batches, 1):  # noqa: B007
            if not isinstance(batch, list | tuple) or len(batch) != 2:
                raise PlanError(
                    f"a minibatch of the {role} must be a pair (inputs, target), got {type(batch).__name__}. Inputs "
                    "are a tensor, a tuple of arguments or a dict of keyword arguments."
                )
            yield _on(batch[0], device), _on(batch[1], device)
    if not count:
        raise PlanError(f"the {role} gave no minibatch: give one that can be read again for every epoch")


def _on(value: Any, device: torch.device) -> Any:
    if isinstance(value, Tensor):
        return value.to(device)
    return pytree.tree_map(lambda leaf: leaf.to(device) if isinstance(leaf, Tensor) else leaf, value)


def minibatches(loader: Iterable[Any]) -> int:
    """Return the number of minibatches; a loader without a length is read, and its generators are restored."""
    try:
        return length(loader)
    except TypeError:
        with seeded(loader, 0), reading(loader) as batches:
            return sum(1 for _ in batches)


def first_inputs(loader: Iterable[Any]) -> tuple[Any, float]:
    """Return a copy of the inputs of the first minibatch on the CPU, and the seconds in which another one is read.

    Generators are restored. Raises PlanError as `batches_on` does.
    """
    with seeded(loader, 0), closing(batches_on("loader", loader, torch.device("cpu"))) as batches:
        # A copy, so that a forward that writes into its inputs does not change the loader's data.
        inputs = copy.deepcopy(next(batches)[0])
        began = time.perf_counter()
        next(batches, None)
        return inputs, time.perf_counter() - began


# Trials.


@dataclass(frozen=True, eq=False)
class SweepRecipe:
    """Functions, loaders and options with which all trials of a sweep are trained.

    Attributes:
        objectives: the number of values that the metric returns.
        scheduler: makes a scheduler from the optimizer of one member and the values that its trial chose.
        every_step: schedulers step after each update, not after each epoch.
    """

    make_model: MakeModel
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

    def model(self, number: int, suggestion: Suggestion) -> nn.Module:
        """Make a trial's model after ``torch.manual_seed(number)``. Raises FusionError if it cannot be fused."""
        with draws_kept():
            torch.manual_seed(number)
            model = self.make_model(**suggestion.model_arguments)
        if not isinstance(model, nn.Module):
            raise ValueError(f"make_model gave {type(model).__name__} for trial {number}: return an nn.Module")
        if not any(param.requires_grad for param in model.parameters()):
            raise ValueError(
                f"make_model gave {type(model).__name__} for trial {number} without a parameter that requires grad: "
                "there is nothing to train; leave requires_grad of some parameter True"
            )
        check_alone(0, model)
        return model.to(self.device)

    def judged(self, choices: ArrayChoices) -> tuple[str, Iterable[Any]]:
        """Return the loader to evaluate an array on, after its name in errors."""
        if self.eval_loader is None:
            return "loader", self.loaders.loader(choices.loader)
        return "eval_loader", self.eval_loader


class TrialRows:
    """Trials that are trained together, as members of a population.

    Args:
        stopping: returns whether to end an epoch immediately.
    """

    def __init__(self, recipe: SweepRecipe, choices: ArrayChoices, stopping: Callable[[], bool]) -> None:
        self._recipe, self._stopping, self._choices = recipe, stopping, choices
        self._loader = recipe.loaders.loader(choices.loader)
        self._loss = partial(recipe.loss, **choices.loss) if choices.loss else recipe.loss
        # No processes here: the sweep already distributes its arrays over processes.
        self._options: dict[str, Any] = {
            "processes": 0,
            "loss": self._loss,
            "compile": recipe.compile,
            "accumulate": choices.accumulate,
        }
        # A `Population`, once trials have joined. It is imported late, with the compiler, as plain trials have none.
        self.population: Any = None

    def _make_optimizer(self, members: Sequence[SweepTrial]) -> MakeOptimizer:
        hypers = [member.suggestion.hypers for member in members]
        return optimizer_with(self._choices.optimizer, self._choices.options, hypers)

    def _schedules(self, members: Sequence[SweepTrial]) -> list[Make] | None:
        """Return a function for each member that makes its scheduler; None without schedulers."""
        make = self._recipe.scheduler
        return None if make is None else [partial(make, **member.suggestion.scheduler) for member in members]

    def join(self, new: Sequence[SweepTrial]) -> None:
        """Give a row to each new trial."""
        models, tags, schedules = [member.model for member in new], [member.tag for member in new], self._schedules(new)
        norms = [member.suggestion.clip_norm for member in new]
        limits: dict[str, Any] = {"clip_norm": norms} if self._choices.clips else {}
        if self.population is None:
            from hfusion.population.population import Population

            self.population = Population(
                models, optimizer=self._make_optimizer(new), tags=tags, scheduler=schedules, **limits, **self._options
            )
        else:
            rows = self.population.append(models, tag=tags, scheduler=schedules, **limits)
            for member in new:
                self._write(member.tag, member.suggestion.hypers)
            if schedules is not None and self.population.scheduler is not None:
                # Schedules begin from the rates that were just written.
                self.population.scheduler.restart(rows, schedules)
        self._check_schedules(self.population.scheduler)

    def _write(self, tag: str, hypers: dict[str, Any]) -> None:
        """Write hyper-parameters of a member."""
        row, hparams = self.population.row(tag), self.population.hparams
        for key, value in hypers.items():
            vectors = hparams[key]
            pairs = zip(vectors, value, strict=True) if isinstance(vectors, tuple) else [(vectors, value)]
            for vector, hyper in pairs:
                vector[row] = torch.as_tensor(hyper, dtype=torch.float64, device="cpu")

    def exploit(self, pairs: Sequence[tuple[str, str]], suggestions: Sequence[Suggestion]) -> None:
        """Copy members by pairs of tags ``(source, target)``; targets get the hyper-parameters of ``suggestions``."""
        rows = [[self.population.row(pair[position]) for pair in pairs] for position in range(2)]
        self.population.copy(*rows)
        for (_, tag), suggestion in zip(pairs, suggestions, strict=True):
            self._write(tag, suggestion.hypers)
            if suggestion.clip_norm is not None:
                group, row = self.population._layout.slot_of(self.population.row(tag))
                group.table["clip_norm"][row] = suggestion.clip_norm

    def leave(self, tag: str) -> nn.Module:
        """Free the row of a member, and return its model."""
        return cast("nn.Module", self.population.stop(self.population.row(tag)))

    def save(self, folder: Path) -> Path:
        """Save all trials, and return the path of the save."""
        self.population.compact()
        return cast("Path", self.population.save(folder, keep=KEEP))

    def restore(self, saved: Path, members: Sequence[SweepTrial]) -> None:
        """Restore trials from a save."""
        from hfusion.population.population import Population

        by_tag = {member.tag: member for member in members}
        schedules = self._schedules(members)
        # The first member's values are placeholders that go with the options. Loading overwrites them.
        self.population = Population.load(
            saved,
            lambda tag: by_tag[tag].model,
            random=False,
            optimizer=self._make_optimizer(members[:1]),
            scheduler=None if schedules is None else dict(zip(by_tag, schedules, strict=True)),
            clip_norm=members[0].suggestion.clip_norm,
            **self._options,
        )

    def epoch(self, seed: int, evaluates: bool = True) -> dict[str, tuple[float, ...]]:
        """Train all trials for an epoch under a seed, and return their values by tag; NaN for those that diverged.

        evaluates: False if no values are needed after this epoch; they are then empty.
        """
        if self.population is not None:
            # Trials have joined by now, so rows that are still free are not needed.
            self.population.compact()
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

    def _convert(self, values: Any) -> tuple[float, ...]:
        """Return what a metric returned for one member as floats. Raises ValueError for a wrong number of them."""
        count = self._recipe.objectives
        if count == 1:
            return (number(values),)
        is_listed = isinstance(values, tuple | list) or (isinstance(values, Tensor | np.ndarray) and values.ndim > 0)
        values = list(values) if is_listed else [values]
        if len(values) != count:
            raise ValueError(
                f"the metric returned {len(values)} value{'s' * (len(values) != 1)} for one member, and the study has "
                f"{count} objectives: return one for each direction, in their order"
            )
        return tuple(map(number, values))

    def _check_schedules(self, scheduler: Any) -> None:
        """Raise ValueError for a scheduler that watches one value after an epoch, if there are several objectives."""
        count = self._recipe.objectives
        if count > 1 and not self._recipe.every_step and "ReduceLROnPlateau" in getattr(scheduler, "kinds", ()):
            raise ValueError(
                f"a ReduceLROnPlateau watches one value, and there are {count} objectives: give another scheduler, or "
                'scheduler_interval="step", where it watches the loss'
            )

    def _members(self) -> dict[int, str]:
        """Return the tags of the trials by row."""
        return {row: tag for row, tag in enumerate(self.population.tags) if tag is not None}

    def _step(self, inputs: Any, target: Any) -> tuple[Tensor, bool]:
        """Train for one minibatch. Return losses ``[rows]``, and whether that made an update."""
        updates = self.population.steps
        losses = self.population.step(inputs, target)
        return losses, self.population.steps > updates

    def _flush(self) -> bool:
        """Make the update of minibatches that are fewer than ``accumulate``; return whether there were any."""
        from hfusion.population.group_step import flush

        return flush(self.population)

    def _diverged(self, trained: Tensor) -> Collection[int]:
        """Return the rows whose losses, gradients or weights are not finite, and free the gradients of all.

        Nobody needs them until the next epoch. ``trained``: mean losses ``[rows]``.
        """
        self.population.clear_gradients()
        return set(self.population.frozen)

    def _schedule(self, values: Tensor) -> None:
        """Step the schedulers. ``values [rows]`` are for ReduceLROnPlateau."""
        if self.population.scheduler is not None:
            self.population.scheduler.step(metrics=values, rows=list(self._members()))

    def _measured(self, metric: Callable[..., Any], batches: Iterable[Any]) -> dict[int, tuple[float, ...]]:
        """Return the values of a metric in eval mode by row."""
        return evaluate(self.population, metric, batches, self._convert)


class PlainTrial(TrialRows):
    """One trial in plain torch. Its optimizer is one of hf.optim, which takes less time than torch's fused ones."""

    def join(self, new: Sequence[SweepTrial]) -> None:
        """Begin with a trial."""
        (member,) = new
        self._tag, self._model = member.tag, cast("nn.Module", member.model)
        for name, param in self._model.named_parameters():
            mark(param, Membership(name, 1, stacked=False, standalone=True))
        self._optimizer = self._make_optimizer(new)(list(self._model.parameters()))
        self._clip = member.suggestion.clip_norm if self._choices.clips else None
        schedules = self._schedules(new)
        self._scheduler = None if schedules is None else PerMember(self._optimizer, schedules)
        self._check_schedules(self._scheduler)
        self._trained = [param for group in self._optimizer.param_groups for param in group["params"]]
        # Minibatches since the last update.
        self._calls = 0

    def leave(self, tag: str) -> nn.Module:
        """Return the model."""
        for param in self._model.parameters():
            unmark(param)
        return self._model

    def save(self, folder: Path) -> Path:
        """Save the trial, and return the path of the save."""
        found: dict[str, Tensor] = {}
        schedules = None if self._scheduler is None else self._scheduler.state_dict()
        body = encode([dict(tensors(self._model)), self._optimizer.state_dict(), schedules], found, "trial")
        saved_tensors = {name: tensor.detach().cpu().clone() for name, tensor in found.items()}
        return files.write(folder, body, saved_tensors, step=0, keep=KEEP)

    @torch.no_grad()
    def restore(self, saved: Path, members: Sequence[SweepTrial]) -> None:
        """Restore a trial from a save."""
        self.join(members)
        content = files.read(saved)
        held, state, schedules = decode(content.body, content.tensors)
        for name, tensor in tensors(self._model):
            tensor.copy_(held[name])
        self._optimizer.load_state_dict(state)
        if self._scheduler is not None:
            self._scheduler.load_state_dict(schedules)

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
