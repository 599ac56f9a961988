"""Forwards that keep values in Python: caches are no state, what changes later results is, and is looped or refused."""

from __future__ import annotations

import functools
import types
from collections import deque

import torch
from torch import nn

import hfusion as hf
from tests.alone import call, normal
from tests.forwards.numbers import Options, Row, Scaling, Slotted, with_scale
from tests.forwards.table import FAR, MEMBERS, Table, branch, buffer, linear, parameter


def sequences():
    return [normal(3, size, 4) for size in (5, 5, 7, 7, 4)]


ROWS = Table(calls=sequences)
row = ROWS


def rows_of(n):
    return torch.arange(n, dtype=torch.float64).cos()[:, None]


# Caches.
@row("cache: table of a size", state=None)
def table_of_a_size(self, x):
    if self.state is None or self.state[0] != tuple(x.shape):
        self.state = (tuple(x.shape), rows_of(x.shape[1]).expand(x.shape))
    return self.fc(x) * self.state[1]


def table_that_grows(self, x):
    if self.state is None or self.state.shape[0] < x.shape[1]:
        self.state = rows_of(x.shape[1])
    return self.fc(x) * self.state[: x.shape[1]]


def table_per_size(self, x):
    n = x.shape[1]
    if n not in self.state:
        self.state[n] = rows_of(n)
    return self.fc(x) * self.state[n]


row("cache: table that grows", table_that_grows, state=None)
row("cache: table given with the model", table_that_grows, state=lambda: rows_of(6))
row("cache: table per size", table_per_size, state=dict)
row("cache: table per size in a dict of its class", table_per_size, state=type("Tables", (dict,), {}))
row("cache: table in a loop", lambda self, x: branch(table_that_grows(self, x)), state=None, loops=None)


@row("cache: table in a slot", state=type("Slotted", (), {"__slots__": ("table",)}))
def table_in_a_slot(self, x):
    if len(getattr(self.state, "table", ())) < x.shape[1]:
        self.state.table = rows_of(x.shape[1])
    return self.fc(x) * self.state.table[: x.shape[1]]


@row("cache: flag", state=False)
def flag(self, x):
    self.state = True
    return self.fc(x)


@row("cache: set", state=set)
def seen(self, x):
    self.state.add(len(x))
    return self.fc(x) * 2


GLOBAL = {}


@row("cache: global table")
def global_table(self, x):
    n = x.shape[1]
    if n not in GLOBAL:
        GLOBAL[n] = rows_of(n)
    return self.fc(x) * GLOBAL[n]


cached = functools.cache(rows_of)
row("cache: lru_cache", lambda self, x: self.fc(x) * cached(x.shape[1]))


class Biases(nn.Module):
    """Keeps what follows from a parameter in eval mode only, and drops it for training, as LeViT."""

    def __init__(self):
        super().__init__()
        self.bias, self.kept = nn.Parameter(normal(4)), {}

    def train(self, mode=True):
        self.kept = {}
        return super().train(mode)

    def forward(self, x):
        if self.training:
            return x * self.bias.sin()
        if "cpu" not in self.kept:
            self.kept["cpu"] = self.bias.sin()
        return x * self.kept["cpu"]


row("cache: dropped by train()", make=Biases, loops=None)
row("cache: in evaluation", make=lambda: Biases().requires_grad_(False), training=(False,), loops=None)


# Results that are left for the user.
def left(name, forward, state=None):
    row(f"left result: {name}", forward, state=state, loops=MEMBERS, says="changes Python state in state")


class Holder:
    def put(self, value):
        self.value = torch.distributions.Normal(value, 1.0, validate_args=False)
        return self


@functools.partial(left, "last output")
def last_output(self, x):
    self.state = self.fc(x).softmax(-1)
    return self.state @ self.fc.weight


left("distribution", lambda self, x: self.state.put(self.fc(x)).value.log_prob(x), Holder)


@functools.partial(left, "beside a mask")
def beside_a_mask(self, x):
    if getattr(self, "mask", None) is None or len(self.mask) != len(x):
        self.mask = torch.linspace(0, 1, len(x), dtype=x.dtype)[:, None, None]
    y = self.fc(x) * self.mask
    self.state = y.square().mean()
    return y


# State that later calls read.
def kept(name, state=None, **fields):
    def add(forward):
        row(f"state: {name}", forward, state=state, loops=None, says="changes Python state in", **fields)
        return forward

    return add


@kept("longest so far")
def longest(self, x):
    self.state = max(self.state or 0, x.shape[1])
    return self.fc(x) * self.state


@kept("shortest so far", 10**6)
def shortest(self, x):
    self.state = min(self.state, len(x))
    return self.fc(x) * self.state


@kept("value of a parameter")
def old_weight(self, x):
    if self.state is None:
        self.state = self.fc.weight.detach().norm()
    return self.fc(x) / self.state


@kept("graph of a parameter", grads=False)
def old_graph(self, x):
    if self.state is None:
        self.state = self.fc.weight.norm()
    return self.fc(x) / self.state


@kept("moving average")
def moving(self, x):
    h = self.fc(x)
    self.state = h.detach() if self.state is None else 0.9 * self.state + 0.1 * h.detach().mean()
    return h + self.state.mean()


@kept("last result that is read in rare cases")
def rarely(self, x):
    h = self.fc(x)
    y = h * 2 if self.state is not None and self.state.mean() > 100 else h
    self.state = h.detach()
    return y


@kept("last number that is read")
def rarely_a_number(self, x):
    h = self.fc(x)
    y = h * 2 if self.state is not None and self.state["last"] > 100 else h
    self.state = {"last": x.abs().max().item()}
    return y


@kept("shape of the last input")
def last_shape(self, x):
    factor = 2 if self.state is not None and len(self.state) != len(x) else 1
    self.state = x * 3
    return self.fc(x) * factor


@kept("mask of the first call")
def stale_mask(self, x):
    if self.state is None:
        self.state = torch.linspace(0, 1, len(x), dtype=x.dtype)[:, None, None]
    return self.fc(x) * self.state[: len(x)]


@kept("first batch")
def first_batch(self, x):
    if self.state is None:
        self.state = x.mean()
    return self.fc(x) - self.state


@kept("counter that nothing reads")
def counter(self, x):
    self.state = (self.state or 0) + 1
    return self.fc(x)


@kept("weights set by the first batch")
def weight_on_first_call(self, x):
    if self.state is None:
        with torch.no_grad():
            self.fc.bias.sub_(self.fc(x).mean((0, 1)))
        self.state = True
    return self.fc(x)


@kept("counter beside a buffer that is assigned", 0, total=buffer())
def counter_beside_a_buffer(self, x):
    self.state += 1
    self.total = self.total + x.detach().mean()
    return self.fc(x) * self.state + self.total


@row("state: registered tensor", refused="registers the tensor table")
def registered(self, x):
    if not hasattr(self, "table"):
        self.register_buffer("table", rows_of(1), persistent=False)
    return self.fc(x) * self.table


def grow(held, x):
    held.scale += 1
    return x * held.scale


def appended(held, x):
    held.append(1.0)
    return x * sum(held)


def added(held, x):
    held.add(len(held))
    return x * len(held)


def called(held, x):
    return held(x)


def grown_default():
    def function(x, calls=[]):  # noqa: B006
        calls.append(1)
        return x * len(calls)

    return types.FunctionType(function.__code__, globals(), None, ([],))


def grown_attribute():
    def function(x):
        function.scale += 1
        return x * function.scale

    return with_scale(function, 0.0)


GROWN = {
    "attribute of a list": (lambda: with_scale(Row([1]), 0.0), grow),
    "attribute of a dict": (lambda: with_scale(Options(a=1), 0.0), grow),
    "slot": (lambda: with_scale(Slotted(), 0.0), grow),
    "set": (set, added),
    "deque": (lambda: deque(maxlen=3), appended),
    "list in a tuple": (lambda: ([],), lambda held, x: appended(held[0], x)),
    "object in a set": (lambda: {Scaling(0.0)}, lambda held, x: next(iter(held)).grown(x)),
    "bound method": (lambda: Scaling(0.0).grown, called),
    "list of a partial": (lambda: functools.partial(appended, []), called),
    "keyword of a partial": (lambda: functools.partial(appended, held=[]), lambda held, x: held(x=x)),
    "attribute of a function": (grown_attribute, called),
    "default of a function": (grown_default, called),
    "iterator": (lambda: iter(range(9)), lambda held, x: x * next(held)),
    "own random": (lambda: __import__("random").Random(0), lambda held, x: x * held.random()),
    "own numpy random": (lambda: __import__("numpy").random.default_rng(0), lambda held, x: x * held.random()),
}
for name, (make, use) in GROWN.items():
    forward = lambda self, x, use=use: use(self.state, self.fc(x))  # noqa: E731
    shared = name in ("attribute of a function", "default of a function")
    says: dict[str, str] = (
        {"refused": "which copies of a model share"} if shared else {"says": "changes Python state in state"}
    )
    row(f"state: {name}", forward, state=make, loops=None, **says)

# State that crosses the border of a part that runs member by member: the whole forward does then.
CONFIG, KEPT = types.SimpleNamespace(limit=FAR), {}
LAST = None


class Memory:
    def __init__(self):
        self.h = None


class Cell(nn.Module):
    """Adds what it remembers; a branch on values keeps it out of a graph."""

    of_all = None

    def __init__(self):
        super().__init__()
        self.fc, self.memory, self.state, self.past, self.table = nn.Linear(4, 4), Memory(), None, [], None
        self.scale, self.count, self.mean, self.large = 1.0, 0, 0.0, False

    def forward(self, x):
        h = self.fc(branch(x))
        self.state = h = h if self.state is None else h + self.state
        return h

    def listed(self, x):
        self.past.append(self.fc(branch(x)))
        return torch.stack(self.past).sum(0)

    def remembered(self, x):
        h = self.fc(branch(x))
        self.memory.h = h if self.memory.h is None else h + self.memory.h
        return self.memory.h

    def counted(self, x):
        self.count += 1
        return self.fc(branch(x)) * self.count

    def scaled(self, x):
        return self.fc(branch(x)) * self.scale

    def told(self, x):
        h = self.fc(branch(x))
        self.state, self.mean, self.large = h.square().mean(), float(h.detach().mean()), bool(h.detach().mean() > 0)
        return h

    def flagged(self, x):
        if x.sum() > 0:
            self.large = True
        return self.fc(x) * 2 if self.large else -self.fc(x)

    def rare(self, x):
        self.state = x.detach().mean() if x.sum() > 0 else None
        return self.fc(x)

    def of_the_class(self, x):
        h = self.fc(branch(x))
        Cell.of_all = h.detach() if Cell.of_all is None else h.detach() + Cell.of_all
        return h + Cell.of_all

    def of_a_dict(self, x):
        h, total = self.fc(branch(x)), KEPT.get("h")
        KEPT["h"] = h if total is None else h + total
        return h if total is None else h * total

    def of_the_file(self, x):
        global LAST
        LAST = self.fc(branch(x)) if LAST is None else self.fc(branch(x)) + LAST
        return LAST

    def tabled(self, x):
        if self.table is None or len(self.table) != len(x):
            self.table = torch.arange(len(x), dtype=x.dtype).cos()[:, None]
        return self.fc(branch(x)) * self.table

    def started(self, x, step):
        if step == 0:
            self.state = None
        return self(x)

    def configured(self, x):
        if CONFIG.limit is None:
            CONFIG.limit = FAR
        return self.fc(x if x.sum() < CONFIG.limit else -x)


def batches():
    return [normal(3, 4), normal(2, 4), normal(3, 4)]


def crossing(loops=MEMBERS, **fields):
    def add(forward):
        # In eval mode no self-check would tell.
        name = f"state beside a loop: {forward.__name__.replace('_', ' ')}"
        fields.setdefault("training", (False,))
        row(name, forward, c=Cell, out=linear, loops=loops, calls=batches, **fields)
        return forward

    return add


@crossing(training=(True, False))
def cleared_first(self, x):
    self.c.state = None
    return self.out(self.c(x))


@crossing()
def cleared_between(self, x):
    y = self.out(x)
    for _ in range(2):
        self.c.state = None
        y = self.c(self.c(y))
    self.c.state = None
    return y


@crossing(training=(True, False))
def begun_with_a_tensor(self, x):
    self.c.state = self.out(x).tanh()
    return self.c(self.c(x))


@crossing()
def cleared_list(self, x):
    self.c.past.clear()
    return self.out(self.c.listed(x) + self.c.listed(-x))


@crossing()
def new_list(self, x):
    self.c.past = []
    return self.out(self.c.listed(x) + self.c.listed(-x))


@crossing()
def shared_object(self, x):
    self.c.memory.h = None
    self.c.remembered(x)
    return self.out(self.c.memory.h)


@crossing()
def count_from_zero(self, x):
    self.c.count = 0
    return self.out(self.c.counted(self.c.counted(x)))


@crossing()
def other_scale(self, x):
    self.c.scale = 3.0
    return self.out(self.c.scaled(x))


@crossing()
def read_afterwards(self, x):
    return self.out(self.c.told(x)), self.c.state * 1


@crossing()
def given_back(self, x):
    return self.out(self.c.told(x)), self.c.state


@crossing()
def read_number(self, x):
    return self.c.told(self.out(x)) * self.c.mean


@crossing()
def read_flag(self, x):
    y = self.c.told(self.out(x))
    return y * 2 if self.c.large else -y


@crossing(None)
def cleared_flag(self, x):
    # Only some batches set the flag.
    self.c.large = False
    return self.c.flagged(self.out(x))


@crossing()
def rarely_left(self, x):
    y = self.c.rare(self.out(x))
    return y if self.c.state is None else y + self.c.state


@crossing()
def class_variable(self, x):
    Cell.of_all = None
    return self.out(self.c.of_the_class(self.out(self.c.of_the_class(x))))


@crossing()
def dict_of_the_file(self, x):
    KEPT.clear()
    return self.out(self.c.of_a_dict(self.out(self.c.of_a_dict(x))))


@crossing()
def global_variable(self, x):
    global LAST
    LAST = None
    return self.out(self.c.of_the_file(self.out(self.c.of_the_file(x))))


crossing(None, training=(True,))(lambda self, x: self.out(self.c.tabled(x)))


@crossing(training=(True,))
def steps(self, x):
    return self.out(self.c.started(x, 0) + self.c.started(-x, 1))


@crossing(None, training=(True,))
def configured(self, x):
    if CONFIG.limit is None:
        CONFIG.limit = FAR
    return self.out(self.c.configured(x))


# State that only rare values change: only the first member meets them, in the third call.
class Detector(nn.Module):
    def __init__(self, state, note):
        super().__init__()
        self.state, self.note, self.hot = state, note, False

    def forward(self, x):
        if x.max() > 5:
            self.hot = True
            self.note(self.state)
        return x


def note_in_dict(state):
    state["hot"] = True


def note_in_list(state):
    state.append(1)


def note_in_object(state):
    state.hot = True


KINDS = {
    "dict": (lambda: {"hot": False}, note_in_dict),
    "list": (list, note_in_list),
    "object": (lambda: types.SimpleNamespace(hot=False), note_in_object),
    "attribute": (lambda: None, lambda state: None),
}


class Reader(nn.Module):
    """Computes something else once the detector has seen a large value; detects before or after it reads."""

    def __init__(self, kind, first):
        super().__init__()
        make, note = KINDS[kind]
        self.kind, self.first, self.state = kind, first, make()
        self.detector, self.fc = Detector(self.state, note), nn.Linear(4, 4).double()

    def is_hot(self):
        if self.kind == "attribute":
            return self.detector.hot
        if self.kind == "object":
            return self.state.hot
        return bool(self.state["hot"] if self.kind == "dict" else self.state)

    def forward(self, x):
        x = self.detector(x) if self.first else x
        x = self.fc(x) * (2 if self.is_hot() else 1)
        return x if self.first else self.detector(x)


def rare_batches():
    sizes = torch.tensor([[1.0, 1.0], [1.0, 1.0], [100.0, 1.0], [1.0, 1.0]])
    return [call(hf.stacked(torch.rand(2, 4, 4, dtype=torch.float64) * size.view(2, 1, 1))) for size in sizes]


for name in KINDS:
    for first in (True, False):
        text = f"rare values change: {name}, {'then it is read' if first else 'after it is read'}"
        reader = lambda name=name, first=first: Reader(name, first)  # noqa: E731
        row(text, make=reader, calls=rare_batches, loops=None)


# Members that run one by one write into rows of one stack, each with a history of its own.
@row("state beside a buffer that is written and used", n=buffer(1.0), w=parameter(), count=0, loops=MEMBERS)
def counted_buffer(self, x):
    self.count += 1
    self.n.add_(x.detach().mean((0, 1)))
    return x * self.w * self.n
