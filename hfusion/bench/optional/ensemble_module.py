"""tensordict's EnsembleModule: vmap of the forward over stacked parameters, one optimizer with one learning rate.

https://docs.pytorch.org/tensordict/stable/reference/generated/tensordict.nn.EnsembleModule.html
"""

from __future__ import annotations

import torch
from tensordict import TensorDict
from tensordict.nn import EnsembleModule, TensorDictModule
from torch import Tensor
from torch.func import stack_module_state

from hfusion.bench import vmapped
from hfusion.bench.workload import Running, Unavailable, Workload


def start(workload: Workload) -> Running:
    """Prepare its loop. Raises Unavailable for models that it cannot train."""
    if workload.case.make_base is not None:
        raise Unavailable("it trains all parameters, and copies the base for each member")
    models, note = vmapped.models_for(workload)
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
