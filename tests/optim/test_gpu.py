"""The Triton kernels equal B optimizers of torch.optim: on a CUDA device, or, without one, in Triton's interpreter.

Without a device Triton's launcher and compiler take them, too, up to the launch.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import inf
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

import hfusion as hf
from hfusion import optim
from hfusion.optim import clip, formula, gpu
from hfusion.optim.formula import StepTensors
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
    program = formula.program(kind, settings.options, tuple(settings.names))
    assert program is not None
    stepper = gpu.plan(program, StepTensors(kind, settings.options, settings.names, stacks, numbers))
    assert stepper is not None
    steps, scalars = Unlaunched(stepper._kernel), Unlaunched(stepper._prepare)
    stepper._kernel, stepper._prepare = steps, stepper._prepare and scalars
    grads = [torch.zeros_like(p) for p in array.params]
    stepper.ready(grads, settings)
    stepper.launch(grads)
    # The host computes the scalars of NAdam.
    assert len(scalars.compiled) == (name != "NAdam")
    # One launch for rows of multiples of 16 bytes, one for others.
    assert len(steps.compiled) == 2
    assert all("cubin" in compiled.asm for compiled in [*steps.compiled, *scalars.compiled])


# Clipping by the Triton kernels equals torch's of each member: on a CUDA device, or without one in the interpreter.

MANY = 1024 + 5
SHAPES = ((4, 3), (), (5,), (0,), (MANY,), (16, 8))
TOLERANCE = {torch.float64: 1e-12, torch.float32: 3e-6, torch.bfloat16: 2**-7, torch.float16: 2**-10}
"""Of half precision one rounding to the next number: the order of a sum in float32 may decide which is nearer."""


@pytest.fixture
def gradients(monkeypatch: pytest.MonkeyPatch) -> list[object]:
    """Gradients that the kernels clip."""
    created: list[object] = []
    original = clip.StackedGradients.__init__

    def counted(self: object, *args: object) -> None:
        created.append(self)
        original(self, *args)  # type: ignore[arg-type]

    monkeypatch.setattr(clip.StackedGradients, "__init__", counted)
    return created


def assert_equal(array: Array, norms: Tensor, alone: Tensor) -> None:
    """Compare norms and gradients."""
    tolerance = max(TOLERANCE.get(p.grad.dtype, 1e-12) for p in array.params if p.grad is not None)
    assert norms.dtype is alone.dtype
    torch.testing.assert_close(norms, alone, rtol=tolerance, atol=0.0, equal_nan=True)
    for index, param in enumerate(array.params):
        if param.grad is not None:
            rows = torch.stack([params[index].grad for params in array.members])  # type: ignore[misc]
            torch.testing.assert_close(param.grad, rows, rtol=3 * tolerance, atol=0.0, equal_nan=True)


@pytest.mark.parametrize(("members", "dtype"), [*((3, dtype) for dtype in TOLERANCE), (1, torch.float32)], ids=str)
@pytest.mark.parametrize("norm_type", [1.0, 2.0, inf])
def test_clipping_equals_alone(members: int, norm_type: float, dtype: torch.dtype, gradients: list[object]) -> None:
    array = Array(members, SHAPES, dtype, DEVICE)
    for limits in ([0.5, 15.0, 450.0][:members], [0.0, inf, 1e-3][:members]):
        array.draw_grads(skip=[2])
        norms = optim.clip_grad_norm_(array.params, limits, norm_type)
        assert_equal(array, norms, array.clip_alone(limits, norm_type))
    assert len(gradients) == 2
