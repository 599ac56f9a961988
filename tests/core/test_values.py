"""Values of programs, files of runs, copies of models, and gradients that are none."""

from __future__ import annotations

import ast
import copy
import io
import os
import pickle
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import hfusion as hf
from hfusion.capture.export import capture
from hfusion.core.calls import Ragged
from hfusion.core.claimed_folder import ClaimedFolder, remove_abandoned, run_folder, temporary_folder
from hfusion.core.event_log import EventLog, first_line, read_events
from hfusion.core.fingerprint import read_state
from hfusion.core.gradient_usage import absent_rows
from hfusion.core.guards import Assumptions, Guards
from hfusion.core.member_random import MemberSeeds
from hfusion.core.membership import DifferingMark
from tests.alone import Branch, Member, Own, assert_trained_alone, call, close, compare_call, compare_tensors, normal
from tests.forwards.outside import READS
from tests.forwards.table import Sevenfold, branch, linear, module, parameter
from tests.oracle import RELATIVE


# The fingerprint of the state that a function reads changes with each value that it reads.
@pytest.mark.parametrize("kind", READS)
def test_another_value_gives_another_state(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TAU", raising=False)
    read, put = READS[kind]
    put(1.0)
    before = read_state(read)
    put(0.5)
    # None: more than can be compared, so that nothing is reused.
    assert before is None or read_state(read) != before
    put(1.0)
    assert read_state(read) == before


# Assumptions of a trace about sizes, checked on numbers and on another trace's symbols.
class Halves(nn.Module):
    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        return x.view(x.shape[0], 2, -1).sum(1) + (y if y.shape[0] > 4 else y * 2).mean(0)


@pytest.mark.parametrize(
    ("shapes", "holds"),
    [
        ([(3, 8), (6, 4)], True),
        ([(2, 10), (7, 5)], True),
        ([(2, 9), (7, 5)], False),
        ([(2, 10), (7, 4)], False),
        ([(2, 10), (3, 5)], False),
        ([(1, 10), (7, 5)], False),
        ([(2, 10), (0, 5)], False),
    ],
)
def test_sizes(shapes: list[tuple[int, ...]], holds: bool) -> None:
    captured = capture(Halves(), (torch.ones(3, 8), torch.ones(6, 4)), {}, dims=[{1}, {1}])
    assert captured.guards(shapes) is holds
    assert isinstance(captured.guards, Guards)
    assumed = captured.guards.assumptions()
    assert assumed(shapes) is holds
    # They are plain values.
    assert Assumptions(*ast.literal_eval(repr((assumed.sizes, assumed.code)))) == assumed


# Tensors of different sizes, one per member, and what may be done with them.
def ragged(*sizes: int) -> Ragged:
    return Ragged([torch.arange(size * 2.0).view(size, 2) for size in sizes])


def test_it_is_a_sequence_of_the_members_tensors() -> None:
    y = ragged(3, 1)
    assert len(y) == 2
    assert y.sizes == (3, 1)
    assert [tensor.shape[0] for tensor in y] == [3, 1]
    assert y[-1] is y[1]
    assert y[:1].sizes == (3,)
    assert repr(y) == "Ragged(2 members: float32 [3, 2], [1, 2])"
    assert y.map(torch.Tensor.double)[0].dtype == torch.float64


@pytest.mark.parametrize("copied", [copy.copy, copy.deepcopy, lambda y: pickle.loads(pickle.dumps(y))])
def test_copies_hold_the_same(copied: Any) -> None:
    y = ragged(3, 1)
    again = copied(y)
    assert again is not y
    assert all(torch.equal(a, b) for a, b in zip(y, again, strict=True))


def test_stacked_gives_it_for_batches_of_different_sizes() -> None:
    xs = [torch.zeros(3, 2), torch.zeros(5, 2)]
    assert isinstance(hf.stacked(xs), Ragged)
    assert hf.stacked(hf.stacked(xs)).sizes == (3, 5)
    nested = hf.stacked([{"x": x, "mask": (x[:, 0], 1)} for x in xs])
    assert nested["x"].sizes == nested["mask"][0].sizes == (3, 5)
    assert nested["mask"][1] == 1
    widths = hf.stacked([torch.zeros(3, 2), torch.zeros(3, 4)])
    assert isinstance(widths, Ragged)
    assert [list(tensor.shape) for tensor in widths] == [[3, 2], [3, 4]]


# Random numbers from seeds of the members: theirs alone, and as random as they should be.
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64], ids=str)


def seeds(members: int) -> torch.Tensor:
    return torch.empty(members, dtype=torch.int64).random_(generator=torch.Generator().manual_seed(0))


@DTYPES
def test_the_numbers_of_a_member_are_its_own(dtype: torch.dtype) -> None:
    whole, row = MemberSeeds(seeds(5)), MemberSeeds(seeds(5)[3:4])
    for shape in ((2, 3), (7,)):
        draws = whole.uniform((5, *shape), dtype), row.uniform((1, *shape), dtype)
        assert torch.equal(draws[0][3:4], draws[1])
        assert draws[0].dtype is dtype
    assert not torch.equal(whole.uniform((5, 4), dtype), whole.uniform((5, 4), dtype))
    assert len(whole.uniform((5, 99), dtype)[:, 0].unique()) == 5


# Arrays in several threads: each trains as alone, and what else the process does goes on meanwhile.


def train(rounds: int) -> None:
    for _ in range(rounds):
        models = [nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 1)).double() for _ in range(2)]
        x, y = normal(5, 4), normal(5, 1)
        assert_trained_alone(models, lambda out, y: F.mse_loss(out, y), [(x, y)] * 2)
        hf.fuse([Branch(4, 1).double(), Branch(4, 1).double()])(x)


def chatter(stop: threading.Event) -> int:
    rounds = 0
    while not stop.wait(0.005):
        x = torch.ones(2, requires_grad=True)
        print(x)
        (grad,) = torch.autograd.grad(Sevenfold.apply(x).sum(), x)
        assert (grad == 7).all()
        nn.Linear(2, 2)(x.detach())
        rounds += 1
    return rounds


def test_threads_that_capture_and_one_that_talks(monkeypatch: pytest.MonkeyPatch) -> None:
    stop, out = threading.Event(), io.StringIO()
    monkeypatch.setattr(sys, "stdout", out)
    before = torch.autograd.Function.__dict__["apply"], nn.Module.__call__, sys.stdout, sys.stderr
    with ThreadPoolExecutor(3) as pool:
        talker = pool.submit(chatter, stop)
        try:
            list(pool.map(train, (2, 2)))
        finally:
            stop.set()
    assert (torch.autograd.Function.__dict__["apply"], nn.Module.__call__, sys.stdout, sys.stderr) == before
    assert not torch._ops.mode_stack_state_for_pre_dispatch().count(), "an export of another thread goes on here"
    assert talker.result() == out.getvalue().count("tensor") > 0


# Files of runs: logs, folders that processes claim, and what is drawn in a terminal.
def test_only_folders_of_ended_processes_are_removed(tmp_path: Path) -> None:
    claimed = ClaimedFolder(tmp_path, "run-")
    for name in ("run-left", "run-empty", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "run-left" / "inside").write_bytes(b"x")
    (tmp_path / "run-file").touch()
    remove_abandoned(tmp_path, "run-")
    assert {path.name for path in tmp_path.iterdir()} == {claimed.path.name, "other", "run-file"}
    claimed.drop()
    remove_abandoned(tmp_path, "run-")
    assert not claimed.path.exists()


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_links_and_folders_of_other_users_are_not_removed(tmp_path: Path) -> None:
    """In a folder shared by many users, a user who may remove the files of others does not."""
    tmp_path.chmod(0o1777)
    elsewhere, foreign, linked = (tmp_path / name for name in ("elsewhere", "run-theirs", "run-link"))
    for path in (elsewhere, foreign):
        path.mkdir()
    os.chown(foreign, 12345, -1)
    linked.symlink_to(elsewhere)
    os.mkfifo(tmp_path / "run-pipe")
    remove_abandoned(tmp_path, "run-")
    assert {path.name for path in tmp_path.iterdir()} == {"elsewhere", "run-theirs", "run-link", "run-pipe"}


KILLED = """
import os, signal
from hfusion.core.claimed_folder import run_folder
run_folder().path.joinpath("data").write_bytes(b"x")
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_the_next_run_removes_the_temporary_files_of_a_killed_one(tmp_path: Path) -> None:
    """Files of a run that goes on stay."""
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    done = subprocess.run([sys.executable, "-c", KILLED], env=environment)
    assert done.returncode == -signal.SIGKILL
    (abandoned,) = tmp_path.iterdir()
    assert (abandoned / "data").exists()
    first = run_folder(tmp_path)
    with temporary_folder(tmp_path) as second:
        assert {*tmp_path.iterdir()} == {first.path, second}
    first.remove()
    assert not [*tmp_path.iterdir()]


# Logs of runs: what is written is read, whatever happens to the files between.
def test_written_events_are_read_back(tmp_path: Path) -> None:
    error = ValueError('a "quoted" line = one\nand another')
    with EventLog(tmp_path, "train", arrays=1) as log:
        log.array("../a b", "failed", {"device": "cpu:0", "loss": "0.5 nan", "error": first_line(error), "gone": None})
        log.trial(3, "started", {"epoch": "0/4", "name": "größer"})
    first, last = read_events(tmp_path / "logs/run.log")
    assert (first.event, first.values["kind"], first.values["arrays"]) == ("started", "train", "1")
    assert (last.event, last.values["process"]) == ("finished", str(os.getpid()))
    (event,) = read_events(tmp_path / "logs/arrays/%2E.%2Fa%20b.log")
    assert event.time.tzinfo is not None
    values = {key: text for key, text in event.values.items() if key not in ("process", "node")}
    assert values == {"device": "cpu:0", "loss": "0.5 nan", "error": 'ValueError: a "quoted" line = one'}
    assert read_events(tmp_path / "logs/trials/3.log")[0].values["name"] == "größer"
    assert (tmp_path / "logs/trials/3.log").read_bytes().isascii()


@pytest.mark.parametrize(
    ("error", "event"), [(ValueError("no"), "failed"), (KeyboardInterrupt(), "interrupted"), (None, "finished")]
)
def test_how_a_run_ended(error: BaseException | None, event: str, tmp_path: Path) -> None:
    def run() -> None:
        with EventLog(tmp_path, "train"):
            if error is not None:
                raise error

    if error is None:
        run()
    else:
        with pytest.raises(type(error)):
            run()
    last = read_events(tmp_path / "logs/run.log")[-1]
    assert last.event == event
    assert last.values.get("error") == (None if error is None else first_line(error))


def test_a_torn_line_and_damage_cost_their_own_lines(tmp_path: Path) -> None:
    path = tmp_path / "logs/arrays/a.log"
    EventLog(tmp_path, "train").array("a", "started", {})
    with path.open("ab") as file:
        file.write(b"2026-01-01T00:00:00.000Z evaluated loss=\xff\nno line\n2026-13-01T00:00:00Z saved\n2026-01-01T0")
    assert [event.event for event in read_events(path)] == ["started", "evaluated"]
    log = EventLog(tmp_path, "train")
    log.array("a", "resumed", {})
    log.array("a", "saved", {})
    assert [event.event for event in read_events(path)] == ["started", "evaluated", "resumed", "saved"]
    assert read_events(tmp_path / "logs/arrays/b.log") == []


def test_a_run_goes_on_where_no_line_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "logs").write_text("a file of the user's")
    log = EventLog(tmp_path, "train")
    with pytest.warns(UserWarning, match="the run goes on without logs"):
        log.__enter__()
    # Warnings are errors: there is no other.
    log.array("a", "started", {})
    assert not log.writes
    with EventLog(None, "train") as log:
        log.array("a", "started", {})
    assert [path.name for path in tmp_path.iterdir()] == ["logs"]


# Classes that copy themselves, attributes of parameters: arrays train as alone.
# Classes that copy themselves: arrays, populations and tasks train them as alone, whatever their copies lose.
class Net(nn.Module):
    def __init__(self, scale: float = 1.0) -> None:
        super().__init__()
        self.fc, self.norm, self.scales = nn.Linear(4, 3), nn.BatchNorm1d(3), {"out": scale}
        self.scale = scale

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.norm(self.fc(x)) * self.scale * self.scales["out"]
        return y


class LoadsState(Net):
    def __deepcopy__(self, memo: Any) -> Net:
        copied = type(self)()
        copied.load_state_dict(self.state_dict())
        return copied


class SharesParameters(Net):
    def __deepcopy__(self, memo: Any) -> Net:
        copied = type(self)(self.scale)
        copied.fc = self.fc
        return copied


class LosesNumbers(Net):
    def __deepcopy__(self, memo: Any) -> Net:
        copied = type(self)()
        copied.fc, copied.norm = copy.deepcopy(self.fc, memo), copy.deepcopy(self.norm, memo)
        return copied


class Outer(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.inner, self.head = LoadsState(scale), nn.Linear(3, 3)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.head(self.inner(x))
        return y


KINDS = (LoadsState, SharesParameters, LosesNumbers, Outer)
BATCHES = [(normal(6, 4), normal(6, 3))] * 2


def trained(models: list[nn.Module], way: str) -> list[nn.Module]:
    """Train by hfusion for two steps, and return the members."""
    sgd = partial(hf.optim.SGD, lr=0.1)
    if way == "hf.train":
        return list(hf.train([hf.Task(models, F.mse_loss, sgd, BATCHES, name="task")])["task"].models)
    pop = hf.Population(models, optimizer=sgd, loss=F.mse_loss)
    for batch in BATCHES:
        pop.step(*batch)
    if way == "stop":
        return pop.stop(list(range(len(models))))
    return (copy.deepcopy(pop.fused) if way == "deepcopy" else pop.fused).unfuse()


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("way", ["unfuse", "deepcopy", "hf.train", "stop"])
@pytest.mark.parametrize("kind", KINDS)
def test_trained_as_alone(kind: Callable[[float], nn.Module], way: str, members: int) -> None:
    models = [kind(2.0).double() for _ in range(members)]
    # Their own copies lose what these tests are about.
    alone = [pickle.loads(pickle.dumps(model)) for model in models]
    x = BATCHES[0][0]
    for model, expected in zip(trained(models, way), alone, strict=True):
        Member(expected, torch.optim.SGD, F.mse_loss, Own(0.1)).epoch(BATCHES)
        torch.testing.assert_close(model.state_dict(), expected.state_dict(), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(model.eval()(x), expected.eval()(x), rtol=1e-9, atol=1e-12)


# Attributes that users set on parameters stay: on stacks, on members, and on copies of them.
class Scale(nn.Parameter):
    """A kind of parameter that an optimizer has to distinguish from others."""


class InfShape:
    """Like the one of mup: equal by its attributes, and a separate object in every model."""

    def __init__(self, base: int) -> None:
        self.base = base


class Marked(nn.Module):
    """``gain`` is read by forward if ``reads``; ``addresses``: it also asks for the memory below a tensor."""

    def __init__(self, gain: float, reads: bool, addresses: bool = False) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 3).double()
        self.scale = Scale(torch.rand(3).double())
        self.reads = reads
        self.addresses = addresses
        self.linear.weight.infshape = InfShape(4)  # type: ignore[assignment]
        self.linear.bias._optim = {"lr": 0.1, "weight_decay": 0.0}  # type: ignore[assignment]
        self.scale.no_decay = True  # type: ignore[attr-defined]
        self.scale.gain = gain  # type: ignore[attr-defined]
        self.scale.partner = self.linear.weight if not reads else None  # type: ignore[attr-defined]

    def forward(self, x: Tensor) -> Tensor:
        if self.addresses:
            x.detach().untyped_storage()
        return self.linear(x) * self.scale * (self.scale.gain if self.reads else 1.0)  # type: ignore[attr-defined]


def members(gains: Sequence[float], reads: bool, addresses: bool = False) -> list[Any]:
    return [Marked(gain, reads, addresses) for gain in gains]


@pytest.mark.parametrize(("reads", "addresses"), [(True, False), (True, True), (False, False)])
@pytest.mark.parametrize("gains", [(2.0, 2.0, 2.0), (2.0, 3.0, 2.0)], ids=["equal", "different"])
def test_an_array_of_marked_parameters_equals_its_members(gains: Sequence[float], reads: bool, addresses: bool) -> None:
    models = members(gains, reads, addresses)
    x, target = normal(4, 3), normal(4, 3)
    fused = assert_trained_alone(models, F.mse_loss, [(x, target)] * 3, optimizer="Adam")._fused
    for view, whole, model in zip(fused, fused.unfuse(), models, strict=True):
        for member in (view, whole):
            torch.testing.assert_close(member(x), model(x), rtol=RELATIVE, atol=1e-12)
    assert torch.equal(fused.eval()(x)[1], fused[1](x))


@pytest.mark.parametrize("gains", [(2.0, 2.0), (2.0, 3.0)], ids=["equal", "different"])
def test_marks_and_classes_are_on_stacks_views_and_copies(gains: Sequence[float]) -> None:
    fused: Any = hf.fuse(members(gains, False))
    for array in (fused, fused[0:2], copy.deepcopy(fused), fused.to(torch.float32)):
        assert type(array.scale) is Scale
        assert array.scale.no_decay is True
        assert array.linear.bias._optim == {"lr": 0.1, "weight_decay": 0.0}
        assert array.linear.weight.infshape.base == 4
        for views in (list(array), array.unfuse()):
            assert [view.scale.gain for view in views] == list(gains)
            assert all(isinstance(view.scale, Scale) for view in views)
            assert all(view.scale.partner is view.linear.weight for view in views)
    # torch's pickle forgets classes of parameters.
    again: Any = pickle.loads(pickle.dumps(fused))
    assert [view.scale.gain for view in again] == list(gains)


USES: dict[str, Callable[[Any], Any]] = {
    "bool": bool,
    "comparison": lambda mark: mark == 1.0,
    "attribute": lambda mark: mark.base,
}


@pytest.mark.parametrize("use", USES.values(), ids=USES)
def test_a_mark_on_which_members_differ_is_no_value(use: Callable[[Any], Any]) -> None:
    fused: Any = hf.fuse(members([1.0, 2.0], False))
    message = r"different values of 'gain' on their parameter 'scale'.*hf.optim.groups\(fused, rule\)"
    with pytest.raises(hf.FusionError, match=message):
        use(fused.scale.gain)
    assert "different values" in repr(fused.scale.gain)
    # What refers to a part of a model is another one in each.
    assert isinstance(fused.scale.partner, DifferingMark)


# A parameter that a member has not used in a step stays as it is for that member, with its moments and counts.
MEMBERS = 3


def by_key(self: Any, x: Tensor) -> Tensor:
    """Uses ``a``, ``b`` or neither, by the sign of a value."""
    key = float(x.detach()[0, 0])
    if key > 1:
        return self.a(x)
    return self.b(x) if key > 0 else x


def looped_twice(self: Any, x: Tensor) -> Tensor:
    """Loops within what is batched, twice, with a parameter that is used before and after."""
    h = self.branch(x) + self.first(x).tanh()
    return self.last(self.branch(h * self.scale) * self.scale)


def left(self: Any, h: Tensor, x: Tensor) -> Tensor:
    """Gives its input, or a constant that does not depend on it."""
    return h * self.weight if float(x[0, 0]) > 0 else torch.ones_like(h)


def before_an_exit(self: Any, x: Tensor) -> Tensor:
    """Layers before an exit are unused too, batched or looped, except for the part that bypasses the exit."""
    h = self.branch(self.first(x)).relu()
    h = self.conv(h.unsqueeze(-1)).squeeze(-1)
    return self.last(self.exit(h + self.around(x).detach(), x)) + self.around(x)


def two_results(self: Any, x: Tensor) -> tuple[Tensor, Tensor]:
    """Of which a loss may use one."""
    h = self.first(x)
    return self.exit(h, x), self.aux(h)


def after_a_loop(self: Any, x: Tensor) -> Tensor:
    """A looped layer before an exit, which gets no gradient from some members."""
    return self.last(self.exit(self.first(x), x))


branching = module(by_key, a=linear, b=linear)
looped = module(lambda self, x: self.fc(branch(x)), fc=linear)
leaving = module(left, weight=parameter())
# All of it is looped, and a part that no member uses.
Alone = module(by_key, a=linear, b=linear, unused=linear)
Inside = module(looped_twice, branch=branching, first=linear, last=linear, scale=parameter())


def keyed_batch(*keys: float) -> Tensor:
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
        self.optimizer = getattr(hf.optim, name)(self.fused.parameters(), lr=RATES, **options)
        self.alone = [
            getattr(torch.optim, name)(model.parameters(), lr=rate, **options)
            for model, rate in zip(self.models, RATES, strict=True)
        ]

    def backward(self, keys: Sequence[float]) -> None:
        compare_call(self.fused, self.models, call(hf.stacked(keyed_batch(*keys))))

    def step(self) -> None:
        for optimizer in (self.optimizer, *self.alone):
            optimizer.step()

    def check(self) -> None:
        """Gradients that are none alone, parameters and state."""
        compare_tensors(self.fused, self.models, "pair")
        for key, param in self.fused.named_parameters():
            parameters = [model.get_parameter(key) for model in self.models]
            rows = None if param.grad is None else absent_rows(param.grad)
            absent = [param.grad is None] * MEMBERS if rows is None else rows.tolist()
            assert absent == [p.grad is None for p in parameters], key
            for member, optimizer in enumerate(self.alone):
                for kind, value in optimizer.state.get(parameters[member], {}).items():
                    if isinstance(value, Tensor):
                        ours = self.optimizer.state[param][kind][member]
                        torch.testing.assert_close(ours, value, rtol=1e-9, atol=1e-11, check_dtype=False)
        for member, saved in enumerate(self.optimizer.unfuse()):
            alone = self.alone[member].state_dict()["state"]
            begun = {k for k, entry in alone.items() if any(isinstance(v, Tensor) for v in entry.values())}
            assert set(saved["state"]) == begun


@pytest.mark.parametrize(("name", "options"), OPTIMIZERS.values(), ids=OPTIMIZERS)
@pytest.mark.parametrize("make", [Alone, Inside])
def test_equals_alone(make: Callable[[], nn.Module], name: str, options: dict[str, Any]) -> None:
    pair = Pair(make, name, options)
    for keys in KEYS:
        pair.backward(keys)
        pair.check()
        pair.step()
        pair.check()


LAYERS = {"first": linear, "exit": leaving, "last": linear}
MODELS: dict[str, Callable[[], nn.Module]] = {
    "before": module(before_an_exit, branch=branching, around=linear, conv=lambda: nn.Conv1d(4, 4, 1), **LAYERS),
    "both results": module(two_results, aux=linear, **LAYERS),
    "after a loop": module(after_a_loop, **LAYERS | {"first": looped}),
}


@pytest.mark.parametrize("make", MODELS.values(), ids=MODELS)
def test_of_other_models(make: Callable[[], nn.Module]) -> None:
    pair = Pair(make, "AdamW", {})
    for keys in KEYS:
        pair.backward(keys)
        pair.step()
        pair.check()


def test_clipping_counts_what_is_there() -> None:
    for order in (2.0, float("inf"), -float("inf"), 0.5, 0.0):
        pair = Pair(Alone, "SGD", {})
        pair.backward((2.0, 0.5, -1.0))
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
        xs = keyed_batch(*keys)
        close(fused(hf.stacked(xs)), [model(x) for model, x in zip(models, xs, strict=True)], "outputs")
