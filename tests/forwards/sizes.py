"""Forwards at many sizes of batches and lengths, of which few captures serve all; and other forms of calls."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad

from tests.alone import call, hf, normal
from tests.forwards.table import Sevenfold, Table, buffer, module, parameter

# Lengths and numbers of samples.
SIZES = [(7, 3), (9, 3), (12, 2), (5, 5), (3, 6), (6, 3), (15, 4)]


def sequences(sizes=SIZES, batch=lambda t, n: normal(n, t, 4)):
    return lambda: [batch(*size) for size in sizes]


ROWS = Table(calls=sequences(), loops=None)
row = ROWS


@row(
    calls=sequences([*SIZES, (1, 3), (4, 1), (1, 2)], lambda t, n: torch.randint(11, (n, t))),
    captures=4,
    token=lambda: nn.Embedding(11, 4),
    position=lambda: nn.Embedding(20, 4),
    table=buffer(0.5, 20, 4),
)
def causal_attention(self, ids):
    n, t = ids.shape
    h = self.token(ids) + self.table[:t] + self.position(torch.arange(t))
    mask = torch.tril(torch.ones(t, t, dtype=torch.bool))
    scores = (self.fc(h) @ h.mT).masked_fill(~mask, float("-inf")).softmax(-1)
    heads = h.view(n, t, 2, 2).transpose(1, 2)
    more = F.scaled_dot_product_attention(heads, heads, heads, is_causal=True)
    return scores @ h + more.transpose(1, 2).reshape(n, t, 4)


def parts_of_a_larger_tensor():
    """Neither strides nor where a batch begins matter."""
    data = normal(9, 40, 4)
    parts = [data[:3, :7], data[3:6, 2:11], data[::2, 1:20:2], data[2:, 5:9].flip(0), data[:4, :30].transpose(0, 1)]
    return [*sequences(SIZES[:3])(), *parts]


@row(
    calls=parts_of_a_larger_tensor,
    captures=2,
    first=lambda: nn.Conv1d(4, 6, 3, padding=1),
    norm=lambda: nn.BatchNorm1d(6),
    second=lambda: nn.Conv1d(6, 6, 3, padding="same", groups=2),
)
def convolved(self, x):
    h = F.max_pool1d(self.norm(self.first(x.mT)), 2, padding=1)
    h = F.interpolate(self.second(h), size=x.shape[1], mode="linear")
    return h * torch.linspace(0, 1, x.shape[1], dtype=h.dtype) + F.adaptive_avg_pool1d(h, 1)


@row(captures=3)
def sliced(self, x):
    h = F.pad(self.fc(x), (0, 0, 0, -x.shape[1] % 4)).clone()
    h[:, 0] = 0
    n, t, c = h.shape
    return torch.cat([h.view(n, t // 4, 4, c).mean(2), h[:, t // 2 :].flip(1)], 1).cumsum(1)


LAYERS = {
    "lstm": (lambda s, x: s.m(x)[0], lambda: nn.LSTM(4, 3, batch_first=True)),
    "gru": (lambda s, x: s.m(x)[0], lambda: nn.GRU(4, 3, batch_first=True)),
    "attention": (lambda s, x: s.m(x, x, x)[0], lambda: nn.MultiheadAttention(4, 2, batch_first=True)),
}
for name, (forward, make) in LAYERS.items():
    training = (True, False) if name == "gru" else (True,)
    row(f"sizes of {name}", forward, m=make, captures=2, training=training)
row(
    "sizes of stacked inputs",
    lambda self, x: self.m(x)[0],
    m=lambda: nn.LSTM(4, 3, batch_first=True),
    calls=sequences(batch=lambda t, n: call(hf.stacked(normal(2, n, t, 4)))),
    captures=2,
)
row(
    # Captured where all lengths happen to be equal, too.
    "two lengths",
    lambda self, x, y: (self.fc(x) @ y.mT).softmax(-1) @ y,
    calls=lambda: [call(normal(n, t, 4), normal(n, u, 4)) for n, t, u in [(3, 4, 6), (5, 5, 5), (2, 3, 7), (4, 4, 2)]],
    captures=2,
)
row("batches of 1, 5, 1, 0", lambda self, x: self.fc(x), calls=lambda: [normal(n, 4) for n in (1, 5, 1, 0, 2)])
row(
    # No size is fixed, and yet every graph holds for a few of them only.
    "programs that each serve some sizes",
    lambda self, x: sum(part.sum(1) for part in self.fc(x).split(2, 1)),
    calls=sequences([(t, 2) for t in range(2, 24)]),
    captures=9,
)

# Calls in other forms.
row(
    "keywords in any order",
    lambda self, x, y: self.fc(x) - y,
    calls=lambda: [call(y=normal(4, 4), x=normal(4, 4)), call(x=normal(4, 4), y=normal(5, 4)[1:])],
)
row(
    "defaults",
    lambda self, x, y=None, flag=True, k=2: self.fc(x) * k if flag else self.fc(x),
    calls=lambda: [call(normal(4, 4)), call(normal(4, 4), flag=False), call(normal(4, 4), None, True, 5)],
)


class Packed(nn.Module):
    def __init__(self):
        super().__init__()
        self.rnn = nn.LSTM(4, 3, batch_first=True).double()

    def forward(self, x, lengths):
        packed = nn.utils.rnn.pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, (h, _) = self.rnn(packed)
        return *nn.utils.rnn.pad_packed_sequence(y, batch_first=True), h


row(
    "packed sequences",
    make=Packed,
    calls=lambda: [call(normal(3, 5, 4), torch.tensor(lengths)) for lengths in ([5, 3, 2], [1, 5, 4])],
)


# What runs member by member once many sizes were met.
def in_steps(self, x):
    """Cells in a Python loop, which a graph writes out for one length."""
    h = x.new_zeros(len(x), 3)
    for t in range(x.shape[1]):
        h = self.cell(x[:, t], h)
    return h


def ends(name, forward, loops, **has):
    sizes = sequences([*SIZES, (8, 3), (7, 2), (11, 3)])
    row(f"sizes that end in a loop: {name}", forward, calls=sizes, captures=3, ends=loops, **has)


loop = module(in_steps, cell=lambda: nn.GRUCell(4, 3))
ends("steps", in_steps, "forward", cell=lambda: nn.GRUCell(4, 3))
ends("steps in a part", lambda s, x: s.out(s.loop(s.fc(x))), "forward", loop=loop, out=lambda: nn.Linear(3, 2))


def odd(cut):
    """A module that no graph holds: it counts in a buffer, and gives what ``cut`` makes of its input."""

    def forward(self, x, *rest):
        self.mean += x.detach().mean((0, 1))
        return cut(Sevenfold.apply(x * self.w), *rest)

    return module(forward, w=parameter(), mean=buffer())


def around(self, x):
    return self.fc(self.inner(self.fc(x)).cumsum(1))


def told_a_length(self, x):
    return self.fc(self.inner(self.fc(x), x.shape[1] - 1).cumsum(1))


def told_by_a_number(self, x):
    y, t = self.inner(self.fc(x))
    return self.fc(y) / t


ends("one less", around, "forward", inner=odd(lambda x: x[:, 1:]))
ends("as wide as long", lambda s, x: s.fc(s.inner(s.fc(x))), "forward", inner=odd(lambda x: x.mT @ x))
ends("another order", lambda s, x: s.inner(s.fc(x)).sum(2), "forward", inner=odd(lambda x: x.mT))
ends("flat", around, "forward", inner=odd(lambda x: x.mean(1, keepdim=True)))
ends("as long as told", told_a_length, "forward", inner=odd(lambda x, t: x[:, :t]))
ends("half", around, "forward", inner=odd(lambda x: x[:, : x.shape[1] // 2]))
ends("a number", told_by_a_number, "forward", inner=odd(lambda x: (x, x.shape[1])))
# Sizes that were inferred wrongly: changes made before the error are undone.
ends("inferred wrongly", around, "forward", inner=odd(lambda x: x[:, :8]))

# The self-check takes few samples only where values do not name samples.
NODES, EDGES = 20, 60


def edges(dim=0):
    ends = torch.randint(NODES, (2, EDGES))
    ends[:, 0] = NODES - 1
    return ends if dim == 0 else ends.t().contiguous()


def graph(name, *rest, samples=NODES):
    """Add a row of a forward that takes node features, and what ``rest`` makes."""

    def add(forward):
        calls = lambda: [call(normal(samples, 4), *(make() for make in rest))]  # noqa: E731
        row(f"samples: {name}", forward, calls=calls, loops="", members=3)
        return forward

    return add


@graph("edges in columns", edges)
def summed(self, x, edge_index):
    start, end = edge_index
    return self.fc(torch.zeros_like(x).index_add(0, end, x[start]))


@graph("as many edges as nodes", lambda: edges(1)[:NODES])
def rows_of_edges(self, x, pairs):
    return self.fc(x[pairs[:, 0]] - x[pairs[:, 1]])


@graph("places as floats")
def places_as_floats(self, x):
    return self.fc(x + x[(x[:, :1].abs() * 0 + x.shape[0] - 1).long().squeeze(1)])


@graph("pairs of samples")
def pairs(self, x):
    h = self.fc(x)
    return F.log_softmax(h @ h.T, -1).diagonal() * x.shape[0]


graph("mask", lambda: torch.rand(NODES) < 0.5)(lambda self, x, mask: self.fc(x) * mask[:, None])


@graph("fails on few samples", samples=8)
def fails_on_few(self, x):
    """Cannot compute fewer than six samples, which a tracer cannot see."""
    torch._assert_async((torch.ones_like(x[:, 0]).sum() > 5).bool())
    return self.fc(x)


row(
    "samples: one of each member",
    rows_of_edges,
    calls=lambda: [call(hf.stacked(normal(2, NODES, 4)), hf.stacked(torch.stack([edges(1), edges(1)])))],
    loops="",
)


@row(calls=lambda: [normal(4, 6), normal(7, 6)], captures=1, weight=parameter(6, 6))
def sizes_in_the_graph(self, x):
    n, y = x.size(0), x @ self.weight
    heads = y.view(n, 2, -1).transpose(1, 2).contiguous().view(n, -1)
    folded = y.reshape(n * 3, 2).reshape(n, 6) + self.weight.sum().expand(n, 6)
    written = y.new_zeros(n, 6) + torch.zeros_like(y)
    written[:, 1:3] = y[:, :2]
    written[0] = 5.0
    written[:, 0] = y[:, 0]
    written.add_(1).mul_(y)
    masked = y.clone()
    masked[y > 0.5] = 0.0
    rows = y[torch.arange(n)] + y.repeat(2, 1)[:n] + torch.cat([y, x], 0).split(n, 0)[0].mean(1, keepdim=True)
    scalars = y.sum() / y.numel() + torch.narrow(y, 0, 0, n - 1).sum()
    return heads + folded + written + masked + rows + scalars


through = lambda s, x: grad(s.m(y := x.detach().requires_grad_())[0].sum(), y, create_graph=True)[0]  # noqa: E731
row("derivative through a GRU", through, m=lambda: nn.GRU(4, 3), loops="forward")
