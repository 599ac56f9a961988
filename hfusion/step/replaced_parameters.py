"""Steps whose optimizer has other parameters than their array, as after `fully_shard`."""

from __future__ import annotations

from torch.optim import Optimizer

from hfusion.array.module import FusedModule
from hfusion.core.errors import FusionError
from hfusion.core.membership import check_whole_stack


def check_trained(fused: FusedModule, optimizer: Optimizer) -> None:
    """Raise a FusionError if no parameter of ``optimizer`` is one of the array any more: a step would train nothing.

    Called after a backward that began without gradients: a parameter with one is of the array.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    if any(param.grad is not None for param in params):
        return
    own = {id(param): param for param in fused.parameters()}
    if any(id(param) in own for param in params):
        # Such as parameters that are frozen, or that no forward uses.
        return
    for param in own.values():
        check_whole_stack(
            param, "shard a frozen base only, fully_shard(fused, ignored_params={those that are trained})"
        )
    raise FusionError(
        f"the parameters of the fused {fused._original} were replaced after train_step was made, and the "
        f"{type(optimizer).__name__} has none of them: make the optimizer and the step of fused.parameters() again"
    )
