"""Populations of unlike models: each member is trained exactly as if alone, whatever group it is in."""

from __future__ import annotations

import copy
import math
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.optim import lr_scheduler as schedules

import hfusion as hf
from tests.population.mixed_alone import Alone, adamw, batch, check_member, close, mlp, model, run

KINDS = ["narrow", "wide", "narrow", "linear", "normed", "tanh", "relu", "tanh", "normed"]


def pair(kinds: list[str], options: dict[str, Any], alone: list[dict[str, Any]]) -> tuple[hf.Population, list[Alone]]:
    torch.manual_seed(0)
    models = [model(kind) for kind in kinds]
    members = [Alone(copy.deepcopy(module), **settings) for module, settings in zip(models, alone, strict=True)]
    rates = [member.lr for member in members]
    arguments = {"optimizer": adamw(rates), "loss": F.cross_entropy, "compile": False, **options}
    return hf.Population(models, **arguments), members


N = len(KINDS)
OPTIONS: dict[str, tuple[dict[str, Any], list[dict[str, Any]]]] = {
    "rates": ({}, [{"lr": 0.001 * (i + 1)} for i in range(N)]),
    "one limit": ({"clip_norm": 0.1, "clip_value": 0.05}, [{"norm": 0.1, "value": 0.05}] * N),
    "limits": ({"clip_norm": [0.05 * (i + 1) for i in range(N)]}, [{"norm": 0.05 * (i + 1)} for i in range(N)]),
    "scaler": ({"scaler": hf.optim.GradScaler(init_scale=64.0, growth_interval=3)}, [{"scaled": True}] * N),
    "accumulate": ({"accumulate": 2}, [{"accumulate": 2}] * N),
    "accumulates": ({"accumulate": [1 + i % 3 for i in range(N)]}, [{"accumulate": 1 + i % 3} for i in range(N)]),
    "accumulate scaled": (
        {"accumulate": 3, "scaler": hf.optim.GradScaler(init_scale=64.0, growth_interval=3)},
        [{"accumulate": 3, "scaled": True}] * N,
    ),
    "schedule": (
        {"scheduler": lambda o: schedules.StepLR(o, 2, 0.5)},
        [{"make": lambda o: schedules.StepLR(o, 2, 0.5)}] * N,
    ),
    "schedules": (
        {"scheduler": [lambda o, i=i: schedules.StepLR(o, 1 + i % 3, 0.5) for i in range(N)]},
        [{"make": lambda o, i=i: schedules.StepLR(o, 1 + i % 3, 0.5)} for i in range(N)],
    ),
}


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("name", OPTIONS)
def test_each_is_trained_as_alone(name: str, stacked: bool) -> None:
    options, alone = OPTIONS[name]
    pop, members = pair(KINDS, options, alone)
    run(pop, list(members), 6, stacked)


@pytest.mark.parametrize("name", ["rates", "accumulates", "scaler"])
def test_some_step(name: str) -> None:
    options, alone = OPTIONS[name]
    pop, members = pair(KINDS, options, alone)
    for rows in ([5, 0, 1], [8, 7, 6, 2], [3], [1, 4], list(range(N))):
        run(pop, list(members), 2, True, rows)
        run(pop, list(members), 1, False, rows, torch.tensor([0.0, 1.0, 2.0, 1.0, 0.5, 1.0], dtype=torch.float64))
    with pytest.raises(ValueError, match="weights of member 3 are 0 for all"):
        pop.step(*batch(N)[:2], rows=[3, 1], weights=[torch.zeros(6), torch.ones(6)])
    pop.stop(3)
    with pytest.raises(ValueError, match="row 3 is free"):
        pop.step(*batch(N)[:2], rows=[3, 1])
    with pytest.raises(ValueError, match=r"holds 3 entries, and rows=\[0, 1\] names 2 members"):
        pop.step(*batch(3, stacked=True)[:2], rows=[0, 1])


def test_members_meet_and_part_in_the_midst_of_updates() -> None:
    pop, alone = pair(["normed", "tanh", "relu", "tanh"], {"accumulate": [2, 3, 1, 2]}, CALLS)
    members: list[Alone | None] = list(alone)
    # The first step parts the array, of which three members have a call of theirs behind them.
    run(pop, members, 1)
    new = Alone(model("normed"), accumulate=3)
    with pytest.raises(ValueError, match="accumulate differs between the members"):
        pop.start(None, copy.deepcopy(new.model))
    pop.start(None, copy.deepcopy(new.model), accumulate=3)
    members.append(new)
    assert pop.groups[0].rows == (0, 4)
    run(pop, members, 1)
    pop.copy([1, 0], [2, 3])
    members[2], members[3] = alone[1].twin(), alone[0].twin()
    run(pop, members, 5)


CALLS: list[dict[str, Any]] = [{"accumulate": calls} for calls in (2, 3, 1, 2)]


def test_who_goes_bad_among_some_rows_changes_nobody() -> None:
    pop, members = pair(KINDS, {"on_nonfinite": "raise", "accumulate": [1] * 8 + [2]}, CALLS[2:3] * 8 + CALLS[:1])
    run(pop, list(members), 1)
    with torch.no_grad():
        pop.models[7].first.weight.fill_(math.nan)  # type: ignore[union-attr,operator]
    with pytest.raises(hf.NonFiniteError, match=r"of 'member 7' \(row 7\) is not finite in step 1"):
        pop.step(*batch(N)[:2], rows=[0, 4, 7])
    for row in set(range(N)) - {7}:
        check_member(pop, row, members[row])
    remaining: list[Alone | None] = [None if row == 7 else member for row, member in enumerate(members)]
    pop.stop(7)
    run(pop, remaining, 2, rows=[0, 1, 4, 8])


def test_groups_say_who_is_together_and_why() -> None:
    pop, members = pair(KINDS, {}, [{}] * N)
    run(pop, list(members), 1)
    groups = {group.rows: group for group in pop.groups}
    assert {rows: group.kind for rows, group in groups.items()} == {
        (0, 2): "array",
        (1,): "plain",
        (3,): "plain",
        (4, 8): "array",
        (5, 7): "array",
        (6,): "plain",
    }
    assert "no other member has its modules and shapes" in groups[(1,)].why
    assert "act is 'relu' in row 6 and 'tanh' in row 5" in groups[(6,)].why
    assert "array of rows 0, 2" in repr(pop)


def test_twins_are_one_array_with_all_that_an_array_has() -> None:
    pop = hf.Population([mlp(4), mlp(4)], optimizer=adamw(0.1), loss=F.cross_entropy, compile=False)
    assert len(pop.fused) == pop.optimizer.members == 2
    assert [(group.kind, group.rows) for group in pop.groups] == [("array", (0, 1))]
    pop.start(None, mlp(9))
    with pytest.raises(AttributeError, match=r"no fused of all members: they are 2 groups.*pop\.groups"):
        _ = pop.fused
    with pytest.raises(AttributeError, match="no optimizer of all members"):
        _ = pop.optimizer


def test_forwards_that_differ_part_an_array_of_twins() -> None:
    pop, members = pair(["tanh", "relu", "tanh"], {}, [{"lr": 0.01}, {"lr": 0.02}, {"lr": 0.03}])
    assert len(pop.groups) == 1
    run(pop, list(members), 3)
    assert [(group.kind, group.rows) for group in pop.groups] == [("array", (0, 2)), ("plain", (1,))]


def test_forwards_that_differ_part_in_evaluation() -> None:
    pop, members = pair(["tanh", "relu", "narrow"], {}, [{}] * 3)
    x, y, _ = batch(3)
    values = pop.evaluate(F.cross_entropy, [(x, y), (x[:2], y[:2])])
    for row, member in enumerate(members):
        close(values[row], F.cross_entropy(member.model(torch.cat([x, x[:2]])), torch.cat([y, y[:2]])))
    run(pop, list(members), 2)


def test_a_twin_that_joins_makes_an_array_of_a_plain_member() -> None:
    pop, members = pair(["narrow", "wide"], {}, [{"lr": 0.01}, {"lr": 0.02}])
    run(pop, list(members), 3)
    for kind, lr in (("wide", 0.05), ("narrow", 0.03), ("linear", 0.04), ("wide", 0.01)):
        new = Alone(model(kind), lr=lr)
        assert pop.start(None, copy.deepcopy(new.model), lr=lr, tag=f"{kind} {lr}") == len(members)
        members.append(new)
        run(pop, list(members), 2)
    assert [(group.kind, group.rows) for group in pop.groups] == [
        ("array", (0, 3)),
        ("array", (1, 2, 5)),
        ("plain", (4,)),
    ]
    assert [str(event) for event in pop.lineage][2:4] == ["step 3: start wide 0.05", "step 5: start narrow 0.03"]


def test_members_join_many_at_a_time_leave_and_are_copied() -> None:
    pop, alone = pair(["narrow", "wide", "narrow"], {}, [{"lr": 0.01}, {"lr": 0.02}, {"lr": 0.03}])
    members: list[Alone | None] = list(alone)
    run(pop, members, 2)
    new = [Alone(model(kind), lr=lr) for kind, lr in (("wide", 0.1), ("linear", 0.2), ("wide", 0.3))]
    rows = pop.append([copy.deepcopy(member.model) for member in new], lr=[member.lr for member in new])
    assert rows == [3, 4, 5]
    members += new
    run(pop, members, 2)
    stopped = pop.stop([0, 4])
    for stopped_model, alone_member in zip(stopped, (members[0], members[4]), strict=True):
        assert alone_member is not None
        for actual, expected in zip(stopped_model.parameters(), alone_member.model.parameters(), strict=True):
            close(actual, expected)
    members[0] = members[4] = None
    run(pop, members, 1)
    # A member becomes one of another shape, and a free row is taken.
    pop.copy([1, 1], [2, 4])
    assert members[1] is not None
    members[2], members[4] = members[1].twin(), members[1].twin()
    run(pop, members, 2)
    assert pop.lineage[-1].source == "member 1"
    assert pop.compact() == [1, 2, 3, 4, 5]
    members = members[1:]
    run(pop, members, 2)
    pop.grow(2)
    run(pop, [*members, None, None], 1)


def test_a_copy_goes_on_as_the_population(tmp_path: Path) -> None:
    pop, members = pair(["narrow", "wide", "narrow", "relu", "tanh"], {}, [{"lr": 0.01 * (i + 1)} for i in range(5)])
    run(pop, list(members), 2)
    other = copy.deepcopy(pop)
    run(pop, list(members), 2)
    torch.manual_seed(3)
    x, y, _ = batch(5)
    other.step(x, y)
    assert not torch.equal(other.models[1][0].weight, pop.models[1][0].weight)  # type: ignore[index]


@pytest.mark.parametrize("mode", ["freeze", "raise", "ignore"])
def test_a_member_that_becomes_nonfinite_changes_no_other(mode: Any) -> None:
    pop, members = pair(KINDS[:5], {"on_nonfinite": mode}, [{}] * 5)
    run(pop, list(members), 1)
    # A plain member, and one of an array.
    for row in (1, 2):
        with torch.no_grad():
            pop.models[row][0].weight.fill_(math.nan)  # type: ignore[index]
    x, y, rows = batch(5)
    if mode == "raise":
        with pytest.raises(hf.NonFiniteError, match=r"of 'member 1' \(row 1\), 'member 2' \(row 2\) is not") as raised:
            pop.step(x, y)
        assert "in step 1" in str(raised.value)
        for row in (0, 3, 4):
            check_member(pop, row, members[row])
        pop.stop([1, 2])
        run(pop, [members[0], None, None, *members[3:]], 2)
        return
    pop.step(x, y)
    assert pop.frozen == ([1, 2] if mode == "freeze" else [])
    for row in (0, 3, 4):
        members[row].step(*rows[row])
        check_member(pop, row, members[row])
    if mode == "freeze":
        assert pop.ages.tolist() == [2, 1, 1, 2, 2]
        with pytest.raises(ValueError, match="went bad and is frozen"):
            pop.copy(1, 0)


class Noisy(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(5, width), nn.Linear(width, 3)

    def forward(self, x: Tensor) -> Tensor:
        out: Tensor = self.last(F.dropout(self.first(x), 0.5, self.training))
        return out


def test_random_numbers_of_a_member_depend_on_no_other_group() -> None:
    def trained(widths: list[int]) -> list[Tensor]:
        torch.manual_seed(0)
        models = {width: Noisy(width) for width in (4, 5, 6, 7)}
        pop = hf.Population(
            [models[width] for width in widths],
            optimizer=adamw(0.1),
            loss=F.cross_entropy,
            compile=False,
            tags=[str(width) for width in widths],
        )
        torch.manual_seed(1)
        for _ in range(3):
            pop.step(torch.ones(6, 5), torch.zeros(6, dtype=torch.int64))
        members: list[Any] = [pop.models[pop.row(tag)] for tag in ("6", "7")]
        return [member.last.weight for member in members]

    for actual, expected in zip(trained([4, 5, 6, 7]), trained([7, 6]), strict=True):
        assert torch.equal(actual, expected)


def test_a_step_without_random_draws_leaves_the_generator_alone() -> None:
    pop = pair(["narrow", "wide"], {}, [{}] * 2)[0]
    x, y, _ = batch(2)
    before = torch.get_rng_state()
    pop.step(x, y)
    assert torch.equal(before, torch.get_rng_state())


@pytest.mark.parametrize("names", [None, ["member 4", "member 1", "member 0"]])
def test_a_saved_population_goes_on(tmp_path: Path, names: list[str] | None) -> None:
    kinds = ["narrow", "wide", "narrow", "relu", "tanh", "tanh"]
    make = lambda o: schedules.StepLR(o, 2, 0.5)  # noqa: E731
    options: dict[str, Any] = {"scheduler": make, "clip_norm": 0.1}
    pop, alone = pair(kinds, options, [{"lr": 0.01 * (i + 1), "make": make, "norm": 0.1} for i in range(6)])
    members: list[Alone | None] = list(alone)
    run(pop, members, 3)
    pop.stop(2)
    members[2] = None
    pop.save(tmp_path)
    by_name = {f"member {row}": kind for row, kind in enumerate(kinds)}
    again = hf.Population.load(
        tmp_path,
        lambda tag: model(by_name[tag]),
        optimizer=adamw(0.01),
        loss=F.cross_entropy,
        compile=False,
        tags=names,
        **options,
    )
    if names is None:
        assert again.tags == pop.tags
        assert again.lineage == pop.lineage
        assert [group.rows for group in again.groups] == [(0,), (1,), (3,), (4, 5)]
    else:
        assert again.tags == names
        members = [members[int(name[-1])] for name in names]
    assert again.steps == 3
    with pytest.raises(ValueError, match="lr"):
        # Members began with different rates, whatever the optimizer of now gives.
        again.start(None, model("linear"))
    run(again, members, 3)


def test_members_of_unlike_populations_merge(tmp_path: Path) -> None:
    members = []
    for number, kinds in enumerate((["narrow", "narrow"], ["wide", "narrow"])):
        pop, alone = pair(kinds, {"tags": [f"{number} {kind} {i}" for i, kind in enumerate(kinds)]}, [{}] * 2)
        run(pop, list(alone), 2 + number)
        pop.save(tmp_path / str(number))
        members += alone
    merged = hf.Population.load(
        [tmp_path / "0", tmp_path / "1"],
        lambda tag: model(tag.split()[1]),
        optimizer=adamw(0.01),
        loss=F.cross_entropy,
        compile=False,
    )
    assert [(group.kind, group.rows) for group in merged.groups] == [("array", (0, 1, 3)), ("plain", (2,))]
    run(merged, list(members), 3)


def state(member: nn.Module | None) -> dict[str, Tensor]:
    assert member is not None
    return {name: tensor.clone() for name, tensor in member.state_dict().items()}


def test_the_best_weights_of_each(tmp_path: Path) -> None:
    kinds = ["narrow", "normed", "narrow", "tanh", "relu", "linear"]
    pop, members = pair(kinds, {}, [{}] * 6)
    run(pop, list(members), 2)
    expected = [state(member) for member in pop.models]
    assert pop.best.update([1.0, 2.0, 3.0, 4.0, 5.0, math.nan]) == [0, 1, 2, 3, 4]
    run(pop, list(members), 2)
    assert pop.best.update([2.0, 1.0, 3.0, 4.0, 5.0, math.nan]) == [1]
    expected[1] = state(pop.models[1])
    assert pop.best.waited.tolist() == [1, 0, 1, 1, 1, 2]
    assert pop.best.ages.tolist() == [2, 4, 2, 2, 2, -1]
    run(pop, list(members), 1)
    # A record goes along with a member that is copied, and one that moves to another group.
    pop.copy([1, 0], [2, 5])
    pop.start(None, model("normed"))
    pop.save(tmp_path)
    kind_by_tag = {"member 0": "narrow", "member 1": "normed", "member 2": "normed", "member 5": "narrow"}
    kind_by_tag |= {"member 3": "tanh", "member 4": "relu", "member 6": "normed"}
    again = hf.Population.load(
        tmp_path, lambda tag: model(kind_by_tag[tag]), optimizer=adamw(0.01), loss=F.cross_entropy, compile=False
    )
    for restored in (pop, again):
        assert restored.best.restore() == [0, 1, 2, 3, 4, 5]
        for row, source in enumerate([0, 1, 1, 3, 4, 0]):
            for value, best_value in zip(state(restored.models[row]).values(), expected[source].values(), strict=True):
                assert torch.equal(value, best_value)
        assert torch.equal(state(restored.best[3])["last.weight"], expected[3]["last.weight"])
        restored.best.clear(3)
        with pytest.raises(ValueError, match="'member 3' in row 3 has no best weights"):
            restored.best[3]
        assert restored.best.scores[[0, 1, 2, 4, 5]].tolist() == [1.0, 1.0, 1.0, 5.0, 1.0]


def test_an_evaluation_is_in_eval_mode_and_changes_no_member() -> None:
    models = [
        nn.Sequential(nn.Linear(5, size), nn.BatchNorm1d(size), nn.Dropout(), nn.Linear(size, 3)).double()
        for size in (4, 6)
    ]
    pop = hf.Population(models, optimizer=adamw(0.01), loss=F.cross_entropy, compile=False)
    x, y = torch.randn(8, 5, dtype=torch.float64), torch.randint(3, (8,))
    pop.step(x, y)
    before = [state(member) for member in pop.models]
    values = pop.evaluate(F.cross_entropy, [(x, y)])
    for value, member, expected in zip(values, pop.models, before, strict=True):
        assert member is not None
        for name, tensor in state(member).items():
            assert torch.equal(tensor, expected[name])
        close(value, F.cross_entropy(copy.deepcopy(member).eval()(x), y))


def test_the_average_of_members_of_one_shape() -> None:
    pop, members = pair(["tanh", "relu", "tanh", "narrow"], {}, [{}] * 4)
    run(pop, list(members), 2)
    before = [state(member) for member in pop.models]
    mean = pop.average([0, 1, 2], [1.0, 2.0, 1.0])
    for name, value in state(mean).items():
        close(value, (before[0][name] + 2 * before[1][name] + before[2][name]) / 4)
    assert pop.average([0, 1], into=[1, 2]) is None
    for row in (1, 2):
        for name, value in state(pop.models[row]).items():
            close(value, (before[0][name] + before[1][name]) / 2)
    with pytest.raises(ValueError, match=r"first\.weight is \[6, 5\] in row 0 and none in row 3"):
        pop.average()


def halve(params: dict[str, Tensor], grads: dict[str, Tensor]) -> None:
    for grad in grads.values():
        grad.mul_(0.5)


def shift(params: dict[str, Tensor], grads: dict[str, Tensor], by: Tensor) -> None:
    for param in params.values():
        param.add_(by)


def test_functions_run_for_each() -> None:
    rates = [0.01, 0.02, 0.03, 0.04]
    torch.manual_seed(0)
    models = [model(kind) for kind in ("tanh", "tanh", "relu", "wide")]
    members = [
        Alone(copy.deepcopy(module), lr=lr, optimizer=torch.optim.SGD) for module, lr in zip(models, rates, strict=True)
    ]
    pop = hf.Population(models[:3], loss=F.cross_entropy, compile=False, optimizer=lambda p: hf.optim.SGD(p, lr=0.5))
    for row in range(3):
        pop.hparams["lr"][row] = rates[row]
    # A hook of one array is one of the groups that it becomes.
    handle = pop.register_gradient_hook(halve)
    pop.start(None, models[3], lr=rates[3])
    for member in members:
        for group in member.opt.param_groups:
            group["lr"] *= 0.5
    for _ in range(2):
        x, y, _ = batch(4)
        pop.step(x, y)
        for member in members:
            member.step(x, y)
    handle.remove()
    by = torch.arange(4, dtype=torch.float64)
    hf.each(shift)(pop, hf.stacked(by))
    pop.each(shift, torch.ones((), dtype=torch.float64), rows=[3, 0])
    x, y, _ = batch(4)
    pop.step(x, y)
    with torch.no_grad():
        for row, member in enumerate(members):
            for param in member.model.parameters():
                param.add_(by[row] + (row in (0, 3)))
    for row, member in enumerate(members):
        for group in member.opt.param_groups:
            group["lr"] *= 2
        member.step(x, y)
        check_member(pop, row, member)
    assert pop.active_rows == [0, 1, 2, 3]


def test_batches_of_different_sizes() -> None:
    pop, members = pair(["narrow", "wide", "narrow", "normed", "normed"], {}, [{}] * 5)
    for _ in range(3):
        xs = [torch.randn(size, 5, dtype=torch.float64) for size in (3, 4, 7, 5, 6)]
        ys = [torch.randint(3, (len(x),)) for x in xs]
        losses = pop.step(hf.stacked(xs), hf.stacked(ys))
        for row, member in enumerate(members):
            close(losses[row], member.step(xs[row], ys[row]))
            check_member(pop, row, member)
    values = pop.evaluate(F.cross_entropy, [(hf.stacked(xs), hf.stacked(ys))] * 2)
    for row, member in enumerate(members):
        close(values[row], F.cross_entropy(member.model.eval()(xs[row]), ys[row]))
    with pytest.raises(ValueError, match="a stacked argument has 4 entries for a population of 5 rows"):
        pop.step(hf.stacked(xs[:4]), hf.stacked(ys[:4]))


def test_forwards_that_differ_part_an_array_that_is_evaluated_first() -> None:
    pop, members = pair(["tanh", "relu", "tanh"], {}, [{}] * 3)
    x, y, _ = batch(3)
    # A generator is read once.
    values = pop.evaluate(F.cross_entropy, ((x, y) for _ in range(2)))
    for row, member in enumerate(members):
        close(values[row], F.cross_entropy(member.model(x), y))
    assert [group.rows for group in pop.groups] == [(0, 2), (1,)]
    run(pop, list(members), 2)


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "row": ({"row": 0}, "row 0 is taken by 'member 0'"),
    "tag": ({"tag": "member 1"}, "is the name of the member in row 1"),
    "rate": ({"lr": -1.0}, "must be finite and at least 0"),
    "missing": ({}, "lr"),
    "scheduler": ({"lr": 0.1, "scheduler": lambda o: schedules.StepLR(o, 2)}, "this population has none"),
    "limit": ({"lr": 0.1, "clip_norm": 1.0}, "this population has no clip_norm"),
}


@pytest.mark.parametrize("name", WRONG)
def test_a_failed_start_adds_no_member(name: str) -> None:
    arguments, words = WRONG[name]
    pop, members = pair(["narrow", "wide"], {}, [{"lr": 0.01}, {"lr": 0.02}])
    with pytest.raises(ValueError, match=words):
        pop.start(arguments.get("row"), model("linear"), **{key: v for key, v in arguments.items() if key != "row"})
    assert pop.tags == ["member 0", "member 1"]
    run(pop, list(members), 2)


def test_a_trained_base_of_unlike_members_is_refused() -> None:
    base = nn.Linear(5, 5)
    models = [nn.Sequential(base, nn.Linear(5, 3)), nn.Sequential(base, nn.Tanh(), nn.Linear(5, 3))]
    with pytest.raises(hf.FusionError, match=r"0\.weight of model 0 and 0\.weight of model 1 are one tensor"):
        hf.Population(models, optimizer=adamw(0.1), loss=F.cross_entropy)


def test_a_frozen_base_of_unlike_members_lies_in_memory_once() -> None:
    base = nn.Linear(5, 5).requires_grad_(False)
    models = [nn.Sequential(base, nn.Linear(5, 3)), nn.Sequential(base, nn.Tanh(), nn.Linear(5, 3))]
    pop = hf.Population(models, optimizer=adamw(0.1), loss=F.cross_entropy, compile=False)
    pop.step(torch.ones(2, 5), torch.tensor([0, 1]))
    assert {member[0].weight.data_ptr() for member in pop.models} == {base.weight.data_ptr()}  # type: ignore[index]


def test_a_pickle_of_an_array_without_its_functions_says_so() -> None:
    pop = hf.Population([mlp(4), mlp(4)], optimizer=adamw(0.1), loss=F.cross_entropy, compile=False)
    again = pickle.loads(pickle.dumps(pop))
    again.step(torch.ones(2, 5), torch.tensor([0, 1]))
    with pytest.raises(hf.FusionError, match="without the functions that make its optimizers"):
        again.start(None, mlp(9))
