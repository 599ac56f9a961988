"""Values outside of the models that forward reads or changes, wherever Python keeps them.

`READS` maps a kind of value to how forward reads a number there, and how others change it between calls; `COUNTERS` are
values that forward changes itself.
"""

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

import numpy as np
import torch
from torch import nn


class Config:
    level = 1.0

    def __init__(self):
        self.tau = 1.0
        self.inner = argparse.Namespace(tau=1.0)

    def value(self):
        return self.tau

    @classmethod
    def of_class(cls):
        return cls.level


class Dotted(dict):
    """A dict whose items are attributes too, with a KeyError where others have an AttributeError."""

    def __getattr__(self, name):
        return self[name]


class Leveled:
    level, levels = 1.0, {"level": 1.0}

    @classmethod
    def of_class(cls):
        return cls.level


class Derived(Leveled):
    pass


class Raised(Leveled):
    pass


class Operated:
    """An object with methods that code calls without naming them."""

    def __float__(self):
        return float(ARGUMENTS.tau)

    def __rmul__(self, other):
        return other * float(ARGUMENTS.tau)

    def __iter__(self):
        return iter([ARGUMENTS.tau])

    def __contains__(self, value):
        return bool(ARGUMENTS.tau == value)

    def __call__(self):
        return ARGUMENTS.tau

    def __enter__(self):
        return float(ARGUMENTS.tau)

    def __exit__(self, *error):
        pass


def read_within():
    with OPERATED as tau:
        return tau


def scaled(function):
    factor = [1.0]

    @functools.wraps(function)
    def wrapper():
        return function() * factor[0] * wrapper.tau

    wrapper.factor, wrapper.tau = factor, 1.0
    return wrapper


@scaled
def decorated():
    return 2.0


def closed_over():
    held, tau = Config(), 1.0

    def put(value):
        nonlocal tau
        held.tau = tau = value

    return lambda: held.tau * tau, put


def with_default(config=Config()):  # noqa: B008
    return config.tau


def with_list(values=[1.0]):  # noqa: B006
    return values[0]


def with_attribute():
    return float(with_attribute.tau)


def read_tau(config):
    return float(config.tau)


class SlottedDict(dict):
    """A dict that raises its own error for a missing key."""

    __slots__ = ("tau",)

    def __missing__(self, key):
        raise AssertionError(key)


class Outside(nn.Module):
    """A module that the models call, but do not register."""

    def __init__(self):
        super().__init__()
        self.tau = 1.0
        self.inner = nn.Sequential(nn.Sequential(nn.Sequential(nn.LeakyReLU(1.0))))
        self.norm = nn.BatchNorm1d(2).double().requires_grad_(False)
        self.count = 0

    def forward(self, x):
        return self.inner(-x) * self.tau * (1.0 if self.training else 0.5)

    def scale(self):
        return float(self(torch.full((), -1.0)))

    def counted(self):
        self.count += 1
        return self.count

    def mean(self):
        self.norm(torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64))
        return float(self.norm.running_mean.sum())


with_attribute.tau = 1.0
ARGUMENTS, CONFIG, SPACE = argparse.Namespace(tau=1.0), Config(), types.SimpleNamespace(tau=1.0)
DERIVED, RAISED, OPERATED = Derived(), Raised(), Operated()
ITEMS, TABLE, DOTTED = [Config(), 1.0], {"config": Config()}, [Dotted(tau=1.0)]
USER_DICT, FLAGS, QUEUE = collections.UserDict({"tau": 1.0}), set(), collections.deque([1.0])
CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)
NUMBERS, NUMBER, BYTES = np.ones(3), np.array(1.0), array.array("d", [1.0])
PARTIAL, BOUND, WEAK = functools.partial(read_tau, CONFIG), CONFIG.value, weakref.ref(CONFIG)
PROXY, LONG = types.MappingProxyType(TABLE), [1.0] * 5000
OPTIMIZER = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
SCHEDULER = torch.optim.lr_scheduler.ConstantLR(OPTIMIZER, factor=1.0)
READ_CLOSURE, PUT_CLOSURE = closed_over()
READ_OTHER, PUT_OTHER = closed_over()
SLOTTED, OUTSIDE, TENSOR = SlottedDict(a=1), Outside(), torch.zeros(1)
SLOTTED.tau = TENSOR.tau = 1.0
TENSOR.held = [1.0]
LEAKY = OUTSIDE.inner[0][0]


def hooked(value):
    OUTSIDE._forward_hooks.clear()
    if value != 1.0:
        OUTSIDE.register_forward_hook(lambda module, args, output: output * value)


def by_wrapper(value):
    decorated.tau = decorated.factor[0] = value


def put(holder, name="tau"):
    """Return a function that sets an attribute."""
    return functools.partial(setattr, holder, name)


def item(holder, key):
    return functools.partial(holder.__setitem__, key)


READS = {
    "argparse": (lambda: ARGUMENTS.tau, put(ARGUMENTS)),
    "namespace": (lambda: SPACE.tau, put(SPACE)),
    "namespace in an object": (lambda: CONFIG.inner.tau, put(CONFIG.inner)),
    "object in a list": (lambda: ITEMS[0].tau, put(ITEMS[0])),
    "list of objects and numbers": (lambda: ITEMS[1], item(ITEMS, 1)),
    "object in a dict": (lambda: TABLE["config"].tau, put(TABLE["config"])),
    "object behind a proxy": (lambda: PROXY["config"].tau, put(TABLE["config"])),
    "passed to a function": (lambda: read_tau(ARGUMENTS), put(ARGUMENTS)),
    "attribute that hides a class's": (lambda: CONFIG.level, put(CONFIG, "level")),
    "class method": (lambda: Config.of_class(), put(Config, "level")),
    "class variable of an object": (lambda: DERIVED.level, put(Leveled, "level")),
    "class method of a base": (lambda: Derived.of_class(), put(Leveled, "level")),
    "class method of an object": (lambda: DERIVED.of_class(), put(Leveled, "level")),
    "dict of a class": (lambda: DERIVED.levels["level"], item(Leveled.levels, "level")),
    "variable added to a class": (lambda: RAISED.level, put(Raised, "level")),
    "float of an object": (lambda: float(OPERATED), put(ARGUMENTS)),
    "product with an object": (lambda: 1.0 * OPERATED, put(ARGUMENTS)),
    "items of an object": (lambda: sum(OPERATED), put(ARGUMENTS)),
    "membership in an object": (lambda: 2.0 if 0.5 in OPERATED else 1.0, put(ARGUMENTS)),
    "context manager": (lambda: read_within(), put(ARGUMENTS)),
    "dict with attributes": (lambda: DOTTED[0].tau, item(DOTTED[0], "tau")),
    "UserDict": (lambda: USER_DICT["tau"], item(USER_DICT, "tau")),
    "set": (lambda: 0.5 if "half" in FLAGS else 1.0, lambda v: FLAGS.add("half") if v < 1 else FLAGS.clear()),
    "deque": (lambda: QUEUE[0], item(QUEUE, 0)),
    "long list": (lambda: LONG[4000], item(LONG, 4000)),
    "context variable": (lambda: CONTEXT.get(), CONTEXT.set),
    "environment": (lambda: float(os.environ.get("TAU", "1")), lambda v: os.environ.__setitem__("TAU", str(v))),
    "numpy": (lambda: float(NUMBERS[1]), item(NUMBERS, 1)),
    "numpy of no dims": (lambda: float(NUMBER), item(NUMBER, ())),
    "array": (lambda: BYTES[0], item(BYTES, 0)),
    "object that is called": (lambda: OPERATED(), put(ARGUMENTS)),
    "partial": (lambda: PARTIAL(), put(CONFIG)),
    "bound method": (lambda: BOUND(), put(CONFIG)),
    "weak reference": (lambda: WEAK().tau, put(CONFIG)),
    "closure": (lambda: READ_CLOSURE(), PUT_CLOSURE),
    "one of two like closures": (lambda: READ_CLOSURE() + READ_OTHER(), PUT_CLOSURE),
    "the other of them": (lambda: READ_CLOSURE() + READ_OTHER(), PUT_OTHER),
    "default": (lambda: with_default(), put(with_default.__defaults__[0])),
    "list as a default": (lambda: with_list(), item(with_list.__defaults__[0], 0)),
    "attribute of a function": (lambda: with_attribute(), put(with_attribute)),
    "decorator": (lambda: decorated(), by_wrapper),
    "dict with a slot": (lambda: SLOTTED.tau, put(SLOTTED)),
    "module": (lambda: OUTSIDE.scale(), put(OUTSIDE)),
    "mode of a module": (lambda: OUTSIDE.scale(), lambda v: OUTSIDE.train(v == 1.0)),
    "hook of a module": (lambda: OUTSIDE.scale(), hooked),
    "nested module": (lambda: OUTSIDE.scale(), lambda v: setattr(LEAKY[0], "negative_slope", v)),
    "replaced module": (lambda: OUTSIDE.scale(), lambda v: LEAKY.__setitem__(0, nn.LeakyReLU(v))),
    "attribute of a tensor": (lambda: TENSOR.tau, put(TENSOR)),
    "list of a tensor": (lambda: TENSOR.held[0], item(TENSOR.held, 0)),
    "learning rate": (lambda: OPTIMIZER.param_groups[0]["lr"], item(OPTIMIZER.param_groups[0], "lr")),
    "scheduler": (lambda: SCHEDULER.get_last_lr()[0], item(SCHEDULER._last_lr, 0)),
}


class Counter:
    count = 0

    def __init__(self):
        self.count = 0


COUNTER, LATER = Counter(), types.SimpleNamespace()
COUNT_CONTEXT = contextvars.ContextVar("COUNT_CONTEXT", default=0)
COUNTS, MANY, TOTAL, BANK = np.zeros(2), [0] * 2000, torch.zeros(()), {"rows": torch.zeros(3)}
PYTHON_DRAWS, NUMPY_DRAWS, OLD_NUMPY_DRAWS = random.Random(1), np.random.default_rng(1), np.random.RandomState(1)
TORCH_DRAWS = torch.Generator()
NUMBERED, LISTED, YIELDED = itertools.count(1), iter([1.0] * 100), (float(k) for k in range(100))


def of_object():
    COUNTER.count += 1
    return COUNTER.count


def of_class():
    Counter.count += 1
    return Counter.count


def of_new_attribute():
    LATER.count = getattr(LATER, "count", 0) + 1
    return LATER.count


def of_function():
    of_function.count = getattr(of_function, "count", 0) + 1
    return of_function.count


def of_default(history=[]):  # noqa: B006
    history.append(1)
    return len(history)


def of_context():
    COUNT_CONTEXT.set(COUNT_CONTEXT.get() + 1)
    return COUNT_CONTEXT.get()


def of_array():
    COUNTS[0] += 1
    return float(COUNTS[0])


def of_long_list():
    MANY.append(1)
    return len(MANY)


def of_tensor():
    TOTAL.add_(1)
    return TOTAL.item()


def of_tensor_in_dict():
    BANK["rows"][1] += 1
    return float(BANK["rows"].sum())


def of_module():
    return OUTSIDE.counted()


def of_statistics():
    return OUTSIDE.mean()


def draw():
    return random.random() + float(np.random.rand())


def draw_from_a_generator():
    return float(torch.rand((), generator=TORCH_DRAWS))


def draw_from_objects():
    return PYTHON_DRAWS.random() + float(NUMPY_DRAWS.random()) + float(OLD_NUMPY_DRAWS.rand())


COUNTERS = [of_object, of_class, of_new_attribute, of_function, of_default, of_context, of_array, of_long_list]
COUNTERS += [of_tensor, of_tensor_in_dict, of_module, of_statistics, draw_from_a_generator, draw_from_objects]


def reset():
    """Set everything that `COUNTERS` and `draw` change to where it began."""
    COUNTER.count = Counter.count = OUTSIDE.count = COUNTS[0] = 0
    vars(LATER).clear()
    vars(of_function).clear()
    of_default.__defaults__[0].clear()
    COUNT_CONTEXT.set(0)
    TOTAL.zero_()
    OUTSIDE.norm.reset_running_stats()
    BANK["rows"].zero_()
    del MANY[2000:]
    random.seed(1)
    np.random.seed(1)
    PYTHON_DRAWS.seed(1)
    TORCH_DRAWS.manual_seed(1)
    OLD_NUMPY_DRAWS.seed(1)
    NUMPY_DRAWS.bit_generator.state = np.random.default_rng(1).bit_generator.state
