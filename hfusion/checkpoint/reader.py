"""Read all or some members of one or several saves into an array, its optimizer, scheduler and scaler.

Everything is checked before anything is written.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
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
from hfusion.checkpoint.save_contents import OWN, devices_of
from hfusion.core.errors import CheckpointError
from hfusion.core.membership import membership
from hfusion.device.backend import backend
from hfusion.optim import FusedOptimizer, GradScaler
from hfusion.optim.group import membership_of
from hfusion.optim.hyper import read
from hfusion.optim.lr_scheduler import PerMember
from hfusion.optim.master_weights import OPTION, STACK, state_dtype
from hfusion.optim.optimizer_rows import begin_rows
from hfusion.optim.optimizer_state import numbers_shape

"""By the key of a tensor, its shape in each member; None where a member has no such tensor."""


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
        paths: dict[str, Path] = {}
        for save in saved:
            with wrap_load_errors(save.path):
                members = save.body["members"]
                if not isinstance(members, list) or not members or not all(isinstance(name, str) for name in members):
                    raise CheckpointError(f"{save.path} says that its members are {members!r}: these are no names")
                for name in members:
                    if name in paths:
                        raise CheckpointError(
                            f"{name!r} is a member in {paths[name]} and in {save.path}: a merge wants every member "
                            "once; load the others by tags=[...]"
                        )
                    paths[name] = save.path
        requested = list(paths) if tags is None else list(tags)
        if not requested:
            raise CheckpointError(f"{saved[0].path}: tags=[]: load at least one member of {list(paths)}")
        missing = [name for name in requested if name not in paths]
        if missing:
            raise CheckpointError(f"{missing[0]!r} is no member in {saved[0].path}: it holds {list(paths)}")
        indices = {name: index for index, name in enumerate(paths)}
        all_members = SaveReader([(save, list(range(len(save.body["members"])))) for save in saved])
        return all_members.at([indices[name] for name in requested])

    def at(self, indices: Sequence[int]) -> SaveReader:
        """Return a reader of the members at some indices."""
        flat = [(saved, member) for saved, members in self.parts for member in members]
        runs = groupby((flat[index] for index in indices), key=lambda pair: id(pair[0]))
        grouped = [list(run) for _, run in runs]
        return SaveReader([(run[0][0], [member for _, member in run]) for run in grouped])

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
        """Return the members' rows of a tensor."""
        return torch.cat([saved.tensors[OWN + key][indices] for saved, indices in self.parts])

    def shared_tensor(self, key: str) -> Tensor:
        """Return a tensor that all members share. Raises CheckpointError if the saves differ."""
        first = self.parts[0][0].tensors[key]
        for saved, _ in self.parts:
            if not _identical(saved.tensors[key], first):
                raise CheckpointError(f"{key} in {saved.path} is not that in {self.path}: these do not merge")
        return first

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
            _check(self.path, name, values[name], tensor)
        return lambda: _copy([(tensor, values[name]) for name, tensor in tensors.items()])

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
        rows = torch.cat([_rows(saved, key, indices) for saved, indices in self.parts])
        if stacked:
            return rows
        if not all(_identical(row, rows[0]) for row in rows):
            raise CheckpointError(
                f"{name} is one tensor for all members here, and differs between those in {self.path}: make models "
                "with their own"
            )
        return rows[0]

    def optimizer(self, optimizer: FusedOptimizer) -> Callable[[], None]:
        """Return a function that writes the members' state into an optimizer. All checks are done before."""
        record, kind = self.agreed("optimizer"), type(optimizer).__name__
        if record is None:
            raise CheckpointError(f"{self.path} holds no optimizer")
        current_groups = []
        for group in optimizer.param_groups:
            options = encode({key: group[key] for key in optimizer.options}, {}, "options")
            current_groups.append(
                {"params": [membership_of(param).name for param in group["params"]], "options": options}
            )
        if odd := _difference(record, {"class": kind, "groups": current_groups}):
            raise CheckpointError(f"{self.path} was saved with another optimizer: {odd}; give the one that it had")
        values: list[tuple[Tensor, Tensor]] = []
        states: dict[Tensor, tuple[dict[str, Tensor], dict[str, list[int]]]] = {}
        for number, group in enumerate(optimizer.param_groups):
            vectors, _ = read(group, optimizer.hypers, optimizer.members)
            for hyper, vector in zip(optimizer.hypers, vectors, strict=True):
                rows = self.member_rows(f"optimizer/{number}/{hyper.label}")
                _check(self.path, hyper.label, rows, vector)
                hyper.check(rows.tolist())
                values.append((vector, rows))
            for param in group["params"]:
                states[param] = self._state(param, state_dtype(param, group[OPTION]), optimizer.numbers)
        begun = decode(record["begun"], {})

        def write() -> None:
            _copy(values)
            for group in optimizer.param_groups:
                for param in group["params"]:
                    entries, fresh = states[param]
                    optimizer.state.pop(param, None)
                    if entries:
                        optimizer.state[param] = entries
                        begin_rows(optimizer, group, param, fresh)
            optimizer.initial_values = begun
            optimizer.forget()

        return write

    def _state(
        self, param: Tensor, dtype: torch.dtype, numbers: Container[str]
    ) -> tuple[dict[str, Tensor], dict[str, list[int]]]:
        """Return the optimizer state of a parameter by entry, and the rows of members that lack an entry, by entry.

        dtype: of the stacks in the state. numbers: the entries that are one number per member.
        """
        mark = membership_of(param)
        prefix = f"optimizer/state/{mark.name}/"
        entries_by_save = [_entries(saved, prefix) for saved, _ in self.parts]
        if not mark.stacked and any(keys != entries_by_save[0] for keys in entries_by_save):
            raise CheckpointError(
                f"{self.path}: {mark.name} is one for all members, and the optimizer has no state of it in some of "
                "the saves: merge arrays that have all made a step"
            )
        state, fresh = {}, {}
        for entry in sorted(set().union(*entries_by_save)):
            present = [entry in keys for keys in entries_by_save]
            reader = SaveReader([part for part, has in zip(self.parts, present, strict=True) if has])
            value = reader._values(prefix + entry, mark.name, param).clone()
            if not all(present):
                marks = [has for (_, indices), has in zip(self.parts, present, strict=True) for _ in indices]
                value = _spread(value, marks)
                fresh[entry] = [row for row, has in enumerate(marks) if not has]
            if value.shape != (numbers_shape(param) if entry in numbers else param.shape):
                raise CheckpointError(f"{self.path}: {entry} of {mark.name} has shape {list(value.shape)}")
            if entry == STACK and dtype == param.dtype:
                raise CheckpointError(
                    f"{self.path} holds master weights, and the optimizer has none: make it with master_weights=True"
                )
            state[entry] = value if entry in numbers else value.to(param.device, dtype)
        return state, fresh

    def scheduler(self, scheduler: Any) -> Callable[[], None]:
        schedules = [(saved, indices, saved.body.get("schedule")) for saved, indices in self.parts]
        if any(schedule is None for _, _, schedule in schedules):
            raise CheckpointError(f"{self.path} holds no scheduler")
        if not isinstance(scheduler, PerMember):
            if (
                len(schedules) > 1
                or schedules[0][1] != list(range(len(schedules[0][0].body["members"])))
                or "all" not in schedules[0][2]
            ):
                raise CheckpointError(
                    f"{self.path}: {type(scheduler).__name__} has one state for all members, and loads with all of "
                    "them only; use hf.optim.lr_scheduler.PerMember"
                )
            self._check_kinds(schedules[0][2].get("kinds", []), [type(scheduler).__name__])
            state = decode(schedules[0][2]["all"], schedules[0][0].tensors)
            return lambda: scheduler.load_state_dict(state)
        states = [
            decode(schedule["members"][index], saved.tensors)
            for saved, indices, schedule in schedules
            for index in indices
        ]
        if all("kinds" in schedule for *_, schedule in schedules):
            self._check_kinds(
                [schedule["kinds"][index] for _, indices, schedule in schedules for index in indices], scheduler.kinds
            )

        def write() -> None:
            for row, member_state in enumerate(states):
                scheduler.load_member(row, member_state)

        return write

    def _check_kinds(self, saved_kinds: Sequence[str], kinds: Sequence[str]) -> None:
        """Raise a CheckpointError if members had schedulers of other classes. Older saves do not record them."""
        for row, (saved_kind, kind) in enumerate(zip(saved_kinds, kinds, strict=bool(saved_kinds))):
            if saved_kind != kind:
                raise CheckpointError(
                    f"{self.path} holds {saved_kind} for {self.tags[row]!r}, and its scheduler here is {kind}: give "
                    "the scheduler that it was saved with"
                )

    def scaler(self, scaler: GradScaler) -> Callable[[], None]:
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
        """Return the hyper-parameters that members started with, by name; None where members differ.

        Older saves do not contain them.
        """
        records = [decode(saved.body[key], {}) for saved, _ in self.parts if key in saved.body]
        names = dict.fromkeys(name for values in records for name in values)
        return {
            name: records[0].get(name) if all(values.get(name) == records[0].get(name) for values in records) else None
            for name in names
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
            for device in dict.fromkeys(device for model in models for device in devices_of(model)):
                if str(device) in state["devices"]:
                    backend(device).set_random_states(state["devices"][str(device)])

        return write

    def value(self, key: str) -> Any:
        """Return the nested value that the first save holds under ``key``."""
        saved = self.parts[0][0]
        return decode(saved.body.get(key), saved.tensors)


def _difference(saved: Any, current: Any) -> str:
    """Describe the first difference between two optimizers; empty if there is none."""
    if saved["class"] != current["class"]:
        return f"{saved['class']}, not {current['class']}"
    saved_groups, groups = saved["groups"], current["groups"]
    if len(saved_groups) != len(groups):
        return f"{len(saved_groups)} param groups, not {len(groups)}"
    for number, (saved_group, group) in enumerate(zip(saved_groups, groups, strict=True)):
        if saved_group["options"] != group["options"]:
            return f"{saved_group['options']} in param group {number}, not {group['options']}"
        if saved_group["params"] != group["params"]:
            odd = sorted(set(saved_group["params"]) ^ set(group["params"]))
            return (
                f"param group {number} has other parameters, {odd[0]}"
                if odd
                else f"param group {number} in another order"
            )
    return ""


def _rows(saved: Saved, key: str, indices: Sequence[int]) -> Tensor:
    """Return the members' rows of a tensor in one save; a shared tensor is expanded to a row for each."""
    if OWN + key in saved.tensors:
        return saved.tensors[OWN + key][indices]
    shared = saved.tensors[key]
    return shared.expand(len(indices), *shared.shape)


def _entries(saved: Saved, prefix: str) -> set[str]:
    """Return the keys of a parameter's optimizer state."""
    keys = {key.removeprefix(OWN) for key in saved.tensors}
    return {key.removeprefix(prefix) for key in keys if key.startswith(prefix)}


def _spread(rows: Tensor, marks: Sequence[bool]) -> Tensor:
    """Return ``rows`` at the marked positions, with zeros at the others."""
    spread_rows = rows.new_zeros(len(marks), *rows.shape[1:])
    spread_rows[torch.tensor(marks, device="cpu")] = rows
    return spread_rows


def _identical(tensor: Tensor, other: Tensor) -> bool:
    """Return whether two tensors are equal bit for bit, including NaN."""
    if tensor.shape != other.shape or tensor.dtype != other.dtype:
        return False
    return torch.equal(*(value.contiguous().reshape(-1).view(torch.uint8) for value in (tensor, other)))


def _check(path: Path, name: str, saved: Tensor, target: Tensor) -> None:
    if saved.shape != target.shape or saved.dtype != target.dtype:
        kinds = [f"{list(tensor.shape)} {tensor.dtype}" for tensor in (saved, target)]
        raise CheckpointError(
            f"{name} is {kinds[0]} in {path}, and {kinds[1]} here: load as many members as there are rows, of the "
            "model that was saved"
        )


@torch.no_grad()
def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for tensor, value in pairs:
        tensor.detach().copy_(value)
