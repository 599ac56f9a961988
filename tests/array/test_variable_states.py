"""Variables that forward names and that change while an array lives: the array computes with them as the members do."""

from __future__ import annotations

import sys
import types
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.module import register_module_forward_hook, register_module_forward_pre_hook
from torch.nn.utils import parametrize

import hfusion as hf

TEMPERATURE = 1.0
POWERS = {0: [1], 1: [2]}
SETTINGS: dict[str, Any] = {"gain": 1.0, "powers": POWERS}
ACTIVATION = torch.tanh
CONFIG = types.SimpleNamespace(inner=types.SimpleNamespace(shift=0.0))
CALLS = 0


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


CHANGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    "of a file": lambda m: m.setitem(globals(), "TEMPERATURE", 2.0),
    "by an equal number of another type": lambda m: m.setitem(globals(), "TEMPERATURE", True),
    "in a dict": lambda m: m.setitem(SETTINGS, "gain", 3.0),
    "in a dict in a dict": lambda m: m.setitem(POWERS, 1, [3]),
    "a dict anew": lambda m: m.setitem(globals(), "SETTINGS", {"gain": 0.5, "powers": {1: [1]}}),
    "of an object, in its method": lambda m: m.setattr(OBJECT, "width", 4.0),
    "of an object with slots": lambda m: m.setattr(SLOTTED, "offset", 4.0),
    "of an object with slots in another": lambda m: m.setattr(SLOTTED.inner, "offset", 4.0),
    "an object with slots anew": lambda m: m.setattr(SLOTTED, "inner", Slotted(Slotted(None))),
    "of a class, in a property": lambda m: m.setattr(Inner, "slope", -1.0),
    "a function": lambda m: m.setitem(globals(), "ACTIVATION", F.relu),
    "a function's code": lambda m: m.setitem(globals(), "tempered", lambda x: x * 7),
    "forward itself": lambda m: m.setattr(Inner, "forward", lambda self, x: self.linear(x) / TEMPERATURE),
}


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


@pytest.mark.parametrize("change", CHANGES)
def test_a_variable_that_changes_is_seen(change: str, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [Outer().double() for _ in range(2)]
    fused = hf.fuse(models)
    check_equal(fused, models, x)
    with monkeypatch.context() as patched:
        CHANGES[change](patched)
        check_equal(fused, models, x)
    programs_before = programs(fused)
    check_equal(fused, models, x)
    assert programs(fused) == programs_before == 2


# How forward reads a global variable that is called like no attribute, and one that is.
READS: dict[str, str] = {
    "by its name": "offset",
    "by its name, of an attribute's": "step",
    "by globals()": "globals()['offset']",
    "in a function inside": "(lambda: offset)()",
    "of a module that is imported there": "settings.offset",
}
SCRIPT = """
class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.step, self.gain, self.x = nn.Linear(3, 2), 2.0, 0.5

    def forward(self, x):
        import settings_of_a_test as settings
        return self.step(x) * self.gain * getattr(self, "x") + {read}
"""


@pytest.mark.parametrize("file", ["__main__", "script_of_a_test"])
@pytest.mark.parametrize("read", READS)
def test_an_attribute_is_no_variable_of_its_name(
    read: str, file: str, x: Tensor, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As of a script or a notebook, whose variables are called as attributes of models are."""
    settings = types.ModuleType("settings_of_a_test")
    script = types.ModuleType(file)
    vars(script).update(nn=nn, step=0.0, offset=0.0)
    monkeypatch.setitem(sys.modules, settings.__name__, settings)
    monkeypatch.setitem(sys.modules, file, script)
    settings.offset = 0.0  # type: ignore[attr-defined]
    exec(compile(SCRIPT.format(read=READS[read]), "<cell>", "exec"), vars(script))
    models = [script.Net().double() for _ in range(2)]
    fused = hf.fuse(models)
    for value in range(7):
        # Not x, where any text may name a variable, and not step, where it is read.
        others = [name for name in ("gain", "x", "step") if name not in READS[read] and "globals" not in READS[read]]
        vars(script).update(dict.fromkeys(others, value), gain=value)
        check_equal(fused, models, x)
    assert programs(fused) == 1
    script.offset = script.step = settings.offset = 3.0  # type: ignore[attr-defined]
    check_equal(fused, models, x)
    assert programs(fused) == 2


def test_a_loss_reads_no_variable_of_an_attributes_name(monkeypatch: pytest.MonkeyPatch) -> None:
    config = types.SimpleNamespace(TEMPERATURE=2.0)
    losses = hf.per_model(lambda y: y.sum() * config.TEMPERATURE)
    y = torch.ones(2, 3)
    for value in range(20):
        monkeypatch.setitem(globals(), "TEMPERATURE", value)
        assert losses(y).tolist() == [6.0, 6.0]
    assert len(losses.programs) == 1


def test_a_closure_that_changes_is_seen(x: Tensor) -> None:
    factor = 1.0

    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * factor

    models = [Scaled(3, 2).double() for _ in range(2)]
    fused = hf.fuse(models)
    check_equal(fused, models, x)
    factor = 3.0
    check_equal(fused, models, x)


def test_code_that_reads_a_variable_of_many_values_runs_in_a_loop(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [Outer().double() for _ in range(2)]
    fused = hf.fuse(models)
    for step in range(10):
        monkeypatch.setitem(globals(), "TEMPERATURE", 1.0 + step)
        check_equal(fused, models, x)
    assert programs(fused) == 5
    rows = [row for row in str(fused.report().parts[-1]).splitlines() if "loop over members" in row]
    assert len(rows) == 1
    assert "inner: it names" in rows[0]
    assert "TEMPERATURE" in rows[0]


class Counting(nn.Module):
    """Python counts the calls, as no graph can."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        global CALLS
        CALLS += 1
        return self.linear(x)


class WithCounter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.counting = nn.Linear(3, 3), Counting()

    def forward(self, x: Tensor) -> Tensor:
        return self.counting(self.first(x).relu())


def test_a_counter_in_forward_costs_no_captures(x: Tensor) -> None:
    models = [WithCounter().double() for _ in range(2)]
    fused = hf.fuse(models)
    for _ in range(6):
        check_equal(fused, models, x)
    assert programs(fused) == 1


def test_a_step_sees_a_variable_that_changes(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    models = [Outer().double() for _ in range(2)]
    fused = hf.fuse(models)
    target = torch.ones(5, 2, dtype=torch.float64)

    def loss(y: Tensor, target: Tensor) -> Tensor:
        return (y - target).square().mean()

    step = hf.train_step(fused, loss, hf.optim.SGD(fused.parameters(), lr=0.0), compile=True)
    for temperature in (1.0, 1.0, 2.0, 2.0, 1.0):
        monkeypatch.setitem(globals(), "TEMPERATURE", temperature)
        alone = torch.stack([loss(model(x), target) for model in models]).detach()
        torch.testing.assert_close(step(x, target), alone, rtol=1e-12, atol=1e-12)


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


class Casting(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.bfloat16() if torch.is_autocast_enabled("cpu") else x)


def test_forward_that_only_runs_under_autocast_is_reported() -> None:
    fused = hf.fuse([Casting(3, 2) for _ in range(2)])
    with (
        torch.autocast("cpu", torch.bfloat16),
        pytest.raises(hf.FusionError, match="checks whether autocast is on"),
    ):
        fused(torch.randn(5, 3))


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


class Symmetric(nn.Module):
    def __init__(self, buffers: bool) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()) if buffers else None)

    def forward(self, x: Tensor) -> Tensor:
        return x.triu() + x.triu(1).mT


class Parametrized(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(super().forward(x).tanh())


def symmetric(buffers: bool = False) -> nn.Module:
    return parametrize.register_parametrization(Parametrized(3, 3).double(), "weight", Symmetric(buffers))


def test_a_region_that_keeps_parametrizations_keeps_none_of_a_capture(x: Tensor) -> None:
    models = [symmetric() for _ in range(2)]
    alone = torch.stack([model(x) for model in models])
    fused = hf.fuse(models)
    for _ in range(2):
        with parametrize.cached():
            torch.testing.assert_close(fused(x), alone)
            check_equal(fused, models, x)
    with parametrize.cached(), pytest.raises(hf.FusionError, match=r"weight.* has buffers, .* the region into forward"):
        hf.fuse([symmetric(buffers=True) for _ in range(2)])(x)


class CountingOutside(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        OBJECT.width += 1
        return super().forward(x)


def test_a_step_whose_forward_changes_variables_says_so(x: Tensor, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(OBJECT, "width", 0.0)
    fused = hf.fuse([CountingOutside(3, 2).double() for _ in range(2)])
    step = hf.train_step(fused, F.mse_loss, hf.optim.SGD(fused.parameters(), lr=0.1), compile=True)
    with pytest.warns(
        UserWarning, match=r"runs eagerly, exact but slower: .* forward changes .* OBJECT.width at every call"
    ):
        step(x, torch.zeros(5, 2, dtype=torch.float64))


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


class AskingForMemory(nn.Linear):
    """Asks how its input, and what it makes of it, lie in memory."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        y = y * 2 if x.is_contiguous() else y
        y = y + 1 if (x * 2).stride(0) == 1 else y
        return y * 3 if x.mT.is_contiguous() else y


def test_how_an_input_lies_in_memory_counts_at_each_call(x: Tensor) -> None:
    models = [AskingForMemory(3, 2).double() for _ in range(2)]
    fused = hf.fuse(models)
    wide = torch.cat([x, x], 1)
    for variant in (x, x.mT.contiguous().mT, wide[:, ::2], x, x[:3], wide[:, :3], x.mT.contiguous().mT):
        check_equal(fused, models, variant)
        stacked = torch.stack([variant.mT, variant.mT * 2]).mT
        alone = torch.stack([model(row) for model, row in zip(models, stacked, strict=True)])
        torch.testing.assert_close(fused(hf.stacked(stacked)), alone, rtol=1e-12, atol=1e-12)


def test_how_an_input_lies_in_memory_counts_in_a_compiled_step(x: Tensor) -> None:
    models = [AskingForMemory(3, 2).double() for _ in range(2)]
    fused = hf.fuse(models)
    step = hf.train_step(fused, F.mse_loss, hf.optim.SGD(fused.parameters(), lr=0.0), compile=True)
    target = torch.zeros(5, 2, dtype=torch.float64)
    for variant in (x, x, x.mT.contiguous().mT, x.mT.contiguous().mT, x):
        alone = torch.stack([F.mse_loss(model(variant), target) for model in models])
        torch.testing.assert_close(step(variant, target), alone)


class AskingForGradients(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(3, 3), nn.Linear(3, 2)

    def forward(self, x: Tensor) -> Tensor:
        h = self.base(x)
        h = h if self.base.weight.requires_grad else h * 2
        return self.head(h if h.requires_grad else h + 1)


def test_which_parameters_need_a_gradient_counts_at_each_call(x: Tensor) -> None:
    models = [AskingForGradients().double() for _ in range(2)]
    fused = hf.fuse(models)
    for trained in (True, False, True):
        for model in (fused, *models):
            model.base.requires_grad_(trained)
        torch.testing.assert_close(fused(x), torch.stack([m(x) for m in models]), rtol=1e-12, atol=1e-12)
    assert programs(fused) == 2


def test_an_attribute_of_an_input_that_forward_names_is_refused(x: Tensor) -> None:
    class Marked(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * (2 if hasattr(x, "marked") else 1)

    models = [Marked(3, 2).double() for _ in range(2)]
    fused = hf.fuse(models)
    marked, other = x.clone(), x.clone()
    marked.marked = other.named_otherwise = True  # type: ignore[attr-defined]
    check_equal(fused, models, other)
    with pytest.raises(hf.FusionError, match=r"input 0 carries the Python attribute marked.* x.view_as"):
        fused(marked)
    check_equal(fused, models, marked.view_as(marked))


class Branching(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x.cos() if bool((x.mean(0) > 0.1)[0]) else x * 1.5


class AskingForGradientsOfAResult(nn.Module):
    """Asks of what a looped submodule gave whether gradients flow through it."""

    def __init__(self, asks: Callable[[Tensor], bool]) -> None:
        super().__init__()
        self.branching, self.linear, self.asks = Branching(), nn.Linear(3, 2), asks

    def forward(self, x: Tensor) -> Tensor:
        h = self.branching(x)
        return self.linear(h * 2 if self.asks(h) else h.sin())


@pytest.mark.parametrize("first", [True, False])
@pytest.mark.parametrize(
    "asks",
    [
        lambda h: h.is_leaf,
        lambda h: h.requires_grad,
        lambda h: h.grad_fn is None,
        lambda h: torch.is_grad_enabled(),
    ],
    ids=["is_leaf", "requires_grad", "grad_fn", "is_grad_enabled"],
)
def test_a_question_for_gradients_is_answered_with_gradients_on_and_off(
    x: Tensor, asks: Callable[[Tensor], bool], first: bool
) -> None:
    models = [AskingForGradientsOfAResult(asks).double() for _ in range(2)]
    fused = hf.fuse(models, verify=False)
    x = x.clone().requires_grad_()
    for enabled in (first, not first, first):
        with torch.set_grad_enabled(enabled):
            torch.testing.assert_close(fused(x), torch.stack([m(x) for m in models]), rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize(
    "asks",
    [lambda h: True, lambda h: torch.is_inference_mode_enabled(), lambda h: h.is_inference()],
    ids=["nothing", "is_inference_mode_enabled", "is_inference"],
)
def test_a_first_call_with_a_looped_submodule_may_be_in_inference_mode(
    x: Tensor, asks: Callable[[Tensor], bool]
) -> None:
    models = [AskingForGradientsOfAResult(asks).double() for _ in range(2)]
    fused = hf.fuse(models)
    for inference in (True, False, True):
        with torch.inference_mode(inference):
            torch.testing.assert_close(fused(x), torch.stack([m(x) for m in models]), rtol=1e-12, atol=1e-12)
