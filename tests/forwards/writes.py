"""Forwards that write: into values and their views, into buffers and parameters, in place or by assignment."""

from __future__ import annotations

import copy

import torch
import torch.nn.functional as F
from torch import nn

import hfusion as hf
from tests.alone import call, normal
from tests.forwards.table import FAR, Table, branch, buffer, linear, module, parameter, square

ROWS = Table()
row = ROWS


@row()
def in_place_chain(self, x):
    h = self.fc(x).clone()
    h += 1
    h = h**2
    h[:, ::2] = 0
    h[h > 5] = 1.0
    h[0].add_(1)
    mask = h > 0
    mask |= h < -1
    mask &= h < 3
    return torch.where(mask, h, h * 0.5)


# Views of a value, then a write into the view or into the whole. Some operators hand on their input though their
# schema does not say so; others give a view or a copy, which depends on how the input lies in memory.
VIEWS = {
    "row": lambda v: v[1],
    "steps": lambda v: v[..., ::2],
    "transposed": lambda v: v.transpose(0, -1),
    "flat": lambda v: v.flatten(),
    "unbind": lambda v: v.unbind(0)[0],
    "third of uneven parts": lambda v: v.split([1, 2, 1])[2],
    "dropout of nothing": lambda v: F.dropout(v, 0.0, training=True),
    "feature alpha dropout": lambda v: F.feature_alpha_dropout(v, 0.0, training=True),
}
# Where the whole is written, no operation gives the view anew.
LOOPED_VIEWS = {
    "einsum": lambda v: torch.einsum("ij->ji", v),
    "hsplit": lambda v: torch.hsplit(v, 2)[1],
    "three dims": lambda v: torch.atleast_3d(v)[..., 0],
}


def into_view_and_whole(view):
    """Write into a view of one value, and into another value that has a view; give all of them back."""

    def forward(self, x):
        first, second = x * 2, x * 3
        part, other = view(first), view(second)
        part.mul_(part.sin())
        second.add_(1.0)
        return first, part, second, other

    return forward


for name, view in {**VIEWS, **LOOPED_VIEWS}.items():
    loops = "forward" if name in LOOPED_VIEWS else ""
    row(f"write beside a view: {name}", into_view_and_whole(view), calls=lambda: [normal(4, 4)], loops=loops)

PLACED = {
    "flatten": lambda v: v.flatten(2)[:, :, :4],
    "reshape of transposed": lambda v: v.mT.reshape(v.shape[0], -1),
    "reshape_as": lambda v: v.transpose(1, 2).reshape_as(v),
    "contiguous": lambda v: v.contiguous(),
    "contiguous, channels last": lambda v: v.contiguous(memory_format=torch.channels_last),
    "to its dtype": lambda v: v.to(v.dtype),
    "always a view": lambda v: v.transpose(0, 1)[1:],
}
MEMORY = {
    "contiguous": lambda x: x,
    "channels last": lambda x: x.contiguous(memory_format=torch.channels_last),
    "samples last": lambda x: x.transpose(0, -1).contiguous().transpose(0, -1),
    "with gaps": lambda x: x.repeat_interleave(2, -1)[..., ::2],
    "expanded": lambda x: x[..., :1].expand(x.shape),
}


def images():
    made = [place(normal(size, 4, 6, 6)) for size in (3, 5) for place in MEMORY.values()]
    return [*made, *(call(hf.stacked([x, x])) for x in made[:5])]


def beside(view, into_view):
    def forward(self, x):
        whole = x * self.scale
        part = view(whole)
        (part if into_view else whole).sin_()
        return whole * 2, part * 3

    return forward


for name, view in PLACED.items():
    for into_view in (True, False):
        text = f"write into {'what may be a view' if into_view else 'the whole'}: {name}"
        row(text, beside(view, into_view), scale=parameter(4, 1, 1), calls=images, loops=None)

COPIES = {
    "same shape": lambda h, x: h[:, :2].copy_(x[:, :2]),
    "of itself": lambda h, x: h.view(-1, 2, 2)[:, 1].copy_(h.clone()[:, :2]),
    "other dtype": lambda h, x: h.copy_(x.float()),
    "complex": lambda h, x: torch.view_as_complex(x.sin().view(-1, 2, 2)).copy_(h[0, :2]),
}
# A parameter whose value a write hides has a gradient of zeros, with which it decays; without one it would not.
HIDING = {
    "copy": lambda h, x: h.copy_(x),
    "copy, permuted": lambda h, x: h.unsqueeze(0).permute(1, 2, 0).copy_(x.unsqueeze(-1)),
    "item": lambda h, x: h.__setitem__(slice(None), x),
    "real part": lambda h, x: torch.real(h).copy_(x),
    "zero": lambda h, x: h.zero_(),
    "compared": lambda h, x: h.eq_(x),
    "mask": lambda h, x: h.masked_fill_(torch.ones_like(h, dtype=torch.bool), 0.0),
}


def hidden(write):
    def forward(self, x):
        h = self.hidden(x)
        write(h, x)
        return h * h + self.fc(x)

    return forward


for name, write in {**COPIES, **HIDING}.items():
    calls = lambda: [normal(4, 4).requires_grad_()]  # noqa: E731
    # Writes through other numbers than the base's.
    loops = "forward" if name in ("complex", "real part") else ""
    row(f"write over a value: {name}", hidden(write), hidden=linear, calls=calls, loops=loops)

for name in ("addcdiv_", "addcmul_"):
    row(
        f"broadcast write: {name}",
        lambda self, x, a, b, name=name: getattr(x.clone(), name)(a, b, value=2),
        calls=lambda: [call(*(torch.rand(*shape, dtype=torch.float64) + 1 for shape in ((5, 5), (5, 1), (1, 5))))],
    )


# Buffers that are assigned, at the root and below it, beside what runs in a loop.
def buffers(m=1.0):
    return {"m": buffer(m), "k": lambda: nn.Buffer(torch.arange(4.0))}


def average(self, x):
    h = x + self.m
    self.m = 0.5 * self.m + h.detach().mean(0)
    return h + self.m


def old_and_new(self, x):
    old = self.m
    self.m = self.m + x.detach().mean(0)
    return x * self.m + old


def crosswise(self, x):
    self.m, self.k = self.k * 1.0, self.m[:] * 1.0
    return x * self.m


def of_a_view(self, x):
    self.m = self.k[:]
    self.k = self.k + 1
    return x * self.m + self.k


def assign_and_write(self, x):
    old = self.m
    self.m = x.detach().mean(0)
    self.m.mul_(2)
    old.add_(1)
    self.m = self.m + old
    return x * self.m


for assign in (average, old_and_new, crosswise, of_a_view, assign_and_write):
    text = f"buffer assigned: {assign.__name__.replace('_', ' ')}"
    loops = "forward" if assign is of_a_view else ""
    row(text, lambda self, x, assign=assign: assign(self, self.fc(x)), loops=loops, **buffers())
    row(
        f"{text}, below the root and unread, beside a loop",
        lambda self, x: (self.part(self.fc(x)) * 0, self.last(x @ self.fc.weight))[1],
        part=module(assign, **buffers()),
        last=square,
        loops="last",
    )


@row("buffer that backward needs as it was", scale=buffer(2.0))
def halved(self, x):
    y = self.fc(x) * self.scale
    self.scale = self.scale * 0.5
    return y


@row("writes into buffers", m=buffer(), count=lambda: nn.Buffer(torch.zeros((), dtype=torch.long)))
def written_buffers(self, x):
    self.count += 1
    self.m[:2].mul_(0.5).add_(x.mean(0)[:2])
    self.m = self.m * 0.9
    return x - self.m / self.count


def assigned(name, change, refused, **has):
    """Add a row that assigns a buffer what ``change`` gives, and is refused."""

    def forward(self, x):
        self.m = change(self)
        return self.fc(x)

    row(f"buffer assigned: {name}", forward, refused=refused, **buffers(), **has)


assigned("alias", lambda self: self.k, "m and k share memory")
assigned("larger", lambda self: torch.cat([self.m, self.m]), "shape of m")
assigned("other dtype", lambda self: self.m.float(), "dtype of m")


# Tensors that are one, and that forward makes two.
def untie(self, x):
    self.other = self.other.clone()
    return x * self.mean + self.other


def untie_once(self, x):
    if self.other is self.mean:
        self.mean = self.mean + 1
    self.other += 1
    return x * self.mean + self.other


def untie_parameters(self, x):
    if self.again.weight is self.first.weight:
        self.again.weight = nn.Parameter(self.first.weight.detach().clone())
    return self.again(x)


class Tied(nn.Module):
    def __init__(self, does, loops, used):
        super().__init__()
        self.does, self.square = does, square() if loops else nn.Identity()
        self.first, self.again = nn.Linear(4, 4).double(), nn.Linear(4, 4).double()
        self.again.weight = self.first.weight
        self.mean = self.other = nn.Buffer(torch.ones(4, dtype=torch.float64))
        if used:
            self(normal(3, 4))

    def forward(self, x):
        return self.square(self.does(self, self.first(x)))


TIES = "are one tensor, and forward makes them two.*call the models once"
for does in (untie, untie_once, untie_parameters):
    for loops in (True, False):
        text = f"tie that is undone: {does.__name__}{', beside a loop' * loops}"
        row(text, make=lambda does=does, loops=loops: Tied(does, loops, False), refused=TIES)
        if does is not untie:
            make = lambda does=does, loops=loops: Tied(does, loops, True)  # noqa: E731
            row(f"{text}, before", make=make, loops=None)


class Overlapping(nn.Module):
    def __init__(self, writes):
        super().__init__()
        base = torch.ones(5, dtype=torch.float64)
        self.writes, self.mean, self.other = writes, nn.Buffer(base[:4]), nn.Buffer(base[1:])

    def forward(self, x):
        if self.writes:
            self.other += 1
        return x * self.mean + self.other


row("overlapping buffers that are read", make=lambda: Overlapping(False), grads=False)
row("overlapping buffers", make=lambda: Overlapping(True), refused=r"writes into the buffer other.*of another tensor")


# Parameters that forward writes: projections, averages of a student, bounded tables.
@torch.no_grad()
def bound_rows(weight):
    norms = weight.norm(dim=1, keepdim=True)
    weight.mul_(norms.clamp(max=0.5) / norms)


PROJECTIONS = {
    "data assigned": lambda w: setattr(w, "data", w.data.clamp(min=0)),
    "data clamped": lambda w: w.data.clamp_(min=0),
    "clamp": torch.no_grad()(lambda w: w.clamp_(min=0)),
    "norms bounded": bound_rows,
    "first row": torch.no_grad()(lambda w: w[0].clamp_(min=0)),
    "out": torch.no_grad()(lambda w: torch.clamp(w, min=0, out=w)),
    "no change": torch.no_grad()(lambda w: w.clamp_(min=-FAR)),
    "renorm": lambda w: setattr(w, "data", torch.renorm(w.data, 2, 0, 0.5)),
}


class Convex(nn.Module):
    """Input convex: its inner weights are projected in each forward. ``loops``: it runs member by member."""

    def __init__(self, project, loops=False):
        super().__init__()
        self.project, self.loops = project, loops
        self.first, self.inner, self.last = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2)
        self.double()

    def forward(self, x):
        self.project(self.inner.weight)
        h = F.softplus(self.inner(F.softplus(self.first(x))))
        return self.last(branch(h) if self.loops else h) + self.inner.weight.square().sum()


def three_calls():
    return [normal(5, 4) for _ in range(3)]


def writer(name, make, loops="", **fields):
    row(f"parameter written: {name}", make=make, loops=loops, calls=three_calls, **fields)


def average_in_place(teacher, student):
    for target, source in zip(teacher.parameters(), student.parameters(), strict=True):
        target.mul_(0.9).add_(source, alpha=0.1)


def average_data(teacher, student):
    for target, source in zip(teacher.parameters(), student.parameters(), strict=True):
        target.data = target.data * 0.9 + source.data * 0.1


def average_by_foreach(teacher, student):
    torch._foreach_lerp_(list(teacher.parameters()), list(student.parameters()), 0.1)


class Distilling(nn.Module):
    """A student and its average, which starts as a copy of it, and learns nothing itself."""

    def __init__(self, average):
        super().__init__()
        self.average = average
        self.student = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2)).double()
        self.teacher = copy.deepcopy(self.student).requires_grad_(False)
        self.queue = nn.Buffer(normal(2, 4))

    def forward(self, x):
        with torch.no_grad():
            self.average(self.teacher, self.student)
            target = self.teacher(x * 0.9)
        logits = self.student(x) @ self.queue.clone()
        self.queue[:, :2] = target[:2].T
        return logits - target.sum(1, keepdim=True)


PROJECTED = {name: lambda f=f: Convex(f) for name, f in PROJECTIONS.items()}
TEACHERS = {
    "teacher": lambda: Distilling(average_data),
    "teacher in place": lambda: Distilling(average_in_place),
    "teacher by foreach": lambda: Distilling(average_by_foreach),
}
BOTH = ("clamp", "teacher")
for name, make in {**PROJECTED, **TEACHERS}.items():
    training = (True, False) if name in BOTH else (True,)
    writer(name, make, "forward" if "foreach" in name else "", training=training)
for name in ("data assigned", "data clamped", "clamp", "first row"):
    writer(f"{name}, in a loop", lambda f=PROJECTIONS[name]: Convex(f, loops=True), "forward", training=(True, False))
writer("in a part", lambda: nn.Sequential(linear().double(), Convex(PROJECTIONS["clamp"], loops=True)), "1")
for table in (nn.Embedding, nn.EmbeddingBag):
    row(
        f"parameter written: bounded {table.__name__}",
        lambda self, ids: self.fc(self.table(ids)),
        table=lambda table=table: table(6, 4, max_norm=0.5),
        calls=lambda: [torch.randint(6, (5, 3)) for _ in range(3)],
    )


@row("parameter replaced", inner=linear, refused="makes inner.weight another parameter")
def replaced(self, x):
    self.inner.weight = nn.Parameter(self.inner.weight.clamp(min=0))
    return x


@row("parameter made one with another", inner=linear, refused="makes .* share memory; assign a clone")
def shared(self, x):
    self.inner.weight.data = self.fc.weight.data
    return x


@row("parameter made smaller", inner=linear, refused="changes shape of inner.weight")
def of_another_shape(self, x):
    self.inner.weight.data = self.inner.weight.data[:2]
    return x


class Late(nn.Module):
    """Gets a layer and a buffer in its first call."""

    def __init__(self):
        super().__init__()
        self.layer = None
        self.register_buffer("scale", None)

    def forward(self, x):
        if self.layer is None:
            self.layer, self.scale = nn.Linear(x.shape[1], 3).double(), normal(3)
        return self.layer(x) * self.scale


def called(make):
    model = make().double()
    model(normal(5, 4))
    return model


for make in (Late, lambda: nn.LazyLinear(3), lambda: nn.Sequential(nn.LazyBatchNorm1d())):
    text = f"tensors of a first call: {type(make()).__name__}"
    row(text, make=lambda make=make: make().double(), refused="call each model once before fusing")
    row(f"{text}, called before", make=lambda make=make: called(make))


# Calls with out=.
@row(w=parameter(4, 4), u=parameter(), loops="forward")
def out_that_is_resized(self, x):
    out = torch.empty(0, dtype=x.dtype)
    with torch.no_grad():
        torch.mul(self.u, 2, out=out)
    return x @ self.w * out


@row(w=parameter(4, 4), u=buffer(1.0), v=buffer(1.0))
def out_of_a_norm(self, x):
    with torch.no_grad():
        F.normalize(self.w.t() @ self.u, dim=0, out=self.v)
        F.normalize(self.w @ self.v, dim=0, out=self.u)
    return F.linear(x, self.w / torch.dot(self.u.clone(), self.w @ self.v.clone()))


@row(v=buffer(), index=lambda: nn.Buffer(torch.zeros(4, dtype=torch.int64)))
def two_outs(self, x):
    with torch.no_grad():
        torch.max(self.fc.weight, 1, out=(self.v, self.index))
    return self.fc(x) * self.v + self.index


@row(u=buffer(2.0))
def outs_that_are_views(self, x):
    rows = torch.zeros(4, 4, dtype=x.dtype)
    torch.mul(self.u, 2, out=rows[1])
    torch.exp(self.u, out=rows[2])
    return self.fc(x) @ rows


# What no array can follow.
row("write past autograd", lambda self, x: (h := self.fc(x), h.detach().mul_(2), h)[2], loops=None)
row("write of the input", lambda s, x: s.fc(x.mul_(2)), calls=lambda: [normal(4, 4)], refused="writes into its input")
