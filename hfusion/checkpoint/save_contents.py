"""Contents of a checkpoint, for each part of an array.

Tensors whose key begins with ``members/`` have a row for each member that was saved; all members share the others. In
saves of populations each group has keys of its own, which begin with ``groups/`` and its number.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import tensors as tensors_of
from hfusion.checkpoint.json_tree import encode
from hfusion.core.errors import CheckpointError
from hfusion.core.membership import Membership, check_whole_stack, has_rows, is_per_member, membership
from hfusion.device.backend import backend
from hfusion.optim import FusedOptimizer, GradScaler
from hfusion.optim.group import membership_of
from hfusion.optim.hyper import plain, read
from hfusion.optim.lr_scheduler import PerMember

OWN = "members/"
GROUPS = "groups/"


def member_stacks(fused: FusedModule, optimizer: FusedOptimizer) -> dict[str, Tensor]:
    """Return the stacked tensors of an array and its optimizer by their keys in a checkpoint, to access rows."""
    stacks: dict[str, Tensor] = {}
    for name, tensor in tensors_of(fused):
        if has_rows(tensor):
            stacks[f"module/{name}"] = tensor.detach()
    for number, group in enumerate(optimizer.param_groups):
        vectors, _ = read(group, optimizer.hypers, optimizer.members)
        for hyper, vector in zip(optimizer.hypers, vectors, strict=True):
            stacks[f"optimizer/{number}/{hyper.label}"] = vector.as_subclass(Tensor)
        for param in group["params"]:
            if membership_of(param).stacked:
                for entry, value in optimizer.state.get(param, {}).items():
                    stacks[f"optimizer/state/{membership_of(param).name}/{entry}"] = value
    return stacks


@dataclass
class SaveWriter:
    """Collects a save: ``rows`` are the array's rows of the members that are saved."""

    rows: Sequence[int]
    body: dict[str, Any]
    tensors: dict[str, Tensor]

    def store_rows(self, key: str, stack: Tensor) -> None:
        """Store a copy of the members' rows of a stack, on the CPU."""
        if list(self.rows) == list(range(len(stack))):
            # Copy directly, without a temporary copy on the device.
            self.tensors[OWN + key] = stack.detach().to("cpu", copy=True)
            return
        rows = torch.as_tensor(list(self.rows), device=stack.device)
        self.tensors[OWN + key] = stack.detach().index_select(0, rows).cpu()

    def store_shared(self, key: str, tensor: Tensor) -> None:
        """Store a copy of a tensor that all members share, on the CPU."""
        self.tensors[key] = tensor.detach().cpu().clone()

    def _keep(self, key: str, tensor: Tensor, mark: Membership | None) -> None:
        """Store a tensor, or its optimizer state, as shared or stacked by its membership; a single model as one row."""
        if mark is None or not mark.is_own:
            self.store_shared(key, tensor)
        else:
            self.store_rows(key, tensor if mark.stacked else tensor.unsqueeze(0))

    def tree(self, key: str, value: Any) -> Any:
        """Return a nest of plain values and tensors as JSON, and store its tensors."""
        tensors: dict[str, Tensor] = {}
        try:
            encoded = encode(value, tensors, key)
        except RecursionError as error:
            raise CheckpointError(f"{key} is nested too deep, or holds itself: keep plain values") from error
        self.tensors |= {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        return encoded

    def module(self, module: nn.Module) -> None:
        """Store the tensors of an array, or of a single model that has marks."""
        if isinstance(module, FusedModule):
            module._views.update(module)
        names = {}
        for name, tensor in tensors_of(module):
            check_whole_stack(tensor, "save it with torch.distributed.checkpoint")
            names[name] = is_per_member(tensor)
            self._keep(f"module/{name}", tensor, membership(tensor))
        self.body["module"] = {"stacked": names}

    def optimizer(self, optimizer: FusedOptimizer) -> None:
        groups = []
        for number, group in enumerate(optimizer.param_groups):
            vectors, _ = read(group, optimizer.hypers, optimizer.members)
            for hyper, vector in zip(optimizer.hypers, vectors, strict=True):
                self.store_rows(f"optimizer/{number}/{hyper.label}", plain(vector))
            names = [membership_of(param).name for param in group["params"]]
            options = self.tree(f"optimizer/{number}/options", {key: group[key] for key in optimizer.options})
            groups.append({"params": names, "options": options})
            for param, name in zip(group["params"], names, strict=True):
                for entry, value in optimizer.state.get(param, {}).items():
                    self._keep(f"optimizer/state/{name}/{entry}", value, membership_of(param))
        kind = type(optimizer).__name__
        self.body["optimizer"] = {
            "class": kind,
            "groups": groups,
            "begun": encode(optimizer.initial_values, {}, "begun"),
        }

    def scheduler(self, scheduler: Any) -> None:
        if isinstance(scheduler, PerMember):
            states = [self.tree(f"schedule/{row}", scheduler.member_state(row)) for row in self.rows]
            self.body["schedule"] = {"members": states, "kinds": [scheduler.kinds[row] for row in self.rows]}
        else:
            state = self.tree("schedule", scheduler.state_dict())
            self.body["schedule"] = {"all": state, "kinds": [type(scheduler).__name__]}

    def scaler(self, scaler: GradScaler) -> None:
        state = scaler.state_dict()
        self.body["scaler"] = sorted(state)
        self.body["scaler begun"] = encode(scaler.initial_values, {}, "scaler begun")
        for name, value in state.items():
            self.store_rows(f"scaler/{name}", value)

    def run(self, loader: Any, extra: Any, modules: Sequence[nn.Module]) -> None:
        """Store the loader's position, ``extra``, and the random states of torch, Python, numpy and the devices."""
        if loader is not None:
            if not hasattr(loader, "state_dict"):
                raise CheckpointError(
                    f"loader must have a state_dict, by which it could go on, got {type(loader).__name__}. Give "
                    "torchdata's StatefulDataLoader, or none."
                )
            self.body["loader"] = self.tree("loader", loader.state_dict())
        self.body["extra"] = self.tree("extra", extra)
        devices = dict.fromkeys(device for module in modules for device in devices_of(module))
        state = {
            "torch": torch.get_rng_state(),
            "python": random.getstate(),
            "numpy": np.random.get_state(),
            "devices": {str(device): backend(device).random_states() for device in devices},
        }
        self.body["random"] = self.tree("random", state)


def devices_of(model: nn.Module) -> list[torch.device]:
    return list(dict.fromkeys(tensor.device for _, tensor in tensors_of(model)))
