"""A process that trains plain trials. It is forked, so that it has all functions, loaders and imports already."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeAlias, cast

from torch import nn

from hfusion.cluster.messages import Raised
from hfusion.core.errors import HFusionError
from hfusion.device.forked_process import EndedProcess, ForkedProcess
from hfusion.tune.plain_trials import PlainTrials, TrainedEpoch
from hfusion.tune.space import ModelMaker, Suggestion, TrialModel
from hfusion.tune.training_setup import SweepRecipe


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
