"""Each row is a forward that hfusion reproduces exactly, in a graph or in a loop over members."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import hfusion as hf
from tests.alone import Call, assert_alone, call, looped, net, normal


class Sevenfold(torch.autograd.Function):
    """A square whose backward is not its derivative, so that a lost backward shows."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.save_for_backward(x)
        return x * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0] * 7


def no_grad_region(self: Any, x: Tensor) -> Tensor:
    h = self.fc(x)
    with torch.no_grad():
        k = h * 2 + self.fc.weight.sum()
    return h * k


def write_in_no_grad(self: Any, x: Tensor) -> Tensor:
    h = self.fc(x)
    with torch.no_grad():
        h.mul_(2)
    return h


def write_to_detached(self: Any, x: Tensor) -> Tensor:
    h = self.fc(x) * 1
    h.detach().mul_(2)
    return h * h


def write_to_data(self: Any, x: Tensor) -> Tensor:
    h = self.fc(x)
    h.data.mul_(2)
    return h


def grad_in_no_grad(self: Any, x: Tensor) -> Tensor:
    with torch.no_grad():
        h = self.fc(x)
        with torch.enable_grad():
            return h * self.fc.weight.sum()


def gradient_inside(self: Any, x: Tensor) -> Tensor:
    x = x.detach().requires_grad_(True)
    (grad,) = torch.autograd.grad(self.fc(x).sin().sum(), x, create_graph=True)
    return grad


def in_place_chain(self: Any, x: Tensor) -> Tensor:
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


def two_calls_of_sizes(self: Any, x: Tensor) -> Tensor:
    return self.fc(x) * (2.0 if x.shape[0] > 3 else -1.0) + x.shape[0]


def divisible(self: Any, x: Tensor) -> Tensor:
    h = self.fc(x)
    return h.view(-1, 2, 4) if x.shape[0] % 2 == 0 else h.unsqueeze(1)


def per_sample_gradients(self: Any, x: Tensor) -> Tensor:
    return torch.func.vmap(torch.func.grad(lambda row: self.fc(row).sin().sum()))(x)


class Ruled(torch.autograd.Function):
    """As `Sevenfold`, in the form that torch.func knows."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x

    @staticmethod
    def setup_context(ctx: Any, inputs: Any, output: Any) -> None:
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * ctx.saved_tensors[0] * 7


bound_before = Sevenfold.apply


@torch.library.custom_op("hfusion_tests::sevenfold", mutates_args=())
def sevenfold(x: Tensor) -> Tensor:
    return x * x


sevenfold.register_fake(torch.empty_like)
sevenfold.register_autograd(lambda ctx, grad: grad * 7)


def hooked(self: Any, x: Tensor) -> Tensor:
    h = self.fc(x)
    if h.requires_grad:
        h.register_hook(lambda grad: grad * 3)
    return h.sin()


def hooked_node(self: Any, x: Tensor) -> Tensor:
    h = self.fc(x)
    if h.grad_fn is not None:
        h.grad_fn.register_prehook(lambda grads: tuple(3 * grad for grad in grads))
    return h.sin()


def saved_otherwise(self: Any, x: Tensor) -> Tensor:
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return self.fc(x).sin()


def seeded(self: Any, x: Tensor) -> Tensor:
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return self.fc(x) * torch.rand(4, dtype=x.dtype)


def own_generator(self: Any, x: Tensor) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    return self.fc(x) * torch.rand(4, generator=generator, dtype=x.dtype)


def numpy_round_trip(self: Any, x: Tensor) -> Tensor:
    return self.fc(x) * float(self.fc.weight.detach().numpy().sum())


def backward_inside(self: Any, x: Tensor) -> Tensor:
    w = torch.ones(4, dtype=x.dtype, requires_grad=True)
    (x * w).sin().sum().backward()
    return self.fc(x) * w.grad


def forward_mode(self: Any, x: Tensor) -> Tensor:
    return torch.func.jvp(lambda z: self.fc(z).sin(), (x,), (torch.ones_like(x),))[1]


def course_by_exception(self: Any, x: Tensor) -> Tensor:
    try:
        torch.linalg.cholesky(self.fc.weight)
        return self.fc(x)
    except RuntimeError:
        return self.fc(x).sin()


def weights(self: Any) -> dict[str, Tensor]:
    return {"weight": self.fc.weight}


def at(self: Any, x: Tensor) -> Callable[[dict[str, Tensor]], Tensor]:
    """Return what the layer computes, as a function of its weight."""
    return lambda values: torch.func.functional_call(self.fc, values, (x,))


def adapted(self: Any, x: Tensor) -> Tensor:
    """Compute with a weight that one step of gradient descent has adapted."""
    gradient = torch.func.grad(lambda values: at(self, x)(values).square().mean())(weights(self))
    return at(self, x)({"weight": self.fc.weight - 0.1 * gradient["weight"]})


def complex_slices(self: Any, x: Tensor) -> Tensor:
    h = torch.fft.rfft(self.fc(x))
    out = torch.zeros(x.shape[0], 3, dtype=torch.cdouble)
    out[:, :2] = h[:, :2] * (1 + 2j)
    out[0] = h[0]
    return torch.fft.irfft(out, n=4)


def complex_parts(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    z = torch.complex(self.fc(x), x)
    z.real.mul_(2)
    z.imag[:, 0] = 3
    z.mH.mul_(2j)
    z.conj().imag.add_(self.fc(x))
    torch.view_as_real(z)[..., 1].mul_(x)
    pairs = torch.stack([self.fc(x), x], -1)
    turned = torch.view_as_complex(pairs)
    turned *= 1j
    return torch.view_as_real(z), pairs


FORWARDS: dict[str, Callable[..., Any]] = {
    "custom Function": lambda self, x: Sevenfold.apply(self.fc(x)),
    "custom Function with a vmap rule": lambda self, x: Ruled.apply(self.fc(x)),
    "custom Function below vmap": lambda self, x: torch.func.vmap(Ruled.apply)(self.fc(x)),
    "custom Function, bound before": lambda self, x: bound_before(self.fc(x)),
    "custom operator": lambda self, x: sevenfold(self.fc(x)),
    "tensor hook": hooked,
    "hook of a node": hooked_node,
    "hooks of saved tensors": saved_otherwise,
    "seed": seeded,
    "own generator": own_generator,
    "numpy": numpy_round_trip,
    "backward": backward_inside,
    "forward mode": forward_mode,
    "exceptions": course_by_exception,
    "complex slices": complex_slices,
    "complex parts": complex_parts,
    "no_grad region": no_grad_region,
    "write in no_grad": write_in_no_grad,
    "write to detached": write_to_detached,
    "write to data": write_to_data,
    "enable_grad in no_grad": grad_in_no_grad,
    "autograd.grad": gradient_inside,
    "torch.func": per_sample_gradients,
    "grad of functional_call": adapted,
    "jvp of functional_call": lambda self, x: torch.func.jvp(at(self, x), (weights(self),), (weights(self),))[1],
    "jacrev of functional_call": lambda self, x: torch.func.jacrev(at(self, x))(weights(self))["weight"],
    "vmap of functional_call": lambda self, x: torch.vmap(at(self, x))({k: w[None] for k, w in weights(self).items()}),
    "vjp of functional_call": lambda self, x: torch.func.vjp(at(self, x), weights(self))[0],
    "vmap": lambda self, x: torch.vmap(lambda row: row * row.sum().tanh())(self.fc(x)),
    "in-place chain": in_place_chain,
    "size guard": two_calls_of_sizes,
    "divisibility": divisible,
    "checkpoint": lambda self, x: checkpoint(lambda h: self.fc(h).sin(), x, use_reentrant=False),
    "reentrant checkpoint": lambda self, x: checkpoint(lambda h: self.fc(h).sin(), self.fc(x), use_reentrant=True),
    "Python random": lambda self, x: self.fc(x) * (1 if random.random() < 2 else 0),
    "numpy random": lambda self, x: self.fc(x) * (1 if np.random.rand() < 2 else 0),
    "lifted constant": lambda self, x: self.fc(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]),
    "sort and topk": lambda self, x: (self.fc(x).sort(1)[0], self.fc(x).topk(2)[0], self.fc(x).argsort(1)),
    "complex": lambda self, x: torch.fft.rfft(self.fc(x)).abs(),
    "linalg": lambda self, x: torch.linalg.solve(self.fc.weight, self.fc(x).T),
    "input and parameter out": lambda self, x: (x, self.fc.weight, self.fc(x)),
    "mixed outputs": lambda self, x: {"a": self.fc(x), "none": None, "n": 3, "t": (x.shape[0], "s")},
    "no output": lambda self, x: None,
}


@pytest.mark.parametrize("name", FORWARDS)
def test_forward_is_honoured(name: str) -> None:
    make = net(FORWARDS[name])
    assert_alone([make() for _ in range(3)], normal(4, 4), normal(5, 4), normal(4, 4).T)


class Transformed(nn.Module):
    """A transform beside a write whose result is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.fc, self.act = nn.Linear(4, 4, dtype=torch.float64), nn.ReLU(inplace=True)

    def forward(self, x: Tensor) -> Tensor:
        self.act(self.fc(x))
        return torch.vmap(lambda row: row * row.sum().tanh())(x)


def test_a_write_into_an_input_with_a_gradient_is_refused() -> None:
    make = net(lambda self, x: self.fc(x.mul_(2)))
    with pytest.raises(hf.FusionError, match="writes into an input that needs a gradient"):
        hf.fuse([make(), make()])(normal(3, 4).requires_grad_() * 1)


def straight_through(self: Any, x: Tensor) -> Tensor:
    h = self.fc(x)
    return h + (h.round() - h).data


@pytest.mark.parametrize(
    "forward",
    [
        straight_through,
        lambda self, x: self.fc(x) * self.fc.weight.data.norm(),
        lambda self, x: self.fc(x) + self.state_dict()["fc.bias"].sum(),
    ],
)
def test_values_read_as_data_are_captured(forward: Callable[..., Any]) -> None:
    make = net(forward)
    fused = assert_alone([make(), make()], normal(3, 4), normal(3, 4))
    assert not any(map(looped, fused.report().parts))


def test_transforms_are_honoured_unchecked() -> None:
    models, x = [Transformed()], normal(4, 4)
    assert torch.equal(hf.fuse(models, verify=False)(x), models[0](x)[None])
    assert torch._C._functorch.peek_interpreter_stack() is None


def after_use(self: Any, x: Tensor) -> Tensor:
    y = self.fc(x) * self.m
    self.m = self.m * 0.9 + y.detach().mean(0) * 0.1
    return y + self.m


def old_and_new(self: Any, x: Tensor) -> tuple[Tensor, ...]:
    old = self.m
    self.m = self.m + 1
    return self.fc(x) * self.m, old


def crosswise(self: Any, x: Tensor) -> Tensor:
    self.m, self.k = self.k * 1.0, self.m[:] * 1.0
    return self.fc(x) * self.m


def of_a_view(self: Any, x: Tensor) -> Tensor:
    self.m = self.k[:]
    self.k = self.k + 1
    return self.fc(x) * self.m + self.k


def in_place_and_anew(self: Any, x: Tensor) -> Tensor:
    self.m.add_(1)
    y = self.fc(x) * self.m
    self.m = self.m * 2
    self.m[:2].add_(1)
    return y * self.m


BUFFERS = {f.__name__: f for f in (after_use, old_and_new, crosswise, of_a_view, in_place_and_anew)}


def buffers(module: nn.Module) -> None:
    module.register_buffer("m", torch.ones(4).double())
    module.register_buffer("k", torch.arange(4.0).double())


@pytest.mark.parametrize("name", BUFFERS)
def test_reassigned_buffers(name: str) -> None:
    make = net(BUFFERS[name], buffers)
    assert_alone([make() for _ in range(2)], normal(4, 4), normal(5, 4))


def alias(self: Any, x: Tensor) -> Tensor:
    self.m = self.k
    return self.fc(x) * self.m


def grow(self: Any, x: Tensor) -> Tensor:
    self.m = torch.cat([self.m, self.m])
    return self.fc(x) * self.m[:4]


def narrow(self: Any, x: Tensor) -> Tensor:
    self.m = self.m.float()
    return self.fc(x) * self.m


def take_away(self: Any, x: Tensor) -> Tensor:
    self.m = None
    return self.fc(x)


@pytest.mark.parametrize(
    ("forward", "message"),
    [(alias, "m and k share memory"), (grow, "shape of m"), (narrow, "dtype of m"), (take_away, "takes away .* m")],
)
def test_buffers_that_no_stack_can_follow(forward: Callable[..., Any], message: str) -> None:
    with pytest.raises(hf.FusionError, match=message):
        hf.fuse([net(forward, buffers)()])(normal(4, 4))


class Packed(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.rnn = nn.LSTM(4, 3, batch_first=True)

    def forward(self, x: Tensor, lengths: Tensor) -> tuple[Tensor, ...]:
        packed = pack_padded_sequence(x, lengths, batch_first=True, enforce_sorted=False)
        y, (h, _) = self.rnn(packed)
        return *pad_packed_sequence(y, batch_first=True), h


def test_packed_sequences() -> None:
    models = [Packed().double() for _ in range(2)]
    batches = [call(normal(3, 5, 4), torch.tensor(lengths)) for lengths in ([5, 3, 2], [1, 5, 4])]
    assert_alone(models, *batches)


@pytest.mark.parametrize("make", [nn.Embedding, nn.EmbeddingBag])
def test_sparse_gradients_are_dense_in_an_array(make: Callable[..., nn.Module]) -> None:
    models = [make(6, 4, sparse=True) for _ in range(2)]
    ids = torch.tensor([[1, 2, 2], [0, 1, 5]])
    fused = hf.fuse(models)
    fused(ids).sin().sum().backward()
    for row, model in zip(fused.weight.grad, models, strict=True):
        model(ids).sin().sum().backward()
        torch.testing.assert_close(row, model.weight.grad.to_dense())


def test_custom_function_in_a_submodule_is_the_only_loop() -> None:
    class Square(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return Sevenfold.apply(x)

    models = [nn.Sequential(nn.Linear(4, 4), Square(), nn.Linear(4, 4)).double() for _ in range(3)]
    (part,) = assert_alone(models, normal(5, 4)).report().parts
    assert [row.operator for row in part.rows if row.lowering.loops] == ["hfusion.opaque.default"]


CALLS: dict[str, tuple[Callable[..., Any], list[Call]]] = {
    "keywords in any order": (
        lambda self, x, y: self.fc(x) - y,
        [call(y=normal(4, 4), x=normal(4, 4)), call(x=normal(4, 4), y=normal(4, 4))],
    ),
    "defaults": (
        lambda self, x, y=None, flag=True, k=2: self.fc(x) * k if flag else self.fc(x),
        [call(normal(4, 4)), call(normal(4, 4), flag=False), call(normal(4, 4), None, True, 5)],
    ),
    "nests": (
        lambda self, d: self.fc(d["x"][0]) + d["x"][1],
        [call({"x": [normal(4, 4), normal(4, 4)]}), call({"x": [normal(4, 4), hf.stacked(normal(3, 4, 4))]})],
    ),
    "sizes that differ": (
        lambda self, x, y: self.fc(x).sum(0) + self.fc(y).sum(0),
        [
            call(normal(4, 4), normal(4, 4)),
            call(normal(4, 4), normal(5, 4)),
            call(normal(6, 4), normal(5, 4)),
        ],
    ),
    "batches of 1, 5, 1, 0": (
        lambda self, x: self.fc(x),
        [call(normal(n, 4)) for n in (1, 5, 1, 0, 2)],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_calls(name: str) -> None:
    forward, calls = CALLS[name]
    make = net(forward)
    assert_alone([make() for _ in range(3)], *calls)


def count(self: Any, x: Tensor) -> Tensor:
    self.state += 1
    return self.fc(x) * float(np.asarray(self.state).sum())


def append(self: Any, x: Tensor) -> Tensor:
    self.state.append(1)
    return self.fc(x) * len(self.state)


def write_input(self: Any, x: Tensor) -> Tensor:
    x.mul_(2)
    return self.fc(x)


def freeze(self: Any, x: Tensor) -> Tensor:
    self.fc.weight.requires_grad_(False)
    return self.fc(x)


REFUSED: dict[str, tuple[Callable[..., Any], Callable[[], Any], str]] = {
    "counter": (count, lambda: 0, "Python attribute state"),
    "numpy counter": (count, lambda: np.zeros(1), "Python attribute state"),
    "list": (append, list, "Python attribute state"),
    "iterator": (lambda self, x: self.fc(x) * next(self.state), lambda: iter(range(9)), "Python attribute state"),
    "own random": (
        lambda self, x: self.fc(x) * self.state.random(),
        lambda: random.Random(0),
        "attribute state",
    ),
    "own numpy random": (
        lambda self, x: self.fc(x) * self.state.random(),
        lambda: np.random.default_rng(0),
        "Python attribute state",
    ),
    "write to the input": (write_input, lambda: None, "writes into its input"),
    "frozen parameter": (freeze, lambda: None, "requires_grad of fc.weight from True to False"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_forward_is_refused(name: str) -> None:
    forward, state, message = REFUSED[name]
    make = net(forward, lambda module: setattr(module, "state", state()))
    x = normal(4, 4)
    before = x.clone()
    with pytest.raises(hf.FusionError, match=message):
        hf.fuse([make() for _ in range(2)])(x)
    assert torch.equal(x, before)


def test_export_marks_stay_off_the_users_tensors() -> None:
    x = normal(4, 4)
    hf.fuse([net(lambda self, x: Sevenfold.apply(self.fc(x)))()])(x)
    assert not [name for name in vars(x) if "dynamo" in name]


def test_autocast_regions() -> None:
    def forward(self: Any, x: Tensor) -> Tensor:
        with torch.autocast("cpu", dtype=torch.bfloat16):
            h = F.relu(self.fc(x))
        return h.float() + self.fc(x)

    make = net(forward)
    models = [make().float() for _ in range(3)]
    x = torch.randn(5, 4)
    fused = hf.fuse(models)
    assert torch.allclose(fused(x), torch.stack([model(x) for model in models]), rtol=1e-5, atol=1e-6)
    assert not torch.is_autocast_enabled("cpu")
    with torch.autocast("cpu", dtype=torch.bfloat16):
        assert hf.fuse([nn.Linear(4, 4)])(x).dtype is torch.bfloat16
