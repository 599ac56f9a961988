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
from torch.utils._python_dispatch import TorchDispatchMode

import hfusion as hf
from hfusion.optim import clip, gpu
from tests.optim.arrays import CASES, Array, Per, beside_a_bad_member, for_array, run, run_shared, start
from tests.optim.interpreted import forget, interpret

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
BOTH = pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)
ONE_EACH = pytest.mark.parametrize(
    ("name", "options"), [CASES[case] for case in ("sgd-momentum", "adam-amsgrad", "adamw", "adadelta")]
)


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


@BOTH
def test_equals_alone_in_single_precision(name: str, options: dict[str, Any]) -> None:
    array = Array(2, dtype=torch.float32, device=DEVICE)
    fused, alone = start(name, options, array)
    run(array, fused, alone, 4)
    array.assert_equal(rtol=1e-5)


@ONE_EACH
def test_tensors_of_many_blocks(name: str, options: dict[str, Any]) -> None:
    array = Array(2, shapes=[(3,), (gpu.library().BLOCK * 2 + 7,), (gpu.library().BLOCK,)], device=DEVICE)
    fused, alone = start(name, options, array)
    run(array, fused, alone, 3)
    array.assert_equal()


@ONE_EACH
def test_members_without_momentum_or_decay_beside_others(name: str, options: dict[str, Any]) -> None:
    mixed = {"weight_decay": Per(0.1, 0.0)} | ({"momentum": Per(0.9, 0.0)} if name == "SGD" else {})
    array = Array(3, shapes=[(4,)], device=DEVICE)
    fused, alone = start(name, {**options, **mixed}, array)
    # It shall not reach the state of a member without decay.
    for member, params in enumerate(array.members):
        for tensor in (array.params[0][member], params[0]):
            tensor.detach()[2] = float("inf")
    with np.errstate(invalid="ignore"):
        run(array, fused, alone, 3)
    expected = torch.stack([params[0].detach() for params in array.members])
    torch.testing.assert_close(array.params[0].detach(), expected, rtol=1e-9, atol=1e-12, equal_nan=True)
    for key, value in fused.state[array.params[0]].items():
        if key != "step":
            assert value[1:].isfinite().all()


@ONE_EACH
def test_a_bad_member_leaves_its_neighbours_bit_identical(name: str, options: dict[str, Any]) -> None:
    with np.errstate(invalid="ignore"):
        first, *others = [
            beside_a_bad_member(name, options, value, DEVICE) for value in (1.0, float("nan"), float("inf"))
        ]
    for outcome in others:
        assert all(torch.equal(actual, clean) for actual, clean in zip(outcome, first, strict=True))


@ONE_EACH
def test_a_shared_parameter_is_one_ordinary_parameter(name: str, options: dict[str, Any]) -> None:
    array = Array(3, device=DEVICE)
    _, shared, plain = run_shared(name, options, array)
    array.assert_equal()
    torch.testing.assert_close(shared, plain, rtol=1e-9, atol=1e-12)


@ONE_EACH
def test_memory_that_moves(name: str, options: dict[str, Any]) -> None:
    array = Array(2, device=DEVICE)
    fused, alone = start(name, options, array)
    for _ in range(3):
        run(array, fused, alone, 2)
        for param in array.params:
            fused.state[param].update(
                {key: value.clone() for key, value in fused.state[param].items() if key != "step"}
            )
            param.data = param.data.clone()
        fused.forget()
    array.assert_equal()


@pytest.mark.parametrize("offset", [0, 1])
def test_addresses_of_tensors_are_sent_to_the_device_once(offset: int) -> None:
    """Rows of 8, 6 and 0 elements, at multiples of 16 bytes and not."""
    stacks = [
        [
            torch.zeros(2 * size + offset, dtype=torch.float32, device=DEVICE)[offset:].view(2, size)
            for size in (8, 6, 0)
        ]
        for _ in range(2)
    ]
    counts = [torch.zeros(2) for _ in stacks[0]]
    stepper = gpu.TritonStepper(hf.optim.Adam, [stacks[0], stacks[1], stacks[0]], counts)
    first = stepper._params
    assert first.wide == (offset == 0)
    stepper.move([stacks[1], stacks[0], stacks[1]])
    assert stepper._params is not first
    stepper.move([stacks[0], stacks[1], stacks[0]])
    assert stepper._params is first
    assert [lanes for lanes, _ in stepper._launches] == [4, 1]


class _Counting(TorchDispatchMode):
    """Counts the operators that are called, except for views."""

    def __init__(self) -> None:
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += not func.is_view
        return func(*args, **kwargs or {})


@pytest.mark.parametrize("kind", [hf.optim.Adam, hf.optim.AdamW, hf.optim.Adadelta])
def test_the_host_calls_few_operators_for_a_step(kind: type[hf.optim.FusedOptimizer]) -> None:
    array = Array(2, shapes=[(4,)] * 20, device=DEVICE)
    fused = kind(array.params, lr=[0.1, 0.2])  # type: ignore[call-arg]
    for _ in range(2):
        array.draw_grads()
        fused.step()
    ((settings, parts),) = fused._prepared.values()
    assert parts is not None
    (part,) = parts.with_gradients([param.grad for param in array.params if param.grad is not None])
    stepper, counting = part[0].recordable, _Counting()
    assert stepper is not None
    with counting:
        stepper.ready(part[1], settings)
    # Twenty counts are compared with what the device has counted, and go on.
    assert counting.count <= 4


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
@pytest.mark.parametrize("order", clip.ORDERS)
def test_tritons_launcher_takes_the_kernels_that_clip(
    compiling: Any, order: float, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    clip._tables.cache_clear()
    kernels = {name: Unlaunched(getattr(compiling, name)) for name in ("partial_norms", "row_norms", "scale_rows")}
    for name, kernel in kernels.items():
        monkeypatch.setattr(compiling, name, kernel)
    grads = [torch.zeros(3, 8, dtype=dtype), torch.zeros(3, 3, dtype=torch.float32)]
    table = clip.on_accelerator(grads, 3)
    assert table is not None
    table.norms(order)
    table.scale(torch.ones(3, dtype=dtype))
    launches = 1 if dtype is torch.float32 else 2
    assert [len(kernel.compiled) for kernel in kernels.values()] == [2, launches, 2]
    assert all("cubin" in compiled.asm for kernel in kernels.values() for compiled in kernel.compiled)
    clip._tables.cache_clear()


@ONE_EACH
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_tritons_launcher_takes_the_kernels(compiling: Any, name: str, options: Any, dtype: torch.dtype) -> None:
    kind = getattr(hf.optim, name)
    array = Array(3, shapes=[(8,), (3,)], dtype=dtype)
    fused = kind(array.params, **for_array(options, 3))
    settings = fused._settings(fused.param_groups[0])
    stacks = [[torch.zeros_like(p) for p in array.params] for _ in range(1 + len(settings.names))]
    stepper = gpu.TritonStepper(kind, stacks, [torch.zeros(3) for _ in array.params])
    steps, scalars = stepper._kernel, stepper._prepare = Unlaunched(stepper._kernel), Unlaunched(stepper._prepare)
    stepper.step([torch.zeros_like(p) for p in array.params], settings)
    assert len(scalars.compiled) == 1
    # One launch for rows of multiples of 16 bytes, one for others.
    assert len(steps.compiled) == 2
    assert all("cubin" in compiled.asm for compiled in [*steps.compiled, *scalars.compiled])


def test_no_argument_has_the_name_of_a_variable_of_the_launcher(compiling: Any) -> None:
    from triton.compiler import make_backend
    from triton.runtime import JITFunction
    from triton.runtime.jit import create_function_from_signature

    kernels = {name: value for name, value in vars(compiling).items() if isinstance(value, JITFunction)}
    assert kernels.keys() >= {*compiling.SCALARS, *(f"{name}_scalars" for name in compiling.SCALARS)}
    target = make_backend(Driver().get_current_target())
    for name, kernel in kernels.items():
        bind = create_function_from_signature(kernel.signature, kernel.params, target)
        bound, _, _ = bind(*[torch.zeros(4)] * len(kernel.params))
        assert list(bound) == list(kernel.signature.parameters), name


COMPILES = """
import itertools
import re
import subprocess
import tempfile
import triton
from triton import knobs
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource
from hfusion.optim import triton_kernels as kernels

def resources(cubin):
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(cubin)
        file.flush()
        command = [knobs.nvidia.cuobjdump.path, "--dump-resource-usage", file.name]
        text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return {name: int(re.search(name + r":(\\d+)", text)[1]) for name in ("REG", "STACK", "LOCAL")}

WAYS = [(kernels.sgd, 0), (kernels.sgd, 1), (kernels.adam, 2), (kernels.adam, 3), (kernels.adadelta, 2)]
for (kernel, buffers), real in itertools.product(WAYS, kernels.DTYPES.values()):
    bits = real.primitive_bitwidth
    kind, lanes = "*fp64" if bits == 64 else "*fp32", 128 // bits
    constants = {"BUFFERS": buffers, "dtype": real, "BLOCK": kernels.BLOCK, "LANES": lanes}
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
        print(kernel.fn.__name__, buffers, real, capability, used)
        # What does not fit the registers is spilled there.
        assert used["STACK"] == used["LOCAL"] == 0 < used["REG"]
for real, capability, wide in itertools.product(kernels.DTYPES.values(), (80, 90, 100), (False, True)):
    lanes = 128 // real.primitive_bitwidth if wide else 1
    arithmetic = "*fp64" if real.primitive_bitwidth == 64 else "*fp32"
    block = {"spots": "*i32", "sizes": "*i64", "grads": "*i64"}
    row = {"which": "*i32", "sizes": "*i64", "firsts": "*i64", "partials": arithmetic}
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
for name in kernels.SCALARS:
    kernel = getattr(kernels, f"{name}_scalars")
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
