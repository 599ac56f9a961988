"""Weights in float32 beside parameters of half precision.

An update of a bfloat16 or float16 parameter that is smaller than half of its last bit is lost. With
``master_weights=True`` the state holds each such parameter in float32, which the steps update, and the parameter is
what that rounds to (Micikevicius and others, 2018, "Mixed Precision Training", 3.1).
"""

from __future__ import annotations

from collections.abc import Container, Hashable, Mapping, Sequence
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from hfusion.core.errors import FusionError

if TYPE_CHECKING:
    from hfusion.optim.group import RecordableStepper
    from hfusion.optim.settings import Options, ParamGroup, Settings

OPTION: Final = "master_weights"
STACK: Final = "master_param"
"""Its name in the state of a parameter."""

_HALVES = (torch.bfloat16, torch.float16)


def check_option(options: Options) -> None:
    """Raise ValueError unless the option of a param group is a bool."""
    if not isinstance(options.master_weights, bool):
        raise ValueError(f"{OPTION} is {options.master_weights!r}: give True or False")


def state_dtype(param: Tensor, option: bool) -> torch.dtype:
    """Return the dtype of the stacks in the state of ``param``: that of its master weights, if it has them."""
    return torch.float32 if option and param.dtype in _HALVES else param.dtype


def state_stacks(params: Sequence[Tensor], group: ParamGroup, stacks: int) -> int:
    """Return how many stacks as large as a parameter the state takes, with the gradients that a step converts."""
    doubled = any(state_dtype(param, group[OPTION]) != param.dtype for param in params)
    # Each is twice as large; so are the weights and the gradients.
    return 2 * (stacks + 2) if doubled else stacks


def check_unfused(groups: Sequence[ParamGroup]) -> None:
    """Raise a FusionError for param groups with master weights, which no optimizer of torch has."""
    for group in groups:
        if any(state_dtype(param, group[OPTION]) != param.dtype for param in group["params"]):
            raise FusionError(
                "the state has master weights, which no optimizer of torch.optim has: take the members' models by "
                "fused.unfuse(), and begin a new optimizer for each; or save opt.state_dict()"
            )


def restore(param: Tensor, entry: dict[str, Tensor], saved: Mapping[str, Tensor], numbers: Container[str]) -> None:
    """Write the float32 stacks of a saved state into ``entry``, which torch has rounded to the dtype of ``param``.

    numbers: names of what is no stack.
    """
    if STACK in saved:
        entry.update({name: value.to(param.device) for name, value in saved.items() if name not in numbers})


class MasterStepper:
    """Steps of half-precision parameters by ``inner``, which steps their master weights.

    Where a parameter is not what its master weights round to, it has been written to: the master weights are then
    read from it, so that loaded, copied and restarted rows need nothing else.

    Args:
        params: stacks ``[B, *shape]`` of bfloat16 or float16.
        masters: the same in float32.
        inner: made for ``masters``.
    """

    contiguous = False

    def __init__(self, params: Sequence[Tensor], masters: Sequence[Tensor], inner: RecordableStepper) -> None:
        self._params, self._masters, self._inner = list(params), list(masters), inner
        self._gradients: list[Tensor] = []

    @property
    def unrecordable(self) -> str:
        return self._inner.unrecordable

    @property
    def key(self) -> Hashable:
        return self._inner.key

    def release(self) -> None:
        """Drop the references to tensors, until `move` is called."""
        self._params, self._masters, self._gradients = [], [], []
        self._inner.release()

    def move(self, stacks: Sequence[Sequence[Tensor]]) -> None:
        """Continue with ``stacks`` (parameters, master weights, other state): the same tensors at other addresses."""
        self._params, self._masters = list(stacks[0]), list(stacks[1])
        self._inner.move(stacks[1:])

    def step(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """Increment the step counts and update the tensors. ``grads``: one gradient for each parameter."""
        self._convert(grads)
        self._follow()
        self._inner.step(self._gradients, settings)
        torch._foreach_copy_(self._params, self._masters)

    def ready(self, grads: Sequence[Tensor], settings: Settings) -> None:
        """Increment the step counts, and copy the host's numbers that a step needs to the device."""
        self._allocate()
        self._inner.ready(self._gradients, settings)

    def launch(self, grads: Sequence[Tensor]) -> object:
        """Launch the step; return the objects that must stay alive while the launches may be replayed."""
        self._convert(grads)
        self._follow()
        references = self._inner.launch(self._gradients)
        torch._foreach_copy_(self._params, self._masters)
        return references, self._gradients

    def _allocate(self) -> None:
        # At the same addresses in every step, which recorded launches read.
        self._gradients = self._gradients or [torch.empty_like(master) for master in self._masters]

    def _convert(self, grads: Sequence[Tensor]) -> None:
        self._allocate()
        torch._foreach_copy_(self._gradients, list(grads))

    def _follow(self) -> None:
        for param, master in zip(self._params, self._masters, strict=True):
            master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))
