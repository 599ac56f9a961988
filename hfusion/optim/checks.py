"""Checks of the properties that kernels assume of the tensors whose memory they read and write."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from hfusion.core.errors import FusionError
from hfusion.core.membership import Membership
from hfusion.core.memory import has_address, is_plain
from hfusion.optim.formula import Formula
from hfusion.torch_private.fake_tensors import FakeTensor

_NUMBERS = {"step": "step counts"}


def check_memory(tensor: Tensor, label: str) -> None:
    """Raise a FusionError if ``tensor`` keeps its values elsewhere than in this process's memory.

    Tensors on the meta device have no values, and pass: a step then computes shapes only, as in torch.optim.
    """
    if has_address(tensor) or (tensor.is_meta and is_plain(tensor)):
        return
    kind = type(tensor).__name__ if type(tensor) not in (Tensor, torch.nn.Parameter) else f"{tensor.layout} tensor"
    if isinstance(tensor, FakeTensor):
        remedy = "step outside the FakeTensorMode, with tensors that have values"
    elif hasattr(tensor, "placements"):
        remedy = (
            "do not shard what it trains: give each rank members of its own, hf.fuse(models[hf.rows(len(models))]); "
            "shard a frozen base only, fully_shard(fused, ignored_params={those that are trained}); or use the "
            "optimizer of this name in torch.optim, which has one value of each hyper-parameter for all members"
        )
    else:
        remedy = "use torch.optim, or convert it to an ordinary torch.Tensor before the optimizer is made"
    raise FusionError(f"{label} must be an ordinary tensor in memory to be updated by hf.optim, got {kind}: {remedy}")


def check_rows(param: Tensor, mark: Membership) -> None:
    """Raise a FusionError unless a stack has a row for each member."""
    if mark.stacked and param.shape[:1] != (mark.members,):
        raise FusionError(
            f"parameter {mark.name!r} has shape {list(param.shape)} in an array of {mark.members} members: it was "
            f"replaced through .data; a stack has {mark.members} rows, and keep, append and put of the fused module "
            "change their number"
        )


def check_state(
    param: Tensor,
    mark: Membership,
    entry: Mapping[str, Tensor],
    stacks: Mapping[str, torch.dtype],
    numbers: Iterable[str],
) -> None:
    """Raise FusionError unless the state of ``param`` fits its shape, its device and the number of members.

    ``stacks``: the dtype that each stack in its state ``entry`` must have, by name. ``numbers``: the names of state
    that is one number per member.
    """
    for name, dtype in stacks.items():
        stack = entry[name]
        check_memory(stack, f"the state {name!r} of parameter {mark.name!r}")
        if (*_shape_device_layout(stack), stack.dtype) != (*_shape_device_layout(param), dtype):
            raise FusionError(
                f"the state {name!r} of parameter {mark.name!r} is {_text(stack)}, the parameter {_text(param)}: one "
                "of them was converted, moved or replaced after the other was made; bring the state to the parameters "
                "by opt.load_state_dict(opt.state_dict()), or make a new optimizer"
            )
    expected_shape = (mark.members,) if mark.stacked else ()
    for name in numbers:
        value = entry[name]
        if not isinstance(value, Tensor) or tuple(value.shape) != expected_shape or value.is_meta:
            actual = _text(value) if isinstance(value, Tensor) else repr(value)
            raise FusionError(
                f"the {_NUMBERS.get(name, f'state {name!r}')} of parameter {mark.name!r} are {actual}; they must be "
                f"numbers of shape {list(expected_shape)}"
            )


def check_gradient(param: Tensor, mark: Membership, grad: Tensor) -> None:
    """Raise RuntimeError for a sparse gradient or one that does not fit ``param``, FusionError if it has no memory."""
    if grad.layout is not torch.strided:
        raise RuntimeError(f"the gradient of {mark.name!r} is sparse ({grad.layout}): hf.optim needs dense ones")
    if grad.shape != param.shape:
        mismatch = f"has shape {list(grad.shape)}, the parameter {list(param.shape)}"
    elif grad.device != param.device:
        mismatch = f"is on {grad.device}, the parameter on {param.device}"
    elif not torch.can_cast(grad.dtype, param.dtype):
        mismatch = f"is {grad.dtype}, the parameter {param.dtype}"
    else:
        if type(grad) is not Tensor:
            check_memory(grad, f"the gradient of {mark.name!r}")
        return
    raise RuntimeError(f"the gradient of {mark.name!r} {mismatch}: one of them was replaced through .data")


def _shape_device_layout(tensor: Tensor) -> tuple[torch.Size, torch.device, torch.layout]:
    return tensor.shape, tensor.device, tensor.layout


def _text(tensor: Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f" ({tensor.layout})"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}{layout}"


def check_padding(mark: Membership, formula: Formula) -> None:
    """Raise ValueError if members may fill only a part of their row, and a step depends on the whole row."""
    if mark.padded and not formula.elementwise:
        raise ValueError(
            f"parameter {mark.name!r} has zeros beside what a member trains, as its rank may be smaller, and a step "
            f"of {type(formula).__name__} depends on a matrix as a whole; give it to another optimizer, such as "
            "hf.optim.AdamW"
        )
