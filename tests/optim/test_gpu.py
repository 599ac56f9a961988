"""The Triton kernels equal B optimizers of torch.optim: on a CUDA device, or, without one, in Triton's interpreter.

Without a device Triton's launcher and compiler take them, too, up to the launch.
"""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import hfusion as hf
from hfusion.optim import gpu
from tests.optim.arrays import CASES, ONE_EACH, Array, beside_a_bad_member, for_array, run, start
from tests.optim.interpreted import forget, interpret

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)
EACH = pytest.mark.parametrize(("name", "options"), ONE_EACH.values(), ids=ONE_EACH)


@pytest.fixture(autouse=True)
def kernels(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Nothing here may take another way than these kernels."""
    pytest.importorskip("triton")
    monkeypatch.delenv("HFUSION_NATIVE", raising=False)
    if DEVICE == "cpu":
        interpret(monkeypatch)
    assert not isinstance(gpu.library(), str)
    yield
    if DEVICE == "cpu":
        forget()


@BOTH
@pytest.mark.parametrize("members", [1, 3])
def test_equals_alone(name: str, options: dict[str, Any], members: int) -> None:
    array = Array(members, device=DEVICE)
    fused, alone = start(name, options, array)
    run(array, fused, alone, 3)
    run(array, fused, alone, 2, skip=[0])
    run(array, fused, alone, 2)
    array.assert_equal()


@EACH
def test_a_bad_member_leaves_its_neighbours_bit_identical(name: str, options: dict[str, Any]) -> None:
    with np.errstate(invalid="ignore"):
        first, *others = [
            beside_a_bad_member(name, options, value, DEVICE) for value in (1.0, float("nan"), float("inf"))
        ]
    for outcome in others:
        assert all(torch.equal(actual, clean) for actual, clean in zip(outcome, first, strict=True))


class Driver:
    """Triton's driver of a GPU that is not there: kernels are bound and compiled for it, and never launched."""

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0

    def get_current_target(self) -> Any:
        from triton.backends.compiler import GPUTarget

        return GPUTarget("cuda", 90, 32)


class Unlaunched:
    """A kernel that does all of a launch, with its arguments as they are, but the launch."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.compiled: list[Any] = []

    def __getitem__(self, grid: tuple[int, ...]) -> Any:
        return lambda *args, **kwargs: self.compiled.append(self.kernel.warmup(*args, grid=grid, **kwargs))


@pytest.fixture
def compiling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """The kernels as a GPU has them; the interpreter takes any names of arguments."""
    from triton.runtime import driver

    # Of what lets them be interpreted nothing is left.
    monkeypatch.undo()
    for name in ("HFUSION_NATIVE", "TRITON_INTERPRET"):
        monkeypatch.delenv(name, raising=False)
    forget()
    before = getattr(driver, "_active", None)
    driver.set_active(Driver())
    yield gpu.library()
    driver._active = before


@EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_tritons_launcher_takes_the_kernels(compiling: Any, name: str, options: Any, dtype: torch.dtype) -> None:
    kind = getattr(hf.optim, name)
    array = Array(3, shapes=[(8,), (3,)], dtype=dtype)
    fused = kind(array.params, **for_array(options, 3))
    settings = fused._settings(fused.param_groups[0])
    stacks = [[torch.zeros_like(p) for p in array.params] for _ in range(1 + len(settings.names))]
    numbers = {number: [torch.ones(3) for _ in array.params] for number in kind.numbers}
    stepper = gpu.plan(kind, settings.options, settings.names, stacks, numbers)
    assert stepper is not None
    steps, scalars = Unlaunched(stepper._kernel), Unlaunched(stepper._prepare)
    stepper._kernel, stepper._prepare = steps, stepper._prepare and scalars
    stepper.step([torch.zeros_like(p) for p in array.params], settings)
    # The host computes the scalars of NAdam.
    assert len(scalars.compiled) == (name != "NAdam")
    # One launch for rows of multiples of 16 bytes, one for others.
    assert len(steps.compiled) == 2
    assert all("cubin" in compiled.asm for compiled in [*steps.compiled, *scalars.compiled])


COMPILES = """
import itertools
import re
import subprocess
import tempfile
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
import hfusion as hf
from hfusion.optim import gpu, kernel_source
from hfusion.optim import triton_kernels as kernels
from tests.optim.arrays import ONE_EACH, Array, for_array

def resources(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(re.search(name + r":(\\d+)", text)[1]) for name in ("REG", "STACK", "LOCAL")}

WAYS = []
for name, options in [*ONE_EACH.values(), ("SGD", {})]:
    kind = getattr(hf.optim, name)
    fused = kind(Array(3).params, **for_array(options, 3))
    settings = fused._settings(fused.param_groups[0])
    program = kernel_source.program(kind, settings.options, tuple(settings.names))
    WAYS.append((name, gpu.generated(kernel_source.triton_source(program)), len(settings.names)))
for (name, functions, buffers), real in itertools.product(WAYS, kernels.DTYPES.values()):
    kernel, bits = functions["update"], real.primitive_bitwidth
    kind, lanes = "*fp64" if bits == 64 else "*fp32", 128 // bits
    constants = {"dtype": real, "BLOCK": kernels.BLOCK, "LANES": lanes}
    signature = {"spots": "*i32", "sizes": "*i64", "tensors": "i32", "members": "i32", "stacks": "*i64"}
    signature |= {"grads": "*i64", "scalars": kind} | dict.fromkeys(constants, "constexpr")
    for capability in (80, 90, 100):
        source = ASTSource(fn=kernel, signature=signature, constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
        # As in torch, of half precision only.
        assert ("fma" in made.asm["ptx"]) == (bits == 16)
        # Of the gradient, the parameter and each buffer 16 bytes at once.
        wide = f".v{128 // max(bits, 32)}.b{max(bits, 32)}"
        assert len(re.findall("ld.global" + re.escape(wide), made.asm["ptx"])) >= 2 + buffers
        assert len(re.findall("st.global" + re.escape(wide), made.asm["ptx"])) >= 1 + buffers
        used = resources(made.asm["cubin"])
        print(name, buffers, real, capability, used)
        # What does not fit the registers is spilled there.
        assert used["STACK"] == used["LOCAL"] == 0 < used["REG"]
for real, capability, wide in itertools.product(kernels.DTYPES.values(), (80, 90, 100), (False, True)):
    lanes = 128 // real.primitive_bitwidth if wide else 1
    arithmetic = "*fp64" if real.primitive_bitwidth == 64 else "*fp32"
    block = {"spots": "*i32", "sizes": "*i64", "grads": "*i64"}
    row = {"sizes": "*i64", "firsts": "*i64", "partials": arithmetic}
    ways = [(kernels.scale_rows, {**block, "factors": f"*{real}"}, {"LANES": lanes})]
    for order in (0, 1, 2):
        constants = {"ORDER": order, "LANES": lanes}
        ways.append((kernels.partial_norms, {**block, "firsts": "*i64", "partials": arithmetic}, constants))
        ways.append((kernels.row_norms, {**row, "norms": f"*{real}", "members": "i32"}, {"ORDER": order}))
    for kernel, signature, constants in ways:
        constants = {**constants, "dtype": real, "BLOCK": kernels.BLOCK}
        source = ASTSource(fn=kernel, signature=signature | dict.fromkeys(constants, "constexpr"), constexprs=constants)
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
        used = resources(made.asm["cubin"])
        print(kernel.fn.__name__, constants, capability, used)
        assert used["STACK"] == used["LOCAL"] == 0 < used["REG"]
for name, functions, _ in WAYS:
    if "prepare" not in functions:
        continue
    kernel = functions["prepare"]
    for kind, capability in itertools.product(("*fp32", "*fp64"), (80, 90, 100)):
        signature = {"table": "*fp64", "counts": "*fp32", "scalars": kind, "members": "i32", "ROWS": "constexpr"}
        source = ASTSource(fn=kernel, signature=signature, constexprs={"ROWS": kernels.ROWS})
        made = triton.compile(source, target=GPUTarget("cuda", capability, 32), options={"enable_fp_fusion": False})
        used = resources(made.asm["cubin"])
        print(name, kind, capability, used)
        assert used["STACK"] == used["LOCAL"] == 0 < used["REG"]
"""


def test_the_kernels_compile_for_gpus_without_contraction_or_spilled_registers(monkeypatch: pytest.MonkeyPatch) -> None:
    # The interpreter takes more than the compiler does.
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    subprocess.run([sys.executable, "-W", "error", "-c", COMPILES], check=True, timeout=300)


def test_the_environment_chooses_the_other_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFUSION_NATIVE", "0")
    assert gpu.library() == "HFUSION_NATIVE=0"
    array = Array(2, device=DEVICE)
    fused, alone = start("Adam", {"lr": 0.1}, array)
    run(array, fused, alone, 2)
    array.assert_equal()
