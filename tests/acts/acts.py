"""What a user does to a training, with two meanings: on a client, and on members alone in plain torch."""

from __future__ import annotations

import copy
import tempfile
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hfusion as hf
from tests.acts.clients import OPTIMIZERS, Alike, Resident
from tests.acts.zoo import loss, own_copy
from tests.alone import close

if TYPE_CHECKING:
    from tests.acts.walk import Walk


def step(walk: Walk) -> None:
    walk.calls(walk.draw.randint(1, 2))


def size(walk: Walk) -> None:
    """A batch of another size, and one of the usual one."""
    walk.calls(1, samples=7)
    walk.calls(1)


def some(walk: Walk) -> None:
    """Some of the members, in any order; the others keep every bit."""
    rows = walk.draw.sample(walk.live, walk.draw.randint(1, len(walk.live)))
    walk.calls(2, rows=rows)


def weights(walk: Walk) -> None:
    """Samples that count differently, one of them not at all."""
    walk.calls(1, weighted=True)
    walk.calls(1, weighted=True, rows=walk.draw.sample(walk.live, 2))


def stop(walk: Walk) -> None:
    if len(walk.live) < 3:
        start(walk)
    row = walk.draw.choice(walk.live)
    client, member = walk.client, walk.member(row)
    if isinstance(client, Alike):
        states = client.pop.stop(row).state_dict()
        walk.rows[row] = None
    else:
        states = {name: tensor.clone() for name, tensor in walk.client.state(row).items()}
        client.keep([other for other in range(len(walk.rows)) if other != row])  # type: ignore[attr-defined]
        del walk.rows[row]
    for name, expected in member.model.state_dict().items():
        close(states[name], [expected], f"{name} of a member that has left")


def start(walk: Walk) -> None:
    """A member joins in a free row, or a new one."""
    walk.settle()
    client, member = walk.client, walk.newborn()
    if isinstance(client, Alike):
        row = client.start(walk.draw.choice([None, *walk.free]), member.model, member.own)
        walk.rows += [None] * (len(client.pop) - len(walk.rows))
        walk.rows[row] = member
    else:
        client.append(member.model, member.own)  # type: ignore[attr-defined]
        walk.rows.append(member)
    if len(walk.live) > 6:
        stop(walk)


def put(walk: Walk, row: int | None = None) -> None:
    """A new member takes the row of another one."""
    walk.settle()
    row = walk.draw.choice(walk.live) if row is None else row
    client, member = walk.client, walk.newborn()
    if isinstance(client, Alike):
        client.pop.stop([row])
        client.start(row, member.model, member.own)
    else:
        client.put(row, member.model, member.own)  # type: ignore[attr-defined]
    walk.rows[row] = member


def copy_rows(walk: Walk) -> None:
    """Members are written over others, at once, also in a circle."""
    client, live = walk.client, walk.live
    healthy = [row for row in live if not walk.member(row).frozen]
    if isinstance(client, Alike):
        dst = walk.draw.sample(range(len(walk.rows)), 2)
        src = [walk.draw.choice(healthy) for _ in dst]
        client.pop.copy(src, dst)
        client.owns |= {str(client.pop.tags[d]): walk.member(s).own for s, d in zip(src, dst, strict=True)}
    else:
        dst = walk.draw.sample(live, 2)
        src = dst[::-1] if walk.draw.random() < 0.5 else [walk.draw.choice(live)] * 2
        client.copy(src, dst)  # type: ignore[attr-defined]
    twins = [walk.member(row).twin(own_copy) for row in src]
    for source, target, twin in zip(src, dst, twins, strict=True):
        if source != target:
            walk.rows[target] = twin


def permute(walk: Walk) -> None:
    order = walk.draw.sample(range(len(walk.rows)), len(walk.rows))
    walk.client.keep(order)  # type: ignore[attr-defined]
    walk.rows = [walk.rows[row] for row in order]


def compact(walk: Walk) -> None:
    """Free rows go, after two members."""
    stop(walk)
    moved = population(walk).compact()
    walk.rows = [walk.rows[row] for row in moved]
    walk.rows += [None] * (len(population(walk)) - len(moved))


def grow(walk: Walk) -> None:
    if len(walk.rows) < 10:
        population(walk).grow(1)
        walk.rows += [None] * (len(population(walk)) - len(walk.rows))
    start(walk)


def rate(walk: Walk) -> None:
    _scale_number(walk, "lr", 0.5)


def decay(walk: Walk) -> None:
    """Another weight decay, or eps."""
    options = OPTIMIZERS[walk.setup.optimizer][1]
    _scale_number(walk, "weight_decay" if "weight_decay" in options else "eps" if "eps" in options else "lr", 3.0)


def _scale_number(walk: Walk, name: str, factor: float) -> None:
    for row in walk.draw.sample(walk.live, 2):
        value = walk.member(row).opt.param_groups[0][name] * factor
        walk.client.set_number(name, row, value)  # type: ignore[attr-defined]
        walk.member(row).opt.param_groups[0][name] = value


def deepcopy(walk: Walk) -> None:
    walk.align()
    before = walk.client
    old = getattr(before, "pop", None) or before.fused  # type: ignore[attr-defined]
    before.deepcopy()  # type: ignore[attr-defined]
    walk.keep_alive.append(old)


def pickled(walk: Walk) -> None:
    walk.align()
    walk.client.pickle()  # type: ignore[attr-defined]


def save(walk: Walk) -> None:
    """Save, and load into a training made anew; of a population also some members in another order."""
    walk.settle()
    client = walk.client

    def fresh(row: int) -> nn.Module:
        return walk.setup.entry.model(*walk.member(row).kind)

    if not isinstance(client, Alike):
        client.save(fresh)  # type: ignore[attr-defined]
        return
    every = walk.draw.random() < 0.5
    rows = list(range(len(walk.rows))) if every else walk.draw.sample(walk.live, max(2, len(walk.live) - 1))
    first = next(member for member in walk.rows if member is not None)
    owns = [(walk.rows[row] or first).own for row in rows]
    client.save(fresh, rows, owns, every)
    walk.rows = [walk.rows[row] for row in rows]
    assert [tag is not None for tag in client.pop.tags] == [member is not None for member in walk.rows]


def state_dict(walk: Walk) -> None:
    walk.client.state_dict()  # type: ignore[attr-defined]


def convert(walk: Walk) -> None:
    walk.settle()
    walk.client.convert()  # type: ignore[attr-defined]


def freeze(walk: Walk) -> None:
    """A parameter of all members rests, or trains again."""
    walk.align()
    if walk.frozen:
        walk.unfreeze()
        return
    fused: Any = walk.client.fused  # type: ignore[attr-defined]
    names = [name for name, p in fused.named_parameters() if p.requires_grad]
    walk.frozen = [walk.draw.choice(names[1:])]
    walk.require_grad(False)


def cast(walk: Walk) -> None:
    """To half the precision and back."""
    fused: Any = walk.client.fused  # type: ignore[attr-defined]
    fused.float().double()
    for member in walk.members:
        member.model.float().double()


def write(walk: Walk) -> None:
    """A weight of one member changes in place."""
    row = walk.draw.choice(walk.live)
    ours: Any = walk.client.member(row)  # type: ignore[attr-defined]
    names = [name for name, p in walk.member(row).model.named_parameters() if p.requires_grad]
    name = walk.draw.choice(names)
    with torch.no_grad():
        for model in (ours, walk.member(row).model):
            model.get_parameter(name).mul_(0.9)


def mode(walk: Walk) -> None:
    """One member is in eval mode for a call."""
    row = walk.draw.choice(walk.live)
    for model in (walk.client.member(row), walk.member(row).model):  # type: ignore[attr-defined]
        model.eval()
    walk.calls(1)
    for model in (walk.client.member(row), walk.member(row).model):  # type: ignore[attr-defined]
        model.train()


def halved(module: nn.Module, args: Any, output: Any) -> Any:
    return pytree.tree_map(lambda leaf: leaf * 0.5, output)


def hook(walk: Walk) -> None:
    """One member's outputs are changed by a hook for a call."""
    row = walk.draw.choice(walk.live)
    models = (walk.client.member(row), walk.member(row).model)  # type: ignore[attr-defined]
    handles = [model.register_forward_hook(halved) for model in models]
    walk.calls(1)
    for handle in handles:
        handle.remove()


def freeze_one(walk: Walk) -> None:
    """A parameter of one member rests for an update."""
    walk.settle()
    row = walk.draw.choice(walk.live)
    names = [name for name, p in walk.member(row).model.named_parameters() if p.requires_grad]
    name = walk.draw.choice(names)
    for asks in (False, True):
        for model in (walk.client.member(row), walk.member(row).model):  # type: ignore[attr-defined]
            model.get_parameter(name).requires_grad_(asks)
        if not asks:
            walk.calls(2)
            walk.align()


def poison(walk: Walk) -> None:
    """The inputs of one member are NaN: it freezes, or is replaced, and nobody else notices."""
    row = walk.draw.choice([row for row in walk.live if not walk.member(row).frozen])
    member = walk.member(row)
    if isinstance(walk.client, Alike) and walk.setup.nonfinite == "raise":
        batch = walk.batches(1, poisoned=row)[0]
        with pytest.raises(hf.NonFiniteError):
            walk.client.pop.step(batch.inputs, batch.target)
        return
    walk.calls(1, poisoned=row)
    if not isinstance(walk.client, Alike) or walk.setup.nonfinite == "ignore":
        put(walk, row)
        return
    while member.calls:
        walk.calls(1)
    assert population(walk).frozen == [row for row in walk.live if walk.member(row).frozen]
    if all(walk.member(other).frozen for other in walk.live):
        thaw(walk)


def thaw(walk: Walk) -> None:
    if not any(member.frozen for member in walk.members):
        poison(walk)
    frozen = [row for row in walk.live if walk.member(row).frozen]
    population(walk).thaw(frozen)
    for row in frozen:
        walk.member(row).frozen = False


def overflow(walk: Walk) -> None:
    """The loss of one member is finite, and infinite once it is scaled."""
    row = walk.draw.choice(walk.live)
    walk.calls(1, overflown=row)
    walk.align()


def evaluate(walk: Walk) -> None:
    """In eval mode, on batches of unlike sizes."""
    draws = [walk.setup.entry.draw(n) for n in (4, 2)]
    targets = [torch.randn(n, dtype=torch.float64) for n in (4, 2)]
    expected = []
    for member in walk.members:
        member.model.eval()
        with torch.no_grad():
            outputs = [member.model(x) for x in draws]
        member.model.train()
        expected.append(outputs)
    if isinstance(walk.client, Alike):
        metrics = walk.client.pop.evaluate(loss, list(zip(draws, targets, strict=True)))
        values = [
            loss(pytree.tree_map(lambda *parts: torch.cat(parts), *outputs), torch.cat(targets)) for outputs in expected
        ]
        close(metrics[walk.live], values, "metrics")
        assert metrics[walk.free].isnan().all()
        return
    for place, x in enumerate(draws):
        ours = pytree.tree_leaves(walk.client.outputs(x))  # type: ignore[attr-defined]
        theirs = zip(*(pytree.tree_leaves(outputs[place]) for outputs in expected), strict=True)
        for actual, rows in zip(ours, theirs, strict=True):
            close(actual, rows, "outputs in eval mode")


def best(walk: Walk) -> None:
    """Members go back to what they were at their best."""
    walk.align()
    if isinstance(walk.client, Resident):
        _best_of_epochs(walk, walk.client)
        return
    pop, states = population(walk), dict[int, dict[str, Tensor]]()
    pop.best.clear()
    scores: dict[int, float] = {}
    for _ in range(3):
        metrics = torch.rand(len(pop), dtype=torch.float64)
        improved = pop.best.update(metrics, mode="max")
        better = [row for row in walk.live if row not in scores or float(metrics[row]) > scores[row]]
        assert improved == better
        for row in better:
            scores[row] = float(metrics[row])
            states[row] = copy.deepcopy(walk.member(row).model.state_dict())
        walk.calls(1)
    rows = walk.draw.sample(walk.live, 2)
    assert sorted(pop.best.restore(rows)) == sorted(rows)
    for row in rows:
        walk.member(row).model.load_state_dict(states[row])


def _best_of_epochs(walk: Walk, client: Resident) -> None:
    *batches, judge = walk.batches(3)
    loader, judged = ([(one.inputs, one.target) for one in many] for many in (batches, [judge]))
    report = client.train(client.task(loader, epochs=3, eval_loader=judged, restore_best=True))
    for row, member in enumerate(walk.members):
        scores, states = [], []
        for _ in range(3):
            member.epoch((batch.parts[row] for batch in batches), schedules_steps=True)
            scores.append(member.judged([judge.parts[row]]))
            states.append(copy.deepcopy(member.model.state_dict()))
        close(report.eval_losses[:, 0, row], list(torch.tensor(scores, dtype=torch.float64)), "evaluations")
        member.model.load_state_dict(states[scores.index(min(scores))])


def average(walk: Walk) -> None:
    """Members of one kind become their mean."""
    groups: dict[Any, list[int]] = {}
    for row in walk.live:
        if not walk.member(row).frozen:
            shapes = tuple((name, value.shape) for name, value in walk.member(row).model.state_dict().items())
            groups.setdefault(shapes, []).append(row)
    rows = max(groups.values(), key=len)
    for row in rows:
        while walk.member(row).calls:
            walk.calls(1, rows=[row])
    shares = [1.0 + place for place in range(len(rows))]
    states = [copy.deepcopy(walk.member(row).model.state_dict()) for row in rows]
    population(walk).average(rows, shares, into=rows[:1])
    mean = dict(states[-1])
    for name, value in mean.items():
        # The mean of what members share is that, without the rounding of a sum.
        same = all(torch.equal(state[name], value) for state in states)
        if not same and (value.is_floating_point() or value.is_complex()):
            parts = [share / sum(shares) * state[name] for share, state in zip(shares, states, strict=True)]
            mean[name] = torch.stack(parts).sum(0)
    walk.member(rows[0]).model.load_state_dict(mean)


def leave(walk: Walk) -> None:
    """A member stops in the middle of an epoch, and keeps its weights."""
    client: Any = walk.client
    row, last = walk.draw.randrange(len(walk.rows)), 2 * walk.setup.accumulate[0] - 1
    batches = walk.batches(2 * walk.setup.accumulate[0] + 1)
    loader = [(batch.inputs, batch.target) for batch in batches]
    heard: list[int] = []

    def on_result(result: hf.Step) -> list[int]:
        heard.append(result.step)
        return [row] if result.step == last else []

    report = hf.train([task := client.task(loader)], client.machine, plan=client.plan(task), on_result=on_result)
    losses = report["task"].losses
    assert heard == list(range(len(batches)))
    assert losses[last + 1 :, row].isnan().all()
    walk.follow(batches, losses, {row: last + 1}, flushes=True)


class CutError(Exception):
    """Ends a run."""


def interrupt(walk: Walk) -> None:
    """A run is cut off in its second epoch, and resumed from its last save."""
    client: Any = walk.client
    batches, seen = walk.batches(3), [0]

    def cut(result: object) -> None:
        seen[0] += 1
        if seen[0] == 5:
            raise CutError

    with tempfile.TemporaryDirectory() as folder:
        task = client.task([(batch.inputs, batch.target) for batch in batches], epochs=2, callbacks=[cut])
        plan = client.plan(task)
        with pytest.raises(hf.TrainError):
            hf.train([task], client.machine, plan=plan, checkpoint=folder, every=1)
        report = hf.train([task], client.machine, plan=plan, checkpoint=folder, every=1)
    losses = report["task"].losses
    for epoch in range(2):
        walk.follow(batches, losses[3 * epoch : 3 * epoch + 3], {}, flushes=True)


def population(walk: Walk) -> hf.Population:
    assert isinstance(walk.client, Alike)
    return walk.client.pop


ACTS: dict[str, Callable[[Walk], None]] = {
    "step": step, "size": size, "some": some, "weights": weights, "stop": stop, "start": start, "put": put,
    "copy": copy_rows, "permute": permute, "compact": compact, "grow": grow, "rate": rate, "decay": decay,
    "deepcopy": deepcopy, "pickle": pickled, "save": save, "state dict": state_dict, "convert": convert,
    "freeze": freeze, "freeze one": freeze_one, "cast": cast, "write": write, "mode": mode, "hook": hook,
    "poison": poison, "thaw": thaw, "overflow": overflow, "evaluate": evaluate, "best": best, "average": average,
    "leave": leave, "interrupt": interrupt,
}  # fmt: skip
