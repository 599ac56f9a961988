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

# A step's forward, backward and update: beside their operators `Population.step` takes 0.31 ms where a call of one
# takes 2 us, three times what an action is counted with.
_ACTIONS = 3
# Copies of an array's state that are alive while a save on the host is written: what is copied, and what is packed.
_SAVING = 2
# Stacks like a parameter that are there while its formula is computed: those of SGD with momentum and RAdam, the most
# of hf.optim, as counted on the simulated device of the tests. Kernels need none.
_UPDATING = 4
# Models of a shape that are there without a row: one to compare others with, one that waits, and two to look at.
_ASIDE = 4
# What the capture of a model and the check of an array's first step take, in units of what one row's step takes: at
# most 1.6 of MLPs, a CNN and a PointNet, counted likewise.
_CAPTURING = 2


class Footprint:
    """Memory and time of an array of a shape on a device.

    Args:
        models: two of the shape, so that what they share is seen.
        inputs: of a minibatch. All is looked at on the CPU: nobody knows yet whether the device has memory for it.
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
        # Each is there as it came, and once more as a part of all.
        self._outputs = 2 * evaluated * _output_bytes(models[0], args, kwargs)
        self._largest = max((p.numel() * p.element_size() for p in models[0].parameters()), default=0)
        self._copies = _SAVING if saved and device.physical.type == "cpu" else 0
        self._plans: dict[int, TaskPlan] = {}

    def held(self, rows: int) -> int:
        """Bytes that stay between epochs: weights, buffers, optimizer state, and what is beside the array."""
        aside = _ASIDE * sum(shard.weights for shard in self._plan(1).shards)
        return aside + (sum(shard.weights + shard.optimizer for shard in self._plan(rows).shards) if rows else 0)

    def passing(self, rows: int) -> int:
        """Bytes that are there besides for a while: of a step, of an evaluation, of a save."""
        if not rows:
            return 0
        held, gradients = self.held(rows), sum(shard.gradients for shard in self._plan(rows).shards)
        update = gradients + _UPDATING * self._largest * rows
        capture = _CAPTURING * self._plan(1).device_bytes
        return max(self._plan(rows).device_bytes - held, update, capture, self._outputs * rows, self._copies * held)

    def seconds(self, rows: int) -> float:
        """Of a step of so many rows."""
        return self._plan(rows).step_seconds + _ACTIONS * self._rates.action_seconds if rows else 0.0

    def _plan(self, rows: int) -> TaskPlan:
        if rows not in self._plans:
            program = replace(self._program, members=rows)
            whole = shards_at(program, (), self._samples, self._rates, self._stacks)
            self._plans[rows] = TaskPlan("sweep", whole, 1, True, rows)
        return self._plans[rows]


def _samples(leaves: Sequence[Any]) -> int:
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    return int(sizes[0]) if sizes else 1


@torch.no_grad()
def _output_bytes(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any]) -> int:
    outputs = pytree.tree_leaves(model.eval()(*args, **kwargs))
    return sum(leaf.numel() * leaf.element_size() for leaf in outputs if isinstance(leaf, Tensor))
