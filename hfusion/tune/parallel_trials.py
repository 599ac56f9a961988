"""Plain trials of a sweep, distributed over processes if that is measured to be faster than one process."""

from __future__ import annotations

import logging
import pickle
import time
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias, cast

import torch
from torch import nn
from torch.utils.data import DataLoader

from hfusion.capture.registered_tensors import tensors
from hfusion.checkpoint.files import PackedSave
from hfusion.cluster.messages import Raised
from hfusion.core.errors import HFusionError
from hfusion.device.forked_process import EndedProcess, ForkedProcess, note_start, start_seconds, why_no_fork
from hfusion.device.native import cores
from hfusion.device.openmp import torch_threads
from hfusion.tune.epoch_result import EpochResult
from hfusion.tune.plain_trials import PlainTrials, TrainedEpoch
from hfusion.tune.space import ArrayChoices, ModelMaker, Suggestion, TrialModel
from hfusion.tune.training_setup import SweepRecipe

_log = logging.getLogger(__name__)


class SpreadTrials:
    """The plain trials of one array, as in `PlainTrials`, but some of them may be in other processes.

    Attributes:
        home: the trials in this process.
        away: for trials in other processes, the process by the trial's tag.
        done: epochs that each trial has trained, by tag.
    """

    def __init__(self, name: str, choices: ArrayChoices, spread: TrialSpread) -> None:
        self.name, self.choices, self._spread = name, choices, spread
        self.home = PlainTrials(spread.recipe, choices, lambda: False)
        self.members: dict[str, TrialModel] = {}
        self.away: dict[str, TrialProcess] = {}
        self.done: Counter[str] = Counter()

    def join(self, new: Sequence[TrialModel]) -> None:
        """Add trials. They are in this process until the next epoch."""
        self.home.join(new)
        self.members |= {member.tag: member for member in new}

    def leave(self, tag: str) -> nn.Module:
        """Remove a trial that ends, and return its model on the CPU."""
        self.come_home([tag])
        del self.members[tag]
        self._spread.forget(tag)
        return self.home.leave(tag)

    def discard(self, tag: str) -> None:
        """Remove a trial that ends, in whichever process it is."""
        if tag in self.away:
            self.away.pop(tag).ask(DiscardRequest(self.name, tag))
        else:
            self.home.discard(tag)
        del self.members[tag]
        self._spread.forget(tag)

    def come_home(self, tags: Iterable[str]) -> None:
        """Move trials back to this process."""
        for tag in tags:
            if tag in self.away:
                key = (self.name, tag)
                state = self.away.pop(tag).ask(StatesRequest((key,), leaving=True))[key]
                self.home.join([self.members[tag]], {tag: state})

    def save(self, folder: Path) -> Path:
        """Save all trials, and return the path of the save."""
        worker_states: dict[str, dict[str, Any]] = {}
        for process in set(self.away.values()):
            places = [(self.name, tag) for tag, other in self.away.items() if other is process]
            answer = process.ask(StatesRequest(tuple(places), leaving=False))
            worker_states |= {tag: answer[self.name, tag] for _, tag in places}
        return self.home.save(folder, worker_states)

    def packed(self) -> PackedSave:
        """Move all trials back to this process, and return the content of a save in memory."""
        self.come_home(list(self.away))
        return self.home.packed()

    def restore(self, saved: Path, members: Sequence[TrialModel]) -> tuple[None, int]:
        """Restore trials into this process, see `PlainTrials.restore`."""
        self.members = {member.tag: member for member in members}
        return self.home.restore(saved, members)

    def compact(self) -> None:
        """Do nothing: there are no free rows."""

    def collect(self) -> None:
        """Do nothing: reference cycles hold no memory of removed trials."""


class TrialSpread:
    """Trains plain trials in one process per core, if measured times show that this is faster.

    A trial that shares a tensor with another, or that cannot be pickled, stays in this process. All trials do if this
    process cannot be forked.

    Args:
        processes: the maximum number of worker processes; None: one per core.
    """

    def __init__(self, recipe: SweepRecipe, processes: int | None) -> None:
        self.recipe = recipe
        self._most = cores() if processes is None else processes
        self._workers: list[TrialProcess] = []
        self._arrays: dict[str, SpreadTrials] = {}
        self._seconds: dict[str, float] = {}
        self._local_seconds: dict[str, float] = {}
        self._stuck: set[str] = set()
        # True if workers were measured to be slower. Trials still use one thread: rounding must not depend on time.
        self._workers_are_slower = False
        self._sent: list[TrialProcess] = []
        if self._most > 1:
            self._refuse(why_no_fork(recipe.device) or _why_no_readers(recipe))

    def _refuse(self, why: str) -> None:
        """Train all trials in this process from now on, unless ``why`` is empty."""
        if why:
            _log.info("plain trials are trained one after another in this process: %s", why)
            self._most = 0

    def open(self, name: str, choices: ArrayChoices) -> SpreadTrials:
        """Return a new array of plain trials."""
        self._arrays[name] = SpreadTrials(name, choices, self)
        return self._arrays[name]

    def drop(self, name: str) -> None:
        """Remove an array without trials. Workers need not be notified."""
        self._arrays.pop(name, None)

    def forget(self, tag: str) -> None:
        """Drop the measured times of a trial that has ended."""
        for times in (self._seconds, self._local_seconds):
            times.pop(tag, None)

    @property
    def _live(self) -> int:
        return sum(len(array.members) for array in self._arrays.values())

    @property
    def _together(self) -> bool:
        """Return whether each trial uses one thread. As this affects rounding, it depends on counts, not on times.

        If there are few trials, each uses all threads of torch, as in an ordinary loop.
        """
        return self._most > 1 and 2 * self._live > self._most

    @property
    def side_by_side(self) -> int:
        """Number of trials trained at the same time, if there are enough trials."""
        return 1 if self._workers_are_slower else max(1, self._most)

    def start_epoch(self, calls: Mapping[str, tuple[int, bool]]) -> None:
        """Start an epoch in the workers. ``calls``: the seed of each array, and whether to evaluate its trials."""
        if not self._together:
            self._close()
        if self._workers:
            self._balance([(array, tag) for array in self._arrays.values() for tag in array.members])
        self._send([(self._arrays[name], tag) for name in calls for tag in self._arrays[name].away], calls)

    def _send(self, trials: Sequence[tuple[SpreadTrials, str]], calls: Mapping[str, tuple[int, bool]]) -> None:
        for process in self._workers:
            places = [(array.name, tag) for array, tag in trials if array.away.get(tag) is process]
            if places:
                seed = calls[places[0][0]][0]
                process.send(EpochRequest(seed, tuple((name, tag, calls[name][1]) for name, tag in places)))
                self._sent.append(process)

    def finish(self, calls: Mapping[str, tuple[int, bool]]) -> dict[str, EpochResult]:
        """Train the trials in this process, wait for the workers, and return the results of all arrays."""
        trained: dict[tuple[str, str], TrainedEpoch] = {}
        local_trials = [(self._arrays[name], tag) for name in calls for tag in self._arrays[name].members]
        local_trials = [(array, tag) for array, tag in local_trials if tag not in array.away]
        while local_trials:
            if self._pays(local_trials):
                self._start()
                self._balance(local_trials)
                self._send(local_trials, calls)
                local_trials = [(array, tag) for array, tag in local_trials if tag not in array.away]
                continue
            array, tag = local_trials.pop(0)
            with torch_threads(1 if self._together else torch.get_num_threads()):
                trained[array.name, tag] = result = array.home.train(tag, *calls[array.name])
            self._local_seconds[tag] = result.seconds
        worker_results: dict[tuple[str, str], TrainedEpoch] = {}
        for process in self._sent:
            worker_results |= process.answer()
        self._sent = []
        trained |= worker_results
        self._seconds |= {tag: result.seconds for (_, tag), result in trained.items()}
        results: dict[str, EpochResult] = {}
        for name in calls:
            array = self._arrays[name]
            array.done.update(list(array.members))
            results[name] = array.home.result({tag: trained[name, tag] for tag in array.members})
        self._judge(worker_results)
        return results

    def _judge(self, worker_results: Mapping[tuple[str, str], TrainedEpoch]) -> None:
        """End workers that are measured to be slower than this process alone."""
        pairs = [
            (result.seconds, self._local_seconds[tag])
            for (_, tag), result in worker_results.items()
            if tag in self._local_seconds
        ]
        if not pairs:
            return
        slower = sum(away_seconds for away_seconds, _ in pairs) / sum(home_seconds for _, home_seconds in pairs)
        worker_seconds: Counter[TrialProcess] = Counter()
        for (name, tag), result in worker_results.items():
            worker_seconds[self._arrays[name].away[tag]] += result.seconds  # type: ignore[assignment]
        if sum(worker_seconds.values()) / max(worker_seconds.values()) < slower:
            self._close()
            self._workers_are_slower = True
            _log.info(
                "plain trials are trained one after another: in %d processes each took %.1f times as long",
                len(worker_seconds),
                slower,
            )

    def _pays(self, trials: Sequence[tuple[SpreadTrials, str]]) -> bool:
        """Return whether workers save more than they cost, by the remaining epochs of live trials."""
        times = self._local_seconds or self._seconds
        if self._workers_are_slower or not self._together or self._workers or not times:
            return False
        movable = self._movable(trials)
        count = min(self._most, len(movable))
        if count < 2:
            return False
        usual = sum(times.values()) / len(times)
        remaining = sum(
            times.get(tag, usual) * (array.members[tag].suggestion.epochs - array.done[tag]) for array, tag in movable
        )
        return remaining * (1 - 1 / count) > start_seconds()

    def _movable(self, trials: Sequence[tuple[SpreadTrials, str]]) -> list[tuple[SpreadTrials, str]]:
        """Return the trials that can move to another process and share no tensor with a live trial."""
        counts: Counter[int] = Counter()
        owners: dict[str, set[int]] = {}
        for array in self._arrays.values():
            for tag, member in array.members.items():
                owners[tag] = {id(tensor) for _, tensor in tensors(member.model)}
                counts.update(owners[tag])
        alone = {tag for tag, ids in owners.items() if all(counts[identity] == 1 for identity in ids)}
        return [(array, tag) for array, tag in trials if tag in alone - self._stuck]

    def _start(self) -> None:
        """Fork the workers, and record the seconds that this takes."""
        began = time.perf_counter()
        self._refuse(why_no_fork(self.recipe.device) or _why_no_readers(self.recipe))
        for _ in range(min(self._most, self._live)):
            self._workers.append(TrialProcess(self.recipe, self._workers))
        for process in self._workers:
            process.ask(StatesRequest((), leaving=False))
        if self._workers:
            note_start(time.perf_counter() - began)
            _log.info("plain trials are trained in %d processes", len(self._workers))

    def _balance(self, trials: Sequence[tuple[SpreadTrials, str]]) -> None:
        """Assign trials, longest first, to the least loaded worker. Trials stay where the load is balanced."""
        times = self._seconds or {"": 1.0}
        usual = sum(times.values()) / len(times)
        seconds = {tag: self._seconds.get(tag, usual) for _, tag in trials}
        total: Counter[TrialProcess] = Counter()
        fair = sum(seconds.values()) / max(1, len(self._workers))
        new: dict[tuple[str, TrialProcess], list[bytes]] = {}
        for array, tag in sorted(self._movable(trials), key=lambda trial: -seconds[trial[1]]):
            process = array.away.get(tag)
            if process is not None and total[process] + seconds[tag] <= fair + min(seconds.values()):
                total[process] += seconds[tag]  # type: ignore[assignment]
                continue
            target = min(self._workers, key=lambda worker: total[worker], default=None)
            if target is None:
                return
            total[target] += seconds[tag]  # type: ignore[assignment]
            if target is process:
                continue
            array.come_home([tag])
            cargo = self._packed(array, tag)
            if cargo is not None:
                array.away[tag] = target
                new.setdefault((array.name, target), []).append(cargo)
        for (name, target), cargoes in new.items():
            target.send(JoinRequest(name, packed(self._arrays[name].choices), tuple(cargoes)))
        for _, target in new:
            target.answer()

    def _packed(self, array: SpreadTrials, tag: str) -> bytes | None:
        """Remove a trial from this process, and return it pickled; or keep it, and return None if pickling fails."""
        member = array.members[tag]
        state = array.home.state(tag) if array.done[tag] or array.home.epochs else None
        try:
            packed(array.choices)
            cargo = packed(TrialCargo(member.number, member.suggestion, member.model, state))
        except Exception as error:
            _log.info("%s stays in this process, as pickle fails: %s: %s", tag, type(error).__name__, error)
            self._stuck.add(tag)
            return None
        array.home.take(tag)
        return cargo

    def _close(self) -> None:
        """Move all trials back to this process, and end the workers."""
        for array in self._arrays.values():
            array.come_home(list(array.away))
        self.close()

    def close(self) -> None:
        """End the workers."""
        for process in self._workers:
            process.close()
        self._workers = []


def _why_no_readers(recipe: SweepRecipe) -> str:
    """Return why loaders cannot be read in a worker; an empty string if they can."""
    loaders = (*recipe.loaders.created_loaders, recipe.eval_loader)
    reads = any(isinstance(loader, DataLoader) and loader.num_workers for loader in loaders)
    return "a DataLoader has processes of its own" if reads else ""


# A process that trains plain trials. It is forked, so that it has all functions, loaders and imports already.


@dataclass(frozen=True, eq=False)
class TrialCargo:
    """A plain trial sent to another process. ``state``: see `PlainTrials.state`; None before its first epoch."""

    number: int
    suggestion: Suggestion
    model: nn.Module
    state: dict[str, Any] | None

    def member(self) -> TrialModel:
        """Return the trial with this model, which is not made again."""
        member = TrialModel(self.number, self.suggestion, cast(ModelMaker, None))
        member.__dict__["model"] = self.model
        return member


@dataclass(frozen=True)
class JoinRequest:
    """Add trials to the array ``name``. ``cargo`` are pickled `TrialCargo`, ``choices`` pickled `ArrayChoices`."""

    name: str
    choices: bytes
    cargo: tuple[bytes, ...]


@dataclass(frozen=True)
class EpochRequest:
    """Train trials ``(array name, tag, evaluates)`` for an epoch."""

    seed: int
    trials: tuple[tuple[str, str, bool], ...]


@dataclass(frozen=True)
class StatesRequest:
    """Return the states of trials ``(array name, tag)``. If ``leaving``, the worker removes them."""

    trials: tuple[tuple[str, str], ...]
    leaving: bool


@dataclass(frozen=True)
class DiscardRequest:
    """Remove the trial ``tag`` of the array ``name``."""

    name: str
    tag: str


Request: TypeAlias = JoinRequest | EpochRequest | StatesRequest | DiscardRequest


class TrialProcess:
    """One worker process that trains plain trials, see `ForkedProcess`."""

    def __init__(self, recipe: SweepRecipe, siblings: Sequence[TrialProcess]) -> None:
        self._process: ForkedProcess = ForkedProcess(
            partial(_answers, recipe), [sibling._process for sibling in siblings]
        )

    def send(self, request: Request) -> None:
        """Send a request without waiting. The worker answers every request, in order."""
        try:
            self._process.send(request)
        except EndedProcess as error:
            raise _lost(error) from error

    def answer(self) -> Any:
        """Wait for the answer to the oldest request, and return it, or raise the error that it raised."""
        try:
            answer = self._process.answer()
        except EndedProcess as error:
            raise _lost(error) from error
        if isinstance(answer, Raised):
            raise answer.error
        return answer

    def ask(self, request: Request) -> Any:
        """Send a request, and wait for its answer."""
        self.send(request)
        return self.answer()

    def close(self) -> None:
        """End the process immediately. It holds nothing that outlives the sweep."""
        self._process.close()


def _lost(ended: EndedProcess) -> HFusionError:
    return HFusionError(
        f"a process that trained trials of the sweep ended with exit code {ended.exitcode}, as if the "
        "system had killed it, which it does when memory runs out: call hf.sweep with fewer rows, or with "
        "processes=0; with a directory the sweep goes on where it was"
    )


def packed(value: Any) -> bytes:
    """Pickle a value; with cloudpickle only if pickle fails, as a fork can import classes by name.

    Raises:
        Exception: the error of pickle, or of cloudpickle if it is installed.
    """
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


def _answers(recipe: SweepRecipe, is_orphan: Callable[[], bool]) -> Callable[[Any], Any]:
    """Return the function that answers requests in a worker process."""
    arrays: dict[str, PlainTrials] = {}

    def answer(request: Request) -> Any:
        try:
            return _done(request, arrays, recipe, is_orphan)
        except BaseException as error:
            return Raised(error)

    return answer


def _done(request: Request, arrays: dict[str, PlainTrials], recipe: SweepRecipe, stop: Any) -> Any:
    if isinstance(request, EpochRequest):
        results: dict[tuple[str, str], TrainedEpoch] = {}
        for name, tag, evaluates in request.trials:
            results[name, tag] = arrays[name].train(tag, request.seed, evaluates)
        return results
    if isinstance(request, StatesRequest):
        if request.leaving:
            return {(name, tag): arrays[name].take(tag) for name, tag in request.trials}
        return {(name, tag): arrays[name].state(tag) for name, tag in request.trials}
    if isinstance(request, DiscardRequest):
        arrays[request.name].discard(request.tag)
        return None
    if request.name not in arrays:
        arrays[request.name] = PlainTrials(recipe, pickle.loads(request.choices), stop)
    for data in request.cargo:
        cargo: TrialCargo = pickle.loads(data)
        member = cargo.member()
        arrays[request.name].join([member], None if cargo.state is None else {member.tag: cargo.state})
    return None
