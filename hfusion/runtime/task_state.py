"""The tensors of one task while it is trained: in host memory, or copied to a device shard by shard.

A tensor that several shards use (tied weights) is owned by the first of them, whose backward comes last. The others
borrow it. The home of a shard is its host memory or file.
"""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from threading import Event, Lock
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from hfusion.core.claimed_folder import ClaimedFolder, run_folder
from hfusion.core.errors import SpillError
from hfusion.core.membership import mark, membership
from hfusion.core.program import Kind, Slot
from hfusion.core.tree import map_leaves
from hfusion.device.backend import backend
from hfusion.optim.base import FusedOptimizer
from hfusion.schedule.actions import Section

_BORROWED = frozenset({Kind.PARAMETER, Kind.BUFFER})


@dataclass(frozen=True)
class Holding:
    """The names of one shard's tensors: owned, borrowed (with the index of the owner), and trained ones it owns."""

    owned: tuple[str, ...]
    borrowed: Mapping[str, int]
    trained: tuple[str, ...]

    @property
    def all(self) -> frozenset[str]:
        """The names of owned and borrowed tensors."""
        return frozenset(self.owned).union(self.borrowed)


def holdings(parts: Sequence[Sequence[Slot]], names: Mapping[str, str], trained: frozenset[str]) -> tuple[Holding, ...]:
    """Return the tensors of each shard. ``parts``: the ``keys`` of each part.

    ``names`` maps slot names to one key per tensor, so that tied names are equal; ``trained``: keys that are trained.
    """
    owner: dict[str, int] = {}
    shard_holdings = []
    for index, keys in enumerate(parts):
        tensor_names = dict.fromkeys(names[slot.name] for slot in keys if slot.kind is not Kind.CONSTANT)
        for name in tensor_names:
            owner.setdefault(name, index)
        owned = tuple(name for name in tensor_names if owner[name] == index)
        borrowed = {name: owner[name] for name in tensor_names if owner[name] != index}
        shard_holdings.append(Holding(owned, borrowed, tuple(name for name in owned if name in trained)))
    return tuple(shard_holdings)


@dataclass
class _LoadedShard:
    """The tensors of a shard on a device.

    Attributes:
        changed: tensors, with their section, to be written back to the host.
        updated: trained tensors that the optimizer has stepped; they and their state are in ``changed``.
        bound: the array's tensors that lie in the copy: none, the trained ones, or all that the shard owns.
        filled: set when the copies to the device are done.
    """

    copy: Copy
    borrowed: dict[str, Tensor]
    changed: set[tuple[Section, str]] = field(default_factory=set)
    updated: set[str] = field(default_factory=set)
    bound: Sequence[str] = ()
    filled: Event = field(default_factory=Event)


class TaskTensors:
    """The parameters, buffers and optimizer state of a task. One thread may load a shard while another computes.

    Args:
        tensors: the tensors by key, each once, including the optimizer's parameters.
        files: for each shard the file that stores it, None for host memory.
        pinned: whether host memory is page-locked.
        carried: whether gradients outlive units, so that they are stored with the shard.
    """

    def __init__(
        self,
        tensors: Mapping[str, Tensor],
        shards: Sequence[Holding],
        optimizer: FusedOptimizer,
        files: Sequence[Path | None],
        *,
        pinned: bool,
        carried: bool,
    ) -> None:
        self.pinned = pinned
        self.shards = shards
        self.optimizer = optimizer
        self._tensors = tensors
        self._trained = frozenset(name for shard in shards for name in shard.trained)
        self._lock = Lock()
        # Held while a shard is loaded, and while another shard writes tensors that the load may read.
        self._crossing = Lock()
        self._loading: int | None = None
        self._loaded_shards: dict[int, _LoadedShard] = {}
        self._leaving: dict[int, tuple[_LoadedShard, Event]] = {}
        # The original memory of tensors that training does not change, restored by `close`.
        self._frozen = {
            name: tensors[name].data
            for shard in shards
            for name in shard.owned
            if isinstance(tensors[name], nn.Parameter) and name not in shard.trained
        }
        self._homes: list[HostStore] = []
        try:
            for index, file in enumerate(files):
                self._homes.append(self._home(shards[index], file, carried))
        except BaseException:
            self.close()
            raise

    def _home(self, shard: Holding, file: Path | None, carried: bool) -> HostStore:
        weights = {name: self._tensors[name].data for name in shard.owned}
        trained = {name: weights[name] for name in shard.trained}
        state = {
            key: self.optimizer.state[self._tensors[name]][kind] for name in trained for kind, key in self._stacks[name]
        }
        sections = {Section.WEIGHTS: weights, Section.OPTIMIZER: state, Section.GRADIENTS: trained if carried else {}}
        home = HostStore(sections, pinned=self.pinned, file=file)
        self._bind(shard.owned, home.views)
        return home

    @cached_property
    def _stacks(self) -> dict[str, tuple[tuple[str, str], ...]]:
        """For each trained parameter, the names of its state tensors and their keys in the host store."""
        stacks = {}
        for name in self._trained:
            entry = self.optimizer.state.get(self._tensors[name], {})
            kinds = [
                kind
                for kind, value in entry.items()
                if kind not in self.optimizer.numbers and isinstance(value, Tensor)
            ]
            stacks[name] = tuple((kind, f"{name} {kind}") for kind in kinds)
        return stacks

    def _bind(self, names: Iterable[str], views: Mapping[Section, Mapping[str, Tensor]]) -> None:
        """Point tensors, and the optimizer state of trained ones, to the memory of ``views``."""
        for name in names:
            tensor = self._tensors[name]
            tensor.data = views[Section.WEIGHTS][name]
            for kind, key in self._stacks.get(name, ()):
                self.optimizer.state[tensor][kind] = views[Section.OPTIMIZER][key]

    @property
    def order(self) -> tuple[str, ...]:
        """The trained parameters in the order of the module."""
        return tuple(name for name in self._tensors if name in self._trained)

    def parameter(self, name: str) -> Tensor:
        """Return the array's parameter of this key."""
        return self._tensors[name]

    def leaf(self, name: str, tensor: Tensor) -> Tensor:
        """Return a new autograd leaf for a parameter; ``tensor`` is its current memory."""
        leaf = tensor.detach().requires_grad_(name in self._trained)
        tensor_membership = membership(self._tensors[name])
        return leaf if tensor_membership is None else mark(leaf, tensor_membership)

    def load(
        self, shard: int, sections: Collection[Section], device: torch.device, borrows: frozenset[Kind] = _BORROWED
    ) -> list[Move]:
        """Allocate a shard on a device. Return the copies to make before it is used; call `loaded` afterwards.

        ``borrows``: the kinds of borrowed tensors to copy from their owners, which must be loaded or at home.
        """
        self._crossing.acquire()
        self._loading = shard
        copy = self._homes[shard].load(sections, device)
        moves = copy.moves
        borrowed: dict[str, Tensor] = {}
        for name, owner in self.shards[shard].borrowed.items():
            source = self._source(name, owner)
            borrowed[name] = torch.empty_like(source, device=device)
            if (Kind.PARAMETER if isinstance(self._tensors[name], nn.Parameter) else Kind.BUFFER) in borrows:
                moves.append(Move(borrowed[name], source))
        with self._lock:
            self._loaded_shards[shard] = _LoadedShard(copy, borrowed)
        return moves

    def loaded(self, shard: int) -> None:
        """Note that the copies for a shard are done, or cancelled."""
        with self._lock:
            if shard in self._loaded_shards:
                self._loaded_shards[shard].filled.set()
        if self._loading == shard:
            self._loading = None
            self._crossing.release()

    def _source(self, name: str, owner: int) -> Tensor:
        """Return a tensor of another shard: on the device if that is loaded, otherwise at home."""
        with self._lock:
            loaded_shard = self._loaded_shards.get(owner)
            if loaded_shard is not None and loaded_shard.filled.is_set():
                return loaded_shard.copy.views[Section.WEIGHTS][name]
        self._wait_for(owner)
        return self._homes[owner].views[Section.WEIGHTS][name]

    def _wait_for(self, shard: int) -> None:
        """Wait until the eviction of a shard, if one is in progress, has ended."""
        leaving = self._leaving.get(shard)
        if leaving is not None:
            leaving[1].wait()

    def tensor(self, shard: int, name: str) -> Tensor:
        """Return a parameter or buffer for a loaded shard: owned, or the borrowed copy."""
        loaded_shard = self._loaded_shards[shard]
        weights = loaded_shard.copy.views[Section.WEIGHTS]
        return weights[name] if name in weights else loaded_shard.borrowed[name]

    def refresh(self, shard: int, names: Sequence[str]) -> None:
        """Copy borrowed tensors again from their owners, which may have changed since this shard was loaded."""
        loaded_shard = self._loaded_shards[shard]
        for name in names:
            if name in loaded_shard.borrowed:
                loaded_shard.borrowed[name].copy_(self._source(name, self.shards[shard].borrowed[name]))

    def wrote(self, shard: int, buffers: Sequence[str]) -> None:
        """Note that a loaded shard wrote to ``buffers``. Borrowed ones are copied to their owner immediately."""
        loaded_shard = self._loaded_shards[shard]
        for name in self._frozen.keys() & set(buffers):
            del self._frozen[name]
        for name in buffers:
            if name not in loaded_shard.borrowed:
                loaded_shard.changed.add((Section.WEIGHTS, name))
                continue
            owner = self.shards[shard].borrowed[name]
            with self._crossing:
                self._wait_for(owner)
                with self._lock:
                    owner_shard = self._loaded_shards.get(owner)
                if owner_shard is not None:
                    owner_shard.copy.views[Section.WEIGHTS][name].copy_(loaded_shard.borrowed[name])
                # Last, since this copy to the host is synchronous: both copies have then ended.
                self._homes[owner].views[Section.WEIGHTS][name].copy_(loaded_shard.borrowed[name])

    def gradient(self, shard: int, name: str) -> Tensor:
        """Return the gradient buffer of a parameter of the loaded shard, kept between units."""
        return self._loaded_shards[shard].copy.views[Section.GRADIENTS][name]

    def keep_gradient(self, shard: int, name: str) -> None:
        """Note that the gradient of a parameter changed, so that an eviction writes it back."""
        self._loaded_shards[shard].changed.add((Section.GRADIENTS, name))

    def bind(self, shard: int) -> None:
        """Point all array tensors that a loaded shard owns to its device memory, until it is evicted."""
        loaded_shard = self._loaded_shards[shard]
        if loaded_shard.bound != self.shards[shard].owned:
            loaded_shard.bound = self.shards[shard].owned
            self._bind(loaded_shard.bound, loaded_shard.copy.views)

    def update(self, shard: int, gradients: Mapping[str, Tensor]) -> None:
        """Do an optimizer step for the parameters of a loaded shard that have ``gradients``."""
        loaded_shard = self._loaded_shards[shard]
        if not loaded_shard.bound:
            loaded_shard.bound = self.shards[shard].trained
            self._bind(loaded_shard.bound, loaded_shard.copy.views)
        params = [self._tensors[name] for name in gradients]
        for param, gradient in zip(params, gradients.values(), strict=True):
            param.grad = gradient
        self.optimizer.step()
        for param in params:
            param.grad = None
        for name in gradients.keys() - loaded_shard.updated:
            loaded_shard.updated.add(name)
            loaded_shard.changed.add((Section.WEIGHTS, name))
            loaded_shard.changed.update((Section.OPTIMIZER, key) for _, key in self._stacks[name])

    def evict(self, shard: int) -> list[Move]:
        """Evict a shard. Return the copies that write its changes back; call `mark_evicted` when they are done."""
        with self._lock:
            loaded_shard, home = self._loaded_shards.pop(shard), self._homes[shard]
            self._leaving[shard] = loaded_shard, Event()
        if loaded_shard.bound:
            self._bind(loaded_shard.bound, home.views)
            self.optimizer.forget()
        changed: dict[Section, list[str]] = {section: [] for section in loaded_shard.copy.buffers}
        for section, name in loaded_shard.changed:
            changed[section].append(name)
        return [move for section, names in changed.items() for move in home.save(loaded_shard.copy, section, names)]

    def mark_evicted(self, shard: int) -> None:
        """Note that all copies of an evicted shard are done, and release its device memory."""
        leaving = self._leaving.pop(shard, None)
        if leaving is not None:
            leaving[1].set()

    def settle(self) -> None:
        """Bring the array's tensors and the optimizer's state up to date with all units so far.

        Only between units. Updated parameters already lie in device memory. Changed buffers are copied to their home.
        """
        for shard, home in enumerate(self._homes):
            self._wait_for(shard)
            with self._lock:
                loaded_shard = self._loaded_shards.get(shard)
            if loaded_shard is None:
                continue
            with self._crossing:
                for section, name in loaded_shard.changed:
                    if section is Section.WEIGHTS and name not in self._trained:
                        home.views[section][name].copy_(loaded_shard.copy.views[section][name])

    @contextmanager
    def at_home(self) -> Iterator[None]:
        """Context manager: the array's tensors are in host memory, as capture needs them.

        Buffers are up to date there, since forward may read them in Python. Parameters may be outdated.
        """
        self.settle()
        with self._lock:
            away = [(shard, loaded_shard) for shard, loaded_shard in self._loaded_shards.items() if loaded_shard.bound]
        before = {shard: {name: self._tensors[name].data for name in self.shards[shard].owned} for shard, _ in away}
        for shard in before:
            self._bind_weights(self._homes[shard].views[Section.WEIGHTS])
        try:
            yield
        finally:
            for shard, loaded_shard in away:
                with self._lock:
                    if self._loaded_shards.get(shard) is loaded_shard:
                        self._bind_weights(before[shard])

    def _bind_weights(self, views: Mapping[str, Tensor]) -> None:
        for name, view in views.items():
            self._tensors[name].data = view

    def close(self) -> None:
        """Give every tensor its own memory again, and drop the host stores; an interrupted run keeps its progress."""
        for shard, loaded_shard in [*self._loaded_shards.items()]:
            copy_now(self.evict(shard))
            backend(loaded_shard.copy.device).wait()
            self.mark_evicted(shard)
        for index, home in enumerate(self._homes):
            for name in self.shards[index].owned:
                frozen = self._frozen.get(name)
                self._tensors[name].data = home.views[Section.WEIGHTS][name].clone() if frozen is None else frozen
                for kind, key in self._stacks.get(name, ()):
                    self.optimizer.state[self._tensors[name]][kind] = home.views[Section.OPTIMIZER][key].clone()
        self.optimizer.forget()
        self._homes.clear()


# The state of a shard at rest, in host memory or in a file, and its copy on a device: contiguous buffers.

# The alignment of torch's own allocations, so that kernels see the same alignment as in plain training.
_ALIGNMENT = 64


# Sections of a shard in host memory, in the order of its buffer.
STATE = (Section.WEIGHTS, Section.OPTIMIZER, Section.GRADIENTS)


class Field(NamedTuple):
    """A tensor in a section, ``offset`` bytes from the section's start."""

    name: str
    section: Section
    offset: int
    shape: torch.Size
    dtype: torch.dtype


class HostStore:
    """A shard in host memory or in a file, a buffer for each section. ``views``: its tensors by section and name."""

    def __init__(self, tensors: Mapping[Section, Mapping[str, Tensor]], *, pinned: bool, file: Path | None) -> None:
        self._fields, sizes = list[Field](), dict.fromkeys(STATE, 0)
        for section in STATE:
            for name, tensor in tensors[section].items():
                self._fields.append(Field(name, section, sizes[section], tensor.shape, tensor.dtype))
                sizes[section] += -(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT
        size = sum(sizes.values())
        if file is None:
            buffer = torch.empty(size, dtype=torch.uint8, pin_memory=pinned, device="cpu")
        else:
            buffer = _mapped(file, size)
        self._buffers = dict(zip(STATE, buffer.split([*sizes.values()]), strict=True))
        self.views = self._views_of(self._buffers)
        for name, section, *_ in self._fields:
            self.views[section][name].copy_(tensors[section][name].detach())

    def _views_of(self, buffers: Mapping[Section, Tensor]) -> dict[Section, dict[str, Tensor]]:
        """Return the tensors that lie in the buffers of sections, by section and name.

        For autograd they are unrelated tensors, not views of a buffer: otherwise an in-place write to one would count
        as a write to all.
        """
        views: dict[Section, dict[str, Tensor]] = {section: {} for section in buffers}
        for name, section, offset, shape, dtype in self._fields:
            if section in buffers:
                start = (int(buffers[section].storage_offset()) + offset) // dtype.itemsize
                tensor = views[section][name] = torch.empty(0, dtype=dtype, device=buffers[section].device)
                # Without strides the tensor is contiguous, which torch's stubs leave out.
                tensor.set_(buffers[section].untyped_storage(), start, shape)  # type: ignore[call-overload]
        return views

    def load(self, sections: Collection[Section], device: torch.device) -> Copy:
        """Allocate ``sections`` on ``device``. The ``moves`` of the result must be made to fill them."""
        sources = {section: self._buffers[section] for section in STATE if section in sections}
        buffers = {s: torch.empty(len(source), dtype=torch.uint8, device=device) for s, source in sources.items()}
        moves = [Move(buffers[section], source) for section, source in sources.items()]
        return Copy(device, buffers, self._views_of(buffers), moves)

    def save(self, copy: Copy, section: Section, names: Sequence[str]) -> list[Move]:
        """Return the moves that write tensors of ``copy`` back: a single one if they are the whole section."""
        if names and len(names) == len(self.views[section]):
            return [Move(self._buffers[section], copy.buffers[section])]
        return [Move(self.views[section][name], copy.views[section][name]) for name in names]


class Copy(NamedTuple):
    """Some sections of a shard on a device, and their ``views``; ``moves`` fill them."""

    device: torch.device
    buffers: dict[Section, Tensor]
    views: dict[Section, dict[str, Tensor]]
    moves: list[Move]


def _mapped(file: Path, size: int) -> Tensor:
    """Return ``size`` bytes of a new safetensors file, memory-mapped: writing to the tensor writes to the file.

    All blocks are allocated immediately, so a disk that fills up later cannot break a mapping. Format:
    https://github.com/safetensors/safetensors#format
    """
    header = json.dumps({"shard": {"dtype": "U8", "shape": [size], "data_offsets": [0, size]}}).encode()
    header += b" " * (-(8 + len(header)) % _ALIGNMENT)
    start = 8 + len(header)
    try:
        with file.open("wb") as target:
            target.write(len(header).to_bytes(8, "little") + header)
            target.flush()
            if hasattr(os, "posix_fallocate"):
                os.posix_fallocate(target.fileno(), 0, start + size)
            else:
                block = bytes(1 << 20)
                for written in range(start, start + size, len(block)):
                    target.write(block[: start + size - written])
    except OSError as error:
        raise SpillError(
            f"cannot spill {size:,} bytes to {file}: {error.strerror}; free space there, name another folder as the "
            "machine's disk, or give the machine more host memory"
        ) from error
    try:
        return torch.from_file(str(file), shared=True, size=start + size, dtype=torch.uint8)[start:]
    except RuntimeError as error:
        raise SpillError(f"the spill file {file} is gone or cannot be mapped: {error}") from error


# Memory copies between two storages, or two contiguous tensors of one dtype.


class Move(NamedTuple):
    """A copy: source and destination."""

    target: Any
    source: Any


def copy_now(moves: Iterable[Move]) -> None:
    """Make the copies. On an accelerator they are queued in this thread's stream."""
    for target, source in moves:
        target.copy_(source, non_blocking=True)


# Values that cross cuts: nests of tensors and numbers, moved storage by storage so that strides and sharing survive.


class StorageView(NamedTuple):
    """A tensor as a view of a bundle's storage. ``storage``: the index of that storage."""

    storage: int
    dtype: torch.dtype
    offset: int
    size: torch.Size
    stride: tuple[int, ...]
    requires_grad: bool


@dataclass(frozen=True)
class Bundle:
    """Values on the host: their storages, and nested values with a `StorageView` in place of each tensor."""

    storages: tuple[torch.UntypedStorage, ...]
    values: Mapping[str, Any]


def spill(values: Mapping[str, Any], *, pinned: bool) -> tuple[Bundle, list[Move]]:
    """Allocate host memory for ``values``. Return the bundle, and the copies that fill it.

    Tensors that share a storage share it again when restored.
    """
    numbers: dict[int, int] = {}
    sources: list[torch.UntypedStorage] = []

    def view(tensor: Tensor) -> StorageView:
        storage = tensor.untyped_storage()
        number = numbers.get(storage.data_ptr()) if storage.nbytes() else None
        if number is None:
            number = numbers[storage.data_ptr()] = len(sources)
            sources.append(storage)
        offset = int(tensor.storage_offset())
        return StorageView(number, tensor.dtype, offset, tensor.shape, tensor.stride(), tensor.requires_grad)

    views = {name: map_leaves(value, Tensor, view) for name, value in values.items()}
    buffers = [torch.empty(s.nbytes(), dtype=torch.uint8, pin_memory=pinned, device="cpu") for s in sources]
    bundle = Bundle(tuple(buffer.untyped_storage() for buffer in buffers), views)
    return bundle, list(map(Move, bundle.storages, sources))


def restore(bundle: Bundle, names: Sequence[str], device: torch.device) -> tuple[dict[str, Any], list[Move]]:
    """Allocate some values of a bundle on a device, detached. Return them, and the copies that fill them."""
    moved: dict[int, torch.UntypedStorage] = {}

    def tensor(view: StorageView) -> Tensor:
        storage = moved.get(view.storage)
        if storage is None:
            size = bundle.storages[view.storage].nbytes()
            storage = moved[view.storage] = torch.empty(size, dtype=torch.uint8, device=device).untyped_storage()
        result = torch.empty(0, dtype=view.dtype, device=device).set_(storage, view.offset, view.size, view.stride)
        return result.requires_grad_(view.requires_grad)

    values = {name: map_leaves(bundle.values[name], StorageView, tensor) for name in names}
    return values, [Move(target, bundle.storages[number]) for number, target in moved.items()]


# The folder for tensors that fit neither devices nor host memory; it is emptied however the run ends.


class SpillFolder:
    """A folder of this run inside ``parent``, created with its first file.

    Files of killed runs are removed.
    """

    def __init__(self, parent: Path) -> None:
        self._parent = parent
        self._made_parent = False
        self._folder: ClaimedFolder | None = None

    def file(self, name: str) -> Path:
        """Return the path of a new file. Raises SpillError if the folder cannot be created."""
        if self._folder is None:
            try:
                self._made_parent = not self._parent.exists()
                self._parent.mkdir(parents=True, exist_ok=True)
                self._folder = run_folder(self._parent)
            except OSError as error:
                raise SpillError(
                    f"cannot make a folder for spilled state in {self._parent.absolute()}: {error.strerror}; name a "
                    "folder that can be written as the machine's disk"
                ) from error
        return self._folder.path / f"{name}.safetensors"

    def close(self) -> None:
        """Remove the folder and its files."""
        folder, self._folder = self._folder, None
        if folder is not None:
            folder.remove()
        if self._made_parent:
            # Another run may use it by now, or have removed it.
            with suppress(OSError):
                self._parent.rmdir()
