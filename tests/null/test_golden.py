"""A training step of no benchmark model asks more of CUDA than its golden numbers."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch

from hfusion.bench.cases import CASES
from tests.null import golden

MODELS = [case.name for case in CASES]
MOST_GRAPHS = 3


@pytest.mark.null
@pytest.mark.parametrize("model", MODELS)
def test_no_number_is_worse(model: str) -> None:
    assert torch.__version__ == golden.version(), "the golden numbers are of one release: NULL_TORCH in the Makefile"
    numbers = golden.read()[model]
    faults = [
        f"{name}: {fault}"
        for name, counts in golden.measure_apart(model).items()
        for fault in counts.worse_than(numbers[name])
    ]
    assert not faults, f"{'; '.join(faults)}. If it cannot be helped, measure again: python -m tests.null.golden"


@pytest.mark.parametrize("model", MODELS)
def test_a_compiled_step_is_a_few_graphs_without_a_wait(model: str) -> None:
    for name in ("compiled", "compiled bf16"):
        counts = golden.read()[model][name]
        assert (counts.waits, counts.pageable) == (0, 0)
        assert counts.graphs <= MOST_GRAPHS


def test_all_models_have_numbers() -> None:
    numbers = golden.read()
    assert list(numbers) == MODELS
    assert {tuple(row) for row in numbers.values()} == {tuple(contender.name for contender in golden.CONTENDERS)}


def test_the_page_shows_them() -> None:
    assert golden.shown(golden.PAGE.read_text()) == list(golden.table(golden.read()))


@pytest.mark.parametrize("name", [field.name for field in fields(golden.StepCounts)])
def test_more_is_worse(name: str) -> None:
    baseline = golden.StepCounts(launches=3, graphs=2, replayed=40, waits=0, pageable=0, bytes=1000)
    value = getattr(baseline, name)
    assert replace(baseline, **{name: value + 1}).worse_than(baseline) == [f"{name}: {value + 1}, golden {value}"]
    assert baseline.worse_than(replace(baseline, **{name: value + 1})) == []
