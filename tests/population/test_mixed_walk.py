"""Random walks of populations of unlike models: members that join, leave, meet and part equal members alone."""

from __future__ import annotations

import copy
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.optim import lr_scheduler as schedules

import hfusion as hf
from tests.population.mixed_alone import MODELS, Alone, adamw, close, model, run

MOST = 9


def halved(optimizer: Any) -> Any:
    return schedules.StepLR(optimizer, 3, 0.5)


PLAIN: dict[str, Any] = {}
LIMITED: dict[str, Any] = {"clip_norm": 0.1, "scheduler": halved, "accumulate": 2}
OWN_PACE: dict[str, Any] = {"accumulate": [1, 2, 3, 1]}


@dataclass
class Walk:
    """A population beside its members.

    Attributes:
        rows: the members by row; None where it is free.
        kinds: of the members, by name.
        lives: how many have joined.
    """

    draw: random.Random
    options: dict[str, Any]
    folder: Path
    rows: list[Alone | None] = field(default_factory=list)
    kinds: dict[str, str] = field(default_factory=dict)
    lives: int = 0

    def __post_init__(self) -> None:
        torch.manual_seed(self.draw.randrange(1 << 30))
        self.rows = [self.newborn(kind)[1] for kind in ("narrow", "wide", "tanh", "relu")]
        self.pop = hf.Population(
            [copy.deepcopy(member.model) for member in self.rows if member is not None],
            tags=list(self.kinds),
            **self.given([member.lr for member in self.rows if member is not None]),
        )

    def given(self, lrs: Any) -> dict[str, Any]:
        return {"optimizer": adamw(lrs), "loss": F.cross_entropy, "compile": False, **self.options}

    def newborn(self, kind: str) -> tuple[str, Alone]:
        self.lives += 1
        tag = f"life {self.lives}"
        self.kinds[tag] = kind
        alone: dict[str, Any] = {"make": self.options.get("scheduler"), "norm": self.options.get("clip_norm")}
        return tag, Alone(
            model(kind),
            lr=self.draw.choice([0.1, 0.03, 0.01]),
            accumulate=self.draw.choice([1, 2, 3]) if self.lives > 4 and self.own_pace else self.calls,
            **alone,
        )

    @property
    def own_pace(self) -> bool:
        """True if members accumulate different numbers of calls per update."""
        return isinstance(self.options.get("accumulate"), list)

    @property
    def calls(self) -> int:
        """Return the default number of calls per update for a member that joins."""
        calls = self.options.get("accumulate", 1)
        return calls[self.lives - 1] if self.own_pace else calls  # type: ignore[no-any-return]

    @property
    def live(self) -> list[int]:
        return [row for row, member in enumerate(self.rows) if member is not None]

    @property
    def free(self) -> list[int]:
        return [row for row, member in enumerate(self.rows) if member is None]

    def step(self) -> None:
        some = self.draw.sample(self.live, self.draw.randint(1, len(self.live))) if self.own_pace else None
        run(self.pop, self.rows, self.draw.randint(1, 3), self.draw.random() < 0.3, some)

    def join(self) -> None:
        new = [self.newborn(self.draw.choice(list(MODELS))) for _ in range(self.draw.randint(1, 3))]
        rows = self.pop.append(
            [copy.deepcopy(member.model) for _, member in new],
            tag=[tag for tag, _ in new],
            lr=[member.lr for _, member in new],
            accumulate=[member.accumulate for _, member in new],
        )
        self.rows += [None] * (len(self.pop) - len(self.rows))
        for row, (_, member) in zip(rows, new, strict=True):
            self.rows[row] = member

    def leave(self) -> None:
        rows = self.draw.sample(self.live, self.draw.randint(1, max(1, len(self.live) // 3)))
        for row, stopped in zip(rows, self.pop.stop(rows), strict=True):
            member = self.rows[row]
            assert member is not None
            for actual, expected in zip(stopped.state_dict().values(), member.model.state_dict().values(), strict=True):
                close(actual, expected)
            self.rows[row] = None

    def copy(self) -> None:
        targets = self.draw.sample(range(len(self.rows)), self.draw.randint(1, 2))
        sources = [self.draw.choice(self.live) for _ in targets]
        before = list(self.pop.tags)
        twins = [self.rows[source].twin() for source in sources]  # type: ignore[union-attr]
        kinds = [self.kinds[str(before[source])] for source in sources]
        self.pop.copy(sources, targets)
        for source, target, twin, kind in zip(sources, targets, twins, kinds, strict=True):
            self.kinds[str(self.pop.tags[target])] = kind
            if source != target:
                self.rows[target] = twin

    def rate(self) -> None:
        row, lr = self.draw.choice(self.live), self.draw.choice([0.2, 0.05])
        member = self.rows[row]
        assert member is not None
        if member.scheduler is None:
            self.pop.hparams["lr"][row] = lr
            member.opt.param_groups[0]["lr"] = lr

    def compact(self) -> None:
        moved = self.pop.compact()
        self.rows = [self.rows[row] for row in moved]
        self.rows += [None] * (len(self.pop) - len(self.rows))

    def grow(self) -> None:
        self.pop.grow(1)
        self.rows += [None] * (len(self.pop) - len(self.rows))

    def save(self) -> None:
        self.pop.save(self.folder)
        arguments = {key: value for key, value in self.given(0.5).items() if key != "accumulate"}
        self.pop = hf.Population.load(self.folder, lambda tag: model(self.kinds[tag]), **arguments)

    def twin(self) -> None:
        self.pop = copy.deepcopy(self.pop)

    def go(self) -> None:
        """Let something happen."""
        happens = [self.step] * 4 + [self.copy] + [self.rate]
        happens += [self.join] * 4 if len(self.live) < MOST else [self.leave] * 3
        happens += [self.leave] if len(self.live) > 2 else []
        happens += [self.compact] if self.free else [self.grow]
        happens += [self.save, self.twin]
        self.draw.choice(happens)()
        assert [tag is not None for tag in self.pop.tags] == [member is not None for member in self.rows]
        grouped = sorted(row for group in self.pop.groups for row in group.rows)
        assert grouped == self.live


@pytest.mark.parametrize(("options", "seed"), [(PLAIN, 0), (LIMITED, 1), (OWN_PACE, 2)])
def test_two_hundred_lives_equal_members_alone(options: dict[str, Any], seed: int, tmp_path: Path) -> None:
    walk = Walk(random.Random(seed), options, tmp_path)
    while walk.lives < 67:
        walk.go()
    walk.step()
