"""The definition of an optimizer: its hyper-parameters and options, the state it keeps, and its update in torch.

docs/contributing.md shows how to write one from scratch. Kernels (``native``, ``gpu``) are an optional addition.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar

import torch
from torch import Tensor
from torch.optim import Optimizer

from hfusion.optim.hyper import Hyper


class Formula:
    """The part of an optimizer that defines what a step computes. Every method is static.

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
    """True if members that keep no stack count their steps, and torch's class has a ``step`` in its state."""
    elementwise: ClassVar[bool] = True
    """True if each element is updated independently of the others, so that tensors may be passed in pieces."""
    kernel: ClassVar[str | None] = None
    """The name of a kernel in ``kernels.c`` and ``triton_kernels.py``."""

    @staticmethod
    def check(h: Any, o: Any) -> None:
        """Raise ValueError if one member's hyper-parameters are not compatible with each other."""

    @staticmethod
    def check_param(name: str, shape: torch.Size, dtype: torch.dtype) -> None:
        """Raise ValueError if the optimizer cannot train a parameter that has this shape in one member."""

    @staticmethod
    def stacks(h: Any, o: Any) -> tuple[str, ...]:
        """Return the names of the state tensors, shaped like the parameters, that a member with these values has."""
        return ()

    @staticmethod
    def begin(h: Any, o: Any) -> Mapping[str, float]:
        """Return the initial values of stacks that do not begin with 0, by name."""
        return {}

    @staticmethod
    def scalars(h: Any, o: Any, n: Any) -> Mapping[str, Tensor | None]:
        """Return the scalars of a step, computed in float64: vectors ``[..., B]``, or None if no member needs one.

        ``n`` holds the ``numbers`` by name, ``[params, B]``; ``n.step`` is 1 at the first step. Numbers other than
        ``step`` are updated in place.
        """
        return {**h._asdict(), "step": n.step}

    @staticmethod
    def update(param: Tensor, grad: Tensor, state: Mapping[str, Tensor], s: Any, o: Any) -> None:
        """Update ``param`` and ``state``, stacks ``[B, ...]`` of float32 or float64 numbers, in place.

        ``s`` holds the scalars by name, in the dtype and on the device of ``param``, ``[B, 1, ...]``, so that they
        broadcast over the members. ``grad`` and ``s`` may not be written.
        """
        raise NotImplementedError


def unless_zero(vector: Tensor) -> Tensor | None:
    """Return ``vector``, or None if it is all zeros, so that an update can skip the term that uses it."""
    return vector if bool(vector.any()) else None


def decayed(grad: Tensor, param: Tensor, decay: Tensor | None) -> Tensor:
    """Return ``grad + decay * param``, and ``grad`` for members without decay, whose ``0 * param`` might be NaN."""
    return grad if decay is None else torch.where(decay != 0, grad + decay * param, grad)


def ascent(grad: Tensor, maximize: bool) -> Tensor:
    """Return the gradient of the objective to minimize: ``-grad`` if ``maximize``, else ``grad``."""
    return -grad if maximize else grad
