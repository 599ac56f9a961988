"""A request to compile a program of a step, as JSON, for a process that has neither the models nor their code."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import BoundProgram, Compiled
from hfusion.compiler.graph_text import Unwritable
from hfusion.compiler.serialized_program import read_compiled, write_compiled
from hfusion.core.calls import StackedInput
from hfusion.core.memory import is_plain
from hfusion.core.program import Kind
from hfusion.device.backend import attention_kernels, use_attention_kernels
from hfusion.step.step_graph import StepCall, StepSource
from hfusion.torch_private.inductor_patches import changed_values, under_values

_PLAIN = (bool, int, float, str, type(None))


@dataclass(frozen=True, eq=False)
class CompileRequest:
    """A request to compile a program. ``content`` holds plain values only, see `read_request`."""

    content: Mapping[str, Any]

    @cached_property
    def digest(self) -> str:
        return hashlib.sha256(json.dumps(self.content, sort_keys=True).encode()).hexdigest()

    def key(self, environment: Mapping[str, Any]) -> str:
        """Return a hash of the request and of ``environment``; see `hfusion.step.program_cache.circumstances`."""
        content = json.dumps(environment, sort_keys=True) + self.digest
        return hashlib.sha256(content.encode()).hexdigest()


def write_request(source: StepSource, autocast: Any) -> CompileRequest | None:
    """Return the request for the program of ``source``; None if it cannot be written as plain values.

    ``autocast``: the active autocast.
    """
    places = {id(holder[name]): index for index, (holder, name) in enumerate(source.tensors.tensor_refs)}

    def written(bound: BoundProgram) -> dict[str, Any]:
        return {**write_compiled(bound.compiled), "places": [places[id(h[n])] for h, n in bound.locations]}

    try:
        return CompileRequest(
            {
                "forward": written(source.forward),
                "loss": written(source.loss),
                "tensors": [_write_tensor(tensor) for tensor in source.values],
                "inputs": [_write_leaf(leaf) for leaf in source.call.inputs.leaves],
                "target": [_write_leaf(leaf) for leaf in source.call.target.leaves],
                "autocast": [[kind, _name(dtype)] for kind, dtype in autocast or ()],
                "settings": _settings(),
            }
        )
    except Unwritable:
        return None


@contextmanager
def read_request(content: Mapping[str, Any]) -> Iterator[StepSource]:
    """Context manager: restore the settings of the request, and return its source, with tensors of zeros.

    Raises the errors of `hfusion.compiler.serialized_program.read_compiled`.
    """
    with ExitStack() as stack:
        stack.enter_context(_under(content["settings"]))
        tensors = {str(index): _read_tensor(written) for index, written in enumerate(content["tensors"])}
        forward, loss = (_read_source(content[name], tensors) for name in ("forward", "loss"))
        inputs, target = (
            Arguments(tuple(_read_leaf(leaf) for leaf in content[name]), None) for name in ("inputs", "target")
        )
        for kind, dtype in content["autocast"]:
            stack.enter_context(torch.autocast(kind, dtype=getattr(torch, dtype)))
        yield StepSource.of(forward, loss, StepCall(inputs, target))


def _read_source(written: Mapping[str, Any], tensors: Mapping[str, Tensor]) -> BoundProgram:
    places = tuple((tensors, str(index)) for index in written["places"])
    names = [name for kind, name in written["slots"] if kind != Kind.INPUT.value]
    kinds = [kind for kind, _ in written["slots"] if kind != Kind.INPUT.value]
    constants = {
        name: holder[key]
        for kind, name, (holder, key) in zip(kinds, names, places, strict=True)
        if kind == Kind.CONSTANT.value
    }
    compiled: Compiled = read_compiled(written, constants)
    return BoundProgram(compiled, places)


def _write_tensor(tensor: Tensor) -> dict[str, Any]:
    if not is_plain(tensor):
        raise Unwritable(f"{type(tensor).__name__} of layout {tensor.layout}")
    return {
        "shape": list(tensor.shape),
        "stride": list(tensor.stride()),
        "dtype": _name(tensor.dtype),
        "device": str(tensor.device),
        "grad": tensor.requires_grad,
    }


def _read_tensor(written: Mapping[str, Any]) -> Tensor:
    dtype, device = getattr(torch, written["dtype"]), torch.device(written["device"])
    tensor = torch.empty_strided(written["shape"], written["stride"], dtype=dtype, device=device)
    return tensor.zero_().requires_grad_(written["grad"])


def _write_leaf(leaf: Any) -> Any:
    if isinstance(leaf, StackedInput):
        return {"stacked": _write_tensor(leaf.tensor)}
    if isinstance(leaf, Tensor):
        return {"tensor": _write_tensor(leaf)}
    if type(leaf) not in _PLAIN:
        raise Unwritable(f"the argument {leaf!r:.80}")
    return leaf


def _read_leaf(written: Any) -> Any:
    if not isinstance(written, Mapping):
        return written
    ((kind, tensor),) = written.items()
    return StackedInput(_read_tensor(tensor)) if kind == "stacked" else _read_tensor(tensor)


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _settings() -> dict[str, Any]:
    """Return the settings of the process that tracing and Inductor depend on."""
    return {
        "threads": torch.get_num_threads(),
        "dtype": _name(torch.get_default_dtype()),
        "deterministic": torch.are_deterministic_algorithms_enabled(),
        "warns": torch.is_deterministic_algorithms_warn_only_enabled(),
        "precision": torch.get_float32_matmul_precision(),
        "mkldnn": torch.backends.mkldnn.enabled,
        "attention": attention_kernels(),
        "inductor": changed_settings(),
    }


def changed_settings() -> dict[str, Any]:
    """Return the settings of Inductor that differ from torch's defaults, by name.

    Raises:
        Unwritable: A value is no plain value, such as a pass of the user's own.
    """
    changed = changed_values()
    for name, value in changed.items():
        items = value if isinstance(value, (list, tuple)) else [value]
        if not all(type(item) in _PLAIN for item in items):
            raise Unwritable(f"the setting {name} of Inductor is {value!r:.80}")
    return changed


@contextmanager
def _under(settings: Mapping[str, Any]) -> Iterator[None]:
    """Context manager: apply the settings that `_settings` returned."""
    before = _settings()
    with ExitStack() as stack:
        if settings["inductor"]:
            stack.enter_context(under_values(settings["inductor"]))
        stack.callback(_set, before)
        _set(settings)
        yield


def _set(settings: Mapping[str, Any]) -> None:
    if settings["threads"] != torch.get_num_threads():
        torch.set_num_threads(settings["threads"])
    torch.set_default_dtype(getattr(torch, settings["dtype"]))
    torch.use_deterministic_algorithms(settings["deterministic"], warn_only=settings["warns"])
    torch.set_float32_matmul_precision(settings["precision"])
    # torch's test utilities forbid any assignment to this flag, even one that does not change it.
    if settings["mkldnn"] != torch.backends.mkldnn.enabled:
        torch.backends.mkldnn.enabled = settings["mkldnn"]
    use_attention_kernels(settings["attention"])
