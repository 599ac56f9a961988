"""Steps by kernels in C: ``kernels.c`` and what is generated from formulas, compiled at first use.

Without a compiler the optimizers run their formulas in torch (``group.py``) and are only slower.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Iterable, Sequence
from functools import cache, lru_cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hfusion.core.memory import real_view
from hfusion.device import native
from hfusion.device.team import active_team
from hfusion.optim.formula import KernelProgram, Operand, Operation, Stepper, StepTensors, expression
from hfusion.optim.hyper import Settings
from hfusion.torch_private.export_state import tensor_guards

SOURCE = Path(__file__).with_name("kernels.c")
OPERATORS = SOURCE.with_name("operators.h")

# Elements below which a further thread costs more than it saves, and the sizes of lists, as in `kernels.c`.
_GRAIN = 16384
_MAX_LISTS, _MAX_NUMBERS = 16, 8
# Operators that tell denormal numbers from 0.
_COMPARING = {"sign", "lt", "le", "gt", "ge", "eq", "ne"}
_DIVIDING = {"div", "div_by", "addcdiv", "rsqrt"}

_INTEGER, _POINTER = ctypes.c_int64, ctypes.c_void_p


def library() -> ctypes.CDLL | str:
    """Return the loaded kernels, or the reason why there are none. Compiles at most once in a process."""
    return native.library(SOURCE)


def plan(program: KernelProgram, tensors: StepTensors) -> NativeStepper | None:
    """Return the steps of these tensors by kernels; None without a compiler, and for half precision."""
    first, numbers = real_view(tensors.stacks[0][0]), tensors.numbers
    if first.dtype not in native.TYPES or len(tensors.stacks) > _MAX_LISTS - 1 or len(numbers) > _MAX_NUMBERS:
        return None
    if isinstance(library(), str):
        return None
    kinds = tuple(native.TYPES[values[0].dtype] for values in numbers.values())
    text = c_source(program, native.TYPES[first.dtype], kinds)
    functions = native.library(SOURCE.with_name(f"{program.formula.__name__.lower()}.c"), text)
    return None if isinstance(functions, str) else NativeStepper(program, functions, tensors)


@lru_cache(maxsize=256)
def c_source(program: KernelProgram, real: str, kinds: tuple[str, ...]) -> str:
    """Return the functions ``fill`` and ``row`` of ``kernels.c`` for a program, in C.

    Args:
        program: what they compute.
        real: the type of parameters, "float" or "double".
        kinds: the types of the numbers in the state; empty if there is no state.
    """
    hypers, numbers = program.formula.hypers, dict(zip(program.formula.numbers, kinds, strict=False))

    def text(operand: Operand, kind: str) -> str:
        number = repr(operand).replace("inf", "INFINITY").replace("nan", "NAN")
        return operand if isinstance(operand, str) else f"(({kind}){number})"

    def lines(operations: Iterable[Operation], kind: str) -> list[str]:
        texts = ((o.name, expression(o, [text(operand, kind) for operand in o.operands])) for o in operations)
        return [f"const __auto_type {name} = {value};" for name, value in texts]

    stacks = ("param", "grad", *program.states)
    fill = [
        "void fill(int64_t members, int64_t stride, const double *columns, const float *advance,",
        "          void *const *counts, void *records) {",
        *(f"{kind} *at_{name} = counts[{index}];" for index, (name, kind) in enumerate(numbers.items())),
        "for (int64_t b = 0; b < members; b++) {",
        *(f"const double h_{hyper.name} = columns[{index} * stride + b];" for index, hyper in enumerate(hypers)),
        f"const double n_step = {'at_step[b] += advance[b]' if numbers else 0};",
        *(f"const {numbers[name]} n_{name} = at_{name}[b];" for name in program.new_numbers),
        *lines(program.before, "double"),
        f"{real} *s = ({real} *)records + b * {len(program.scalars)};",
        *(f"s[{index}] = {text(operand, real)};" for index, operand in enumerate(program.scalars.values())),
        *(f"at_{name}[b] = {text(operand, numbers[name])};" for name, operand in program.new_numbers.items()),
        "}\n}",
    ]
    row = [
        "void row(int64_t n, void *const *at, const void *scalars) {",
        f"const {real} *s = scalars;",
        *(f"const {real} s_{name} = s[{index}];" for index, name in enumerate(program.scalars)),
        *(f"{real} *restrict at_{name} = at[{index}];" for index, name in enumerate(stacks)),
        "for (int64_t i = 0; i < n; i++) {",
        *(f"const {real} x_{name} = at_{name}[i];" for name in stacks),
        *lines(program.update, real),
        *(f"at_{name}[i] = {text(operand, real)};" for name, operand in program.results.items()),
        "}\n}\n",
    ]
    return "\n".join([OPERATORS.read_text(), *fill, *row])


class _NativeStep(ctypes.Structure):
    """A step; the same struct as in `kernels.c`."""

    _fields_ = (
        *((name, _INTEGER) for name in ("tensors", "members", "lists", "numbers", "element", "record")),
        *((name, _INTEGER) for name in ("stride", "flush", "shares")),
        *((name, _POINTER) for name in ("sizes", "stacks", "grads", "counts", "widths", "columns", "advance")),
        *((name, _POINTER) for name in ("row", "fill", "first", "ends", "records")),
    )


class NativeStepper(Stepper):
    """Steps of contiguous stacks ``[members, ...]`` on the CPU.

    Args:
        program: what a step computes.
        functions: the library that was compiled from it.
        step_tensors: what is stepped; the caller keeps it alive.
    """

    contiguous = True

    def __init__(self, program: KernelProgram, functions: ctypes.CDLL, step_tensors: StepTensors) -> None:
        stacks, numbers = step_tensors.stacks, step_tensors.numbers
        params = list(map(real_view, stacks[0]))
        members, tensors, element = len(params[0]), len(params), params[0].element_size()
        record = element * len(program.scalars)
        sizes = array("q", [param.numel() // members for param in params])
        self._program, self._total = program, sum(sizes) * members
        self._stacks = _addresses([tensor for stack in stacks for tensor in stack])
        widths = array("q", [vectors[0].element_size() for vectors in numbers.values()])
        counts = _addresses([vector for vectors in numbers.values() for vector in vectors])
        lengths = (tensors, tensors * members, -(-tensors * members * record // 8))
        tables = [array("q", bytes(8 * length)) for length in lengths]
        # The struct holds addresses only.
        self._kept = functions, sizes, widths, counts, tables
        self._settings: Settings | None = None
        self._step = _NativeStep(
            *(tensors, members, len(stacks) + 1, len(numbers), element, record, 0, 0, 1),
            *(_start(sizes), _start(self._stacks), None, _start(counts), _start(widths), None, None),
            *(_address(functions.row), _address(functions.fill), *map(_start, tables)),
        )
        self._argument = ctypes.addressof(self._step)
        self._run, self._prepare = _function("run", 2), _function("prepare", 1)

    def ready(self, grads: Sequence[Tensor], settings: Settings) -> None:
        step = self._step
        if settings is not self._settings:
            self._settings = settings
            step.stride, step.columns = len(settings.members), settings.table.data_ptr()
            step.advance = settings.advance.data_ptr()
            operators = {operation.operator for operation in self._program.update if operation.stacked}
            least_eps = min(getattr(value, "eps", 0.0) for value in settings.members)
            # Beside such an eps no float can tell a denormal square from 0.
            step.flush = not operators & _COMPARING and (least_eps >= 1e-12 or not operators & _DIVIDING)

    def launch(self, grads: Sequence[Tensor]) -> object:
        """Update the tensors, and increment the step counts."""
        step = self._step
        # Named, so that it lives as long as the call.
        addresses = _addresses(grads)
        step.grads = _start(addresses)
        team = active_team()
        shares = 1 if team is None else min(team.threads, self._total // _GRAIN)
        if team is None or shares <= 1:
            self._run(self._argument, torch.get_num_threads())
            return None
        step.shares = shares
        self._prepare(self._argument)
        team.run(_address(_function("run_share", 4)), self._argument, shares)
        return None


class FiniteCheck:
    """Check whether all numbers in tensors are finite; cheap if the tensors are of the kinds of the last call."""

    def __init__(self) -> None:
        self._count, self._guards = 0, tensor_guards(())

    def __call__(self, tensors: Sequence[Tensor]) -> bool | None:
        """Return whether all numbers are finite; None without a library, and unless all tensors are contiguous, on the
        CPU and of one dtype (float32 or float64).
        """
        if len(tensors) != self._count or not self._guards.check(*tensors):
            dtype = tensors[0].dtype
            if dtype not in native.TYPES or isinstance(library(), str):
                return None
            # The memory of a subclass is not where its data_ptr says.
            plain = all(type(t) is Tensor and t.layout is torch.strided and t.is_contiguous() for t in tensors)
            if not (plain and all(t.is_cpu and t.dtype == dtype for t in tensors)):
                return None
            self._count, self._guards = len(tensors), tensor_guards(tensors)
            self._sizes = array("q", list(map(Tensor.numel, tensors)))
            self._kernel = _function(f"finite_{native.TYPES[dtype]}", 3)
        # Named, so that it lives as long as the call.
        addresses = _addresses(tensors)
        return bool(self._kernel(self._count, _start(self._sizes), _start(addresses)))


@cache
def _function(name: str, arguments: int) -> Callable[..., int]:
    """Return a function of the kernels, all of whose arguments are integers or addresses."""
    kernels = library()
    assert not isinstance(kernels, str), kernels
    function: Any = kernels[name]
    function.argtypes = [_INTEGER] * arguments
    return function  # type: ignore[no-any-return]


def _address(function: Any) -> int:
    return ctypes.cast(function, _POINTER).value or 0


def _addresses(tensors: Sequence[Tensor]) -> array[int]:
    # Through a list: an array filled from an iterator is slower.
    return array("Q", list(map(Tensor.data_ptr, tensors)))


def _start(values: array[int]) -> int:
    return values.buffer_info()[0]
