"""The package modelbatch: vmap of the forward, one backward, and torch's Adam over views of the members.

https://pypi.org/project/modelbatch
"""

from __future__ import annotations

import torch
from modelbatch import ModelBatch, OptimizerFactory
from torch import Tensor

from hfusion.bench.workload import Running, Unavailable, Workload


def start(workload: Workload) -> Running:
    """Prepare the loop of modelbatch's documentation. Raises Unavailable for models that it cannot train."""
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
