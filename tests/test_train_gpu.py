"""hf.train on CUDA: the values of the plain loop there, within the budget that is accounted for."""

from __future__ import annotations

import gc
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from tests.trained import Way, adamw, batches, cross_entropy, fused, momentum, plain, planned, task

pytestmark = pytest.mark.gpu


def machine(names: Sequence[str], memory: str = "1GiB") -> hf.Machine:
    return hf.Machine([hf.Device(name, f"{name}.{k}", memory=memory) for k, name in enumerate(names)])


@pytest.mark.parametrize("names", [["cuda:0"], ["cuda:0", "cuda:0"]], ids=["one", "two on one"])
@pytest.mark.parametrize("resident", [False, True], ids=["spilled", "resident"])
@pytest.mark.parametrize("count", [1, 3, 5])
def test_the_loop_on_the_device(count: int, resident: bool, names: list[str]) -> None:
    for way in (Way(momentum, 0.5, 2), Way(adamw)):
        array = fused().cuda()
        loader = [(x.cuda(), y.cuda()) for x, y in batches(torch.float64)]
        losses, after = plain(array, way, loader)
        array.cpu()
        one, on = task(array, way, batches(torch.float64), eval_loader=batches(torch.float64, 2)), machine(names)
        plan = planned([one], on, [count], [resident])
        report = hf.train([one], on, plan=plan)
        report.timeline.validate(plan)
        # Dropout draws on the device, from the same seed.
        torch.testing.assert_close(report["task"].losses, losses.cpu(), rtol=1e-9, atol=1e-12)
        for name, tensor in array.state_dict().items():
            torch.testing.assert_close(tensor, after[name].cpu(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loader_device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("array_device", ["cpu", "cuda:0"])
def test_arrays_and_loaders_may_be_anywhere(array_device: str, loader_device: str) -> None:
    way, array = Way(momentum), fused().cuda()
    losses, after = plain(array, way, [(x.cuda(), y.cuda()) for x, y in batches(torch.float64)])
    array.to(array_device)
    loader = [(x.to(loader_device), y.to(loader_device)) for x, y in batches(torch.float64)]
    report = hf.train([task(array, way, loader)], machine(["cuda:0"]))
    torch.testing.assert_close(report["task"].losses, losses.cpu(), rtol=1e-9, atol=1e-12)
    for name, tensor in array.state_dict().items():
        torch.testing.assert_close(tensor, after[name].to(array_device), rtol=1e-9, atol=1e-12)


class Wide(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.Sequential(*(layer for _ in range(6) for layer in (nn.Linear(2048, 2048), nn.GELU())))
        self.head = nn.Linear(2048, 3)

    def forward(self, x: Tensor) -> Any:
        return self.head(self.layers(x))


@pytest.mark.parametrize(
    ("count", "resident", "compiled"),
    [(1, True, False), (1, True, True), (6, False, False)],
    ids=["resident", "compiled", "spilled"],
)
def test_what_is_accounted_for_is_what_is_allocated(count: int, resident: bool, compiled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    loader = [
        (torch.randn(512, 2048, generator=generator), torch.randint(3, (512,), generator=generator)) for _ in range(4)
    ]
    array = hf.fuse([Wide() for _ in range(4)], verify=False)
    one = hf.Task(array, cross_entropy, optimizer=adamw_of, loader=loader, seed=0, compile=compiled)
    on = machine(["cuda:0"], "8GiB")
    plan = planned([one], on, [count], [resident])
    # What tests before this one left in cycles.
    gc.collect()
    clear_workspaces()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    report = hf.train([one], on, plan=plan)
    allocated = torch.cuda.max_memory_allocated() - before
    allocated -= clear_workspaces()
    (accounted,) = report.peak.values()
    assert accounted <= plan.devices["cuda:0.0"]
    assert allocated == pytest.approx(accounted, rel=0.1)
    del report, one
    # Addresses of the optimizer's tensors, which cycles keep.
    gc.collect()
    clear_workspaces()
    assert torch.cuda.memory_allocated() == before


def clear_workspaces() -> int:
    """Free what cuBLAS keeps for each stream, which no plan counts; return its bytes."""
    before = torch.cuda.memory_allocated()
    torch._C._cuda_clearCublasWorkspaces()
    return before - torch.cuda.memory_allocated()


def adamw_of(params: list[nn.Parameter]) -> hf.optim.AdamW:
    return hf.optim.AdamW(params, lr=1e-3)
