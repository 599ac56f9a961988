"""Further ways to train many models, which need another package or a CUDA device, beside those of `hfusion.bench`.

    python benchmarks/rivals.py fuse --models mlp-small --contenders serial,jax,ensemble-module,modelbatch,hfusion
    python benchmarks/rivals.py fuse --device cuda --contenders serial,serial-cuda-graph,hfusion-compiled
    python benchmarks/rivals.py sweep --contenders one-by-one,ray,hfusion

``pip install hfusion[rivals]`` installs the packages.
"""

from __future__ import annotations

import copy
import logging
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import stack_module_state

from hfusion.bench import fuse_benchmark, sweep_benchmark
from hfusion.bench.cases import Contender, Running, Unavailable, Workload
from hfusion.bench.contenders import BETA1, BETA2, EPS, SerialLoop, models_for_vmap, trained
from hfusion.bench.harness import run_command
from hfusion.bench.sweep_benchmark import REDUCTION, Searched, SweepSearch, train

try:
    import jax
    import jax.numpy as jnp
except ModuleNotFoundError:
    jax = None

# CUDA graphs: the loop with the whole step of each member recorded and replayed


def start_cuda_graph(workload: Workload) -> Running:
    """Start a loop in which the whole step of each member is recorded as a CUDA graph, and replayed.

    https://docs.pytorch.org/docs/stable/notes/cuda.html#whole-network-capture
    """
    if workload.device.type != "cuda":
        raise Unavailable("needs --device cuda")
    loop = SerialLoop(workload, range(workload.members))
    recorded = [_record(loop, model, rate) for model, rate in zip(loop.models, workload.rates, strict=True)]

    def step() -> list[Tensor]:
        for graph, _, _ in recorded:
            graph.replay()
        return [loss for _, loss, _ in recorded]

    return Running(step)


def _record(loop: SerialLoop, model: nn.Module, rate: float) -> tuple[torch.cuda.CUDAGraph, Tensor, object]:
    """Return the graph of a member's step, the tensor of its loss, and the owners of the memory that it addresses."""
    optimizer = torch.optim.Adam(trained(model), lr=rate, capturable=True)
    before = copy.deepcopy(model.state_dict())

    def step() -> Tensor:
        loss = loop.loss_of(model, loop.inputs, loop.target)
        loss.backward()
        optimizer.step()
        return loss.detach()

    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            optimizer.zero_grad(set_to_none=True)
            step()
    torch.cuda.current_stream().wait_stream(side)
    # Without gradients before it, backward creates them at every replay, in the graph's own memory.
    optimizer.zero_grad(set_to_none=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        loss = step()
    # In place: the graph knows addresses. A new Adam's state is zero, its count of steps included.
    model.load_state_dict(before)
    for state in optimizer.state.values():
        for tensor in state.values():
            tensor.zero_()
    return graph, loss, (loop, optimizer)


# tensordict's EnsembleModule: vmap of the forward over stacked parameters, one optimizer with one learning rate
# https://docs.pytorch.org/tensordict/stable/reference/generated/tensordict.nn.EnsembleModule.html


def start_ensemble_module(workload: Workload) -> Running:
    """Prepare its loop. Raises Unavailable for models that it cannot train."""
    from tensordict import TensorDict
    from tensordict.nn import EnsembleModule, TensorDictModule

    if workload.case.make_base is not None:
        raise Unavailable("it trains all parameters, and copies the base for each member")
    models, note = models_for_vmap(workload)
    module = TensorDictModule(models[0], in_keys=["inputs"], out_keys=["output"])
    ensemble = EnsembleModule(module, num_copies=workload.members)
    with torch.no_grad():
        # Its copies draw weights of their own; ours are those of the other contenders.
        for tensors in stack_module_state(models):
            for name, stack in tensors.items():
                ensemble.params_td["module", *name.split(".")].copy_(stack)
    optimizer = torch.optim.Adam(ensemble.params_td.parameters(), lr=workload.rates[0])
    loss_of = torch.vmap(workload.case.loss, (0, None))
    inputs, target = workload.batch()
    data = TensorDict({"inputs": inputs}, batch_size=[])

    def step() -> Tensor:
        optimizer.zero_grad()
        with workload.autocast():
            losses: Tensor = loss_of(ensemble(data)["output"], target)
        losses.sum().backward()
        optimizer.step()
        return losses.detach()

    return Running(step, note=note)


# The package modelbatch: vmap of the forward, one backward, and torch's Adam over views of the members
# https://pypi.org/project/modelbatch


def start_model_batch(workload: Workload) -> Running:
    """Prepare the loop of modelbatch's documentation. Raises Unavailable for models that it cannot train."""
    from modelbatch import ModelBatch, OptimizerFactory

    if workload.case.make_base is not None:
        raise Unavailable("its optimizer would train the frozen base")
    batched = ModelBatch(workload.models())
    factory = OptimizerFactory(torch.optim.Adam)
    optimizer = factory.create_optimizer(batched, [{"lr": rate} for rate in workload.rates])
    inputs, target = workload.batch()

    def step() -> Tensor:
        optimizer.zero_grad()
        with workload.autocast():
            loss = batched.compute_loss(batched(inputs), target, workload.case.loss)
        loss.backward()
        optimizer.step()
        losses: Tensor = batched.latest_losses
        return losses

    return Running(step)


# JAX: one compiled function for the whole step, vmap of the gradient and Adam over the stacks, rates as data
# https://docs.jax.dev/en/latest/automatic-vectorization.html

Array = Any
Parameters = dict[str, Array]
Form = Callable[[Parameters, Array], Array]

NORM_EPS = 1e-5
HEADS = 4


def linear(p: Parameters, name: str, x: Array) -> Array:
    return x @ p[f"{name}.weight"].T + p[f"{name}.bias"]


def conv(p: Parameters, name: str, x: Array, stride: int = 1, padding: int = 1) -> Array:
    """A convolution over images [N, C, H, W], with a bias if there is one."""
    pads = [(padding, padding)] * 2
    layout = ("NCHW", "OIHW", "NCHW")
    y = jax.lax.conv_general_dilated(x, p[f"{name}.weight"], (stride, stride), pads, dimension_numbers=layout)
    bias = p.get(f"{name}.bias")
    return y if bias is None else y + bias[:, None, None]


def batch_norm(p: Parameters, name: str, x: Array) -> Array:
    """Over [N, C, ...], by the statistics of the batch."""
    axes = (0, *range(2, x.ndim))
    shape = (-1,) + (1,) * (x.ndim - 2)
    scaled = (x - x.mean(axes, keepdims=True)) * jax.lax.rsqrt(x.var(axes, keepdims=True) + NORM_EPS)
    return scaled * p[f"{name}.weight"].reshape(shape) + p[f"{name}.bias"].reshape(shape)


def layer_norm(p: Parameters, name: str, x: Array) -> Array:
    scaled = (x - x.mean(-1, keepdims=True)) * jax.lax.rsqrt(x.var(-1, keepdims=True) + NORM_EPS)
    return scaled * p[f"{name}.weight"] + p[f"{name}.bias"]


def max_pool(x: Array) -> Array:
    """A maximum over squares of two by two."""
    window = (1, 1, 2, 2)
    return jax.lax.reduce_window(x, -jnp.inf, jax.lax.max, window, window, "VALID")


def mlp(p: Parameters, x: Array) -> Array:
    layers = sorted({int(name.split(".")[0]) for name in p})
    for layer in layers[:-1]:
        x = jax.nn.relu(linear(p, str(layer), x))
    return linear(p, str(layers[-1]), x)


def cnn(p: Parameters, x: Array) -> Array:
    h = max_pool(jax.nn.relu(batch_norm(p, "1", conv(p, "0", x))))
    h = max_pool(jax.nn.relu(batch_norm(p, "5", conv(p, "4", h))))
    h = jax.nn.relu(batch_norm(p, "9", conv(p, "8", h)))
    return linear(p, "12", h.reshape(len(h), -1))


def resnet8(p: Parameters, x: Array) -> Array:
    h = jax.nn.relu(batch_norm(p, "stem.1", conv(p, "stem.0", x)))
    for block, stride in (("blocks.0", 1), ("blocks.1", 2), ("blocks.2", 2)):
        inner = jax.nn.relu(batch_norm(p, f"{block}.bn1", conv(p, f"{block}.conv1", h, stride)))
        inner = batch_norm(p, f"{block}.bn2", conv(p, f"{block}.conv2", inner))
        if f"{block}.shortcut.0.weight" in p:
            h = batch_norm(p, f"{block}.shortcut.1", conv(p, f"{block}.shortcut.0", h, stride, padding=0))
        h = jax.nn.relu(inner + h)
    return linear(p, "fc", h.mean((2, 3)))


def pointnet(p: Parameters, x: Array) -> Array:
    for layer in (1, 2, 3):
        # A convolution of width 1: one product for all points.
        x = jnp.einsum("oi,nip->nop", p[f"conv{layer}.weight"][:, :, 0], x) + p[f"conv{layer}.bias"][:, None]
        x = batch_norm(p, f"bn{layer}", x)
        x = jax.nn.relu(x) if layer < 3 else x
    return linear(p, "fc2", jax.nn.relu(linear(p, "fc1", x.max(2))))


def transformer(p: Parameters, x: Array) -> Array:
    h = p["token.weight"][x] + p["position.weight"][: x.shape[1]]
    layers = len({name.split(".")[1] for name in p if name.startswith("blocks.")})
    for block in (f"blocks.{layer}" for layer in range(layers)):
        h = h + linear(p, f"{block}.out", _attend(linear(p, f"{block}.qkv", layer_norm(p, f"{block}.norm1", h))))
        inner = jax.nn.gelu(linear(p, f"{block}.mlp.0", layer_norm(p, f"{block}.norm2", h)), approximate=False)
        h = h + linear(p, f"{block}.mlp.2", inner)
    logits = linear(p, "head", layer_norm(p, "norm", h))
    return logits.reshape(-1, logits.shape[-1])


def _attend(qkv: Array) -> Array:
    batch, length, width = qkv.shape
    q, k, v = jnp.moveaxis(qkv.reshape(batch, length, 3, HEADS, width // 3 // HEADS), 2, 0)
    scores = jnp.einsum("nqhd,nkhd->nhqk", q, k) / jnp.sqrt(q.shape[-1])
    mask = jnp.tril(jnp.ones((length, length), bool))
    weights = jax.nn.softmax(jnp.where(mask, scores, -jnp.inf), axis=-1)
    return jnp.einsum("nhqk,nkhd->nqhd", weights, v).reshape(batch, length, width // 3)


def lstm(p: Parameters, x: Array) -> Array:
    bias = p["rnn.bias_ih_l0"] + p["rnn.bias_hh_l0"]
    gates_of_inputs = jnp.moveaxis(x, 1, 0) @ p["rnn.weight_ih_l0"].T + bias

    def cell(state: tuple[Array, Array], input_gates: Array) -> tuple[tuple[Array, Array], None]:
        hidden, memory = state
        into, forget, new, out = jnp.split(input_gates + hidden @ p["rnn.weight_hh_l0"].T, 4, axis=-1)
        memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(into) * jnp.tanh(new)
        return (jax.nn.sigmoid(out) * jnp.tanh(memory), memory), None

    zero = jnp.zeros((len(x), p["rnn.weight_hh_l0"].shape[1]))
    (hidden, _), _ = jax.lax.scan(cell, (zero, zero), gates_of_inputs)
    return linear(p, "fc", hidden)


# By the names of the benchmark's cases.
FORMS: dict[str, Form] = {
    "mlp-small": mlp,
    "mlp-large": mlp,
    "cnn": cnn,
    "resnet8": resnet8,
    "pointnet": pointnet,
    "transformer": transformer,
    "lstm": lstm,
}

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


def start_jax(workload: Workload) -> Running:
    """Prepare the whole step in JAX, with the weights of the torch members.

    Raises Unavailable for a model without a JAX version, for other dtypes than float32, and for other devices than the
    CPU.
    """
    if jax is None:
        raise Unavailable("jax is not installed")
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


# Ray Tune


def ray_tune(search: SweepSearch, share: float) -> Searched:
    """Search by Ray Tune: each trial is an actor that has ``share`` of a core."""
    import ray
    from ray import tune
    from ray.tune.schedulers import AsyncHyperBandScheduler

    case, epochs, configurations = search.case, search.epochs, search.configurations()

    def trainable(config: dict[str, Any]) -> None:
        torch.set_num_threads(1)
        for value in train(case, config["data"], configurations[config["number"]], config["number"], epochs):
            tune.report({"accuracy": value})

    # Else it prints tables of its own, whatever `verbose` says.
    os.environ.setdefault("RAY_AIR_NEW_OUTPUT", "0")
    with ExitStack() as stack:
        folder = stack.enter_context(tempfile.TemporaryDirectory())
        ray.init(num_cpus=search.cores, include_dashboard=False, log_to_driver=False, logging_level=logging.ERROR)
        stack.callback(ray.shutdown)
        brackets: Any = AsyncHyperBandScheduler(max_t=epochs, grace_period=1, reduction_factor=REDUCTION, brackets=3)
        results = tune.Tuner(
            tune.with_resources(tune.with_parameters(trainable), {"cpu": share}),
            param_space={"number": tune.grid_search(list(range(search.trials))), "data": case.data()},
            tune_config=tune.TuneConfig(metric="accuracy", mode="max", scheduler=brackets, reuse_actors=True),
            run_config=tune.RunConfig(storage_path=folder, verbose=0),
        ).fit()
        frames: list[Any] = [results[index].metrics_dataframe for index in range(len(results))]
        values = [list(frame["accuracy"]) for frame in frames]
    return Searched(len(values), sum(map(len, values)), max(accuracies[-1] for accuracies in values))


RIVALS = (
    Contender("serial-cuda-graph", "the loop, each member's step as a CUDA graph", start_cuda_graph),
    Contender("jax", "JAX: jit of the whole step, vmap of the gradient", start_jax),
    Contender("modelbatch", "the package: vmap of the forward, torch's Adam on views", start_model_batch),
    Contender(
        "ensemble-module",
        "tensordict's EnsembleModule: vmap of the forward, torch's Adam with one rate for all",
        start_ensemble_module,
        one_rate=True,
    ),
)
SEARCHES = (
    Contender("ray", "Ray Tune, a core for each trial", partial(ray_tune, share=1.0)),
    Contender("ray-half", "Ray Tune, half a core for each trial", partial(ray_tune, share=0.5)),
)
BENCHMARKS = {"fuse": (fuse_benchmark.BENCHMARK, RIVALS), "sweep": (sweep_benchmark.BENCHMARK, SEARCHES)}


def main(name: str, *arguments: str) -> int:
    """Run the benchmark ``fuse`` or ``sweep`` with contenders of both files."""
    benchmark, rivals = BENCHMARKS[name]
    choices = {**benchmark.choices, "contenders": (*benchmark.choices["contenders"], *rivals)}
    return run_command(replace(benchmark, choices=choices), f"python benchmarks/rivals.py {name}", arguments)


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
