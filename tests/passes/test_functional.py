"""Graphs without in-place writes compute what the code with them computes."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, fx, nn

import hfusion as hf
from hfusion.capture.export import capture
from hfusion.core.errors import FusionError
from hfusion.core.program import Capture, Kind
from tests.alone import assert_alone, looped, normal

WHOLE = ("alias", "kept whole", "new")
# Views of a [4, 4] tensor, and writes into any of them.
VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "row": lambda x: x[1],
    "rows": lambda x: x[1:3],
    "steps": lambda x: x[..., ::2],
    "transposed": lambda x: x.transpose(0, -1),
    "flat": lambda x: x.view(-1),
    "chunk": lambda x: x.chunk(2)[1],
    "unbind": lambda x: x.unbind(0)[0],
    "split": lambda x: x.split([1, x.shape[0] - 1])[1],
    "alias": lambda x: x.view_as(x),
    "kept whole": lambda x: F.dropout(x, 0.5, training=False),
    "new": lambda x: x * 1,
}
WRITES: dict[str, Callable[[Tensor, float], Any]] = {
    "add": lambda x, k: x.add_(k),
    "multiply": lambda x, k: x.mul_(x.sum() * 0.1),
    "fill": lambda x, k: x.fill_(k),
    "copy": lambda x, k: x.copy_(x.sin()),
    "mask": lambda x, k: x.masked_fill_(x > k, 0.5),
    "item": lambda x, k: x.__setitem__(0, k),
    "power": lambda x, k: x.pow_(2),
}

Step = tuple[str, int, float]
STEPS = st.lists(
    st.tuples(st.sampled_from([*VIEWS, *WRITES, *WRITES]), st.integers(0, 5), st.sampled_from([0.5, -2.0])),
    min_size=2,
    max_size=8,
)


class Steps(nn.Module):
    """Takes views of, and writes into, what the steps before gave; gives everything back."""

    def __init__(self, steps: list[Step]) -> None:
        super().__init__()
        self.steps = steps

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        tensors = [x.clone(), x * 2]
        for name, index, number in self.steps:
            target = tensors[index % len(tensors)]
            if name in VIEWS and (target.dim() == 2 or name in WHOLE) and target.shape[0] > 1:
                tensors.append(_viewed(name, target))
            elif name in WRITES:
                WRITES[name](target, number)
        return tuple(tensors)


def _viewed(name: str, target: Tensor) -> Tensor:
    return target.reshape(-1) if name == "flat" and not target.is_contiguous() else VIEWS[name](target)


def run(captured: Capture, x: Tensor, held: dict[str, Tensor]) -> Any:
    held = held | captured.constants
    inputs = [x if slot.kind is Kind.INPUT else held[slot.name] for slot in captured.slots]
    return fx.GraphModule(nn.Module(), captured.graph)(*inputs)


@settings(max_examples=40, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck))
@given(STEPS)
def test_random_views_and_writes(steps: list[Step]) -> None:
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    module = Steps(steps)
    expected = module(x)
    found = capture(module, (x,), {}, varying=False)
    assert not [n for n in found.graph.nodes if n.op == "call_function" and _mutable(n)]
    for ours, theirs in zip(run(found, x, {}), expected, strict=True):
        assert torch.equal(ours, theirs)


def _mutable(node: fx.Node) -> bool:
    return isinstance(node.target, torch._ops.OpOverload) and node.target._schema.is_mutable


# What hands on its input, or a view of it, though the operator's schema does not say so.
HANDED_ON: dict[str, Callable[[Tensor], Tensor]] = {
    "dropout of nothing": lambda x: F.dropout(x, 0.0, training=True),
    "dropout in evaluation": lambda x: F.dropout(x, 0.5, training=False),
    "alpha dropout": lambda x: F.alpha_dropout(x, 0.5, training=False),
    "channels": lambda x: F.dropout1d(x[None], 0.5, training=False)[0],
    "feature alpha dropout": lambda x: F.feature_alpha_dropout(x, 0.0, training=True),
    "einsum": lambda x: torch.einsum("ij->ji", x),
    "hsplit": lambda x: torch.hsplit(x, 2)[1],
    "vsplit": lambda x: torch.vsplit(x, 2)[0],
    "meshgrid": lambda x: torch.meshgrid(x[0], indexing="ij")[0],
    "broadcast": lambda x: torch.broadcast_tensors(x, x[0])[0],
    "three dims": lambda x: torch.atleast_3d(x)[..., 0],
    "product of one": lambda x: torch.cartesian_prod(x[0]),
    "unsafe chunk": lambda x: x.unsafe_chunk(2, 1)[0],
}


class HandsOn(nn.Module):
    def __init__(self, view: Callable[[Tensor], Tensor], write: str) -> None:
        super().__init__()
        self.view, self.write = view, write

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        whole = x * 2
        part = self.view(whole)
        (part if self.write == "view" else whole).add_(1.0)
        return whole, part


@pytest.mark.parametrize("write", ["whole", "view"])
@pytest.mark.parametrize("view", HANDED_ON)
def test_views_that_no_schema_declares(view: str, write: str) -> None:
    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    module = HandsOn(HANDED_ON[view], write)
    expected = module(x)
    captured = None
    with suppress(FusionError):
        captured = capture(module, (x,), {}, varying=False)
    if captured is None:
        # Broadcasting hands on the whole itself.
        assert write == "view" or view == "broadcast"
        with pytest.raises(FusionError, match="cannot undo"):
            capture(module, (x,), {}, varying=False)
        return
    for actual, expected_tensor in zip(run(captured, x, {}), expected, strict=True):
        assert torch.equal(actual, expected_tensor)


# Views that another order of dims, or another place, would give in the same shape.
PLACES: dict[str, Callable[[Tensor], Tensor]] = {
    "dims in a cycle": lambda x: x.view(2, 2, 2, 2).permute(1, 2, 0, 3),
    "third of uneven parts": lambda x: x.split([1, 2, 1])[2],
}


@pytest.mark.parametrize("case", PLACES)
def test_writes_into_a_view_reach_its_base(case: str) -> None:
    class Places(nn.Module):
        def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
            whole = x * 2
            part = PLACES[case](whole)
            part.mul_(part.sin())
            return whole, part

    x = torch.linspace(-1, 1, 16, dtype=torch.float64).view(4, 4)
    for actual, expected in zip(run(capture(Places(), (x,), {}, varying=False), x, {}), Places()(x), strict=True):
        assert torch.equal(actual, expected)


class Buffered(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(4))
        self.register_buffer("count", torch.zeros((), dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.mean[:2].mul_(0.5).add_(x.mean(0)[:2])
        self.mean = self.mean * 0.9
        return x - self.mean / self.count


def test_writes_to_buffers_stay() -> None:
    x = torch.arange(8.0).view(2, 4)
    module = Buffered()
    captured = capture(module, (x,), {})
    buffers = dict(module.named_buffers())
    held = {slot.name: buffers[slot.name].clone() for slot in captured.slots if slot.kind is Kind.BUFFER}
    for _ in range(3):
        (actual,) = run(captured, x, held)
        assert torch.equal(actual, module(x))
        assert all(torch.equal(held[name], buffer) for name, buffer in module.named_buffers())


class Writing(nn.Module):
    def __init__(self, write: Callable[[Tensor], Any]) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)
        self.write = write

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        self.write(h)
        return h


def transpose_under_a_view(h: Tensor) -> None:
    g = h.detach().clone()
    row = g[0]
    g.t_()
    h.add_(row.sum())


@pytest.mark.parametrize(
    ("write", "message"),
    [
        (lambda h: h.detach().mul_(2), "unseen by autograd"),
        (transpose_under_a_view, "changes the shape of a tensor that has views"),
        (lambda h: h.clone().as_strided((2,), (1,)).zero_(), "cannot undo"),
    ],
)
def test_writes_that_cannot_be_undone_are_refused(write: Callable[[Tensor], Any], message: str) -> None:
    with pytest.raises(FusionError, match=message):
        capture(Writing(write), (torch.randn(3, 4),), {})


@pytest.mark.parametrize("name", ["addcdiv_", "addcmul_"])
def test_writes_broadcast_where_sizes_vary(name: str) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor, a: Tensor, b: Tensor) -> Any:
            return getattr(x.clone(), name)(a, b, value=2)

    inputs = tuple(torch.rand(*shape, dtype=torch.float64) + 1 for shape in ((5, 5), (5, 1), (1, 5)))
    (output,) = fx.GraphModule(nn.Module(), capture(Net(), inputs, {}).graph)(*inputs)
    assert torch.equal(output, Net()(*inputs))


COPIES: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "same shape": lambda h, x: h[:, :2].copy_(x[:, :2]),
    "of itself": lambda h, x: h.view(-1, 2, 3)[:, 1].copy_(h.clone()[:, :3]),
    "broadcast": lambda h, x: h.copy_(x[0]),
    "other dtype": lambda h, x: h.copy_(x.float()),
    "complex": lambda h, x: torch.view_as_complex(h.view(-1, 3, 2)).copy_(x[0, :3]),
}


@pytest.mark.parametrize("name", COPIES)
@pytest.mark.parametrize("members", [1, 2])
def test_a_copy_has_gradients(name: str, members: int) -> None:
    class Net(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            h = x.sin()
            COPIES[name](h, x)
            return h * h

    x = torch.rand(5, 6, dtype=torch.float64, requires_grad=True)
    (expected,) = torch.autograd.grad(Net()(x).sum(), x)
    output = hf.fuse([Net() for _ in range(members)])(x)
    assert torch.equal(output[-1], Net()(x))
    assert torch.equal(torch.autograd.grad(output.sum(), x)[0], expected * members)


HIDING: dict[str, Callable[[Tensor, Tensor], Any]] = {
    "copy": lambda h, x: h.copy_(x),
    "of a view": lambda h, x: h.view(-1).copy_(x.reshape(-1)),
    "transposed": lambda h, x: h.t().copy_(x.t()),
    "permuted, as a vector": lambda h, x: h.permute(1, 0).unsqueeze(0).copy_(x.T),
    "item": lambda h, x: h.__setitem__(slice(None), x),
    "item of a transposed": lambda h, x: h.mT.__setitem__(slice(None), x.mT),
    "real part": lambda h, x: torch.real(h).copy_(x),
    "zero": lambda h, x: h.zero_(),
    "compared": lambda h, x: h.eq_(x),
    "compared, transposed": lambda h, x: h.t().gt_(0.0),
    "fill": lambda h, x: h.view(-1, 2, 3).fill_(2.0),
    "mask": lambda h, x: h.masked_fill_(torch.ones_like(h, dtype=torch.bool), 0.0),
}


@pytest.mark.parametrize("name", HIDING)
def test_values_hidden_by_a_write_have_a_gradient_of_zeros(name: str) -> None:
    """A parameter with such a gradient decays, and one without does not."""

    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.hidden, self.seen = nn.Linear(6, 6).double(), nn.Linear(6, 6).double()

        def forward(self, x: Tensor) -> Tensor:
            h = self.hidden(x)
            HIDING[name](h, x)
            return h + self.seen(x)

    x = torch.rand(5, 6, dtype=torch.float64)
    fused = hf.fuse([Net() for _ in range(2)])
    fused(x).sum().backward()
    for parameter in fused.hidden.parameters():
        assert torch.equal(parameter.grad, torch.zeros_like(parameter))


def resized(self: Any, x: Tensor) -> Tensor:
    out = torch.empty(0, dtype=x.dtype)
    torch.mul(self.u, 2, out=out)
    return x * out


def normalised(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        F.normalize(self.weight.t() @ self.u, dim=0, out=self.v)
        F.normalize(self.weight @ self.v, dim=0, out=self.u)
    return F.linear(x, self.weight / torch.dot(self.u.clone(), self.weight @ self.v.clone()))


def summed(self: Any, x: Tensor) -> Tensor:
    out = torch.empty(x.shape, dtype=x.dtype)
    torch.add(x.detach(), self.u, out=out)
    return x + out


def largest(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        torch.max(self.weight, 1, out=(self.v, self.index))
    return x * self.v + self.index


def into_views(self: Any, x: Tensor) -> Tensor:
    rows = torch.zeros(4, 4, dtype=x.dtype)
    torch.mul(self.u, 2, out=rows[1])
    torch.exp(self.u, out=rows[2])
    return x @ rows


def filled(self: Any, x: Tensor) -> Tensor:
    torch.full((4,), 0.5, out=self.v)
    torch.arange(4, out=self.index)
    return x * self.v + self.index


def cast(self: Any, x: Tensor) -> Tensor:
    torch.add(self.index, self.index + 1, out=self.v)
    return x * self.v


class Outputs(nn.Module):
    def __init__(self, does: Callable[[Any, Tensor], Tensor]) -> None:
        super().__init__()
        self.does, self.weight = does, nn.Parameter(torch.randn(4, 4, dtype=torch.float64))
        self.register_buffer("u", torch.randn(4, dtype=torch.float64))
        self.register_buffer("v", torch.randn(4, dtype=torch.float64))
        self.register_buffer("index", torch.zeros(4, dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        return self.does(self, x @ self.weight)


@pytest.mark.parametrize("does", [normalised, summed, largest, into_views, filled, cast, resized])
def test_calls_with_out_are_captured(does: Callable[[Any, Tensor], Tensor]) -> None:
    fused = assert_alone([Outputs(does) for _ in range(3)], normal(5, 4), normal(5, 4))
    assert looped(fused.report().parts[0]) == ({"forward"} if does is resized else set())


def test_spectral_norm_is_captured() -> None:
    bounded = nn.utils.parametrizations.spectral_norm

    def make() -> nn.Module:
        return nn.Sequential(bounded(nn.Conv1d(4, 3, 1)), nn.Flatten(), bounded(nn.Linear(15, 2))).double()

    fused = assert_alone([make() for _ in range(2)], normal(3, 4, 5), normal(3, 4, 5))
    assert not looped(fused.report().parts[0])


class Rescaled(nn.Module):
    """Replaces a buffer by a value from which the next call computes; backward needs the one before."""

    scale: Tensor

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4).double()
        self.register_buffer("scale", torch.full((4,), 2.0, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.fc(x) * self.scale
        self.scale = self.scale * 0.5
        return y


def test_backward_uses_a_buffer_as_it_was_before_it_was_replaced() -> None:
    fused = assert_alone([Rescaled() for _ in range(3)], normal(2, 4), normal(2, 4))
    # Reading the new value would be noticed, and members would run one after another.
    assert not looped(fused.report().parts[0])
