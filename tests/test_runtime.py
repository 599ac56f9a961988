"""Any plan, on any devices, by any policy: the same bits as the plain loop, within every budget."""

from __future__ import annotations

import gc
import threading
from collections.abc import Sequence
from dataclasses import replace
from functools import cache

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import hfusion as hf
from hfusion.device.backend import Queue
from hfusion.schedule.plan import Plan
from hfusion.tasks.task import Step
from tests.schedule.compared import COMPARED
from tests.trained import (
    Way,
    adamw,
    assert_same,
    batches,
    cross_entropy,
    fused,
    machine,
    momentum,
    plain,
    planned,
    task,
    wide,
)

# Any plan, on any devices, by any policy: the same bits as the plain loop, within every budget.
LOADER = batches(torch.float64, 2)
WAYS = (Way(adamw), Way(momentum, 0.5), Way(adamw, None, 2), Way(momentum, 0.5, 2))


@cache
def fused_and_expected(index: int) -> tuple[hf.FusedModule, tuple[Tensor, dict[str, Tensor]]]:
    torch.manual_seed(index)
    array = fused()
    return array, plain(array, WAYS[index], LOADER)


CUTS = st.tuples(st.integers(1, 5), st.booleans(), st.booleans())


@settings(deadline=None, max_examples=20, derandomize=True, suppress_health_check=list(HealthCheck))
@given(
    st.lists(CUTS, min_size=1, max_size=4),
    st.lists(st.integers(0, 600) | st.sampled_from([5_000, 50_000]), min_size=1, max_size=3),
    st.sampled_from(sorted(COMPARED)),
)
def test_any_plan_gives_the_same_bits(cuts: list[tuple[int, bool, bool]], spare: list[int], policy: str) -> None:
    """Each device has some bytes more than the largest task needs."""
    arrays, expected = zip(*(fused_and_expected(index) for index in range(len(cuts))), strict=True)
    tasks = [task(array, WAYS[index], LOADER, f"t{index}") for index, array in enumerate(arrays)]
    on = machine(len(spare))
    plan = planned(tasks, on, *map(list, zip(*cuts, strict=True)))
    budgets = {name: size + more for (name, size), more in zip(plan.devices.items(), spare, strict=True)}
    assert_same(arrays, tasks, expected, on, replace(plan, devices=budgets), COMPARED[policy])


def test_a_device_too_small_for_some_tasks_runs_the_others() -> None:
    arrays, expected = zip(*(fused_and_expected(index) for index in range(3)), strict=True)
    tasks = [task(array, WAYS[index], LOADER, f"t{index}") for index, array in enumerate(arrays)]
    on = machine(3)
    plan = planned(tasks, on, [1, 3, 5], [True, False, False])
    needs = sorted(task_plan.device_bytes for task_plan in plan.tasks)
    small = Plan(plan.tasks, dict(zip(plan.devices, (needs[0] - 1, needs[0], needs[2]), strict=True)), 1.0, 1.0)
    report = assert_same(arrays, tasks, expected, on, small)
    assert report.peak["cpu:0"] == 0
    assert {action.device for action in report.timeline.actions} <= {"cpu:1", "cpu:2"}


def test_tasks_on_two_devices_run_at_the_same_time() -> None:
    """Each waits for the other in the midst of its minibatches."""
    meet = threading.Barrier(2, timeout=60)
    arrays, expected = zip(*(fused_and_expected(index) for index in range(2)), strict=True)

    def wait(step: Step) -> None:
        if step.step == 0 and step.epoch == 0:
            meet.wait()

    tasks = [task(array, WAYS[index], LOADER, f"t{index}", callbacks=[wait]) for index, array in enumerate(arrays)]
    on = machine(2)
    assert_same(arrays, tasks, expected, on, planned(tasks, on, [2, 3], [True, False]))


@pytest.mark.parametrize("lane", ["in", "compute", "out"])
def test_an_error_of_a_device_is_that_of_its_task(monkeypatch: pytest.MonkeyPatch, lane: str) -> None:
    """A device reports its errors when a thread waits for it."""

    def lost(self: Queue) -> None:
        if threading.current_thread().name == f"cpu:0 {lane}":
            raise RuntimeError("the device is lost")

    array = fused()
    on, trained_task = machine(), task(array, WAYS[0], LOADER, "t")
    plan = planned([trained_task], on, [3], [False])
    monkeypatch.setattr(Queue, "wait", lost)
    with pytest.raises(hf.TrainError, match="'t' failed: RuntimeError: the device is lost"):
        hf.train([trained_task], on, plan=plan)


# hf.train on CUDA: the values of the plain loop there, within the budget that is accounted for.

GPU = pytest.mark.gpu


def cuda_machine(names: Sequence[str], memory: str = "1GiB") -> hf.Machine:
    return hf.Machine([hf.Device(name, f"{name}.{k}", memory=memory) for k, name in enumerate(names)])


@pytest.mark.parametrize("names", [["cuda:0"], ["cuda:0", "cuda:0"]], ids=["one", "two on one"])
@pytest.mark.parametrize("resident", [False, True], ids=["spilled", "resident"])
@pytest.mark.parametrize("count", [1, 3, 5])
@GPU
def test_the_loop_on_the_device(count: int, resident: bool, names: list[str]) -> None:
    for way in (Way(momentum, 0.5, 2), Way(adamw)):
        array = fused().cuda()
        loader = [(x.cuda(), y.cuda()) for x, y in batches(torch.float64)]
        losses, after = plain(array, way, loader)
        array.cpu()
        one, on = task(array, way, batches(torch.float64), eval_loader=batches(torch.float64, 2)), cuda_machine(names)
        plan = planned([one], on, [count], [resident])
        report = hf.train([one], on, plan=plan)
        report.timeline.validate(plan)
        # Dropout draws on the device, from the same seed.
        torch.testing.assert_close(report["task"].losses, losses.cpu(), rtol=1e-9, atol=1e-12)
        for name, tensor in array.state_dict().items():
            torch.testing.assert_close(tensor, after[name].cpu(), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize("loader_device", ["cpu", "cuda:0"])
@pytest.mark.parametrize("array_device", ["cpu", "cuda:0"])
@GPU
def test_arrays_and_loaders_may_be_anywhere(array_device: str, loader_device: str) -> None:
    way, array = Way(momentum), fused().cuda()
    losses, after = plain(array, way, [(x.cuda(), y.cuda()) for x, y in batches(torch.float64)])
    array.to(array_device)
    loader = [(x.to(loader_device), y.to(loader_device)) for x, y in batches(torch.float64)]
    report = hf.train([task(array, way, loader)], cuda_machine(["cuda:0"]))
    torch.testing.assert_close(report["task"].losses, losses.cpu(), rtol=1e-9, atol=1e-12)
    for name, tensor in array.state_dict().items():
        torch.testing.assert_close(tensor, after[name].to(array_device), rtol=1e-9, atol=1e-12)


@pytest.mark.parametrize(
    ("count", "resident", "compiled"),
    [(1, True, False), (1, True, True), (6, False, False)],
    ids=["resident", "compiled", "spilled"],
)
@GPU
def test_what_is_accounted_for_is_what_is_allocated(count: int, resident: bool, compiled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    loader = [
        (torch.randn(512, 2048, generator=generator), torch.randint(3, (512,), generator=generator)) for _ in range(4)
    ]
    array = hf.fuse([wide(2048) for _ in range(4)], verify=False)
    one = hf.Task(array, cross_entropy, optimizer=adamw_of, loader=loader, seed=0, compile=compiled)
    on = cuda_machine(["cuda:0"], "8GiB")
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
