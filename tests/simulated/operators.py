"""The operators of a simulated device: those of the CPU, on the same memory, done when their queue comes to them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor

from tests.simulated.queues import QUEUES, Block

TYPE = "sim"

_GENERATORS: dict[int, torch.Generator] = {}


def generator(device: int) -> torch.Generator:
    """The random number generator of a device."""
    if device not in _GENERATORS:
        _GENERATORS[device] = torch.Generator()
    return _GENERATORS[device]


class Poisoned(AssertionError):
    """An operator reads unwritten memory."""


class Made(NamedTuple):
    """Shape, strides and dtype of a tensor that an operator creates."""

    size: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype


@cache
def _writes(op: Any) -> tuple[frozenset[int], frozenset[str]]:
    """The arguments that an operator writes, by place and by name."""
    written = [
        (index, argument)
        for index, argument in enumerate(op._schema.arguments)
        if argument.alias_info and argument.alias_info.is_write
    ]
    return frozenset(index for index, _ in written), frozenset(argument.name for _, argument in written)


def _tensors(value: Any) -> list[Tensor]:
    if isinstance(value, Tensor):
        return [value]
    return [tensor for element in value for tensor in _tensors(element)] if isinstance(value, list | tuple) else []


def _changed(value: Any, change: Callable[[Tensor], Any]) -> Any:
    if isinstance(value, Tensor):
        return change(value)
    if isinstance(value, list | tuple):
        return type(value)(_changed(element, change) for element in value)
    return torch.device("cpu") if isinstance(value, torch.device) else value


def _look(tensor: Tensor) -> Any:
    return Made(tuple(tensor.size()), tensor.stride(), tensor.dtype), tensor.is_cpu


_MADE: dict[Any, Any] = {}


def _made(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Infer the outputs of an operator for such arguments, once, from arguments of zeros and ones."""
    key = op, repr(_changed((args, tuple(kwargs.items())), _look))
    if key not in _MADE:
        _MADE[key] = _changed(_again(op, args, kwargs, _stand_in), lambda tensor: _look(tensor)[0])
    return _MADE[key]


def _stand_in(tensor: Tensor) -> Tensor:
    stand_in = torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    return stand_in.fill_(1) if tensor.dtype.is_floating_point else stand_in.zero_()


def _again(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], change: Callable[[Tensor], Any]) -> Any:
    with torch._C._AutoDispatchBelowAutograd():
        return op(*_changed(tuple(args), change), **{name: _changed(value, change) for name, value in kwargs.items()})


def alias(tensor: Tensor) -> Tensor:
    """The memory of a tensor as one of the host; a number of the host as it is now."""
    if tensor.is_cpu:
        if tensor.dim():
            raise RuntimeError(f"a tensor of the host, of size {list(tensor.size())}, among those of a device")
        return tensor.clone()
    if not tensor.untyped_storage().nbytes():
        return torch.empty_strided(tensor.size(), tensor.stride(), dtype=tensor.dtype)
    return _block(tensor).alias(tensor)


def _check(tensor: Tensor, name: str) -> None:
    """Keep kernels from memory that is not theirs: they trust truth values, and some of them indices."""
    if tensor.dtype is torch.bool:
        tensor.view(torch.uint8).clamp_(max=1)
    elif tensor.dtype is torch.int64 and name != "copy" and bool((tensor == -1).any()):
        raise Poisoned(f"{name} reads an index that nobody has written")


def _block(tensor: Tensor) -> Block:
    block = QUEUES.block(tensor)
    assert block is not None
    return block


def _device(tensors: Sequence[Tensor]) -> int:
    devices = {tensor.device.index for tensor in tensors if not tensor.is_cpu}
    if len(devices) != 1:
        raise RuntimeError(f"tensors of several devices: {sorted(devices)}")
    return int(devices.pop())


def run(op: Any, *args: Any, **kwargs: Any) -> Any:
    """Ask the current queue for an operator."""
    tensors = _tensors([*args, *kwargs.values()])
    device = _device(tensors) if tensors else torch.device(kwargs["device"]).index
    stream = QUEUES.current(device)
    if {torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape} & set(op.tags):
        return _now(op, args, kwargs, device, stream)
    # What is asked for now has its addresses and numbers now.
    indices, names = _writes(op)
    written = _tensors([value for index, value in enumerate(args) if index in indices])
    written += _tensors([value for name, value in kwargs.items() if name in names])
    fresh = [result for result in op._schema.returns if result.alias_info is None]
    if not fresh:
        outputs: Any = None
        if op._overloadname.endswith("out"):
            _resize(op, args, kwargs, written)
    elif len(fresh) == len(op._schema.returns):
        outputs = _changed_made(_made(op, args, kwargs), device)
    else:
        raise NotImplementedError(f"{op} writes and makes tensors")
    aliases = {id(tensor): alias(tensor) for tensor in tensors}
    held = (
        _changed(args, lambda tensor: aliases[id(tensor)]),
        {name: _changed(value, lambda tensor: aliases[id(tensor)]) for name, value in kwargs.items()},
    )
    if torch.Tag.nondeterministic_seeded in op.tags:
        held[1]["generator"] = _drawn(op, args, kwargs, device)
    results = _tensors(outputs if isinstance(outputs, list | tuple) else [outputs])
    targets = [alias(tensor) for tensor in results]

    read = [alias for key, alias in aliases.items() if key not in {*map(id, written)}]

    def work() -> None:
        for tensor in read:
            _check(tensor, str(op))
        computed = op(*held[0], **held[1])
        for target, source in zip(
            targets,
            _tensors(computed if isinstance(computed, list | tuple) else [computed]) if targets else (),
            strict=True,
        ):
            target.copy_(source)

    reads = [tensor for tensor in tensors if not tensor.is_cpu]
    QUEUES.launch(stream, str(op), reads, [*written, *results], work)
    if outputs is not None:
        return outputs
    outs = written if len(op._schema.returns) > 1 else written[0] if op._schema.returns else None
    return tuple(outs) if isinstance(outs, list) else outs


def _resize(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], written: Sequence[Tensor]) -> None:
    """Give tensors for results the sizes that they will have."""
    results = _made(op, args, kwargs)
    for tensor, result in zip(
        written,
        results if isinstance(results, list | tuple) and not isinstance(results, Made) else [results],
        strict=True,
    ):
        if tensor.size() != result.size:
            tensor.resize_(result.size)


def _changed_made(outputs: Any, device: int) -> Any:
    if isinstance(outputs, Made):
        return torch.empty_strided(outputs.size, outputs.stride, dtype=outputs.dtype, device=torch.device(TYPE, device))
    if isinstance(outputs, list | tuple):
        return type(outputs)(_changed_made(element, device) for element in outputs)
    return outputs


def _drawn(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: int) -> torch.Generator:
    """Copy the generator in its current state, and advance the original as if the operator had drawn from it."""
    advancing = kwargs.get("generator") or generator(device)
    current = torch.Generator()
    current.set_state(advancing.get_state())
    _again(op, args, {**kwargs, "generator": advancing}, _stand_in)
    return current


def _now(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any], device: int, stream: int) -> Any:
    """Run an operator whose result the host must know: wait for the queue."""
    QUEUES.wait_here(stream)
    results = _again(op, args, kwargs, alias)
    return _changed(results, lambda tensor: tensor.to(torch.device(TYPE, device)))


def copy(source: Tensor, target: Tensor, non_blocking: bool = False) -> Tensor:
    """Between host and device, or on one of them; from pinned memory beside the host, if that is asked for."""
    device = target.device.index if source.is_cpu else source.device.index
    stream, host = QUEUES.current(device), source.is_cpu or target.is_cpu
    pinned = all(QUEUES.block(tensor) is not None for tensor in (source, target) if tensor.is_cpu)
    # What is not pinned is first copied to where it is.
    QUEUES.staged += source.is_cpu and not pinned
    into = _host(target) if target.is_cpu else alias(target)
    out = (_host(source) if pinned else source.clone()) if source.is_cpu else alias(source)
    with QUEUES.beside(stream, stream if host else QUEUES.current(target.device.index)):
        QUEUES.launch(stream, "copy", [source], [target], lambda: _copied(into, out))
    if host and not (non_blocking and pinned) and not (source.is_cpu and non_blocking):
        QUEUES.wait_here(stream)
    return target


def _host(tensor: Tensor) -> Tensor:
    """A tensor of the host that holds its memory, as far as that is pinned."""
    block = QUEUES.block(tensor)
    return tensor if block is None else block.alias(tensor)


def _copied(into: Tensor, out: Tensor) -> None:
    _check(out, "copy")
    into.copy_(out)


def _scalar(tensor: Tensor) -> Any:
    QUEUES.wait_here(QUEUES.current(tensor.device.index))
    return alias(tensor).item()


def _convolution(*args: Any) -> Tensor:
    return run(torch.ops.aten.convolution.default, *args)  # type: ignore[no-any-return]


def _convolution_backward(grad: Tensor, x: Tensor, weight: Tensor, *args: Any) -> Any:
    *rest, mask = args
    # As the CPU's own derivative names them.
    return run(torch.ops.aten.convolution_backward.default, grad, x, weight, None, *rest, mask)


def _dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    if train is False or p == 0:
        return x.clone(), torch.ones_like(x, dtype=torch.bool)
    mask = torch.empty_like(x, dtype=torch.bool).bernoulli_(1 - p)
    return x * mask * (1 / (1 - p) if p < 1 else 0.0), mask


def _record_stream(tensor: Tensor, stream: torch.Stream) -> None:
    if tensor.untyped_storage().nbytes():
        # As device.cpp numbers them.
        QUEUES.used(tensor.untyped_storage().data_ptr(), stream.stream_id or -1 - stream.device_index)


def register() -> list[torch.library.Library]:
    """Register these operators with torch, for as long as the returned libraries live."""
    aten_library = torch.library.Library("aten", "IMPL")
    aten_library.impl("_copy_from", copy, "PrivateUse1")
    aten_library.impl("_local_scalar_dense", _scalar, "PrivateUse1")
    aten_library.impl("convolution_overrideable", _convolution, "PrivateUse1")
    aten_library.impl("convolution_backward_overrideable", _convolution_backward, "PrivateUse1")
    aten_library.impl("native_dropout", _dropout, "PrivateUse1")
    aten_library.impl("record_stream", _record_stream, "PrivateUse1")
    fallback_library = torch.library.Library("_", "IMPL")
    fallback_library.fallback(run, "PrivateUse1")
    return [aten_library, fallback_library]
