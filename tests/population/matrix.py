"""Every optimizer with every scheduler beside torch alone: ``python -m tests.population.matrix``.

Members of a population in float64 have a rate and a schedule of their own; one joins late, one is copied over, one
starts in a row that another has left. Afterwards weights, state and hyper-parameters are those of B runs of torch.
"""

from __future__ import annotations

import argparse
import copy
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

import hfusion as hf
from tests.optim.arrays import EVERY, alone_class, for_array, for_member
from tests.optim.schedules import ALL
from tests.optim.test_muon import CASES as MUON
from tests.optim.test_muon import ROUNDING

OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {**EVERY, **{f"muon-{n}": ("Muon", o) for n, o in MUON.items()}}
BOUND = 1e-12
STEPS = 8


def net() -> nn.Module:
    return nn.Sequential(nn.Linear(3, 4, bias=False), nn.Tanh(), nn.Linear(4, 2, bias=False)).double()


@dataclass
class Alone:
    """A member trained alone with torch."""

    model: nn.Module
    opt: Any
    scheduler: Any


@dataclass
class Pair:
    """One optimizer with its options and one scheduler."""

    optimizer: str
    scheduler: str
    begun: int = 0
    alone: dict[str, Alone] = field(default_factory=dict)

    def __post_init__(self) -> None:
        torch.manual_seed(0)
        self.kind, self.options = OPTIMIZERS[self.optimizer]
        members = [self._joins() for _ in range(3)]
        options = for_array(self.options, len(members))
        self.pop = hf.Population(
            [member.model for member in members],
            optimizer=lambda params: getattr(hf.optim, self.kind)(params, **options),
            loss=F.cross_entropy,
            scheduler=self._make,
            tags=list(self.alone),
            compile=False,
        )

    def _make(self, optimizer: Any) -> Any:
        return ALL[self.scheduler](optimizer)

    def _joins(self) -> Alone:
        """The next member, with hyper-parameters that no other has."""
        member = self._alone(net(), self.begun)
        self.alone[f"m{self.begun}"] = member
        self.begun += 1
        return member

    def _alone(self, model: nn.Module, member: int) -> Alone:
        opt = alone_class(self.kind)(model.parameters(), **for_member(self.options, member))
        return Alone(model, opt, self._make(opt))

    def run(self) -> float:
        """The life of the population; the largest difference, of numbers relative to their size."""
        self.step(3)
        self.start(None)
        self.step(1)
        self.copy("m0", "m1")
        self.step(1)
        row = self.pop.row("m2")
        self.pop.stop(row)
        del self.alone["m2"]
        self.start(row)
        self.step(3)
        return max(self._gaps())

    def step(self, count: int) -> None:
        for _ in range(count):
            x, y = torch.randn(5, 3, dtype=torch.float64), torch.randint(2, (5,))
            metrics = self.pop.step(x, y)
            for member in self.alone.values():
                member.opt.zero_grad()
                loss = F.cross_entropy(member.model(x), y)
                loss.backward()
                member.opt.step()
            for row, tag in enumerate(self.pop.tags):
                if tag is not None:
                    scheduler = self.alone[tag].scheduler
                    plateau = isinstance(scheduler, schedules.ReduceLROnPlateau)
                    scheduler.step(*[float(metrics[row])] if plateau else [])
            assert self.pop.scheduler is not None
            self.pop.scheduler.step(metrics=metrics)

    def start(self, row: int | None) -> None:
        member, alone = self.begun, self._joins()
        hypers = {name: value for name, value in for_member(self.options, member).items() if name in self._numbers()}
        self.pop.start(row, copy.deepcopy(alone.model), tag=f"m{member}", **hypers)

    def _numbers(self) -> set[str]:
        return {hyper.key for hyper in self.pop.optimizer.hypers}

    def copy(self, src: str, dst: str) -> None:
        self.pop.copy(self.pop.row(src), self.pop.row(dst))
        source = self.alone[src]
        twin = self._alone(copy.deepcopy(source.model), 0)
        twin.opt.load_state_dict(copy.deepcopy(source.opt.state_dict()))
        for twin_param, source_param in zip(twin.model.parameters(), source.model.parameters(), strict=True):
            # Torch makes NAdam's product float64 when it loads it.
            twin.opt.state[twin_param] = copy.deepcopy(source.opt.state.get(source_param, {}))
        groups = copy.deepcopy(twin.opt.param_groups)
        twin.scheduler.load_state_dict(copy.deepcopy(source.scheduler.state_dict()))
        for group, saved_group in zip(twin.opt.param_groups, groups, strict=True):
            group.update({name: value for name, value in saved_group.items() if name != "params"})
        self.alone[dst] = twin

    def _gaps(self) -> Iterator[float]:
        for row, tag in enumerate(self.pop.tags):
            if tag is None:
                continue
            member, model = self.alone[tag], self.pop.models[row]
            assert model is not None
            assert self.pop.ages[row] == {"m3": 5, "m4": 3}.get(tag, STEPS)
            for hyper in self.pop.optimizer.hypers:
                actual, expected = (
                    opt.param_groups[0][hyper.key]
                    if hyper.index is None
                    else opt.param_groups[0][hyper.key][hyper.index]
                    for opt in (self.pop.optimizer, member.opt)
                )
                yield gap(actual[row], torch.as_tensor(expected, dtype=torch.float64))
            for stack, actual, expected in zip(
                self.pop.fused.parameters(), model.parameters(), member.model.parameters(), strict=True
            ):
                yield gap(actual, expected)
                state = member.opt.state.get(expected, {})
                for name, value in self.pop.optimizer.state.get(stack, {}).items():
                    if isinstance(state.get(name), Tensor):
                        yield gap(value[row], state[name])


def gap(actual: Tensor, expected: Tensor) -> float:
    """The largest difference, relative to the largest number."""
    actual, expected = actual.detach().double(), expected.detach().double()
    assert actual.shape == expected.shape
    assert actual.isfinite().all()
    assert expected.isfinite().all()
    return float((actual - expected).abs().max() / expected.abs().max().clamp(min=1e-300))


def bound(optimizer: str) -> float:
    """Torch orthogonalises in bfloat16."""
    return STEPS * ROUNDING if OPTIMIZERS[optimizer][0] == "Muon" else BOUND


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--optimizers", nargs="*", choices=[*OPTIMIZERS], default=[*OPTIMIZERS])
    options = parser.parse_args()
    torch.set_num_threads(1)
    start_time, worst, count, bad = time.monotonic(), 0.0, 0, 0
    for optimizer in options.optimizers:
        for scheduler in ALL:
            difference = Pair(optimizer, scheduler).run()
            count += 1
            if bound(optimizer) == BOUND:
                worst = max(worst, difference)
            if not difference <= bound(optimizer):
                bad += 1
                print(f"{optimizer} with {scheduler}: {difference:.1e}", flush=True)
    print(
        f"{count} pairs, {bad} beyond {BOUND:.0e}; worst difference {worst:.1e} ({time.monotonic() - start_time:.0f} s)"
    )
    raise SystemExit(bad > 0)


if __name__ == "__main__":
    main()
