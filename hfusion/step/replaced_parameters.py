"""Check that an optimizer still has the parameters of its array, which `fully_shard` replaces."""

from __future__ import annotations

from torch.optim import Optimizer

from hfusion.array.module import FusedModule
from hfusion.core.errors import FusionError
from hfusion.core.membership import check_whole_stack
from hfusion.step.step_signatures import GuardedTensors


class TrainedParameters:
    """Checks that an optimizer has parameters of its array. If all were replaced, steps would train nothing.

    Raises FusionError if the optimizer has none of the array's parameters.
    """

    def __init__(self, fused: FusedModule, optimizer: Optimizer) -> None:
        self._fused, self._optimizer = fused, optimizer
        self._checked_tensors: GuardedTensors | None = None

    def check_backward(self) -> None:
        """Check after a backward that started without gradients: only parameters of the array can have one now."""
        if all(param.grad is None for group in self._optimizer.param_groups for param in group["params"]):
            self._check()

    def check_program(self, tensors: GuardedTensors | None) -> None:
        """Check before a compiled step with ``tensors``. Does nothing if they passed at the previous step."""
        if tensors is None or tensors is not self._checked_tensors:
            self._check()
            self._checked_tensors = tensors

    def _check(self) -> None:
        parameters = {id(param): param for param in self._fused.parameters()}
        if any(id(param) in parameters for group in self._optimizer.param_groups for param in group["params"]):
            # Gradients are missing for another reason: parameters are frozen, or forward does not use them.
            return
        for param in parameters.values():
            check_whole_stack(
                param, "shard a frozen base only, fully_shard(fused, ignored_params={those that are trained})"
            )
        raise FusionError(
            f"the parameters of the fused {self._fused._original} were replaced after train_step was made, and the "
            f"{type(self._optimizer).__name__} has none of them: make the optimizer and the step of fused.parameters() "
            "again"
        )
