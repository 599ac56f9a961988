"""Estimated bytes and seconds of an array by its number of rows, before training."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.array.fuse import fuse
from hfusion.cluster.messages import DeviceInfo
from hfusion.compiler.arguments import Arguments
from hfusion.core.calls import call_arguments
from hfusion.passes.partition.cut_shards import shards_at
from hfusion.schedule.plan import TaskPlan
from hfusion.tune.chosen_optimizer import MakeOptimizer

# Actions of a step: forward, backward and update. In addition to its operators, `Population.step` takes 0.31 ms, the
# time of three actions, where a call of an operator takes 2 us.
_ACTIONS = 3
# Copies of an array's state that are alive while a save on the host is written: a clone, and its packed bytes.
_SAVING = 2
# Temporaries of a parameter's size during its eager update: the maximum in hf.optim, of SGD with momentum and RAdam, as
# counted on the simulated device of the tests. Kernels need none.
_UPDATING = 4
# Models of a shape that are alive without a row: one to compare others with, one that waits, and two for estimates.
_ASIDE = 4
# Memory of a capture and of the check of an array's first step, in units of the memory of a step of one row: it was at
# most 1.6 for MLPs, a CNN and a PointNet, counted in the same way.
_CAPTURING = 2


class Footprint:
    """Memory and time of an array of a shape on a device.

    Args:
        models: two models of the shape, so that tensors shared between trials are detected.
        inputs: the inputs of a minibatch. All runs on the CPU, since the device may not have the memory.
        evaluated: minibatches whose outputs are held at once to evaluate a metric.
        saved: arrays are saved, with copies on the host.
    """

    def __init__(
        self,
        models: Sequence[nn.Module],
        optimizer: MakeOptimizer,
        inputs: Any,
        device: DeviceInfo,
        *,
        evaluated: int,
        saved: bool,
    ) -> None:
        models = [model.cpu() for model in copy.deepcopy(list(models))]
        fused = fuse(models)
        args, kwargs = call_arguments(inputs, {})
        arguments = Arguments.of(args, kwargs)
        fused.planned_for(device.physical)
        self._program = fused.compiled(arguments).program
        self._stacks = optimizer(fused.parameters()).state_stacks
        self._samples, self._rates = _samples(arguments.leaves), device.rates
        # Twice: each output alone, and their concatenation.
        self._outputs = 2 * evaluated * _output_bytes(models[0], args, kwargs)
        self._largest = max((p.numel() * p.element_size() for p in models[0].parameters()), default=0)
        self._copies = _SAVING if saved and device.physical.type == "cpu" else 0
        self._plans: dict[int, TaskPlan] = {}

    def held(self, rows: int) -> int:
        """Return the bytes held between epochs: weights, buffers, optimizer state, and models without a row."""
        aside = _ASIDE * sum(shard.weights for shard in self._plan(1).shards)
        return aside + (sum(shard.weights + shard.optimizer for shard in self._plan(rows).shards) if rows else 0)

    def passing(self, rows: int) -> int:
        """Return the peak of temporary bytes in a step, an update, a capture, an evaluation or a save."""
        if not rows:
            return 0
        held, gradients = self.held(rows), sum(shard.gradients for shard in self._plan(rows).shards)
        update = gradients + _UPDATING * self._largest * rows
        capture = _CAPTURING * self._plan(1).device_bytes
        return max(self._plan(rows).device_bytes - held, update, capture, self._outputs * rows, self._copies * held)

    def seconds(self, rows: int) -> float:
        """Return the estimated seconds of a step with ``rows`` rows."""
        return self._plan(rows).step_seconds + _ACTIONS * self._rates.action_seconds if rows else 0.0

    def _plan(self, rows: int) -> TaskPlan:
        if rows not in self._plans:
            program = replace(self._program, members=rows)
            shards = shards_at(program, (), self._samples, self._rates, self._stacks)
            self._plans[rows] = TaskPlan("sweep", shards, 1, True, rows)
        return self._plans[rows]


def _samples(leaves: Sequence[Any]) -> int:
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    return int(sizes[0]) if sizes else 1


@torch.no_grad()
def _output_bytes(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    outputs = pytree.tree_leaves(model.eval()(*args, **kwargs))
    return sum(leaf.numel() * leaf.element_size() for leaf in outputs if isinstance(leaf, Tensor))
