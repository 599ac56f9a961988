from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from time import sleep

import pytest
import torch
from torch import nn

import hfusion as hf
from hfusion.core.errors import SpillError
from hfusion.core.program import Kind, Slot
from hfusion.runtime.copying import copy_now
from hfusion.runtime.task_state import STATE, Holding, TaskTensors, holdings
from hfusion.schedule.actions import Section

CPU = torch.device("cpu")
WEIGHTS, OPTIMIZER, GRADIENTS = ALL = STATE


def slot(name: str, kind: Kind = Kind.PARAMETER) -> Slot:
    return Slot(kind, name)


def test_a_tensor_belongs_to_the_first_shard_that_uses_it() -> None:
    keys = [
        [slot("a"), slot("c", Kind.CONSTANT), slot("buffer", Kind.BUFFER)],
        [slot("b"), slot("a")],
        [slot("tied to b"), slot("b"), slot("buffer", Kind.BUFFER)],
    ]
    names = {"a": "a", "b": "b", "tied to b": "b", "buffer": "buffer"}
    assert holdings(keys, names, frozenset("b")) == (
        Holding(("a", "buffer"), {}, ()),
        Holding(("b",), {"a": 0}, ("b",)),
        Holding((), {"b": 1, "buffer": 0}, ()),
    )


class Model(nn.Module):
    """A frozen weight, a trained one that both shards use, one of the second shard, a buffer of both."""

    def __init__(self) -> None:
        super().__init__()
        self.frozen = nn.Parameter(torch.randn(3), requires_grad=False)
        self.tied = nn.Parameter(torch.randn(2, 3))
        self.last = nn.Parameter(torch.randn(5))
        self.register_buffer("count", torch.zeros(2))


SHARDS = (
    Holding(("frozen", "tied", "count"), {}, ("tied",)),
    Holding(("last",), {"tied": 0, "count": 0}, ("last",)),
)


class Subject:
    """An array's state in two shards, and the same array trained by the optimizer alone."""

    def __init__(self, folder: Path | None, *, together: bool = False, carried: bool = True) -> None:
        self.array, self.alone = (hf.fuse(self._models(), verify=False) for _ in range(2))
        self.optimizer, self.plain = (
            hf.optim.Adam([p for p in array.parameters() if p.requires_grad], lr=0.1)
            for array in (self.array, self.alone)
        )
        for optimizer in (self.optimizer, self.plain):
            optimizer.initialise()
        self.tensors = dict(self.array.named_parameters()) | dict(self.array.named_buffers())
        files = [None if folder is None else folder / f"{index}.safetensors" for index in range(2)]
        self.state = TaskTensors(
            self.tensors, SHARDS, self.optimizer, files, pinned=False, carried=carried, together=together
        )

    @staticmethod
    def _models() -> list[Model]:
        torch.manual_seed(0)
        return [Model() for _ in range(2)]

    def step(self, shard: int, names: list[str]) -> None:
        """One step with gradients of ones, in the shard and alone."""
        grads = {name: torch.ones_like(self.tensors[name]) for name in names}
        self.state.update(shard, {name: grad.clone() for name, grad in grads.items()})
        for name, grad in grads.items():
            self.alone.get_parameter(name).grad = grad
        self.plain.step()
        self.plain.zero_grad()

    def check(self) -> None:
        """The array and its optimizer are as those alone."""
        expected_state = self.alone.state_dict()
        for name, tensor in self.array.state_dict().items():
            assert torch.equal(tensor, expected_state[name]), name
        for name in ("tied", "last"):
            actual, expected = (
                optimizer.state[array.get_parameter(name)]
                for optimizer, array in ((self.optimizer, self.array), (self.plain, self.alone))
            )
            assert set(actual) == set(expected)
            assert all(torch.equal(actual[key], expected[key]) for key in expected)


def load(state: TaskTensors, shard: int, sections: tuple[Section, ...]) -> None:
    """Bring a shard to the device."""
    copy_now(state.load(shard, sections, CPU))
    state.loaded(shard)


def put_away(state: TaskTensors, shard: int) -> None:
    """Evict a shard, and write back what changed."""
    copy_now(state.evict(shard))
    state.mark_evicted(shard)


@pytest.fixture(params=["host", "disk"])
def subject(request: pytest.FixtureRequest, tmp_path: Path) -> Subject:
    return Subject(tmp_path if request.param == "disk" else None)


def test_at_home_the_array_lies_in_the_shards(subject: Subject) -> None:
    subject.check()
    state = subject.state
    assert state.order == ("tied", "last")
    assert [state.trains(name) for name in ("frozen", "tied", "count")] == [False, True, False]
    storages = {tensor.untyped_storage().data_ptr() for tensor in subject.array.state_dict().values()}
    assert len(storages) == 2
    # Every tensor begins at a multiple of 64 bytes: three of state and weights, then their optimizer state, gradients.
    assert sum(sum(home.layout.sizes) for home in state._homes) == 64 * ((1 + 1 + 1) + (2 + 1) + (1 + 2 + 1))


def test_an_update_is_written_back_when_the_shard_leaves(subject: Subject) -> None:
    before = subject.array.state_dict()["tied"].clone()
    load(subject.state, 0, ALL)
    subject.step(0, ["tied"])
    put_away(subject.state, 0)
    assert not torch.equal(subject.array.state_dict()["tied"], before)
    subject.check()
    load(subject.state, 1, ALL)
    assert torch.equal(subject.state.tensor(1, "tied"), subject.alone.get_parameter("tied"))
    subject.step(1, ["last"])
    put_away(subject.state, 1)
    subject.check()
    assert all(param.grad is None for param in subject.array.parameters())


def test_unchanged_tensors_are_not_written_back(subject: Subject) -> None:
    load(subject.state, 0, ALL)
    subject.state.tensor(0, "tied").zero_()
    put_away(subject.state, 0)
    subject.check()


def test_gradients_that_are_kept_outlive_the_visit(subject: Subject) -> None:
    state = subject.state
    load(state, 0, (WEIGHTS, GRADIENTS))
    state.gradient(0, "tied").fill_(3)
    state.keep_gradient(0, "tied")
    put_away(state, 0)
    load(state, 0, ALL)
    assert state.gradient(0, "tied").unique().tolist() == [3]
    put_away(state, 0)
    subject.check()


def test_a_borrowed_buffer_goes_home_at_once_and_is_fetched_again(subject: Subject) -> None:
    state = subject.state
    load(state, 0, (WEIGHTS,))
    load(state, 1, (WEIGHTS,))
    state.tensor(1, "count").fill_(5)
    state.wrote(1, ["count"])
    assert state.tensor(0, "count").unique().tolist() == [5]
    state.tensor(0, "count").add_(1)
    state.wrote(0, ["count"])
    assert state.tensor(1, "count").unique().tolist() == [5]
    state.refresh(1, ["count"])
    assert state.tensor(1, "count").unique().tolist() == [6]
    for shard in (1, 0):
        put_away(state, shard)
    assert subject.array.state_dict()["count"].unique().tolist() == [6]


def test_a_borrower_of_a_leaving_shard_waits_until_it_is_at_home(subject: Subject) -> None:
    state = subject.state
    for shard in range(2):
        load(state, shard, (WEIGHTS,))
    state.tensor(0, "count").fill_(5)
    state.wrote(0, ["count"])
    moves = state.evict(0)

    def arrive() -> None:
        sleep(0.05)
        copy_now(moves)
        state.mark_evicted(0)

    with ThreadPoolExecutor(1) as pool:
        pool.submit(arrive)
        state.refresh(1, ["count"])
    assert state.tensor(1, "count").unique().tolist() == [5]
    state.tensor(1, "count").fill_(6)
    state.wrote(1, ["count"])
    load(state, 0, (WEIGHTS,))
    assert state.tensor(0, "count").unique().tolist() == [6]


def test_together_a_shard_uses_anothers_tensors_where_they_are() -> None:
    subject = Subject(None, together=True)
    for shard in range(2):
        load(subject.state, shard, ALL)
    tied = subject.state.tensor(1, "tied")
    assert tied.data_ptr() == subject.state.tensor(0, "tied").data_ptr()
    subject.step(0, ["tied"])
    assert torch.equal(tied, subject.alone.get_parameter("tied"))


@pytest.mark.parametrize("loaded", [False, True])
def test_in_the_end_every_tensor_has_memory_of_its_own(subject: Subject, loaded: bool) -> None:
    load(subject.state, 0, ALL)
    subject.step(0, ["tied"])
    put_away(subject.state, 0)
    if loaded:
        load(subject.state, 1, ALL)
    subject.state.close()
    subject.check()
    entries = subject.optimizer.state.values()
    stacks = [value for entry in entries for key, value in entry.items() if key != "step"]
    assert stacks
    for tensor in (*subject.array.state_dict().values(), *stacks):
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
    for name in ("tied", "last"):
        for array, optimizer in ((subject.array, subject.optimizer), (subject.alone, subject.plain)):
            array.get_parameter(name).grad = torch.ones_like(array.get_parameter(name))
            optimizer.step()
            optimizer.zero_grad()
    subject.check()


def test_a_home_that_cannot_be_made_leaves_the_array_as_it_was(tmp_path: Path) -> None:
    array = hf.fuse(Subject._models(), verify=False)
    optimizer = hf.optim.SGD([p for p in array.parameters() if p.requires_grad], lr=0.1)
    optimizer.initialise()
    before = {name: tensor.clone() for name, tensor in array.state_dict().items()}
    tensors = dict(array.named_parameters()) | dict(array.named_buffers())
    files = [tmp_path / "0", tmp_path / "gone" / "1"]
    with pytest.raises(SpillError, match="cannot spill"):
        TaskTensors(tensors, SHARDS, optimizer, files, pinned=False, carried=False, together=False)
    for name, tensor in array.state_dict().items():
        assert torch.equal(tensor, before[name])
        assert tensor.untyped_storage().nbytes() == tensor.nbytes
