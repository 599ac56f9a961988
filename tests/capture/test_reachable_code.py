"""Values outside of a model that forward's code reads or changes, wherever Python keeps them."""

from __future__ import annotations

import argparse
import array
import collections
import contextvars
import functools
import itertools
import os
import random
import types
import weakref
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.capture import python_state
from hfusion.capture.python_state import restored


class Config:
    level = 1.0

    def __init__(self) -> None:
        self.tau = 1.0
        self.inner = argparse.Namespace(tau=1.0)

    def value(self) -> float:
        return self.tau

    @classmethod
    def of_class(cls) -> float:
        return cls.level


class Dotted(dict[str, Any]):
    """A dict whose items are attributes too, with a KeyError where others have an AttributeError."""

    def __getattr__(self, name: str) -> Any:
        return self[name]


class Called:
    def __call__(self) -> float:
        return ARGUMENTS.tau


class Leveled:
    level, levels = 1.0, {"level": 1.0}

    @classmethod
    def of_class(cls) -> float:
        return cls.level


class Derived(Leveled):
    pass


class Raised(Leveled):
    pass


class Operated:
    """An object with methods that code calls without naming them."""

    def __float__(self) -> float:
        return float(ARGUMENTS.tau)

    def __rmul__(self, other: float) -> float:
        return other * float(ARGUMENTS.tau)

    def __iter__(self) -> Iterator[float]:
        return iter([ARGUMENTS.tau])

    def __contains__(self, value: float) -> bool:
        return bool(ARGUMENTS.tau == value)

    def __enter__(self) -> float:
        return float(ARGUMENTS.tau)

    def __exit__(self, *error: object) -> None:
        pass


def read_within() -> float:
    with OPERATED as tau:
        return tau


def scaled(function: Callable[[], float]) -> Any:
    factor = [1.0]

    @functools.wraps(function)
    def wrapper() -> float:
        return function() * factor[0] * wrapper.tau  # type: ignore[attr-defined]

    wrapper.factor, wrapper.tau = factor, 1.0  # type: ignore[attr-defined]
    return wrapper


@scaled
def decorated() -> float:
    return 2.0


def closed_over() -> tuple[Callable[[], float], Callable[[float], None]]:
    held, tau = Config(), 1.0

    def put(value: float) -> None:
        nonlocal tau
        held.tau = tau = value

    return lambda: held.tau * tau, put


def with_default(config: Config = Config()) -> float:  # noqa: B008
    return config.tau


def with_list(values: list[float] = [1.0]) -> float:  # noqa: B006
    return values[0]


def with_attribute() -> float:
    return float(with_attribute.tau)  # type: ignore[attr-defined]


with_attribute.tau = 1.0  # type: ignore[attr-defined]


def read_tau(config: Any) -> float:
    return float(config.tau)


ARGUMENTS, CONFIG, SPACE = argparse.Namespace(tau=1.0), Config(), types.SimpleNamespace(tau=1.0)
DERIVED, RAISED, OPERATED = Derived(), Raised(), Operated()
ITEMS: list[Any] = [Config(), 1.0]
TABLE: dict[str, Any] = {"config": Config()}
DOTTED = [Dotted(tau=1.0)]
USER_DICT = collections.UserDict({"tau": 1.0})
FLAGS: set[str] = set()
QUEUE = collections.deque([1.0])
CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)
NUMBERS, NUMBER, BYTES = np.ones(3), np.array(1.0), array.array("d", [1.0])
CALLED = Called()
PARTIAL = functools.partial(read_tau, CONFIG)
BOUND = CONFIG.value
WEAK = weakref.ref(CONFIG)
PROXY = types.MappingProxyType(TABLE)
OPTIMIZER = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
SCHEDULER = torch.optim.lr_scheduler.ConstantLR(OPTIMIZER, factor=1.0)
READ_CLOSURE, PUT_CLOSURE = closed_over()
READ_OTHER, PUT_OTHER = closed_over()
LONG = [1.0] * 5000


class Outside(nn.Module):
    """A module that the models call, but do not register."""

    def __init__(self) -> None:
        super().__init__()
        self.tau = 1.0
        self.inner = nn.Sequential(nn.Sequential(nn.Sequential(nn.LeakyReLU(1.0))))
        self.norm = nn.BatchNorm1d(2).double().requires_grad_(False)
        self.count = 0

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(-x) * self.tau * (1.0 if self.training else 0.5)  # type: ignore[no-any-return]

    def scale(self) -> float:
        return float(self(torch.full((), -1.0)))

    def counted(self) -> int:
        self.count += 1
        return self.count

    def mean(self) -> float:
        self.norm(torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64))
        assert self.norm.running_mean is not None
        return float(self.norm.running_mean.sum())


class SlottedDict(dict[str, Any]):
    """A dict that raises its own error for a missing key."""

    __slots__ = ("tau",)

    def __missing__(self, key: str) -> Any:
        raise AssertionError(key)


SLOTTED = SlottedDict(a=1)
SLOTTED.tau = 1.0
OUTSIDE, TENSOR = Outside(), torch.zeros(1)
TENSOR.tau, TENSOR.held = 1.0, [1.0]  # type: ignore[attr-defined]
LEAKY: Any = OUTSIDE.inner[0][0]  # type: ignore[index]


def hooked(value: float) -> None:
    OUTSIDE._forward_hooks.clear()
    if value != 1.0:
        OUTSIDE.register_forward_hook(lambda module, args, output: output * value)


def by_wrapper(value: float) -> None:
    decorated.tau = decorated.factor[0] = value


# How forward reads a number, and how it is changed between calls.
READS: Mapping[str, tuple[Callable[[], float], Callable[[float], object]]] = {
    "argparse": (lambda: ARGUMENTS.tau, lambda v: setattr(ARGUMENTS, "tau", v)),
    "namespace": (lambda: SPACE.tau, lambda v: setattr(SPACE, "tau", v)),
    "namespace in an object": (lambda: CONFIG.inner.tau, lambda v: setattr(CONFIG.inner, "tau", v)),
    "object in a list": (lambda: ITEMS[0].tau, lambda v: setattr(ITEMS[0], "tau", v)),
    "list of objects and numbers": (lambda: ITEMS[1], lambda v: ITEMS.__setitem__(1, v)),
    "object in a dict": (lambda: TABLE["config"].tau, lambda v: setattr(TABLE["config"], "tau", v)),
    "object behind a proxy": (lambda: PROXY["config"].tau, lambda v: setattr(TABLE["config"], "tau", v)),
    "passed to a function": (lambda: read_tau(ARGUMENTS), lambda v: setattr(ARGUMENTS, "tau", v)),
    "attribute that hides a class's": (lambda: CONFIG.level, lambda v: setattr(CONFIG, "level", v)),
    "class method": (lambda: Config.of_class(), lambda v: setattr(Config, "level", v)),
    "class variable of an object": (lambda: DERIVED.level, lambda v: setattr(Leveled, "level", v)),
    "class method of a base": (lambda: Derived.of_class(), lambda v: setattr(Leveled, "level", v)),
    "class method of an object": (lambda: DERIVED.of_class(), lambda v: setattr(Leveled, "level", v)),
    "dict of a class": (lambda: DERIVED.levels["level"], lambda v: Leveled.levels.update(level=v)),
    "variable added to a class": (lambda: RAISED.level, lambda v: setattr(Raised, "level", v)),
    "float of an object": (lambda: float(OPERATED), lambda v: setattr(ARGUMENTS, "tau", v)),
    "product with an object": (lambda: 1.0 * OPERATED, lambda v: setattr(ARGUMENTS, "tau", v)),
    "items of an object": (lambda: sum(OPERATED), lambda v: setattr(ARGUMENTS, "tau", v)),
    "membership in an object": (lambda: 2.0 if 0.5 in OPERATED else 1.0, lambda v: setattr(ARGUMENTS, "tau", v)),
    "context manager": (lambda: read_within(), lambda v: setattr(ARGUMENTS, "tau", v)),
    "dict with attributes": (lambda: DOTTED[0].tau, lambda v: DOTTED[0].__setitem__("tau", v)),
    "UserDict": (lambda: USER_DICT["tau"], lambda v: USER_DICT.__setitem__("tau", v)),
    "set": (lambda: 0.5 if "half" in FLAGS else 1.0, lambda v: FLAGS.add("half") if v < 1 else FLAGS.clear()),
    "deque": (lambda: QUEUE[0], lambda v: QUEUE.__setitem__(0, v)),
    "long list": (lambda: LONG[4000], lambda v: LONG.__setitem__(4000, v)),
    "context variable": (lambda: CONTEXT.get(), lambda v: CONTEXT.set(v)),
    "environment": (lambda: float(os.environ.get("TAU", "1")), lambda v: os.environ.__setitem__("TAU", str(v))),
    "numpy": (lambda: float(NUMBERS[1]), lambda v: NUMBERS.__setitem__(1, v)),
    "numpy of no dims": (lambda: float(NUMBER), lambda v: NUMBER.__setitem__((), v)),
    "array": (lambda: BYTES[0], lambda v: BYTES.__setitem__(0, v)),
    "object that is called": (lambda: CALLED(), lambda v: setattr(ARGUMENTS, "tau", v)),
    "partial": (lambda: PARTIAL(), lambda v: setattr(CONFIG, "tau", v)),
    "bound method": (lambda: BOUND(), lambda v: setattr(CONFIG, "tau", v)),
    "weak reference": (lambda: WEAK().tau, lambda v: setattr(CONFIG, "tau", v)),  # type: ignore[union-attr]
    "closure": (lambda: READ_CLOSURE(), PUT_CLOSURE),
    "one of two like closures": (lambda: READ_CLOSURE() + READ_OTHER(), PUT_CLOSURE),
    "the other of them": (lambda: READ_CLOSURE() + READ_OTHER(), PUT_OTHER),
    "default": (lambda: with_default(), lambda v: setattr(with_default.__defaults__[0], "tau", v)),
    "list as a default": (lambda: with_list(), lambda v: with_list.__defaults__[0].__setitem__(0, v)),
    "attribute of a function": (lambda: with_attribute(), lambda v: setattr(with_attribute, "tau", v)),
    "decorator": (lambda: decorated(), by_wrapper),
    "dict with a slot": (lambda: SLOTTED.tau, lambda v: setattr(SLOTTED, "tau", v)),
    "module": (lambda: OUTSIDE.scale(), lambda v: setattr(OUTSIDE, "tau", v)),
    "mode of a module": (lambda: OUTSIDE.scale(), lambda v: OUTSIDE.train(v == 1.0)),
    "hook of a module": (lambda: OUTSIDE.scale(), hooked),
    "nested module": (lambda: OUTSIDE.scale(), lambda v: setattr(LEAKY[0], "negative_slope", v)),
    "replaced module": (lambda: OUTSIDE.scale(), lambda v: LEAKY.__setitem__(0, nn.LeakyReLU(v))),
    "attribute of a tensor": (lambda: TENSOR.tau, lambda v: setattr(TENSOR, "tau", v)),  # type: ignore[attr-defined]
    "list of a tensor": (lambda: TENSOR.held[0], lambda v: TENSOR.held.__setitem__(0, v)),  # type: ignore[attr-defined]
    "learning rate": (lambda: OPTIMIZER.param_groups[0]["lr"], lambda v: OPTIMIZER.param_groups[0].update(lr=v)),
    "scheduler": (lambda: SCHEDULER.get_last_lr()[0], lambda v: SCHEDULER._last_lr.__setitem__(0, v)),
}


def model_that_uses(read: Callable[[], float]) -> nn.Module:
    class Scaled(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * read()

    return Scaled(3, 2).double()


def calls() -> list[Tensor]:
    random = torch.Generator().manual_seed(1)
    return [torch.randn(4, 3, dtype=torch.float64, generator=random) for _ in range(4)]


@pytest.mark.parametrize("kind", READS)
def test_a_value_that_others_change_counts_at_each_call(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAU", raising=False)
    read, put = READS[kind]
    models = [model_that_uses(read) for _ in range(2)]
    fused = hf.fuse(models)
    try:
        for x, value in zip(calls(), (1.0, 0.5, 0.25, 1.0), strict=True):
            put(value)
            expected = torch.stack([model(x) for model in models])
            torch.testing.assert_close(fused(x), expected, rtol=1e-12, atol=0)
    finally:
        put(1.0)
        vars(CONFIG).pop("level", None)


def configured(kind: type[Dotted]) -> list[nn.Module]:
    class Configured(nn.Linear):
        def __init__(self) -> None:
            super().__init__(3, 2)
            self.config = kind(tau=2.0)

        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * self.config.tau

    return [Configured() for _ in range(2)]


class Copied(Dotted):
    def __deepcopy__(self, memo: dict[int, Any]) -> Copied:
        return Copied(self)


def test_an_attribute_may_be_a_dict_with_attributes() -> None:
    models, x = configured(Copied), torch.randn(4, 3)
    torch.testing.assert_close(hf.fuse(models)(x), torch.stack([model(x) for model in models]))
    with pytest.raises(hf.FusionError, match=r"model 0 .* cannot be deep-copied \(KeyError: '__deepcopy__'"):
        hf.fuse(configured(Dotted))


class Counter:
    count = 0

    def __init__(self) -> None:
        self.count = 0


COUNTER, LATER = Counter(), types.SimpleNamespace()
COUNT_CONTEXT = contextvars.ContextVar("COUNT_CONTEXT", default=0)


def of_object() -> int:
    COUNTER.count += 1
    return COUNTER.count


def of_class() -> int:
    Counter.count += 1
    return Counter.count


def of_new_attribute() -> int:
    LATER.count = getattr(LATER, "count", 0) + 1
    return int(LATER.count)


def of_function() -> int:
    of_function.count = getattr(of_function, "count", 0) + 1  # type: ignore[attr-defined]
    return int(of_function.count)  # type: ignore[attr-defined]


def of_default(history: list[int] = []) -> int:  # noqa: B006
    history.append(1)
    return len(history)


def of_context() -> int:
    COUNT_CONTEXT.set(COUNT_CONTEXT.get() + 1)
    return COUNT_CONTEXT.get()


def of_array() -> float:
    COUNTS[0] += 1
    return float(COUNTS[0])


def of_long_list() -> int:
    MANY.append(1)
    return len(MANY)


def of_tensor() -> float:
    TOTAL.add_(1)
    return TOTAL.item()


def of_tensor_in_dict() -> float:
    BANK["rows"][1] += 1
    return float(BANK["rows"].sum())


def of_module() -> int:
    return OUTSIDE.counted()


def of_statistics() -> float:
    return OUTSIDE.mean()


def draw() -> float:
    return random.random() + float(np.random.rand())


def draw_from_objects() -> float:
    return PYTHON_DRAWS.random() + float(NUMPY_DRAWS.random()) + float(OLD_NUMPY_DRAWS.rand())


COUNTS, MANY = np.zeros(2), [0] * 2000
TOTAL, BANK = torch.zeros(()), {"rows": torch.zeros(3)}
PYTHON_DRAWS, NUMPY_DRAWS, OLD_NUMPY_DRAWS = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)


def reset() -> None:
    COUNTER.count = Counter.count = 0
    vars(LATER).clear()
    vars(of_function).clear()
    of_default.__defaults__[0].clear()  # type: ignore[index]
    COUNT_CONTEXT.set(0)
    COUNTS[0] = 0
    TOTAL.zero_()
    OUTSIDE.count = 0
    OUTSIDE.norm.reset_running_stats()
    BANK["rows"].zero_()
    del MANY[2000:]
    random.seed(1)
    np.random.seed(1)
    PYTHON_DRAWS.seed(1)
    OLD_NUMPY_DRAWS.seed(1)
    NUMPY_DRAWS.bit_generator.state = np.random.default_rng(1).bit_generator.state


COUNTERS = [of_object, of_class, of_new_attribute, of_function, of_default, of_context, of_array, of_long_list]
COUNTERS += [of_tensor, of_tensor_in_dict, of_module, of_statistics]


@pytest.fixture
def _counters_at_zero() -> Iterator[None]:
    reset()
    yield
    reset()


@pytest.mark.usefixtures("_counters_at_zero")
@pytest.mark.parametrize("count", [*COUNTERS, draw, draw_from_objects])
def test_outside_counters_of_forward_match_eager(count: Callable[[], float]) -> None:
    class Counting(nn.Linear):
        def forward(self, x: Tensor) -> Tensor:
            return super().forward(x) * count()

    models = [Counting(3, 2).double() for _ in range(2)]
    expected = [torch.stack([model(x) for model in models]) for x in calls()]
    reset()
    fused = hf.fuse(models)
    for x, expected_output in zip(calls(), expected, strict=True):
        torch.testing.assert_close(fused(x), expected_output, rtol=1e-12, atol=0)


@pytest.mark.usefixtures("_counters_at_zero")
@pytest.mark.parametrize("count", [*COUNTERS, draw_from_objects])
def test_outside_counters_of_a_run_are_restored(count: Callable[[], float]) -> None:
    model = model_that_uses(count)
    count()
    with restored(model):
        later = [count(), count()]
        assert later[0] != later[1]
    assert [count(), count()] == later


@pytest.mark.usefixtures("_counters_at_zero")
def test_a_large_tensor_outside_is_not_written_into(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(python_state, "MAX_TENSOR_BYTES", 3)
    fused = hf.fuse([model_that_uses(of_tensor) for _ in range(2)])
    with pytest.raises(hf.FusionError, match=r"forward writes into TOTAL, a tensor of shape \(\) outside of the model"):
        fused(torch.randn(4, 3, dtype=torch.float64))


NUMBERED, LISTED = itertools.count(1), iter([1.0] * 100)
YIELDED = (float(k) for k in range(100))


@pytest.mark.parametrize("read", [lambda: next(NUMBERED), lambda: next(LISTED), lambda: next(YIELDED)])
def test_an_iterator_outside_is_refused(read: Callable[[], float]) -> None:
    fused = hf.fuse([model_that_uses(read) for _ in range(2)])
    with pytest.raises(hf.FusionError, match="an iterator outside of the model, and so do captures"):
        fused(torch.randn(4, 3, dtype=torch.float64))


def test_an_iterator_that_stays_where_it_is_may_be_named() -> None:
    models = [model_that_uses(lambda: 2.0 if NUMBERED is not None else 1.0) for _ in range(2)]
    x = torch.randn(4, 3, dtype=torch.float64)
    torch.testing.assert_close(hf.fuse(models)(x), torch.stack([model(x) for model in models]))
