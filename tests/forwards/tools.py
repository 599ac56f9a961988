"""Forwards with tensors that are held twice, and with backward in backward."""

from __future__ import annotations

import functools
from collections import namedtuple

import torch
from torch import fx, nn
from torch.utils.checkpoint import checkpoint

from tests.alone import normal
from tests.forwards.table import MEMBERS, Table, branch, buffer, linear, module, stacked

ROWS = Table(calls=stacked())
row = ROWS

# Registered tensors that a module that cannot be captured holds a second time, in plain attributes.
Gains = namedtuple("Gains", ["gain", "power"])
Slotted = type("Slotted", (), {"__slots__": ("gain",)})
Holder = type("Holder", (), {})


def in_object(kind):
    def make(self):
        holder = kind()
        holder.gain = self.g
        return holder

    return make


def optimizer(self):
    return torch.optim.lr_scheduler.StepLR(torch.optim.Adam(self.parameters(), lr=1e-3), 1)


def own(self):
    return self.g


HELD = {
    "optimizer that is read": (optimizer, lambda self: self.held.optimizer.param_groups[0]["params"][0]),
    "nested": (lambda self: {"a": [self.n, {"g": self.g}]}, lambda self: self.held["a"][1]["g"] + self.held["a"][0]),
    "namedtuple": (lambda self: Gains(self.g, 2), lambda self: self.held.gain**self.held.power),
    "list in a tuple": (lambda self: ([self.g],), lambda self: self.held[0][0]),
    "set that is not read": (lambda self: {self.g}, own),
    "set": (lambda self: {self.g}, lambda self: next(iter(self.held))),
    "partial": (lambda self: functools.partial(torch.add, self.g), lambda self: self.held(1)),
    "slots": (in_object(Slotted), lambda self: self.held.gain),
    # As torchvision's feature extractors, which keep graphs for both modes.
    "graph": (lambda self: fx.Tracer().trace(nn.Sequential(self.fc)), own),
    # As torchrl's actors, which hold a part of their modules in a second container.
    "container": (lambda self: nn.Sequential(self.fc, nn.Tanh()), lambda self: self.held(self.g)),
}


class Holding(nn.Module):
    """Multiplies by what ``gain`` reads; a branch on values keeps it out of a graph."""

    def __init__(self, make, gain):
        super().__init__()
        self.gain = gain
        self.fc, self.g, self.n = nn.Linear(4, 4).double(), nn.Parameter(normal(4)), buffer()()
        vars(self)["held"] = make(self)

    def forward(self, x):
        self.n.add_(x.detach().mean(0))
        return self.fc(branch(x)) * self.gain(self)


# A submodule that runs alone can have the array's tensors in their registered places only.
ALONE = ("set that is not read", "graph", "container")
for name, (make, gain) in HELD.items():
    whole, part = ("forward", "inner") if name in ALONE else (MEMBERS, MEMBERS)
    row(f"held twice: {name}", make=lambda make=make, gain=gain: Holding(make, gain), loops=whole)
    inner = lambda make=make, gain=gain: Holding(make, gain)  # noqa: E731
    row(f"held twice in a part: {name}", lambda self, x: self.fc(self.inner(x)), inner=inner, loops=part)


def over(tensor):
    return lambda x: x * tensor


FUNCTIONS = {"default": lambda self: lambda x, gain=self.g: x * gain, "closure": lambda self: over(self.g)}
for name, make in FUNCTIONS.items():
    holding = lambda make=make: Holding(make, lambda self: self.held(1.0))  # noqa: E731
    row(f"held by a function: {name}", make=holding, refused="held is a function that holds [gn] in a closure or a def")


# Custom functions whose backward calls backward, as reentrant checkpoints do.
class Rerun(torch.autograd.Function):
    """A reentrant checkpoint that does not refuse torch.autograd.grad, as reversible layers and older packages have."""

    @staticmethod
    def forward(ctx, run, x):
        ctx.run = run
        ctx.save_for_backward(x)
        with torch.no_grad():
            return run(x)

    @staticmethod
    def backward(ctx, *grads):
        x = ctx.saved_tensors[0].detach().requires_grad_()
        with torch.enable_grad():
            output = ctx.run(x)
        torch.autograd.backward(output, *grads)
        return None, x.grad


def reentrant(run, x):
    return checkpoint(run, x, use_reentrant=True)


def chosen(self, x):
    """Compute a layer, and one that only some members use."""
    layer = self.fc if float(self.other.bias[0].detach()) > 0 else self.other
    return layer(self.fc(x).tanh())


def block(run=reentrant):
    return module(lambda self, x: run(lambda h: chosen(self, h), x), fc=linear, other=linear)


NESTED = {
    "a part": lambda self, x: self.fc(self.first(self.fc(x)).relu()),
    "a part in another": lambda self, x: self.fc(
        reentrant(lambda h: reentrant(self.first, self.second(h)), self.fc(x))
    ),
    "the whole": lambda self, x: self.fc(reentrant(self.first, self.fc(x))),
}
for name, forward in NESTED.items():
    warning = "None of the inputs have requires_grad"
    row(f"backward in backward: {name}", forward, first=block(), second=block(), loops=None, ignores=warning)
row(
    "backward in backward: no refusal", NESTED["a part"], first=block(lambda run, x: Rerun.apply(run, x)), loops="first"
)
