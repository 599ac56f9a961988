"""Optimizers for one model as their papers write them, where torch has none."""

from __future__ import annotations

from typing import Any

import torch
from torch.optim import Optimizer


class Lion(Optimizer):
    """Chen and others, 2023, "Symbolic Discovery of Optimization Algorithms", program 1."""

    def __init__(
        self,
        params: Any,
        lr: float = 1e-4,
        betas: tuple[float, float] = (0.9, 0.99),
        weight_decay: float = 0.0,
        maximize: bool = False,
    ) -> None:
        super().__init__(params, {"lr": lr, "betas": betas, "weight_decay": weight_decay, "maximize": maximize})

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for param in group["params"]:
                if param.grad is None:
                    continue
                grad, state = param.grad * (-1 if group["maximize"] else 1), self.state[param]
                mean = state.setdefault("exp_avg", torch.zeros_like(param))
                update = (beta1 * mean + (1 - beta1) * grad).sign()
                param.mul_(1 - lr * group["weight_decay"]).sub_(lr * update)
                mean.copy_(beta2 * mean + (1 - beta2) * grad)
                state["step"] = state.get("step", torch.tensor(0.0)) + 1
