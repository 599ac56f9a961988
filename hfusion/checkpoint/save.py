"""hf.save and hf.load: an array, its optimizer and what else belongs to it, on disk and back.

A save is a nest of plain values and tensors. The tensors of tables (``state``, ``scaler state``), and those of
``module`` that ``stacked`` names, have a row for each of ``members``; all members share the others. A population is
saved as a list of such nests, ``groups``.

All or some members of one or several saves are read. Everything is checked before anything is written.
"""

from __future__ import annotations

import os
import random as python_random
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, field, replace
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import tensors as tensors_of
from hfusion.checkpoint import files
from hfusion.checkpoint.files import Saved, wrap_load_errors
from hfusion.checkpoint.json_tree import decode, encode
from hfusion.core.errors import CheckpointError
from hfusion.core.member_table import MemberTable
from hfusion.core.membership import check_whole_stack, has_rows, member_rows, membership
from hfusion.core.memory import same_bits
from hfusion.device.backend import backend
from hfusion.optim import FusedOptimizer, GradScaler
from hfusion.optim.group import membership_of
from hfusion.optim.hyper import MASTER_STACK, MASTER_WEIGHTS, state_dtype
from hfusion.optim.lr_scheduler import PerMember

Root = str | os.PathLike[str]


@dataclass(frozen=True)
class Loaded:
    """The result of `load`: the folder, the step of the save, the members' tags, and ``extra``."""

    path: Path
    step: int
    tags: list[str]
    extra: Any


def save(
    directory: Root,
    fused: FusedModule,
    optimizer: FusedOptimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: GradScaler | None = None,
    loader: Any = None,
    extra: Any = None,
    tags: Sequence[str] | None = None,
    step: int = 0,
    keep: int = 3,
    score: float | None = None,
) -> Path:
    """Save an array and its optimizer, scheduler and loader in a new folder under ``directory``, atomically.

    Args:
        scheduler: of hf.optim.lr_scheduler, or of torch.
        loader: an object with ``state_dict``, such as torchdata's StatefulDataLoader.
        extra: a nest of numbers, strings and tensors.
        tags: the members' names, by which `load` finds them; by default ``member 0`` and so on.
        keep: how many saves to keep, in addition to the one of the highest ``score``.

    Raises:
        CheckpointError: the save cannot be written, and earlier saves are unchanged; or a value needs code to
            construct.

    Example:
        >>> import tempfile, torch, hfusion as hf
        >>> fused = hf.fuse([torch.nn.Linear(2, 1) for _ in range(2)])
        >>> opt = hf.optim.SGD(fused.parameters(), lr=0.1)
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     saved = hf.save(folder, fused, opt)
    """
    keep, score = files.checked(keep, score)
    if not isinstance(fused, FusedModule):
        raise CheckpointError(f"hf.save takes a fused module, not {type(fused).__name__}: save a model by torch.save")
    tags = [f"member {row}" for row in range(len(fused))] if tags is None else list(tags)
    are_names = all(isinstance(tag, str) and tag for tag in tags)
    if not are_names or len(tags) != len(fused) or len(set(tags)) < len(tags):
        raise CheckpointError(f"tags={tags}: give each of {len(fused)} members a name of its own, a string")
    state = {"members": tags, **array_state(range(len(fused)), fused, optimizer, scheduler, scaler)}
    body, tensors = packed(state | run_state(loader, extra, [fused]))
    return files.write(directory, body, tensors, step=step, keep=keep, score=score)


def load(
    directory: Root | Sequence[Root],
    model: nn.Module,
    optimizer: FusedOptimizer | None = None,
    *,
    scheduler: Any = None,
    scaler: GradScaler | None = None,
    loader: Any = None,
    tags: str | Sequence[str] | None = None,
    random: bool = True,
) -> Loaded:
    """Load members of the save ``directory``, or of the latest save under it, into an array and its optimizer.

    Args:
        directory: a folder, or several, whose members are combined.
        model: a fused module with as many members, or a plain model for one member.
        tags: which members, in the order of the array's rows; by default all.
        random: restore the states of the random generators.

    Raises:
        CheckpointError: there is no save, a file is damaged, or it belongs to another model. Nothing has been changed.

    Example:
        >>> import tempfile, torch, hfusion as hf
        >>> fused = hf.fuse([torch.nn.Linear(2, 1) for _ in range(2)])
        >>> with tempfile.TemporaryDirectory() as folder:
        ...     _ = hf.save(folder, fused)
        ...     _ = hf.load(folder, hf.fuse([torch.nn.Linear(2, 1) for _ in range(2)]))
    """
    parts = []
    for saved in saves_of(directory):
        with wrap_load_errors(saved.path):
            parts += groups_of(saved)
    reader = SaveReader.of(parts, [tags] if isinstance(tags, str) else tags)
    with wrap_load_errors(reader.path):
        if loader is not None:
            # First, as the user's code may raise.
            reader.loader(loader)
        reader.array(model, optimizer, scheduler, scaler)
        if random:
            reader.random(model)
        loaded = Loaded(reader.path, reader.parts[0][0].step, reader.tags, reader.value("extra"))
        reader.write()
    return loaded


# What is saved, and what is read from saves.


def packed(state: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Tensor]]:
    """Return a nest of plain values and tensors as JSON, and copies of its tensors on the CPU by their paths in it."""
    body, tensors = dict[str, Any](), dict[str, Tensor]()
    for key, value in state.items():
        try:
            body[key] = encode(value, tensors, key)
        except RecursionError as error:
            raise CheckpointError(f"{key} is nested too deep, or holds itself: keep plain values") from error
    return body, {key: tensor.to("cpu", copy=True) for key, tensor in tensors.items()}


def array_state(rows: Sequence[int], module: nn.Module, optimizer: Any, scheduler: Any, scaler: Any) -> dict[str, Any]:
    """Return the state of members ``rows`` of an array, or of a single model that has marks, and of what trains it.

    None stands for what it has not. Tensors are live if all members are saved.
    """
    _check_ours(optimizer, scaler)
    if isinstance(module, FusedModule):
        module._views.update(module)

    def own(stack: Tensor) -> Tensor:
        # If all are saved, they are copied without a temporary copy on the device.
        if list(rows) == list(range(len(stack))):
            return stack
        return stack.detach().index_select(0, torch.as_tensor(list(rows), device=stack.device))

    stacked: dict[str, bool] = {}
    values: dict[str, Tensor] = {}
    for name, tensor in tensors_of(module):
        check_whole_stack(tensor, "save it with torch.distributed.checkpoint")
        mark = membership(tensor)
        stacked[name] = mark is not None and mark.is_own
        values[name] = (own(member_rows(tensor, mark)) if mark is not None and mark.is_own else tensor).detach()
    state: dict[str, Any] = {"module": values, "stacked": stacked}
    if optimizer is not None:
        state["optimizer"] = {"described": _described(optimizer), "begun": optimizer.initial_values}
        tables = optimizer.tables().items()
        state["state"] = {name: {key: own(stack) for key, stack in table.columns.items()} for name, table in tables}
        shared = _shared_params(optimizer)
        state["shared state"] = {name: dict(optimizer.state.get(param, {})) for param, name in shared}
    if scheduler is not None:
        common = not isinstance(scheduler, PerMember)
        state["schedule"] = {
            "common": common,
            "members": [scheduler.state_dict()] if common else [scheduler.member_state(row) for row in rows],
            "kinds": [type(scheduler).__name__] if common else [scheduler.kinds[row] for row in rows],
        }
    if scaler is not None:
        columns = scaler.state_dict()
        state["scaler"], state["scaler begun"] = sorted(columns), scaler.initial_values
        state["scaler state"] = {name: own(column) for name, column in columns.items()}
    return state


def run_state(loader: Any, extra: Any, modules: Sequence[nn.Module]) -> dict[str, Any]:
    """Return the loader's position, ``extra``, and the random states of torch, Python, numpy and the devices."""
    if loader is not None and not hasattr(loader, "state_dict"):
        raise CheckpointError(
            f"loader must have a state_dict, by which it could go on, got {type(loader).__name__}. Give torchdata's "
            "StatefulDataLoader, or none."
        )
    state = {
        "torch": torch.get_rng_state(),
        "python": python_random.getstate(),
        "numpy": np.random.get_state(),
        "devices": {str(device): backend(device).random_states() for device in _devices_of(modules)},
    }
    position = {} if loader is None else {"loader": loader.state_dict()}
    return {"extra": extra, "random": state, **position}


@dataclass
class SaveReader:
    """Members of one or several saves.

    Its methods check what was saved and what it is for, and change nothing; `write` then does what they have noted.

    Attributes:
        parts: pairs of a save and indices in it, in the members' order.
        writes: functions that write the saved values.
    """

    parts: list[tuple[Saved, list[int]]]
    writes: list[Callable[[], object]] = field(default_factory=list)

    @staticmethod
    def of(saved: Sequence[Saved], tags: Sequence[str] | None) -> SaveReader:
        """Return a reader of the members ``tags``, or of all members in the order of the saves.

        Raises:
            CheckpointError: a member is in no save, or in two.
        """
        places: dict[str, tuple[Saved, int]] = {}
        for save in saved:
            with wrap_load_errors(save.path):
                members = save.body["members"]
                if not isinstance(members, list) or not members or not all(isinstance(name, str) for name in members):
                    raise CheckpointError(f"{save.path} says that its members are {members!r}: these are no names")
                for index, name in enumerate(members):
                    if name in places:
                        raise CheckpointError(
                            f"{name!r} is a member in {places[name][0].path} and in {save.path}: a merge wants every "
                            "member once; load the others by tags=[...]"
                        )
                    places[name] = save, index
        requested = list(places) if tags is None else list(tags)
        if not requested:
            raise CheckpointError(f"{saved[0].path}: tags=[]: load at least one member of {list(places)}")
        if missing := [name for name in requested if not isinstance(name, str) or name not in places]:
            raise CheckpointError(f"{missing[0]!r} is no member in {saved[0].path}: it holds {list(places)}")
        # Neighbours that are in one save are read together.
        runs = groupby((places[name] for name in requested), key=lambda place: id(place[0]))
        grouped = [list(run) for _, run in runs]
        return SaveReader([(run[0][0], [index for _, index in run]) for run in grouped])

    @property
    def path(self) -> Path:
        return self.parts[0][0].path

    @property
    def tags(self) -> list[str]:
        return [saved.body["members"][index] for saved, indices in self.parts for index in indices]

    def agreed(self, key: str) -> Any:
        """Return the value of ``key`` that all saves agree on. Raises CheckpointError if they differ."""
        first: Any = self.parts[0][0].body.get(key)
        for saved, _ in self.parts:
            if saved.body.get(key) != first:
                raise CheckpointError(f"{key} in {saved.path} is not that in {self.path}: these do not merge")
        return first

    def shared_tensor(self, label: str, values: Sequence[Tensor]) -> Tensor:
        """Return a shared tensor, from its values in the saves. Raises CheckpointError if they differ."""
        for value, (saved, _) in zip(values, self.parts, strict=True):
            if not same_bits(value, values[0]):
                raise CheckpointError(f"{label} in {saved.path} is not that in {self.path}: these do not merge")
        return values[0]

    def write(self) -> None:
        """Write all that was read."""
        for write in self.writes:
            write()

    def array(self, model: nn.Module, optimizer: Any, scheduler: Any, scaler: Any) -> None:
        """Read the members into an array, or one into a plain model, and into what trains it.

        None stands for what it has not.
        """
        _check_ours(optimizer, scaler)
        tensors = dict(tensors_of(model))
        for saved, _ in self.parts:
            if odd := sorted(tensors.keys() ^ saved.body["stacked"].keys()):
                raise CheckpointError(
                    f"{saved.path} and the model do not have the same tensors: {odd[0]} is in one of them only"
                )
        if not isinstance(model, FusedModule) and len(self.tags) != 1:
            raise CheckpointError(f"{self.path} holds {self.tags}: say which one the model shall be, tags=[...]")
        for name, tensor in tensors.items():
            values = self._values(name, tensor)
            kinds = [f"{list(t.shape)} {t.dtype}" for t in (values, tensor)]
            if kinds[0] != kinds[1]:
                raise CheckpointError(
                    f"{name} is {kinds[0]} in {self.path}, and {kinds[1]} here: load as many members as there are "
                    "rows, of the model that was saved"
                )
            self.writes.append(partial(tensor.detach().copy_, values))
        if optimizer is not None:
            self._optimizer(optimizer)
        if scheduler is not None:
            self._scheduler(scheduler)
        if scaler is not None:
            if (names := self.agreed("scaler")) is None:
                raise CheckpointError(f"{self.path} holds no scaler")
            columns = {n: torch.cat([saved.body["scaler state"][n][rows] for saved, rows in self.parts]) for n in names}
            begun = self.initial_hyperparameters("scaler begun")
            self.writes += [partial(scaler.load_state_dict, columns), partial(scaler.initial_values.update, begun)]

    def _values(self, name: str, like: Tensor) -> Tensor:
        """Read a tensor of the module, stacked or shared as ``like`` is.

        A shared tensor is repeated for each member if it is not trained, or if there is one member. Stacked rows
        become one shared tensor if they are equal. Raises CheckpointError.
        """
        mark = membership(like)
        stacked, several = mark is not None and mark.stacked, len(self.tags) > 1
        values = [saved.body["module"][name] for saved, _ in self.parts]
        saved_as_stacked = {saved.body["stacked"][name] for saved, _ in self.parts}
        if saved_as_stacked == {False} and not stacked:
            return self.shared_tensor(f"module/{name}", values)
        if several and like.requires_grad and saved_as_stacked != {stacked}:
            shown = "each member's own" if stacked else "one for all members"
            raise CheckpointError(
                f"{name} is trained and {shown} here, and was not in {self.path}: make models that share as the saved "
                "ones did"
            )
        rows = torch.cat(
            [
                value[places] if saved.body["stacked"][name] else value.expand(len(places), *value.shape)
                for value, (saved, places) in zip(values, self.parts, strict=True)
            ]
        )
        if stacked:
            return rows
        if not all(same_bits(row, rows[0]) for row in rows):
            raise CheckpointError(
                f"{name} is one tensor for all members here, and differs between those in {self.path}: make models "
                "with their own"
            )
        return rows[0]

    def _optimizer(self, optimizer: FusedOptimizer) -> None:
        """Read the members' state into an optimizer."""
        if (record := self.agreed("optimizer")) is None:
            raise CheckpointError(f"{self.path} holds no optimizer")
        for old, new in zip(record["described"], _described(optimizer), strict=False):
            if old != new:
                raise CheckpointError(
                    f"{self.path} was saved with another optimizer: {old}, not {new}; give the one that it had"
                )
        stop = 0
        for saved, indices in self.parts:
            start, stop = stop, stop + len(indices)
            self.writes.append(partial(optimizer.put, range(start, stop), _optimizer_tables(saved, indices, optimizer)))
        for param, name in _shared_params(optimizer):
            states = [saved.body["shared state"].get(name, {}) for saved, _ in self.parts]
            if any(state.keys() != states[0].keys() for state in states):
                raise CheckpointError(
                    f"{self.path}: {name} is one for all members, and the optimizer has no state of it in some of "
                    "the saves: merge arrays that have all made a step"
                )
            entries = {}
            for entry in states[0]:
                value = self.shared_tensor(f"{entry} of {name}", [state[entry] for state in states]).clone()
                _check_entry(self.path, optimizer, param, entry, value.shape)
                entries[entry] = value if entry in optimizer.numbers else value.to(param.device)
            put = partial(optimizer.state.__setitem__, param, entries)
            self.writes.append(put if entries else partial(optimizer.state.pop, param, None))
        begun = [dict(values) for values in record["begun"]]
        self.writes += [partial(setattr, optimizer, "initial_values", begun), optimizer.forget]

    def _scheduler(self, scheduler: Any) -> None:
        """Read the members' schedules into a scheduler."""
        if any(saved.body.get("schedule") is None for saved, _ in self.parts):
            raise CheckpointError(f"{self.path} holds no scheduler")
        common = not isinstance(scheduler, PerMember)
        first, indices = self.parts[0]
        is_whole = len(self.parts) == 1 and indices == list(range(len(first.body["members"])))
        mixed = any(saved.body["schedule"]["common"] != common for saved, _ in self.parts)
        if mixed or (common and not is_whole):
            raise CheckpointError(
                f"{self.path}: a scheduler of torch such as {first.body['schedule']['kinds'][0]} has one state for all "
                "members, and loads with all of them only, into one of its class; use hf.optim.lr_scheduler.PerMember"
            )
        places = [(first, 0)] if common else [(saved, index) for saved, indices in self.parts for index in indices]
        for row, (saved, index) in enumerate(places):
            kind = type(scheduler).__name__ if common else scheduler.kinds[row]
            saved_kind = saved.body["schedule"]["kinds"][index]
            if saved_kind != kind:
                raise CheckpointError(
                    f"{self.path} holds {saved_kind} for {self.tags[row]!r}, and its scheduler here is {kind}: give "
                    "the scheduler that it was saved with"
                )
            state = saved.body["schedule"]["members"][index]
            load = scheduler.load_state_dict if common else partial(scheduler.load_member, row)
            self.writes.append(partial(load, state))

    def initial_hyperparameters(self, key: str) -> dict[str, float | None]:
        """Return the hyper-parameters that members started with, by name; None where members differ."""
        records = [saved.body[key] for saved, _ in self.parts]
        first = records[0]
        return {
            name: first.get(name) if all(values.get(name) == first.get(name) for values in records) else None
            for name in dict.fromkeys(name for values in records for name in values)
        }

    def random(self, *models: nn.Module) -> None:
        """Read the states of the random generators, except of devices that the models do not use."""
        state: Mapping[str, Any] | None = self.value("random")
        if state is None:
            raise CheckpointError(
                f"{self.path} was saved by hf.train, whose tasks draw numbers of their own: pass random=False"
            )
        # Check the states on temporary generators, so that invalid ones raise before anything is written.
        torch.Generator().set_state(state["torch"])
        python_random.Random().setstate(state["python"])
        np.random.RandomState().set_state(state["numpy"])
        self.writes += [
            partial(torch.set_rng_state, state["torch"]),
            partial(python_random.setstate, state["python"]),
            partial(np.random.set_state, state["numpy"]),
        ]
        for device in _devices_of(models):
            if str(device) in state["devices"]:
                self.writes.append(partial(backend(device).set_random_states, state["devices"][str(device)]))

    def loader(self, loader: Any) -> None:
        """Read the position of the first save's loader."""
        position = self.value("loader")
        if position is None:
            raise CheckpointError(f"{self.path} holds no position of a loader")
        self.writes.append(partial(loader.load_state_dict, position))

    def value(self, key: str) -> Any:
        """Return the value that the first save holds under ``key``."""
        return self.parts[0][0].body.get(key)


def _check_ours(optimizer: Any, scaler: Any) -> None:
    """Raise CheckpointError for an optimizer or a scaler whose state has no rows."""
    for name, value, kind in (("optimizer", optimizer, FusedOptimizer), ("scaler", scaler, GradScaler)):
        if value is not None and not isinstance(value, kind):
            raise CheckpointError(
                f"{name} must be of hf.optim, got {type(value).__module__}.{type(value).__qualname__}, whose state has "
                "no rows. The state of another one can be saved as extra=..."
            )


def _devices_of(models: Sequence[nn.Module]) -> list[torch.device]:
    return list(dict.fromkeys(tensor.device for model in models for _, tensor in tensors_of(model)))


def _described(optimizer: FusedOptimizer) -> list[Any]:
    """Return the class of an optimizer, and options and parameters of each group: the same when it is loaded."""
    described: list[Any] = [type(optimizer).__name__, f"{len(optimizer.param_groups)} param groups"]
    for group in optimizer.param_groups:
        described.append({key: group[key] for key in optimizer.options})
        described.append([membership_of(param).name for param in group["params"]])
    return described


def _shared_params(optimizer: FusedOptimizer) -> list[tuple[Tensor, str]]:
    """Return the parameters of an optimizer that several members share, with their names."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [(param, membership_of(param).name) for param in params if not membership_of(param).is_own]


def _optimizer_tables(saved: Saved, indices: Sequence[int], optimizer: FusedOptimizer) -> dict[str, MemberTable]:
    """Return the rows of one save as `FusedOptimizer.put` takes them. Raises CheckpointError if they do not fit."""
    tables, count = {}, len(saved.body["members"])
    for name in optimizer.tables():
        # The state of a shared parameter is repeated for each member.
        shared = saved.body["shared state"].get(name.removeprefix("state/"), {}).items()
        columns = saved.body["state"].get(name, {}) | {entry: x.expand(count, *x.shape) for entry, x in shared}
        tables[name] = MemberTable(count, columns).take(indices)
    for number, group in enumerate(optimizer.param_groups):
        for hyper in optimizer.hypers:
            values = tables[f"param group {number}"][hyper.label]
            if values.shape != (len(indices),) or values.dtype != torch.float64:
                raise CheckpointError(f"{saved.path}: {hyper.label} has shape {list(values.shape)}")
            hyper.check(values.tolist())
        for param in group["params"]:
            if (table := tables.get(f"state/{membership_of(param).name}")) is None:
                continue
            if MASTER_STACK in table and state_dtype(param, group[MASTER_WEIGHTS]) == param.dtype:
                raise CheckpointError(
                    f"{saved.path} holds master weights, and the optimizer has none: make it with master_weights=True"
                )
            for entry, rows in table.columns.items():
                _check_entry(saved.path, optimizer, param, entry, rows.shape[1:])
    return tables


def _check_entry(path: Path, optimizer: FusedOptimizer, param: Tensor, entry: str, shape: torch.Size) -> None:
    """Raise CheckpointError if an entry of the state of a parameter has a wrong shape in each member."""
    mark = membership_of(param)
    member_shape = param.shape[1:] if mark.stacked else param.shape
    if shape != (torch.Size() if entry in optimizer.numbers else member_shape):
        raise CheckpointError(f"{path}: {entry} of {mark.name} has shape {list(shape)} in each member")


def member_stacks(fused: FusedModule, optimizer: FusedOptimizer) -> dict[str, Tensor]:
    """Return the stacked tensors of an array and its optimizer by their keys in a checkpoint, to access rows."""
    stacks = {f"module/{name}": tensor.detach() for name, tensor in tensors_of(fused) if has_rows(tensor)}
    tables = optimizer.tables().items()
    return stacks | {f"state/{name}/{key}": stack for name, table in tables for key, stack in table.columns.items()}


# Saves in the background, and the saves below folders.


def in_thread(write: Callable[[], Path]) -> Future[Path]:
    """Run ``write`` in another thread, for which the process waits before it exits, and return its future.

    An error is also a warning: the result may never be read.
    """

    def run() -> Path:
        try:
            return write()
        except BaseException as error:
            with suppress(Warning):
                warnings.warn(f"a save has failed: {error}", stacklevel=1)
            raise

    thread = ThreadPoolExecutor(1, "hfusion checkpoint")
    future = thread.submit(run)
    thread.shutdown(wait=False)
    return future


def groups_of(saved: Saved) -> list[Saved]:
    """Return the groups of a population's save, each as if it had been saved alone; of another save only itself."""
    if "groups" not in saved.body:
        return [saved]
    return [replace(saved, body={**saved.body, **group}) for group in saved.body["groups"]]


def saves_of(root: Root | Sequence[Root]) -> list[Saved]:
    """Return the latest save under each root, with its tensors in its ``body``. Raises CheckpointError."""
    roots = list(root) if isinstance(root, Sequence) and not isinstance(root, str) else [root]
    if not roots:
        raise CheckpointError("no folder was given: give the one that a checkpoint was saved to, or several")
    if strange := [folder for folder in roots if not isinstance(folder, str | os.PathLike)]:
        raise CheckpointError(
            f"load expects a folder, got {type(strange[0]).__name__}. Give a save's path or result()."
        )
    saves = []
    for folder in roots:
        saved = files.read(folder)
        with wrap_load_errors(saved.path):
            saves.append(replace(saved, body=decode(saved.body, saved.tensors), tensors={}))
    return saves
