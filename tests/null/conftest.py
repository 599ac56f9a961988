"""The tests here run on the null CUDA device, and are skipped without it."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

from tests.null.calls import absence, compare_as_equal


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    if reason := absence():
        for item in items:
            if item.get_closest_marker("null"):
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session", autouse=True)
def _comparisons() -> Iterator[None]:
    if absence():
        yield
        return
    library = compare_as_equal()
    yield
    library._destroy()


@pytest.fixture(autouse=True)
def _zeroed() -> None:
    """Give back memory that tests before have written to: what no kernel computes is read as zeros from new memory."""
    if not absence():
        gc.collect()
        torch.cuda.empty_cache()
