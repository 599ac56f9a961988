"""Settings of the whole suite: one thread per process, a fresh seed per test, `gpu` only with CUDA."""

from __future__ import annotations

import gc
import os
import signal
from collections.abc import Iterator

import pytest
import torch
from hypothesis import settings

from hfusion.device import native
from tests.slow_tests import is_slow


def pytest_configure(config: pytest.Config) -> None:
    # Small shapes gain nothing from threads, and the suite already runs one process per core.
    torch.set_num_threads(1)
    # How long an example takes is no property of the code: the machine may be busy.
    settings.register_profile("suite", deadline=None)
    settings.load_profile("suite")
    # Which lowerings are chosen must not hang on the machine; what is measured there has tests of its own.
    os.environ["HFUSION_RATES"] = "standard"
    # A shell that starts the suite in the background lets it ignore Ctrl-C, which tests send to themselves.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    # Every pass of every program.
    os.environ["HFUSION_STAGES"] = "1"


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--fast", action="store_true", help="leave out the tests that are listed in slow_tests.txt")


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    if config.getoption("--fast"):
        config.hook.pytest_deselected(items=[item for item in items if is_slow(item.nodeid)])
        items[:] = [item for item in items if not is_slow(item.nodeid)]
    if torch.cuda.is_available():
        return
    skip = pytest.mark.skip(reason="needs a CUDA device")
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(skip)


def pytest_collection_finish() -> None:
    # What was imported stays; Python's garbage collector need not look through all of it again and again.
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _isolated() -> Iterator[None]:
    """Every test starts from seed 0 and leaves the default dtype as it was."""
    dtype = torch.get_default_dtype()
    torch.manual_seed(0)
    yield
    torch.set_default_dtype(dtype)


@pytest.fixture
def two_threads() -> Iterator[None]:
    """Of torch's."""
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(1)


@pytest.fixture
def compiler(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The command of a C compiler, which is not switched off."""
    monkeypatch.delenv("HFUSION_NATIVE", raising=False)
    found = native.compiler()
    if found is None:
        pytest.skip("no C compiler")
    return found
