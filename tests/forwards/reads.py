"""Forwards that read numbers, texts and properties out of tensors: they decide in each call as they do alone."""

from __future__ import annotations

import torch
from torch import nn

import hfusion as hf
from tests.alone import call, normal
from tests.forwards.table import Sevenfold, Table, buffer, module

ROWS = Table()
row = ROWS


def total(x):
    return x.sum().item()


def special_values():
    x = torch.arange(12, dtype=torch.float64).view(3, 4).sin()
    return [x, -x - 1, x.masked_fill(x > 0.9, torch.nan), x * 3]


CONDITIONS = {
    "v != v": lambda x: (v := total(x)) != v,
    "text of a number": lambda x: str(total(x))[0] == "-",
    "key of a dict": lambda x: {0.0: True}.get(total(x) * 0, False),
    "integer": lambda x: int(x.nan_to_num().sum().item() * 10) % 2,
    "format of a tensor": lambda x: f"{x.sum()}"[0] == "-",
    "truth": lambda x: x.isnan().any().item() is True,
}
for name, condition in CONDITIONS.items():
    forward = lambda self, x, asks=condition: self.fc(x).nan_to_num() * (2 if asks(x) else 1)  # noqa: E731
    row(f"condition: {name}", forward, calls=special_values, loops="forward")
COMPUTED = {"compared": lambda y, n: y / 2 if n > 0 else y, "multiplied": lambda y, n: y * (2 * n - 1)}
for name, compute in COMPUTED.items():
    forward = lambda self, x, compute=compute: compute(y := self.fc(x), y.sum().item())  # noqa: E731
    row(f"number: {name}", forward, calls=lambda: [normal(3, 4), -normal(3, 4)], loops="forward", says="reads a number")
for name, zero in {"v * 0": lambda v: v * 0, "v - v": lambda v: v - v}.items():
    forward = lambda self, x, zero=zero: self.fc(x.nan_to_num()) + zero(total(x))  # noqa: E731
    row(f"number that is zero but for NaN: {name}", forward, calls=special_values, loops=None)
row(
    "line that reads",
    lambda self, x: self.fc(x) * total(x),
    loops="forward",
    says=rf"reads.py:{total.__code__.co_firstlineno + 1} reads a number",
)


@row(loops="forward")
def reads_that_are_not_used(self, x):
    h = self.fc(x)
    values = [h.mean().item(), h.abs().amax(0).tolist()]
    del values
    return h * 2 if torch.tensor(2.0).item() > 1 else h


# What an array can answer as a member does, and what it cannot.
@row(calls=lambda: [normal(3, 4)])
def questions_about_own_tensors(self, x):
    h = self.fc(x)
    h = h * 2 if x.is_leaf and x.grad_fn is None else h
    return h * 3 if h.is_inference() else h


@row()
def questions_about_memory(self, x):
    h = self.fc(x)
    h.add_(1.0)
    rows = h.view(-1, 2)
    return h * (2 if rows._is_view() and rows._base is h else 3) * (1 + h._version)


row("question about a buffer", lambda self, x: self.fc(x) * (2 if self.m.grad is None else 1), m=buffer())


@row()
def checks(self, x):
    torch._check_tensor_all(x < 100, lambda: "too large")
    torch._check(x.dim() == 2, lambda: "no matrix")
    return self.fc(x)


REFUSED = {
    "_version": lambda self, x: self.fc.weight._version,
    "grad": lambda self, x: self.fc.bias.grad is None,
    "is_leaf": lambda self, x: x.is_leaf,
    "grad_fn": lambda self, x: getattr(x, "grad_fn") is None,  # noqa: B009
}


def asking(ask, looped):
    def forward(self, x):
        h = self.fc(x) * (total(x) if looped else 1)
        return h * 2 if ask(self, x) else h

    return forward


for name, ask in REFUSED.items():
    for looped in (False, True):
        row(
            f"question that is refused: {name}{', in a loop' * looped}",
            asking(ask, looped),
            calls=lambda: [normal(3, 4).requires_grad_()],
            refused=rf"reads.py:\d+ reads {name} of a tensor of shape",
        )
row(
    "question about the input of a loop",
    lambda self, x: self.inner(self.fc(x).add_(1.0)),
    inner=module(lambda self, x: x * (1 + x._version) * (2 if total(x) > 0 else 1)),
    loops="forward",
)


def places():
    x = normal(5, 4)
    return [x[:3].clone(), x[2:], x[:3].clone()]


MEMORY = {"offset": lambda x: x.storage_offset() > 0, "storage": lambda x: x.untyped_storage().nbytes() > 100}
for name, ask in MEMORY.items():
    forward = lambda self, x, ask=ask: self.fc(x) * (2 if ask(x) else 1)  # noqa: E731
    row(f"memory of an input: {name}", forward, calls=places, grads=False, loops=None)


def strided(self, x):
    y = Sevenfold.apply(x)
    y = y * 2 if x.is_contiguous() else y
    return y * 3 if x.stride(0) == 1 else y


def as_they_lie():
    x, wide = normal(5, 4), normal(5, 8)
    both = torch.stack([x.mT, x.mT * 2]).mT
    each = [call(hf.stacked(both)), call(hf.stacked(both.contiguous()))]
    return [x, x.mT.contiguous().mT, wide[:, ::2], *each, x]


@row(inner=module(strided), wide=lambda: nn.Linear(5, 4), calls=as_they_lie, loops="forward")
def own_code_asks_how_inputs_lie(self, x):
    return self.inner(self.fc(x).mT).mT + self.inner(x) + self.inner(self.wide(x.mT).mT).sum()


def formatted(self, x):
    h = self.conv(x)
    return h * 2 if h.is_contiguous(memory_format=torch.channels_last) else h


def convolution(memory_format):
    made = module(formatted, conv=lambda: nn.Conv2d(2, 3, 3))
    return lambda: made().to(memory_format=memory_format)


def two_formats():
    x = normal(2, 2, 5, 5)
    return [x, x.to(memory_format=torch.channels_last), x]


row(
    "memory format of a parameter",
    make=convolution(torch.channels_last),
    calls=two_formats,
    refused=r"reads is_contiguous .*\.to\(memory_format=torch.contiguous_format\)",
)
row("memory format", make=convolution(torch.contiguous_format), calls=two_formats)

# The class of an input or a parameter.
CLASSES = {
    "isinstance": lambda x: isinstance(x, nn.Parameter),
    "type": lambda x: type(x) is torch.Tensor,
    "__class__": lambda x: x.__class__ is nn.Parameter,
}


def then_a_parameter():
    x = normal(3, 4)
    return [x, nn.Parameter(x)]


for name, ask in CLASSES.items():
    forward = lambda self, x, ask=ask: self.fc(x) * (2 if ask(x) else 1)  # noqa: E731
    calls = lambda: [(x := normal(3, 4)), nn.Parameter(x).view_as(x)]  # noqa: E731
    row(f"class of an input: {name}", forward, calls=calls, loops="forward" if name == "type" else "")
    row(f"class of a parameter as input: {name}", forward, calls=then_a_parameter, refused="input 0 is an nn.Parameter")
row("parameter as input", lambda self, x: self.fc(x).tanh(), calls=then_a_parameter)
for name, ask in {"type": lambda w: type(w) is nn.Parameter, "__class__": CLASSES["__class__"]}.items():
    forward = lambda self, x, ask=ask: self.fc(x) * (2 if ask(self.fc.weight) else 1)  # noqa: E731
    row(f"exact class of a weight: {name}", forward, refused=r"ask isinstance\(parameter, nn\.Parameter\)")
row("class of a weight", lambda self, x: self.fc(x) * (2 if isinstance(self.fc.weight, nn.Parameter) else 1))


def tracing(self, x):
    """Compute with torch's report of whether an export is running, as transformers does."""
    is_traced = torch.compiler.is_compiling()
    is_traced |= isinstance(x, nn.Parameter)
    if not is_traced and bool((x > 1e9).all()):
        return x
    return self.fc(x) * (2 if is_traced & True else 2.0) * (1 + (is_traced ^ is_traced))


row("whether an export is running", tracing)
