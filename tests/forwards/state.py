"""Forwards that keep values in Python: caches are no state, what changes later results is, and is looped or refused."""

from __future__ import annotations

import functools
import types

import torch
from torch import nn

import hfusion as hf
from tests.alone import call, normal
from tests.forwards.numbers import Scaling, Slotted, with_scale
from tests.forwards.table import MEMBERS, Table, branch, buffer, linear, parameter


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
row("cache: table per size", table_per_size, state=dict)
row("cache: table in a loop", lambda self, x: branch(table_that_grows(self, x)), state=None, loops=None)


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


@kept("value of a parameter")
def old_weight(self, x):
    if self.state is None:
        self.state = self.fc.weight.detach().norm()
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


@kept("shape of the last input")
def last_shape(self, x):
    factor = 2 if self.state is not None and len(self.state) != len(x) else 1
    self.state = x * 3
    return self.fc(x) * factor


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


def appended(held, x):
    held.append(1.0)
    return x * sum(held)


def called(held, x):
    return held(x)


def grown_default():
    def function(x, calls=[]):  # noqa: B006
        calls.append(1)
        return x * len(calls)

    return types.FunctionType(function.__code__, globals(), None, ([],))


GROWN = {
    "slot": (lambda: with_scale(Slotted(), [1.0]), lambda held, x: appended(held.scale, x)),
    "object in a set": (lambda: {Scaling(0.0)}, lambda held, x: next(iter(held)).grown(x)),
    "list of a partial": (lambda: functools.partial(appended, []), called),
    "default of a function": (grown_default, called),
    "iterator": (lambda: iter(range(9)), lambda held, x: x * next(held)),
    "own random": (lambda: __import__("random").Random(0), lambda held, x: x * held.random()),
}
for name, (make, use) in GROWN.items():
    forward = lambda self, x, use=use: use(self.state, self.fc(x))  # noqa: E731
    shared = name == "default of a function"
    says = {"refused": "which copies of a model share"} if shared else {"says": "changes Python state in state"}
    row(f"state: {name}", forward, state=make, loops=None, **says)

# State that crosses the border of a part that runs member by member: the whole forward does then.
LAST = None


class Memory:
    def __init__(self):
        self.h = None

    def keep(self, value):
        self.h = value


class Cell(nn.Module):
    """Adds what it remembers; a branch on values keeps it out of a graph."""

    of_all = None

    def __init__(self):
        super().__init__()
        self.fc, self.memory, self.state, self.past, self.table = nn.Linear(4, 4), Memory(), None, [], None
        self.count, self.large = 0, False

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

    def scaled(self, x):
        return self.fc(branch(x)) * self.memory.h

    def counted(self, x):
        self.count += 1
        return self.fc(branch(x)) * self.count

    def told(self, x):
        h = self.fc(branch(x))
        self.state, self.large = h.square().mean(), bool(h.detach().mean() > 0)
        return h

    def rare(self, x):
        self.state = x.detach().mean() if x.sum() > 0 else None
        return self.fc(x)

    def of_the_class(self, x):
        h = self.fc(branch(x))
        Cell.of_all = h.detach() if Cell.of_all is None else h.detach() + Cell.of_all
        return h + Cell.of_all

    def of_the_file(self, x):
        global LAST
        LAST = self.fc(branch(x)) if LAST is None else self.fc(branch(x)) + LAST
        return LAST

    def tabled(self, x):
        if self.table is None or len(self.table) != len(x):
            self.table = torch.arange(len(x), dtype=x.dtype).cos()[:, None]
        return self.fc(branch(x)) * self.table


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
def cleared_list(self, x):
    self.c.past.clear()
    return self.out(self.c.listed(x) + self.c.listed(-x))


@crossing()
def shared_object(self, x):
    self.c.memory.h = None
    self.c.remembered(x)
    return self.out(self.c.memory.h)


@crossing()
def kept_by_a_method(self, x):
    self.c.memory.keep(2.0)
    y = self.c.scaled(x)
    self.c.memory.keep(1.0)
    return self.out(y)


@crossing()
def count_from_zero(self, x):
    self.c.count = 0
    return self.out(self.c.counted(self.c.counted(x)))


@crossing()
def read_afterwards(self, x):
    return self.out(self.c.told(x)), self.c.state * 1


@crossing()
def read_flag(self, x):
    y = self.c.told(self.out(x))
    return y * 2 if self.c.large else -y


@crossing()
def rarely_left(self, x):
    y = self.c.rare(self.out(x))
    return y if self.c.state is None else y + self.c.state


@crossing()
def class_variable(self, x):
    Cell.of_all = None
    return self.out(self.c.of_the_class(self.out(self.c.of_the_class(x))))


@crossing()
def global_variable(self, x):
    global LAST
    LAST = None
    return self.out(self.c.of_the_file(self.out(self.c.of_the_file(x))))


crossing(None, training=(True,))(lambda self, x: self.out(self.c.tabled(x)))


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


KINDS = {"dict": (lambda: {"hot": False}, note_in_dict), "attribute": (lambda: None, lambda state: None)}


class Reader(nn.Module):
    """Computes something else once the detector has seen a large value; detects before or after it reads."""

    def __init__(self, kind, first):
        super().__init__()
        make, note = KINDS[kind]
        self.kind, self.first, self.state = kind, first, make()
        self.detector, self.fc = Detector(self.state, note), nn.Linear(4, 4).double()

    def is_hot(self):
        return self.detector.hot if self.kind == "attribute" else self.state["hot"]

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


# State that only a rare value starts, in an attribute that no object has before.
def rare_calls():
    return [normal(5, 4).clamp(-1, 1), 10 * normal(5, 4), normal(5, 4).clamp(-1, 1), normal(3, 4).clamp(-1, 1)]


def late(name, begin, result, **fields):
    def forward(self, x):
        if x.abs().max() > 1.5:
            begin(self)
        return result(self, self.fc(x))

    row(f"state that begins late: {name}", forward, calls=rare_calls, loops=MEMBERS, **fields)


class Counts:
    count = 0


def count_up(counts):
    counts.count += 1


def set_count(self):
    self.count = getattr(self, "count", 0) + 1


late("assigned", set_count, lambda self, h: h * (1 + getattr(self, "count", 0)))
late("through __dict__", lambda self: self.__dict__.update(late=2), lambda self, h: h * vars(self).get("late", 1))
late(
    "of a part",
    lambda self: count_up(self.fc),
    lambda self, h: h * (1 + self.fc.count),
    fc=type("Part", (nn.Linear,), {"count": 0, "__init__": lambda self: nn.Linear.__init__(self, 4, 4)}),
)
late("a mode", lambda self: self.norm.eval(), lambda self, h: self.norm(h), norm=lambda: nn.BatchNorm1d(4))
late(
    "of an object, by its class",
    lambda self: count_up(self.counts),
    lambda self, h: h * (1 + self.counts.count),
    counts=Counts,
)


class Warm(nn.Module):
    skipped = 0

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4).double()

    def forward(self, x):
        if x.abs().max() > 1.5:
            self.skipped += 1
        return self.fc(x) * (1 + self.skipped)


row("state that begins late: by the class", make=Warm, calls=rare_calls, loops=MEMBERS)
row(
    "state that begins late: in a part",
    lambda self, x: self.fc(self.inner(x)),
    inner=Warm,
    calls=rare_calls,
    loops=MEMBERS,
)
