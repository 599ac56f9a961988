"""Values that forward keeps to save work are no state; what changes later results is, and is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from tests.alone import assert_alone, net, normal

Forward = Callable[..., Any]

SEQUENCES = (normal(3, 5, 4), normal(3, 7, 4), normal(3, 4, 4))


def pair(forward: Forward, state: Any) -> list[Any]:
    make = net(forward)
    models = [make(), make()]
    for model in models:
        model.state = state() if callable(state) else state
    return models


def rows(n: int) -> Tensor:
    return torch.arange(n, dtype=torch.float64).cos()[:, None]


def table_that_grows(self: Any, x: Tensor) -> Tensor:
    n = x.shape[1]
    if self.state is None or self.state.shape[0] < n:
        self.state = rows(n)
    return self.fc(x) * self.state[:n]


def table_of_a_size(self: Any, x: Tensor) -> Tensor:
    if self.state is None or self.state[0] != tuple(x.shape):
        self.state = (tuple(x.shape), rows(x.shape[1]).expand(x.shape))
    return self.fc(x) * self.state[1]


def table_per_size(self: Any, x: Tensor) -> Tensor:
    n = x.shape[1]
    if n not in self.state:
        self.state[n] = rows(n)
    return self.fc(x) * self.state[n]


class Tables(dict[int, Tensor]):
    pass


class Slotted:
    __slots__ = ("table",)


def table_in_a_slot(self: Any, x: Tensor) -> Tensor:
    n = x.shape[1]
    if len(getattr(self.state, "table", ())) < n:
        self.state.table = rows(n)
    return self.fc(x) * self.state.table[:n]


def flag(self: Any, x: Tensor) -> Tensor:
    self.state = True
    return self.fc(x)


GLOBAL: dict[int, Tensor] = {}


def global_table(self: Any, x: Tensor) -> Tensor:
    n = x.shape[1]
    if n not in GLOBAL:
        GLOBAL[n] = rows(n)
    return self.fc(x) * GLOBAL[n]


@functools.cache
def cached(n: int) -> Tensor:
    return rows(n)


def looped_table(self: Any, x: Tensor) -> Tensor:
    y = table_that_grows(self, x)
    return y * 2 if y.sum() > 0 else y


KEPT: dict[str, tuple[Forward, Any]] = {
    "table that grows": (table_that_grows, None),
    "table given with the model": (table_that_grows, rows(6)),
    "table of a size": (table_of_a_size, None),
    "table per size": (table_per_size, dict),
    "table per size in a dict of its class": (table_per_size, Tables),
    "table in a slot": (table_in_a_slot, Slotted),
    "flag": (flag, False),
    "global table": (global_table, None),
    "lru_cache": (lambda self, x: self.fc(x) * cached(x.shape[1]), None),
    "table in a loop": (looped_table, None),
}


@pytest.mark.parametrize("name", KEPT)
def test_caches_are_not_state(name: str) -> None:
    models = pair(*KEPT[name])
    before = [model.state for model in models]
    assert_alone(models, *SEQUENCES)
    assert all(model.state is state for model, state in zip(models, before, strict=True))
    assert all(type(table) is Tensor for table in (*GLOBAL.values(), cached(5)))


class Biases(nn.Module):
    """Keeps what follows from a parameter in eval mode only, and drops it for training, as LeViT."""

    def __init__(self) -> None:
        super().__init__()
        self.bias = nn.Parameter(normal(4))
        self.kept: dict[str, Tensor] = {}

    def train(self, mode: bool = True) -> Biases:
        self.kept = {}
        return super().train(mode)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            return x * self.bias.sin()
        if "cpu" not in self.kept:
            self.kept["cpu"] = self.bias.sin()
        return x * self.kept["cpu"]


@pytest.mark.parametrize("training", [True, False])
def test_values_that_train_drops_are_not_state(training: bool) -> None:
    models = [Biases().train(training) for _ in range(2)]
    with torch.set_grad_enabled(training):
        assert_alone(models, normal(3, 4), normal(2, 4), grads=training)


class Holder:
    def put(self, value: Tensor) -> Holder:
        self.value = torch.distributions.Normal(value, 1.0, validate_args=False)
        return self


def last_output(self: Any, x: Tensor) -> Tensor:
    self.state = self.fc(x).softmax(-1)
    return self.state @ self.fc.weight


def distribution(self: Any, x: Tensor) -> Tensor:
    return self.state.put(self.fc(x)).value.log_prob(x)


@pytest.mark.parametrize(("forward", "state"), [(last_output, None), (distribution, Holder)])
@pytest.mark.parametrize("warm", [False, True])
def test_results_left_in_attributes_are_reported(forward: Forward, state: Any, warm: bool) -> None:
    models = pair(forward, state)
    x = normal(3, 4)
    expected = torch.stack([member(x) for member in models]).detach()
    for model in models:
        model.state = state() if callable(state) else state
        if warm:
            model(normal(3, 4))
    fused = hf.fuse(models)
    with pytest.warns(UserWarning, match="leaves results in the attribute state"):
        torch.testing.assert_close(fused(x), expected, rtol=1e-9, atol=1e-12)


def longest(self: Any, x: Tensor) -> Tensor:
    self.state = max(self.state or 0, x.shape[1])
    return self.fc(x) * self.state


def old_weight(self: Any, x: Tensor) -> Tensor:
    if self.state is None:
        self.state = self.fc.weight.detach().norm()
    return self.fc(x) / self.state


def old_graph(self: Any, x: Tensor) -> Tensor:
    if self.state is None:
        self.state = self.fc.weight.norm()
    return self.fc(x) / self.state


def moving(self: Any, x: Tensor) -> Tensor:
    h = self.fc(x)
    self.state = h.detach() if self.state is None else 0.9 * self.state + 0.1 * h.detach().mean()
    return h + self.state.mean()


def rarely(self: Any, x: Tensor) -> Tensor:
    h = self.fc(x)
    y = h * 2 if self.state is not None and self.state.mean() > 100 else h
    self.state = h.detach()
    return y


def rarely_a_number(self: Any, x: Tensor) -> Tensor:
    h = self.fc(x)
    y = h * 2 if self.state is not None and self.state["last"] > 100 else h
    self.state = {"last": x.abs().max().item()}
    return y


def first_batch(self: Any, x: Tensor) -> Tensor:
    if self.state is None:
        self.state = x.mean()
    return self.fc(x) - self.state


def counter(self: Any, x: Tensor) -> Tensor:
    self.state = (self.state or 0) + 1
    return self.fc(x)


def weight_on_first_call(self: Any, x: Tensor) -> Tensor:
    if self.state is None:
        with torch.no_grad():
            self.fc.bias.sub_(self.fc(x).mean((0, 1)))
        self.state = True
    return self.fc(x)


def buffer(self: Any, x: Tensor) -> Tensor:
    if not hasattr(self, "table"):
        self.register_buffer("table", rows(1), persistent=False)
    return self.fc(x) * self.table


REFUSED: dict[str, tuple[Forward, str]] = {
    "longest so far": (longest, "attribute state.* another call"),
    "value of a parameter": (old_weight, "attribute state.* another call"),
    "graph of a parameter": (old_graph, "attribute state.* second time"),
    "moving average": (moving, "attribute state.* another call"),
    "last result that is read": (rarely, "attribute state.* the next call"),
    "last number that is read": (rarely_a_number, "attribute state.* the next call"),
    "first batch": (first_batch, "attribute state.* another call"),
    "counter that nothing reads": (counter, "attribute state at every call"),
    "weights set by the first batch": (weight_on_first_call, "attribute state.* another call"),
    "buffer": (buffer, "registers the tensor table"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_state_is_refused(name: str) -> None:
    forward, message = REFUSED[name]
    models = pair(forward, None)
    with pytest.raises(hf.FusionError, match=message):
        hf.fuse(models)(SEQUENCES[0])
    assert all(model.state is None for model in models)


COUNT = 0


def count(self: Any, x: Tensor) -> Tensor:
    global COUNT
    COUNT += 1
    return self.fc(x) * COUNT


def test_state_outside_of_members_runs_their_code() -> None:
    """Each call of each member counts, and nothing else does."""
    models = pair(count, None)
    x = normal(3, 4)
    fused = hf.fuse(models)
    for step in range(2):
        actual = fused(x)
        assert 2 * step + 2 == COUNT
        expected = [model.fc(x) * (2 * step + k) for k, model in enumerate(models, 1)]
        torch.testing.assert_close(actual, torch.stack(expected))


class MaskedEncoder(nn.TransformerEncoder):
    """While gradients are off torch takes another way, in which what is masked gives zeros."""

    def __init__(self) -> None:
        super().__init__(nn.TransformerEncoderLayer(4, 2, 8, batch_first=True), 1)

    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x, src_key_padding_mask=torch.arange(x.shape[1]).expand(x.shape[:2]) > 2)


ASKING: dict[str, Callable[[], nn.Module]] = {
    "the mode": net(lambda self, x: self.fc(x) * (2 if torch.is_grad_enabled() else 3)),
    "a value": net(lambda self, x: self.fc(x) * (2 if self.fc(x).requires_grad else 3)),
    "within a model": lambda: nn.Sequential(nn.Linear(4, 4), MaskedEncoder(), nn.Linear(4, 4)),
}


@pytest.mark.parametrize("off", [torch.no_grad, torch.inference_mode])
@pytest.mark.parametrize("name", ASKING)
def test_a_forward_that_asks_for_gradients_gives_what_it_gives_alone(
    name: str, off: Callable[[], AbstractContextManager[None]]
) -> None:
    models = [ASKING[name]().double().eval() for _ in range(2)]
    array, (x, *_) = hf.fuse(models), SEQUENCES
    for mode in (nullcontext, off, nullcontext):
        with mode():
            for model, y in zip(models, array(x), strict=True):
                torch.testing.assert_close(y, model(x), rtol=1e-9, atol=1e-12)
    if name == "within a model":
        assert "loop over members, 1: in forward output 0 differs while gradients are off" in str(array.report())
