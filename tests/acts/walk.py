"""Acts in a row on a client of hfusion and on members alone; also at random: ``python -m tests.acts.walk``."""

from __future__ import annotations

import argparse
import contextlib
import random
import sys
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch

import hfusion as hf
from tests.acts.acts import ACTS
from tests.acts.clients import CLIENTS, OPTIMIZERS, SCALE, SCHEDULES, Alike, Batch, Loop, Resident, Setup, Step
from tests.acts.zoo import OVERFLOWS, ZOO, loss
from tests.alone import Member, Own, close

SAMPLES = 4
MEMBERS = 4


@dataclass(frozen=True)
class Plan:
    """A walk to be made: its acts, each followed by a call of the training step or not."""

    client: str
    setup: Setup
    acts: tuple[str, ...]
    seed: int = 0

    def __str__(self) -> str:
        return f"{self.client}: {self.setup}; {' > '.join(self.acts)} (seed {self.seed})"

    def run(self) -> None:
        """Make the walk; an error that it raises has the acts so far in a note."""
        walk = Walk(self)
        try:
            walk.run()
        finally:
            walk.client.close()


class Walk:
    """A client and its members alone, by row; None where a row is free."""

    def __init__(self, plan: Plan) -> None:
        self.plan, self.setup = plan, plan.setup
        self.begin(-1)
        self.kind = CLIENTS[plan.client]
        self.born = 0
        self.frozen: list[str] = []  # parameters of all members that rest
        self.keep_alive: list[Any] = []
        self.rows: list[Member | None] = []
        for _ in range(MEMBERS):
            self.rows.append(self.newborn())
        self.client: Any = self.kind(self.setup, [m.model for m in self.members], [m.own for m in self.members])

    def begin(self, index: int) -> None:
        """Seed an act by its place, so that it does the same when acts before it are left out."""
        name = f"{self.plan.seed} {index}"
        self.draw = random.Random(name)
        torch.manual_seed(self.draw.randrange(1 << 30))

    @property
    def members(self) -> list[Member]:
        return [member for member in self.rows if member is not None]

    @property
    def live(self) -> list[int]:
        return [row for row, member in enumerate(self.rows) if member is not None]

    @property
    def free(self) -> list[int]:
        return [row for row, member in enumerate(self.rows) if member is None]

    def member(self, row: int) -> Member:
        member = self.rows[row]
        assert member is not None
        return member

    def newborn(self) -> Member:
        setup, draw, depths = self.setup, self.draw, self.kind.plain_depths
        kind = self.born, depths[self.born] if self.born < len(depths) else draw.choice(depths)
        self.born += 1
        own = Own(
            draw.choice([0.001, 0.01, 0.03]),
            draw.choice(SCHEDULES) if setup.scheduled else None,
            draw.choice(setup.accumulate),
            **({"norm": draw.choice([0.1, 1.0])} if setup.clips_norm else {}),
            **({"value": draw.choice([0.01, 0.1])} if setup.clips_value else {}),
        )
        member = Member(
            setup.entry.model(*kind),
            setup.maker(own.lr, alone=True),
            loss,
            own,
            scale=SCALE if setup.scaled else None,
            nonfinite=setup.nonfinite if issubclass(self.kind, Alike) else "ignore",
        )
        member.kind = kind
        return member

    def run(self) -> None:
        done: list[str] = []
        try:
            self.calls(1)
            for index, act in enumerate(self.plan.acts):
                done.append(act)
                self.begin(index)
                ACTS[act](self)
                self.check()
                if self.draw.random() < 0.8:
                    self.calls(1)
            self.calls(2)
        except Exception as error:
            error.add_note(f"{replace(self.plan, acts=tuple(done))}")
            raise

    def batches(self, count: int, rows: list[int] | None = None, **options: Any) -> list[Batch]:
        """Draw minibatches, which are of one kind, as those of a task have to be."""
        apart = self.draw.random() < 0.5
        return [self.batch(rows, apart, **options) for _ in range(count)]

    def batch(
        self,
        rows: list[int] | None,
        apart: bool,
        *,
        samples: int = SAMPLES,
        weighted: bool = False,
        poisoned: int | None = None,
        overflown: int | None = None,
    ) -> Batch:
        """Draw a minibatch of all rows, or of ``rows``: one for all of them, or one for each."""
        entry, stepping = self.setup.entry, list(range(len(self.rows))) if rows is None else rows
        apart = apart or poisoned is not None or overflown is not None
        weights, count = None, len(stepping)
        if weighted:
            weights = torch.rand(count, samples, dtype=torch.float64) if apart else torch.rand(samples).double()
            weights[..., 1] = 0.0
        if not apart:
            x, y = entry.draw(samples), torch.randn(samples, dtype=torch.float64)
            return Batch(x, y, [(x, y)] * count, rows, weights)
        xs = torch.stack([entry.draw(samples) for _ in stepping])
        ys = torch.randn(count, samples, dtype=torch.float64)
        if poisoned is not None and entry.floats:
            xs[stepping.index(poisoned)] = torch.nan
        elif poisoned is not None:
            ys[stepping.index(poisoned)] = torch.nan
        if overflown is not None:
            ys[stepping.index(overflown)] = OVERFLOWS
        return Batch(hf.stacked(xs), hf.stacked(ys), list(zip(xs, ys, strict=True)), rows, weights)

    def calls(self, count: int, rows: list[int] | None = None, **options: Any) -> None:
        """Train for ``count`` calls and compare losses, gradients, weights and what does not step."""
        batches = self.batches(count, rows, **options)
        others = [row for row in self.live if rows is not None and row not in rows]
        before = [
            {name: tensor.clone() for name, tensor in self.client.state(row).items()}
            for row in (others if isinstance(self.client, Alike) else [])
        ]
        losses = self.client.calls(batches)
        for row, state in zip(others, before, strict=True):
            now = self.client.state(row)
            assert all(torch.equal(now[name], value) for name, value in state.items()), f"row {row} did not step"
        self.follow(batches, losses, {}, flushes=isinstance(self.client, Resident))
        if type(self.client) in (Loop, Step):
            self.compare_gradients()
        self.check()

    def follow(self, batches: Sequence[Batch], losses: Any, last: dict[int, int], *, flushes: bool) -> None:
        """Make the same calls with members alone, and compare losses.

        Args:
            last: the number of batches of members that stop early.
            flushes: whether the end of the batches ends an update.
        """
        for index, (batch, row_losses) in enumerate(zip(batches, losses, strict=True)):
            stepping = range(len(self.rows)) if batch.rows is None else batch.rows
            for row in range(len(self.rows)):
                if row not in stepping or self.rows[row] is None:
                    assert bool(row_losses[row].isnan()), f"loss of row {row}, which does not step"
            for place, row in enumerate(stepping):
                member = self.rows[row]
                if member is None or member.frozen or index >= last.get(row, len(batches)):
                    continue
                weights = batch.weights
                if weights is not None and weights.dim() == 2:
                    weights = weights[place]
                age = member.age
                value, updated = member.call(*batch.parts[place], weights)
                if flushes and index == len(batches) - 1 and member.calls:
                    member.update()
                    updated = True
                close(row_losses[row], [value], f"loss of row {row}")
                if updated and not (isinstance(self.client, Alike) and member.age == age):
                    member.step_schedule(float(value))

    def check(self) -> None:
        """Compare weights, buffers, rates, loss scales and ages of all members."""
        scales, rates = self.client.scales(), self.client.rates()
        assert len(rates) == len(self.rows)
        for row in self.live:
            member, state = self.member(row), self.client.state(row)
            expected = member.model.state_dict()
            assert list(state) == list(expected)
            for name, value in expected.items():
                close(state[name], [value], f"{name} of row {row}")
            close(torch.tensor(rates[row]), [torch.tensor(member.opt.param_groups[0]["lr"])], f"lr of row {row}")
            if scales is not None and member.scaler is not None and not member.frozen:
                assert scales[row] == member.scaler.get_scale(), f"loss scale of row {row}"
            if self.client.ages is not None:
                assert self.client.ages[row] == member.age, f"age of row {row}"

    def compare_gradients(self) -> None:
        for row in self.live:
            member = self.member(row)
            theirs = dict(member.model.named_parameters())
            # Amid an update gradients are scaled, and so is the rounding of those that are zero.
            scale = member.scaler.get_scale() if member.scaler is not None and member.calls else 1.0
            for name, grad in self.client.grads(row).items():
                expected = theirs[name].grad
                if grad is None or expected is None:
                    rest = grad if expected is None else expected
                    assert rest is None or not rest.any(), f"gradient of {name} in row {row}"
                else:
                    close(grad / scale, [expected / scale], f"gradient of {name} in row {row}")

    def align(self) -> None:
        """End the updates that are underway, in trainings in which all members make updates together."""
        while isinstance(self.client, Loop) and self.client.done:
            self.calls(1)

    def settle(self) -> None:
        """Align, and let all parameters train."""
        self.align()
        self.unfreeze()

    def unfreeze(self) -> None:
        self.require_grad(True)
        self.frozen = []

    def require_grad(self, asks: bool) -> None:
        for name in self.frozen:
            for module in (self.client.fused, *(member.model for member in self.members)):
                module.get_parameter(name).requires_grad_(asks)


def setup_of(client: str, entry: str, acts: Sequence[str], draw: random.Random) -> Setup:
    """Draw how members are trained, such that the client and the acts can be."""
    kind = CLIENTS[client]
    population, steps, tasks = issubclass(kind, Alike), issubclass(kind, Step), issubclass(kind, Resident)
    scaled = not (steps or tasks) and ("overflow" in acts or ("poison" not in acts and draw.random() < 0.2))
    accumulate = draw.choice([(1,), (1,), (2,), (1, 2, 3)] if population else [(1,)] if steps else [(1,), (2,)])
    modes = ["freeze"] if "thaw" in acts else ["freeze", "freeze", "ignore"]
    if population and not scaled and accumulate == (1,) and "thaw" not in acts:
        modes.append("raise")
    return Setup(
        ZOO[entry],
        draw.choice(list(OPTIMIZERS)),
        draw.random() < 0.6,
        scaled,
        draw.random() < 0.4,
        not tasks and draw.random() < 0.3,
        accumulate,
        draw.choice(modes),
    )


def possible(client: str, entry: str) -> list[str]:
    """Return the acts that a client can do with a model."""
    model = ZOO[entry]
    if not model.alike and not issubclass(CLIENTS[client], Alike):
        return []
    return sorted(CLIENTS[client].acts - model.cannot)


def shrunk(plan: Plan, seconds: float = 60.0) -> Plan:
    """Leave out acts as long as the walk fails."""
    end, index = time.monotonic() + seconds, 0
    while index < len(plan.acts) and time.monotonic() < end:
        shorter = replace(plan, acts=plan.acts[:index] + plan.acts[index + 1 :])
        try:
            shorter.run()
        except Exception:
            plan = shorter
        else:
            index += 1
    return plan


def run(plan: Plan) -> None:
    """Make a walk. Raises AssertionError with the shortest walk that fails, too."""
    try:
        plan.run()
    except Exception as error:
        raise AssertionError(f"{plan}\nshrunk to {shrunk(plan)}") from error


def random_plan(seed: int, acts: int = 12) -> Plan:
    draw = random.Random(seed)
    while not (choices := possible(client := draw.choice(list(CLIENTS)), entry := draw.choice(list(ZOO)))):
        pass
    chosen = tuple(draw.choice(choices) for _ in range(acts))
    return Plan(client, setup_of(client, entry, chosen, draw), chosen, seed)


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.acts.walk", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None, help="the first seed; a fresh one if it is left out")
    parser.add_argument("--walks", type=int, default=sys.maxsize, help="at most so many")
    options = parser.parse_args()
    torch.set_num_threads(1)
    first = time.time_ns() // 1000 % 10**9 if options.seed is None else options.seed
    start, seed, failed = time.monotonic(), first, 0
    while time.monotonic() < start + options.seconds and seed < first + options.walks:
        plan = random_plan(seed)
        try:
            plan.run()
        except Exception:
            failed += 1
            traceback.print_exc()
            with contextlib.suppress(Exception):
                print(f"FAULT {shrunk(plan)}", flush=True)
        seed += 1
    print(f"{seed - first} walks in {time.monotonic() - start:.0f} s, {failed} failed")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
