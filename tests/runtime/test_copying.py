"""Everybody who copies copies the same, in order; the thread of C as the one of Python."""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import pairwise
from pathlib import Path
from time import perf_counter, sleep

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hfusion.device import native
from hfusion.runtime import copying
from hfusion.runtime.copying import Copier, Move, NativeCopier, ThreadCopier, copiers, copy_now

CPU = torch.device("cpu")
WAYS = ["into", "out", "python"]


def made(way: str) -> Copier:
    if way == "python":
        return ThreadCopier("c", CPU, torch.get_num_threads())
    into, out = copiers("c", CPU, torch.get_num_threads())
    return into if way == "into" else out


@pytest.fixture(params=WAYS)
def copier(request: pytest.FixtureRequest) -> Iterator[Copier]:
    found = made(request.param)
    yield found
    found.close()


def test_where_there_is_a_compiler_c_copies(compiler: list[str]) -> None:
    assert all(isinstance(each, NativeCopier) for each in copiers("c", CPU, 1))


def test_without_one_python_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HFUSION_NATIVE", "0")
    found = copiers("c", CPU, 1)
    assert all(isinstance(each, ThreadCopier) for each in found)
    source, target = torch.randn(9), torch.zeros(9)
    found[0].submit([Move.of(target, source)]).wait()
    assert torch.equal(target, source)
    for each in found:
        each.close()


@given(sizes=st.lists(st.integers(0, 1 << 20), max_size=5), start=st.integers(0, 70), way=st.sampled_from(WAYS))
def test_all_bytes_are_copied_and_no_others(sizes: list[int], start: int, way: str) -> None:
    drawn = torch.randint(256, (sum(sizes),), dtype=torch.uint8)
    room = torch.zeros(start + sum(sizes) + 70, dtype=torch.uint8)
    targets = room[start : start + sum(sizes)].split(sizes)
    used = made(way)
    used.submit(list(map(Move.of, targets, drawn.split(sizes)))).wait()
    used.close()
    assert torch.equal(room[start : start + len(drawn)], drawn)
    assert not room[:start].any()
    assert not room[start + len(drawn) :].any()


@pytest.mark.parametrize("size", [3, 1 << 20])
def test_jobs_run_in_order(copier: Copier, size: int) -> None:
    places = [torch.full((size,), float(index)) for index in range(20)]
    tickets = [copier.submit([Move.of(b, a)]) for a, b in pairwise(places)]
    before = perf_counter()
    times = [ticket.wait() for ticket in tickets]
    assert all(not place.any() for place in places)
    assert all(ticket.done() for ticket in tickets)
    assert times == [ticket.wait() for ticket in tickets]
    assert all(began <= ended for began, ended in times)
    assert [time for pair in times for time in pair] == sorted(time for pair in times for time in pair)
    assert times[0][0] < perf_counter()
    assert before - 60 < times[-1][1]


def test_what_is_loaded_comes_between_what_goes_back(compiler: list[str]) -> None:
    into, out = copiers("c", CPU, 1)
    source, place, other = torch.ones(1 << 26), torch.zeros(1 << 26), torch.zeros(1 << 20)
    back = [out.submit([Move.of(place, source)]) for _ in range(2)]
    there = into.submit([Move.of(other, source[: 1 << 20])])
    ended = there.wait()[1]
    assert ended < back[0].wait()[1] < back[1].wait()[1]
    assert torch.equal(place, source)
    assert torch.equal(other, source[: 1 << 20])
    for each in (into, out):
        each.close()


def test_the_first_moves_of_a_job_may_be_awaited(copier: Copier) -> None:
    sources = [torch.randn(1 << 20) for _ in range(3)]
    targets = [torch.zeros(1 << 20) for _ in range(3)]
    ticket = copier.submit(list(map(Move.of, targets, sources)))
    began, first = ticket.wait(1)
    assert ticket.done(1)
    assert torch.equal(targets[0], sources[0])
    assert ticket.wait(2)[0] == ticket.wait()[0] == began
    assert began <= first <= ticket.wait(2)[1] <= ticket.wait(3)[1] == ticket.wait()[1]
    assert ticket.done()
    assert all(torch.equal(target, source) for target, source in zip(targets, sources, strict=True))


def test_what_is_copied_is_let_go(copier: Copier) -> None:
    source = torch.ones(1 << 20)
    ticket = copier.submit([Move.of(torch.zeros(1 << 20), source)])
    ticket.wait()
    seen = weakref.ref(source)
    del source
    assert seen() is None
    assert ticket.done()


def test_many_threads_may_ask(copier: Copier) -> None:
    def work(number: int) -> Tensor:
        place = torch.zeros(1 << 17)
        for value in range(10):
            copier.submit([Move.of(place, torch.full((1 << 17,), float(number + value)))]).wait()
        return place

    with ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(4)))
    assert [place.unique().tolist() for place in found] == [[number + 9.0] for number in range(4)]


def test_an_error_is_raised_to_who_waits() -> None:
    used = made("python")
    ticket = used.submit([Move.of(torch.zeros(2), torch.zeros(3))])
    with pytest.raises(RuntimeError):
        ticket.wait()
    used.close()


def test_who_has_fallen_asleep_is_woken(copier: Copier) -> None:
    source, target = torch.randn(1 << 18), torch.zeros(1 << 18)
    for value in (1.0, 2.0):
        copier.submit([Move.of(target, source.fill_(value))]).wait()
        assert torch.equal(target, source)
        # Longer than the thread of C looks for work by itself.
        sleep(0.2)


def test_closing_twice_and_closing_what_never_ran(copier: Copier) -> None:
    copier.close()
    copier.close()


def test_copying_at_once() -> None:
    source, target = torch.randn(3), torch.zeros(3)
    copy_now([Move.of(target, source)])
    assert torch.equal(source, target)


def test_the_job_of_c_is_as_python_writes_it(compiler: list[str], tmp_path: Path) -> None:
    source = tmp_path / "size.c"
    fields = ["sizeof(job)", "offsetof(job, moved)", "offsetof(job, began)", "sizeof(row)", "offsetof(row, ended)"]
    functions = [f"int64_t field{number}(void) {{ return {field}; }}" for number, field in enumerate(fields)]
    source.write_text("\n".join([f'#include "{copying.SOURCE}"', "#include <stddef.h>", *functions]))
    library = native.build(source, compiler, tmp_path)
    assert not isinstance(library, str)
    words = [copying._JOB, copying._MOVED, copying._BEGAN, copying._ROW, copying._ENDED]
    assert [getattr(library, f"field{number}")() for number in range(len(fields))] == [8 * word for word in words]
