"""What hfusion assumes of torch's export, autograd and loaders holds on the installed torch."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

import hfusion as hf
from hfusion.torch_private import (
    autograd_engine,
    dataloader_workers,
    dispatch_modes,
    export_state,
    replaced_functions,
)
from hfusion.torch_private.inductor_patches import quick_inductor
from hfusion.torch_private.replaced_functions import silence_tracers


# Assumptions of hfusion about torch's dispatch, export and autograd hold on the installed torch.
class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Failing(nn.Module):
    """Its submodule fails while it is traced; and it says what it sees of the export."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Inner()

    def forward(self, x: Tensor) -> Tensor:
        assert export_state.exporting()
        with export_state.outside_export():
            assert not torch.compiler.is_exporting()
        try:
            return self.part(x)
        except RuntimeError:
            return x + 1


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("refused")


class Mapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(torch.sin)(x)


@pytest.mark.filterwarnings("ignore")
def test_an_export() -> None:
    export_state.import_exporter()
    nodes = dict(pytree.SUPPORTED_NODES)
    with export_state.module_stack_unwound(), export_state.numbered_parts():
        exported = torch.export.export(Failing(), (torch.zeros(2),), strict=False)
        mapped = torch.export.export(Mapped(), (torch.zeros(2),), strict=False)
    assert nodes == pytree.SUPPORTED_NODES
    assert not export_state.exporting()
    assert torch.equal(exported.module()(torch.zeros(2)), torch.ones(2))
    assert export_state.has_transforms(mapped.graph_module)
    assert not export_state.has_transforms(exported.graph_module)


def test_a_backward_pass() -> None:
    x = torch.ones(1, requires_grad=True)
    order: list[str] = []

    def note(grad: Tensor) -> None:
        assert autograd_engine.backward_id() >= 0
        order.append("hook")
        if len(order) == 1:
            autograd_engine.at_end_of_backward(lambda: order.append("end"))

    y = Doubled.apply(x)
    assert isinstance(y.grad_fn, autograd_engine.backward_node(Doubled))
    assert isinstance(y.grad_fn.next_functions[0][0], autograd_engine.AccumulateGrad)
    y.register_hook(note)
    x.register_hook(lambda grad: order.append("leaf"))
    y.backward()
    assert order == ["hook", "leaf", "end"]
    assert autograd_engine.backward_id() == -1


def test_replaced_functions() -> None:
    x = torch.ones(1, requires_grad=True)
    called: list[str] = []

    def noted(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return lambda run: lambda *args, **kwargs: (called.append(name), run(*args, **kwargs))[1]

    def apply(run: Callable[..., Any], function: type, *args: Any) -> Any:
        called.append(function.__name__)
        return run(*args)

    with replaced_functions.autograd_grad_replaced(noted("grad")):
        torch.autograd.grad((x * x).sum(), x)
    with replaced_functions.autograd_functions_replaced(apply):
        assert Doubled.apply(x).item() == 2
    with replaced_functions.torch_functions_replaced(
        ("is_autocast_enabled", "no_such"), lambda name, run: lambda: name
    ):
        assert torch.is_autocast_enabled() == "is_autocast_enabled"
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = dispatch_modes.FakeTensorMode(shape_env=ShapeEnv())
    size = dispatch_modes.with_dynamic_dims(mode, torch.zeros(5), [True], "x").shape[0]
    with replaced_functions.number_operators_replaced(noted("number")):
        size + 1
    assert called == ["grad", "Doubled", "number"]
    size + 1
    torch.autograd.grad((x * x).sum(), x)
    Doubled.apply(x)
    assert len(called) == 3
    assert torch.is_autocast_enabled() is False


# Assumptions of hfusion about torch's modules, optimizers, loaders and Inductor hold on the installed torch.
@pytest.mark.parametrize("ends", ["killed", "shut down"])
def test_workers_of_a_loader(ends: str) -> None:
    loader = DataLoader([1, 2], num_workers=1, persistent_workers=True)
    assert dataloader_workers.kept_iterator(loader) is None
    iterator = iter(loader)
    next(iterator)
    assert dataloader_workers.has_workers(iterator)
    assert dataloader_workers.may_stay(iterator)
    assert dataloader_workers.kept_iterator(loader) is iterator
    if ends == "killed":
        dataloader_workers.kill_workers(iterator, 60)
        assert not dataloader_workers.may_stay(iterator)
    dataloader_workers.shut_down(loader, iterator)
    assert dataloader_workers.kept_iterator(loader) is None
    assert not any(worker.is_alive() for worker in iterator._workers)
    assert [int(batch) for batch in DataLoader([1, 2])] == [1, 2]


# The seed that torch keeps for an unused accelerator remains the one that the user set.
def waiting() -> Any:
    return torch.cuda._lazy_seed_tracker.get_calls()[-1][0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a CUDA that was not used")
@pytest.mark.parametrize("others", [False, True])
def test_arrays_leave_the_seed_of_an_accelerator_that_was_not_used(others: bool) -> None:
    """A capture runs forward under a separate seed, and build under the members' seeds."""
    with ThreadPoolExecutor(1) as pool:
        if others:
            pool.submit(torch.get_rng_state).result()
        torch.manual_seed(7)
        pending, drawn = waiting(), torch.get_rng_state()
        fused = hf.build(lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), seeds=[1, 2])
        assert waiting() is pending
        assert torch.equal(torch.get_rng_state(), drawn)
        fused(torch.ones(4, 3))
        assert waiting() is pending


# Inductor patches apply during one compilation and are undone afterwards.


def test_torch_is_left_as_it_was() -> None:
    from torch._inductor.codecache import CppWrapperCodeCache
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    def state() -> list[Any]:
        names = ("_get_uncompiled_header", "load_pybinding")
        return [DtypePropagationOpsHandler.__init__, *(CppWrapperCodeCache.__dict__.get(name) for name in names)]

    def fail() -> None:
        with quick_inductor():
            assert all(patched is not original for patched, original in zip(state()[:2], before[:2], strict=True))
            assert CppWrapperCodeCache._get_uncompiled_header("cuda:0") == "torch/csrc/inductor/cpp_wrapper/cuda.h"
            raise KeyError

    before = state()
    with pytest.raises(KeyError):
        fail()
    assert state() == before


# Tracers are silent, and leave the process as it was.


def speak() -> None:
    warnings.warn("a warning", stacklevel=1)
    logging.getLogger("torch.export").error("a log of torch's")
    logging.getLogger("mine").warning("a log of mine")


def test_only_torch_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    before = list(warnings.filters), list(logging.getLogger("torch").filters)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with silence_tracers():
            with silence_tracers():
                speak()
            speak()
            assert not heard
            assert caplog.messages == ["a log of mine"] * 2
        speak()
        assert len(heard) == 1
    assert caplog.messages.count("a log of torch's") == 1
    assert logging.root.manager.disable == 0
    assert (list(warnings.filters), list(logging.getLogger("torch").filters)) == before
