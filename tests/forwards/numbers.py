"""Forwards with values of the member's own: numbers, settings and objects in attributes, equal or unlike."""

from __future__ import annotations

import functools
import types
from collections import OrderedDict, UserDict, deque
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np
import torch
import torch.nn.functional as F
from torch import fx, nn
from torch.nn.utils import parametrizations

from tests.alone import normal
from tests.forwards.table import Table, buffer, each, linear, module, stacked

ROWS = Table()
row = ROWS

# Numbers that differ between members: one capture serves them all.
NUMBERS = Table(calls=lambda: [normal(8, 4), normal(5, 4)], loops=None, exports=True)
FLOATS = each(*(0.1 + 0.07 * k for k in range(6)))
INTS = each(*range(1, 7))


@dataclass
class Config:
    beta: float
    inner: dict[str, float]


def numbers(name, act, values=FLOATS, **has):
    """Add a row whose forward is ``act(self, h)`` of the layer's result; ``self.number`` is the member's own."""
    NUMBERS(f"number: {name}", lambda self, x: act(self, self.fc(x)), number=values, **has)


# Loops by unlike numbers are gathered into one, with their writes in order.
SLOPES = each(0.1, 0.2, 0.3)


@row("loops: before and after a layer", slope=SLOPES, loops=None)
def around_a_layer(self, x):
    h = F.leaky_relu(F.leaky_relu(x, self.slope) * 2, self.slope)
    return F.leaky_relu(F.leaky_relu(self.fc(h), self.slope) + h, self.slope)


@row("loops: one BatchNorm on two depths", norm=lambda: nn.BatchNorm1d(4), slope=SLOPES, loops=None)
def of_two_depths(self, x):
    deep = self.norm(self.fc(F.leaky_relu(x, self.slope)))
    return deep - self.norm(F.leaky_relu(x * 3, self.slope))


@row("loops: a buffer that is read, written and read again", seen=buffer(), slope=SLOPES, loops=None)
def read_written_and_read(self, x):
    before = F.leaky_relu(x - self.seen, self.slope)
    self.seen += F.leaky_relu(x.detach(), self.slope).mean(0)
    return F.leaky_relu(before * self.seen, self.slope)


def made(make):
    """Return what ``make`` gives for each of the numbers."""
    return each(*map(make, FLOATS))


numbers("attribute", lambda m, x: x * m.number)
numbers("zero and one", lambda m, x: F.leaky_relu(x, m.number), each(0.0, 1.0, -0.0, 0.5, 0.25, 2.0))
numbers("data class", lambda m, x: F.softplus(x, m.held.beta), held=made(lambda v: Config(v, {})))
numbers("list", lambda m, x: x * m.held[1] + m.held[0], held=made(lambda v: [1.0, v]))
numbers("partial", lambda m, x: m.held(x), held=made(lambda v: functools.partial(F.leaky_relu, negative_slope=v)))
numbers("closure", lambda m, x: m.held(x), held=made(lambda v: lambda x: x * v))
numbers("tensor made of it", lambda m, x: x * torch.tensor(m.number, dtype=x.dtype))
numbers("exponent", lambda m, x: (x * x + 1) ** m.number)
numbers("repetition", lambda m, x: x.repeat(1, m.number).view(len(x), -1, 4).sum(1), INTS, calls=lambda: [normal(8, 4)])
numbers("flag of an operator", lambda m, x: x.std(0, unbiased=m.number), each(True, False, True, False, True, False))
numbers("check that passes", lambda m, x: x * m.number if m.number < 5 else x)


@functools.partial(numbers, "k of topk", values=each(1, 2, 3, 4, 3, 1))
def topk(m, x):
    values, places = x.topk(m.number, -1)
    return torch.zeros_like(x).scatter(-1, places, values / values.shape[-1])


@functools.partial(numbers, "buffer that is written", average=buffer())
def writes(m, x):
    m.average.mul_(m.number).add_(x.detach().mean(0), alpha=1 - m.number)
    return x.clone().mul_(m.number) + m.average


@functools.partial(numbers, "of a hook", exports=False)
def hook(m, x):
    if x.requires_grad:
        x.register_hook(lambda grad: grad * m.number)
    return x * 1.0


TORCH_LAYERS = {
    "BatchNorm1d": lambda k: nn.BatchNorm1d(4, eps=0.1 + 0.1 * k, momentum=0.2 * k),
    "activations": lambda k: nn.Sequential(nn.ELU(0.5 + k), nn.Hardtanh(-0.3 - k, 0.4), nn.Softplus(0.7 + k)),
}
for name, make in TORCH_LAYERS.items():
    NUMBERS(
        f"numbers of {name}", make=lambda k, make=make: nn.Sequential(nn.Linear(4, 4), make(k)).double(), members=5,
        training=(True, False),
    )  # fmt: skip

# Numbers that meet a size, or steer forward: right at every size, or refused.
STEERS = "number is .* in model 0 and .* in model"


def three_sizes():
    return [normal(size, 4) for size in (8, 5, 2)]


STEERED = {
    "limit": lambda m, x: x * 2 if x.shape[0] > m.number else x,
    "shared part": lambda m, x: x + x[: max(x.shape[0] // (m.number + 1), 1)].sum(0),
}
for name, act in STEERED.items():
    forward = lambda self, x, act=act: act(self, self.fc(x))  # noqa: E731
    row(f"number and size: {name}", forward, number=each(9, 10, 11, 12, 13, 30), loops=None)
    row(f"number and size: {name} of some", forward, number=each(0, 0, 0, 0, 0, 3), refused=STEERS, calls=three_sizes)
row(
    "number that steers",
    lambda self, x: self.fc(x).relu() if self.number > 0.3 else self.fc(x).tanh(),
    number=FLOATS,
    refused=STEERS,
)

UNLIKE = {
    r"held\[0\] is 0 in model 0 and 3": (lambda m, x: x * 2 if len(x) > m.held[0] else x, each([0], [3])),
    r"held is list\(1\) in model 0 and list\(1, 2\)": (lambda m, x: x if m.held[1:] else -x, each([1], [1, 2])),
    "held is relu in model 0 and tanh": (lambda m, x: m.held(x), each(torch.relu, torch.tanh)),
    r"<lambda> \(line \d+\) in": (lambda m, x: m.held(x), each(lambda x: x.relu(), lambda x: x.tanh())),
}
for words, (act, values) in UNLIKE.items():
    forward = lambda self, x, act=act: act(self, self.fc(x))  # noqa: E731
    row(f"attribute that steers: {words}", forward, held=values, refused=words, calls=three_sizes)

row(
    "number that is none for some",
    lambda self, x: self.fc(x) * self.number if self.number else self.fc(x),
    number=each(0.0, 2.0),
    refused=r"different numbers of nodes \(model 0: \d, model 1: \d\)",
)
row(
    "tensors of unlike sizes",
    lambda self, x: self.fc(x) * self.held,
    held=each(torch.ones(4), torch.ones(1)),
    refused=r"\(4,\) torch.float32 on cpu in model 0, \(1,\)",
)

# Attributes of any kind in which members differ, or which are equal.
Row, Options, Number = type("Row", (list,), {}), type("Options", (dict,), {}), type("Number", (float,), {})
Slotted = type("Slotted", (), {"__slots__": ("scale",)})


class Scaling:
    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return x * self.scale

    def grown(self, x):
        self.scale += 1
        return x * self.scale


def with_scale(value, scale):
    value.scale = scale
    return value


def of_attribute(scale):
    def function(x):
        return x * function.scale

    return with_scale(function, scale)


def scale(held, x):
    return x * held.scale


def called(held, x):
    return held(x)


HELD = {
    "tensor with an attribute": (lambda v: with_scale(torch.ones(1), v), scale),
    "slots": (lambda v: with_scale(Slotted(), v), scale),
    "deque": (lambda v: deque([v], 3), lambda held, x: x * held[0]),
    "set": (lambda v: {v}, lambda held, x: x * sum(held)),
    "UserDict": (lambda v: UserDict(a=v), lambda held, x: x * held["a"]),
    "attribute of a function": (of_attribute, called),
    "default of a function": (lambda v: lambda x, factor=v: x * factor, called),
    "bound method": (lambda v: Scaling(v).__call__, called),
    "partial with a keyword": (lambda v: functools.partial(torch.add, alpha=v), lambda held, x: held(x, x)),
    "array": (lambda v: np.full(2, v), lambda held, x: x * float(held.sum())),
    "list of tensors": (lambda v: [torch.full((4,), v).double(), 1.0], lambda held, x: x * held[0] + held[1]),
}
for name, (make, use) in HELD.items():
    for scales in ((1.5, 1.5), (1.5, 3.5)):
        forward = lambda self, x, use=use: use(self.held, self.fc(x))  # noqa: E731
        row(f"attribute: {name} of {scales}", forward, held=each(*map(make, scales)), loops=None)


# Parameters outside of the models.
WEIGHT = nn.Parameter(torch.ones(4).double(), requires_grad=False)
row("parameter outside", lambda self, x: self.fc(x) * WEIGHT, loops=None)


# Objects whose methods raise: no method is called to look into them.
def _raise(*_):
    raise NotImplementedError


SPECIAL = ["__iter__", "__len__", "__contains__", "__getitem__", "__eq__", "__hash__", "__bool__", "__repr__"]
SPECIAL += ["items", "keys", "values", "count", "index"]


def raising(base, *values):
    """Return a function that makes an object of a subclass of ``base`` whose methods raise."""
    kind = types.new_class("Raising", (base,), exec_body=lambda space: space.update(dict.fromkeys(SPECIAL, _raise)))
    return lambda: kind(*values)


def kind(**space):
    return type("Kind", (), space)


LazyMapping = type("LazyMapping", (OrderedDict,), {"items": _raise})
RAISING = {
    "OrderedDict": lambda: LazyMapping(tau=1.0),
    "list": raising(list, [1]),
    "Mapping": raising(Mapping),
    "object": raising(object),
    "__getattr__": kind(__getattr__=_raise),
    "__dict__": kind(__dict__=property(_raise)),
    "iterator": kind(__iter__=_raise, __next__=_raise, __reduce_ex__=_raise, __repr__=_raise),
}


def names(value):
    held = [value]

    def forward(self, x):
        y = self.fc(x)
        return y if held is not None and held[0] is value else -y

    return forward


# The others Python cannot copy itself.
COPIED = {"Mapping", "object", "__dict__"}
for name, make in RAISING.items():
    row(f"names an object whose methods raise: {name}", names(make()), calls=lambda: [normal(3, 4)], loops=None)
    counting = lambda make=make: _counting(make)  # noqa: E731
    fields = {"loops": None} if name in COPIED else {"refused": "deep-copied|calls"}
    row(f"holds an object whose methods raise: {name}", make=counting, **fields)


def _counting(make):
    def forward(self, x):
        self.calls += 1
        return self.fc(x) if self.held else x

    return module(forward, fc=linear, calls=0, held=lambda: [make()])()


# Structures: what is tied, used twice, held by reference, parametrized, traced.
class Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)
        self.b.weight = self.a.weight
        self.c = nn.Sequential(self.a, nn.BatchNorm1d(4))
        self.d = self.c
        self.register_buffer("hidden", torch.randn(4), persistent=False)
        self.register_buffer("nothing", None)

    def forward(self, x):
        return self.d(self.c(self.b(x))) * self.hidden


class Held(nn.Module):
    """References to registered modules, in whatever holds them."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.again = nn.Sequential(self.fc)
        partial = functools.partial(self.fc)
        self.refs = {"list": [self.fc], "method": self.fc.forward, "partial": partial, "me": self}
        object.__setattr__(self, "hidden", self.fc)
        self.acts = {"tanh": nn.Tanh()}

    def forward(self, x):
        x = self.refs["list"][0](x) + self.refs["method"](x) + self.refs["partial"](x) + self.hidden(x)
        return self.acts["tanh"](self.refs["me"].again(x))


def made_here(k):
    class Scaled(nn.Linear):
        def forward(self, x):
            return super().forward(x) * float(k + 1)

    return Scaled(4, 4).double()


def after(layer):
    return lambda: nn.Sequential(layer(), nn.Linear(4, 4))


def traced():
    return fx.symbolic_trace(nn.Sequential(nn.Linear(4, 4), nn.ReLU()))


STRUCTURES = {
    "tied, used twice, non-persistent": Tied,
    "references": Held,
    "graph module": after(traced),
    "class of each instance": made_here,
    "spectral_norm": after(lambda: parametrizations.spectral_norm(nn.Linear(4, 4))),
    "cumulative BatchNorm": lambda: nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4, momentum=None)),
    "identity": nn.Identity,
}
for name, make in STRUCTURES.items():
    numbered = (lambda k: made_here(k)) if make is made_here else (lambda make=make: make().double())
    row(f"structure: {name}", make=numbered, calls=stacked(), loops=None)
SEQUENCES = {
    "LSTM": lambda: nn.LSTM(4, 3, 2, bidirectional=True),
    "GRU": lambda: nn.GRU(4, 3, 2),
    "encoder": lambda: nn.TransformerEncoderLayer(4, 2, 8, dropout=0.0),
}
for name, make in SEQUENCES.items():
    calls = lambda: [normal(5, 2, 4), normal(3, 2, 4)]  # noqa: E731
    row(f"structure: {name}", make=lambda make=make: make().double(), calls=calls, training=(True, False), loops=None)


def partly_shared():
    layer = nn.Linear(4, 4).double().requires_grad_(False)
    return lambda k: nn.Sequential(
        nn.Linear(4, 4).double().requires_grad_(False) if k == 1 else layer, nn.Linear(4, 3).double()
    )


row("layer of the first and the last model", make=partly_shared(), members=3, loops=None)
row(
    "two codes of a graph module",
    make=lambda k: fx.symbolic_trace(module(lambda self, x: x ** (k + 2))()),
    refused="a class with other code, in model 1",
)

ROWS += NUMBERS
