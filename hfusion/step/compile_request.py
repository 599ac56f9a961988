"""Requests to compile a program of a step, and the process that carries them out while this one trains.

A request holds plain values, and no models or their code. The process stores the compiled programs in a folder. No
thread waits for it: training polls between minibatches. It ends when its job is done, when the owner of the job is
freed, and when this process ends, for whatever reason.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

import torch
from torch import Tensor

from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import BoundProgram
from hfusion.compiler.serialized_program import Unwritable, read_compiled, read_example, write_compiled, write_example
from hfusion.core.calls import StackedInput, is_stacked
from hfusion.core.memory import is_plain
from hfusion.core.program import Kind
from hfusion.device.backend import attention_kernels, use_attention_kernels
from hfusion.step.step_graph import StepCall, StepSource
from hfusion.torch_private.inductor import changed_values, under_values


def write_request(source: StepSource, autocast: Any) -> str | None:
    """Return the request for the program of ``source`` as JSON; None if it cannot be written as plain values.

    ``autocast``: the active autocast.
    """
    places = {id(holder[name]): index for index, (holder, name) in enumerate(source.tensors.tensor_refs)}

    def written(bound: BoundProgram) -> dict[str, Any]:
        return {**write_compiled(bound.compiled), "places": [places[id(h[n])] for h, n in bound.locations]}

    try:
        content = {
            "forward": written(source.forward),
            "loss": written(source.loss),
            "tensors": list(map(_write_leaf, source.values)),
            "inputs": list(map(_write_leaf, source.call.inputs.leaves)),
            "target": list(map(_write_leaf, source.call.target.leaves)),
            "autocast": [[kind, _name(dtype)] for kind, dtype in autocast or ()],
            "settings": {name: read() for name, (read, _) in _SETTINGS.items()},
            "inductor": changed_values(),
        }
        return json.dumps(content, sort_keys=True)
    # Not JSON is an argument of another type, or a setting of Inductor that is a pass of the user's own.
    except (Unwritable, TypeError):
        return None


@contextmanager
def read_request(request: str) -> Iterator[StepSource]:
    """Context manager: apply the settings of the request, and return its source, with tensors of zeros.

    Settings of torch stay as they are afterwards. Raises the errors of
    `hfusion.compiler.serialized_program.read_compiled`.
    """
    content = json.loads(request)
    for name, value in content["settings"].items():
        _SETTINGS[name][1](value)
    tensors = {str(index): _read_leaf(written) for index, written in enumerate(content["tensors"])}
    forward, loss = (_read_source(content[name], tensors) for name in ("forward", "loss"))
    inputs, target = (Arguments(tuple(map(_read_leaf, content[name])), None) for name in ("inputs", "target"))
    with ExitStack() as stack:
        if content["inductor"]:
            stack.enter_context(under_values(content["inductor"]))
        for kind, dtype in content["autocast"]:
            stack.enter_context(torch.autocast(kind, dtype=getattr(torch, dtype)))
        yield StepSource.of(forward, loss, StepCall(inputs, target))


def _read_source(written: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> BoundProgram:
    places = tuple((tensors, str(index)) for index in written["places"])
    slots = [(kind, name) for kind, name in written["slots"] if kind != Kind.INPUT.value]
    constants = {
        name: holder[key]
        for (kind, name), (holder, key) in zip(slots, places, strict=True)
        if kind == Kind.CONSTANT.value
    }
    return BoundProgram(read_compiled(written, constants), places)


def _write_leaf(leaf: Any) -> Any:
    """Return a tensor or an argument as JSON's values. Raises Unwritable."""
    tensor = leaf.tensor if isinstance(leaf, StackedInput) else leaf
    if isinstance(tensor, Tensor) and is_plain(tensor):
        return {"stacked": is_stacked(leaf), **write_example(tensor, {})}
    return leaf


def _read_leaf(written: Any) -> Any:
    leaf = read_example(written, {})
    if not isinstance(leaf, Tensor):
        return leaf
    leaf.detach().zero_()
    return StackedInput(leaf) if written["stacked"] else leaf


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


# The settings of a process that tracing and Inductor depend on: functions that read and set them.
_SETTINGS: Mapping[str, tuple[Any, Any]] = {
    "threads": (torch.get_num_threads, torch.set_num_threads),
    "dtype": (lambda: _name(torch.get_default_dtype()), lambda name: torch.set_default_dtype(getattr(torch, name))),
    "deterministic": (
        lambda: [torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()],
        lambda modes: torch.use_deterministic_algorithms(modes[0], warn_only=modes[1]),
    ),
    "precision": (torch.get_float32_matmul_precision, torch.set_float32_matmul_precision),
    "mkldnn": (lambda: torch.backends.mkldnn.enabled, partial(setattr, torch.backends.mkldnn, "enabled")),
    "attention": (attention_kernels, use_attention_kernels),
}


# The process that compiles.

# The lowest priority: it only uses core time that training leaves. At 5 it displaced one OpenMP thread, for which the
# others waited: 250 steps of a CNN took twice as long on two cores (Xeon).
_NICENESS = 19
# It reads the requests first: until then, whoever starts it waits.
_START = """
import sys
content = sys.stdin.buffer.readline()
sys.path[:] = {path!r}
from hfusion.step.compile_request import main
main(content, {folder!r})
"""
# How many bytes at the end of the log of a failed process are read for its error.
_TAIL = 2000


class BackgroundJob:
    """A compilation for calls like ``call`` in a process of its own, which is killed when ``owner`` is freed.

    Raises OSError if no process can be started.
    """

    def __init__(self, requests: Sequence[str], folder: Path, call: StepCall, owner: object) -> None:
        self.call = call
        path = [str(Path(__file__).parents[2]), *sys.path]
        self._log = tempfile.TemporaryFile()  # noqa: SIM115
        # Its standard input stays open as long as this process lives. Its own process group shields it from Ctrl-C, and
        # lets it be killed together with its children. In a session of its own, its niceness would count within that
        # session only (sched(7), autogroup).
        self._process = subprocess.Popen(
            [sys.executable, "-c", _START.format(path=path, folder=str(folder))],
            stdin=subprocess.PIPE,
            stdout=self._log,
            stderr=self._log,
            process_group=0,
        )
        self.cancel = weakref.finalize(owner, _end, self._process, self._log, os.getpid())
        assert self._process.stdin is not None
        self._process.stdin.write(json.dumps(requests).encode() + b"\n")
        self._process.stdin.flush()

    def ready(self) -> bool:
        """Return immediately whether the job has ended, successfully or not."""
        return self._process.poll() is not None

    def result(self) -> str:
        """Wait for the end of the job. Return an empty string on success, else the reason for the failure."""
        code = self._process.wait()
        self._log.seek(0)
        *_, last = ["", *self._log.read()[-_TAIL:].decode(errors="replace").strip().splitlines()]
        self.cancel()
        return "" if code == 0 else last if code == 1 and last else f"it ended with code {code}: {last or 'no output'}"


def _end(process: subprocess.Popen[bytes], log: Any, starter: int) -> None:
    """Kill the process and its children, and close its files. Does nothing in a fork of the starting process."""
    if os.getpid() != starter:
        return
    if process.poll() is None:
        # It may have ended by itself meanwhile.
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL) if hasattr(os, "killpg") else process.kill()
        process.wait()
    assert process.stdin is not None
    # The process may have ended before it read all of its input.
    with suppress(BrokenPipeError):
        process.stdin.close()
    log.close()


def main(content: bytes, folder: str) -> NoReturn:
    """Entry point of the process: compile the requests ``content`` into ``folder``, or print why one failed."""
    threading.Thread(target=_end_with_parent, daemon=True).start()
    if hasattr(os, "nice"):
        os.nice(_NICENESS)
    # Imported late: the process that only starts jobs does not need these modules here.
    from hfusion.step import program_cache
    from hfusion.step.compiled_step import compile_program

    why = ""
    try:
        for request in json.loads(content):
            with read_request(request) as source:
                result = compile_program(source)
            if not program_cache.keep(request, result, folder=Path(folder)):
                why = "what inductor made of it cannot be handed over"
    except Exception as error:
        why = error_text(error)
    print(why, flush=True)
    # Skip torch's cleanup at exit.
    os._exit(1 if why else 0)


def _end_with_parent() -> None:
    """Kill this process group when the parent is gone, which closes the other end of standard input."""
    os.read(0, 1)
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def error_text(error: Exception) -> str:
    """Return the error as one line, with the remedy if a C++ compiler is missing."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = f"{type(error).__name__}: {lines[0][:300]}" if lines else type(error).__name__
    missing = "cxx" in type(error).__name__.lower() or "compiler" in text.lower()
    return f"{text}; install a C++ compiler (g++ or clang++), or name it in the variable CXX" if missing else text
