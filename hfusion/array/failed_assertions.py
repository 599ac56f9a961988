"""Failed assertions in forward: the members are called in turn, so that one raises its own error."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor, nn

from hfusion.capture.fallback_runtime import OtherSizes
from hfusion.capture.registered_tensors import tensors
from hfusion.compiler.arguments import Arguments
from hfusion.core.errors import FusionError
from hfusion.passes.expected_checks import FailedCheck

REFUSALS = (OtherSizes, FailedCheck)
"""Errors raised by a program that is not valid for its inputs, so that another has to be compiled."""


def call_members(array: Iterable[nn.Module], arguments: Arguments, refusal: FusionError) -> None:
    """After a failed check, call the members of ``array`` in turn, so that one raises its own error.

    If none does, because the caller of a submodule catches the error, parameters and buffers are restored.
    """
    if not isinstance(refusal, FailedCheck):
        return
    members = list(array)
    saved_values: list[tuple[Tensor, Tensor]] = []
    for index, member in enumerate(members):
        args, kwargs = arguments.of_member(index)
        saved_values += [(tensor, tensor.detach().clone()) for _, tensor in tensors(member)]
        member(*args, **kwargs)
    with torch.no_grad():
        for tensor, value in saved_values:
            tensor.copy_(value)
