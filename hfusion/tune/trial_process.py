"""A process that trains plain trials: a fork of this one, so that it has all functions, loaders and imports already."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
import signal
import sys
import threading
import warnings
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any, cast

import torch
from torch import nn

from hfusion.cluster.messages import Raised
from hfusion.core.errors import HFusionError
from hfusion.device.backend import accelerators
from hfusion.tune.plain_trials import PlainTrials, TrainedEpoch
from hfusion.tune.space import ModelMaker, Suggestion, TrialModel
from hfusion.tune.sweep_recipe import SweepRecipe

# Modules in which threads wait that do nothing: a lock that they hold is none that training takes.
_WAITING = {"threading", "queue", "selectors", "socket", "connection", "heartbeat"}


@dataclass(frozen=True, eq=False)
class TrialCargo:
    """A plain trial on its way to another process; ``state`` as of `PlainTrials.state`, or None before it trained."""

    number: int
    suggestion: Suggestion
    model: nn.Module
    state: dict[str, Any] | None

    def member(self) -> TrialModel:
        """The trial with this very model."""
        member = TrialModel(self.number, self.suggestion, cast(ModelMaker, None))
        member.__dict__["model"] = self.model
        return member


@dataclass(frozen=True)
class JoinRequest:
    """Let trials of the array ``name`` join, each a pickled `TrialCargo`; ``choices`` are pickled, too."""

    name: str
    choices: bytes
    cargo: tuple[bytes, ...]


@dataclass(frozen=True)
class EpochRequest:
    """Train these trials, each ``(name, tag, evaluates)``, for an epoch."""

    seed: int
    trials: tuple[tuple[str, str, bool], ...]


@dataclass(frozen=True)
class StatesRequest:
    """Give the states of these trials, each ``(name, tag)``; those that are ``leaving`` end here."""

    trials: tuple[tuple[str, str], ...]
    leaving: bool


class TrialProcess:
    """One worker. It ends when `close` is called, and when this process ends, however that is.

    Args:
        siblings: workers that run already, whose pipes a fork would hold open.
    """

    def __init__(self, recipe: SweepRecipe, siblings: Sequence[TrialProcess]) -> None:
        context = multiprocessing.get_context("fork")
        self._pipe, theirs = context.Pipe()
        ours = [self._pipe, *(sibling._pipe for sibling in siblings)]
        self._process = context.Process(target=_serve, args=(theirs, ours, recipe, os.getpid()), daemon=True)
        with warnings.catch_warnings():
            # Of threads, which `why_no_fork` looks at.
            warnings.simplefilter("ignore", DeprecationWarning)
            self._process.start()
        theirs.close()

    def send(self, request: JoinRequest | EpochRequest | StatesRequest | None) -> None:
        """Send what is to be done next; every request is answered."""
        try:
            self._pipe.send_bytes(pickle.dumps(request))
        except OSError as error:
            raise self._lost() from error

    def answer(self) -> Any:
        """Wait for the answer to the oldest request, and raise what that raised."""
        try:
            answer = pickle.loads(self._pipe.recv_bytes())
        except (EOFError, OSError) as error:
            raise self._lost() from error
        if isinstance(answer, Raised):
            raise answer.error
        return answer

    def ask(self, request: JoinRequest | EpochRequest | StatesRequest | None) -> Any:
        """Send a request, and wait for its answer."""
        self.send(request)
        return self.answer()

    def _lost(self) -> HFusionError:
        self._process.join(1.0)
        return HFusionError(
            f"a process that trained trials of the sweep ended with exit code {self._process.exitcode}, as if the "
            "system had killed it, which it does when memory runs out: call hf.sweep with fewer rows, or with "
            "processes=0; with a directory the sweep goes on where it was"
        )

    def close(self) -> None:
        """End it at once: all that it has is of this sweep."""
        self._process.kill()
        self._process.join()
        self._pipe.close()


def packed(value: Any) -> bytes:
    """Pickle a value, by cloudpickle only where pickle fails: a fork knows classes by their names.

    Raises:
        Exception: as pickle does, where neither can.
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


def why_no_fork(device: torch.device) -> str:
    """Return why a fork of this process could not train on ``device``; empty if it could."""
    if sys.platform != "linux":
        return f"processes are not forked on {sys.platform}"
    if device.type != "cpu" or accelerators():
        return "a fork cannot use what an accelerator's driver holds"
    if threading.current_thread() is not threading.main_thread():
        return "the sweep is not in the main thread"
    frames = sys._current_frames()
    for thread in threading.enumerate():
        frame = frames.get(thread.ident or 0)
        busy = frame is not None and Path(frame.f_code.co_filename).stem not in _WAITING
        if thread is not threading.current_thread() and busy:
            return f"thread {thread.name!r} may hold locks"
    return ""


def _serve(pipe: Connection, others: Sequence[Connection], recipe: SweepRecipe, parent: int) -> None:
    """Serve requests in a worker process until its parent ends."""
    for connection in others:
        connection.close()
    # Ctrl-C is the parent's, which ends this process.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)
    # Objects from before the fork are never collected here: visiting them would copy their memory.
    gc.freeze()
    arrays: dict[str, PlainTrials] = {}

    def is_orphan() -> bool:
        return os.getppid() != parent

    with suppress(EOFError, OSError):
        while (request := pickle.loads(pipe.recv_bytes())) is not None:
            try:
                reply = _done(request, arrays, recipe, is_orphan)
            except BaseException as error:
                if is_orphan():
                    return
                reply = Raised(error)
            pipe.send_bytes(pickle.dumps(reply))


def _done(
    request: JoinRequest | EpochRequest | StatesRequest, arrays: dict[str, PlainTrials], recipe: SweepRecipe, stop: Any
) -> Any:
    if isinstance(request, EpochRequest):
        results: dict[tuple[str, str], TrainedEpoch] = {}
        for name, tag, evaluates in request.trials:
            results[name, tag] = arrays[name].train(tag, request.seed, evaluates)
        return results
    if isinstance(request, StatesRequest):
        if request.leaving:
            return {(name, tag): arrays[name].take(tag) for name, tag in request.trials}
        return {(name, tag): arrays[name].state(tag) for name, tag in request.trials}
    if request.name not in arrays:
        arrays[request.name] = PlainTrials(recipe, pickle.loads(request.choices), stop)
    for data in request.cargo:
        cargo: TrialCargo = pickle.loads(data)
        member = cargo.member()
        arrays[request.name].join([member], None if cargo.state is None else {member.tag: cargo.state})
    return None
