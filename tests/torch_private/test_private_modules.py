"""Assumptions of hfusion about torch's modules, optimizers, loaders and Inductor hold on the installed torch."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import parametrizations, parametrize
from torch.optim.optimizer import register_optimizer_step_post_hook
from torch.utils.data import DataLoader

from hfusion.torch_private import (
    cpp_entry,
    dataloader_workers,
    inductor_settings,
    module_hooks,
    optimizer_hooks,
)


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def test_hooks_and_parametrizations_of_modules() -> None:
    assert module_hooks.global_hooks() == []
    handle = nn.modules.module.register_module_forward_hook(print)
    assert module_hooks.global_hooks() == [("_global_forward_hooks", print)]
    handle.remove()
    layer = parametrizations.orthogonal(nn.Linear(2, 2))
    assert isinstance(layer.parametrizations.weight[0], module_hooks.Orthogonal)
    assert isinstance(nn.BatchNorm2d(1), module_hooks.BatchNorm)
    with parametrize.cached():
        weight = layer.weight
        assert module_hooks.caches_parametrizations()
        with module_hooks.without_cached_parametrizations():
            assert not module_hooks.caches_parametrizations()
            assert layer.weight is not weight
        assert layer.weight is weight


def test_hooks_of_optimizers() -> None:
    opt = optimizer()
    count = optimizer_hooks.count_global_step_hooks()
    assert not optimizer_hooks.has_step_hooks(opt)
    opt.register_step_post_hook(lambda *args: None)
    assert optimizer_hooks.has_step_hooks(opt)
    handle = register_optimizer_step_post_hook(lambda *args: None)
    assert optimizer_hooks.count_global_step_hooks() == count + 1
    handle.remove()


def test_methods_of_optimizers_and_the_norm_are_wrapped(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.nn.utils import clip_grad

    for kind, name in ((torch.optim.Optimizer, "add_param_group"), (torch.optim.Optimizer, "zero_grad")):
        monkeypatch.setattr(kind, name, getattr(kind, name))
    grouped = "_group_tensors_by_device_and_dtype"
    monkeypatch.setattr(clip_grad, grouped, getattr(clip_grad, grouped))
    called: list[str] = []

    def noted(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return lambda run: lambda *args, **kwargs: (called.append(name), run(*args, **kwargs))[1]

    optimizer_hooks.wrap_optimizer_methods(noted("add"), noted("zero"))
    optimizer_hooks.wrap_norm(noted("norm"))
    opt = optimizer()
    opt.zero_grad()
    parameter = opt.param_groups[0]["params"][0]
    parameter.grad = torch.ones(1)
    nn.utils.clip_grad_norm_([parameter], 1.0)
    assert called[:2] == ["add", "zero"]
    assert "norm" in called


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


def test_settings_of_inductor() -> None:
    before = inductor_settings.changed_values()
    with inductor_settings.under_values({"max_fusion_size": 7, "aot_inductor.package": True}):
        assert inductor_settings.changed_values() == {**before, "max_fusion_size": 7}
    assert inductor_settings.changed_values() == before


def test_handles_of_tensors() -> None:
    tensors = [torch.ones(2), torch.zeros(3)]
    resolved = cpp_entry.tensors_of(cpp_entry.handles_of(tensors))
    assert [tensor.data_ptr() for tensor in resolved] == [tensor.data_ptr() for tensor in tensors]
