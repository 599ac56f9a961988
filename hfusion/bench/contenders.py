"""The ways to train many models that ``fuse`` compares, one row each in CONTENDERS."""

from __future__ import annotations

import copy
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

import hfusion as hf
from hfusion.bench.cases import Contender, Running, Unavailable, Workload
from hfusion.compiler.arguments import Arguments
from hfusion.core.calls import call_arguments
from hfusion.device.native import cores
from hfusion.device.worker_process import Parent, WorkerProcess, close_workers
from hfusion.step.memory_budget import least_bytes


def trained(model: nn.Module) -> list[nn.Parameter]:
    """Return the parameters that are not frozen."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


# One member after the other: the usual code, and the baseline of the comparisons


class SerialLoop:
    """Some members of a workload, each with an optimizer of its own.

    compiled: forward and loss under torch.compile, and torch's fused Adam; models of one class share the compiled code.
    channels_last: weights and inputs of convolutions in that memory format; raises Unavailable where there are none.
    """

    def __init__(
        self, workload: Workload, members: Iterable[int], *, compiled: bool = False, channels_last: bool = False
    ) -> None:
        chosen = tuple(members)
        self.models = (workload.functional() if compiled else workload).models(chosen)
        self.inputs, self.target = workload.batch()
        if channels_last:
            if not any(isinstance(m, nn.Conv2d | nn.ConvTranspose2d) for m in self.models[0].modules()):
                raise Unavailable("has no convolution of images")
            # torch's types have no stub for this argument alone.
            self.models = [model.to(memory_format=torch.channels_last) for model in self.models]  # type: ignore[call-overload]
            self.inputs = self.inputs.to(memory_format=torch.channels_last)
        self.optimizers = [
            torch.optim.Adam(trained(model), lr=workload.rates[member], fused=compiled or None)
            for model, member in zip(self.models, chosen, strict=True)
        ]

        def loss_of(model: nn.Module, inputs: Tensor, target: Tensor) -> Tensor:
            with workload.autocast():
                return workload.case.loss(model(inputs), target)

        self.loss_of: Callable[[nn.Module, Tensor, Tensor], Tensor] = torch.compile(loss_of) if compiled else loss_of

    def step(self) -> list[Tensor]:
        """Make one training step of each member, and return their losses, scalars."""
        losses = []
        for model, optimizer in zip(self.models, self.optimizers, strict=True):
            optimizer.zero_grad()
            loss = self.loss_of(model, self.inputs, self.target)
            loss.backward()
            optimizer.step()
            losses.append(loss.detach())
        return losses


def start_serial(workload: Workload, **how: bool) -> Running:
    """Start a loop over all members. how: see `SerialLoop`."""
    return Running(SerialLoop(workload, range(workload.members), **how).step)


# A process for each core, or a few on an accelerator, which train members one by one on one thread

# Each has a context of some 500 MB on an accelerator, and without MPS they take turns there.
_ON_ACCELERATOR = 4


def _serve(workload: Workload, members: range, how: dict[str, bool], parent: Parent) -> Callable[[bool], list[float]]:
    """Return the function that makes a step in a worker, or none, and returns the losses."""
    del parent
    torch.set_num_threads(1)
    loop = SerialLoop(workload, members, **how)
    return lambda trains: [loss.item() for loss in loop.step()] if trains else []


def start_processes(workload: Workload, **how: bool) -> Running:
    """Start the workers and wait until they are ready. Raises Unavailable where there is work for one only.

    A step is one message to each and one reply from each. how: see `SerialLoop`.
    """
    count = min(cores(), workload.members)
    count = count if workload.device.type == "cpu" else min(count, _ON_ACCELERATOR)
    if count == 1:
        raise Unavailable("needs at least 2 members and 2 cores")
    if how.get("channels_last"):
        SerialLoop(workload, [0], channels_last=True)
    workers = list[WorkerProcess]()

    def ask(trains: bool) -> Tensor:
        for worker in workers:
            worker.call(trains)
        return torch.tensor([loss for worker in workers for loss in worker.poll()])

    try:
        for first, last in pairwise(workload.members * index // count for index in range(count + 1)):
            serve = partial(_serve, workload, range(first, last), how)
            workers.append(WorkerProcess(f"the process of members {first} to {last - 1}", serve, method="spawn"))
        ask(False)
    except BaseException:
        close_workers(workers)
        raise
    return Running(partial(ask, True), partial(close_workers, workers), cores=count)


# torch.func's way: stacked state, vmap of the gradient, and an Adam written over the stacks
# https://docs.pytorch.org/tutorials/intermediate/ensembling.html

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8

_Tensors = dict[str, Tensor]


@dataclass(frozen=True)
class AdamOfStacks:
    """Adam (Kingma and Ba, 2014) over parameters [B, ...], with rates [B]."""

    parameters: _Tensors
    first: _Tensors
    second: _Tensors
    count: Tensor
    rates: Tensor

    def step(self, gradients: _Tensors) -> None:
        """Update the parameters in place, those of member b with ``rates[b]``."""
        self.count.add_(1)
        correction2 = (1 - BETA2**self.count).sqrt()
        rates = self.rates / (1 - BETA1**self.count)
        for name, parameter in self.parameters.items():
            gradient, first, second = gradients[name], self.first[name], self.second[name]
            first.lerp_(gradient, 1 - BETA1)
            second.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
            denominator = second.sqrt().div_(correction2).add_(EPS)
            rate = rates.view(-1, *[1] * (parameter.dim() - 1))
            parameter.sub_(torch.div(first, denominator, out=denominator).mul_(rate))


def models_for_vmap(workload: Workload) -> tuple[list[nn.Module], str]:
    """Return the models of a workload as vmap can take them, and what they do differently then."""
    models = workload.functional().models()
    if not any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in models[0].modules()):
        return models, ""
    without = [torch.func.replace_all_batch_norm_modules_(model) for model in models]
    return without, "without BatchNorm's running statistics, which vmap cannot update in place"


def start_vmap(workload: Workload, *, compiled: bool = False, written_out: bool = False) -> Running:
    """Start the step over the stacks.

    compiled: the whole step, update included, is one compiled function. written_out: attention is products and softmax,
    since vmap makes a loop of its kernel on a CPU; raises Unavailable for a model without attention.
    """
    if written_out and not workload.case.attention:
        raise Unavailable("has no attention")
    models, note = models_for_vmap(workload)
    base = copy.deepcopy(models[0]).to("meta")
    # What is frozen is one object in all members, and no stack.
    frozen: _Tensors = {name: value for name, value in models[0].named_parameters() if not value.requires_grad}
    stacked, buffers = stack_module_state(models)
    parameters = {name: value.detach() for name, value in stacked.items() if name not in frozen}
    first, second = ({name: torch.zeros_like(value) for name, value in parameters.items()} for _ in range(2))
    count, rates = torch.zeros((), device=workload.device), torch.tensor(workload.rates, device=workload.device)
    optimizer = AdamOfStacks(parameters, first, second, count, rates)

    def loss_of(parameters: _Tensors, buffers: _Tensors, inputs: Tensor, target: Tensor) -> Tensor:
        with workload.autocast():
            output = functional_call(base, (parameters, frozen, buffers), (inputs,))
            return workload.case.loss(output, target)

    gradients_of = vmap(grad_and_value(loss_of), in_dims=(0, 0, None, None))

    def step(inputs: Tensor, target: Tensor) -> Tensor:
        gradients, losses = gradients_of(parameters, buffers, inputs, target)
        optimizer.step(gradients)
        return losses  # type: ignore[no-any-return]

    chosen = torch.compile(step, fullgraph=True) if compiled else step
    inputs, target = workload.batch()

    def run() -> Sequence[Tensor] | Tensor:
        if not written_out:
            return chosen(inputs, target)
        with sdpa_kernel(SDPBackend.MATH):
            return chosen(inputs, target)

    return Running(run, note=note)


# hfusion

# Of the loop's memory, what blocks of members may take.
_MEMORY = 1.3


def eager_step(workload: Workload, fused: hf.FusedModule, optimizer: hf.optim.Adam) -> Callable[[], Tensor]:
    """Return the loop's body that the README shows, which gives the losses ``[B]``."""
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


def start_hfusion(workload: Workload) -> Running:
    """Start the public way: fuse, a fused optimizer, one backward for all members."""
    fused = hf.fuse(workload.models())
    return Running(eager_step(workload, fused, hf.optim.Adam(trained(fused), lr=list(workload.rates))))


def start_train_step(
    workload: Workload, *, compile: bool = True, parts: int | str = "auto", limited: bool = False
) -> Running:
    """Start the public way in one call: forward, losses and backward as programs, then the fused optimizer.

    limited: in blocks of members, within 1.3 times the memory that the loop is estimated to take.
    """
    fused = hf.fuse(workload.models())
    optimizer = hf.optim.Adam(trained(fused), lr=list(workload.rates))
    inputs, target = workload.batch()
    memory = None
    if limited:
        with workload.autocast():
            memory = round(_MEMORY * least_bytes(fused, optimizer, Arguments.of(*call_arguments(inputs, {}))))
    train = hf.train_step(fused, workload.case.loss, optimizer, parts=parts, compile=compile, memory=memory)

    def step() -> Tensor:
        with workload.autocast():
            return train(inputs, target)

    if not compile:
        return Running(step)
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


_BLOCKS = f"hf.train_step(memory={_MEMORY} times the loop's)"

CONTENDERS = (
    Contender("serial", "one member after the other, eager, torch.optim.Adam", start_serial),
    Contender("serial-channels-last", "convolutions in channels_last", partial(start_serial, channels_last=True)),
    Contender(
        "serial-fused", "forward and loss under torch.compile, torch's fused Adam", partial(start_serial, compiled=True)
    ),
    Contender("vmap", "torch.func: vmap of the gradient, Adam over the stacks", start_vmap),
    Contender("vmap-compiled", "the same, the whole step under torch.compile", partial(start_vmap, compiled=True)),
    Contender(
        "vmap-attention",
        "the same, attention written out, which vmap else loops over",
        partial(start_vmap, compiled=True, written_out=True),
    ),
    Contender("processes", "a process for each core, at most 4 on an accelerator, each as serial", start_processes),
    Contender("processes-channels-last", "each as serial-channels-last", partial(start_processes, channels_last=True)),
    Contender("processes-compiled", "each as serial-fused", partial(start_processes, compiled=True)),
    Contender(
        "processes-compiled-channels-last",
        "each as serial-fused, convolutions in channels_last",
        partial(start_processes, compiled=True, channels_last=True),
    ),
    Contender("hfusion", "hf.fuse, hf.per_model, hf.optim.Adam", start_hfusion),
    Contender("hfusion-blocks", f"{_BLOCKS}, eager", partial(start_train_step, compile=False, limited=True)),
    Contender("hfusion-blocks-compiled", f"{_BLOCKS}, compiled", partial(start_train_step, limited=True)),
    Contender("hfusion-compiled", "hf.train_step: programs and the optimizer", start_train_step),
    Contender("hfusion-one-part", "the same, parts=1: operators on all threads", partial(start_train_step, parts=1)),
)
