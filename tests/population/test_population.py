"""A population: its members, their rows, numbers and metrics, and what happens when something fails."""

from __future__ import annotations

import math
import threading
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim.lr_scheduler import LinearLR

import hfusion as hf
from hfusion.checkpoint.files import saves
from hfusion.core.row_indices import Widths

# A population: members that train, leave, join and are copied equal torch.optim alone, and none disturbs another.
DOUBLE = torch.float64


def net(slope: float = 0.1) -> nn.Module:
    # No bias: its gradient before a batch norm is noise, which Adam makes large.
    layers = [nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.LeakyReLU(slope), nn.Linear(6, 3)]
    return nn.Sequential(*layers).double()


def batch(size: int = 8, seed: int | None = None) -> tuple[Tensor, Tensor]:
    generator = None if seed is None else torch.Generator().manual_seed(seed)
    return torch.randn(size, 4, dtype=DOUBLE, generator=generator), torch.randint(3, (size,), generator=generator)


Happening = Callable[[hf.Population], object]


def _poison(value: float) -> Happening:
    def act(pop: hf.Population) -> None:
        with torch.no_grad():
            pop.fused.get_parameter("3.weight")[1, 0, 0] = value

    return act


HAPPENINGS: dict[str, Happening] = {
    "nan": _poison(math.nan),
    "inf": _poison(math.inf),
    "explosion": lambda pop: pop.hparams["lr"].__setitem__(1, 1e300),
    "stopped": lambda pop: pop.stop(1),
    "copied over": lambda pop: pop.copy(3, 1),
    "started anew": lambda pop: (pop.stop(1), pop.start(1, net(), lr=0.5, clip_norm=1.0)),
}


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("mode", ["freeze", "ignore"])
def test_others_are_bit_identical_whatever_happens_to_one(compiled: bool, mode: Any) -> None:
    """The run in which something happens to member 1, beside the one in which nothing does."""

    def start() -> hf.Population:
        torch.manual_seed(4)
        models = [net() for _ in range(4)]
        return hf.Population(
            models,
            optimizer=lambda params: hf.optim.Adam(params, lr=[0.1, 0.2, 0.05, 0.01]),
            loss=F.cross_entropy,
            clip_norm=[1.0, 2.0, 0.5, math.inf],
            clip_value=0.5,
            on_nonfinite=mode,
            compile=compiled,
        )

    def run(happening: Happening | None) -> tuple[list[Tensor], list[Tensor]]:
        pop = start()
        losses = []
        for step in range(7):
            if step == 3 and happening is not None:
                happening(pop)
            losses.append(pop.step(*batch(seed=step))[[0, 2, 3]])
        state = [value for entry in pop.optimizer.state.values() for value in entry.values()]
        return losses, [value.detach()[[0, 2, 3]] for value in [*pop.fused.state_dict().values(), *state]]

    expected = run(None)
    for name, happening in HAPPENINGS.items():
        result = run(happening)
        for tensor, expected_tensor in zip([*result[0], *result[1]], [*expected[0], *expected[1]], strict=True):
            assert torch.equal(tensor, expected_tensor), name


@pytest.mark.parametrize("compiled", [False, True])
def test_a_member_that_goes_bad_is_frozen_as_it_was(compiled: bool) -> None:
    models = [net() for _ in range(3)]
    pop = hf.Population(models, optimizer=lambda p: hf.optim.SGD(p, lr=0.1), loss=F.cross_entropy, compile=compiled)
    x, y = batch()
    for _ in range(3):
        pop.step(x, y)
    weight = pop.fused.get_parameter("0.weight")
    with torch.no_grad():
        weight[1, 0, 0] = math.nan
    before = {key: value[1].clone() for key, value in pop.fused.state_dict().items()}
    losses = pop.step(x, y)
    assert losses.isfinite().tolist() == [True, False, True]
    assert pop.frozen == [1]
    pop.step(x, y)
    for key, value in pop.fused.state_dict().items():
        torch.testing.assert_close(value[1], before[key], rtol=0, atol=0, equal_nan=True)
    assert pop.ages.tolist() == [5, 3, 5]
    assert str(pop.lineage[-1]) == "step 3: freeze member 1"
    with pytest.raises(ValueError, match="'member 1' in row 1 went bad and is frozen"):
        pop.copy(1, 0)
    pop.copy(0, 1)
    assert pop.frozen == []
    assert pop.step(x, y).isfinite().all()
    assert pop.ages.tolist() == [6, 6, 6]


def test_compiled_members_draw_by_their_keys() -> None:
    """In whatever row of however many they are, in the eager steps before the program, too; a copy as its source."""

    def run(members: int, stay: list[int], compact: bool) -> tuple[list[Tensor], hf.Population]:
        torch.manual_seed(7)
        models = [nn.Sequential(nn.Linear(4, 9), nn.Dropout(0.4), nn.Linear(9, 3)).double() for _ in range(members)]
        tags = [f"net {member}" for member in range(members)]
        pop = hf.Population(
            models, optimizer=lambda p: hf.optim.SGD(p, lr=0.1), loss=F.cross_entropy, tags=tags, on_nonfinite="ignore"
        )
        losses = []
        for step in range(8):
            if step == 3:
                pop.stop([row for row in range(members) if row not in stay])
                if compact:
                    pop.compact()
            torch.manual_seed(step)
            step_losses = pop.step(*batch(seed=step))
            losses.append(torch.stack([step_losses[pop.row(f"net {member}")] for member in stay]))
        return losses, pop

    whole, pop = run(10, [1, 8], False)
    assert len(pop) == 10
    narrow, pop = run(10, [1, 8], True)
    assert len(pop) == 2
    torch.testing.assert_close(narrow, whole, rtol=1e-11, atol=0)
    torch.testing.assert_close(run(12, [1, 8], True)[0], whole, rtol=1e-11, atol=0)
    x, y = batch(seed=9)
    first, second = pop.step(x, y)
    assert first != second
    pop.copy(0, 1)
    for _ in range(3):
        first, second = pop.step(x, y)
        torch.testing.assert_close(first, second, rtol=1e-11, atol=0)


def test_rows_come_in_blocks() -> None:
    widths = Widths(64)
    wide = [widths.of(members) for members in range(1, 65)]
    assert all(rows >= members for members, rows in enumerate(wide, start=1))
    assert sum(wide) / sum(range(1, 65)) < 1.12
    assert {widths.at_once(rows) for rows in wide} == {None, 8, 1}
    assert widths.of(65) == 72
    assert [Widths(1).of(members) for members in (0, 1, 2)] == [1, 1, 2]


def test_hyper_parameters_are_live() -> None:
    models = [nn.Linear(4, 3).double() for _ in range(3)]

    def two_groups(params: Any) -> Any:
        weight, bias = params
        return hf.optim.AdamW([{"params": [weight]}, {"params": [bias], "weight_decay": 0.0}], lr=[0.1, 0.2, 0.3])

    pop = hf.Population(models, optimizer=two_groups, loss=F.cross_entropy, compile=False)
    pop.hparams["lr"][[0, 2]] *= 2.0
    assert pop.hparams["lr"].tolist() == [0.2, 0.2, 0.6]
    assert pop.optimizer.param_groups[1]["lr"].tolist() == [0.2, 0.2, 0.6]
    pop.hparams["weight_decay"][1] = 0.5
    assert pop.hparams["weight_decay"].tolist() == [0.01, 0.5, 0.01]
    assert pop.optimizer.param_groups[1]["weight_decay"].tolist() == [0.0, 0.0, 0.0]
    pop.optimizer.param_groups[1]["lr"][2] = 0.9
    with pytest.raises(ValueError, match="lr differs between the param groups"):
        pop.hparams["lr"][2]
    pop.hparams["betas"] = ([0.8, 0.9, 0.7], 0.99)
    assert pop.optimizer.param_groups[1]["betas"][0].tolist() == [0.8, 0.9, 0.7]
    assert set(pop.hparams) == {"lr", "betas", "eps", "weight_decay"}
    with pytest.raises(KeyError, match="'rate' is no hyper-parameter of AdamW"):
        pop.hparams["rate"]
    pop.step(*batch())


WRONG: dict[str, tuple[Callable[[hf.Population], object], str]] = {
    "free": (lambda pop: pop.stop(1), "row 1 is free; members are in rows"),
    "twice": (lambda pop: pop.stop([0, 0]), "row 0 comes 2 times"),
    "taken": (lambda pop: pop.start(0, net()), "row 0 is taken by 'member 0': stop it first"),
    "name": (lambda pop: pop.start(1, net(), tag="member 2", lr=0.1), "is the name of the member in row 2"),
    "rate": (lambda pop: pop.start(1, net()), "lr differs between the members: say what it is for those that join"),
    "scheduler": (
        lambda pop: pop.start(1, net(), scheduler=lambda o: LinearLR(o)),
        "this population has none",
    ),
    "limit": (lambda pop: pop.start(1, net(), clip_norm=1.0), "this population has no clip_norm"),
    "copy": (lambda pop: pop.copy(1, 0), "row 1 is free"),
    "rows": (lambda pop: pop.copy(0, 7), "7 is no row of an array of 3 members"),
    "grow": (lambda pop: pop.grow(0), "grow by 0"),
}


@pytest.mark.parametrize("name", WRONG)
def test_errors_change_nothing(name: str) -> None:
    models = [net() for _ in range(3)]
    pop = hf.Population(models, optimizer=lambda p: hf.optim.SGD(p, lr=[0.1, 0.2, 0.3]), loss=F.cross_entropy)
    pop.stop(1)
    tags, lineage = pop.tags, pop.lineage
    act, words = WRONG[name]
    with pytest.raises(ValueError, match=words):
        act(pop)
    assert (pop.tags, pop.lineage) == (tags, lineage)
    assert len(pop) == 3


@pytest.mark.filterwarnings("ignore:.* runs eagerly, exact but slower")
def test_what_a_member_draws_does_not_depend_on_the_modes_of_others() -> None:
    def losses(evaluated: int) -> list[float]:
        torch.manual_seed(0)
        models = [nn.Sequential(nn.Linear(4, 8), nn.Dropout(), nn.Linear(8, 3)).double() for _ in range(3)]
        pop = hf.Population(models, optimizer=partial(hf.optim.SGD, lr=0.1), loss=F.cross_entropy, compile=True)
        x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
        member = pop.models[evaluated]
        assert member is not None
        member.eval()
        torch.manual_seed(1)
        return [pop.step(x, y)[2].item() for _ in range(3)]

    assert losses(evaluated=0) == pytest.approx(losses(evaluated=1), rel=1e-9)


def test_a_thread_that_copies_waits_for_one_that_steps() -> None:
    order, begun = list[str](), threading.Event()

    def note(*_: Any) -> None:
        begun.set()
        time.sleep(0.3)
        order.append("stepped")

    models = [nn.Linear(4, 3).double() for _ in range(2)]
    pop = hf.Population(models, optimizer=partial(hf.optim.SGD, lr=0.1), loss=F.cross_entropy, compile=False)
    pop.optimizer.register_step_pre_hook(note)
    x, y = torch.randn(5, 4, dtype=torch.float64), torch.randint(3, (5,))
    thread = threading.Thread(target=pop.step, args=(x, y))
    thread.start()
    assert begun.wait(60)
    pop.copy(0, 1)
    order.append("copied")
    thread.join()
    assert order == ["stepped", "copied"]
    assert torch.equal(*pop.fused.get_parameter("weight"))


def test_options_that_are_none() -> None:
    def make(**options: Any) -> hf.Population:
        defaults: dict[str, Any] = {"optimizer": lambda p: hf.optim.SGD(p, lr=0.1), "loss": F.cross_entropy}
        return hf.Population([net(), net()], **{**defaults, **options})

    for options, words in (
        ({"on_nonfinite": "stop"}, 'it is "freeze", "raise" or "ignore"'),
        ({"accumulate": 0}, "accumulate=0"),
        ({"optimizer": lambda p: torch.optim.SGD(p, lr=0.1)}, "gave SGD, whose state has no rows"),
        ({"optimizer": torch.optim.SGD([torch.zeros(1)], lr=0.1)}, "must be a function that makes one .*, got SGD"),
        ({"loss": "mse"}, "the loss must be a function, .* got str"),
        ({"tags": ["a"]}, "1 tags for 2 models"),
        ({"tags": ["a", "a"]}, "tag='a' is the name of the member in row 0"),
        ({"clip_norm": -1.0}, "every limit must be at least 0"),
    ):
        with pytest.raises(ValueError, match=words):
            make(**options)
    assert repr(make()) == "Population(Sequential, SGD, 2 members in 2 rows, step 0)"


# Rows however they are given; and what fails leaves a population as it was.
def rows_net(inputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def population(members: int = 4, **options: Any) -> hf.Population:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"optimizer": lambda p: hf.optim.AdamW(p, lr=0.01), "loss": F.cross_entropy}
    return hf.Population([rows_net() for _ in range(members)], **{**defaults, "compile": False, **options})


BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0, 1, 2])

SEVERAL: list[Callable[[], Any]] = [
    lambda: [1, 2],
    lambda: np.array([1, -2]),
    lambda: torch.tensor([1, 2]),
    lambda: range(1, 3),
    lambda: (row for row in (1, 2)),
    lambda: [np.int64(1), torch.tensor(2)],
]


@pytest.mark.parametrize("rows", SEVERAL)
def test_several_rows(rows: Callable[[], Any]) -> None:
    pop = population()
    stopped = pop.stop(rows())
    assert isinstance(stopped, list)
    assert (len(stopped), pop.tags) == (2, ["member 0", None, None, "member 3"])
    assert pop.start(rows(), stopped) == [1, 2]
    assert pop.tags == ["member 0", "member 4", "member 5", "member 3"]
    pop.copy(rows(), [3, 0])


@pytest.mark.parametrize("row", [2, -2, np.int64(2), np.array(2), torch.tensor(2)])
def test_one_row(row: Any) -> None:
    pop = population()
    stopped = pop.stop(row)
    assert isinstance(stopped, nn.Module)
    assert pop.tags[2] is None
    assert pop.start(row, stopped) == 2
    pop.copy(row, 0)


WRONG_ROWS: dict[str, tuple[Callable[[hf.Population], object], str]] = {
    "rate": (lambda pop: pop.start(None, rows_net(), lr=-1.0), "is -1.0: it must be finite and at least 0"),
    "tag": (lambda pop: pop.start(None, rows_net(), tag="member 0"), "is the name of the member in row 0"),
    "surrogate": (lambda pop: pop.start(None, rows_net(), tag="\ud800"), "letters that no file can hold"),
    "number as tag": (
        lambda pop: pop.start(None, rows_net(), tag=3),
        "tag must be one str, or one for each row, got 3",
    ),  # type: ignore[arg-type]
    "no model": (lambda pop: pop.start(None, None), "model must be one Module, or one for each row, got None"),  # type: ignore[arg-type]
    "part of a row": (lambda pop: pop.grow(1.5), "grow by 1.5"),  # type: ignore[arg-type]
}


@pytest.mark.parametrize("name", WRONG_ROWS)
def test_nobody_joins_where_it_fails(name: str) -> None:
    pop = population()
    pop.step(*BATCH)
    before = {key: value.clone() for key, value in pop.fused.state_dict().items()}
    act, words = WRONG_ROWS[name]
    with pytest.raises((ValueError, hf.FusionError), match=words):
        act(pop)
    assert pop.tags == [f"member {row}" for row in range(4)]
    assert all(torch.equal(before[key], value) for key, value in pop.fused.state_dict().items())
    assert pop.step(*BATCH).isfinite().all()


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"scaler": True}, {"compile": True}])
def test_an_update_that_fails_has_not_been(options: dict[str, Any]) -> None:
    """An invalid learning rate raises; after it is corrected, the run equals one in which it was always valid."""

    def run(fails: bool) -> list[Tensor]:
        arguments = {**options, "scaler": hf.optim.GradScaler()} if "scaler" in options else options
        pop = population(3, **arguments)
        for step in range(3):
            if fails and step == 1:
                rates = pop.hparams["lr"].clone()
                pop.hparams["lr"][:] = -1.0
                for _ in range(options.get("accumulate", 1) - 1):
                    pop.step(*BATCH)
                with pytest.raises(ValueError, match=r"lr of member 0 is -1\.0"):
                    pop.step(*BATCH)
                pop.hparams["lr"] = rates
            for _ in range(options.get("accumulate", 1)):
                pop.step(*BATCH)
        assert pop.ages.tolist() == [3, 3, 3]
        return list(pop.fused.state_dict().values())

    for actual, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize(
    ("metric", "words"),
    [
        (lambda output, target: 1j, "complex"),
        (lambda output, target: 1 / 0, "division by zero"),
    ],
)
def test_a_metric_that_is_none_is_told_with_its_member(metric: Any, words: str) -> None:
    pop = population(2, tags=["a", "b"])
    with pytest.raises((ValueError, ZeroDivisionError), match=words) as raised:
        pop.evaluate(metric, [BATCH])
    assert raised.value.__notes__ == ["This is of the metric of member 'a' in row 0."]


# Copies of populations, and saves while other threads or processes train or save.
def test_a_save_is_of_one_step_whoever_trains_meanwhile(tmp_path: Path) -> None:
    options: dict[str, Any] = {
        "optimizer": lambda params: hf.optim.SGD(params, lr=0.1, momentum=0.5),
        "loss": F.mse_loss,
        "compile": False,
    }

    def make() -> nn.Module:
        return nn.Linear(64, 64, bias=False)

    pop, over, errors = hf.Population([make() for _ in range(4)], **options), threading.Event(), list[BaseException]()

    def save() -> None:
        try:
            while not over.is_set():
                pop.save(tmp_path, keep=1000)
        except BaseException as error:
            errors.append(error)

    def state(source: hf.Population) -> list[torch.Tensor]:
        entry = source.optimizer.state[source.fused.weight]
        return [source.fused.weight.detach().clone(), *(entry[key].clone() for key in sorted(entry))]

    x, y = torch.randn(8, 64), torch.randn(8, 64)
    pop.step(x, y)
    (thread := threading.Thread(target=save)).start()
    states = {}
    while len(saves(tmp_path)) < 6 and pop.steps < 10000:
        states[pop.steps] = state(pop)
        pop.step(x, y)
    over.set()
    thread.join()
    assert not errors
    paths = saves(tmp_path)
    assert len(paths) >= 6
    for path in paths[:6]:
        loaded = hf.Population.load(path, make, **options)
        if loaded.steps in states:
            assert all(torch.equal(a, b) for a, b in zip(state(loaded), states[loaded.steps], strict=True))
