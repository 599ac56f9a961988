"""A parameter that a member has not used in a step stays as it is for that member, with its moments and counts."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.gradient_usage import absent_rows

MEMBERS = 3


class Branch(nn.Module):
    """Uses ``a``, ``b`` or neither, by the sign of a value."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(4, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        key = float(x.detach()[0, 0])
        if key > 1:
            return self.a(x)
        return self.b(x) if key > 0 else x


class Alone(Branch):
    """All of it is looped, and a part that no member uses."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(4, 4)


class Inside(nn.Module):
    """Looped within what is batched, twice, with a parameter that is used before and after."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.last = nn.Linear(4, 4), Branch(), nn.Linear(4, 4)
        self.scale = nn.Parameter(torch.ones(4))

    def forward(self, x: Tensor) -> Tensor:
        h = self.branch(x) + self.first(x).tanh()
        return self.last(self.branch(h * self.scale) * self.scale)


class Exit(nn.Module):
    """Gives its input, or a constant that does not depend on it."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(4))

    def forward(self, h: Tensor, x: Tensor) -> Tensor:
        return h * self.weight if float(x[0, 0]) > 0 else torch.ones_like(h)


class Before(nn.Module):
    """Layers before an exit are unused too, batched or looped, except for the part that bypasses the exit."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.branch, self.around = nn.Linear(4, 4), Branch(), nn.Linear(4, 4)
        self.conv = nn.Conv1d(4, 4, 1)
        self.exit, self.last = Exit(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        h = self.branch(self.first(x)).relu()
        h = self.conv(h.unsqueeze(-1)).squeeze(-1)
        return self.last(self.exit(h + self.around(x).detach(), x)) + self.around(x)


class Two(nn.Module):
    """Two results, of which a loss may use one."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.exit, self.aux = nn.Linear(4, 4), Exit(), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        h = self.first(x)
        return self.exit(h, x), self.aux(h)


class After(nn.Module):
    """A looped layer before an exit, which gets no gradient from some members."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.exit = Looped(), Exit()
        self.last = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.exit(self.first(x), x))


class Looped(nn.Linear):
    def __init__(self) -> None:
        super().__init__(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) * (2 if float(x.detach().sum()) > -100 else 1)


def batch(*keys: float) -> Tensor:
    """One input for each member, whose first value decides on its branch."""
    xs = torch.rand(len(keys), 5, 4, dtype=torch.float64) / 2
    xs[:, 0, 0] = torch.tensor(keys, dtype=torch.float64)
    return xs


OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"momentum": 0.9, "dampening": 0.1, "weight_decay": 0.1}),
    "adam": ("Adam", {"amsgrad": True, "weight_decay": 0.1}),
}
RATES = [0.1, 0.05, 0.02]
# Every step, the values on which the members branch.
KEYS = [(2.0, 0.5, -1.0), (2.0, 2.0, 2.0), (0.5, -1.0, -1.0), (-1.0, 0.5, 2.0), (0.5, 2.0, 0.5)]


@cache
def array_of(make: Callable[[], nn.Module]) -> tuple[list[nn.Module], hf.FusedModule, dict[str, Tensor]]:
    """Models and their array, which is captured once, with the values that it has at first."""
    models = [make().double() for _ in range(MEMBERS)]
    fused = hf.fuse(models)
    return models, fused, {key: value.clone() for key, value in fused.state_dict().items()}


class Pair:
    """An array with its optimizer, and its members alone with theirs."""

    def __init__(self, make: Callable[[], nn.Module], name: str, options: dict[str, Any]) -> None:
        models, self.fused, values = array_of(make)
        self.models = copy.deepcopy(models)
        self.fused.load_state_dict(values)
        self.fused.zero_grad()
        self.name, self.options = name, options
        self.optimizer = getattr(hf.optim, name)(self.fused.parameters(), lr=RATES, **options)
        self.alone = [
            getattr(torch.optim, name)(model.parameters(), lr=rate, **options)
            for model, rate in zip(self.models, RATES, strict=True)
        ]

    def zero(self, set_to_none: bool = True) -> None:
        for optimizer in (self.optimizer, *self.alone):
            optimizer.zero_grad(set_to_none=set_to_none)

    def backward(self, xs: Tensor, take: Callable[[Any], Tensor], **keywords: Any) -> None:
        outputs = take(self.fused(hf.stacked(xs)))
        (outputs**2).flatten(1).mean(1).sum().backward(**keywords)
        for model, x in zip(self.models, xs, strict=True):
            outputs = take(model(x))
            if outputs.requires_grad:
                (outputs**2).mean().backward(**keywords)

    def step(self) -> None:
        for optimizer in (self.optimizer, *self.alone):
            optimizer.step()

    def check(self) -> None:
        """Gradients that are none alone, parameters and state."""
        states = [optimizer.state for optimizer in self.alone]
        for key, param in self.fused.named_parameters():
            parameters = [model.get_parameter(key) for model in self.models]
            none = [p.grad is None for p in parameters]
            rows = None if param.grad is None else absent_rows(param.grad)
            absent = [param.grad is None] * MEMBERS if rows is None else rows.tolist()
            assert absent == none, (key, absent, none)
            close(param, parameters, key)
            for member, state in enumerate(states):
                fused_state = self.optimizer.state.get(param, {})
                for kind, value in state.get(parameters[member], {}).items():
                    if isinstance(value, Tensor):
                        close(fused_state[kind][member : member + 1], [value], f"{kind} of {key}")
        for member, saved in enumerate(self.optimizer.unfuse()):
            alone = self.alone[member].state_dict()["state"]
            begun = {k for k, entry in alone.items() if any(isinstance(v, Tensor) for v in entry.values())}
            assert set(saved["state"]) == begun


def close(stack: Tensor, rows: Sequence[Tensor], label: str) -> None:
    expected = torch.stack([row.detach() for row in rows]).to(stack.dtype)
    torch.testing.assert_close(stack.detach(), expected, rtol=1e-9, atol=1e-11, msg=lambda m: f"{label}: {m}")


def whole(outputs: Any) -> Tensor:
    return outputs if isinstance(outputs, Tensor) else torch.cat(list(outputs), -1)


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("make", [Alone, Inside])
def test_equals_alone(make: Callable[[], nn.Module], name: str, options: dict[str, Any]) -> None:
    pair = Pair(make, name, options)
    for keys in KEYS:
        pair.zero()
        pair.backward(batch(*keys), whole)
        pair.check()
        pair.step()
        pair.check()


MODELS: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor]]] = {
    "before": (Before, whole),
    "both results": (Two, whole),
    "after a loop": (After, whole),
}


@pytest.mark.parametrize(("make", "take"), MODELS.values(), ids=MODELS)
def test_of_other_models(make: Callable[[], nn.Module], take: Callable[[Any], Tensor]) -> None:
    pair = Pair(make, "AdamW", {})
    for keys in KEYS:
        pair.zero()
        pair.backward(batch(*keys), take)
        pair.step()
        pair.check()


def test_clipping_counts_what_is_there() -> None:
    for order in (2.0, float("inf"), -float("inf"), 0.5, 0.0):
        pair = Pair(Alone, "SGD", {})
        pair.backward(batch(2.0, 0.5, -1.0), whole)
        norms = hf.optim.clip_grad_norm_(pair.fused.parameters(), 0.1, norm_type=order)
        alone = [torch.nn.utils.clip_grad_norm_(m.parameters(), 0.1, norm_type=order) for m in pair.models]
        # Member 2 has no gradient at all.
        torch.testing.assert_close(norms[:2], torch.stack(alone[:2]))
        pair.step()
        pair.check()


def test_a_planned_array_loops_where_a_part_does_what_its_capture_did_not() -> None:
    """The first member, which is captured, gives a new tensor; the last one gives back its input."""
    models, *_ = array_of(Inside)
    fused = hf.fuse(copy.deepcopy(models))
    fused.planned_for(torch.device("cpu"))
    for keys in KEYS:
        xs = batch(*keys)
        expected = [model(x) for model, x in zip(models, xs, strict=True)]
        close(fused(hf.stacked(xs)), expected, "outputs")
