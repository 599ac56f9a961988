"""Steps of a population: its groups one after another, plain members in forked processes, loaders of their own."""

from __future__ import annotations

import io
import math
import pickle
import time
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.capture.attribute_fingerprint import python_attributes
from hfusion.capture.registered_tensors import tensors
from hfusion.core.calls import entry_counts, stacked, take_entries
from hfusion.core.errors import ForwardsDiffer, NonFiniteError
from hfusion.core.fingerprint import SETTINGS
from hfusion.core.member_table import MemberTable, check_once, is_row
from hfusion.device.backend import active_autocast, backend
from hfusion.device.team import torch_threads
from hfusion.device.worker_process import Failure, Parent, WorkerProcess, close_workers, why_no_fork
from hfusion.population.evaluation import check_entries, pair_of
from hfusion.population.grouping import part, put_member_state
from hfusion.population.training_group import StepArguments, TrainingGroup
from hfusion.step.memory_budget import state_bytes
from hfusion.torch_private.dispatch_modes import function_modes, in_dispatch_mode
from hfusion.torch_private.module_hooks import has_global_hooks

if TYPE_CHECKING:
    from hfusion.population.population import Population

_CPU = torch.device("cpu")
_REMEDY = "The weights of its members are lost: load the last save, or pass processes=1."
# Steps without a look at the population before members leave: whoever looks after each step keeps them here.
_QUIET_STEPS = 2


def step_groups(population: Population, arguments: StepArguments, rows: Sequence[int] | None, weights: Any) -> Tensor:
    """Train the members of several groups for one step; see `Population.step`."""
    groups, workers = population._held_groups, population._workers
    if rows is None:
        check_entries(arguments, len(population))
    if not groups:
        return torch.full((len(population),), math.nan, device="cpu")
    entries = {row: entry for entry, row in enumerate(range(len(population)) if rows is None else rows)}
    if population._options.memory is not None:
        sizes = [state_bytes(group.fused, group.optimizer) for group in groups]
        for group, size in zip(groups, sizes, strict=True):
            group.elsewhere = sum(sizes) - size
    device = next((p.device for group in groups for p in group.parameters() if p.device.type != "cpu"), _CPU)
    is_shared = not entry_counts(arguments)

    def arguments_of(places: Sequence[int]) -> StepArguments:
        return arguments if is_shared else take_entries(arguments, places)

    by_group = (lambda group: arguments_of(group.entries(entries))) if rows is None and weights is None else None
    with GroupDraws(device) as draws, workers.step(groups, draws, by_group) as (losses, here):
        queue = deque(here)
        while queue:
            group = queue.popleft()
            chosen = [local for local, row in enumerate(group.rows) if row in entries]
            if not chosen:
                continue
            some = None if len(chosen) == len(group.live) else chosen
            places = group.entries(entries) if some is None else [entries[group.rows[local] or 0] for local in chosen]
            try:
                with draws.of_group(group.key), workers.at_home(group):
                    of_group = take_entries(weights, places)
                    losses[group] = group.step(arguments_of(places), some, of_group)
            except ForwardsDiffer as error:
                queue.extendleft(reversed(part(population, group, error, some)))
    like = next(iter(losses.values()))
    no_loss = torch.full((1,), math.nan, dtype=like.dtype, device=like.device)
    # Groups may have parted. Members need not come home for the layout.
    return population._held_layout.collected([losses.get(g, no_loss.expand(len(g))) for g in population._held_groups])


@contextmanager
def one_update(population: Population) -> Iterator[None]:
    """Context manager: the updates of all groups count as one.

    With ``on_nonfinite="raise"`` the groups defer their updates, which are made at the end. If values of members are
    not finite, this raises a NonFiniteError before the first, and all are what they were before. After an error, so are
    the groups whose update has not begun.
    """
    history, ends = population._history, list[Any]()
    history.deferred = ends if population._options.on_nonfinite == "raise" else None
    try:
        yield
        history.deferred = None
        bad = [
            (group.rows[local] or 0, group.table["tag"][local])
            for group, found, _ in ends
            if found is not None
            for local in found.nonzero().reshape(-1).tolist()
        ]
        if bad:
            shown = ", ".join(f"{tag!r} (row {row})" for row, tag in sorted(bad))
            raise NonFiniteError(
                f"the loss or a gradient of {shown} is not finite in step {history.step}; nothing was updated: lower "
                'its learning rate, stop it, or give on_nonfinite="freeze"'
            )
        for group, _, end in ends:
            with group.table.naming():
                end()
    except BaseException:
        for group in population._held_groups:
            group.restore()
        raise
    finally:
        history.deferred = None
        history.step, history.updated = history.step + history.updated, False


def flush(population: Population) -> bool:
    """Update members that have made fewer than ``accumulate`` calls of `step`. Return whether there were any.

    Their gradients stay divided by ``accumulate``, as in the last group of an epoch of `hfusion.Task`.
    """
    with population._lock, one_update(population):
        flushed = [group.flush() for group in population._groups]
    return any(flushed)


class GroupDraws:
    """Seeds the generators of torch for each group of a step, from one number that the step draws.

    What a group draws so depends on no other group. A step in which no group draws leaves the generators as they were.

    Attributes:
        number: the random number that the step drew.
        has_drawn: whether a group has drawn random numbers.
    """

    def __init__(self, device: torch.device) -> None:
        self._backend = backend(device)
        self._previous_states: dict[str, Tensor] = self._backend.random_states()
        self.number = int(torch.empty((), dtype=torch.int64, device="cpu").random_())
        self._drawn = torch.get_rng_state()
        self.has_drawn = False

    @contextmanager
    def of_group(self, key: int) -> Iterator[None]:
        """Context manager: torch's random numbers depend only on the step and ``key``."""
        seed = (self.number * 0x5851F42D4C957F2D + key) & ((1 << 63) - 1)
        states = {kind: torch.Generator(kind).manual_seed(seed).get_state() for kind in self._previous_states}
        self._backend.set_random_states(states)
        try:
            yield
        finally:
            after = self._backend.random_states()
            # torch.equal compares states byte by byte, which takes four times as long.
            self.has_drawn |= any(
                after[kind].numpy().tobytes() != state.numpy().tobytes() for kind, state in states.items()
            )

    def __enter__(self) -> GroupDraws:
        return self

    def __exit__(self, *_: object) -> None:
        """Restore the generators; if a group has drawn, the CPU's stays advanced by the draw of ``number``."""
        self._backend.set_random_states(
            {**self._previous_states, "cpu": self._drawn} if self.has_drawn else self._previous_states
        )


# Plain members in forked processes, which own them while the population only steps.

StepRequest = tuple[int, int, list[StepArguments]]
"""The random number of a step, the population's number of steps, and the arguments of each group of the worker."""


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
            computed, updated, events, has_drawn, error = worker.poll()
            members = self._workers[worker]
            # A group that fails has no loss, and neither have those after it.
            for group, (loss, dtype) in zip(members, computed, strict=False):
                losses[group] = torch.tensor([loss], dtype=dtype, device="cpu")
            history = members[0].table.history
            history.updated |= updated
            history.events.extend(events)
            draws.has_drawn |= has_drawn
            if error is not None and failure is None:
                failure = error.error_of(worker.name)
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
        if count < 1:
            return
        if why := why_no_fork(_CPU):
            warnings.warn(f"processes={self._processes}, but this one trains all members: {why}", stacklevel=2)
            return
        here = [group for group in groups if group not in movable]
        shares = [here, *(list[TrainingGroup]() for _ in range(count))]
        for group in sorted(movable, key=lambda group: -group.seconds):
            min(shares, key=lambda share: (sum(other.seconds for other in share), len(share))).append(group)
        self._settings = _read_settings()
        workers: list[WorkerProcess] = []
        self._finalizer = weakref.finalize(self, close_workers, workers)
        for share in filter(None, shares[1:]):
            name = f"a process of {len(share)} members of the population"
            workers.append(WorkerProcess(name, partial(_serve, share), list(workers), _REMEDY))
            self._workers[workers[-1]] = share

    def come_home(self) -> None:
        """Take the state of all members from the workers, and end these. Raises WorkerEnded if one was killed."""
        self._quiet_steps = 0
        if not self._workers:
            return
        if self._computing:
            self._collect()
        # All answer before any state is put away: after an error, the same is asked again.
        answers = [worker.ask(None) for worker in self._workers]
        for members, states in zip(self._workers.values(), answers, strict=True):
            for group, state in zip(members, states, strict=True):
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
        _unpacked_modules(_packed_modules(_parts(group.fused)), _parts(group.fused))
    except Exception:
        return False
    return True


# In a worker.


def _serve(members: Sequence[TrainingGroup], _: Parent) -> Callable[[Any], Any]:
    return partial(_answer, members, [_parts(group.fused) for group in members])


def _answer(members: Sequence[TrainingGroup], parts: Sequence[ModelParts], request: StepRequest | None) -> Any:
    """Step the members of a worker; for None, return their states. ``parts``: of their models at the fork.

    The answer to a step: losses of groups, whether there were updates, new events, whether random numbers were drawn,
    and the error if any.
    """
    if request is None:
        return list(map(_state_to_send, members, parts))
    history = members[0].table.history
    before, losses, failure = len(history.events), list[tuple[float, torch.dtype]](), None
    draws, history.updated = GroupDraws(_CPU), False
    draws.number, history.step, arguments = request
    for group, of_group in zip(members, arguments, strict=True):
        try:
            with draws.of_group(group.key):
                loss = group.step(of_group)
        except BaseException as error:
            group.restore()
            failure = Failure(error)
            break
        losses.append((float(loss), loss.dtype))
    return losses, history.updated, history.events[before:], draws.has_drawn, failure


ModelParts = tuple[dict[str, Tensor], dict[str, nn.Module]]
"""The tensors of a model and its modules, by name. A fork and its parent have the same names for them."""

# What forward may change of a module besides its own attributes. Parameters stay, since an optimizer has them.
_OF_MODULES = ("training", "_buffers", "_non_persistent_buffers_set", "_modules")


def _parts(model: nn.Module) -> ModelParts:
    return dict(tensors(model)), dict(model.named_modules())


def _state_to_send(group: TrainingGroup, parts: ModelParts) -> tuple[dict[str, MemberTable], list[Any], bytes]:
    """Return what steps change of a member: its tables, the tensors that the parent has, too, and all else."""
    tables = {name: table.to("cpu") for name, table in group.tables().items() if name not in ("best", "schedule")}
    return tables, [(tensor.detach(), tensor.requires_grad) for tensor in parts[0].values()], _packed_modules(parts)


def _put_away_state(
    group: TrainingGroup, tables: dict[str, MemberTable], held: Sequence[tuple[Tensor, bool]], packed: bytes
) -> None:
    """Write the state of a member that comes back from a worker."""
    parts = _parts(group.fused)
    with torch.no_grad():
        for tensor, (value, trains) in zip(parts[0].values(), held, strict=True):
            if (tensor.shape, tensor.dtype) == (value.shape, value.dtype):
                tensor.copy_(value)
            else:
                tensor.data = value
            if isinstance(tensor, nn.Parameter):
                tensor.requires_grad_(trains)
    for path, values in _unpacked_modules(packed, parts).items():
        module = parts[1][path]
        for name in dict(python_attributes(module)).keys() - values.keys():
            del vars(module)[name]
        vars(module).update(values)
    group.drop_gradients()
    put_member_state(group, 0, tables)


def _packed_modules(parts: ModelParts) -> bytes:
    """Pickle what forward may change of the modules, by path. In it, ``parts`` are replaced by their names."""
    names = {id(tensor): (0, name) for name, tensor in parts[0].items()}
    names |= {id(module): (1, path) for path, module in parts[1].items()}
    values = {path: dict(python_attributes(module)) for path, module in parts[1].items()}
    for path, of_module in values.items():
        of_module.update({name: vars(parts[1][path])[name] for name in _OF_MODULES})
    file = io.BytesIO()
    pickler = pickle.Pickler(file)
    pickler.persistent_id = lambda value: names.get(id(value))  # type: ignore[method-assign]
    pickler.dump(values)
    return file.getvalue()


def _unpacked_modules(data: bytes, parts: ModelParts) -> dict[str, dict[str, Any]]:
    unpickler = pickle.Unpickler(io.BytesIO(data))
    unpickler.persistent_load = lambda key: parts[key[0]][key[1]]  # type: ignore[method-assign]
    values: dict[str, dict[str, Any]] = unpickler.load()
    return values


# One loader for each member.


def zip_loaders(
    loaders: Sequence[Iterable[Any]], *, epochs: int | Sequence[int] = 1, rows: Sequence[int] | None = None
) -> Iterator[tuple[Any, Any, list[int]]]:
    """Yield ``(inputs, target, rows)`` for `Population.step`, until each member has had its epochs.

    Epochs begin together. Within an epoch, members with full batches step together. Those whose last batch is smaller
    wait until no full one is left; then the smaller batches are one minibatch, `Ragged` if they differ in size. No
    sample is left out, and members that have finished do not step.

    Args:
        loaders: one per member, each yielding batches ``(inputs, target)``; their lengths may differ.
        epochs: the number of passes over each loader, one number or one per loader; 0 leaves a member out.
        rows: the row of each loader's member; by default 0, 1, ...

    Raises:
        ValueError: epochs or rows differ in number from loaders, a row comes twice, a loader has no batch, or a batch
            is not a pair.

    Example:
        >>> import torch
        >>> loaders = [[(torch.zeros(4, 2), torch.zeros(4))] * 2, [(torch.ones(4, 2), torch.ones(4))]]
        >>> [rows for _, _, rows in zip_loaders(loaders)]
        [[0, 1], [0]]
    """
    counts: list[Any] = list(epochs) if isinstance(epochs, Iterable) else [epochs] * len(loaders)
    numbers = list(range(len(loaders))) if rows is None else list(rows)
    for name, values in (("epochs", counts), ("rows", numbers)):
        if len(values) != len(loaders):
            raise ValueError(f"{name} has {len(values)} values for {len(loaders)} loaders: give one for each")
    check_once(numbers)
    if wrong := [count for count in counts if not is_row(count) or count < 0]:
        raise ValueError(f"epochs={wrong[0]!r}: a loader is gone through 0 times or more")
    return _rounds(loaders, counts, numbers)


def _rounds(
    loaders: Sequence[Iterable[Any]], counts: Sequence[int], numbers: Sequence[int]
) -> Iterator[tuple[Any, Any, list[int]]]:
    for epoch in range(max(counts, default=0)):
        members = zip(loaders, counts, numbers, strict=True)
        live = {row: _pairs(loader, row, epoch) for loader, count, row in members if epoch < count}
        batches: dict[int, Any] = {}  # of each member, the one that it steps with next
        full: dict[Any, tuple[int, ...]] = {}
        while live:
            groups: dict[Any, dict[int, tuple[int, ...]]] = {}
            for row, loader in list(live.items()):
                batches[row] = batches.get(row) or next(loader, None)
                if batches[row] is None:
                    del live[row], batches[row]
                    continue
                kind, sizes = _shapes(batches[row])
                groups.setdefault(kind, {})[row] = sizes
                full[kind] = max(full.get(kind, sizes), sizes)
            for kind, group in groups.items():
                rows = [row for row, sizes in group.items() if sizes == full[kind]] or list(group)
                inputs, targets = zip(*(batches.pop(row) for row in rows), strict=True)
                yield stacked(list(inputs)), stacked(list(targets)), rows


def _pairs(loader: Iterable[Any], row: int, epoch: int) -> Iterator[tuple[Any, Any]]:
    """Yield the batches of one epoch of a member. Raises ValueError if there is none, or if one is no pair."""
    if not hasattr(loader, "__iter__") and not hasattr(loader, "__getitem__"):
        raise ValueError(f"the loader of row {row} is {loader!r}: give minibatches (inputs, target)")
    empty = True
    for batch in loader:
        yield pair_of(batch, f"the loader of row {row}")
        empty = False
    if empty:
        raise ValueError(
            f"the loader of row {row} gave no batch in epoch {epoch}: leave it out by epochs=0; an iterator serves "
            "one epoch"
        )


def _shapes(batch: Any) -> tuple[Any, tuple[int, ...]]:
    """Return the kind of a batch, equal for those that differ in their number of samples only, and its first sizes."""
    leaves, spec = pytree.tree_flatten(batch)
    kinds = tuple((x.shape[1:], x.dim(), x.dtype, x.device) if isinstance(x, Tensor) else repr(x) for x in leaves)
    return (spec, kinds), tuple(x.shape[0] for x in leaves if isinstance(x, Tensor) and x.dim())
