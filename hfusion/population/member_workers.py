"""Plain members of a population in forked processes, which own them while the population only steps."""

from __future__ import annotations

import io
import pickle
import time
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from hfusion.capture.attribute_fingerprint import python_attributes
from hfusion.capture.registered_tensors import tensors
from hfusion.core.member_table import MemberTable
from hfusion.core.torch_settings import SETTINGS
from hfusion.device.backend import active_autocast
from hfusion.device.team import torch_threads
from hfusion.device.worker_process import Failure, Parent, WorkerProcess, why_no_fork
from hfusion.population.group_step import GroupDraws
from hfusion.population.grouping import copy_member_state, put_member_state
from hfusion.population.members import Event
from hfusion.population.training_group import StepArguments, TrainingGroup
from hfusion.torch_private.dispatch_modes import function_modes, in_dispatch_mode
from hfusion.torch_private.module_hooks import has_global_hooks

_CPU = torch.device("cpu")
_REMEDY = "The weights of its members are lost: load the last save, or pass processes=1."
# Steps without a look at the population before members leave: whoever looks after each step keeps them here.
_QUIET_STEPS = 2


StepRequest = tuple[int, int, list[StepArguments]]
"""The random number of a step, the population's number of steps, and the arguments of each group of the worker."""


@dataclass(frozen=True)
class StepAnswer:
    """Losses of groups, new events, whether there were updates and random draws, and the error if any.

    A group that fails has no loss, and neither have those after it.
    """

    losses: list[tuple[float, torch.dtype]]
    updated: bool
    events: list[Event]
    has_drawn: bool
    failure: Failure | None


ArgumentsOf = Callable[[TrainingGroup], StepArguments]


class MemberWorkers:
    """The processes of a population.

    Plain members move to forks of this process before the third step in a row that nothing but steps has come between.
    Whatever reads or changes the population calls `come_home` first, which ends the forks.

    Args:
        processes: how many processes train plain members, this one included.
    """

    def __init__(self, processes: int) -> None:
        self._processes = processes
        self._workers: dict[WorkerProcess, list[TrainingGroup]] = {}
        self._finalizer: Callable[[], object] = lambda: None
        # The workers that compute now, with the losses and the draws of the step.
        self._computing: list[tuple[WorkerProcess, dict[TrainingGroup, Tensor], GroupDraws]] = []
        self._quiet_steps = 0
        self._settings: Any = None

    @contextmanager
    def step(
        self, groups: Sequence[TrainingGroup], draws: GroupDraws, arguments: ArgumentsOf | None
    ) -> Iterator[tuple[dict[TrainingGroup, Tensor], list[TrainingGroup]]]:
        """Context manager: workers step their members; yields losses by group, with theirs at the end, and the groups
        that no worker owns.

        arguments: returns inputs, target and keywords of a group; None if members must step here.
        """
        # Forks may not have the modes and hooks under which this thread computes.
        observed = active_autocast() or in_dispatch_mode() or function_modes() or has_global_hooks()
        is_plain_step = self._processes > 1 and arguments is not None and not observed
        if self._workers and not (is_plain_step and self._settings == _read_settings()):
            self.come_home()
        if is_plain_step and not self._workers and self._quiet_steps >= _QUIET_STEPS:
            self._leave(groups)
        self._quiet_steps += is_plain_step
        losses, away = dict[TrainingGroup, Tensor](), set[TrainingGroup]()
        for worker, members in self._workers.items():
            assert arguments is not None
            worker.call((draws.number, groups[0].table.history.step, list(map(arguments, members))))
            self._computing.append((worker, losses, draws))
            away.update(members)
        try:
            yield losses, [group for group in groups if group not in away]
        finally:
            self._collect()

    def _collect(self) -> None:
        """Wait for the workers that compute. Raises the error of the first member that failed; all others step."""
        failure: BaseException | None = None
        while self._computing:
            worker, losses, draws = self._computing.pop(0)
            answer: StepAnswer = worker.poll()
            members = self._workers[worker]
            for group, (loss, dtype) in zip(members, answer.losses, strict=False):
                losses[group] = torch.tensor([loss], dtype=dtype, device="cpu")
            history = members[0].table.history
            history.updated |= answer.updated
            history.events.extend(answer.events)
            draws.has_drawn |= answer.has_drawn
            if answer.failure is not None and failure is None:
                failure = answer.failure.error_of(worker.name)
        if failure is not None:
            self.come_home()
            raise failure

    @contextmanager
    def at_home(self, group: TrainingGroup) -> Iterator[None]:
        """Context manager: a group steps here; a plain one with one thread if others have processes of their own."""
        began = time.perf_counter()
        with torch_threads(1) if group.is_plain and self._processes > 1 else nullcontext():
            yield
        group.seconds = time.perf_counter() - began

    def _leave(self, groups: Sequence[TrainingGroup]) -> None:
        """Fork workers, and give them members: the longest first, each to the process with the least to do."""
        movable = [group for group in groups if _may_leave(group)]
        count = min(self._processes, len(movable)) - 1
        if count < 1 or why_no_fork(_CPU):
            return
        rest = [group for group in groups if group not in movable]
        loads = [sum(group.seconds for group in rest), *[0.0] * count]
        shares: list[list[TrainingGroup]] = [[] for _ in loads]
        for group in sorted(movable, key=lambda group: -group.seconds):
            least = min(range(len(loads)), key=lambda index: (loads[index], len(shares[index])))
            loads[least] += group.seconds
            shares[least].append(group)
        self._settings = _read_settings()
        closing = ExitStack()
        self._finalizer = weakref.finalize(self, closing.close)
        for share in filter(None, shares[1:]):
            name = f"a process of {len(share)} members of the population"
            worker = WorkerProcess(name, partial(_serve, share), list(self._workers), _REMEDY)
            closing.callback(worker.close)
            self._workers[worker] = share

    def come_home(self) -> None:
        """Take the state of all members from the workers, and end these. Raises WorkerEnded if one was killed."""
        self._quiet_steps = 0
        if not self._workers:
            return
        if self._computing:
            self._collect()
        for worker, members in self._workers.items():
            for group, state in zip(members, worker.ask(None), strict=True):
                _put_away_state(group, *state)
        self._workers = {}
        self._finalizer()


def _read_settings() -> Any:
    return torch.get_default_dtype(), [read() for read in dict.fromkeys(SETTINGS.values())]


def _may_leave(group: TrainingGroup) -> bool:
    """Return whether a worker can own a group: a plain member on the CPU, without functions that the user runs here."""
    if not group.is_plain or group.gradient_hooks or group.options.on_nonfinite == "raise" or not group.active_rows:
        return False
    if any(tensor.device.type != "cpu" for _, tensor in tensors(group.fused)):
        return False
    try:
        _unpacked_attributes(_packed_attributes(group.fused), group.fused)
    except Exception:
        return False
    return True


# In a worker.


def _serve(members: Sequence[TrainingGroup], parent: Parent) -> Callable[[Any], Any]:
    """Return the function that answers requests in a worker."""
    del parent
    history = members[0].table.history

    def answer(request: StepRequest | None) -> Any:
        if request is None:
            return list(map(_state_to_send, members))
        before, losses, failure = len(history.events), list[tuple[float, torch.dtype]](), None
        draws, history.updated = GroupDraws(_CPU), False
        draws.number, history.step, arguments = request
        for group, of_group in zip(members, arguments, strict=True):
            try:
                with draws.of_group(group.key):
                    loss = group.step(of_group)
            except BaseException as error:
                failure = Failure(error)
                break
            losses.append((float(loss), loss.dtype))
        return StepAnswer(losses, history.updated, history.events[before:], draws.has_drawn, failure)

    return answer


def _state_to_send(group: TrainingGroup) -> tuple[dict[str, MemberTable], dict[str, Tensor], bytes]:
    """Return what steps change of a member: its tables, its tensors and its Python attributes."""
    _, state = copy_member_state(group, 0)
    tables = {name: table.to("cpu") for name, table in state.items() if name not in ("best", "schedule")}
    return tables, {name: tensor.detach() for name, tensor in tensors(group.fused)}, _packed_attributes(group.fused)


def _put_away_state(
    group: TrainingGroup, tables: dict[str, MemberTable], held: dict[str, Tensor], attributes: bytes
) -> None:
    """Write the state of a member that comes back from a worker."""
    model = group.fused
    with torch.no_grad():
        for name, tensor in tensors(model):
            tensor.copy_(held[name])
    for path, values in _unpacked_attributes(attributes, model).items():
        vars(model.get_submodule(path)).update(values)
    group.drop_gradients()
    put_member_state(group, 0, tables)


def _packed_attributes(model: nn.Module) -> bytes:
    """Pickle the Python attributes of a model by path. Its modules and tensors in them are replaced by their names."""
    names: dict[int, tuple[str, str]] = {id(tensor): ("tensor", name) for name, tensor in tensors(model)}
    names |= {id(module): ("module", path) for path, module in model.named_modules()}
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.persistent_id = lambda value: names.get(id(value))  # type: ignore[method-assign]
    pickler.dump({path: dict(python_attributes(module)) for path, module in model.named_modules()})
    return file.getvalue()


def _unpacked_attributes(data: bytes, model: nn.Module) -> dict[str, dict[str, Any]]:
    parts = {"tensor": dict(tensors(model)), "module": dict(model.named_modules())}
    unpickler = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = lambda key: parts[key[0]][key[1]]  # type: ignore[method-assign]
    values: dict[str, dict[str, Any]] = unpickler.load()
    return values
