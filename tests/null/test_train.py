"""`hf.train` of a compiled task on CUDA: the waits of the host for a minibatch."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from torch import nn

import hfusion as hf
from tests.null.arrays import losses_of
from tests.null.calls import Calls, reset, since_reset

pytestmark = pytest.mark.null

SHORT, LONG = 4, 20


def compiled(
    minibatches: int, clip: float | None, *callbacks: Callable[[hf.Step | hf.Evaluation], None], layers: int = 6
) -> hf.Task:
    """Return a compiled task of this many minibatches."""
    models = [nn.Sequential(*[nn.Linear(8, 8) for _ in range(layers - 1)], nn.Linear(8, 3)) for _ in range(3)]
    fused = hf.fuse(models, verify=False)
    loader = [(torch.zeros(6, 8), torch.zeros(6, dtype=torch.int64)) for _ in range(minibatches)]
    return hf.Task(
        fused,
        losses_of,
        optimizer=lambda params: hf.optim.AdamW(params, lr=0.1),
        loader=loader,
        clip_norm=clip,
        compile=True,
        callbacks=callbacks,
    )


def calls_per_minibatch(clip: float | None, layers: int) -> Calls:
    """Return the calls of a minibatch beyond the first ones; the first run makes some more."""
    counts = []
    for minibatches in (SHORT, SHORT, LONG):
        task = compiled(minibatches, clip, layers=layers)
        reset()
        hf.train([task], hf.Machine([hf.Device("cuda:0", memory="1GiB")]))
        counts.append(since_reset())
        assert counts[-1].refused == ()
    names = ("launches", "graphs", "waits", "pageable")
    return Calls(*[(getattr(counts[2], name) - getattr(counts[1], name)) / (LONG - SHORT) for name in names])


@pytest.mark.parametrize("layers", [2, 12])
@pytest.mark.parametrize(("clip", "launches"), [(None, 6), (1.0, 19)], ids=["plain", "clipped"])
def test_calls_of_a_compiled_minibatch(clip: float | None, launches: int, layers: int) -> None:
    calls = calls_per_minibatch(clip, layers)
    # What the machine does once falls on few minibatches.
    assert calls.waits < 0.3
    assert (round(calls.launches), round(calls.graphs), round(calls.pageable)) == (launches, 2, 0)


def test_callbacks_hear_all_losses_in_order() -> None:
    heard: list[hf.Step | hf.Evaluation] = []
    task = compiled(LONG, None, heard.append)
    report = hf.train([task], hf.Machine([hf.Device("cuda:0", memory="1GiB")]))
    assert [step.step for step in heard if isinstance(step, hf.Step)] == list(range(LONG))
    assert torch.equal(torch.stack([step.losses for step in heard]), report["task"].losses)


class Offset(nn.Module):
    """Adds numbers that forward makes, which its graph holds as a constant."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.layer(x) + torch.tensor([0.5, 1.0, 1.5], device=x.device)
        return out


def test_constants_are_copied_once() -> None:
    def pageable(minibatches: int) -> float:
        fused = hf.fuse([Offset() for _ in range(3)], verify=False)
        loader = [(torch.zeros(6, 8), torch.zeros(6, dtype=torch.int64)) for _ in range(minibatches)]
        task = hf.Task(
            fused, losses_of, optimizer=lambda params: hf.optim.SGD(params, lr=0.1), loader=loader, compile=False
        )
        reset()
        hf.train([task], hf.Machine([hf.Device("cuda:0", memory="1GiB")]))
        return since_reset().pageable

    pageable(SHORT)
    assert pageable(LONG) - pageable(SHORT) <= 2


def test_runs_that_follow_take_no_further_memory() -> None:
    """cuBLAS keeps a workspace for each stream that it has met."""
    machine, allocated = hf.Machine([hf.Device("cuda:0", memory="1GiB")]), []
    for _ in range(4):
        hf.train([compiled(SHORT, None)], machine)
        gc.collect()
        allocated.append(torch.cuda.memory_allocated())
    # A workspace is of 32 MiB. Programs that are kept for later runs may have small constants.
    assert allocated[3] - allocated[1] < 1 << 20


@pytest.mark.parametrize("compile", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("loader_device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("array_device", ["cpu", "cuda:0"])
def test_arrays_and_loaders_may_be_anywhere(array_device: str, loader_device: str, compile: bool) -> None:
    array = hf.fuse([nn.Linear(8, 3) for _ in range(3)], verify=False).to(array_device)
    x, target = torch.zeros(6, 8, device=loader_device), torch.zeros(6, dtype=torch.int64, device=loader_device)
    task = hf.Task(
        array,
        losses_of,
        lambda params: hf.optim.SGD(params, lr=0.1),
        [(x, target)] * 3,
        eval_loader=[(x, target)],
        compile=compile,
    )
    reset()
    hf.train([task], hf.Machine([hf.Device("cuda:0", memory="1GiB")]))
    assert since_reset().refused == ()
    assert {str(tensor.device) for tensor in array.state_dict().values()} == {array_device}
