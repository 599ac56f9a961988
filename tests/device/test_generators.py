from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from threading import Barrier

import pytest
import torch

from hfusion.device.generators import Generators, draws_kept

CPU = torch.device("cpu")


@pytest.mark.parametrize("others", [False, True])
def test_a_thread_draws_as_if_there_were_no_other(others: bool) -> None:
    """Another thread draws and seeds at the same time, and draws the numbers that it would draw alone."""
    with ThreadPoolExecutor(1) as pool:
        if others:
            pool.submit(torch.get_rng_state).result()
        torch.manual_seed(5)
        before = torch.get_rng_state()
        with draws_kept():
            inside = [torch.rand(2)]
            aside = pool.submit(torch.rand, 2).result() if others else None
            inside.append(torch.rand(2))
            torch.manual_seed(5)
            inside.append(torch.rand(4))
        first, other = torch.cat(inside[:2]), inside[2]
        assert torch.equal(first, other)
        if aside is None:
            assert torch.equal(torch.get_rng_state(), before)
        else:
            assert torch.equal(aside, other[:2])
            assert torch.equal(torch.rand(2), other[2:])


def test_draws_are_those_after_manual_seed() -> None:
    torch.manual_seed(5)
    expected = torch.rand(4), torch.rand(4)
    torch.manual_seed(1)
    outside = torch.rand(4)
    torch.manual_seed(1)
    generators = Generators(5)
    with generators.active(CPU):
        assert torch.equal(torch.rand(4), expected[0])
    assert torch.equal(torch.rand(4), outside)
    with generators.active(CPU, advance=False):
        assert torch.equal(torch.rand(4), expected[1])
    with generators.active(CPU):
        assert torch.equal(torch.rand(4), expected[1])


def test_an_error_puts_torchs_generator_back() -> None:
    def fail() -> None:
        torch.rand(3)
        raise ValueError("inside")

    before = torch.get_rng_state()
    with pytest.raises(ValueError, match="inside"), Generators(3).active(CPU):
        fail()
    assert torch.equal(torch.get_rng_state(), before)


def test_tasks_in_several_threads_draw_as_if_alone() -> None:
    start = Barrier(3)

    def draw(seed: int) -> torch.Tensor:
        generators, draws = Generators(seed), []
        start.wait()
        for _ in range(30):
            with generators.active(CPU):
                draws.append(torch.rand(2))
        return torch.stack(draws)

    with ThreadPoolExecutor(3) as pool:
        together = list(pool.map(draw, range(3)))
    for seed, draws in enumerate(together):
        assert torch.equal(draws.flatten(), torch.rand(60, generator=torch.Generator().manual_seed(seed)))
