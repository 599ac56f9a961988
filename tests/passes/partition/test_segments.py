"""The bytes of a run of steps as a shard: against its definition, and what is counted where."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from hfusion.passes.cost.cost import Line, OperatorCost, Storage, Weight
from hfusion.passes.partition.segments import Segments
from tests.lines import lines, need


@given(lines(), st.sampled_from([0, 1, 2, 0.5]), st.booleans())
def test_need_of_every_run(plain: Line, state: float, carried: bool) -> None:
    segments = Segments(plain, state, carried)
    for first in range(segments.count):
        runs = [*segments.starting(first)]
        assert [run.last for run in runs] == [*range(first + 1, segments.count + 1)]
        assert [segments.need(first, run) for run in runs] == [need(plain, first, r.last, state, carried) for r in runs]
        # Where a run is too large whatever its end, longer ones are not looked at.
        least = [r.weights + r.optimizer + r.peak for r in runs]
        assert all(run.floor <= min(least[k:]) for k, run in enumerate(runs))


def test_a_skip_counts_at_every_cut_it_crosses() -> None:
    steps = tuple(OperatorCost(f"s{k}") for k in range(4))
    skip = Storage(10, 0, 3)
    segments = Segments(Line(steps, (skip, Storage(3, 1, 2), Storage(1, 2, 3)), ()), 0)
    assert segments.alive == (0, 10, 13, 11, 0)


def test_values_that_pass_through_are_not_workspace() -> None:
    steps = tuple(OperatorCost(f"s{k}") for k in range(3))
    segments = Segments(Line(steps, (Storage(100, 0, 2), Storage(5, 1, 1)), ()), 0)
    middle = next(segments.starting(1))
    assert middle.workspace == middle.peak == 5
    assert segments.need(1, middle) == 205


def test_a_tied_weight_counts_in_both_shards() -> None:
    steps = tuple(OperatorCost(f"s{k}") for k in range(3))
    segments = Segments(Line(steps, (), (Weight(7, (0, 2)),)), 2)
    assert [run.weights for run in segments.starting(0)] == [7, 7, 7]
    assert [(run.weights, run.gradients, run.optimizer) for run in segments.starting(1)] == [(0, 0, 0), (7, 7, 14)]


def test_the_gradients_of_a_cut_stay_while_the_backward_runs() -> None:
    """One value is cut, the step before it works with much."""
    steps = tuple(OperatorCost(f"s{k}") for k in range(3))
    segments = Segments(Line(steps, (Storage(100, 0, 1), Storage(7, 1, 2)), ()), 0)
    assert [run.peak for run in segments.starting(0)] == [100, 107, 107]


def test_values_that_are_saved_and_used_later_are_in_the_cut() -> None:
    steps = tuple(OperatorCost(f"s{k}") for k in range(3))
    segments = Segments(Line(steps, (Storage(7, 0, 1, saved=0),), ()), 0)
    assert [run.activations for run in segments.starting(0)] == [0, 7, 7]
