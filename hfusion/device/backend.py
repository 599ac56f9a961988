"""Services of a device beyond operators: streams, pinned memory, random numbers, free memory, synchronisation.

Every accelerator answers through `torch.accelerator`, `torch.Stream` and its own module of
torch, so that CUDA, ROCm, XPU and MPS are one path; the host does its work synchronously.
Source: https://docs.pytorch.org/docs/stable/accelerator.html
"""

from __future__ import annotations

import ctypes
import functools
import os
import platform
import random
import time
import warnings
import weakref
from collections import Counter, defaultdict
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext, suppress
from dataclasses import dataclass, field
from enum import Enum, auto
from functools import partial
from typing import Any, TypeVar

import numpy as np
import torch
from torch import Tensor

from hfusion.core.event_log import first_line
from hfusion.core.exclusive import tracing
from hfusion.core.memory import same_bits
from hfusion.torch_private.dispatch_modes import is_any_autocast_enabled
from hfusion.torch_private.export_state import seeding_locks, waiting_seeds_kept

_TYPES = ("cuda", "xpu", "mps")
AUTOCAST_QUESTIONS = {"is_autocast_enabled": "cuda"} | {
    f"is_autocast_{kind}_enabled": kind for kind in ("cpu", "xla", "ipu")
}
"""Functions of torch that tell whether autocast is on, with the type of device meant where none is given."""


def types() -> tuple[str, ...]:
    """Return the types of accelerators that tasks run on: those built into torch, and its extensions here.

    ROCm's type is cuda.
    """
    accelerator = torch.accelerator.current_accelerator()
    return _TYPES if accelerator is None or accelerator.type in _TYPES else (*_TYPES, accelerator.type)


_MULTIPLYING = (("conv",), ("rnn", "lstm", "gru"), ("mm", "linear", "mat", "mv", "dot", "einsum", "attention"))
"""Parts of the names of operators that multiply float32, for each of torch's settings of their precision."""

T = TypeVar("T")


# Queues of work.


class Queue:
    """A queue of work that a device does in order, concurrently with its other queues.

    This one is of the host, whose work is done as soon as it is queued.
    """

    def run(self, job: Callable[[], None]) -> None:
        """Call ``job``; the operators that it calls belong to this queue. They may be done later."""
        job()

    def wait(self) -> None:
        """Wait until all queued work is done."""

    def mark(self) -> torch.Event | None:
        """Return an event that tells when all work queued so far is done; None: only `wait` tells it."""
        return None

    def close(self) -> None:
        """Release the queue's resources. No work may be added to it afterwards."""


def recorded_event(device: torch.device, stream: torch.Stream | None = None) -> torch.Event:
    """Return an event at the current end of ``stream``, or of the current stream if None."""
    with torch.accelerator.device_index(device.index):
        event = torch.Event(device, enable_timing=True)
        event.record(torch.accelerator.current_stream(device) if stream is None else stream)
    return event


class StreamQueue(Queue):
    """A queue of a device that supports several queues."""

    def __init__(self, device: torch.device, copies: bool) -> None:
        self.stream, self._give_back = lend_stream(device, self, StreamUse.COPY if copies else StreamUse.COMPUTE)

    def run(self, job: Callable[[], None]) -> None:
        with self.stream:
            job()

    def wait(self) -> None:
        self.stream.synchronize()

    def mark(self) -> torch.Event | None:
        return recorded_event(self.stream.device, self.stream)

    def close(self) -> None:
        self._give_back()


class DeviceQueue(Queue):
    """The only queue of a device that does not support several. Events are untested on such devices."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def wait(self) -> None:
        torch.accelerator.synchronize(self.device)


# Streams of devices, each lent to one owner at a time and used again afterwards.


class StreamUse(Enum):
    """The purpose of a stream. Streams for copies need no workspaces of libraries."""

    COMPUTE = auto()
    COPY = auto()
    RECORD = auto()


_idle: defaultdict[tuple[torch.device, StreamUse], list[torch.Stream]] = defaultdict(list)


def lend_stream(
    device: torch.device, owner: object, use: StreamUse
) -> tuple[torch.Stream, weakref.finalize[..., object]]:
    """Lend a stream of ``device`` until the returned function is called, or ``owner`` is no longer alive.

    A stream costs memory for as long as the process lives: cuBLAS keeps a workspace for each in which it has computed,
    32 MiB on an H100, and torch gives memory that was freed on a stream to that stream only.
    """
    idle = _idle[device, use]
    try:
        stream = idle.pop()
    except IndexError:
        stream = torch.Stream(device)
    # Work that is still queued runs before work of the next owner, as always on a stream.
    give_back = weakref.finalize(owner, idle.append, stream)
    give_back.atexit = False
    return stream, give_back


# The services of each kind of device.


@dataclass(frozen=True)
class Backend:
    """The services of a device. These are of the processor that runs Python, whose work is done at once.

    Attributes:
        device: the device.
        pins: whether copies between it and pinned host memory overlap with computing.
        hands_over: whether a tensor can take over the memory of another by DLPack.
        fuses: whether torch's fused optimizers run on it.
    """

    device: torch.device
    pins: bool = False
    hands_over: bool = True
    fuses: bool = True

    @property
    def name(self) -> str:
        """The name of the accelerator's model; empty for the host."""
        return ""

    def queue(self, copies: bool = False) -> Queue:
        """Return a queue for exclusive use until it is closed; ``copies``: it is used for copies only."""
        return Queue()

    def current(self) -> AbstractContextManager[Any]:
        """Context manager: kernels are launched on this device."""
        return nullcontext()

    def mark(self) -> torch.Event | None:
        """Return an event that tells when all work queued by this thread is done; None if it is."""
        return None

    def share(self, tensor: Tensor) -> None:
        """Note that this thread's queue uses a tensor of another queue, so that its memory outlives both."""

    def wait(self) -> None:
        """Wait until all queues are empty."""

    def recorder(self) -> Recorder | str:
        """Return a recorder, which records launches to replay them by one call, or the reason why there is none.

        The reason is empty for the host, which launches nothing.
        """
        return ""

    def free_bytes(self) -> int:
        """Return the bytes of free memory. Not for the host, whose memory other processes share."""
        raise NotImplementedError("the memory of a host is not one process's to take")

    def seconds(self, run: Callable[[], object]) -> float:
        """Return the seconds until all work that ``run`` queues is done, by the device's own clock."""
        start = time.perf_counter()
        run()
        return time.perf_counter() - start

    def random_states(self) -> dict[str, Tensor]:
        """Return the states of the generators from which operators on this device draw, by type of device."""
        return {"cpu": torch.get_rng_state()}

    def set_random_states(self, states: Mapping[str, Tensor]) -> None:
        """Restore the states that `random_states` returned."""
        torch.set_rng_state(states["cpu"])


@dataclass(frozen=True)
class Accelerator(Backend):
    """A device with its own memory that works asynchronously to Python."""

    @property
    def name(self) -> str:
        get_name = getattr(self._module, "get_device_name", None)
        return str(get_name(self.device)) if get_name is not None else self.device.type

    def queue(self, copies: bool = False) -> Queue:
        return DeviceQueue(self.device) if self.device.type == "mps" else StreamQueue(self.device, copies)

    def mark(self) -> torch.Event | None:
        if self.device.type == "mps":
            self.wait()
            return None
        return recorded_event(self.device)

    def share(self, tensor: Tensor) -> None:
        if self.device.type != "mps":
            tensor.record_stream(torch.accelerator.current_stream(self.device))

    def current(self) -> AbstractContextManager[Any]:
        return torch.accelerator.device_index(self.device.index)

    def wait(self) -> None:
        torch.accelerator.synchronize(self.device)

    def recorder(self) -> Recorder | str:
        try:
            _new_graph(self.device, None)
        except RuntimeError as error:
            first, _, _ = str(error).strip().partition("\n")
            return f"torch {torch.__version__} records no graphs on {self.device.type}: {first[:200]}"
        return Recorder(self.device)

    def free_bytes(self) -> int:
        if self.device.type == "mps":
            return int(torch.mps.recommended_max_memory() - torch.mps.driver_allocated_memory())
        return int(self._module.mem_get_info(self.device)[0])

    def seconds(self, run: Callable[[], object]) -> float:
        with self.current():
            start, end = (torch.Event(self.device, enable_timing=True) for _ in range(2))
            self.wait()
            start.record()
            run()
            end.record()
            end.synchronize()
        return float(start.elapsed_time(end)) / 1e3

    def random_states(self) -> dict[str, Tensor]:
        return super().random_states() | {self.device.type: self._module.get_rng_state(*self._device_arguments)}

    def set_random_states(self, states: Mapping[str, Tensor]) -> None:
        super().set_random_states(states)
        self._module.set_rng_state(states[self.device.type], *self._device_arguments)

    @property
    def _device_arguments(self) -> tuple[torch.device, ...]:
        """The device argument for functions of its torch module; Apple has a single device."""
        return () if self.device.type == "mps" else (self.device,)

    @property
    def _module(self) -> Any:
        return torch.get_device_module(self.device)


class Recorder:
    """Records work in a separate queue, in one pool of memory, so recordings must not be replayed concurrently."""

    def __init__(self, device: torch.device) -> None:
        self._accelerator = backend(device)
        self._stream, _ = lend_stream(device, self, StreamUse.RECORD)
        # torch frees a pool of memory with the last graph that uses it, and fails an internal assertion if a later
        # graph requests it. So the pool is that of a live graph; if there is none, torch creates a new one.
        self._graphs = weakref.WeakSet[Any]()

    @property
    def recording(self) -> bool:
        """True if this thread's queue is being recorded, by hfusion or by user code."""
        return is_recorded(self._accelerator.device)

    def __call__(self, work: Callable[[], T]) -> tuple[Callable[[], object], T]:
        """Return a function that replays ``work``, and its result, which replays overwrite. Raises errors of recording.

        Afterwards the thread's queue and the device's generators are as they were.
        """
        device, current = self._accelerator.device, self._accelerator.current
        generators = getattr(torch.get_device_module(device), "default_generators", ())
        with current(), warnings.catch_warnings():
            # Nothing was launched on this device, so a replay would silently do nothing.
            warnings.filterwarnings("error", message=".*[Gg]raph is empty")
            self._accelerator.wait()
            torch.accelerator.empty_cache()
            live = next(iter(self._graphs), None)
            graph, begin = _new_graph(device, None if live is None else live.pool())
            states = [(one, one.clone_state()) for one in generators[device.index : device.index + 1]]
            try:
                with self._stream:
                    begin()
                    try:
                        result = work()
                    except BaseException:
                        # Errors of ending the capture would hide the original one.
                        with suppress(Exception):
                            graph.capture_end()
                        raise
                    graph.capture_end()
            except BaseException:
                # A failed capture spoils the state of the device's generator.
                for generator, state in states:
                    generator.graphsafe_set_state(state)
                raise
            self._graphs.add(graph)

        def replay() -> None:
            with current():
                graph.replay()

        return replay, result


@functools.cache
def backend(device: torch.device) -> Backend:
    """Return the backend of ``device``."""
    if device.type == "cpu":
        return Backend(device)
    # Apple's processors share memory with the host, and the meta device has no copies: there is nothing to pin. What
    # CUDA alone does here is untested on other devices.
    is_cuda = device.type == "cuda"
    return Accelerator(device, pins=device.type not in ("mps", "meta"), hands_over=is_cuda, fuses=is_cuda)


def memory_of(size: int, *, pinned: bool) -> int:
    """Return the host memory for ``size`` pinned bytes: torch rounds up to a power of two."""
    return 1 << (size - 1).bit_length() if pinned and size else size


def accelerators() -> list[torch.device]:
    """Return the accelerators of this machine that torch can use."""
    current = torch.accelerator.current_accelerator(check_available=True)
    if current is None:
        return []
    return [torch.device(current.type, index) for index in range(torch.accelerator.device_count())]


def _in_use() -> list[torch.device]:
    """Return the accelerators if this process has used one; a query of their streams or generators starts them."""
    current = torch.accelerator.current_accelerator()
    if current is None:
        return []
    started = getattr(torch.get_device_module(current), "is_initialized", None)
    return accelerators() if started is None or started() else []


def current_queue() -> AbstractContextManager[Any]:
    """Context manager for any thread: operators run in the queue this thread now uses on the current accelerator."""
    return torch.accelerator.current_stream() if _in_use() else nullcontext()


def is_recorded(device: torch.device) -> bool:
    """Return whether this thread's queue of ``device`` is being recorded, by hfusion or by user code."""
    is_capturing = getattr(torch.get_device_module(device), "is_current_stream_capturing", None)
    return is_capturing is not None and bool(is_capturing())


@contextmanager
def random_states_kept() -> Iterator[None]:
    """Context manager: restore torch's random states of all devices at the end."""
    backends = list(map(backend, (torch.device("cpu"), *_in_use())))
    states_before = [device_backend.random_states() for device_backend in backends]
    with waiting_seeds_kept():
        try:
            yield
        finally:
            for device_backend, states in zip(backends, states_before, strict=True):
                device_backend.set_random_states(states)


def seed_in_use(seed: int) -> None:
    """Seed as `torch.manual_seed` does, but only devices in use: for others torch formats the stack at every call."""
    random: Any = torch.random
    random.default_generator.manual_seed(seed)
    if devices := _in_use():
        module = torch.get_device_module(devices[0])
        # MPS has a single device.
        (getattr(module, "manual_seed_all", None) or module.manual_seed)(seed)


def active_autocast() -> tuple[tuple[str, torch.dtype], ...] | None:
    """Return the device types for which autocast is on, each with its dtype; None if there are none."""
    if not is_any_autocast_enabled():
        return None
    kinds = ("cpu", *types())
    return tuple((kind, torch.get_autocast_dtype(kind)) for kind in kinds if torch.is_autocast_enabled(kind)) or None


def without_autocast(active: Any) -> AbstractContextManager[Any]:
    """Context manager: turn off autocast for the device types that `active_autocast` returned."""
    stack = ExitStack()
    for kind, _ in active or ():
        stack.enter_context(torch.autocast(kind, enabled=False))
    return stack if active else nullcontext()


_ATTENTION = ("flash", "mem_efficient", "math")


def attention_kernels() -> list[bool]:
    """Return the enabled attention kernels: flash, memory-efficient, and plain operators."""
    return [getattr(torch.backends.cuda, f"{kernel}_sdp_enabled")() for kernel in _ATTENTION]


def use_attention_kernels(flags: Sequence[bool]) -> None:
    """Restore the flags that `attention_kernels` returned."""
    for kernel, flag in zip(_ATTENTION, flags, strict=True):
        getattr(torch.backends.cuda, f"enable_{kernel}_sdp")(flag)


def computes_by_tf32(device: torch.device, operators: Iterable[str]) -> bool:
    """Return whether torch's settings let any of ``operators`` compute float32 in TF32, with 10 bits, on ``device``.

    Source: https://docs.pytorch.org/docs/stable/notes/cuda.html
    """
    if device.type != "cuda" or torch.version.hip or torch.cuda.get_device_capability(device) < (8, 0):
        return False
    backends: Any = torch.backends
    settings = (backends.cudnn.conv, backends.cudnn.rnn, backends.cuda.matmul)
    by_tf32 = [setting.fp32_precision == "tf32" for setting in settings]
    return any(
        rounds and any(part in name for part in parts)
        for name in operators
        for rounds, parts in zip(by_tf32, _MULTIPLYING, strict=True)
    )


def attention_drops(device: torch.device, dtype: torch.dtype) -> bool:
    """Return whether torch's fused attention supports dropout there; elsewhere torch uses separate operators."""
    return device.type == "cuda" and dtype in (torch.float32, torch.float16, torch.bfloat16)


# Graphs of work that a device repeats by one call (CUDA graphs).


def _new_graph(device: torch.device, pool: Any) -> tuple[Any, Callable[[], None]]:
    """Return a graph of ``device`` with memory from ``pool``, and the function that begins to record it.

    CUDA and ROCm use `torch.cuda.CUDAGraph`. Other devices use `torch.accelerator.Graph`, which exists since torch 2.13
    and refuses CUDA and ROCm as of 2.14. Raises RuntimeError if torch cannot record graphs there.
    """
    # With thread_local, other threads, such as those that load data, may keep using the device.
    options = {"pool": pool, "capture_error_mode": "thread_local"}
    if device.type == "cuda":
        graph: Any = torch.cuda.CUDAGraph()
        return graph, partial(graph.capture_begin, **options)
    if not hasattr(torch.accelerator, "Graph"):
        raise RuntimeError("there is no torch.accelerator.Graph")
    graph = torch.accelerator.Graph(**options)
    return graph, graph.capture_begin


# Keep the memory of large temporaries in the process, instead of handing it back at every step.
#
# Fused steps make temporaries B times as large as a single model's. glibc's malloc maps such blocks from the kernel and
# unmaps them when they are freed, so that every step pays for its page faults again; that can cost more than fusion
# gains. Source: https://man7.org/linux/man-pages/man3/mallopt.3.html
#
# Threads other than the first have heaps of at most 64 MiB; larger blocks are mapped again each time, whatever the
# settings. If threads share the heap of the process instead, they reuse such blocks, but wait for its lock. For
# parameters too large for a heap (four MLPs with layers of 2304 x 2304), `hfusion.train` takes 1.3 times as long with
# separate heaps. For smaller parameters, a compiled step on two threads takes up to 1.8 times as long with a shared
# heap (16 GRUs).

# Constants of malloc.h.
_TRIM_THRESHOLD = -1
_TOP_PAD = -2
_MMAP_THRESHOLD = -3
_ARENA_MAX = -8
_LARGE = (1 << 31) - 1
_HEAP_BYTES = 64 << 20


def keep_large_blocks(largest: int) -> bool:
    """Tell glibc's malloc to reuse freed blocks of any size, for the whole process.

    The environment variable ``HFUSION_KEEP_MEMORY=0`` leaves malloc alone. Returns whether anything was set: other
    platforms and other C libraries are left as they are.

    Args:
        largest: bytes of the largest tensor that threads are known to allocate. They get heaps of their own if it fits
            there; malloc does not change that once a second thread has allocated memory.
    """
    mallopt = _mallopt()
    if os.environ.get("HFUSION_KEEP_MEMORY", "1") == "0" or mallopt is None:
        return False
    heaps = 2 * (os.cpu_count() or 1) if largest < _HEAP_BYTES else 1
    # A heap whose blocks are all free stays if it is not larger than the pad.
    options = {_MMAP_THRESHOLD: _LARGE, _TRIM_THRESHOLD: _LARGE, _TOP_PAD: _HEAP_BYTES, _ARENA_MAX: heaps}
    return all(bool(mallopt(option, value)) for option, value in options.items())


@functools.cache
def _mallopt() -> Callable[[int, int], int] | None:
    return ctypes.CDLL(None).mallopt if platform.libc_ver()[0] == "glibc" else None


# Work recorded on a device for replay, and the numbers of the host that it reads.

# The most kinds that are recorded, since each recording keeps its memory.
MAX_RECORDED = 4
# Largest number of kinds of work that are counted.
MAX_COUNTED = 64
# How often tensors may move before recording is given up.
MAX_MOVES = 3

Recorded = TypeVar("Recorded")


class Recordings(dict[Hashable, Recorded]):
    """Recordings by kind of work, of which a few are made.

    Attributes:
        record: the recorder, or the reason why there is none.
        why: the reason why nothing more is recorded; empty if recording is enabled.
    """

    def __init__(self, record: Recorder | str, after: int) -> None:
        """Create an empty dict. ``after``: work of a kind is recorded when it is done for that time."""
        super().__init__()
        self.record, self.why = record, record if isinstance(record, str) else ""
        self._after, self._counts, self._moves = after, Counter[Hashable](), 0

    def find(self, kind: Hashable, record: Callable[[], Recorded]) -> Recorded | None:
        """Count work of a kind. Return its recording, which ``record`` makes when it is time; None if there is none.

        If ``record`` raises, nothing is recorded from then on.
        """
        if kind in self or self.why or len(self) == MAX_RECORDED:
            return self.get(kind)
        if len(self._counts) == MAX_COUNTED:
            self._counts.clear()
        self._counts[kind] += 1
        if self._counts[kind] >= self._after:
            try:
                self[kind] = record()
            except Exception as error:
                self.why = first_line(error)[:300]
                self.clear()
        return self.get(kind)

    def forget(self) -> None:
        """Drop all recordings, because the tensors have moved."""
        if not self:
            return
        self.clear()
        self._moves += 1
        if self._moves == MAX_MOVES:
            self.why = f"its tensors have moved {MAX_MOVES} times"


# Numbers that the host knows and a device computes with.


class DeviceNumbers:
    """A copy of host numbers on ``device`` in ``dtype``, in the same memory as long as their shape stays the same.

    Recorded launches therefore read the latest numbers at each replay.
    """

    def __init__(self, device: torch.device, dtype: torch.dtype) -> None:
        self._device, self._dtype = device, dtype
        self._device_copy: Tensor | None = None
        # The numbers last passed to `write_changed`. A caller whose kernel updates the device copy updates these, too.
        self.host_copy: Tensor | None = None

    def write_changed(self, numbers: Tensor) -> Tensor:
        """Copy ``numbers`` to the device if they differ from `host_copy`; return the device tensor."""
        previous, self.host_copy = self.host_copy, numbers
        device_copy = self._device_copy
        if device_copy is not None and previous is not None and same_bits(previous, numbers):
            return device_copy
        return self.write(numbers)

    def write(self, numbers: Tensor) -> Tensor:
        """Copy ``numbers`` to the device unconditionally; return the device tensor."""
        device_copy = self._device_copy
        if device_copy is None or device_copy.shape != numbers.shape:
            device_copy = self._device_copy = torch.empty(numbers.shape, dtype=self._dtype, device=self._device)
        if not device_copy.is_cpu:
            numbers = _pinned(numbers.to(self._dtype), self._device)
        return device_copy.copy_(numbers, non_blocking=True)


def sent(numbers: Tensor, device: torch.device) -> Tensor:
    """Return ``numbers`` on ``device``; a copy from the host does not block Python."""
    return _pinned(numbers, device).to(device, non_blocking=True) if numbers.is_cpu else numbers.to(device)


def _pinned(numbers: Tensor, device: torch.device) -> Tensor:
    # torch does not reuse pinned memory before the copies from it are done.
    return numbers.pin_memory() if backend(device).pins else numbers


# Random states per task. torch's generators belong to the process, so threads take turns.


def _before_fork() -> None:
    """Take the locks, since a fork while another thread holds them would leave them locked forever in the child."""
    for lock in (tracing, *seeding_locks()):
        lock.__enter__()


def _after_fork() -> None:
    for lock in (*seeding_locks(), tracing):
        lock.__exit__(None, None, None)


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_after_fork, after_in_child=_after_fork)


@dataclass
class Generators:
    """A task's random states, for the CPU and its device. Initially those of ``torch.manual_seed(seed)``."""

    seed: int
    states: dict[str, Tensor] = field(default_factory=dict)

    @contextmanager
    def active(self, device: torch.device) -> Iterator[None]:
        """Context manager: torch draws from these states. Other tasks wait for their turn."""
        with tracing:
            device_backend = backend(device)
            states_before = device_backend.random_states()
            device_backend.set_random_states({kind: self._state(kind) for kind in states_before})
            try:
                yield
            finally:
                # A thread that hung may have lost its turn.
                if tracing.owned:
                    self.states.update(device_backend.random_states())
                    device_backend.set_random_states(states_before)

    def copy(self) -> Generators:
        return Generators(self.seed, dict(self.states))

    def _state(self, kind: str) -> Tensor:
        if kind not in self.states:
            self.states[kind] = torch.Generator(kind).manual_seed(self.seed).get_state()
        return self.states[kind]


@contextmanager
def python_draws_kept() -> Iterator[None]:
    """Context manager: restore the random states of Python and numpy at the end."""
    python, numpy = random.getstate(), np.random.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)


@contextmanager
def draws_kept() -> Iterator[None]:
    """Context manager: restore torch's random states at the end. Other threads draw from the same states meanwhile."""
    with tracing, random_states_kept():
        yield
