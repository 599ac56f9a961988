"""Checks on a simulated device beside runs of hf.train, ``python -m tests.simulated.pieces``."""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import partial
from itertools import product

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.errors import FusionError
from hfusion.tasks.train import LossQueue
from tests.simulated.device import install
from tests.simulated.queues import QUEUES
from tests.trained import EPOCHS, Way, adamw, batches, cross_entropy, fused, momentum, planned, task, wide

LOADER = batches(torch.float64, 3)
THERE = "sim:0"


def stepped(array: hf.FusedModule, optimizer: hf.optim.FusedOptimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    hf.per_model(cross_entropy)(array(x), y).sum().backward()
    optimizer.step()


def a_loaded_state_goes_on_wherever_its_numbers_lie() -> None:
    for make in (adamw, momentum):
        array, results = fused().to(THERE), []
        start = {name: tensor.clone() for name, tensor in array.state_dict().items()}
        for loaded in (False, True):
            array.load_state_dict(start)
            torch.manual_seed(0)
            optimizer = make(list(array.parameters()))
            for index, (x, y) in enumerate(LOADER):
                if loaded and index == 1:
                    state = optimizer.state_dict()
                    state["state"] = {
                        key: {name: value.to(THERE) for name, value in entry.items()}
                        for key, entry in state["state"].items()
                    }
                    optimizer = make(list(array.parameters()))
                    optimizer.load_state_dict(state)
                stepped(array, optimizer, x.to(THERE), y.to(THERE))
            results.append([tensor.cpu() for tensor in array.state_dict().values()])
        assert all(map(torch.equal, *results))


def an_array_that_moves_without_its_state_is_refused() -> None:
    array = fused()
    optimizer = adamw(list(array.parameters()))
    stepped(array, optimizer, *LOADER[0])
    array.to(THERE)
    with pytest.raises(FusionError, match="sim:0"):
        stepped(array, optimizer, *(tensor.to(THERE) for tensor in LOADER[1]))


def a_machine_knows_its_devices() -> None:
    machine = hf.Machine.detect()
    assert [device.device for device in machine.devices] == ["sim:0", "sim:1"]
    assert all(device.memory < 1 << 30 for device in machine.devices)


class Scaled(nn.Module):
    """With a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.out = nn.Linear(6, 8), nn.Linear(8, 8), nn.Linear(8, 3)

    def forward(self, x: Tensor) -> Tensor:
        h = torch.relu(self.first(x)) * torch.tensor([1.0, 2.0] * 4, dtype=x.dtype, device=x.device)
        return self.out(torch.tanh(self.second(h)) + x[:, :1])


def a_minibatch_keeps_the_host_waiting_for_nothing_but_the_ends_of_units() -> None:
    def count_waits(count: int, recipe: Way, shards: int, resident: bool) -> tuple[int, int]:
        """Return how often the host waited for a tensor, and how often it copied one to pinned memory."""
        task_to_train = task(fused(Scaled), recipe, batches(torch.float64, 1) * count)
        on = hf.Machine([hf.Device(THERE, memory="1GiB")])
        plan = planned([task_to_train], on, [shards], [resident])
        QUEUES.start(0)
        hf.train(task_to_train, on, plan=plan)
        return QUEUES.reads, QUEUES.staged

    for recipe in (Way(momentum), Way(adamw, 0.5)):
        for shards, resident in ((1, True), (3, False)):
            # The first run captures the loss.
            _, few, many = (count_waits(count, recipe, shards, resident) for count in (2, 2, 6))
            assert many[0] == few[0]
            # For each shard what gradients are clipped by; and the constant, once.
            assert many[1] - few[1] <= 4 * EPOCHS * (shards * (recipe.clip is not None) + 2)


def an_optimizer_copies_to_its_device_from_pinned_memory_only() -> None:
    array = fused().to(THERE)
    params = list(array.parameters())
    for param in params:
        param.grad = torch.ones_like(param)
    optimizers = hf.optim.AdamW, hf.optim.SGD, hf.optim.RMSprop, hf.optim.NAdam, hf.optim.Lion
    for optimizer in [kind(params, lr=[0.1] * len(array)) for kind in optimizers]:
        optimizer.step()
        QUEUES.start(0)
        for step in range(4):
            optimizer.param_groups[0]["lr"] = [0.1 / (1 + step + member) for member in range(len(array))]
            optimizer.step()
            with optimizer.holding(torch.arange(len(array)) == 1):
                optimizer.step()
        assert (QUEUES.reads, QUEUES.staged) == (0, 0)


def losses_arrive_in_order_and_whole_however_late_a_device_is() -> None:
    for lag in (0.0, 0.5, 0.9, 1.0):
        QUEUES.start(0, lag=lag)
        queue, expected, arrived, late = LossQueue(), list[Tensor](), list[Tensor](), 0
        for step in range(100):
            # Losses of another dtype, as a minibatch without autocast may have, or on another device.
            dtype = torch.float64 if step % 30 else torch.float32
            expected.append(torch.full((3,), step / 7, dtype=dtype))
            losses = torch.zeros(3, dtype=dtype, device="sim:1" if 40 < step < 60 else THERE)
            losses += step / 7
            arrived += queue.put(losses)
            # As the next replay of a recorded step.
            losses.fill_(-1)
            late = max(late, len(queue))
            assert len(arrived) + len(queue) == step + 1
        assert not torch.isnan(torch.stack([losses.double() for losses in arrived])).any()
        arrived += queue.drain()
        assert all(torch.equal(a, b) for a, b in zip(arrived, expected, strict=True))
        assert late == 16 if lag == 1 else late <= 16


def bytes_accounted_for_are_those_of_all_tensors_on_the_device() -> None:
    loader = [(torch.randn(128, 256), torch.randint(3, (128,))) for _ in range(2)]
    # Minibatches that are evaluated may be larger. What was loaded of one stays to its end, which is not accounted for.
    evaluated = [(torch.randn(4096, 256), torch.randint(3, (4096,)))]
    on, ratios, larger = hf.Machine([hf.Device("sim:0", memory="1GiB")]), [], []
    for eval_loader, (count, resident) in product((None, evaluated), ((1, True), (6, False))):
        trained = task(fused(partial(wide, 256), torch.float32), Way(adamw), loader, eval_loader=eval_loader)
        plan = planned([trained], on, [count], [resident])
        before = list(QUEUES.taken)
        QUEUES.start(count)
        report = hf.train([trained], on, plan=plan)
        peak, (accounted,) = QUEUES.peak[0] - before[0], report.peak.values()
        (ratios if eval_loader is None else larger).append(peak / accounted)
        assert QUEUES.taken == before
    assert 0.9 < min(ratios) <= max(ratios) < 1.1
    assert 0.9 < min(larger) <= max(larger) < 1.15


# What runs of others leave to be freed would count in the first.
PIECES: tuple[Callable[[], None], ...] = (
    bytes_accounted_for_are_those_of_all_tensors_on_the_device,
    a_loaded_state_goes_on_wherever_its_numbers_lie,
    an_array_that_moves_without_its_state_is_refused,
    a_machine_knows_its_devices,
    a_minibatch_keeps_the_host_waiting_for_nothing_but_the_ends_of_units,
    an_optimizer_copies_to_its_device_from_pinned_memory_only,
    losses_arrive_in_order_and_whole_however_late_a_device_is,
)


def main() -> int:
    torch.set_num_threads(1)
    install()
    for piece in PIECES:
        piece()
        print(piece.__name__.replace("_", " "), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
