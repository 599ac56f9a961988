"""Read all or some members of one or several saves into an array, its optimizer, scheduler and scaler.

Everything is checked before anything is written. Tensors whose key begins with ``members/`` have a row for each member
that was saved; all members share the others. In saves of populations each group has keys of its own, which begin with
``groups/`` and its number.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import tensors as tensors_of
from hfusion.checkpoint.files import Saved, wrap_load_errors
from hfusion.checkpoint.json_tree import decode, encode
from hfusion.core.errors import CheckpointError
from hfusion.core.member_table import MemberTable
from hfusion.core.membership import membership
from hfusion.core.memory import same_bits
from hfusion.device.backend import backend
from hfusion.optim import FusedOptimizer, GradScaler
from hfusion.optim.group import membership_of
from hfusion.optim.hyper import MASTER_STACK, MASTER_WEIGHTS, state_dtype
from hfusion.optim.lr_scheduler import PerMember

OWN = "members/"
GROUPS = "groups/"


@dataclass
class SaveReader:
    """Members of one or several saves. ``parts``: pairs of a save and indices in it, in the members' order."""

    parts: list[tuple[Saved, list[int]]]

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
        missing = [name for name in requested if name not in places]
        if missing:
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

    def member_rows(self, key: str) -> Tensor:
        """Return the members' rows of a tensor; a shared one is repeated for each."""
        return torch.cat([_rows(saved, key, indices) for saved, indices in self.parts])

    def shared_tensor(self, key: str) -> Tensor:
        """Return a tensor that all members share. Raises CheckpointError if the saves differ."""
        first = self.parts[0][0].tensors[key]
        for saved, _ in self.parts:
            if not same_bits(saved.tensors[key], first):
                raise CheckpointError(f"{key} in {saved.path} is not that in {self.path}: these do not merge")
        return first

    def array(self, model: nn.Module, optimizer: Any, scheduler: Any, scaler: Any) -> list[Callable[[], None]]:
        """Return functions that write the members into an array or a model, and into what trains it, if that is given.

        Damage and mismatches are detected before.
        """
        parts = ((self.optimizer, optimizer), (self.scheduler, scheduler), (self.scaler, scaler))
        return [self.module(model), *(read(part) for read, part in parts if part is not None)]

    def module(self, model: nn.Module) -> Callable[[], None]:
        """Return a function that writes the members into an array, or one into a plain model. Checks come before."""
        single = not isinstance(model, FusedModule)
        tensors = dict(tensors_of(model))
        for saved, _ in self.parts:
            if odd := sorted(tensors.keys() ^ saved.body["module"]["stacked"].keys()):
                raise CheckpointError(
                    f"{saved.path} and the model do not have the same tensors: {odd[0]} is in one of them only"
                )
        if single and len(self.tags) != 1:
            raise CheckpointError(f"{self.path} holds {self.tags}: say which one the model shall be, tags=[...]")
        values = {name: self._values(f"module/{name}", name, tensor) for name, tensor in tensors.items()}
        for name, tensor in tensors.items():
            kinds = [f"{list(t.shape)} {t.dtype}" for t in (values[name], tensor)]
            if kinds[0] != kinds[1]:
                raise CheckpointError(
                    f"{name} is {kinds[0]} in {self.path}, and {kinds[1]} here: load as many members as there are "
                    "rows, of the model that was saved"
                )

        @torch.no_grad()
        def write() -> None:
            for name, tensor in tensors.items():
                tensor.detach().copy_(values[name])

        return write

    def _values(self, key: str, name: str, like: Tensor) -> Tensor:
        """Read a tensor or its optimizer state, stacked or shared as ``like`` is.

        A shared tensor is repeated for each member if it is not trained, or if there is one member. Stacked rows
        become one shared tensor if they are equal. Raises CheckpointError.
        """
        mark = membership(like)
        stacked, several = mark is not None and mark.stacked, len(self.tags) > 1
        saved_as_stacked = {saved.body["module"]["stacked"][name] for saved, _ in self.parts}
        if saved_as_stacked == {False} and not stacked:
            return self.shared_tensor(key)
        if several and like.requires_grad and saved_as_stacked != {stacked}:
            shown = "each member's own" if stacked else "one for all members"
            raise CheckpointError(
                f"{name} is trained and {shown} here, and was not in {self.path}: make models that share as the saved "
                "ones did"
            )
        rows = self.member_rows(key)
        if stacked:
            return rows
        if not all(same_bits(row, rows[0]) for row in rows):
            raise CheckpointError(
                f"{name} is one tensor for all members here, and differs between those in {self.path}: make models "
                "with their own"
            )
        return rows[0]

    def optimizer(self, optimizer: FusedOptimizer) -> Callable[[], None]:
        """Return a function that writes the members' state into an optimizer. All checks are done before."""
        check_ours("optimizer", optimizer, FusedOptimizer)
        record = self.agreed("optimizer")
        if record is None:
            raise CheckpointError(f"{self.path} holds no optimizer")
        if odd := _difference(record, described(optimizer)):
            raise CheckpointError(f"{self.path} was saved with another optimizer: {odd}; give the one that it had")
        pieces, stop = [], 0
        for saved, indices in self.parts:
            start, stop = stop, stop + len(indices)
            pieces.append((range(start, stop), _optimizer_tables(saved, indices, optimizer)))
        shared = self._shared_state(optimizer)
        begun = decode(record["begun"], {})

        def write() -> None:
            for rows, tables in pieces:
                optimizer.put(rows, tables)
            for param, entries in shared.items():
                optimizer.state.pop(param, None)
                if entries:
                    optimizer.state[param] = entries
            optimizer.initial_values = begun
            optimizer.forget()

        return write

    def _shared_state(self, optimizer: FusedOptimizer) -> dict[Tensor, dict[str, Tensor]]:
        """Return the optimizer state of the parameters that all members share."""
        state = {}
        for param, name in shared_params(optimizer):
            prefix = f"optimizer/state/{name}/"
            keys = [sorted(key for key in saved.tensors if key.startswith(prefix)) for saved, _ in self.parts]
            if any(saved_keys != keys[0] for saved_keys in keys):
                raise CheckpointError(
                    f"{self.path}: {name} is one for all members, and the optimizer has no state of it in some of "
                    "the saves: merge arrays that have all made a step"
                )
            entries = {key.removeprefix(prefix): self.shared_tensor(key).clone() for key in keys[0]}
            for entry, value in entries.items():
                _check_entry(self.path, optimizer, param, entry, value.shape)
                if entry not in optimizer.numbers:
                    entries[entry] = value.to(param.device)
            state[param] = entries
        return state

    def scheduler(self, scheduler: Any) -> Callable[[], None]:
        """Return a function that writes the members' schedules into a scheduler. Checks come before."""
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
        states = []
        for row, (saved, index) in enumerate(places):
            kind = type(scheduler).__name__ if common else scheduler.kinds[row]
            saved_kind = saved.body["schedule"]["kinds"][index]
            if saved_kind != kind:
                raise CheckpointError(
                    f"{self.path} holds {saved_kind} for {self.tags[row]!r}, and its scheduler here is {kind}: give "
                    "the scheduler that it was saved with"
                )
            states.append(decode(saved.body["schedule"]["members"][index], saved.tensors))

        def write() -> None:
            for row, state in enumerate(states):
                if common:
                    scheduler.load_state_dict(state)
                else:
                    scheduler.load_member(row, state)

        return write

    def scaler(self, scaler: GradScaler) -> Callable[[], None]:
        check_ours("scaler", scaler, GradScaler)
        names = self.agreed("scaler")
        if names is None:
            raise CheckpointError(f"{self.path} holds no scaler")
        state = {name: self.member_rows(f"scaler/{name}") for name in names}
        begun = self.initial_hyperparameters("scaler begun")

        def write() -> None:
            scaler.load_state_dict(state)
            scaler.initial_values |= begun

        return write

    def initial_hyperparameters(self, key: str) -> dict[str, float | None]:
        """Return the hyper-parameters that members started with, by name; None where members differ."""
        records = [decode(saved.body[key], {}) for saved, _ in self.parts]
        first = records[0]
        return {
            name: first.get(name) if all(values.get(name) == first.get(name) for values in records) else None
            for name in dict.fromkeys(name for values in records for name in values)
        }

    def random(self, *models: nn.Module) -> Callable[[], None]:
        """Return a function that restores the random generators, except of devices that the models do not use."""
        saved = self.parts[0][0]
        state: Mapping[str, Any] = decode(saved.body["random"], saved.tensors)
        # Check the states on temporary generators, so that invalid ones raise before anything is written.
        torch.Generator().set_state(state["torch"])
        random.Random().setstate(state["python"])
        np.random.RandomState().set_state(state["numpy"])

        def write() -> None:
            torch.set_rng_state(state["torch"])
            random.setstate(state["python"])
            np.random.set_state(state["numpy"])
            for device in devices_of(models):
                if str(device) in state["devices"]:
                    backend(device).set_random_states(state["devices"][str(device)])

        return write

    def loader(self, loader: Any) -> Callable[[], None]:
        """Return a function that puts a loader where the first save's was."""
        position = self.value("loader")
        if position is None:
            raise CheckpointError(f"{self.path} holds no position of a loader")
        return partial(loader.load_state_dict, position)

    def value(self, key: str) -> Any:
        """Return the nested value that the first save holds under ``key``."""
        saved = self.parts[0][0]
        return decode(saved.body.get(key), saved.tensors)


def check_ours(name: str, value: Any, kind: type) -> None:
    """Raise CheckpointError for an optimizer or a scaler whose state has no rows."""
    if not isinstance(value, kind):
        raise CheckpointError(
            f"{name} must be of hf.optim, got {type(value).__module__}.{type(value).__qualname__}, whose state has no "
            "rows. The state of another one can be saved as extra=..."
        )


def devices_of(models: Sequence[nn.Module]) -> list[torch.device]:
    return list(dict.fromkeys(tensor.device for model in models for _, tensor in tensors_of(model)))


def described(optimizer: FusedOptimizer) -> dict[str, Any]:
    """Return the class, parameters and options of an optimizer, which must be the same when it is loaded."""
    groups = [
        {
            "params": [membership_of(param).name for param in group["params"]],
            "options": encode({key: group[key] for key in optimizer.options}, {}, "options"),
        }
        for group in optimizer.param_groups
    ]
    return {"class": type(optimizer).__name__, "groups": groups}


def optimizer_stacks(optimizer: FusedOptimizer) -> dict[str, Tensor]:
    """Return the members' hyper-parameters and state of an optimizer by their keys in a save, to access rows."""
    tables = optimizer.tables().items()
    return {f"optimizer/{name}/{key}": stack for name, table in tables for key, stack in table.columns.items()}


def shared_params(optimizer: FusedOptimizer) -> list[tuple[Tensor, str]]:
    """Return the parameters of an optimizer that several members share, with their names."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    return [(param, membership_of(param).name) for param in params if not membership_of(param).is_own]


def _optimizer_tables(saved: Saved, indices: Sequence[int], optimizer: FusedOptimizer) -> dict[str, MemberTable]:
    """Return the rows of one save as `FusedOptimizer.put` takes them. Raises CheckpointError if they do not fit."""
    tables = {name: MemberTable(len(indices)) for name in optimizer.tables()}
    for key in saved.tensors:
        name, _, column = key.removeprefix(OWN).removeprefix("optimizer/").rpartition("/")
        if name in tables:
            tables[name][column] = _rows(saved, key.removeprefix(OWN), indices)
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


def _difference(saved: Any, current: Any) -> str:
    """Describe the first difference between two optimizers; empty if there is none."""
    groups, others = saved["groups"], current["groups"]
    pairs = [(saved["class"], current["class"]), (f"{len(groups)} param groups", f"{len(others)} param groups")]
    for group, other in zip(groups, others, strict=False):
        pairs += [(group[key], other[key]) for key in ("options", "params")]
    return next((f"{old}, not {new}" for old, new in pairs if old != new), "")


def _rows(saved: Saved, key: str, indices: Sequence[int]) -> Tensor:
    """Return the members' rows of a tensor in one save; a shared tensor is expanded to a row for each."""
    if OWN + key in saved.tensors:
        return saved.tensors[OWN + key][indices]
    shared = saved.tensors[key]
    return shared.expand(len(indices), *shared.shape)
