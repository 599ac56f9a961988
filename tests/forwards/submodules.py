"""Forwards of which a part has no graph: the smallest submodule runs as the members' own code, as alone."""

from __future__ import annotations

import functools
import types
from typing import NamedTuple

import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hfusion as hf
from tests.alone import call, normal
from tests.forwards.table import (
    FAR,
    MEMBERS,
    Sevenfold,
    Table,
    branch,
    buffer,
    linear,
    module,
    parameter,
    square,
    stacked,
)

ROWS = Table(calls=stacked())
row = ROWS


# Which submodule it is, wherever it stands and however it is called.
class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), square()

    def forward(self, x):
        return x + self.act(self.fc(x))

    def encode(self, x, *, shift=None):
        h = Sevenfold.apply(self.fc(x))
        return h if shift is None else h + shift

    def through(self, x):
        return self.act(self.fc(x))


class Sized(NamedTuple):
    value: torch.Tensor
    size: int


def failing(self, x):
    """Takes no arguments of three dims, as its caller knows."""
    if x.dim() == 3:
        raise ValueError("three dims")
    return x * 2


def moody(self, x, *, y=None):
    """Asks whether gradients are on."""
    if not torch.is_grad_enabled():
        return Sevenfold.apply(x + self.w)
    return Sevenfold.apply(x * self.w) if y is None else Sevenfold.apply(x) + y


def weighed(self, x):
    value, weight = self.inner(x)
    return value * weight


class Base(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm, self.head, self.act = nn.BatchNorm1d(4), nn.Linear(4, 2), square()
        self.failing = module(failing)()
        self.telling = module(lambda self, x: Sized(Sevenfold.apply(x), x.shape[1]))()
        # A number that an array cannot keep per member, so that only the module around it can run in a loop.
        self.weighed = module(weighed, inner=module(lambda self, x: (Sevenfold.apply(x), 0.5)))()
        self.moody = module(moody, w=parameter())()
        self.noisy = module(lambda self, x: x + 0 * torch.rand_like(x) if x.sum() < FAR else x)()
        # Reaches a module that is not its own.
        self.referring = module(lambda self, x: Sevenfold.apply(self.held[0][0].fc(x)), held=[self.blocks])()
        self.scale = nn.Buffer(torch.full((4,), 0.5))
        self.double()

    def scaled(self, x):
        return Sevenfold.apply(x * self.scale)

    def applied(self, blocks, x):
        for block in blocks:
            x = block(x)
        return Sevenfold.apply(x)


def smallest(name, loops, forward=None):
    """Add a row for a forward of `Base`."""

    def add(forward):
        row(f"the smallest: {name}", make=type("Net", (Base,), {"forward": forward}), loops=loops)
        return forward

    return add if forward is None else add(forward)


@smallest("ModuleList", "blocks.0.act, blocks.1.act")
def listed(self, x):
    for block in self.blocks:
        x = block(x)
    return self.head(self.norm(x))


@smallest("other methods", "blocks.0.encode(), blocks.1.act")
def by_methods(self, x):
    return self.head(self.blocks[0].encode(self.norm(x), shift=x) + self.blocks[1].through(x))


@smallest("no_grad, autocast, keywords", "moody")
def in_modes(self, x):
    with torch.no_grad():
        a = self.moody(self.head(x)[:, :1].expand(-1, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        b = self.moody(x, y=x * 2)
    return self.head(a + self.moody(self.norm(x))) + b.sum()


@smallest("an error that is caught", "act")
def caught(self, x):
    try:
        h = self.failing(x[None])
    except ValueError:
        h = self.failing(x)
    return self.head(self.act(h))


smallest("a method of the model", "scaled()", lambda self, x: self.head(self.norm(self.scaled(self.norm(x)))))
smallest("a named tuple", "telling", lambda self, x: self.head((t := self.telling(x)).value) * t.size)
smallest("random numbers", "act, noisy", lambda self, x: self.head(self.noisy(self.act(x))))
smallest("beside what cannot", "act, weighed", lambda self, x: self.head(self.weighed(self.act(x))))
smallest("modules as arguments", "forward", lambda self, x: self.head(self.applied(self.blocks, x)))
smallest("another's module", "forward", lambda self, x: self.head(self.referring(x)))

# Neither what raises while it is traced nor the modules around it can run in a loop, up to the outermost.
refusing = module(lambda self, x: (branch(x), object()))
around = module(lambda self, x: ((y := self.inner(x))[0] * 2, y[1]), inner=module(
    lambda self, x: ((y := self.inner(x))[0] * 2, y[1]), inner=refusing))  # fmt: skip
outermost = module(lambda self, x: self.inner(x)[0], inner=around)
row("an error below what is looped", lambda self, x: self.fc(self.inner(self.fc(x))), inner=outermost, loops="inner")

# A mask picks as many elements as it likes, and a number of the member's own scales.
masking = module(lambda self, x: (h := self.fc(x))[h.abs() < 100].view(-1, 4), fc=linear)
scaling = module(lambda self, x: (h := self.fc(x)) * h.mean().item(), fc=linear)
for name, make in (("mask", masking), ("number", scaling)):
    row(f"looped whole: {name}", make=make, loops="forward")
    row(f"looped: {name}", lambda self, x: self.fc(self.inner(x)) + x, inner=make, loops="inner")


# Side effects of what runs in a loop.
def averaging(self, x):
    """Counts in a buffer, by a write in place."""
    with torch.no_grad():
        self.n.mul_(0.9).add_(x.mean(0) + 1)
    return Sevenfold.apply(x * self.w * self.n.clone())


counter = module(averaging, n=buffer(), w=parameter())


def flagging(loops):
    """A module that makes a buffer require a gradient, which then gets one that nothing reads."""

    def forward(self, x):
        if self.training:
            self.n.requires_grad_()
        y = (x * self.w).pow(2) + self.n
        return Sevenfold.apply(y) if loops else y

    return module(forward, w=parameter(), n=buffer())


def assigning(self, x):
    y = x * self.n
    self.n = self.n + x.detach().mean(0)
    return Sevenfold.apply(y + self.w)


def doing(action):
    """A module that does with its input what only a loop can do."""
    return module(lambda self, x: action(x) if x.sum() < FAR else x * 1)


def twice(x):
    y = Sevenfold.apply(x)
    return y, y


def plain(self, x):
    return self.fc(self.inner(self.fc(x)))


def warm_up(self, x):
    self.inner(self.fc(x))
    return self.fc(x)


def warm_up_without_gradients(self, x):
    with torch.no_grad():
        self.inner(x)
    return self.fc(x)


def buffer_between(self, x):
    view = self.inner.n[:2]
    a = self.inner(self.fc(x))
    b = self.fc(x) * self.inner.n.clone()
    self.inner.n.mul_(2)
    c = self.inner(a.tanh()) + view.sum()
    return a, b, c, self.inner.n * view.sum()


def residual(self, x):
    h = self.fc(x)
    return h + self.inner(h)


def changed_beside(self, x):
    h = self.fc(x)
    y = self.inner(h)
    y.add_(1)
    return y * 2 + h.sum()


def input_changed(self, x):
    h = self.fc(x)
    part = h[:3]
    y = self.inner(h)
    h.add_(1)
    return y.sum() + h.sum() + part


def one_of_two_changed(self, x):
    a, b = self.inner(self.fc(x))
    a.add_(1)
    return a + b


def changed(self, x):
    return self.inner(self.fc(x)).add_(1) * 2


def kept(name, inner, forward, loops="inner", **fields):
    row(f"side effect: {name}", forward, inner=inner, loops=loops, **fields)


for loops in (True, False):
    kept(f"buffer with a gradient{', captured' * (not loops)}", flagging(loops), plain, "inner" if loops else "")
kept("unused", counter, warm_up)
kept("unused statistics", lambda: nn.BatchNorm1d(4), warm_up_without_gradients, "")
kept("buffer between", counter, buffer_between)
kept("buffer assigned after its use", module(assigning, n=buffer(), w=parameter()), plain)
kept(
    "no tensor",
    module(lambda self, count: Sevenfold.apply(self.rows[:count]), rows=parameter(5, 4)),
    lambda self, x: self.fc(x) + self.inner(2)[:1],
)
kept("input given back", doing(lambda x: x), changed, "forward")
kept("input given back and used", doing(lambda x: x), changed_beside, "forward")
kept("view given back and input changed", doing(lambda x: x[:2]), input_changed, "forward")
kept("one tensor twice", doing(twice), one_of_two_changed, "forward")
kept("sometimes the input", doing(lambda x: x if x.sum() > 0 else x * 2), changed, None)
kept("write into the input", doing(lambda x: x.mul_(2)), plain, "forward")
kept("write into an input that is used", doing(lambda x: x.mul_(2) * 3), residual, "forward")


def reads_a_flag(self, x):
    scale = 2 if self.inner.n.requires_grad else 1
    return self.fc(self.inner(x)) * scale


for loops in (True, False):
    row(
        f"flag of a buffer that the next call reads{', in a loop' * loops}",
        reads_a_flag,
        inner=flagging(loops),
        loops=None,
        says=r"changes Python state in inner\.n\.requires_grad",
    )


@row(n=buffer(), loops=None, says=r"changes Python state in n\.count")
def counts_on_a_buffer(self, x):
    self.n.count = getattr(self.n, "count", 0) + 1
    return self.fc(x) * self.n.count + self.n


@row(inner=lambda: nn.BatchNorm1d(4), loops="forward", says="after backward of the graph differs from that of the code")
def checkpoint_that_writes_again_in_backward(self, x):
    return checkpoint(lambda h: self.inner(h).sin(), self.fc(x), use_reentrant=False)


# What only later values do: member 1 alone meets them.
def later(name, inner, forward, refused="", identity=False):
    def calls():
        x = normal(2, 5, 4).abs()
        return [call(hf.stacked(x)), call(hf.stacked(x * torch.tensor([1.0, -1.0]).view(2, 1, 1)))]

    row(
        f"later: {name}",
        forward,
        inner=doing(inner),
        calls=calls,
        refused=refused,
        loops=None,
        ends=None if refused else "forward",
        **({"fc": nn.Identity} if identity else {}),
    )


def if_negative(write):
    def action(x):
        if x.sum() < 0:
            write(x)
        return x * 3

    return action


LATER = {"past autograd": lambda x: x.data.mul_(2), "through out": lambda x: torch.add(x, 1, out=x)}
for name, write in LATER.items():
    later(
        f"write {name} in a part", if_negative(write), lambda self, x: self.fc(self.inner(x)), "writes into its input"
    )
    later(f"write {name}", if_negative(write), lambda self, x: self.inner(x), "writes into its input")
later("write into a copy", lambda x: x * 3 if x.sum() > 0 else x.mul_(2) * 3, lambda self, x: x + self.inner(x * 1) + x)
later(
    "write into what others read",
    if_negative(lambda x: x.mul_(2)),
    lambda self, x: (h := self.fc(x).abs() * x.sign(), h + self.inner(h))[1],
)
for identity in (False, True):
    later(
        f"alias {'of the input ' * identity}that matters",
        lambda x: x * 2 if x.sum() > 0 else x,
        changed_beside,
        "writes into its input" if identity else "",
        identity=identity,
    )
later(
    "another number of results",
    lambda x: (x * 2,) if x.sum() > 0 else (x * 2, x),
    lambda self, x: self.inner(self.fc(x).abs() * x.sign())[0],
)
later(
    "another size",
    lambda x: x * 2 if x.sum() > 0 else (x * 2)[:, :1],
    lambda self, x: self.fc(x) + self.inner(self.fc(x).abs() * x.sign()),
)


# Arguments that a submodule changes, and results that are changed afterwards.
class Cache:
    def __init__(self):
        self.held = []

    def append(self, x):
        self.held.append(x)


def grown(self, x, cache):
    """Lets a cache grow, as the attention of a decoder; only its activation cannot be captured."""
    cache.append(self.fc(x))
    held = cache if isinstance(cache, list) else cache.held
    return self.act(torch.cat(held)).sum(0, keepdim=True) + x


def noted(self, x, notes):
    notes["count"] = notes.get("count", 0) + 1
    return self.fc(branch(x))


def two_layers(cache):
    def forward(self, x):
        held = cache()
        y = self.last(self.first(x, held), held)
        return y * held.get("count", 5) if cache is dict else y

    return forward


def extending(self, x):
    values = self.first(x)
    values.append(self.fc(x))
    return torch.stack(values).sum(0)


layer = {"fc": linear, "act": square}
ARGUMENTS = {
    "object": (two_layers(Cache), module(grown, **layer), "first.act, last.act"),
    "list in a loop": (two_layers(list), module(lambda s, x, cache: grown(s, branch(x), cache), **layer), "forward"),
    "number in a dict": (two_layers(dict), module(noted, fc=linear), "forward"),
    "results": (extending, module(lambda self, x: [self.fc(branch(x))], fc=linear), "first"),
}
for name, (forward, make, loops) in ARGUMENTS.items():
    three = lambda: [normal(3, 4), normal(3, 4), normal(2, 4)]  # noqa: E731
    row(f"argument changed: {name}", forward, first=make, last=make, loops=loops, calls=three, training=(True, False))


# Calls with keywords, None before a tensor, results beside tensors.
def opaque(self, x, twice=False, *, shift=None):
    self.steps = self.steps + 1
    y = x * self.scale * self.factor
    y = y.sin() if y.sum() > 0 else y
    return {"y": y * 2 if twice else y, "pair": (y, None)} if shift is None else {"y": y + shift, "pair": (y, None)}


for factors in ((1.0, 1.0, 1.0), (1.0, 2.0, 1.0)):
    row(
        f"keywords and buffers of {factors}",
        make=lambda k, factors=factors: _keywords(factors[k]),
        members=3,
        calls=stacked(3),
        loops="inside",
    )


def _keywords(factor):
    inside = module(opaque, scale=parameter(), factor=factor, steps=buffer())
    forward = lambda self, x: self.fc(self.inside(self.inside(self.fc(x), twice=True)["y"], shift=x)["pair"][0])  # noqa: E731
    return module(forward, fc=linear, inside=inside)()


row("number beside a tensor", lambda self, x: (Sevenfold.apply(x), float(x.sum())), loops="forward",
    calls=lambda: [torch.full((2, 2), float(scale)) for scale in (1, 2, 3)])  # fmt: skip
row(
    "shapes that depend on values",
    lambda self, x: Sevenfold.apply(x[: int((x > 0).sum())]),
    calls=lambda: [call(hf.stacked(torch.tensor([[1.0, 2.0], [1.0, -1.0]])))],
    refused="shapes that depend on values cannot be fused",
)


class Language(nn.Linear):
    """Like a transformers model: returns a cache unless use_cache is False."""

    config = types.SimpleNamespace(use_cache=True)

    def forward(self, x, use_cache=True):
        y = super().forward(x)
        return (y, types.SimpleNamespace(keys=y)) if use_cache else y


row("cache among the results", make=lambda: Language(4, 2).double(), refused="call the array with use_cache=False")


# Methods that run as members' own code are found without running any other code of the class.
class Searched(nn.Module):
    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(4, 4).double()

    def points(self):
        raise NotImplementedError

    def scaled(self, x):
        return x

    def forward(self, x):
        return self.scaled(self.fc(branch(x)))


KINDS = {
    "property that fails": {"points": property(lambda self: self.no_such_attribute)},
    "static method": {"scaled": staticmethod(lambda x: x * 2)},
    "class method": {"scaled": classmethod(lambda cls, x: x * 3)},
}
for name, space in KINDS.items():
    row(f"methods: {name}", make=type("Kind", (Searched,), space), loops="forward")


class OfAProperty(Searched):
    def computed(self, x):
        return self.fc(branch(x))

    @property
    def forward(self):
        return self.computed


row("forward is a property", make=OfAProperty, refused="forward of OfAProperty is no plain method")

# Memory that code addresses: each member has a storage of its own, as alone, and all of forward is its own code.
ADDRESSED = {
    "keyword": lambda self, x: torch.as_strided(x, (2, 3), (1, 2), storage_offset=1),
    "own tensors": lambda self, x: x[:, :3] * self.w.as_strided((3,), (2,), 1) + self.n.as_strided((3,), (1,), 2),
    "offset": lambda self, x: x + x.storage_offset(),
}


@functools.partial(ADDRESSED.__setitem__, "write")
def write_own(self, x):
    self.n.as_strided((2,), (2,), 0).add_(x.detach().mean())
    return x * self.n.clone()


for name, access in ADDRESSED.items():
    inner = module(lambda self, x, f=access: Sevenfold.apply(f(self, x)), w=parameter(6), n=buffer(1.0, 6))
    wide = lambda: nn.Linear(4, 6)  # noqa: E731
    row(f"address: {name}", lambda self, x: self.inner(self.wide(x)), inner=inner, wide=wide, loops="forward")
row(
    "address of a part of another tensor",
    lambda self, x: self.inner(self.wide(x)[1:]),
    inner=module(lambda self, x: Sevenfold.apply(x.as_strided((2, 3), (1, 2), 1)), w=parameter(6)),
    wide=lambda: nn.Linear(4, 6),
    loops=None,
)


class SparseLayer(nn.Module):
    """A layer of a graph, which a member may leave out."""

    def __init__(self, skips):
        super().__init__()
        self.inner, self.norm, self.unused = nn.Linear(4, 3), nn.BatchNorm1d(3), nn.Linear(3, 3)
        self.skips, self.calls = nn.Buffer(torch.tensor(skips)), nn.Buffer(torch.zeros(()))
        self.double()

    def forward(self, x, edges):
        self.calls = self.calls + 1
        hidden = self.norm(edges @ self.inner(x))
        return hidden if self.skips else self.unused(hidden)


for name in ("coo", "csr", "csc"):
    row(
        f"sparse argument: {name}",
        make=lambda member: SparseLayer(member > 0),
        calls=lambda name=name: [
            call(normal(5, 4), getattr(normal(5, 5), f"to_sparse{'_' + name if name != 'coo' else ''}")())
            for _ in range(2)
        ],
        loops=MEMBERS,
        says=f"an argument is a tensor of layout torch.sparse_{name}",
        ignores="Sparse .* tensor support is in beta state",
    )


ADJACENCY = (normal(5, 5) * (normal(5, 5) > 0)).to_sparse()
PRODUCTS = {
    "matmul": lambda self, x: ADJACENCY @ self.fc(x),
    "addmm": lambda self, x: torch.addmm(self.fc.bias, ADJACENCY, self.fc(x)),
    "of an attribute": lambda self, x: torch.matmul(self.edges, self.fc(x)),
    "of inputs": lambda self, x: x.to_sparse() @ self.fc.weight.T,
}
for name, product in PRODUCTS.items():
    has = {"edges": lambda: ADJACENCY} if name == "of an attribute" else {}
    row(f"sparse product: {name}", product, calls=lambda: [normal(5, 4)] * 2, says="listed +loop over members", **has)
