"""Variables that forward names and that change while an array lives: the array computes with them as the members do."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook

import hfusion as hf

TEMPERATURE = 1.0
POWERS = {0: [1], 1: [2]}
SETTINGS: dict[str, Any] = {"gain": 1.0, "powers": POWERS}
ACTIVATION = torch.tanh


class Config:
    def __init__(self) -> None:
        self.width = 1.0

    def scaled(self) -> float:
        return 2 * self.width


class Slotted:
    __slots__ = ("inner", "offset")

    def __init__(self, inner: Slotted | None) -> None:
        self.inner = inner
        self.offset = 0.0

    def __call__(self, x: Tensor) -> Tensor:
        return x + self.offset if self.inner is None else self.inner(x) - self.offset


OBJECT = Config()
SLOTTED = Slotted(Slotted(None))


def tempered(x: Tensor) -> Tensor:
    return x / TEMPERATURE


class Inner(nn.Module):
    slope = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    @property
    def steep(self) -> float:
        return self.slope

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x) * self.steep * SETTINGS["gain"] + OBJECT.scaled()
        return SLOTTED(tempered(x)) ** SETTINGS["powers"][1][0]


class Outer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(3, 3), Inner(), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(ACTIVATION(self.inner(self.first(x))))


def check_equal(fused: hf.FusedModule, models: list[Any], x: Tensor) -> None:
    fused.zero_grad()
    alone = torch.stack([model(x) for model in models])
    output = fused(x)
    torch.testing.assert_close(output, alone, rtol=1e-12, atol=1e-12)
    output.square().sum().backward()
    for name, parameter in fused.named_parameters():
        grads = torch.autograd.grad(alone.square().sum(), [m.get_parameter(name) for m in models], retain_graph=True)
        torch.testing.assert_close(parameter.grad, torch.stack(grads), rtol=1e-9, atol=1e-12)


def programs(fused: hf.FusedModule) -> int:
    return len(fused.report().parts)


@pytest.fixture
def x() -> Tensor:
    return torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(1))


class Made(nn.Linear):
    """Computes with the precision of the default dtype."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + torch.finfo(torch.get_default_dtype()).bits


def test_another_default_dtype_is_seen(x: Tensor) -> None:
    models = [Made(3, 2).double() for _ in range(2)]
    fused = hf.fuse(models)
    check_equal(fused, models, x)
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64 if before is torch.float32 else torch.float32)
    try:
        check_equal(fused, models, x)
    finally:
        torch.set_default_dtype(before)


class Asking(nn.Module):
    """Checks whether autocast is on, both outside and inside its own autocast region."""

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.last = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        x = self.linear(x).float() * (3 if torch.is_autocast_enabled("cpu") else 7)
        with torch.autocast("cpu", enabled=False):
            return self.last(x) if torch.is_autocast_enabled("cpu") else self.last(x + 1)


@pytest.mark.parametrize("order", [(False, True, False), (True, False, True)])
@pytest.mark.parametrize("compiled", [False, True])
def test_forward_sees_the_current_autocast_state(order: tuple[bool, ...], compiled: bool) -> None:
    models = [Asking() for _ in range(2)]
    fused, x = hf.fuse(models), torch.randn(5, 3)
    optimizer = hf.optim.SGD(fused.parameters(), lr=0.0)
    loss = lambda y, target: y.square().mean()  # noqa: E731
    step = hf.train_step(fused, loss, optimizer, compile=compiled)
    for enabled in order:
        for _ in range(2):
            with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
                alone = torch.stack([loss(model(x), None).detach() for model in models])
                torch.testing.assert_close(step(x, None), alone, rtol=1e-2, atol=1e-4)
    assert programs(fused) == 2


def doubled(module: nn.Module, inputs: tuple[Any, ...], output: Any = None) -> Any:
    if not isinstance(module, nn.Linear):
        return None
    return (2 * inputs[0],) if output is None else 2 * output


GLOBAL_HOOKS = {"forward": register_module_forward_hook, "pre": register_module_forward_pre_hook}


@pytest.mark.parametrize("kind", GLOBAL_HOOKS)
@pytest.mark.parametrize("first", [False, True])
def test_global_hooks_count_as_they_are_at_each_call(kind: str, first: bool, x: Tensor) -> None:
    models = [Outer().double() for _ in range(2)]
    fused, loss = hf.fuse(models), nn.Sequential(nn.Linear(2, 1).double())
    losses = hf.per_model(loss)
    for hooked in (first, not first, first):
        hook = GLOBAL_HOOKS[kind](doubled) if hooked else None
        try:
            check_equal(fused, models, x)
            outputs = fused(x)
            torch.testing.assert_close(losses(outputs), torch.stack([loss(row) for row in outputs]))
        finally:
            if hook is not None:
                hook.remove()
    assert programs(fused) == 2


@contextmanager
def changed(set_: Callable[[Any], object], value: Any, before: Any) -> Iterator[None]:
    set_(value)
    try:
        yield
    finally:
        set_(before)


# A setting of torch that forward asks for, and a region in which it is another.
SETTINGS_OF_TORCH: dict[str, tuple[Callable[[], Any], Callable[[], AbstractContextManager[Any]]]] = {
    "threads": (
        lambda: torch.get_num_threads() > 2,
        lambda: changed(torch.set_num_threads, 3, torch.get_num_threads()),
    ),
    "determinism": (
        lambda: torch.are_deterministic_algorithms_enabled(),
        lambda: changed(torch.use_deterministic_algorithms, True, False),
    ),
    "inference": (lambda: torch.is_inference_mode_enabled(), torch.inference_mode),
    "precision": (
        lambda: torch.get_float32_matmul_precision() == "high",
        lambda: changed(torch.set_float32_matmul_precision, "high", "highest"),
    ),
    "a backend": (lambda: torch.backends.cudnn.benchmark, lambda: torch.backends.cudnn.flags(benchmark=True)),
    "attention": (
        lambda: torch.backends.cuda.math_sdp_enabled(),
        lambda: changed(torch.backends.cuda.enable_math_sdp, False, True),
    ),
    "the dtype of autocast": (
        lambda: torch.get_autocast_dtype("cpu") is torch.float16,
        lambda: torch.autocast("cpu", dtype=torch.float16),
    ),
    "by a text": (
        lambda: getattr(torch, "is_anomaly_enabled")(),  # noqa: B009
        torch.autograd.detect_anomaly,
    ),
    "a seed": (lambda: torch.initial_seed() == 7, lambda: changed(torch.manual_seed, 7, 8)),
}


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.parametrize("name", SETTINGS_OF_TORCH)
@pytest.mark.parametrize("first", [False, True])
def test_settings_of_torch_count_as_they_are_at_each_call(name: str, first: bool, x: Tensor) -> None:
    ask, region = SETTINGS_OF_TORCH[name]

    class Asking(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (3 if ask() else 1)

    models = [Asking(3, 2).double() for _ in range(2)]
    fused, losses = hf.fuse(models), hf.per_model(lambda y: y.sum() * (3 if ask() else 1))
    for other in (first, not first, first):
        with region() if other else nullcontext():
            alone = torch.stack([model(x) for model in models])
            torch.testing.assert_close(fused(x), alone, rtol=1e-12, atol=1e-12)
            torch.testing.assert_close(losses(alone), alone.sum((1, 2)) * (3 if ask() else 1))
