"""Steps by kernels in Triton on an accelerator: ``triton_kernels.py`` and what is generated from formulas.

triton comes with torch for CUDA (https://triton-lang.org). Where it is missing, the optimizers run their formulas
(``group.py``), a launch for each operator; the environment variable ``HFUSION_NATIVE=0`` chooses that.
"""

from __future__ import annotations

import importlib
import importlib.util
import linecache
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from functools import cache, lru_cache, partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from hfusion.core.memory import real_view
from hfusion.device.backend import DeviceNumbers, backend, sent
from hfusion.optim.formula import EXACT, KernelProgram, Operand, Operation, Stepper, StepTensors, expression
from hfusion.optim.hyper import Settings

# Bytes that a thread loads or stores at once, if all addresses are multiples of this number.
WIDTH = 16
# Largest number of sets of tensor addresses that are kept on the device.
_MAX_ADDRESS_SETS = 64


def library() -> Any:
    """Return the module of kernels, or the reason why there is none."""
    return "HFUSION_NATIVE=0" if os.environ.get("HFUSION_NATIVE") == "0" else _loaded()


@cache
def _loaded() -> Any:
    if importlib.util.find_spec("triton") is None:
        return "triton is not installed"
    return importlib.import_module("hfusion.optim.triton_kernels")


@cache
def generated(source: str) -> Mapping[str, Any]:
    """Return the kernels ``prepare`` and ``update`` of a source that `triton_source` has written."""
    name = f"<kernels of a formula {hash(source):x}>"
    # Triton reads the source of functions by `inspect`, which finds it there.
    linecache.cache[name] = len(source), None, source.splitlines(keepends=True), name
    namespace = dict(vars(library()))
    exec(compile(source, name, "exec"), namespace)
    return namespace


def plan(program: KernelProgram, tensors: StepTensors) -> TritonStepper | None:
    """Return the steps of these tensors by kernels; None without Triton, and for other dtypes."""
    kernels = library()
    if isinstance(kernels, str) or real_view(tensors.stacks[0][0]).dtype not in kernels.DTYPES:
        return None
    return TritonStepper(program, tensors)


def triton_source(program: KernelProgram) -> str:
    """Return the functions ``prepare`` and ``update`` of a program, in Triton; see ``triton_kernels.py``."""

    def text(operand: Operand) -> str:
        return f'float("{operand}")' if operand in (math.inf, -math.inf) or operand != operand else str(operand)

    def assigned(operations: Iterable[Operation], dtype: str) -> list[str]:
        lines = []
        for operation in operations:
            value = expression(operation, [*map(text, operation.operands), dtype])
            rounds = program.formula.torch_class is not None and operation.stacked and operation.operator not in EXACT
            lines.append(f"{operation.name} = {f'rounded({value}, {dtype})' if rounds else value}")
        return lines

    count, hypers = len(program.scalars), program.formula.hypers
    prepare = [
        "@triton.jit\ndef prepare(table, counts, scalars, members, ROWS: tl.constexpr):",
        "tensor, member = tl.program_id(0), tl.program_id(1) * ROWS + tl.arange(0, ROWS)",
        "mask, column = member < members, table + member",
        *(f"h_{h.name} = tl.load(column + {index} * members, mask, other=0.0)" for index, h in enumerate(hypers)),
        f"n_step = counted(counts + tensor * members + member, column + {len(hypers)} * members, mask)",
        *assigned(program.before, "tl.float64"),
        f"base = scalars + tensor * {count} * members + member",
        *(
            f"tl.store(base + {index} * members, {operand}.to(scalars.dtype.element_ty), mask)"
            for index, operand in enumerate(program.scalars.values())
        ),
    ]
    pointers = {"param": "stacks", "grad": "grads"}
    pointers |= {name: f"stacks + {index} * tensors" for index, name in enumerate(program.states, 1)}
    constants = "dtype: tl.constexpr, BLOCK: tl.constexpr, LANES: tl.constexpr"
    update = [
        f"@triton.jit\ndef update(spots, sizes, tensors, members, stacks, grads, scalars, {constants}):",
        "tensor, member, offsets, mask = spot(spots, sizes, BLOCK, LANES)",
        f"base = scalars + tensor * {count} * members + member",
        *(f"s_{name} = tl.load(base + {index} * members)" for index, name in enumerate(program.scalars)),
        *(f"at_{name} = address({first}, tensor, offsets, dtype, LANES)" for name, first in pointers.items()),
        *(f"x_{name} = loaded(at_{name}, mask, dtype)" for name in pointers),
        *assigned(program.update, "dtype"),
        *(f"tl.store(at_{name}, {text(operand)}, mask)" for name, operand in program.results.items()),
    ]
    # Where other numbers than counts are in the state, the host computes the scalars.
    functions = [update] if program.new_numbers else [prepare, update]
    return "\n\n".join("\n    ".join(lines) for lines in functions) + "\n"


class TritonStepper(Stepper):
    """Like `hfusion.optim.native_kernels.NativeStepper`, for stacks on an accelerator.

    The step counts stay on the CPU, where code that saves or copies members reads them. Kernels increment a copy on the
    device, which is overwritten if other code has written to them. If a formula has further numbers in its state, its
    scalars are computed on the CPU.
    """

    contiguous = True

    def __init__(self, program: KernelProgram, tensors: StepTensors) -> None:
        stacks, params = tensors.stacks, list(map(real_view, tensors.stacks[0]))
        functions = generated(triton_source(program))
        self._kernel, self._prepare = functions["update"], functions.get("prepare")
        self._step, self._program = tensors, program
        self._device, self._members = params[0].device, len(params[0])
        self._counts = tensors.numbers.get("step", [])
        self._tables = tables_of(params)
        # Addresses are sent once and kept, because torch often reuses freed memory.
        self._at = lru_cache(_MAX_ADDRESS_SETS)(partial(addresses_on, self._device))
        self._settings: Settings | None = None
        self._table = DeviceNumbers(self._device, torch.float64)
        self._counted = DeviceNumbers(self._device, torch.float32)
        self._device_counts = self._counted.write_changed(torch.zeros(len(params), self._members, device="cpu"))
        shape = len(params), len(program.scalars), self._members
        self._scalars = DeviceNumbers(self._device, torch.promote_types(params[0].dtype, torch.float32))
        self._device_scalars = self._scalars.write(torch.zeros(shape, device="cpu"))
        self._scalars_grid = (len(params), -(-self._members // library().ROWS))
        self._params = self._at(tuple(tensor.data_ptr() for stack in stacks for tensor in stack))

    def ready(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """Increment the step counts on the CPU, and copy numbers that have changed to the device."""
        self._grads = self._at(tuple(map(Tensor.data_ptr, grads)))
        if self._program.new_numbers:
            scalars = self._step.advance(settings)
            read = [scalars[name] for name in self._program.scalars]
            self._device_scalars = self._scalars.write(torch.stack(read, dim=1))
            return
        increments = settings.advance[: self._members]
        if settings is not self._settings:
            self._settings = settings
            rows = (settings.table[:, : self._members], increments.double()[None])
            self._device_table = self._table.write_changed(torch.cat(rows))
        if self._counts:
            counts = torch.stack(self._counts)
            self._counted.write_changed(counts)
            torch._foreach_add_(self._counts, [increments] * len(self._counts))
            counts += increments

    def launch(self, grads: Sequence[Tensor]) -> object:
        """Launch the step, which also counts on the device; return what must stay alive while it may be replayed."""
        # Triton launches on the current device.
        with backend(self._device).current():
            if self._prepare is not None:
                read = (self._device_table, self._device_counts)
                self._prepare[self._scalars_grid](
                    *read, self._device_scalars, self._members, ROWS=library().ROWS, enable_fp_fusion=False
                )
            arguments = (self._members, self._params.tensor, self._grads.tensor, self._device_scalars)
            wide, tensors = self._params.wide and self._grads.wide, len(self._tables.sizes)
            self._tables.launch(self._kernel, wide, tensors, *arguments)
        return self._grads, self._params


class Addresses(NamedTuple):
    """Addresses of tensors, on the device; ``wide``: whether all are multiples of `WIDTH`."""

    tensor: Tensor
    wide: bool


def addresses_on(device: torch.device, addresses: tuple[int, ...]) -> Addresses:
    """Return addresses on the device."""
    tensor = sent(torch.tensor(addresses, dtype=torch.int64, device="cpu"), device)
    return Addresses(tensor, not any(address % WIDTH for address in addresses))


class Tables(NamedTuple):
    """Tensors of certain sizes, wherever they lie, as the kernels take them, see `triton_kernels`.

    ``programs``: the number of all blocks of all rows. ``spots``: by the elements that a thread moves at once.
    ``constants``: what all kernels take.
    """

    sizes: Tensor
    firsts: Tensor
    programs: int
    spots: Mapping[int, Tensor]
    constants: Mapping[str, Any]

    def launch(self, kernel: Any, wide: bool, *arguments: Any, **constants: Any) -> None:
        """Launch a kernel for all elements. ``wide``: whether the addresses of all tensors are.

        Triton launches on the current device.
        """
        for lanes, spots in self.spots.items():
            kernel[(len(spots),)](
                spots, self.sizes, *arguments, LANES=lanes if wide else 1, **self.constants, **constants
            )


def tables_of(stacks: Sequence[Tensor]) -> Tables:
    """Return the tables of stacks ``[members, ...]`` of one dtype on one accelerator."""
    device, members = stacks[0].device, len(stacks[0])
    tables = cached_tables(device, members, tuple(s.numel() // members for s in stacks), stacks[0].dtype)
    for table in (tables.sizes, tables.firsts, *tables.spots.values()):
        # Another stream may have made it.
        backend(device).share(table)
    return tables


@lru_cache(maxsize=16)
def cached_tables(device: torch.device, members: int, sizes: tuple[int, ...], dtype: torch.dtype) -> Tables:
    """Return the tables, which any stream may read. ``sizes``: the elements of a member."""
    host, block, lanes = torch.device("cpu"), library().BLOCK, WIDTH // dtype.itemsize
    # Every operation rounds.
    constants = {"dtype": library().DTYPES[dtype], "BLOCK": block, "enable_fp_fusion": False}
    counts = torch.tensor([members * -(-size // block) for size in sizes], device=host)
    spots: dict[int, list[Tensor]] = {}
    for index, size in enumerate(sizes):
        if size:
            blocks = torch.arange(-(-size // block), device=host)
            rows = torch.cartesian_prod(torch.tensor([index], device=host), torch.arange(members, device=host), blocks)
            spots.setdefault(1 if size % lanes else lanes, []).append(rows.to(torch.int32))
    by_width = {width: torch.cat(pieces).to(device) for width, pieces in spots.items()}
    firsts = (counts.cumsum(0) - counts).to(device)
    return Tables(torch.tensor(sizes, device=host).to(device), firsts, int(counts.sum()), by_width, constants)
