"""Members over ranks, and arrays under PyTorch's distributed wrappers: two processes give the results of one."""

from __future__ import annotations

import tempfile
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, multiprocessing, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import hfusion as hf


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with ranks(2) as started:
        yield started


@pytest.mark.parametrize(("members", "world"), [(1, 1), (5, 1), (5, 2), (5, 5), (16, 3), (1000, 7)])
def test_rows_are_all_members_once_and_balanced(members: int, world: int) -> None:
    parts = [list(range(members))[hf.rows(members, rank, world)] for rank in range(world)]
    assert [row for part in parts for row in part] == list(range(members))
    assert max(map(len, parts)) - min(map(len, parts)) <= 1
    assert min(map(len, parts)) >= 1


def test_rows_of_torchrun(monkeypatch: pytest.MonkeyPatch) -> None:
    assert hf.rows(4) == slice(0, 4)
    monkeypatch.setenv("RANK", "1")
    monkeypatch.setenv("WORLD_SIZE", "3")
    assert hf.rows(4) == slice(2, 3)


def test_one_process_gathers_what_it_has() -> None:
    values = torch.randn(3)
    assert hf.gather_rows(values) is values


def mlp(seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 3)).double()


def data() -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(6, 8, 4, dtype=torch.double, generator=generator), torch.randint(3, (6, 8), generator=generator)


def trained(rates: list[float], seeds: Sequence[int]) -> tuple[hf.FusedModule, Tensor]:
    fused = hf.fuse([mlp(seed) for seed in seeds])
    opt = hf.optim.Adam(fused.parameters(), lr=rates)
    step = hf.train_step(fused, F.cross_entropy, opt, compile=False)
    return fused, torch.stack([step(x, y) for x, y in zip(*data(), strict=True)])


RATES = [1e-2, 3e-3, 1e-3, 3e-2, 1e-4]


def own_rows() -> Any:
    row_slice = hf.rows(5)
    _, losses = trained(RATES[row_slice], range(5)[row_slice])
    everybody = hf.gather_rows(losses.T.contiguous())
    try:
        hf.gather_rows(torch.zeros(2, 3 + row_slice.start))
    except ValueError as error:
        message = str(error)
    return everybody.tolist(), message


def test_members_over_two_ranks_are_those_of_one(two: Ranks) -> None:
    _, losses = trained(RATES, range(5))
    for gathered, message in two(own_rows):
        torch.testing.assert_close(torch.tensor(gathered, dtype=torch.double), losses.T, rtol=1e-9, atol=0)
        assert message.startswith("gather_rows got rank 0: [2, 3] torch.float32, rank 1: [2, 6] torch.float32")


class Branching(nn.Module):
    """Has a parameter that no forward uses, and a buffer."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.used, self.unused = nn.Linear(4, 3).double(), nn.Linear(4, 3).double()
        self.register_buffer("count", torch.zeros((), dtype=torch.double))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.used(x)


def data_parallel(kind: str, rank: int, world: int) -> Any:
    """Half of every minibatch for each of two ranks; all of it in one process."""
    models = [Branching(seed) for seed in range(5)] if kind == "unused" else [mlp(seed).eval() for seed in range(5)]
    fused = hf.fuse(models)
    wrapped = DistributedDataParallel(fused, find_unused_parameters=kind == "unused") if world > 1 else fused
    opt = hf.optim.Adam(fused.parameters(), lr=RATES)
    if world > 1:
        with pytest.raises(ValueError, match="train_step got DistributedDataParallel"):
            hf.train_step(wrapped, F.cross_entropy, opt, compile=True)
    loss = hf.per_model(F.cross_entropy)
    for x, y in zip(*data(), strict=True):
        opt.zero_grad()
        losses = loss(wrapped(x.chunk(world)[rank]), y.chunk(world)[rank])
        losses.sum().backward()
        opt.step()
    return {name: value.tolist() for name, value in fused.state_dict().items()}


def on_half(kind: str) -> Any:
    return data_parallel(kind, torch.distributed.get_rank(), 2)


@pytest.mark.parametrize("kind", ["used", "unused"])
def test_an_array_under_distributed_data_parallel(kind: str, two: Ranks) -> None:
    alone = data_parallel(kind, 0, 1)
    for state in two(on_half, kind):
        for name, value in alone.items():
            torch.testing.assert_close(torch.tensor(state[name]), torch.tensor(value), rtol=1e-9, atol=1e-12, msg=name)


class Headed(nn.Module):
    """A base that all members have, frozen, and a head of each one's own."""

    def __init__(self, base: nn.Module, seed: int) -> None:
        super().__init__()
        self.base = base
        torch.manual_seed(seed)
        self.adapter = nn.Linear(4, 4).double()
        self.head = nn.Linear(8, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        # The gradient of the adapter flows through the base.
        return self.head(self.base(self.adapter(x)))


def on_sharded_base(world: int) -> Any:
    """Members' own parameters after some steps, in order; and the share of the base that this rank holds then."""
    torch.manual_seed(7)
    base = nn.Sequential(nn.Linear(4, 16), nn.Tanh(), nn.Linear(16, 8)).double().requires_grad_(False)
    row_slice = slice(None) if world == 1 else hf.rows(5)
    fused = hf.fuse([Headed(base, seed) for seed in range(5)[row_slice]])
    trained_params = [param for param in fused.parameters() if param.requires_grad]
    whole = sum(param.numel() for param in fused.base.parameters())
    if world > 1:
        fully_shard(fused, mesh=init_device_mesh("cpu", (world,)), ignored_params=set(trained_params))
    opt = hf.optim.Adam(trained_params, lr=RATES[row_slice])
    step = hf.train_step(fused, F.cross_entropy, opt, compile=True)
    for x, y in zip(*data(), strict=True):
        step(x, y)
    held = sum(getattr(param, "to_local", lambda param=param: param)().numel() for param in fused.base.parameters())
    stacks = {name: param for name, param in fused.named_parameters() if param.requires_grad}
    return [{name: stack[row].tolist() for name, stack in stacks.items()} for row in range(len(fused))], held / whole


def test_a_frozen_base_in_pieces_on_two_ranks(two: Ranks) -> None:
    alone, _ = on_sharded_base(1)
    results = two(on_sharded_base, 2)
    assert [held for _, held in results] == [0.5, 0.5]
    for actual, expected in zip([member for rank_members, _ in results for member in rank_members], alone, strict=True):
        for name, value in expected.items():
            torch.testing.assert_close(torch.tensor(actual[name]), torch.tensor(value), rtol=1e-9, atol=1e-12, msg=name)


def living(rows: slice) -> hf.Population:
    params = RATES[rows]
    return hf.Population(
        [mlp(seed) for seed in range(5)[rows]],
        optimizer=lambda parameters: hf.optim.Adam(parameters, lr=params),
        loss=F.cross_entropy,
        scheduler=lambda opt: torch.optim.lr_scheduler.StepLR(opt, 2, 0.5),
        scaler=hf.optim.GradScaler(),
        clip_norm=[1.0, 2.0, 3.0, 4.0, 5.0][rows],
        tags=[f"member {row}" for row in range(5)[rows]],
        compile=False,
    )


def exploited(world: int) -> Any:
    """Members 0 and 4 change places, 3 becomes 1, and 2 what 4 was; in between and after they train."""
    row_slice = slice(0, 5) if world == 1 else hf.rows(5)
    pop = living(row_slice)
    for turn, (x, y) in enumerate(zip(*data(), strict=True)):
        pop.step(x, y)
        pop.scheduler.step()
        if turn == 2:
            pop.scaler.load_state_dict(pop.scaler.state_dict() | {"scale": 2.0 ** torch.arange(5.0)[row_slice]})
            hf.copy_rows(pop, [0, 4, 1, 4], [4, 0, 3, 2])
    state = pop.fused.state_dict() | pop.scaler.state_dict()
    stacks = {name: value.tolist() for name, value in state.items()} | {"keys": pop.array.table["key"].tolist()}
    rates, message = pop.hparams["lr"].tolist(), ""
    if world > 1:
        pop.stop(0)
        try:
            hf.copy_rows(pop, 0, 4)
        except ValueError as error:
            message = str(error)
    lineage = [str(event) for event in pop.lineage if event.what == "copy"]
    return stacks, rates, pop.ages.tolist(), lineage, message


def test_members_are_copied_from_rank_to_rank(two: Ranks) -> None:
    stacks, rates, _, lineage, _ = exploited(1)
    first, second = two(exploited, 2)
    for name, value in stacks.items():
        actual = torch.tensor(first[0][name] + second[0][name])
        torch.testing.assert_close(actual, torch.tensor(value), rtol=1e-9, atol=1e-12, msg=name)
    assert first[1] + second[1] == pytest.approx(rates, rel=1e-12)
    assert second[2] == [0, 6]
    assert sorted(first[3] + second[3]) == sorted(lineage)
    assert (first[4], second[4]) == ("", "row 0 of rank 0 is free: copy a healthy member")


# Processes that communicate by gloo, for all tests of a module: each call runs on all of them.
# Seconds; a rank that waits longer for another never gets what it waits for.
_PATIENCE = 240.0


class Ranks:
    """Calls functions on all ranks."""

    def __init__(self, pipes: list[Connection]) -> None:
        self._pipes = pipes

    def __call__(self, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Return the result of each rank, no tensors. Raises AssertionError with the traceback of a failed rank."""
        for pipe in self._pipes:
            pipe.send((function, args))
        answers = [_answer(pipe) for pipe in self._pipes]
        for right, answer in answers:
            assert right, answer
        return [answer for _, answer in answers]


def _answer(pipe: Connection) -> tuple[bool, Any]:
    try:
        return pipe.recv() if pipe.poll(_PATIENCE) else (False, "no answer")
    except EOFError:
        return False, "the rank has died"


@contextmanager
def ranks(world: int) -> Iterator[Ranks]:
    context = multiprocessing.get_context("spawn")
    pipes = [context.Pipe() for _ in range(world)]
    with tempfile.TemporaryDirectory() as folder:
        store = Path(folder, "store")
        started = [
            context.Process(target=_rank, args=(rank, world, store, child_end), daemon=True)
            for rank, (_, child_end) in enumerate(pipes)
        ]
        for process in started:
            process.start()
        # What a rank that has died held of a pipe is closed then.
        for _, child_end in pipes:
            child_end.close()
        try:
            yield Ranks([parent_end for parent_end, _ in pipes])
        finally:
            for parent_end, _ in pipes:
                with suppress(OSError):
                    parent_end.send(None)
            for process in started:
                process.join(20)
                process.kill()


def _rank(rank: int, world: int, store: Path, pipe: Connection) -> None:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=world)
    while (job := pipe.recv()) is not None:
        function, args = job
        torch.manual_seed(0)
        try:
            answer = True, function(*args)
        except BaseException:
            answer = False, traceback.format_exc()
        pipe.send(answer)
    dist.destroy_process_group()
