"""What an optimizer is: its numbers and options, the state it keeps, and its update in torch.

docs/optimizers.md writes one from scratch. Kernels (``native``, ``gpu``) are an option beside the formula.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from hfusion.optim.hyper import Hyper


class Formula:
    """The part of an optimizer that says what a step computes; every method is static and knows no optimizer.

    ``h`` holds the hyper-parameters by name: numbers of one member in ``check``, ``stacks`` and ``begin``, float64
    vectors ``[..., B]`` in ``scalars``. ``o`` holds the options by name, as the param group does.
    """

    hypers: ClassVar[tuple[Hyper, ...]]
    """Numbers that may differ between members, in the order in which a kernel in C reads them."""
    options: ClassVar[tuple[str, ...]] = ()
    """Keys of the param group with one value for all members."""
    numbers: ClassVar[Mapping[str, float]] = {"step": 0.0}
    """State that is one number per member, with what it begins with; ``step`` counts the member's steps."""
    torch_class: ClassVar[type[Optimizer] | None] = None
    """The optimizer of torch that does the same for one model, if there is one."""
    counts_steps: ClassVar[bool] = True
    """Whether members that keep no stack count their steps, and torch's class has a ``step`` in its state."""
    elementwise: ClassVar[bool] = True
    """Whether every element is updated by itself. Then tensors may come cut into pieces."""
    kernel: ClassVar[str | None] = None
    """The name of a kernel in ``kernels.c`` and ``triton_kernels.py``."""

    @staticmethod
    def check(h: Any, o: Any) -> None:
        """ValueError if one member's values do not go together."""

    @staticmethod
    def check_param(name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        """ValueError if the optimizer cannot train a parameter that has this shape in one member."""

    @staticmethod
    def stacks(h: Any, o: Any) -> tuple[str, ...]:
        """Names of the state of a member with these values that is shaped like its parameters."""
        return ()

    @staticmethod
    def begin(h: Any, o: Any) -> Mapping[str, float]:
        """What stacks are filled with before the first step, where that is not 0."""
        return {}

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Tensor | None]:
        """What a step needs of numbers, computed in float64: vectors ``[..., B]``, or None for what nobody needs.

        ``n`` holds the ``numbers`` by name, ``[params, B]``; ``n.step`` is 1 at the first step. Others than ``step``
        are updated in place.
        """
        return {**h._asdict(), "step": n.step}

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> None:
        """One step: write ``param`` and ``state`` in place, stacks ``[B, ...]`` of float32 or float64 numbers.

        ``s`` holds the scalars by name, in the dtype and on the device of ``param``, ``[B, 1, ...]``, so that they
        broadcast over the members. ``grad`` and ``s`` may not be written.
        """
        raise NotImplementedError


def unless_zero(vector: Tensor) -> Tensor | None:
    """``vector``, or None if all of it is 0, so that an update may leave out what it is for."""
    return vector if bool(vector.any()) else None


def decayed(grad: Tensor, param: Tensor, decay: Tensor | None) -> Tensor:
    """``grad + decay * param``, but ``grad`` alone where a member has no decay: a product with 0 would carry a NaN."""
    return grad if decay is None else torch.where(decay != 0, grad + decay * param, grad)


def ascent(grad: Tensor, maximize: bool) -> Tensor:
    """The gradient of what is made small."""
    return -grad if maximize else grad
