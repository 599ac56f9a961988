"""Forwards that steer autograd: functions and hooks of their own, regions without gradients, derivatives inside."""

from __future__ import annotations

import random

import torch
import torch.nn.functional as F
from torch import nn
from torch.autograd import grad
from torch.func import functional_call, jvp, vmap
from torch.utils.checkpoint import checkpoint

import hfusion as hf
from tests.alone import call, normal
from tests.forwards.table import Sevenfold, Table, branch, linear, module, parameter, square

OPAQUE = "forward"
ROWS = Table()
row = ROWS


@torch.library.custom_op("hfusion_tests::sevenfold", mutates_args=())
def sevenfold(x: torch.Tensor) -> torch.Tensor:
    return x * x


sevenfold.register_fake(torch.empty_like)
sevenfold.register_autograd(lambda ctx, grad: grad * 7)

# What no graph holds.
row("custom Function", lambda self, x: Sevenfold.apply(self.fc(x)), loops=OPAQUE)
row("custom operator", lambda self, x: sevenfold(self.fc(x)), loops=OPAQUE)
row("custom Function in a submodule", lambda self, x: self.fc(self.inner(self.fc(x))), inner=square, loops="inner")


@row(loops=OPAQUE)
def tensor_hook(self, x):
    h = self.fc(x)
    if h.requires_grad:
        h.register_hook(lambda grad: grad * 3)
    return h.sin()


@row(loops=OPAQUE)
def hooks_of_saved_tensors(self, x):
    with torch.autograd.graph.saved_tensors_hooks(lambda t: t * 2, lambda t: t):
        return self.fc(x).sin()


@row(loops=OPAQUE)
def seed(self, x):
    with torch.random.fork_rng():
        torch.manual_seed(3)
        return self.fc(x) * torch.rand(4, dtype=x.dtype)


@row()
def backward(self, x):
    w = torch.ones(4, dtype=x.dtype, requires_grad=True)
    (x * w).sin().sum().backward()
    return self.fc(x) * w.grad


@row(loops=OPAQUE)
def exceptions(self, x):
    try:
        torch.linalg.cholesky(self.fc.weight)
        return self.fc(x)
    except RuntimeError:
        return self.fc(x).sin()


row("numpy", lambda self, x: self.fc(x) * float(self.fc.weight.detach().numpy().sum()), loops=OPAQUE)
row("Python random", lambda self, x: self.fc(x) * (1 if random.random() < 2 else 0), loops=OPAQUE)
row("jvp", lambda self, x: jvp(lambda z: self.fc(z).sin(), (x,), (torch.ones_like(x),))[1], loops=OPAQUE)
row("vmap", lambda self, x: vmap(lambda z: z * z.sum().tanh())(self.fc(x)), loops=OPAQUE)


def weights(self):
    return {"weight": self.fc.weight}


def at(self, x):
    """Return what the layer computes, as a function of its weight."""
    return lambda values: functional_call(self.fc, values, (x,))


@row("grad of functional_call", loops=OPAQUE)
def adapted(self, x):
    """Compute with a weight that one step of gradient descent has adapted."""
    gradient = torch.func.grad(lambda values: at(self, x)(values).square().mean())(weights(self))
    return at(self, x)({"weight": self.fc.weight - 0.1 * gradient["weight"]})


@row(loops=OPAQUE)
def transform_beside_a_write(self, x):
    F.relu_(self.fc(x))
    return vmap(lambda z: z * z.sum().tanh())(x)


# Regions without gradients: what they compute has no history, what they give back as it was keeps its own.
@row()
def no_grad_region(self, x):
    h = self.fc(x)
    with torch.no_grad():
        k = h * 2 + self.fc.weight.sum()
    return h * k


@row(loops=OPAQUE)
def write_in_no_grad(self, x):
    h = self.fc(x)
    with torch.no_grad():
        h.mul_(2)
    return h


@row(loops=OPAQUE)
def write_to_detached(self, x):
    h = self.fc(x) * 1
    h.detach().mul_(2)
    return h * h


@row(loops=OPAQUE)
def write_to_data(self, x):
    h = self.fc(x)
    h.data.mul_(2)
    return h


@row()
def enable_grad_in_no_grad(self, x):
    h = self.fc(x)
    with torch.no_grad():
        k = h.contiguous()
        with torch.enable_grad():
            again = k * h * self.fc.weight.sum()
            with torch.no_grad():
                last = F.dropout(again, 0.0)
        return h * again, last, again


HANDED_BACK = {
    "dropout of nothing": lambda h: F.dropout(h, 0.0),
    "dropout in place of nothing": lambda h: F.dropout(h, 0.0, inplace=True),
    "to": lambda h: h.to(torch.float64),
    "contiguous": lambda h: h.contiguous(),
    "conj": lambda h: h.conj(),
    "several": lambda h: F.dropout(h.contiguous().to(torch.float64), 0.0),
}


def returning(change):
    """Use what a region gives, what it was given, and something that is computed of it inside."""

    def forward(self, x):
        h = self.fc(x).tanh()
        with torch.no_grad():
            k = change(h)
            far = k * 2 + h
        return k, h * 3, k * far, far

    return forward


for name, change in HANDED_BACK.items():
    row(f"no_grad gives back: {name}", returning(change))


def inputs_with_gradients():
    return normal(4, 4).requires_grad_(), normal(4, 4)


@row(calls=inputs_with_gradients)
def no_grad_gives_back_an_input(self, x):
    with torch.set_grad_enabled(False):
        return F.dropout(F.dropout(x, 0.0, inplace=True), 0.0), self.fc.weight.contiguous()


def computed_again(self, x):
    with torch.enable_grad():
        return Sevenfold.apply(x * self.w), Sevenfold.apply(x * self.w)


GIVEN = {
    "its input": lambda self, x: (x.contiguous(), Sevenfold.apply(x * self.w)),
    "its parameter": lambda self, x: (self.w, Sevenfold.apply(x * self.w)),
    "what has gradients again": computed_again,
}


def looped_in_no_grad(self, x):
    h = self.fc(x)
    with torch.no_grad():
        k, far = self.inner(h)
    return k, h * k, far


for name, gives in GIVEN.items():
    loops = "inner" if name == "what it computes" else "forward"
    row(f"no_grad around a loop: {name}", looped_in_no_grad, inner=module(gives, w=parameter()), loops=loops)


# Values that are read as data.
row("straight through", lambda self, x: (h := self.fc(x)) + (h.round() - h).data)


# Derivatives that forward takes by torch.autograd.grad, in graphs where that is possible.
def mlp(activation=nn.Tanh, norm=False):
    layers = [nn.Linear(2, 6), *([nn.LayerNorm(6)] if norm else []), activation(), nn.Linear(6, 6), activation()]
    return lambda: nn.Sequential(*layers, nn.Linear(6, 1))


def points(*counts):
    return lambda: [torch.rand(count, 2, dtype=torch.float64) for count in counts or (5, 3)]


POINTS = points()


class Derived(nn.Module):
    """Gives ``derived(self, x)`` for an input with gradients."""

    def __init__(self, derived, activation=nn.Tanh, norm=False):
        super().__init__()
        self.derived, self.net, self.scale = derived, mlp(activation, norm)(), nn.Parameter(torch.rand(()))
        self.double()

    def forward(self, x):
        with torch.enable_grad():
            return self.derived(self, x.detach().requires_grad_())


def derivative(name="", activation=nn.Tanh, norm=False, **fields):
    """Add a row whose forward takes a derivative."""

    def add(derived):
        text = name or derived.__name__.replace("_", " ")
        make = lambda: Derived(derived, activation, norm)  # noqa: E731
        row(f"derivative: {text}", make=make, **{"calls": POINTS, **fields})
        return derived

    return add


@derivative()
@derivative("residual, gelu", activation=nn.GELU)
def residual(self, x):
    (first,) = grad(self.net(x).sum(), x, create_graph=True)
    (second,) = grad(first[:, 0].sum(), x, create_graph=True)
    return first[:, 1] - self.scale * second[:, 0]


@derivative()
def several_inputs(self, x):
    position, time = x[:, :1], x[:, 1:]
    u = self.net(torch.cat([position, time], 1))
    along, later = grad(u, [position, time], torch.ones_like(u), create_graph=True)
    return later + u * along


@derivative(calls=points(3, 5, 1))
@derivative("forces in evaluation", training=(False,), loops=None)
@derivative("forces, layer norm", norm=True)
def forces(self, x):
    energy = self.net(x).square().sum()
    return energy, -grad(energy, x, create_graph=self.training)[0]


@derivative()
def penalty(self, x):
    y = self.net(x)
    (gradient,) = grad(y, x, torch.ones_like(y), create_graph=True, retain_graph=True)
    return y + self.scale * (gradient.norm(dim=1, keepdim=True) - 1).square()


@derivative()
def of_parameters(self, x):
    gradients = grad(self.net(x).square().mean(), list(self.net.parameters()), create_graph=True)
    return torch.stack([gradient.square().sum() for gradient in gradients]) * self.scale


@derivative()
def unused_input(self, x):
    x_grad, missing = grad(self.net(x).sum(), [x, x * 2], create_graph=True, allow_unused=True)
    assert missing is None
    return x_grad


@derivative()
def partly_without_gradients(self, x):
    with torch.no_grad():
        weight = self.net(x).sigmoid()
    return grad((weight * self.net(x) * x.detach()).sum(), x, create_graph=True)[0]


@derivative()
def of_a_derivative(self, x):
    (first,) = grad(self.net(x).sum(), x, create_graph=True)
    (again,) = grad(self.net(first).sum(), first, create_graph=True)
    return first + again


@derivative(loops=OPAQUE, says="differs from that of the code", grads=False)
def cdist(self, x):
    return grad(torch.cdist(x, x + 1).sum() + self.net(x).sum(), x, create_graph=True)[0]


@derivative(loops=OPAQUE, says="draws random numbers")
def drawn(self, x):
    return grad((F.dropout(x, 1.0) * self.net(x)).sum(), x, create_graph=True)[0]


# The same where forward runs as the members' own code, with and without gradients around it.
def adapted_once(self, x):
    with torch.enable_grad():
        loss = self.fc(branch(x)).square().mean()
        (gradient,) = grad(loss, self.fc.weight, create_graph=self.training)
    return F.linear(x, self.fc.weight - 0.1 * gradient)


def forces_of_the_input(self, x):
    with torch.enable_grad():
        return grad(self.fc(branch(x)).square().sum(), x, create_graph=self.training)[0] * 2


for inner in (adapted_once, forces_of_the_input):
    text = inner.__name__.replace("_", " ")
    row(text, inner, calls=lambda: [normal(3, 4).requires_grad_()], training=(True, False), loops=OPAQUE)
    row(f"{text}, without gradients", lambda self, x, inner=inner: _without(inner, self, x), loops=None, grads=False)
row(
    "adapted once in a part",
    lambda self, x: self.out(self.inner(self.out(x))),
    inner=module(adapted_once, fc=linear),
    out=linear,
    loops=None,
)


def _without(inner, self, x):
    with torch.no_grad():
        return inner(self, x.requires_grad_() if x.is_leaf else x)


# Checkpoints, whose backward runs forward again.
def again(function, x, **options):
    return checkpoint(function, x, **{"use_reentrant": False, **options})


row("checkpoint", lambda self, x: again(lambda h: self.fc(h).sin(), x))


# What asks whether gradients are on.
row("asks for gradients", lambda self, x: self.fc(x) * (2 if torch.is_grad_enabled() else 3), loops=OPAQUE)
row("asks a value for gradients", lambda self, x: self.fc(x) * (2 if self.fc(x).requires_grad else 3), loops=OPAQUE)


# Complex numbers.


@row(loops=OPAQUE)
def complex_parts(self, x):
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


row("complex", lambda self, x: torch.fft.rfft(self.fc(x)).abs())
row("lifted constant", lambda self, x: self.fc(x) * torch.tensor([1.0, 2.0, 3.0, 4.0]))
row("input and parameter given back", lambda self, x: (x, self.fc.weight, self.fc(x)))
row("mixed results", lambda self, x: {"a": self.fc(x), "none": None, "n": 3, "t": (x.shape[0], "s")})
row("no result", lambda self, x: None)
row(
    "stacked and shared in a nest",
    lambda self, d: self.fc(d["x"][0]) + d["x"][1],
    calls=lambda: [call({"x": [normal(4, 4), normal(4, 4)]}), call({"x": [normal(4, 4), hf.stacked(normal(2, 4, 4))]})],
)

# Refused.
row(
    "writes into an input with a gradient",
    lambda self, x: self.fc(x.mul_(2)),
    calls=lambda: [normal(3, 4).requires_grad_() * 1],
    refused="writes into an input that needs a gradient",
)


def accumulating(self, x):
    with torch.enable_grad():
        self.fc(branch(x)).square().mean().backward()
    return self.fc(x)


row("accumulates a gradient", accumulating, refused=r"leaves a gradient in fc.weight.grad")


@row("switches a flag off and on", refused="switches requires_grad of a parameter")
def switching(self, x):
    self.fc.requires_grad_(False)
    y = self.fc(x)
    self.fc.requires_grad_(True)
    return y


@row("freezes", refused="requires_grad of fc.weight from True to False")
def freezes(self, x):
    self.fc.weight.requires_grad_(False)
    return self.fc(x)


row(
    "sparse result with a gradient",
    lambda self, x: self.fc(x).to_sparse(),
    refused=r"layout torch.sparse_coo that needs a gradient.*to_dense",
)
