"""What a save holds of each part of an array, and how it comes back, for all members or some, of one save or several.

Tensors whose key begins with ``members/`` have a row for each member that was saved; the others are of all members.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hfusion.array.module import FusedModule
from hfusion.capture.named import tensors as tensors_of
from hfusion.checkpoint.files import Saved, told
from hfusion.checkpoint.tree import decode, encode
from hfusion.core.errors import CheckpointError
from hfusion.core.membership import membership
from hfusion.device.backend import backend
from hfusion.optim import FusedOptimizer, GradScaler
from hfusion.optim.group import membership_of
from hfusion.optim.hyper import plain, read
from hfusion.optim.lr_scheduler import PerMember

OWN = "members/"


def member_stacks(fused: FusedModule, optimizer: FusedOptimizer) -> dict[str, Tensor]:
    """Where the members' rows of an array and its optimizer are, to be read and written, by the keys of a save."""
    found: dict[str, Tensor] = {}
    for name, tensor in tensors_of(fused):
        known = membership(tensor)
        if known is not None and known.stacked:
            found[f"module/{name}"] = tensor.detach()
    for number, group in enumerate(optimizer.param_groups):
        vectors, _ = read(group, optimizer.hypers, optimizer.members)
        for hyper, vector in zip(optimizer.hypers, vectors, strict=True):
            found[f"optimizer/{number}/{hyper.label}"] = vector.as_subclass(Tensor)
        for param in group["params"]:
            if membership_of(param).stacked:
                for entry, value in optimizer.state.get(param, {}).items():
                    found[f"optimizer/state/{membership_of(param).name}/{entry}"] = value
    return found


@dataclass
class SaveWriter:
    """Collects a save: ``rows`` are the array's rows of the members that are saved."""

    rows: Sequence[int]
    body: dict[str, Any]
    tensors: dict[str, Tensor]

    def own(self, key: str, stack: Tensor) -> None:
        """Keep the members' rows of a stack; a copy on the CPU."""
        if list(self.rows) == list(range(len(stack))):
            # No memory of the device is taken.
            self.tensors[OWN + key] = stack.detach().to("cpu", copy=True)
            return
        rows = torch.as_tensor(list(self.rows), device=stack.device)
        self.tensors[OWN + key] = stack.detach().index_select(0, rows).cpu()

    def common(self, key: str, tensor: Tensor) -> None:
        """Keep a tensor of all members; a copy on the CPU."""
        self.tensors[key] = tensor.detach().cpu().clone()

    def tree(self, key: str, value: Any) -> Any:
        """A nest of plain values and tensors as JSON, the tensors kept."""
        found: dict[str, Tensor] = {}
        made = encode(value, found, key)
        self.tensors |= {name: tensor.cpu().clone() for name, tensor in found.items()}
        return made

    def module(self, fused: FusedModule) -> None:
        names = {}
        for name, tensor in tensors_of(fused):
            found = membership(tensor)
            names[name] = found is not None and found.stacked
            (self.own if names[name] else self.common)(f"module/{name}", tensor)
        self.body["module"] = {"class": fused._original, "stacked": names}

    def optimizer(self, optimizer: FusedOptimizer) -> None:
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            vectors, _ = read(group, optimizer.hypers, optimizer.members)
            for hyper, vector in zip(optimizer.hypers, vectors, strict=True):
                self.own(f"optimizer/{number}/{hyper.label}", plain(vector))
            names = [membership_of(param).name for param in group["params"]]
            options = self.tree(f"optimizer/{number}/options", {key: group[key] for key in optimizer.options})
            groups.append({"params": names, "options": options})
            for param, name in zip(group["params"], names, strict=True):
                keep = self.own if membership_of(param).stacked else self.common
                for entry, value in optimizer.state.get(param, {}).items():
                    keep(f"optimizer/state/{name}/{entry}", value)
        kind = type(optimizer).__name__
        self.body["optimizer"] = {"class": kind, "groups": groups, "begun": encode(optimizer.begun, {}, "begun")}

    def schedule(self, schedule: Any) -> None:
        if isinstance(schedule, PerMember):
            own = [self.tree(f"schedule/{row}", schedule.member_state(row)) for row in self.rows]
            self.body["schedule"] = {"members": own}
        else:
            self.body["schedule"] = {"all": self.tree("schedule", schedule.state_dict())}

    def scaler(self, scaler: GradScaler) -> None:
        state = scaler.state_dict()
        self.body["scaler"] = sorted(state)
        for name, value in state.items():
            self.own(f"scaler/{name}", value)

    def random(self, fused: FusedModule) -> None:
        """The states of the random generators: torch's on the devices of the array, Python's, numpy's."""
        state = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "devices": {str(device): backend(device).random_states() for device in _devices(fused)},
        }
        self.body["random"] = self.tree("random", state)


@dataclass
class SaveReader:
    """Members of saves: ``parts`` are pairs of a save and the places in it, the members in order."""

    parts: list[tuple[Saved, list[int]]]

    @staticmethod
    def of(saved: Sequence[Saved], names: Sequence[str] | None) -> SaveReader:
        """Members ``names``, or all of one save after those of the one before.

        Raises:
            CheckpointError: a member that no save holds, or that two do.
        """
        where: dict[str, Path] = {}
        for one in saved:
            with told(one.path):
                members = one.body["members"]
                if not isinstance(members, list) or not members or not all(isinstance(name, str) for name in members):
                    raise CheckpointError(f"{one.path} says that its members are {members!r}: these are no names")
                for name in members:
                    if name in where:
                        raise CheckpointError(
                            f"{name!r} is a member in {where[name]} and in {one.path}: a merge wants every member "
                            "once; load the others by names=[...]"
                        )
                    where[name] = one.path
        wanted = list(where) if names is None else list(names)
        if not wanted:
            raise CheckpointError(f"{saved[0].path}: names=[]: load at least one member of {list(where)}")
        missing = [name for name in wanted if name not in where]
        if missing:
            raise CheckpointError(f"{missing[0]!r} is no member in {saved[0].path}: it holds {list(where)}")
        places = {name: place for place, name in enumerate(where)}
        everybody = SaveReader([(one, list(range(len(one.body["members"])))) for one in saved])
        return everybody.at([places[name] for name in wanted])

    def at(self, places: Sequence[int]) -> SaveReader:
        """The members at some places of its order, one that is named twice twice."""
        flat = [(saved, own) for saved, members in self.parts for own in members]
        runs = groupby((flat[place] for place in places), key=lambda found: id(found[0]))
        grouped = [list(run) for _, run in runs]
        return SaveReader([(run[0][0], [own for _, own in run]) for run in grouped])

    @property
    def path(self) -> Path:
        return self.parts[0][0].path

    @property
    def names(self) -> list[str]:
        return [saved.body["members"][place] for saved, places in self.parts for place in places]

    def agreed(self, key: str) -> Any:
        """What all saves have there. Raises CheckpointError where they differ."""
        first: Any = self.parts[0][0].body.get(key)
        for saved, _ in self.parts:
            if saved.body.get(key) != first:
                raise CheckpointError(f"{key} in {saved.path} is not that in {self.path}: these do not merge")
        return first

    def own(self, key: str) -> Tensor:
        """The members' rows of a tensor."""
        return torch.cat([saved.tensors[OWN + key][places] for saved, places in self.parts])

    def common(self, key: str) -> Tensor:
        """A tensor of all members. Raises CheckpointError where the saves differ."""
        first = self.parts[0][0].tensors[key]
        for saved, _ in self.parts:
            if not torch.equal(saved.tensors[key], first):
                raise CheckpointError(f"{key} in {saved.path} is not that in {self.path}: these do not merge")
        return first

    def has(self, key: str) -> bool:
        return all(key in saved.tensors for saved, _ in self.parts)

    def module(self, model: nn.Module) -> Callable[[], None]:
        """What writes the members into a fused module, or the one member into a model; all is checked before."""
        stacked = self.agreed("module")["stacked"]
        single = not isinstance(model, FusedModule)
        own = dict(tensors_of(model))
        if own.keys() != stacked.keys():
            odd = sorted(own.keys() ^ stacked.keys())[0]
            raise CheckpointError(
                f"{self.path} and the model do not have the same tensors: {odd} is in one of them only"
            )
        if single and len(self.names) != 1:
            raise CheckpointError(f"{self.path} holds {self.names}: say which one the model shall be, names=[...]")
        found = {name: self.own(f"module/{name}") if stacked[name] else self.common(f"module/{name}") for name in own}
        if single:
            found = {name: value[0] if stacked[name] else value for name, value in found.items()}
        for name, tensor in own.items():
            _check(self.path, name, found[name], tensor)
        return lambda: _copy([(tensor, found[name]) for name, tensor in own.items()])

    def optimizer(self, optimizer: FusedOptimizer) -> Callable[[], None]:
        """What writes the members' state into an optimizer of the array; all is checked before."""
        kept, kind = self.agreed("optimizer"), type(optimizer).__name__
        if kept is None:
            raise CheckpointError(f"{self.path} holds no optimizer")
        ours = []
        for group in optimizer.param_groups:
            options = encode({key: group[key] for key in optimizer.options}, {}, "options")
            ours.append({"params": [membership_of(param).name for param in group["params"]], "options": options})
        if kept["class"] != kind or kept["groups"] != ours:
            raise CheckpointError(
                f"{self.path} was saved with {kept['class']} and param groups {kept['groups']}; "
                f"this is {kind} with {ours}"
            )
        values: list[tuple[Tensor, Tensor]] = []
        states: dict[Tensor, dict[str, Tensor]] = {}
        for number, group in enumerate(optimizer.param_groups):
            vectors, _ = read(group, optimizer.hypers, optimizer.members)
            for hyper, vector in zip(optimizer.hypers, vectors, strict=True):
                mine = self.own(f"optimizer/{number}/{hyper.label}")
                _check(self.path, hyper.label, mine, vector)
                hyper.check(mine.tolist())
                values.append((vector, mine))
            for param in group["params"]:
                states[param] = self._state(param)
        begun = decode(kept["begun"], {})

        def write() -> None:
            _copy(values)
            for param, entries in states.items():
                optimizer.state.pop(param, None)
                if entries:
                    optimizer.state[param] = entries
            optimizer.begun = begun
            optimizer.forget()

        return write

    def _state(self, param: Tensor) -> dict[str, Tensor]:
        found = membership_of(param)
        prefix = f"optimizer/state/{found.name}/"
        whole = (OWN if found.stacked else "") + prefix
        kept = [{key for key in saved.tensors if key.startswith(whole)} for saved, _ in self.parts]
        if any(keys != kept[0] for keys in kept):
            raise CheckpointError(f"{self.path}: the state of {found.name} is not the same in all saves")
        take = self.own if found.stacked else self.common
        state = {}
        for key in sorted(kept[0]):
            entry = key.removeprefix(whole)
            value = take(prefix + entry).clone()
            like = param if value.dim() and value.shape == param.shape else None
            wanted = [len(self.names)] if found.stacked else []
            if like is None and list(value.shape) != wanted:
                raise CheckpointError(f"{self.path}: {entry} of {found.name} has shape {list(value.shape)}")
            state[entry] = value if like is None else value.to(like)
        return state

    def schedule(self, schedule: Any) -> Callable[[], None]:
        kept = [(saved, places, saved.body.get("schedule")) for saved, places in self.parts]
        if any(one is None for _, _, one in kept):
            raise CheckpointError(f"{self.path} holds no schedule")
        if not isinstance(schedule, PerMember):
            if len(kept) > 1 or kept[0][1] != list(range(len(kept[0][0].body["members"]))) or "all" not in kept[0][2]:
                raise CheckpointError(
                    f"{self.path}: a {type(schedule).__name__} has one state for all members, and loads with all of "
                    "them only; use hf.optim.lr_scheduler.PerMember"
                )
            state = decode(kept[0][2]["all"], kept[0][0].tensors)
            return lambda: schedule.load_state_dict(state)
        states = [decode(one["members"][place], saved.tensors) for saved, places, one in kept for place in places]

        def write() -> None:
            for row, own in enumerate(states):
                schedule.load_member(row, own)

        return write

    def scaler(self, scaler: GradScaler) -> Callable[[], None]:
        names = self.agreed("scaler")
        if names is None:
            raise CheckpointError(f"{self.path} holds no scaler")
        state = {name: self.own(f"scaler/{name}") for name in names}
        return lambda: scaler.load_state_dict(state)

    def random(self, model: nn.Module) -> Callable[[], None]:
        """What puts the random generators where they were; those of devices that ``model`` is not on are left out."""
        saved = self.parts[0][0]
        state: Mapping[str, Any] = decode(saved.body["random"], saved.tensors)
        # A generator that would refuse its state is found here.
        torch.Generator().set_state(state["torch"])
        random.Random().setstate(state["python"])
        np.random.RandomState().set_state(state["numpy"])

        def write() -> None:
            torch.set_rng_state(state["torch"])
            random.setstate(state["python"])
            np.random.set_state(state["numpy"])
            for device in _devices(model):
                if str(device) in state["devices"]:
                    backend(device).set_random_states(state["devices"][str(device)])

        return write

    def value(self, key: str) -> Any:
        """A nest that the first save holds."""
        saved = self.parts[0][0]
        return decode(saved.body.get(key), saved.tensors)


def _devices(model: nn.Module) -> list[torch.device]:
    return list(dict.fromkeys(tensor.device for _, tensor in tensors_of(model)))


def _check(path: Path, name: str, found: Tensor, wanted: Tensor) -> None:
    if found.shape != wanted.shape or found.dtype != wanted.dtype:
        kinds = [f"{list(tensor.shape)} {tensor.dtype}" for tensor in (found, wanted)]
        raise CheckpointError(
            f"{name} is {kinds[0]} in {path}, and {kinds[1]} here: load as many members of this model"
        )


@torch.no_grad()
def _copy(pairs: Sequence[tuple[Tensor, Tensor]]) -> None:
    for tensor, found in pairs:
        tensor.detach().copy_(found)
