"""Measured prices: every candidate runs, forward and backward, on tensors of its own.

The time of a lowering depends on the strides of its operands. So results keep the strides that a call gave them,
and the operands of later calls are made with these.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch.utils import _pytree as pytree

from hfusion.core.layout import Conversion, Layout, Listed
from hfusion.core.tree import leaves, map_leaves
from hfusion.device.backend import backend
from hfusion.device.generators import draws_kept
from hfusion.ops.rule import Call, MemberScalars, Operand, Scalar, Value, hint
from hfusion.passes.candidates import route
from hfusion.passes.cost.flops import family
from hfusion.passes.cost.price import Model
from hfusion.passes.cost.times import Times
from hfusion.passes.layouts import Price

# Families whose kernels accept any values, and whose time does not depend on the values.
_CONVOLUTIONS = frozenset(f"conv{kind}{dims}d" for kind in ("", "_transpose") for dims in (1, 2, 3))
MEASURED = _CONVOLUTIONS | {"batch_norm", "instance_norm", "group_norm", "linear", "scaled_dot_product_attention"}
RUNS = 7

# The strides of a value: of one tensor, or of each in a nest.
Strides: TypeAlias = tuple[Any, ...]


@dataclass(frozen=True, eq=False)
class TimedCall:
    """A call to time, with its own tensors: ``run`` makes the call, ``leaves`` get gradients, ``key`` identifies it."""

    run: Callable[[], Any]
    leaves: Sequence[Tensor]
    key: str


@dataclass(frozen=True, eq=False)
class Measured:
    """Prices of ``model``, replaced by measured times where there are some. Conversions stay estimated.

    ``lying``: the strides of a node's value in a layout, from the first call that gave it.
    """

    model: Model
    times: Times
    lying: dict[tuple[fx.Node, Layout], Strides] = field(default_factory=dict)

    def calls(self, node: fx.Node, calls: Sequence[Call]) -> Sequence[Price]:
        estimates = self.model.calls(node, calls)
        all_sized = all(map(_sized, (node, *node.all_input_nodes)))
        if not all_sized or not _runs(node, calls) or any(call.layout is Layout.SHARED for call in calls):
            return estimates
        with apart(self.model.device):
            trials = [self._trial(node, call) for call in calls]
            for call, trial in zip(calls, trials, strict=True):
                self.lying.setdefault((node, call.layout), _strides(trial.run()))
            if any(call.lowering.view.likely for call in calls):
                return estimates
            missing = [trial for trial in trials if self.times.get(trial.key) is None]
            new_times = measure(missing, self.model.device)
            self.times.measured.update({trial.key: seconds for trial, seconds in zip(missing, new_times, strict=True)})
        return [Price(e.estimate, self.times.get(t.key)) for e, t in zip(estimates, trials, strict=True)]

    def _trial(self, node: fx.Node, call: Call) -> TimedCall:
        operands = _TrialTensors(self)
        args, kwargs = operands.fill(call.args), operands.fill(dict(call.kwargs))
        return TimedCall(lambda: call.fn(*args, **kwargs), operands.leaves, self._key(node, call, operands.described))

    def move(self, value: Value, convert: Conversion) -> float:
        return self.model.move(value, convert)

    def _key(self, node: fx.Node, call: Call, described: Sequence[str]) -> str:
        """Return a text with everything that the time depends on, except the machine."""
        kind = self.model.device.type
        rest = [repr(item) for item in _plain((call.args, dict(call.kwargs)))]
        autocast = str(torch.get_autocast_dtype(kind)) if torch.is_autocast_enabled(kind) else ""
        name = f"{node.target} {getattr(call.fn, '__name__', call.fn)} B={self.model.members} {autocast}"
        return " | ".join([name.strip(), *described, " ".join(rest)])


class _TrialTensors:
    """Tensors for the operands of one call: ``leaves`` get a gradient, ``described`` has a text for each tensor."""

    def __init__(self, prices: Measured) -> None:
        self.prices = prices
        self.generator = torch.Generator(prices.model.device).manual_seed(0)
        self.leaves: list[Tensor] = []
        self.described: list[str] = []

    def fill(self, arguments: Any) -> Any:
        if isinstance(arguments, Value):
            return self._operand(Operand(arguments, arguments.layout))
        if isinstance(arguments, Operand):
            return self._operand(arguments)
        if isinstance(arguments, Scalar):
            return _number(arguments.example)
        if isinstance(arguments, MemberScalars):
            return Listed(arguments.values)
        if isinstance(arguments, Mapping):
            return {name: self.fill(item) for name, item in arguments.items()}
        if isinstance(arguments, list | tuple):
            return type(arguments)(self.fill(item) for item in arguments)
        return _number(arguments)

    def _operand(self, operand: Operand) -> Any:
        value, members = operand.value, self.prices.model.members
        converted = self._make(value.example, value.layout, self.prices.lying.get((value.node, value.layout)))
        for fn, number, _ in route(operand, members):
            converted = fn(converted, number)
        tracked = value.node in self.prices.model.tracked
        result = map_leaves(converted, Tensor, lambda x: self._leaf(x, tracked))
        first = next(leaves(result, Tensor), None)
        if first is not None:
            kind = str(first.dtype).removeprefix("torch.")
            mark = " grad" if first.requires_grad else ""
            self.described.append(
                f"{operand.layout.value} {kind}{list(first.shape)} strides {list(first.stride())}{mark}"
            )
        return result

    def _leaf(self, x: Tensor, tracked: bool) -> Tensor:
        x = x.detach()
        if tracked and x.is_floating_point():
            self.leaves.append(x.requires_grad_())
        return x

    def _make(self, example: Any, layout: Layout, lying: Strides | None) -> Any:
        if isinstance(example, list | tuple):
            forms = lying if lying is not None else (None,) * len(example)
            parts = [[self._make(part, layout, form)] for part, form in zip(example, forms, strict=True)]
            if layout is not Layout.LISTED:
                return [part for (part,) in parts]
            return Listed([part[b] for (part,) in parts] for b in range(self.prices.model.members))
        if not isinstance(example, Tensor):
            return _number(example)
        if layout is Layout.LISTED:
            return Listed(self._tensor(example, Layout.SHARED, lying) for _ in range(self.prices.model.members))
        return self._tensor(example, layout, lying)

    def _tensor(self, example: Tensor, layout: Layout, lying: Strides | None) -> Tensor:
        members, shape = self.prices.model.members, [_number(size) for size in example.shape]
        if layout is Layout.STACKED:
            shape = [members, *shape]
        elif layout is Layout.PACKED:
            shape[1] *= members
        if lying is None and layout is Layout.SHARED:
            lying = tuple(_number(stride) for stride in example.stride())
        # Expanded tensors are stored once; tensors that overlap in other ways are copied.
        sizes = shape if lying is None else [1 if stride == 0 else n for n, stride in zip(shape, lying, strict=True)]
        device, dtype = self.prices.model.device, example.dtype
        if lying is None or not _apart_in_memory(sizes, lying):
            tensor = torch.empty(shape, dtype=dtype, device=device)
        else:
            tensor = torch.empty_strided(sizes, lying, dtype=dtype, device=device)
        if tensor.is_floating_point():
            tensor.copy_(torch.rand(tensor.shape, generator=self.generator, device=device))
        else:
            # An index that is valid everywhere, a mask that hides nothing.
            tensor.fill_(dtype is torch.bool)
        return tensor.expand(shape)


def measure(trials: Sequence[TimedCall], device: torch.device) -> list[float]:
    """Return the seconds of each trial, with its backward: the minimum of `RUNS` runs, with trials interleaved."""
    grads = [[torch.ones_like(x) for x in _differentiable(trial.run())] for trial in trials]
    best = [math.inf] * len(trials)
    for _ in range(RUNS):
        for k, trial in enumerate(trials):
            backend(device).wait()
            start = time.perf_counter()
            outputs = _differentiable(trial.run())
            if outputs:
                torch.autograd.grad(outputs, trial.leaves, grads[k], allow_unused=True)
            backend(device).wait()
            best[k] = min(best[k], time.perf_counter() - start)
    return best


def _differentiable(result: Any) -> list[Tensor]:
    return [x for x in leaves(result, Tensor) if x.requires_grad]


def apart(device: torch.device) -> ExitStack:
    """Return an active context: gradients are enabled, and the random state is restored when it is closed."""
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.enable_grad())
    stack.enter_context(draws_kept())
    return stack


def _runs(node: fx.Node, calls: Sequence[Call]) -> bool:
    """True if a node can run on arbitrary numbers: of a family that is measured, elementwise, or a view."""
    target, views = node.target, any(call.lowering.view.likely for call in calls)
    if views or not isinstance(target, OpOverload):
        return views
    measurable = family(node) in MEASURED or "pool" in family(node) or torch.Tag.pointwise in target.tags
    return measurable and not target._schema.is_mutable


def _sized(node: fx.Node) -> bool:
    """True if all sizes of a value are known; sizes that depend on values of tensors are not."""
    parts = pytree.tree_leaves(node.meta.get("val"))
    sizes = [size for part in parts for size in (part.shape if isinstance(part, Tensor) else (part,))]
    return all(hint(size) is not None for size in sizes if isinstance(size, int | torch.SymInt))


def _apart_in_memory(sizes: Sequence[int], strides: Sequence[int]) -> bool:
    """True if no two elements share memory."""
    reach = 1
    for stride, size in sorted((stride, size) for size, stride in zip(sizes, strides, strict=True) if size != 1):
        if stride < reach:
            return False
        reach = stride * size
    return True


def _number(number: Any) -> Any:
    """A number that varies as it was at capture."""
    return hint(number) if isinstance(number, torch.SymInt) else number


def _strides(result: Any) -> Strides:
    if isinstance(result, Listed):
        return _strides(result[0])
    if isinstance(result, Tensor):
        return tuple(result.stride())
    return tuple(_strides(part) for part in result) if isinstance(result, list | tuple) else ()


def _plain(arguments: Any) -> Iterator[Any]:
    """The arguments that are no tensors, sizes as numbers."""
    for item in pytree.tree_leaves(arguments):
        if isinstance(item, Scalar):
            yield _number(item.example)
        elif not isinstance(item, Value | Operand) and not callable(item):
            yield _number(item)
