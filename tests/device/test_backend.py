"""Backends of devices: the answers of the host here, and on an accelerator those of its module of torch."""

from __future__ import annotations

import pytest
import torch

from hfusion.device.backend import accelerators, backend, random_states_kept
from hfusion.device.graphs import GraphPool

DEVICES = [torch.device("cpu"), *accelerators()]


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_a_queue_does_what_it_is_asked_for_in_turn(device: torch.device) -> None:
    queue, x = backend(device).queue(), torch.ones(1000, device=device)
    backend(device).wait()
    queue.run(lambda: x.add_(1))
    queue.run(lambda: x.mul_(3))
    queue.wait()
    assert (x.cpu() == 6).all()


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_random_states_come_back(device: torch.device) -> None:
    device_backend = backend(device)
    before = device_backend.random_states()
    first = torch.rand(3, device=device).cpu(), torch.rand(3)
    device_backend.set_random_states(before)
    with random_states_kept():
        torch.rand(5, device=device)
    again = torch.rand(3, device=device).cpu(), torch.rand(3)
    assert all(map(torch.equal, first, again))


@pytest.mark.parametrize("device", DEVICES, ids=str)
def test_memory_that_it_pins_is_pinned(device: torch.device) -> None:
    pins = backend(device).pins
    assert torch.empty(8, pin_memory=pins).is_pinned() is pins
    with backend(device).current():
        assert torch.empty(1, device=device).device.type == device.type


class Graph:
    """A graph in a new pool, or in the pool that it was given."""

    def __init__(self, handle: object) -> None:
        self._handle = handle or object()

    def pool(self) -> object:
        return self._handle


def test_graphs_share_a_pool_as_long_as_one_of_them_is_alive() -> None:
    pool = GraphPool()
    assert pool.handle() is None
    first = Graph(pool.handle())
    pool.add(first)
    second = Graph(pool.handle())
    pool.add(second)
    assert second.pool() is first.pool() is pool.handle()
    del first
    assert pool.handle() is second.pool()
    # torch frees the pool with its last graph, and asserts that it is not requested again.
    del second
    assert pool.handle() is None


def test_the_host_records_nothing() -> None:
    assert backend(torch.device("cpu")).recorder() == ""


@pytest.mark.gpu
@pytest.mark.parametrize("device", accelerators(), ids=str)
def test_free_memory_and_name_of_an_accelerator(device: torch.device) -> None:
    assert backend(device).free_bytes() > 0
    assert backend(device).name
