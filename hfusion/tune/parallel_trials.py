"""Plain trials of a sweep in worker processes, one per core, which own them until they end."""

from __future__ import annotations

import logging
import pickle
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from typing import Any, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from hfusion.capture.registered_tensors import tensors
from hfusion.device.forked_worker import ForkedWorker, why_no_fork
from hfusion.device.team import torch_threads
from hfusion.tune.plain_trials import PlainTrials, TrainedEpoch
from hfusion.tune.space import ArrayChoices, TrialModel
from hfusion.tune.training_setup import EpochResult, SweepRecipe

_log = logging.getLogger(__name__)

# Seconds that workers take to start. Sweeps that end sooner need none.
_STARTING = 0.3
_REMEDY = (
    "Call hf.sweep with fewer rows, or with processes=0. With a directory the same call goes on where the sweep was."
)
# A trial moves to another worker if that shortens the epochs by this part: times differ as much by chance.
_SHORTER = 0.1


class ParallelTrials(PlainTrials):
    """Plain trials of one array, of which some are in workers.

    Attributes:
        members: all trials, by tag.
        away: the workers of trials that are in other processes, by tag.
    """

    def __init__(self, name: str, recipe: SweepRecipe, choices: ArrayChoices) -> None:
        super().__init__(recipe, choices, lambda: False)
        self.name = name
        self.members: dict[str, TrialModel] = {}
        self.away: dict[str, ForkedWorker] = {}

    def join(self, new: Sequence[TrialModel], states: Mapping[str, dict[str, Any]] | None = None) -> None:
        super().join(new, states)
        self.members |= {member.tag: member for member in new}

    def leave(self, tag: str) -> nn.Module:
        self.come_home([tag])
        del self.members[tag]
        return super().leave(tag)

    def discard(self, tag: str) -> None:
        self.come_home([tag])
        del self.members[tag]
        super().discard(tag)

    def come_home(self, tags: Iterable[str]) -> None:
        """Move trials back to this process."""
        for tag in [tag for tag in tags if tag in self.away]:
            state = self.away.pop(tag).ask(("take", self.name, tag))
            super().join([self.members[tag]], {tag: state})

    def states(self) -> dict[str, dict[str, Any]]:
        return super().states() | {tag: worker.ask(("state", self.name, tag)) for tag, worker in self.away.items()}


class TrialPool:
    """Trains the plain trials of a sweep: in this process, and in workers once that takes longer than starting them.

    With workers, each trial has one thread. The longest trials go first, each to the worker with the least to do. A
    trial that shares a tensor with another, or that cannot be pickled, stays in this process. All trials do if this
    process cannot be forked.

    Args:
        processes: the number of workers; fewer than two: none.
    """

    def __init__(self, recipe: SweepRecipe, processes: int) -> None:
        self._recipe, self._count = recipe, processes
        self._workers: list[ForkedWorker] = []
        self._computing: list[ForkedWorker] = []
        self._arrays: dict[str, ParallelTrials] = {}
        # Seconds of the last epoch of each trial, by tag.
        self._seconds: dict[str, float] = {}
        self._unpicklable: set[str] = set()
        if self._count > 1 and (why := why_no_fork(recipe.device) or _why_no_readers(recipe)):
            _log.info("plain trials are trained one after another in this process: %s", why)
            self._count = 1

    @property
    def side_by_side(self) -> int:
        """Number of trials trained at the same time, if there are enough trials."""
        return max(1, self._count)

    def open(self, name: str, choices: ArrayChoices) -> ParallelTrials:
        """Return a new array of plain trials."""
        self._arrays[name] = ParallelTrials(name, self._recipe, choices)
        return self._arrays[name]

    def drop(self, name: str) -> None:
        """Remove an array without trials."""
        self._arrays.pop(name, None)

    def start(self, calls: Mapping[str, tuple[int, bool]]) -> None:
        """Let workers start an epoch. ``calls``: the seed of each array, and whether to evaluate its trials."""
        live = {tag for array in self._arrays.values() for tag in array.members}
        self._seconds = {tag: seconds for tag, seconds in self._seconds.items() if tag in live}
        if self._workers:
            self._add_workers()
            self._give([(array, tag) for array in self._arrays.values() for tag in array.trials])
            self._balance()
            self._train(calls)

    def finish(self, calls: Mapping[str, tuple[int, bool]]) -> dict[str, EpochResult]:
        """Train the trials in this process, wait for the workers, and return the results of all arrays."""
        trained: dict[tuple[str, str], TrainedEpoch] = {}
        waiting = [(self._arrays[name], tag) for name in calls for tag in self._arrays[name].trials]
        while waiting:
            if self._pays(waiting):
                self._add_workers()
                self._give(waiting)
                self._train(calls)
                waiting = [(array, tag) for array, tag in waiting if tag in array.trials]
                continue
            array, tag = waiting.pop(0)
            with torch_threads(1 if self._count > 1 else torch.get_num_threads()):
                trained[array.name, tag] = result = array.train(tag, *calls[array.name])
            self._seconds[tag] = result.seconds
        while self._computing:
            trained |= self._computing.pop().poll()
        self._seconds |= {tag: result.seconds for (_, tag), result in trained.items()}
        return {
            name: self._arrays[name].result({tag: trained[name, tag] for tag in self._arrays[name].members})
            for name in calls
        }

    def _train(self, calls: Mapping[str, tuple[int, bool]]) -> None:
        """Let workers train the trials that they own."""
        for worker in self._workers:
            owned = [(array.name, tag) for array, tag in self._owned(worker) if array.name in calls]
            if owned:
                worker.call(("train", [(name, tag, *calls[name]) for name, tag in owned]))
                self._computing.append(worker)

    def _owned(self, worker: ForkedWorker) -> list[tuple[ParallelTrials, str]]:
        return [(array, tag) for array in self._arrays.values() for tag, owner in array.away.items() if owner is worker]

    def _cost(self, tag: str) -> float:
        """Return the seconds of an epoch of a trial: its last one, else the mean of others, else the same for all."""
        known = self._seconds.values()
        return self._seconds.get(tag, sum(known) / len(known) if known else 1.0)

    def _load(self, worker: ForkedWorker) -> float:
        return sum(self._cost(tag) for _, tag in self._owned(worker))

    def _pays(self, waiting: Sequence[tuple[ParallelTrials, str]]) -> bool:
        """Return whether workers are to be started, as what remains takes longer in this process alone."""
        movable = self._movable(waiting)
        count = min(self._count, len(movable))
        if self._workers or count < 2 or not self._seconds:
            return False
        remaining = sum(self._cost(tag) * array.members[tag].suggestion.epochs for array, tag in movable)
        return remaining * (1 - 1 / count) > _STARTING

    def _movable(self, trials: Sequence[tuple[ParallelTrials, str]]) -> list[tuple[ParallelTrials, str]]:
        """Return the trials that can be pickled and share no tensor with another trial."""
        members = {tag: member for array in self._arrays.values() for tag, member in array.members.items()}
        held = {tag: {id(tensor) for _, tensor in tensors(member.model)} for tag, member in members.items()}
        counts = Counter(identity for ids in held.values() for identity in ids)
        alone = {tag for tag, ids in held.items() if all(counts[identity] == 1 for identity in ids)}
        return [(array, tag) for array, tag in trials if tag in alone - self._unpicklable]

    def _add_workers(self) -> None:
        live = sum(len(array.members) for array in self._arrays.values())
        for number in range(len(self._workers), min(self._count, live)):
            name, serve = f"process {number} of the sweep's trials", partial(_serve, self._recipe)
            self._workers.append(ForkedWorker(name, serve, self._workers, _REMEDY))

    def _give(self, trials: Sequence[tuple[ParallelTrials, str]]) -> None:
        """Give trials to workers: the longest first, each to the worker with the least to do."""
        for array, tag in sorted(self._movable(trials), key=lambda trial: -self._cost(trial[1])):
            member = array.members[tag]
            try:
                cargo = _packed((member.number, member.suggestion, member.model, array.trials[tag].state()))
            except Exception as error:
                _log.info("%s stays in this process, as pickle fails: %s: %s", tag, type(error).__name__, error)
                self._unpicklable.add(tag)
                continue
            worker = min(self._workers, key=self._load)
            worker.ask(("join", array.name, cargo))
            del array.trials[tag]
            array.away[tag] = worker

    def _balance(self) -> None:
        """Move trials from the worker with the most to do to the one with the least, where that shortens epochs."""
        for _ in self._workers:
            loads = {worker: self._load(worker) for worker in self._workers}
            most, least = max(loads, key=loads.__getitem__), min(loads, key=loads.__getitem__)
            ends = [
                (max(loads[most] - self._cost(tag), loads[least] + self._cost(tag)), index)
                for index, (_, tag) in enumerate(self._owned(most))
            ]
            if not ends or min(ends)[0] > (1 - _SHORTER) * loads[most]:
                return
            array, tag = self._owned(most)[min(ends)[1]]
            array.come_home([tag])
            self._give([(array, tag)])

    def close(self) -> None:
        """End the workers."""
        for worker in self._workers:
            worker.close()
        self._workers = []


def _why_no_readers(recipe: SweepRecipe) -> str:
    """Return why loaders cannot be read in a worker; an empty string if they can."""
    loaders = (*recipe.loaders.created_loaders, recipe.eval_loader)
    reads = any(isinstance(loader, DataLoader) and loader.num_workers for loader in loaders)
    return "a DataLoader has processes of its own" if reads else ""


def _packed(value: Any) -> bytes:
    """Pickle a value; with cloudpickle only if pickle fails, as a fork can import classes by name."""
    try:
        return pickle.dumps(value)
    except Exception:
        try:
            import cloudpickle
        except ImportError:
            cloudpickle = None
        if cloudpickle is None:
            raise
    data: bytes = cloudpickle.dumps(value)
    return data


def _serve(recipe: SweepRecipe, is_orphan: Callable[[], bool]) -> Callable[[Any], Any]:
    """Return the function that answers requests in a worker."""
    arrays: dict[str, PlainTrials] = {}

    def answer(request: tuple[Any, ...]) -> Any:
        method, *args = request
        if method == "train":
            return {(name, tag): arrays[name].train(tag, *call) for name, tag, *call in args[0]}
        name = args[0]
        if method == "join":
            number, suggestion, model, state = pickle.loads(args[1])
            member = TrialModel(number, suggestion, cast(Any, None))
            # The model is that of the other process: it is not made again.
            member.__dict__["model"] = model
            if name not in arrays:
                arrays[name] = PlainTrials(recipe, suggestion.choices, is_orphan)
            arrays[name].join([member], {member.tag: state})
            return None
        trials = arrays[name].trials
        return (trials.pop(args[1]) if method == "take" else trials[args[1]]).state()

    return answer
