"""The ways to train many models that are compared, one row each in CONTENDERS."""

from __future__ import annotations

import copy
import importlib.util
import warnings
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

import hfusion as hf
from hfusion.bench import cuda_graph, mps, processes, serial, vmapped
from hfusion.bench.workload import Contender, Running, Workload
from hfusion.compiler.arguments import Arguments
from hfusion.core.calls import call_arguments
from hfusion.step.memory_budget import least_bytes

# Of the loop's memory, what blocks of members may take.
MEMORY = 1.3


def start_serial_compiled(workload: Workload, fused: bool = False) -> Running:
    """The loop with forward and loss compiled; models of one class share the compiled code."""
    loop = serial.SerialLoop.of(workload.functional(), range(workload.members), fused)
    return Running(replace(loop, loss_of=torch.compile(loop.loss_of)).step)


def start_serial_fused(workload: Workload) -> Running:
    """The same with torch's fused Adam."""
    return start_serial_compiled(workload, fused=True)


def start_hfusion(workload: Workload, tune: bool = False) -> Running:
    """The public way: fuse, a fused optimizer, one backward for all members."""
    fused = hf.fuse(workload.models(), tune=tune)
    return Running(eager_step(workload, fused, hf.optim.Adam(serial.trained(fused), lr=list(workload.rates))))


def start_hfusion_tuned(workload: Workload) -> Running:
    """The same, the ways of its operators measured."""
    return start_hfusion(workload, tune=True)


def eager_step(workload: Workload, fused: hf.FusedModule, optimizer: hf.optim.Adam) -> Callable[[], Tensor]:
    """The loop's body that the README shows; it gives the losses ``[B]``."""
    loss_of = hf.per_model(workload.case.loss)
    inputs, target = workload.batch()

    def step() -> Tensor:
        optimizer.zero_grad()
        with workload.autocast():
            losses: Tensor = loss_of(fused(inputs), target)
        losses.sum().backward()
        optimizer.step()
        return losses.detach()

    return step


def _limit(workload: Workload, inputs: Any, fused: hf.FusedModule, optimizer: hf.optim.Adam) -> int:
    """Bytes: `MEMORY` times what the loop is estimated to take."""
    args, kwargs = call_arguments(inputs, {})
    with workload.autocast():
        return round(MEMORY * least_bytes(fused, optimizer, Arguments.of(args, kwargs)))


def start_hfusion_blocks(workload: Workload) -> Running:
    """Eager steps by blocks of members."""
    fused = hf.fuse(workload.models())
    optimizer = hf.optim.Adam(serial.trained(fused), lr=list(workload.rates))
    inputs, target = workload.batch()
    memory = _limit(workload, inputs, fused, optimizer)
    train = hf.train_step(fused, workload.case.loss, optimizer, compile=False, memory=memory)

    def step() -> Tensor:
        with workload.autocast():
            return train(inputs, target)

    return Running(step)


def start_hfusion_compiled(workload: Workload, parts: int | str = "auto", limited: bool = False) -> Running:
    """The public way in one call: forward, losses and backward as programs, then the fused optimizer."""
    fused = hf.fuse(workload.models())
    optimizer = hf.optim.Adam(serial.trained(fused), lr=list(workload.rates))
    inputs, target = workload.batch()
    memory = _limit(workload, inputs, fused, optimizer) if limited else None
    train = hf.train_step(fused, workload.case.loss, optimizer, parts=parts, compile=True, memory=memory)

    def step() -> Tensor:
        with workload.autocast():
            return train(inputs, target)

    # What is compiled is known after two steps, and on how many threads after some more, which are taken back.
    states = copy.deepcopy(fused.state_dict()), optimizer.state_dict()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        step(), step()
        while "being measured" in str(train.report()):
            step()
    fused.load_state_dict(states[0])
    optimizer.load_state_dict(states[1])
    return Running(step, note="; ".join(f"eager: {row.why}" for row in train.report().rows if row.why))


def start_hfusion_one_part(workload: Workload) -> Running:
    """Compute all members as one block, each operator on all threads."""
    return start_hfusion_compiled(workload, parts=1)


def start_hfusion_blocks_compiled(workload: Workload) -> Running:
    """Compiled steps by blocks of members."""
    return start_hfusion_compiled(workload, limited=True)


def start_jax(workload: Workload) -> Running:
    """Start JAX, which is imported only when it is selected."""
    from hfusion.bench.optional import jaxed

    return jaxed.start(workload)


def start_model_batch(workload: Workload) -> Running:
    """Start the package modelbatch, which is imported only when it is selected."""
    from hfusion.bench.optional import model_batch

    return model_batch.start(workload)


def start_ensemble_module(workload: Workload) -> Running:
    """Start tensordict's EnsembleModule, which is imported only when it is selected."""
    from hfusion.bench.optional import ensemble_module

    return ensemble_module.start(workload)


def _installed(package: str) -> bool:
    return importlib.util.find_spec(package) is not None


# Listed where they can run.
OPTIONAL = (
    (
        torch.cuda.is_available(),
        Contender("serial-cuda-graph", "the loop, each member's step as a CUDA graph", cuda_graph.start),
    ),
    (
        torch.cuda.is_available(),
        Contender("processes-mps", "a process for each core, which share the GPU by NVIDIA's MPS", mps.start),
    ),
    (_installed("jax"), Contender("jax", "JAX: jit of the whole step, vmap of the gradient", start_jax)),
    (
        _installed("modelbatch"),
        Contender("modelbatch", "the package: vmap of the forward, torch's Adam on views", start_model_batch),
    ),
    (
        _installed("tensordict"),
        Contender(
            "ensemble-module",
            "tensordict's EnsembleModule: vmap of the forward, torch's Adam with one rate for all",
            start_ensemble_module,
            one_rate=True,
        ),
    ),
)

CONTENDERS = (
    Contender("serial", "one member after the other, eager, torch.optim.Adam", serial.start),
    Contender("serial-channels-last", "the same, convolutions in channels_last", serial.start_channels_last),
    Contender("serial-compiled", "serial, forward and loss under torch.compile", start_serial_compiled),
    Contender("serial-fused", "the same, with torch's fused Adam", start_serial_fused),
    Contender("vmap", "torch.func: vmap of the gradient, Adam over the stacks", vmapped.start),
    Contender("vmap-compiled", "the same, the whole step under torch.compile", vmapped.start_compiled),
    Contender("vmap-attention", "the same, attention written out, which vmap else loops over", vmapped.start_attention),
    Contender(
        "processes",
        "a process for each core, at most 4 on an accelerator, its share of the members one by one",
        processes.start,
    ),
    Contender("processes-channels-last", "the same, each as serial-channels-last", processes.start_channels_last),
    Contender("processes-compiled", "the same, each as serial-fused", processes.start_compiled),
    Contender(
        "processes-compiled-channels-last",
        "the same, each as serial-fused, convolutions in channels_last",
        processes.start_compiled_channels_last,
    ),
    *(contender for present, contender in OPTIONAL if present),
    Contender("hfusion", "hf.fuse, hf.per_model, hf.optim.Adam", start_hfusion),
    Contender("hfusion-tuned", "the same, ways to run operators measured: hf.fuse(tune=True)", start_hfusion_tuned),
    Contender("hfusion-blocks", f"hf.train_step(memory={MEMORY} times the loop's), eager", start_hfusion_blocks),
    Contender(
        "hfusion-blocks-compiled",
        f"hf.train_step(memory={MEMORY} times the loop's), compiled",
        start_hfusion_blocks_compiled,
    ),
    Contender("hfusion-compiled", "the same by hf.train_step: programs and the optimizer", start_hfusion_compiled),
    Contender("hfusion-one-part", "the same, parts=1: operators divided among threads", start_hfusion_one_part),
)
