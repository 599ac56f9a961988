"""Values outside of the models that forward reads or changes, wherever Python keeps them.

`READS` maps a kind of value to how forward reads a number there, and how others change it between calls; `COUNTERS` are
values that forward changes itself.
"""

import argparse
import collections
import contextvars
import functools
import itertools
import os
import random
import types

import numpy as np
import torch
from torch import nn


class Leveled:
    level = 1.0

    def __init__(self):
        self.tau = 1.0

    def value(self):
        return self.tau


class Derived(Leveled):
    pass


class Operated:
    """An object with methods that code calls without naming them."""

    def __float__(self):
        return float(ARGUMENTS.tau)

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
    held, tau = Leveled(), 1.0

    def put(value):
        nonlocal tau
        held.tau = tau = value

    return lambda: held.tau * tau, put


def with_default(config=Leveled()):  # noqa: B008
    return config.tau


class Outside(nn.Module):
    """A module that the models call, but do not register."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Sequential(nn.LeakyReLU(1.0)))
        self.norm = nn.BatchNorm1d(2).double().requires_grad_(False)
        self.tau = 1.0

    def forward(self, x):
        return self.inner(-x) * self.tau * (1.0 if self.training else 0.5)

    def scale(self):
        return float(self(torch.full((), -1.0)))

    def mean(self):
        self.norm(torch.tensor([[1.0, 2.0], [3.0, 5.0]], dtype=torch.float64))
        return float(self.norm.running_mean.sum())


ARGUMENTS, CONFIG, DERIVED, OPERATED = argparse.Namespace(tau=1.0), Leveled(), Derived(), Operated()
USER_DICT, FLAGS, LONG = collections.UserDict({"tau": 1.0}), set(), [1.0] * 5000
CONTEXT = contextvars.ContextVar("CONTEXT", default=1.0)
NUMBERS, BOUND = np.ones(3), CONFIG.value
OPTIMIZER = torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=1.0)
READ_CLOSURE, PUT_CLOSURE = closed_over()
READ_OTHER, _ = closed_over()
OUTSIDE = Outside()
LEAKY = OUTSIDE.inner[0]


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


FACTOR = 1.0
READS = {
    "variable of the file": (lambda: FACTOR, functools.partial(globals().__setitem__, "FACTOR")),
    "argparse": (lambda: ARGUMENTS.tau, put(ARGUMENTS)),
    "attribute that hides a class's": (lambda: CONFIG.level, put(CONFIG, "level")),
    "class variable of an object": (lambda: DERIVED.level, put(Leveled, "level")),
    "float of an object": (lambda: float(OPERATED), put(ARGUMENTS)),
    "context manager": (lambda: read_within(), put(ARGUMENTS)),
    "UserDict": (lambda: USER_DICT["tau"], item(USER_DICT, "tau")),
    "set": (lambda: 0.5 if "half" in FLAGS else 1.0, lambda v: FLAGS.add("half") if v < 1 else FLAGS.clear()),
    "long list": (lambda: LONG[4000], item(LONG, 4000)),
    "context variable": (lambda: CONTEXT.get(), CONTEXT.set),
    "environment": (lambda: float(os.environ.get("TAU", "1")), lambda v: os.environ.__setitem__("TAU", str(v))),
    "numpy": (lambda: float(NUMBERS[1]), item(NUMBERS, 1)),
    "bound method": (lambda: BOUND(), put(CONFIG)),
    "one of two like closures": (lambda: READ_CLOSURE() + READ_OTHER(), PUT_CLOSURE),
    "default": (lambda: with_default(), put(with_default.__defaults__[0])),
    "decorator": (lambda: decorated(), by_wrapper),
    "module": (lambda: OUTSIDE.scale(), put(OUTSIDE)),
    "mode of a module": (lambda: OUTSIDE.scale(), lambda v: OUTSIDE.train(v == 1.0)),
    "hook of a module": (lambda: OUTSIDE.scale(), hooked),
    "replaced module": (lambda: OUTSIDE.scale(), lambda v: LEAKY.__setitem__(0, nn.LeakyReLU(v))),
    "learning rate": (lambda: OPTIMIZER.param_groups[0]["lr"], item(OPTIMIZER.param_groups[0], "lr")),
}


class Counter:
    def __init__(self):
        self.count = 0


COUNTER, LATER = Counter(), types.SimpleNamespace()
COUNT_CONTEXT = contextvars.ContextVar("COUNT_CONTEXT", default=0)
COUNTS, TOTAL = np.zeros(2), torch.zeros(())
PYTHON_DRAWS, NUMPY_DRAWS, TORCH_DRAWS = random.Random(1), np.random.default_rng(1), torch.Generator()
NUMBERED, LISTED, YIELDED = itertools.count(1), iter([1.0] * 100), (float(k) for k in range(100))


def of_object():
    COUNTER.count += 1
    return COUNTER.count


def of_new_attribute():
    LATER.count = getattr(LATER, "count", 0) + 1
    return LATER.count


def of_default(history=[]):  # noqa: B006
    history.append(1)
    return len(history)


def of_context():
    COUNT_CONTEXT.set(COUNT_CONTEXT.get() + 1)
    return COUNT_CONTEXT.get()


def of_array():
    COUNTS[0] += 1
    return float(COUNTS[0])


def of_tensor():
    TOTAL.add_(1)
    return TOTAL.item()


def of_statistics():
    return OUTSIDE.mean()


def draw():
    own = PYTHON_DRAWS.random() + float(NUMPY_DRAWS.random()) + float(torch.rand((), generator=TORCH_DRAWS))
    return own + random.random() + float(np.random.rand())


COUNTERS = [of_object, of_new_attribute, of_default, of_context, of_array, of_tensor, of_statistics, draw]


def reset():
    """Set everything that `COUNTERS` change to where it began."""
    COUNTER.count = COUNTS[0] = 0
    vars(LATER).clear()
    of_default.__defaults__[0].clear()
    COUNT_CONTEXT.set(0)
    TOTAL.zero_()
    OUTSIDE.norm.reset_running_stats()
    random.seed(1)
    np.random.seed(1)
    PYTHON_DRAWS.seed(1)
    TORCH_DRAWS.manual_seed(1)
    NUMPY_DRAWS.bit_generator.state = np.random.default_rng(1).bit_generator.state
