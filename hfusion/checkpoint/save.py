"""hf.save and hf.load: an array, its optimizer and what else belongs to it, on disk and back."""

from __future__ import annotations

import os
import random as python_random
import warnings
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from hfusion.array.module import FusedModule
from hfusion.capture.registered_tensors import tensors as tensors_of
from hfusion.checkpoint import files
from hfusion.checkpoint.files import Saved, wrap_load_errors
from hfusion.checkpoint.json_tree import encode
from hfusion.checkpoint.reader import (
    GROUPS,
    OWN,
    SaveReader,
    check_ours,
    described,
    devices_of,
    optimizer_stacks,
    shared_params,
)
from hfusion.core.errors import CheckpointError
from hfusion.core.membership import check_whole_stack, has_rows, is_per_member, member_rows, membership
from hfusion.device.backend import backend
from hfusion.optim import FusedOptimizer, GradScaler
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
    tags = [f"member {row}" for row in range(len(fused))] if tags is None else list(tags)
    if len(tags) != len(fused) or len(set(tags)) < len(tags):
        raise CheckpointError(f"tags={tags}: give each of {len(fused)} members one of its own")
    writer = SaveWriter(range(len(fused)), {"members": tags}, {})
    writer.array(fused, optimizer, scheduler, scaler)
    writer.run(loader, extra, [fused])
    return files.write(directory, writer.body, writer.tensors, step=step, keep=keep, score=score)


@dataclass
class SaveWriter:
    """Collects a save: ``rows`` are the array's rows of the members that are saved."""

    rows: Sequence[int]
    body: dict[str, Any]
    tensors: dict[str, Tensor]

    def store_rows(self, key: str, stack: Tensor) -> None:
        """Store a copy of the members' rows of a stack, on the CPU."""
        # If all are saved, they are copied without a temporary copy on the device.
        if list(self.rows) != list(range(len(stack))):
            stack = stack.detach().index_select(0, torch.as_tensor(list(self.rows), device=stack.device))
        self.tensors[OWN + key] = stack.detach().to("cpu", copy=True)

    def store_shared(self, key: str, tensor: Tensor) -> None:
        """Store a copy of a tensor that all members share, on the CPU."""
        self.tensors[key] = tensor.detach().cpu().clone()

    def tree(self, key: str, value: Any) -> Any:
        """Return a nest of plain values and tensors as JSON, and store its tensors."""
        tensors: dict[str, Tensor] = {}
        try:
            encoded = encode(value, tensors, key)
        except RecursionError as error:
            raise CheckpointError(f"{key} is nested too deep, or holds itself: keep plain values") from error
        self.tensors |= {name: tensor.cpu().clone() for name, tensor in tensors.items()}
        return encoded

    def array(self, module: nn.Module, optimizer: Any, scheduler: Any, scaler: Any) -> None:
        """Store copies of an array or a single model, and of all that trains it; None for what it has not."""
        self.module(module)
        for store, part in ((self.optimizer, optimizer), (self.scheduler, scheduler), (self.scaler, scaler)):
            if part is not None:
                store(part)

    def module(self, module: nn.Module) -> None:
        """Store the tensors of an array, or of a single model that has marks."""
        if isinstance(module, FusedModule):
            module._views.update(module)
        names = {}
        for name, tensor in tensors_of(module):
            check_whole_stack(tensor, "save it with torch.distributed.checkpoint")
            names[name], mark = is_per_member(tensor), membership(tensor)
            if mark is None or not mark.is_own:
                self.store_shared(f"module/{name}", tensor)
            else:
                self.store_rows(f"module/{name}", member_rows(tensor, mark))
        self.body["module"] = {"stacked": names}

    def optimizer(self, optimizer: FusedOptimizer) -> None:
        check_ours("optimizer", optimizer, FusedOptimizer)
        for key, stack in optimizer_stacks(optimizer).items():
            self.store_rows(key, stack)
        for param, name in shared_params(optimizer):
            for entry, value in optimizer.state.get(param, {}).items():
                self.store_shared(f"optimizer/state/{name}/{entry}", value)
        begun = encode(optimizer.initial_values, {}, "begun")
        self.body["optimizer"] = {**described(optimizer), "begun": begun}

    def scheduler(self, scheduler: Any) -> None:
        common = not isinstance(scheduler, PerMember)
        rows = [0] if common else self.rows
        states = [scheduler.state_dict()] if common else [scheduler.member_state(row) for row in rows]
        self.body["schedule"] = {
            "common": common,
            "members": [self.tree(f"schedule/{row}", state) for row, state in zip(rows, states, strict=True)],
            "kinds": [type(scheduler).__name__] if common else [scheduler.kinds[row] for row in rows],
        }

    def scaler(self, scaler: GradScaler) -> None:
        check_ours("scaler", scaler, GradScaler)
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
        state = {
            "torch": torch.get_rng_state(),
            "python": python_random.getstate(),
            "numpy": np.random.get_state(),
            "devices": {str(device): backend(device).random_states() for device in devices_of(modules)},
        }
        self.body["random"] = self.tree("random", state)


def member_stacks(fused: FusedModule, optimizer: FusedOptimizer) -> dict[str, Tensor]:
    """Return the stacked tensors of an array and its optimizer by their keys in a checkpoint, to access rows."""
    stacks = {f"module/{name}": tensor.detach() for name, tensor in tensors_of(fused) if has_rows(tensor)}
    return stacks | optimizer_stacks(optimizer)


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
    reader = read(directory, tags)
    with wrap_load_errors(reader.path):
        writes = reader.array(model, optimizer, scheduler, scaler)
        if random:
            writes.append(reader.random(model))
        if loader is not None:
            writes.append(reader.loader(loader))
        loaded = Loaded(reader.path, reader.parts[0][0].step, reader.tags, reader.value("extra"))
        for write in writes:
            write()
    return loaded


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


def read(root: Root | Sequence[Root], tags: str | Sequence[str] | None) -> SaveReader:
    """Return a reader of members ``tags`` in the latest save of each root. Raises CheckpointError."""
    parts = []
    for saved in saves_of(root):
        with wrap_load_errors(saved.path):
            parts += groups_of(saved)
    return SaveReader.of(parts, [tags] if isinstance(tags, str) else tags)


def groups_of(saved: Saved) -> list[Saved]:
    """Return the groups of a population's save, each as if it had been saved alone; of another save only itself."""
    if "groups" not in saved.body:
        return [saved]
    common = {key: tensor for key, tensor in saved.tensors.items() if not key.startswith(GROUPS)}
    parts = []
    for number, body in enumerate(saved.body["groups"]):
        prefix = f"{GROUPS}{number}/"
        own = {key.removeprefix(prefix): value for key, value in saved.tensors.items() if key.startswith(prefix)}
        parts.append(replace(saved, body={**saved.body, **body}, tensors=common | own))
    return parts


def saves_of(root: Root | Sequence[Root]) -> list[Saved]:
    """Return the latest save under each root. Raises CheckpointError."""
    roots = [root] if isinstance(root, str | os.PathLike) else list(root)
    if not roots:
        raise CheckpointError("no folder was given: give the one that a checkpoint was saved to, or several")
    return [files.read(folder) for folder in roots]
