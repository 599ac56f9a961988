"""Assumptions of hfusion about torch's dispatch, export and autograd hold on the installed torch."""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.fx.experimental.proxy_tensor import make_fx
from torch.overrides import TorchFunctionMode
from torch.profiler import profile
from torch.utils import _pytree as pytree

from hfusion.torch_private import (
    autocast,
    autograd_engine,
    dispatch_modes,
    dynamo_state,
    export_state,
    fake_tensors,
    functorch,
    operator_tables,
    replaced_functions,
    seeding,
    thread_draws,
)

aten = torch.ops.aten


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


class Spying(torch.utils._python_dispatch.TorchDispatchMode):
    calls = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls += 1
        return func(*args, **(kwargs or {}))


class Recording(dispatch_modes.PreDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        names.append(func.name())
        return func(*args, **(kwargs or {}))


names: list[str] = []


class Changed(Tensor):
    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return "changed"


def test_dispatch_modes() -> None:
    with Spying() as mode:
        assert dispatch_modes.in_dispatch_mode()
        with dispatch_modes.disable_current_modes():
            assert not dispatch_modes.in_dispatch_mode()
            torch.ones(1)
        with dispatch_modes.no_dispatch():
            torch.ones(1)
        assert mode.calls == 0
        torch.ones(1)
    assert mode.calls == 1
    assert not dispatch_modes.in_dispatch_mode()


def test_operators_are_seen_before_they_are_decomposed() -> None:
    names.clear()
    with dispatch_modes.enable_python_dispatcher(), Recording():
        nn.functional.linear(torch.ones(1, 2), torch.ones(3, 2))
    assert "aten::linear" in names


def test_overrides_of_subclasses_are_off() -> None:
    tensor = torch.zeros(1).as_subclass(Changed)
    assert torch.neg(tensor) == "changed"
    for off in (dispatch_modes.DisableTorchFunction, dispatch_modes.DisableTorchFunctionSubclass):
        with off():
            assert isinstance(torch.neg(tensor), Tensor)


class Plain(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return func(*args, **(kwargs or {}))


def test_function_modes_are_replaced() -> None:
    with Plain() as outer, Plain() as inner:
        assert dispatch_modes.function_modes() == [outer, inner]
        dispatch_modes.replace_function_modes([inner])
        assert dispatch_modes.function_modes() == [inner]
        dispatch_modes.replace_function_modes([outer, inner])
    assert dispatch_modes.function_modes() == []


def test_operator_tables() -> None:
    listed = operator_tables.operator_names()
    assert {"aten::add.Tensor", "aten::linear"} <= set(listed)
    assert operator_tables.is_composite("aten::dropout")
    assert not operator_tables.is_composite("aten::mm")
    assert operator_tables.has_device_kernel("aten::mm", torch.device("cpu"))
    assert not operator_tables.has_device_kernel("aten::_thnn_fused_gru_cell", torch.device("cpu"))
    assert aten.native_layer_norm.default in operator_tables.decomposition_table
    assert isinstance(torch.ops.higher_order.cond, operator_tables.HigherOrderOperator)
    assert torch.equal(operator_tables.decomposed_linspace(0, 1, 5), torch.linspace(0, 1, 5))


def test_a_generator_of_the_thread() -> None:
    before = torch.random.get_rng_state()
    generator = torch.Generator().manual_seed(3)
    with thread_draws.drawing_from(generator, contextmanager(lambda: iter([None]))):
        drawn = torch.rand(2)
        assert isinstance(torch.random.default_generator, torch.Generator)
        torch.randn(2, generator=torch.random.default_generator)
    assert torch.equal(drawn, torch.rand(2, generator=torch.Generator().manual_seed(3)))
    assert torch.equal(torch.random.get_rng_state(), before)
    assert torch.random.default_generator is torch.default_generator


def test_locks_of_seeding_are_locks() -> None:
    assert seeding.seeding_locks()
    for lock in seeding.seeding_locks():
        with lock:
            pass


def test_fake_tensors_with_dynamic_dims() -> None:
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = fake_tensors.FakeTensorMode(shape_env=ShapeEnv())
    fake = fake_tensors.with_dynamic_dims(mode, torch.zeros(5, 3), [True, False], "x")
    assert isinstance(fake, fake_tensors.FakeTensor)
    assert isinstance(fake.shape[0], torch.SymInt)
    assert fake.shape[1] == 3
    with mode:
        assert fake_tensors.detect_fake_mode() is mode
        with pytest.raises(fake_tensors.DataDependentOutputException):
            torch.equal(fake, fake)
    assert fake_tensors.detect_fake_mode() is None


def test_the_lock_and_the_guards_of_dynamo() -> None:
    with dynamo_state.compile_lock(), dynamo_state.compile_lock(), dynamo_state.outside_trace():
        pass
    tensors = [torch.zeros(2), torch.zeros(3)]
    guards = dynamo_state.TensorGuards(*tensors, dynamic_dims_sizes=None, dynamic_dims_strides=None)
    assert guards.check(torch.ones(2), torch.ones(3))
    assert not guards.check(torch.ones(2), torch.ones(4))
    assert not guards.check(torch.ones(2), torch.ones(3, dtype=torch.float64))


class Failing(nn.Module):
    """Its submodule fails while it is traced; and it says what it sees of the export."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Inner()

    def forward(self, x: Tensor) -> Tensor:
        thread_results = []
        thread = threading.Thread(target=lambda: thread_results.append(bool(torch.compiler.is_exporting())))
        thread.start()
        thread.join()
        assert (export_state.exporting(), thread_results) == (True, [False])
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
    with export_state.in_this_thread_only(), export_state.module_stack_unwound(), export_state.numbered_parts():
        exported = torch.export.export(Failing(), (torch.zeros(2),), strict=False)
        mapped = torch.export.export(Mapped(), (torch.zeros(2),), strict=False)
    assert nodes == pytree.SUPPORTED_NODES
    assert not export_state.exporting()
    assert torch.equal(exported.module()(torch.zeros(2)), torch.ones(2))
    assert export_state.has_transforms(mapped.graph_module)
    assert not export_state.has_transforms(exported.graph_module)


# Of torch, at the first dual tensor of a process.
@pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated")
def test_transforms_of_torch_func() -> None:
    def seen(x: Tensor) -> Tensor:
        assert functorch.in_transform()
        assert functorch.has_transforms_active()
        assert functorch.is_wrapped(x)
        states.append((functorch.in_vmap(), functorch.derivative_order()))
        with functorch.outside_transforms():
            assert not functorch.in_transform()
            assert not functorch.is_wrapped(functorch.unwrapped(x))
        return x.sin()

    states: list[tuple[bool, int]] = []
    torch.vmap(torch.func.grad(seen))(torch.ones(3))
    assert states == [(True, 1)]
    assert not functorch.in_transform()
    with torch.autograd.forward_ad.dual_level():
        assert functorch.in_forward_mode()
        with functorch.outside_transforms():
            dual = torch.autograd.forward_ad.make_dual(torch.ones(1), torch.ones(1))
            assert torch.autograd.forward_ad.unpack_dual(dual).tangent is None


@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_vmap_refuses_loops() -> None:
    x = torch.ones(2, 3)
    with functorch.vmap_fallback_refused(), pytest.raises(RuntimeError, match="fallback"):
        torch.vmap(torch.histc)(x)
    assert torch.vmap(torch.histc)(x).shape == (2, 100)


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


def test_hooks_on_saved_tensors_are_off() -> None:
    packed: list[Tensor] = []
    x = torch.ones(2, requires_grad=True)
    with torch.autograd.graph.saved_tensors_hooks(lambda t: packed.append(t) or t, lambda t: t):
        with autograd_engine.without_saved_tensor_hooks():
            x.sin()
        assert packed == []
        x.sin()
    assert len(packed) == 1


def test_writes_that_do_not_count() -> None:
    x = torch.ones(2)
    with autograd_engine.preserve_version_counters((x,)):
        x.add_(1)
    assert x._version == 0
    x.add_(1)
    assert x._version == 1


def test_a_profiler_is_seen() -> None:
    assert not autograd_engine.is_profiling()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        with profile():
            assert autograd_engine.is_profiling()


def test_borders_of_modes_in_graphs() -> None:
    def off(x: Tensor) -> Tensor:
        with torch.no_grad():
            return x.sin()

    graph = make_fx(off, pre_dispatch=True)(torch.ones(2)).graph
    assert autograd_engine.set_grad_enabled in {node.target for node in graph.nodes}
    assert not autocast.is_any_autocast_enabled()
    border = autocast.enter_autocast("cpu", torch.bfloat16, True, None)
    assert autocast.is_any_autocast_enabled()
    autocast.exit_autocast(border)
    assert not autocast.is_any_autocast_enabled()


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

    mode = fake_tensors.FakeTensorMode(shape_env=ShapeEnv())
    size = fake_tensors.with_dynamic_dims(mode, torch.zeros(5), [True], "x").shape[0]
    with replaced_functions.number_operators_replaced(noted("number")):
        size + 1
    assert called == ["grad", "Doubled", "number"]
    size + 1
    torch.autograd.grad((x * x).sum(), x)
    Doubled.apply(x)
    assert len(called) == 3
    assert torch.is_autocast_enabled() is False
