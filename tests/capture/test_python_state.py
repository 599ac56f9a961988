"""Python state that crosses the border of a submodule that runs member by member: fused equals alone."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.compiler.arguments import Arguments
from tests.alone import assert_alone, looped, normal

FAR = 1e9


class Memory:
    def __init__(self) -> None:
        self.h: Tensor | None = None


CONFIG = SimpleNamespace(limit=FAR)
KEPT: dict[str, Tensor | None] = {}
LAST: Tensor | None = None


class Cell(nn.Module):
    """Adds what it remembers; a branch on values keeps it out of a graph."""

    def __init__(self, memory: Memory | None = None, detached: bool = True) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4).double()
        self.detached = detached
        self.state: Any = None
        self.past: list[Tensor] = []
        self.table: Tensor | None = None
        self.memory = memory or Memory()
        self.scale, self.count, self.mean = 1.0, 0, 0.0
        self.large = False
        self.config = CONFIG

    def forward(self, x: Tensor) -> Tensor:
        h: Tensor = self.fc(x if x.sum() < FAR else -x)
        if self.state is not None:
            h = h + self.state
        self.state = h.detach() if self.detached else h
        return h

    def configured(self, x: Tensor) -> Tensor:
        if self.config.limit is None:
            self.config.limit = FAR
        return self.fc(x if x.sum() < self.config.limit else -x)  # type: ignore[no-any-return]

    of_all: Tensor | None = None

    def of_the_class(self, x: Tensor) -> Tensor:
        h: Tensor = self.fc(x if x.sum() < FAR else -x)
        Cell.of_all = h.detach() if Cell.of_all is None else h.detach() + Cell.of_all
        return h + Cell.of_all

    def of_a_dict(self, x: Tensor) -> Tensor:
        h: Tensor = self.fc(x if x.sum() < FAR else -x)
        total = KEPT.get("h")
        KEPT["h"] = h if total is None else h + total
        return h if total is None else h * total

    def of_the_file(self, x: Tensor) -> Tensor:
        global LAST
        h: Tensor = self.fc(x if x.sum() < FAR else -x)
        LAST = h if LAST is None else h + LAST
        return LAST

    def reset(self) -> None:
        self.state = None

    def listed(self, x: Tensor) -> Tensor:
        self.past.append(self.fc(x if x.sum() < FAR else -x))
        return torch.stack(self.past).sum(0)

    def remembered(self, x: Tensor) -> Tensor:
        h: Tensor = self.fc(x if x.sum() < FAR else -x)
        self.memory.h = h if self.memory.h is None else h + self.memory.h
        return self.memory.h

    def counted(self, x: Tensor) -> Tensor:
        self.count += 1
        return (self.fc(x) if x.sum() < FAR else x) * self.count

    def scaled(self, x: Tensor) -> Tensor:
        return (self.fc(x) if x.sum() < FAR else x) * self.scale

    def told(self, x: Tensor) -> Tensor:
        h: Tensor = self.fc(x if x.sum() < FAR else -x)
        self.state, self.mean, self.large = h.square().mean(), float(h.detach().mean()), bool(h.detach().mean() > 0)
        return h

    def flagged(self, x: Tensor) -> Tensor:
        if x.sum() > 0:
            self.large = True
        return self.fc(x) * 2 if self.large else -self.fc(x)

    def rare(self, x: Tensor) -> Tensor:
        self.state = x.detach().mean() if x.sum() > 0 else None
        return self.fc(x)

    def tabled(self, x: Tensor) -> Tensor:
        if self.table is None or len(self.table) != len(x):
            self.table = torch.arange(len(x), dtype=x.dtype).cos()[:, None]
        return (self.fc(x) if x.sum() < FAR else x) * self.table

    def started(self, x: Tensor, step: int) -> Tensor:
        if step == 0:
            self.state = None
        return self(x)


class Net(nn.Module):
    def __init__(self, run: Callable[[Any, Tensor], Any], **options: Any) -> None:
        super().__init__()
        self.run = run
        self.c, self.out = Cell(**options), nn.Linear(4, 4).double()
        self.seen = self.c.memory

    def forward(self, x: Tensor) -> Any:
        return self.run(self, x)


def cleared_first(self: Any, x: Tensor) -> Tensor:
    self.c.state = None
    return self.out(self.c(x))


def cleared_last(self: Any, x: Tensor) -> Tensor:
    y = self.out(self.c(x))
    self.c.state = None
    return y


def cleared_by_a_method(self: Any, x: Tensor) -> Tensor:
    self.c.reset()
    return self.out(self.c(x))


def cleared_between(self: Any, x: Tensor) -> Tensor:
    y = self.out(x)
    for _ in range(2):
        self.c.state = None
        y = self.c(self.c(y))
    self.c.state = None
    return y


def begun_with_a_tensor(self: Any, x: Tensor) -> Tensor:
    self.c.state = self.out(x).tanh()
    return self.c(self.c(x))


def cleared_list(self: Any, x: Tensor) -> Tensor:
    self.c.past.clear()
    return self.out(self.c.listed(x) + self.c.listed(-x))


def new_list(self: Any, x: Tensor) -> Tensor:
    self.c.past = []
    return self.out(self.c.listed(x) + self.c.listed(-x))


def shared_object(self: Any, x: Tensor) -> Tensor:
    self.seen.h = None
    return self.out(self.c.remembered(x))


def shared_object_read(self: Any, x: Tensor) -> Tensor:
    self.seen.h = None
    self.c.remembered(x)
    return self.out(self.seen.h)


def count_from_zero(self: Any, x: Tensor) -> Tensor:
    self.c.count = 0
    return self.out(self.c.counted(self.c.counted(x)))


def other_scale(self: Any, x: Tensor) -> Tensor:
    self.c.scale = 3.0
    return self.out(self.c.scaled(x))


def read_afterwards(self: Any, x: Tensor) -> Any:
    return self.out(self.c.told(x)), self.c.state * 1


def given_back(self: Any, x: Tensor) -> Any:
    return self.out(self.c.told(x)), self.c.state


def read_number(self: Any, x: Tensor) -> Tensor:
    return self.c.told(self.out(x)) * self.c.mean


def read_flag(self: Any, x: Tensor) -> Tensor:
    y = self.c.told(self.out(x))
    return y * 2 if self.c.large else -y


def cleared_flag(self: Any, x: Tensor) -> Tensor:
    # Only some batches set the flag.
    self.c.large = False
    return self.c.flagged(self.out(x))


def rarely_left(self: Any, x: Tensor) -> Tensor:
    y = self.c.rare(self.out(x))
    return y if self.c.state is None else y + self.c.state


def class_variable(self: Any, x: Tensor) -> Tensor:
    Cell.of_all = None
    return self.out(self.c.of_the_class(self.out(self.c.of_the_class(x))))


def dict_of_the_file(self: Any, x: Tensor) -> Tensor:
    KEPT.clear()
    return self.out(self.c.of_a_dict(self.out(self.c.of_a_dict(x))))


def global_variable(self: Any, x: Tensor) -> Tensor:
    global LAST
    LAST = None
    return self.out(self.c.of_the_file(self.out(self.c.of_the_file(x))))


def table(self: Any, x: Tensor) -> Tensor:
    return self.out(self.c.tabled(x))


def steps(self: Any, x: Tensor) -> Tensor:
    return self.out(self.c.started(x, 0) + self.c.started(-x, 1))


def configured(self: Any, x: Tensor) -> Tensor:
    if CONFIG.limit is None:
        CONFIG.limit = FAR
    return self.out(self.c.configured(x))


CROSSING = [
    cleared_first,
    cleared_last,
    cleared_by_a_method,
    cleared_between,
    begun_with_a_tensor,
    cleared_list,
    new_list,
    shared_object,
    shared_object_read,
    count_from_zero,
    other_scale,
    read_afterwards,
    given_back,
    read_number,
    read_flag,
    cleared_flag,
    rarely_left,
    class_variable,
    dict_of_the_file,
    global_variable,
]
CALLS = (normal(3, 4), normal(3, 4), normal(2, 4), normal(3, 4))


def _alone(run: Callable[[Any, Tensor], Any], training: bool, **options: Any) -> hf.FusedModule:
    models = [Net(run, **options).train(training) for _ in range(2)]
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "forward of Net leaves results")
        return assert_alone(models, *CALLS)


@pytest.mark.parametrize("run", CROSSING)
def test_state_that_others_write_or_read(run: Callable[[Any, Tensor], Any]) -> None:
    # In eval mode no self-check would tell.
    fused = _alone(run, training=False)
    assert looped(fused.report().parts[0]) == {"forward"}


@pytest.mark.parametrize("detached", [True, False])
@pytest.mark.parametrize("run", [cleared_first, begun_with_a_tensor])
def test_state_in_training(run: Callable[[Any, Tensor], Any], detached: bool) -> None:
    _alone(run, training=True, detached=detached)


@pytest.mark.parametrize(
    ("run", "path"), [(table, "c.tabled()"), (steps, "c.started()"), (configured, "c.configured()")]
)
def test_state_that_no_other_module_uses(run: Any, path: str) -> None:
    fused = _alone(run, training=True)
    assert looped(fused.report().parts[0]) == {path}


def test_self_check_leaves_no_state() -> None:
    fused = hf.fuse([Net(table) for _ in range(2)])
    arguments = Arguments.of((normal(3, 4),), {})
    compiled = fused.compiled(arguments)
    fused.check(compiled, arguments)
    assert "passed" in str(fused.report())
    assert all(body.table is None for call in compiled.opaque for body in call.bodies)


class Detector(nn.Module):
    """Notes in shared state that a value was large, which trial runs on usual values do not."""

    def __init__(self, state: Any, note: Callable[[Any], Any]) -> None:
        super().__init__()
        self.state, self.note, self.hot = state, note, False

    def forward(self, x: Tensor) -> Tensor:
        if x.max() > 5:
            self.hot = True
            self.note(self.state)
        return x


def note_in_dict(state: Any) -> None:
    state["hot"] = True


def note_in_list(state: Any) -> None:
    state.append(1)


def note_in_object(state: Any) -> None:
    state.hot = True


class Shared:
    def __init__(self) -> None:
        self.hot = False


class Reader(nn.Module):
    """Computes something else once the detector has seen a large value; detects before or after it reads."""

    def __init__(self, kind: str, first: bool) -> None:
        super().__init__()
        state, note = {
            "dict": ({"hot": False}, note_in_dict),
            "list": ([], note_in_list),
            "object": (Shared(), note_in_object),
            "attribute": (None, lambda state: None),
        }[kind]
        self.kind, self.first, self.state = kind, first, state
        self.detector, self.linear = Detector(state, note), nn.Linear(3, 3)

    def is_hot(self) -> bool:
        if self.kind == "attribute":
            return self.detector.hot
        if self.kind == "object":
            return self.state.hot
        return bool(self.state["hot"] if self.kind == "dict" else self.state)

    def forward(self, x: Tensor) -> Tensor:
        if self.first:
            x = self.detector(x)
        x = self.linear(x) * (2 if self.is_hot() else 1)
        return x if self.first else self.detector(x)


@pytest.mark.parametrize("first", [True, False], ids=["detects, reads", "reads, detects"])
@pytest.mark.parametrize("kind", ["dict", "list", "object", "attribute"])
def test_state_that_only_rare_values_change_is_read_by_all(kind: str, first: bool) -> None:
    models = [Reader(kind, first).double() for _ in range(2)]
    fused = hf.fuse(copy.deepcopy(models))
    for size in (1.0, 1.0, 100.0, 1.0):
        # Only the first member meets large values.
        x = torch.rand(2, 4, 3, dtype=torch.float64) * torch.tensor([size, 1.0]).reshape(2, 1, 1)
        expected = torch.stack([model(row) for model, row in zip(models, x, strict=True)])
        torch.testing.assert_close(fused(hf.stacked(x)), expected, rtol=1e-9, atol=1e-9)
