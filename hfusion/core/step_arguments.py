"""The arguments of training steps: losses, which may be unable to train a model, and when to compile."""

from __future__ import annotations

from typing import Any, TypeAlias

from torch import Tensor

from hfusion.core.layout import Listed

Compile: TypeAlias = bool | None
"""The argument ``compile``. None compiles once steps took five seconds, if that is faster, True always, False never."""


def check_compile(compile: object) -> None:
    """Raise ValueError unless ``compile`` is a `Compile`."""
    if compile is not None and not isinstance(compile, bool):
        raise ValueError(
            f"compile is {compile!r}. Give None to compile where that pays, True to compile always, or False to "
            "compile never"
        )


class PerMemberFunction:
    """Base class of functions that are computed for each member already."""


def check_loss_function(loss: Any) -> None:
    """Raise ValueError unless ``loss`` is a function of outputs and targets, without `hfusion.per_model`."""
    if not callable(loss):
        raise ValueError(f"the loss must be a function, such as F.cross_entropy, got {type(loss).__name__}")
    if isinstance(loss, PerMemberFunction):
        raise ValueError(
            f"the loss is {loss!r}, but a loss is applied to each member here anyway. Pass the function itself, "
            "without hf.per_model."
        )


def check_losses(losses: Any, members: int | None = None, trains: bool = True) -> None:
    """Raise ValueError unless a loss returned one number with a gradient for each member.

    Args:
        members: B of losses ``[B]`` of an array; None for the loss ``[]`` of a single model.
        trains: whether a parameter requires a gradient, so that the losses must have one.
    """
    expected, owner = ((), "a member") if members is None else ((members,), f"each of {members} members")
    if not isinstance(losses, Tensor):
        given = losses[0] if isinstance(losses, Listed) else losses
        raise ValueError(
            f"the loss must give one number for {owner}, it gave {type(given).__name__}. Return a tensor that is "
            "computed from the outputs, without item()."
        )
    if losses.shape != expected:
        shape = f"a tensor {list(losses.shape)}" if members is None else f"[B, ...] = {list(losses.shape)}"
        raise ValueError(f"the loss must give one number for {owner}, it gave {shape}. Take its mean.")
    if trains and not losses.requires_grad:
        raise ValueError(
            f"the losses, of dtype {losses.dtype}, have no gradient, so nothing would be trained. Compute them in "
            "floating point from the outputs, without detach() or item(), and let a parameter require a gradient."
        )
