"""JAX's way: one compiled function for the whole step, vmap of the gradient and Adam over the stacks, rates as data.

https://docs.jax.dev/en/latest/automatic-vectorization.html
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import jax
import jax.numpy as jnp
import torch
import torch.nn.functional as F
from torch import Tensor

from hfusion.bench.optional.jax_forms import FORMS, Array, Form, Parameters
from hfusion.bench.vmapped import BETA1, BETA2, EPS
from hfusion.bench.workload import Running, Unavailable, Workload

# Parameters, Adam's two moments, the count of steps.
State = tuple[Parameters, Parameters, Parameters, Array]


ONE_THREAD = "--xla_cpu_multi_thread_eigen=false"
# On Linux the cores that a process may use can be read and set.
CAN_LIMIT = hasattr(os, "sched_setaffinity")


@contextmanager
def _few_cores(count: int) -> Iterator[None]:
    """Context manager: limit the process to ``count`` cores if possible; its threads may use all cores afterwards."""
    if not CAN_LIMIT:
        yield
        return
    allowed = os.sched_getaffinity(0)
    before = _threads()
    os.sched_setaffinity(0, sorted(allowed)[:count])
    try:
        yield
    finally:
        for thread in {0} | _threads() - before:
            os.sched_setaffinity(thread, allowed)


def _threads() -> set[int]:
    """Return the ids of this process's threads."""
    return {int(name) for name in os.listdir("/proc/self/task")}


def _cpu() -> Any:
    """The CPU as JAX's device, with as many threads as torch has.

    XLA starts its threads at the first use of the device, one for each core that the process may use then.
    """
    if torch.get_num_threads() == 1:
        flags = os.environ.get("XLA_FLAGS", "")
        if ONE_THREAD not in flags:
            os.environ["XLA_FLAGS"] = f"{flags} {ONE_THREAD}".strip()
        # Else Python and a thread of XLA share the work of a step.
        jax.config.update("jax_cpu_enable_async_dispatch", False)
    with _few_cores(torch.get_num_threads()):
        return jax.devices("cpu")[0]


def _losses(form: Form, parameters: Parameters, inputs: Array, target: Array) -> Array:
    """Cross entropy of one member."""
    chosen = jnp.take_along_axis(jax.nn.log_softmax(form(parameters, inputs)), target[:, None], axis=1)
    return -chosen.mean()


def _step_of(form: Form, rates: Array) -> Callable[[State, Array, Array], tuple[State, Array]]:
    gradients_of = jax.vmap(
        jax.value_and_grad(lambda parameters, *batch: _losses(form, parameters, *batch)), in_axes=(0, None, None)
    )

    def step(state: State, inputs: Array, target: Array) -> tuple[State, Array]:
        parameters, first, second, count = state
        losses, gradients = gradients_of(parameters, inputs, target)
        count = count + 1
        first = {name: BETA1 * first[name] + (1 - BETA1) * value for name, value in gradients.items()}
        second = {name: BETA2 * second[name] + (1 - BETA2) * value**2 for name, value in gradients.items()}
        scale = rates / (1 - BETA1**count)
        correction = jnp.sqrt(1 - BETA2**count)
        updated = {}
        for name, value in parameters.items():
            rate = scale.reshape(-1, *[1] * (value.ndim - 1))
            updated[name] = value - rate * first[name] / (jnp.sqrt(second[name]) / correction + EPS)
        return (updated, first, second, count), losses

    return step


def start(workload: Workload) -> Running:
    """Prepare the whole step in JAX, with the weights of the torch members.

    Raises Unavailable for a model without a JAX version, for other dtypes than float32, and for other devices than the
    CPU.
    """
    form = FORMS.get(workload.case.name)
    if form is None or workload.case.loss is not F.cross_entropy:
        raise Unavailable("no JAX form of this model")
    if workload.device.type != "cpu" or workload.amp is not None:
        raise Unavailable("compared in float32 on the CPU only")
    with jax.default_device(_cpu()):
        models = workload.models()
        named = [dict(model.named_parameters()) for model in models]
        stacks = {
            name: jnp.asarray(torch.stack([parameters[name].detach() for parameters in named]).numpy())
            for name in named[0]
        }
        zeros = {name: jnp.zeros_like(value) for name, value in stacks.items()}
        inputs, target = (jnp.asarray(tensor.numpy()) for tensor in workload.batch())
        run = jax.jit(_step_of(form, jnp.asarray(workload.rates)), donate_argnums=0)
        state: State = (stacks, zeros, {name: jnp.zeros_like(value) for name, value in zeros.items()}, jnp.zeros(()))

    def step() -> Tensor:
        nonlocal state
        state, losses = run(state, inputs, target)
        return torch.from_numpy(jax.device_get(losses).copy())

    buffers = any(True for _ in models[0].buffers())
    note = "without BatchNorm's running statistics" if buffers else ""
    cores = torch.get_num_threads() if CAN_LIMIT else os.cpu_count() or 1
    return Running(step, cores=cores, note=note)
