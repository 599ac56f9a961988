"""Writes of a new value into a buffer or a parameter, the one effect that captured graphs keep."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from hfusion.core.errors import FusionError
from hfusion.core.layout import Layout
from hfusion.ops.rule import Call, RuleTable, Site, Value


def write(buffer: Tensor, value: Tensor) -> Tensor:
    """Copy ``value [B, *S]`` into the stacked ``buffer [B, *S]``."""
    with torch.no_grad():
        return buffer.copy_(value)


def copy_(site: Site, self: Value, src: Value, non_blocking: Any = False) -> Call:
    if self.shared:
        raise FusionError(
            f"{self.node.name} is one object in all members, but every member writes its own value into it; "
            "give each model its own"
        )
    return site.call(write, (self, src.to(Layout.STACKED, rank=self.rank)), Layout.STACKED, "write")


RULES: RuleTable = {torch.ops.aten.copy_.default: copy_}
