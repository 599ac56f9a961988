"""Random lives of populations beside torch runs of each member: ``python -m tests.population.walk --walks 200``.

A walk steps, stops, starts, copies, compacts, grows, evaluates, saves, loads and changes learning rates at random;
after every step losses, weights, buffers, ages and rates of each member are those of torch.optim alone.
"""

from __future__ import annotations

import argparse
import copy
import math
import random
import re
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

import hfusion as hf

DOUBLE = torch.float64
# Measured over 200 walks of 40 acts: 2.1e-14, by centered RMSprop, which takes a square from another one.
BOUND = 1e-12
Make = Callable[[Any], Any]


def normed() -> nn.Module:
    """With statistics; no bias before them, whose gradient is noise that Adam makes large."""
    return nn.Sequential(nn.Linear(5, 6, bias=False), nn.BatchNorm1d(6), nn.LeakyReLU(0.1), nn.Linear(6, 3)).double()


class Tied(nn.Module):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.last = nn.Linear(5, 5), nn.Linear(5, 5), nn.Linear(5, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.second(self.first(x).tanh()).tanh())


class Convolved(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.last = nn.Conv1d(1, 3, 3, bias=False), nn.GroupNorm(1, 3), nn.Linear(9, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.norm(self.conv(x[:, None])).sigmoid().flatten(1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.cells, self.last = nn.GRU(1, 4, batch_first=True), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.cells(x[:, :, None])[0][:, -1])


BASE = nn.Linear(5, 5).double().requires_grad_(False)

MODELS: dict[str, Callable[[], nn.Module]] = {
    "normed": normed,
    "tied": lambda: Tied().double(),
    "convolved": lambda: Convolved().double(),
    "recurrent": lambda: Recurrent().double(),
    "on a frozen base": lambda: nn.Sequential(BASE, nn.GELU(), nn.Linear(5, 3)).double(),
}

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adamw": ("AdamW", {"weight_decay": 0.1}),
    "amsgrad": ("Adam", {"amsgrad": True, "betas": (0.8, 0.9)}),
    "nadam": ("NAdam", {"momentum_decay": 0.01}),
    "radam": ("RAdam", {}),
    "rmsprop": ("RMSprop", {"centered": True, "momentum": 0.5, "eps": 1e-3}),
    "adagrad": ("Adagrad", {"lr_decay": 0.1}),
    "adadelta": ("Adadelta", {"rho": 0.8}),
    "adamax": ("Adamax", {}),
}

SCHEDULES: dict[str, Make] = {
    "warm-up": lambda o: schedules.LinearLR(o, 0.2, total_iters=5),
    "steps": lambda o: schedules.StepLR(o, 3, 0.5),
    "restarts": lambda o: schedules.CosineAnnealingWarmRestarts(o, 4),
    "one cycle": lambda o: schedules.OneCycleLR(o, 0.05, total_steps=4000, cycle_momentum=False),
    "plateau": lambda o: schedules.ReduceLROnPlateau(o, factor=0.5, patience=1),
    "two": lambda o: schedules.SequentialLR(
        o, [schedules.LinearLR(o, 0.5, total_iters=2), schedules.ExponentialLR(o, 0.95)], [3]
    ),
    "function": lambda o: schedules.LambdaLR(o, lambda epoch: 1 / (1 + 0.1 * epoch)),
}


@dataclass
class Options:
    """The settings of a walk, fixed from start to end."""

    model: str
    optimizer: str
    scheduled: bool
    scaled: bool
    accumulate: tuple[int, ...]
    """The numbers of calls per update from which each member's initial value is drawn."""
    clip_norm: bool
    clip_value: bool
    mode: Any
    compile: bool
    one_limit: bool = False
    """If true, all members start with the same limits, and members that join are given none."""

    @staticmethod
    def drawn(draw: random.Random, compile: bool, model: str | None) -> Options:
        scaled = draw.random() < 0.3
        return Options(
            model or draw.choice(list(MODELS)),
            draw.choice(list(OPTIMIZERS)),
            draw.random() < 0.6,
            scaled,
            draw.choice([(1,), (1,), (2,), (1, 2, 4)]),
            draw.random() < 0.4,
            draw.random() < 0.3,
            draw.choice(["freeze", "ignore"]) if scaled else draw.choice(["freeze", "freeze", "raise", "ignore"]),
            compile,
            draw.random() < 0.4,
        )


@dataclass
class Alone:
    """Reference for one member: the same model trained alone with torch."""

    model: nn.Module
    options: Options
    lr: float
    make: Make | None
    norm: float = math.inf
    value: float = math.inf
    accumulate: int = 1
    age: int = 0
    calls: int = 0
    """Number of calls made so far in the present update."""
    before: list[Tensor] = field(default_factory=list)
    """The buffers at the start of the present update."""

    def __post_init__(self) -> None:
        kind, more = OPTIMIZERS[self.options.optimizer]
        self.trained = [p for p in self.model.parameters() if p.requires_grad]
        self.opt = getattr(torch.optim, kind)(self.trained, lr=self.lr, **more)
        self.scheduler = None if self.make is None else self.make(self.opt)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=64.0, growth_interval=3) if self.options.scaled else None

    def twin(self) -> Alone:
        twin = copy.copy(self)
        twin.model = own_copy(self.model)
        twin.__post_init__()
        for twin_param, param in zip(twin.trained, self.trained, strict=True):
            twin_param.grad = None if param.grad is None else param.grad.clone()
        twin.opt.load_state_dict(copy.deepcopy(self.opt.state_dict()))
        for twin_param, param in zip(twin.trained, self.trained, strict=True):
            # Torch makes NAdam's product float64 when it loads it.
            twin.opt.state[twin_param] = copy.deepcopy(self.opt.state.get(param, {}))
        if twin.scheduler is not None and self.scheduler is not None:
            twin.scheduler.load_state_dict(copy.deepcopy(self.scheduler.state_dict()))
        if twin.scaler is not None and self.scaler is not None and self.age:
            twin.scaler.load_state_dict(self.scaler.state_dict())
        return twin

    def call(self, x: Tensor, y: Tensor) -> tuple[Tensor, bool]:
        """The loss of a call, and whether it was the last one of an update."""
        if self.calls == 0:
            self.opt.zero_grad()
            self.before = [buffer.clone() for buffer in self.model.buffers()]
        loss = F.cross_entropy(self.model(x), y)
        (loss / self.accumulate if self.scaler is None else self.scaler.scale(loss / self.accumulate)).backward()
        self.calls += 1
        if self.calls == self.accumulate:
            self.update()
        return loss.detach(), self.calls == 0

    def update(self) -> None:
        if self.scaler is not None:
            self.scaler.unscale_(self.opt)
        if self.value < math.inf:
            nn.utils.clip_grad_value_(self.trained, self.value)
        nn.utils.clip_grad_norm_(self.trained, self.norm)
        if self.scaler is None:
            self.opt.step()
        else:
            self.scaler.step(self.opt)
            self.scaler.update()
        self.age += 1
        self.calls = 0

    def forget_calls(self) -> None:
        """Begin the update from scratch."""
        with torch.no_grad():
            for buffer, before in zip(self.model.buffers(), self.before if self.calls else [], strict=False):
                buffer.copy_(before)
        self.calls = 0


def own_copy(model: nn.Module) -> nn.Module:
    frozen = {id(p): p for p in model.parameters() if not p.requires_grad}
    return copy.deepcopy(model, frozen)


class Walk:
    """A population and its members alone, by name."""

    def __init__(self, seed: int, compile: bool, model: str | None = None) -> None:
        self.draw = random.Random(seed)
        torch.manual_seed(seed)
        self.options = Options.drawn(self.draw, compile, model)
        self.alone: dict[str, Alone] = {}
        self.frozen: set[str] = set()
        self.names = 0
        self.worst = 0.0
        self.acts: list[str] = []
        members = [self.member() for _ in range(self.draw.choice([1, 2, 3, 5, 9]))]
        tags = [self.name() for _ in members]
        self.alone = dict(zip(tags, members, strict=True))
        models = [own_copy(member.model) for member in members]
        self.pop = hf.Population(models, **self.given(tags), tags=tags)
        self.set_rates(range(len(members)))

    def name(self) -> str:
        self.names += 1
        return f"{self.draw.choice(['ä', 'a/b', '..', 'x' * 300, '[red]'])} {self.names}"

    def member(self) -> Alone:
        options, draw = self.options, self.draw
        return Alone(
            MODELS[options.model](),
            options,
            draw.choice([0.001, 0.01, 0.03]),
            draw.choice(list(SCHEDULES.values())) if options.scheduled else None,
            draw.choice([0.1] if options.one_limit else [0.1, 1.0]) if options.clip_norm else math.inf,
            draw.choice([0.01] if options.one_limit else [0.01, 0.1]) if options.clip_value else math.inf,
            draw.choice(options.accumulate),
        )

    def given(self, rows: Sequence[str | None]) -> dict[str, Any]:
        """The options of a population of these members."""
        options = self.options
        kind, more = OPTIMIZERS[options.optimizer]
        any_one = next(iter(self.alone.values()))
        members = [any_one if tag is None else self.alone[tag] for tag in rows]
        return {
            "optimizer": lambda params: getattr(hf.optim, kind)(params, lr=0.01, **more),
            "loss": F.cross_entropy,
            "scheduler": [member.make for member in members] if options.scheduled else None,
            "scaler": hf.optim.GradScaler(init_scale=64.0, growth_interval=3) if options.scaled else None,
            "clip_norm": self.limits([member.norm for member in members]) if options.clip_norm else None,
            "clip_value": self.limits([member.value for member in members]) if options.clip_value else None,
            "accumulate": [member.accumulate for member in members],
            "on_nonfinite": options.mode,
            "compile": options.compile,
        }

    def limits(self, values: list[float]) -> float | list[float]:
        return values[0] if self.options.one_limit else values

    def set_rates(self, rows: Sequence[int]) -> None:
        """Set a learning rate for each member before the first step; its schedule restarts from that rate."""
        for row in rows:
            self.pop.hparams["lr"][row] = self.alone[self.tag(row)].lr
        if self.pop.scheduler is not None:
            self.pop.scheduler.restart(list(rows))

    def tag(self, row: int) -> str:
        tag = self.pop.tags[row]
        assert tag is not None
        return tag

    @property
    def live(self) -> list[int]:
        return [row for row, tag in enumerate(self.pop.tags) if tag is not None]

    @property
    def free(self) -> list[int]:
        return [row for row, tag in enumerate(self.pop.tags) if tag is None]

    def run(self, count: int) -> None:
        acts: list[Callable[[], object]] = [
            self.step, self.step, self.step, self.step_some, self.step_some, self.stop, self.start, self.start,
            self.copy, self.compact, self.grow, self.hparams, self.evaluate, self.reload, self.deepcopy, self.poison,
        ]  # fmt: skip
        for _ in range(count):
            act = self.draw.choice(acts)
            self.acts.append(act.__name__)
            act()
            assert set(self.alone) == {tag for tag in self.pop.tags if tag is not None}
            assert {self.tag(row) for row in self.pop.frozen} == self.frozen
        self.step()

    def batch(self, rows: int) -> tuple[Tensor, Tensor, list[tuple[Tensor, Tensor]]]:
        """Of all members, or of each: as the population takes it, and row by row."""
        size = self.draw.choice([4, 4, 7])
        if self.draw.random() < 0.6:
            x, y = torch.randn(size, 5, dtype=DOUBLE), torch.randint(3, (size,))
            return x, y, [(x, y)] * rows
        xs, ys = torch.randn(rows, size, 5, dtype=DOUBLE), torch.randint(3, (rows, size))
        return hf.stacked(xs), hf.stacked(ys), list(zip(xs, ys, strict=True))

    def step(self) -> None:
        self.step_rows(None)

    def step_some(self) -> None:
        """Of any of the members, in any order; the others keep every bit."""
        if self.live:
            self.step_rows(self.draw.sample(self.live, self.draw.randint(1, len(self.live))))

    def step_rows(self, chosen: list[int] | None, sick: str | None = None) -> None:
        """Step some rows. ``sick``: the member that is about to freeze."""
        rows = list(range(len(self.pop))) if chosen is None else chosen
        x, y, batches = self.batch(len(rows))
        others = [row for row in range(len(self.pop)) if row not in rows]
        # State is made at a first step, for all members.
        stepped = list(self.pop.optimizer.state)
        before = [tensor[others].clone() for tensor in self.tensors(stepped)]
        losses = self.pop.step(x, y, rows=chosen)
        for current, previous in zip(self.tensors(stepped), before, strict=True):
            assert torch.equal(current[others].nan_to_num(7.0), previous.nan_to_num(7.0))
        assert bool(losses[others].isnan().all())
        metrics, updated = torch.zeros(len(self.pop)), []
        for row, batch in zip(rows, batches, strict=True):
            tag = self.pop.tags[row]
            if tag is None:
                assert bool(losses[row].isnan())
            elif tag not in self.frozen and tag != sick:
                expected, ended = self.alone[tag].call(*batch)
                self.close(losses[row], expected)
                metrics[row] = float(expected)
                updated += [row] * ended
        if self.pop.scheduler is not None and updated:
            self.pop.scheduler.step(metrics=metrics, rows=updated)
            for row in updated:
                scheduler = self.alone[self.tag(row)].scheduler
                plateau = isinstance(scheduler, schedules.ReduceLROnPlateau)
                scheduler.step(*[float(metrics[row])] if plateau else [])  # type: ignore[union-attr]
        if sick is None:
            self.check()

    def tensors(self, stepped: Sequence[Tensor]) -> list[Tensor]:
        """Return the per-member tensors, with the moments and step counts of parameters that were ``stepped``."""
        fused, state = self.pop.fused, self.pop.optimizer.state
        shared = fused._array.comparison.shared
        stacked = [tensor for name, tensor in fused.stacks.items() if name not in shared]
        return stacked + [value for param in stepped for value in state[param].values()]

    def check(self) -> None:
        rates = self.pop.hparams["lr"].tolist()
        for row in self.live:
            member, model = self.alone[self.tag(row)], self.pop.models[row]
            assert model is not None
            assert self.pop.ages[row] == member.age, (self.pop.ages, member.age)
            self.close(*(torch.tensor(rate, dtype=DOUBLE) for rate in (rates[row], member.opt.param_groups[0]["lr"])))
            for actual, expected in zip(model.state_dict().values(), member.model.state_dict().values(), strict=True):
                self.close(actual, expected)

    def close(self, actual: Tensor, expected: Tensor) -> None:
        gap = ((actual.detach() - expected.detach()).abs() / (1 + expected.detach().abs())).max()
        self.worst = max(self.worst, 0.0 if math.isnan(gap) else float(gap))
        torch.testing.assert_close(actual.detach(), expected.detach(), rtol=BOUND, atol=BOUND, equal_nan=True)

    def stop(self) -> None:
        rows = self.draw.sample(self.live, self.draw.randint(0, max(0, min(3, len(self.live) - 1))))
        models = self.pop.stop(rows)
        stopped = [tag for tag in self.alone if tag not in self.pop.tags]
        assert len(stopped) == len(rows)
        by_weights = [self.alone.pop(tag) for tag in stopped]
        for model in models:
            assert any(_alike(model, member.model) for member in by_weights)
        self.frozen -= set(stopped)

    def start(self) -> None:
        member, tag = self.member(), self.name()
        more: dict[str, Any] = {"lr": member.lr, "accumulate": member.accumulate}
        if self.options.scheduled:
            more["scheduler"] = member.make
        for name in ("norm", "value"):
            if getattr(self.options, f"clip_{name}") and not self.options.one_limit:
                more[f"clip_{name}"] = getattr(member, name)
        row = self.draw.choice([None, *self.free])
        self.pop.start(row, own_copy(member.model), tag=tag, **more)
        self.alone[tag] = member

    def copy(self) -> None:
        healthy = [row for row in self.live if self.tag(row) not in self.frozen]
        if not healthy:
            return
        count = self.draw.randint(1, min(3, len(self.pop)))
        dst = self.draw.sample(range(len(self.pop)), count)
        src = [self.draw.choice(healthy) for _ in dst]
        names = [self.tag(row) for row in src]
        twins = [self.alone[name].twin() for name in names]
        self.pop.copy(src[0] if len(src) == 1 else src, dst[0] if len(dst) == 1 else dst)
        for row, origin, name, twin in zip(dst, src, names, twins, strict=True):
            self.alone[self.tag(row)] = twin
            if row != origin:
                self.frozen.discard(self.tag(row))
                assert self.pop.lineage[-1].source in names, name

    def compact(self) -> None:
        self.pop.compact()

    def grow(self) -> None:
        if len(self.pop) < 16:
            before = len(self.pop)
            self.pop.grow(self.draw.randint(1, 3))
            assert len(self.pop) > before

    def hparams(self) -> None:
        for row in self.draw.sample(self.live, self.draw.randint(0, len(self.live))):
            factor = self.draw.choice([0.5, 1.2])
            self.pop.hparams["lr"][row] *= factor
            self.alone[self.tag(row)].opt.param_groups[0]["lr"] *= factor

    def evaluate(self) -> None:
        """Of batches of unlike sizes."""
        batches = [(torch.randn(n, 5, dtype=DOUBLE), torch.randint(3, (n,))) for n in (4, 4, 1)]
        metrics = self.pop.evaluate(F.cross_entropy, batches)
        x, y = (torch.cat([batch[index] for batch in batches]) for index in range(2))
        for row, tag in enumerate(self.pop.tags):
            if tag is None:
                assert math.isnan(metrics[row])
            elif tag not in self.frozen:
                model = self.alone[tag].model.eval()
                self.close(metrics[row], F.cross_entropy(model(x), y))
                model.train()

    def reload(self) -> None:
        """All, or some in another order; of one folder, or of two."""
        if not self.live:
            return
        with tempfile.TemporaryDirectory() as folder:
            self.pop.save(folder)
            tags = [tag for tag in self.pop.tags if tag is not None]
            if self.draw.random() < 0.5:
                rows: list[str | None] = self.pop.tags
                names = None
            else:
                names = self.draw.sample(tags, self.draw.randint(1, len(tags)))
                rows = list(names)
            self.pop = hf.Population.load(folder, MODELS[self.options.model], tags=names, **self.given(rows))
        loaded_tags = set(tags if names is None else names)
        self.alone = {tag: member for tag, member in self.alone.items() if tag in loaded_tags}
        self.frozen &= loaded_tags
        assert self.pop.tags == rows

    def deepcopy(self) -> None:
        self.pop = copy.deepcopy(self.pop)

    def poison(self) -> None:
        """Set a weight to NaN; with ``on_nonfinite="raise"`` the member is then stopped."""
        if self.options.scaled or self.options.mode == "ignore" or len(self.live) < 2:
            return
        row = self.draw.choice(self.live)
        tag = self.tag(row)
        parameters = dict(self.alone[tag].model.named_parameters())
        name = self.draw.choice([n for n, p in parameters.items() if p.requires_grad and "norm" not in n])
        with torch.no_grad():
            self.pop.fused.get_parameter(name)[row].fill_(math.nan)
            parameters[name].fill_(math.nan)
        if tag in self.frozen:
            return
        member = self.alone[tag]
        for _ in range(member.accumulate - member.calls - (self.options.mode == "raise")):
            self.step_rows(None, tag)
        if self.options.mode == "raise":
            x, y, _ = self.batch(len(self.pop))
            with pytest.raises(hf.NonFiniteError, match=re.escape(repr(tag))):
                self.pop.step(x, y)
            for other in self.alone.values():
                other.forget_calls()
            self.pop.stop(row)
            del self.alone[tag]
            return
        member.forget_calls()
        self.frozen.add(tag)
        self.step()


def _alike(first: nn.Module, second: nn.Module) -> bool:
    pairs = zip(first.state_dict().values(), second.state_dict().values(), strict=True)
    return all(torch.allclose(a, b, rtol=1e-9, atol=1e-10, equal_nan=True) for a, b in pairs)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--walks", type=int, default=200)
    parser.add_argument("--acts", type=int, default=40)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--model", choices=list(MODELS), help="by default one at random for each walk")
    parser.add_argument("--compiled", action="store_true")
    options = parser.parse_args()
    torch.set_num_threads(1)
    start, worst, acts = time.monotonic(), 0.0, 0
    for seed in range(options.seed, options.seed + options.walks):
        walk = Walk(seed, options.compiled, options.model)
        try:
            walk.run(options.acts)
        except BaseException:
            print(f"seed {seed}: {walk.options}\n{walk.acts}", flush=True)
            raise
        worst, acts = max(worst, walk.worst), acts + len(walk.acts)
    print(
        f"{options.walks} walks of {acts} acts equal: worst difference {worst:.1e} ({time.monotonic() - start:.0f} s)"
    )


if __name__ == "__main__":
    main()
