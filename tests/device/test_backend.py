"""What a device is asked for: here the host's answers, and on an accelerator those of its own module of torch."""

from __future__ import annotations

import pytest
import torch

from hfusion.device.backend import accelerators, backend, memory_of, random_states_kept

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
    asked = backend(device)
    before = asked.random_states()
    first = torch.rand(3, device=device).cpu(), torch.rand(3)
    asked.set_random_states(before)
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


def test_pinned_memory_is_taken_in_powers_of_two() -> None:
    sizes = [0, 1, 3, 64, 65]
    assert [memory_of(size, pinned=False) for size in sizes] == sizes
    assert [memory_of(size, pinned=True) for size in sizes] == [0, 1, 4, 64, 128]


@pytest.mark.gpu
@pytest.mark.parametrize("device", accelerators(), ids=str)
def test_free_memory_and_name_of_an_accelerator(device: torch.device) -> None:
    assert backend(device).free_bytes() > 0
    assert backend(device).name
