"""One thread captures, others train: torch's flags for an export belong to the whole process."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.torch_private.export_state import exporting
from tests.alone import normal

INSIDE, GO = threading.Event(), threading.Event()


class Waiting(nn.Module):
    """Waits where it is exported until it may go on."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        if torch.compiler.is_exporting():
            INSIDE.set()
            assert GO.wait(60)
        return self.fc(x)


class Branching(nn.Module):
    """A branch on values, which runs member by member."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        y = self.fc(x)
        return y * 2 if y.sum() > 0 else y


def test_other_threads_see_no_export() -> None:
    models = [Branching() for _ in range(2)]
    array, x = hf.fuse(models), normal(5, 4)
    expected = torch.stack([model(x) for model in models])
    assert torch.equal(array(x), expected)
    waiting = hf.fuse([Waiting() for _ in range(2)])
    with ThreadPoolExecutor(1) as other:
        captured = other.submit(waiting, x)
        try:
            assert INSIDE.wait(60)
            assert not torch.compiler.is_exporting()
            assert not torch.compiler.is_compiling()
            assert not exporting()
            assert torch.equal(array(x), expected)
        finally:
            GO.set()
        assert captured.result(60).shape == (2, 5, 3)
    assert torch.compiler._is_exporting_flag is False
    assert torch.compiler._is_compiling_flag is False


class Asking(nn.Module):
    """Computes with torch's report of whether an export is running, as transformers does."""

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3).double()

    def forward(self, x: Tensor) -> Tensor:
        tracing = torch.compiler.is_compiling()
        tracing |= isinstance(x, nn.Parameter)
        if not tracing and bool((x > 1e9).all()):
            return x
        return self.fc(x) * (2 if tracing & True else 2.0) * (1 + (tracing ^ tracing))


def test_the_export_state_of_torch_is_a_bool() -> None:
    models = [Asking() for _ in range(2)]
    array, x = hf.fuse(models), normal(5, 4)
    torch.testing.assert_close(array(x), torch.stack([model(x) for model in models]))
    assert not array.report().loops
