"""torch.func's way: stacked state, vmap of the gradient, and an Adam written over the stacks.

https://docs.pytorch.org/tutorials/intermediate/ensembling.html
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor, nn
from torch.func import functional_call, grad_and_value, stack_module_state, vmap
from torch.nn.attention import SDPBackend, sdpa_kernel

from hfusion.bench.workload import Running, Unavailable, Workload

BETA1, BETA2, EPS = 0.9, 0.999, 1e-8

Tensors = dict[str, Tensor]
Gradients = Callable[[Tensors, Tensors, Tensor, Tensor], tuple[Tensors, Tensor]]


@dataclass(frozen=True)
class Stacks:
    """The parameters [B, ...], Adam's two moments, the count of steps and the rates [B]."""

    parameters: Tensors
    buffers: Tensors
    first: Tensors
    second: Tensors
    count: Tensor
    rates: Tensor


def _has_batch_norm(model: nn.Module) -> bool:
    return any(isinstance(module, nn.modules.batchnorm._BatchNorm) for module in model.modules())


def models_for(workload: Workload) -> tuple[list[nn.Module], str]:
    """Return the models of a workload as vmap can take them, and what they do differently then."""
    models = workload.functional().models()
    if not _has_batch_norm(models[0]):
        return models, ""
    without = [torch.func.replace_all_batch_norm_modules_(model) for model in models]
    return without, "without BatchNorm's running statistics, which vmap cannot update in place"


def _prepare(workload: Workload) -> tuple[Stacks, Gradients, str]:
    models, note = models_for(workload)
    base = copy.deepcopy(models[0]).to("meta")
    # What is frozen is one object in all members, and no stack.
    frozen: Tensors = {name: value for name, value in models[0].named_parameters() if not value.requires_grad}
    stacked, buffers = stack_module_state(models)
    parameters = {name: value.detach() for name, value in stacked.items() if name not in frozen}

    def loss_of(parameters: Tensors, buffers: Tensors, inputs: Tensor, target: Tensor) -> Tensor:
        with workload.autocast():
            output = functional_call(base, (parameters, frozen, buffers), (inputs,))
            return workload.case.loss(output, target)

    stacks = Stacks(
        parameters,
        buffers,
        {name: torch.zeros_like(value) for name, value in parameters.items()},
        {name: torch.zeros_like(value) for name, value in parameters.items()},
        torch.zeros((), device=workload.device),
        torch.tensor(workload.rates, device=workload.device),
    )
    return stacks, vmap(grad_and_value(loss_of), in_dims=(0, 0, None, None)), note


def _adam(stacks: Stacks, gradients: Tensors) -> None:
    """One step of Adam (Kingma and Ba, 2014) in place, member b with ``rates[b]``."""
    stacks.count.add_(1)
    correction2 = (1 - BETA2**stacks.count).sqrt()
    rates = stacks.rates / (1 - BETA1**stacks.count)
    for name, parameter in stacks.parameters.items():
        gradient, first, second = gradients[name], stacks.first[name], stacks.second[name]
        first.lerp_(gradient, 1 - BETA1)
        second.mul_(BETA2).addcmul_(gradient, gradient, value=1 - BETA2)
        denominator = second.sqrt().div_(correction2).add_(EPS)
        rate = rates.view(-1, *[1] * (parameter.dim() - 1))
        parameter.sub_(torch.div(first, denominator, out=denominator).mul_(rate))


def _step(workload: Workload) -> tuple[Callable[[Tensor, Tensor], Tensor], str]:
    stacks, gradients_of, note = _prepare(workload)

    def step(inputs: Tensor, target: Tensor) -> Tensor:
        gradients, losses = gradients_of(stacks.parameters, stacks.buffers, inputs, target)
        _adam(stacks, gradients)
        return losses

    return step, note


def start(workload: Workload) -> Running:
    """The step in eager mode."""
    step, note = _step(workload)
    inputs, target = workload.batch()
    return Running(lambda: step(inputs, target), note=note)


def start_attention(workload: Workload) -> Running:
    """The compiled step with attention as products and softmax: of the kernel on a CPU vmap makes a loop."""
    if not workload.case.attention:
        raise Unavailable("has no attention")
    running = start_compiled(workload)

    def step() -> Sequence[Tensor] | Tensor:
        with sdpa_kernel(SDPBackend.MATH):
            return running.step()

    return replace(running, step=step)


def start_compiled(workload: Workload) -> Running:
    """The whole step, update included, as one compiled function."""
    step, note = _step(workload)
    compiled = torch.compile(step, fullgraph=True)
    inputs, target = workload.batch()
    return Running(lambda: compiled(inputs, target), note=note)
