"""A population: its members, their rows, numbers and metrics, and what happens when something fails."""

from __future__ import annotations

import math
import operator
import threading
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf

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
    with torch.no_grad():
        weight[1, 0, 0] = 0.0
    # It does not step, so it has no loss, though it is computed.
    assert pop.step(x, y).isfinite().tolist() == [True, False, True]
    with pytest.raises(ValueError, match="'member 1' in row 1 went bad and is frozen"):
        pop.copy(1, 0)
    pop.copy(0, 1)
    assert pop.frozen == []
    assert pop.step(x, y).isfinite().all()
    assert pop.ages.tolist() == [7, 7, 7]


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


# Rows however they are given; and what fails leaves a population as it was.
def rows_net(inputs: int = 4) -> nn.Module:
    return nn.Sequential(nn.Linear(inputs, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3))


def population(members: int = 4, **options: Any) -> hf.Population:
    torch.manual_seed(0)
    defaults: dict[str, Any] = {"optimizer": lambda p: hf.optim.AdamW(p, lr=0.01), "loss": F.cross_entropy}
    return hf.Population([rows_net() for _ in range(members)], **{**defaults, "compile": False, **options})


BATCH = torch.randn(6, 4, generator=torch.Generator().manual_seed(1)), torch.tensor([0, 1, 2, 0, 1, 2])


@pytest.mark.parametrize("options", [{}, {"accumulate": 2}, {"scaler": True}, {"compile": True}])
def test_an_update_that_fails_has_not_been(options: dict[str, Any]) -> None:
    """An invalid learning rate raises; once corrected, the call is made again, and the run equals a valid one."""

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
            # The call that failed is made again, and no other of its update.
            for _ in range(1 if fails and step == 1 else options.get("accumulate", 1)):
                pop.step(*BATCH)
        assert pop.ages.tolist() == [3, 3, 3]
        return list(pop.fused.state_dict().values())

    for actual, expected in zip(run(True), run(False), strict=True):
        assert torch.equal(actual, expected)


@pytest.mark.parametrize("where", ["loss", "gradient hook", "step_pre_hook", "step_post_hook"])
@pytest.mark.parametrize(
    "options", [{}, {"on_nonfinite": "raise"}, {"on_nonfinite": "ignore", "accumulate": 2, "scaler": True}]
)
@pytest.mark.parametrize("plain", [False, True])
def test_a_step_that_raises_was_made_or_not(where: str, options: dict[str, Any], plain: bool) -> None:
    """A call that raises before the update begins is made again; one that raises later counts. Both equal a valid run.

    Of several groups the first raises, and the others have not stepped.
    """

    class Counting(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.net = rows_net()
            self.register_buffer("calls", torch.zeros(1))

        def forward(self, x: Tensor) -> Tensor:
            self.calls = self.calls + 1
            return self.net(x)

    def run(fails: bool) -> tuple[Any, ...]:
        raising: list[str] = []

        def at(name: str) -> None:
            if name in raising:
                raise RuntimeError(f"in the {name}")

        def loss(output: Tensor, target: Tensor) -> Tensor:
            at("loss")
            return F.cross_entropy(output, target)

        torch.manual_seed(0)
        arguments = {**options, "scaler": hf.optim.GradScaler()} if "scaler" in options else options
        pop = hf.Population(
            [Counting(), rows_net()] if plain else [rows_net() for _ in range(3)],
            optimizer=lambda p: hf.optim.AdamW(p, lr=0.01),
            loss=loss,
            compile=False,
            **arguments,
        )
        pop.register_gradient_hook(lambda params, grads: at("gradient hook"))
        group = pop._groups[0]
        group.optimizer.register_step_pre_hook(lambda *_: at("step_pre_hook"))
        group.optimizer.register_step_post_hook(lambda *_: at("step_post_hook"))
        for call in range(6):
            if fails and call == 3:
                raising.append(where)
                with pytest.raises(RuntimeError, match=f"in the {where}"):
                    pop.step(*BATCH)
                raising.clear()
                if where == "step_post_hook":
                    continue
            pop.step(*BATCH)
        rows = group.live if where == "step_post_hook" else range(len(pop))
        scales = [] if group.scaler is None else [group.scaler.table.columns]
        states = [pop.models[row].state_dict() for row in rows]
        return states, group.optimizer.state_dict(), scales, pop.ages[list(rows)]

    torch.testing.assert_close(run(True), run(False), rtol=0, atol=0)


@pytest.mark.parametrize("widths", [(6, 6, 6), (5, 6, 7)])
def test_hooks_follow_copies_of_members_and_end_with_them(widths: tuple[int, ...]) -> None:
    """In an array and between plain members: forward hooks and hooks of parameters, of a copy and of its copy."""
    calls: list[int] = []

    def hook(module: nn.Module, args: Any, output: Tensor) -> Tensor:
        calls.append(1)
        return output * 2

    torch.manual_seed(0)
    models = [nn.Sequential(nn.Linear(4, width), nn.Linear(width, 3)) for width in widths]
    pop = hf.Population(models, optimizer=lambda p: hf.optim.SGD(p, lr=0.1), loss=F.cross_entropy, compile=False)
    pop.models[0][1].register_forward_hook(hook)
    pop.models[0][1].weight.register_hook(torch.zeros_like)
    pop.copy(0, 1)
    pop.copy(1, 2)
    before = pop.models[0][1].weight.clone()
    losses = pop.step(*BATCH)
    assert losses[0] == losses[1] == losses[2]
    assert len(calls) == 3
    assert all(torch.equal(model[1].weight, before) for model in pop.models if model is not None)
    stopped, frozen_weight = pop.stop(0), pop.models[2][1].weight
    pop.grow(1)
    pop.step(*BATCH)
    assert len(calls) == 5  # Not for free rows.
    assert torch.equal(frozen_weight, before)
    F.cross_entropy(stopped(BATCH[0]), BATCH[1]).backward()
    assert len(calls) == 6
    assert not stopped[1].weight.grad.any()


def invalid_target(pop: hf.Population) -> None:
    inputs, targets = [torch.ones(size, 4) for size in (2, 3, 4)], [torch.arange(2), torch.arange(3), torch.ones(4) * 9]
    pop.step(hf.stacked(inputs), hf.stacked([target.long() for target in targets]), rows=[1, 2, 4])


def other_mode(pop: hf.Population) -> None:
    pop.models[3].eval()
    pop.step(*BATCH, rows=[2, 3])


@pytest.mark.parametrize(
    ("act", "words"),
    [
        (lambda pop: (operator.setitem(pop.hparams["lr"], 3, -1.0), pop.step(*BATCH)), "member 1 is 'd' in row 3"),
        (invalid_target, "member 1 is 'e' in row 4"),
        (
            lambda pop: pop.step(hf.stacked([torch.ones(6, 4 + (row == 2)) for row in range(5)]), BATCH[1]),
            "member 0 is 'c' in row 2",
        ),
        (other_mode, "member 0 is 'c' in row 2, member 1 is 'd' in row 3"),
        (lambda pop: pop.each(lambda params, grads: 1 // 0, rows=[4]), "member 2 is 'e' in row 4"),
        (
            lambda pop: pop.start(None, [rows_net(), rows_net()], tag=["f", "g"], lr=[0.1, -1.0]),
            "member 0 is 'g' in row 6",
        ),
    ],
    ids=["rate", "target", "width", "mode", "each", "start"],
)
@pytest.mark.parametrize("on_nonfinite", ["freeze", "raise"])
def test_errors_of_a_group_name_members_of_the_population(act: Any, words: str, on_nonfinite: Any) -> None:
    """Errors of an array count its rows: a note says which members these are."""
    torch.manual_seed(0)
    models = [*(nn.Linear(4, 3) for _ in range(2)), *(rows_net() for _ in range(3))]
    make = {"optimizer": lambda p: hf.optim.SGD(p, lr=0.1), "loss": F.cross_entropy, "compile": False}
    pop = hf.Population(models, tags=list("abcde"), on_nonfinite=on_nonfinite, **make)
    with pytest.raises(Exception) as error:  # noqa: PT011
        act(pop)
    assert sum(words in note for note in error.value.__notes__) == 1
