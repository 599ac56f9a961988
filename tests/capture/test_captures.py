"""How often forward is traced and run: captures are found again, and few runs answer all questions of one."""

from __future__ import annotations

import copy
import inspect
import random
import sys
import threading
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from types import FrameType
from typing import Any

import pytest
import torch
from expecttest import assert_expected_inline
from torch import Tensor, nn

import hfusion as hf
from hfusion.capture.export import capture, symbolic_len
from hfusion.capture.observe import observe
from hfusion.compiler.arguments import Arguments
from hfusion.core.program import Capture
from hfusion.torch_private.export_state import exporting
from tests.alone import assert_alone, normal
from tests.forwards import writes
from tests.forwards.state import Cell
from tests.forwards.table import branch, buffer, exports, linear, module, square

SCALE = 2.0
SETTINGS: dict[str, Any] = {"power": 1}


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


class Helper:
    shift = 1.0

    def apply(self, x: Tensor) -> Tensor:
        return x + self.shift


class Reading(nn.Module):
    """Reads an attribute, variables of its file through a function and a method, a class and an object."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(3, 3), nn.Dropout(0.0)
        self.slope, self.table, self.helper = 0.1, [0.0, 1.0, 2.0], Helper()

    def power(self, x: Tensor) -> Tensor:
        return x ** SETTINGS["power"]

    def forward(self, x: Tensor) -> Tensor:
        h = scaled(self.power(self.linear(x.to(self.linear.weight)))) * self.factor + torch.tensor(self.table)
        return nn.functional.leaky_relu(self.helper.apply(self.drop(h)), self.slope)


class Other(Reading):
    def power(self, x: Tensor) -> Tensor:
        return -super().power(x)


def found(module: nn.Module, *args: Any, **options: Any) -> Capture:
    return capture(module, args or (torch.ones(4, 3),), {}, **options)


CHANGES: dict[str, Callable[[Reading], Any]] = {
    "attribute": lambda m: setattr(m, "slope", 0.2),
    "zero of another sign": lambda m: setattr(m, "slope", -0.1),
    "dtype": lambda m: m.double(),
    "mode": lambda m: m.eval(),
    "frozen": lambda m: m.linear.weight.requires_grad_(False),
    "table": lambda m: m.table.__setitem__(0, 1.0),
    "object": lambda m: setattr(m.helper, "shift", 4.0),
    "hook": lambda m: m.drop.register_forward_hook(lambda part, args, output: output * 3),
    "own method": lambda m: setattr(m, "power", lambda x: x * 5),
    "class": lambda m: setattr(m, "__class__", Other),
    "width": lambda m: setattr(m, "linear", nn.Linear(3, 3, bias=False)),
}
NAMED = [("SCALE", 3.0), ("scaled", lambda x: x), ("Reading.factor", 2.0), ("Helper.shift", 3.0)]


def test_a_capture_is_found_again_only_where_nothing_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    first_model = Reading()
    first = found(first_model).graph
    assert found(Reading()).graph is first
    for name, change in CHANGES.items():
        model = Reading()
        change(model)
        assert found(model).graph is not first, name
    for name, value in NAMED:
        with monkeypatch.context() as changed:
            changed.setattr(f"{__name__}.{name}", value)
            assert found(Reading()).graph is not first, name
    monkeypatch.setitem(SETTINGS, "power", 2)
    assert found(Reading()).graph is not first
    monkeypatch.setitem(SETTINGS, "power", 1)
    x = torch.ones(4, 3)
    graphs = [
        found(first_model, *args, **options).graph
        for args, options in [
            ([torch.ones(5, 3)], {}),
            ([torch.ones(4, 3, requires_grad=True)], {}),
            ([x], {"varying": False}),
            ([torch.ones(4, 2, 3)], {}),
            ([x], {"dims": [{1}]}),
            ([x.double()], {}),
        ]
    ]
    assert len({id(graph) for graph in [first, *graphs]}) == 7
    torch.set_default_dtype(torch.float64)
    assert found(first_model, x).graph is not first


KINDS = {
    "what has no content to compare": module(
        lambda self, x: self.fc(x) * copy.deepcopy(self.source).random(), fc=linear, source=lambda: random.Random(0)
    ),
    "a tensor that is freed with it": module(lambda self, x: self.fc(x) * self.held, fc=linear, held=torch.ones(4)),
}


@pytest.mark.parametrize("kind", KINDS)
def test_modules_that_cannot_be_recognized_are_captured_each_time(kind: str) -> None:
    model = KINDS[kind]()
    assert found(model, normal(3, 4)).graph is not found(model, normal(3, 4)).graph


RUNS = {
    "layers": module(lambda self, x: self.fc(x).relu(), fc=linear),
    "branch": module(lambda self, x: branch(self.fc(x)), fc=linear),
    "branch inside": module(lambda self, x: self.inner(self.fc(x)), fc=linear, inner=module(lambda self, x: branch(x))),
    "result left": module(lambda self, x: (setattr(self, "last", self.fc(x).detach()), self.fc(x))[1], fc=linear),
    "norm and dropout": module(lambda self, x: self.m(x), m=lambda: nn.Sequential(nn.BatchNorm1d(4), nn.Dropout(0.1))),
    "lstm": module(lambda self, x: self.m(x)[0], m=lambda: nn.LSTM(4, 4)),
}


@pytest.mark.parametrize("members", [1, 4])
@pytest.mark.parametrize("kind", RUNS)
def test_forward_runs_few_times_before_the_first_output(kind: str, members: int) -> None:
    """Of these, one is the trace and one the check of the array, in which further members run once."""
    models = [RUNS[kind]() for _ in range(members)]
    code, count = type(models[0]).forward.__code__, 0

    def profile(frame: FrameType, event: str, argument: Any) -> None:
        nonlocal count
        # Seen from outside, as a counter in forward would be state.
        count += event == "call" and frame.f_code is code

    fused, x = hf.fuse(models), normal(5, 4)
    sys.setprofile(profile)
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            fused(x)
    finally:
        sys.setprofile(None)
    assert count <= 6 + members - 1


def test_depth_costs_no_exports() -> None:
    counts = []
    for depth in (2, 5):
        inner = lambda: nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), square()))  # noqa: E731
        deep = module(_added, rows=lambda depth=depth, inner=inner: nn.ModuleList(inner() for _ in range(depth)))
        with exports() as names:
            text = str(assert_alone([deep() for _ in range(2)], normal(3, 4)).report())
        assert all(f"loop over members, rows.{k}.1.1: " in text for k in range(depth))
        counts.append(len(names))
    assert counts[0] == counts[1]


def _added(self: Any, x: Tensor) -> Tensor:
    for row in self.rows:
        x = x + row(x)
    return x


INSIDE, GO = threading.Event(), threading.Event()


class Waiting(nn.Linear):
    """Waits where it is exported until it may go on."""

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            INSIDE.set()
            assert GO.wait(60)
        return super().forward(x)


def test_other_threads_see_no_export() -> None:
    """Torch's flags for an export belong to the whole process."""
    models = [module(lambda self, x: branch(self.fc(x)), fc=linear)() for _ in range(2)]
    array, x = hf.fuse(models), normal(5, 4)
    expected = torch.stack([model(x) for model in models])
    assert torch.equal(array(x), expected)
    waiting = hf.fuse([Waiting(4, 3).double() for _ in range(2)])
    with ThreadPoolExecutor(1) as other:
        captured = other.submit(waiting, x)
        try:
            assert INSIDE.wait(60)
            assert not torch.compiler.is_exporting()
            assert not torch.compiler.is_compiling()
            assert not exporting()
            assert torch.equal(array(x), expected)
        finally:
            GO.set()
        assert captured.result(60).shape == (2, 5, 3)
    assert torch.compiler._is_exporting_flag is False
    assert torch.compiler._is_compiling_flag is False


def test_a_trial_run_leaves_no_state_and_addresses_no_memory() -> None:
    fused = hf.fuse([module(lambda self, x: self.c.tabled(x), c=Cell)() for _ in range(2)])
    arguments = Arguments.of((normal(3, 4),), {})
    compiled = fused.compiled(arguments)
    fused.check(compiled, arguments)
    assert all(body.table is None for call in compiled.opaque for body in call.bodies)
    # To look for writes is not to address memory, for which each member would get copies.
    fused, x = hf.fuse([writes.Convex(writes.PROJECTIONS["clamp"], loops=True) for _ in range(2)]), normal(5, 4)
    fused(x)
    assert not any(operation.addresses for operation in fused.compiled(Arguments.of((x,), {})).opaque)


def test_python_has_its_own_len_again(monkeypatch: pytest.MonkeyPatch) -> None:
    class Fails(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            assert (len(x), len([1, 2]), len({})) == (x.shape[0], 2, 0)
            with pytest.raises(TypeError, match="0-d"):
                len(x.sum())
            raise RuntimeError("no forward")

    with symbolic_len(Fails()), pytest.raises(RuntimeError, match="no forward"):
        Fails()(torch.zeros(2, 3))
    assert "len" not in globals()
    custom_len: Any = lambda value: 1  # noqa: E731
    monkeypatch.setitem(globals(), "len", custom_len)
    with symbolic_len(Fails()):
        assert globals()["len"] is custom_len


def test_torch_still_asks_the_engine_that_is_replaced() -> None:
    """Undocumented: what `torch.autograd.grad` calls, and with which arguments."""
    source = inspect.getsource(torch.autograd.grad)
    assert "_engine_run_backward(" in source
    assert "accumulate_grad=False" in source


class Settings:
    rate = 0.5


def observed_forward(self: Any, x: Tensor, flag: bool = True) -> tuple[Tensor, int]:
    self.steps += 1
    self.seen += 1
    if x.requires_grad and not flag:
        x = x * Settings.rate
    if torch.are_deterministic_algorithms_enabled():
        x = x + 1
    self.fc.eval()
    return self.fc(x) * self.p * SCALE, len(self.sizes)


def test_an_observation_as_text() -> None:
    """What forward may read, what it changes, and what it returns."""
    kept = {"p": 0.3, "sizes": lambda: [1, 2], "unread": 7, "steps": 0, "seen": buffer(0.0, 1)}
    observed = observe(module(observed_forward, fc=linear, **kept)(), (normal(4, 4),), {"flag": True})
    assert_expected_inline(
        str(observed).replace(__name__, __name__.rpartition(".")[2]),
        """\
one run of Part in train mode
inputs
  f64[4,4]
  True
reads
  Settings.rate
  test_captures.SCALE
writes
  seen
  steps
  fc.training
outputs
  f64[4,4]
  2
gradients
  fc.weight
  fc.bias""",
    )
    without = observe(module(lambda self, x: x * self.fc.weight.detach(), fc=linear)(), (normal(4, 4),), {})
    assert str(without).endswith("gradients\n  none")
