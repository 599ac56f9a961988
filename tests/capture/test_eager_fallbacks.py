"""The smallest submodule runs in a loop, however it is called and wherever it stands."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn
from torch.testing import assert_close
from torch.utils.checkpoint import checkpoint

import hfusion as hf
from hfusion.capture import capture_member
from tests.alone import assert_alone, looped, normal
from tests.capture.test_export import Sevenfold


class Square(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return Sevenfold.apply(x)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4), Square()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.act(self.fc(x))

    def encode(self, x: Tensor, *, shift: Tensor | None = None) -> Tensor:
        h: Tensor = Sevenfold.apply(self.fc(x))
        return h if shift is None else h + shift

    def through(self, x: Tensor) -> Tensor:
        return self.act(self.fc(x))


class Sized(NamedTuple):
    value: Tensor
    size: int


class Telling(nn.Module):
    def forward(self, x: Tensor) -> Sized:
        return Sized(Sevenfold.apply(x), x.shape[1])


class Weighing(nn.Module):
    """Gives a number that an array cannot keep per member, so that only the module around it can run in a loop."""

    def forward(self, x: Tensor) -> tuple[Tensor, float]:
        return Sevenfold.apply(x), 0.5


class Weighed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weighing = Weighing()

    def forward(self, x: Tensor) -> Tensor:
        value, weight = self.weighing(x)
        return value * weight


class Failing(nn.Module):
    """Takes no arguments of three dims, as its caller knows."""

    def forward(self, x: Tensor) -> Tensor:
        if x.dim() == 3:
            raise ValueError("three dims")
        return x * 2


class Moody(nn.Module):
    """Asks whether gradients are on."""

    def __init__(self) -> None:
        super().__init__()
        self.w = nn.Parameter(torch.randn(4))

    def forward(self, x: Tensor, *, y: Tensor | None = None) -> Tensor:
        if not torch.is_grad_enabled():
            return Sevenfold.apply(x + self.w)
        return Sevenfold.apply(x * self.w) if y is None else Sevenfold.apply(x) + y


class Noisy(nn.Module):
    """Draws random numbers of no consequence."""

    def forward(self, x: Tensor) -> Tensor:
        return x + 0 * torch.rand_like(x) if x.sum() < 1e9 else x


class Referring(nn.Module):
    """Reaches a module that is not its own."""

    def __init__(self, blocks: nn.ModuleList) -> None:
        super().__init__()
        self.blocks = [blocks]

    def forward(self, x: Tensor) -> Tensor:
        return Sevenfold.apply(self.blocks[0][0].fc(x))


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([Block(), Block()])
        self.nest = nn.ModuleDict({"a": nn.ModuleDict({"b": Block()})})
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.act, self.telling, self.moody, self.noisy = Square(), Telling(), Moody(), Noisy()
        self.again, self.weighed, self.failing = self.act, Weighed(), Failing()
        self.referring = Referring(self.blocks)
        self.register_buffer("scale", torch.full((4,), 0.5))
        self.double()

    def scaled(self, x: Tensor) -> Tensor:
        return Sevenfold.apply(x * self.scale)

    def applied(self, blocks: nn.ModuleList, x: Tensor) -> Tensor:
        for block in blocks:
            x = block(x)
        return Sevenfold.apply(x)


def listed(self: Any, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = block(x)
    return self.head(self.norm(x))


def directly(self: Any, x: Tensor) -> Tensor:
    for block in self.blocks:
        x = block.forward(x)
    return self.head(x)


def by_methods(self: Any, x: Tensor) -> Tensor:
    return self.head(self.blocks[0].encode(self.norm(x), shift=x) + self.blocks[1].through(x))


def in_modes(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        a = self.moody(self.head(x)[:, :1].expand(-1, 4))
    with torch.autocast("cpu", dtype=torch.bfloat16):
        b = self.moody(x, y=x * 2)
    return self.head(a + self.moody(self.norm(x))) + b.sum()


def caught(self: Any, x: Tensor) -> Tensor:
    try:
        h = self.failing(x[None])
    except ValueError:
        h = self.failing(x)
    return self.head(self.act(h))


FORWARDS: dict[str, tuple[Callable[..., Any], set[str]]] = {
    "ModuleList": (listed, {"blocks.0.act", "blocks.1.act"}),
    "ModuleDict": (lambda self, x: self.head(self.nest["a"]["b"](x)), {"nest.a.b.act"}),
    "forward called directly": (directly, {"blocks.0.act", "blocks.1.act"}),
    "other methods": (by_methods, {"blocks.0.encode()", "blocks.1.act"}),
    "a method of the model": (lambda self, x: self.head(self.norm(self.scaled(self.norm(x)))), {"scaled()"}),
    "a named tuple and a number": (lambda self, x: self.head((t := self.telling(x)).value) * t.size, {"telling"}),
    "no_grad, autocast, keywords": (in_modes, {"moody"}),
    "two paths": (lambda self, x: self.head(self.act(x) + self.again(x * 2)), {"act"}),
    "random numbers": (lambda self, x: self.head(self.noisy(self.act(x))), {"act", "noisy"}),
    "beside what cannot": (lambda self, x: self.head(self.weighed(self.act(x))), {"weighed", "act"}),
    "an error that is caught": (caught, {"act"}),
    "modules as arguments": (lambda self, x: self.head(self.applied(self.blocks, x)), {"forward"}),
    "another's module": (lambda self, x: self.head(self.referring(x)), {"forward"}),
}


class Refusing(nn.Module):
    """Raises while it is traced; neither this module alone nor the one around it can run in a loop."""

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        return (x if x.sum() < 1e9 else -x), object()


class Around(nn.Module):
    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.inner = inner

    def forward(self, x: Tensor) -> tuple[Tensor, object]:
        y, other = self.inner(x)
        return y * 2, other


class Outermost(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.around = Around(Around(Refusing()))

    def forward(self, x: Tensor) -> Tensor:
        return self.around(x)[0]  # type: ignore[no-any-return]


def test_an_error_below_what_is_looped_leaves_the_rest_captured() -> None:
    models = [nn.Sequential(nn.Linear(4, 4), Outermost(), nn.Linear(4, 4)).double() for _ in range(2)]
    (part, *_) = assert_alone(models, normal(5, 4)).report().parts
    assert looped(part) == {"1"}


@pytest.mark.parametrize("name", FORWARDS)
def test_the_smallest_is_looped(name: str) -> None:
    forward, islands = FORWARDS[name]
    make = type("Net", (Base,), {"forward": forward})
    array = assert_alone([make() for _ in range(2)], normal(5, 4), hf.stacked(normal(2, 5, 4)))
    (part, *_) = array.report().parts
    assert looped(part) == islands
    assert ("self-check passed" in part.check) == ("forward" not in islands)


class Hooked(nn.Module):
    """Changes a gradient, which no trace sees."""

    def forward(self, x: Tensor) -> Tensor:
        y = x * 2
        if y.requires_grad:
            y.register_hook(lambda grad: grad * 0.5)
        return y


class Item(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return x * x.mean().item()


class Deep(nn.Module):
    def __init__(self, leaf: type[nn.Module], depth: int) -> None:
        super().__init__()
        rows = [nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.LayerNorm(4), leaf())) for _ in range(depth)]
        self.rows = nn.ModuleList(rows)
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        for row in self.rows:
            x = x + row(x)
        return x


@pytest.mark.parametrize("leaf", [Square, Hooked, Item])
def test_depth_costs_no_traces(leaf: type[nn.Module], monkeypatch: pytest.MonkeyPatch) -> None:
    traces: list[nn.Module] = []
    whole = capture_member.capture

    def counted(module: nn.Module, *args: Any, **options: Any) -> Any:
        traces.append(module)
        return whole(module, *args, **options)

    monkeypatch.setattr(capture_member, "capture", counted)
    counts = []
    for depth in (2, 5):
        traces.clear()
        array = assert_alone([Deep(leaf, depth) for _ in range(2)], normal(3, 4))
        text = str(array.report())
        assert all(f"loop over members, rows.{k}.1.1: " in text for k in range(depth))
        counts.append(len(traces))
    assert counts[0] == counts[1]


class Masking(nn.Module):
    """Picks as many elements as a mask has, which no array can hold."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return h[h.abs() < 100].view(-1, 4)


class Scaling(Masking):
    """Scales by a number of the member's own."""

    def forward(self, x: Tensor) -> Tensor:
        h = self.fc(x)
        return h * h.mean().item()


class Parts(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.parts = nn.Linear(4, 4), nn.ModuleList([Masking(), Scaling()])

    def forward(self, x: Tensor) -> Tensor:
        return self.parts[0](self.first(x)) + self.parts[1](x)


@pytest.mark.parametrize(
    ("make", "looped"), [(Masking, ["forward"]), (Scaling, ["forward"]), (Parts, ["parts.0", "parts.1"])]
)
def test_unsupported_submodules_run_in_a_loop(make: Callable[[], nn.Module], looped: list[str]) -> None:
    array = assert_alone([make().double() for _ in range(3)], normal(5, 4), normal(3, 4))
    text = str(array.report())
    assert all(f"loop over members, {path}: " in text for path in looped)


class Checkpointed(nn.Module):
    """A normalization whose statistics move in forward and, when the checkpoint runs it again, in backward."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.norm = nn.Linear(4, 4, dtype=torch.float64), nn.BatchNorm1d(4, dtype=torch.float64)

    def forward(self, x: Tensor) -> Tensor:
        return checkpoint(lambda h: self.norm(h).sin(), self.fc(x), use_reentrant=False)  # type: ignore[no-any-return]


def test_writes_of_a_checkpoint_are_made_again_in_backward() -> None:
    models, x = [Checkpointed() for _ in range(3)], normal(5, 4)
    fused = hf.fuse(copy.deepcopy(models))
    for _ in range(2):
        fused(x).sum().backward()
        for model in models:
            model(x).sum().backward()
    assert "after backward of the graph differs from that of the code" in str(fused.report())
    for member, expected in zip(fused.unfuse(), models, strict=True):
        assert_close(dict(member.named_buffers()), dict(expected.named_buffers()))
    assert models[0].norm.num_batches_tracked == 4
