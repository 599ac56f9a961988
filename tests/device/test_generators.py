from __future__ import annotations

import multiprocessing
import os
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager
from threading import Barrier, Event, Thread

import pytest
import torch

from hfusion.device.backend import random_states_kept
from hfusion.device.generators import Generators, draws_kept
from hfusion.passes import check
from hfusion.passes.cost import measure

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


def test_a_copy_draws_the_same_and_goes_its_own_way() -> None:
    generators = Generators(3)
    with generators.active(CPU):
        torch.rand(3)
    copy = generators.copy()
    drawn = []
    for source in (copy, generators, copy):
        with source.active(CPU):
            drawn.append(torch.rand(3))
    assert torch.equal(drawn[0], drawn[1])
    assert not torch.equal(drawn[0], drawn[2])


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


@pytest.mark.skipif(not hasattr(os, "fork"), reason="forks")
def test_a_process_is_forked_while_others_seed() -> None:
    """As the workers of a loader are, which seed first; torch alone lets them wait for ever."""
    stop = Event()

    def seed() -> None:
        while not stop.is_set():
            torch.manual_seed(1)

    threads = [Thread(target=seed) for _ in range(2)]
    with random_states_kept(), warnings.catch_warnings():
        # Python 3.12 warns of what this is about.
        warnings.simplefilter("ignore", DeprecationWarning)
        for thread in threads:
            thread.start()
        try:
            for _ in range(10):
                child = multiprocessing.get_context("fork").Process(target=torch.manual_seed, args=(3,))
                child.start()
                child.join(60)
                alive = child.is_alive()
                child.kill()
                child.join()
                assert not alive
        finally:
            stop.set()
            for thread in threads:
                thread.join()


@pytest.mark.parametrize("apart", [check.fakes, lambda: measure.apart(CPU)], ids=["checking", "measuring"])
def test_a_check_and_a_measurement_let_others_draw(
    apart: Callable[[], AbstractContextManager[object]],
) -> None:
    expected = torch.rand(4, generator=torch.Generator().manual_seed(5))
    with ThreadPoolExecutor(1) as pool:
        pool.submit(torch.get_rng_state).result()
        torch.manual_seed(5)
        with apart():
            torch.rand(3)
            aside = pool.submit(torch.rand, 2).result()
        assert torch.equal(torch.cat([aside, torch.rand(2)]), expected)
