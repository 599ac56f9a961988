"""The checked hyper-parameters and options of a param group."""

from __future__ import annotations

from collections import namedtuple
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any, TypeAlias

import torch
from torch import Tensor

from hfusion.optim.hyper import MemberVector

Values: TypeAlias = Any
"""A named tuple: one number per hyper-parameter, or one vector."""

ParamGroup: TypeAlias = dict[str, Any]
"""As torch.optim has them."""

Options: TypeAlias = Any
"""A named tuple: the options of a param group."""


@cache
def named(kind: str, names: tuple[str, ...]) -> Any:
    """Return the named tuple type with these fields."""
    return namedtuple(kind, names)


@dataclass(frozen=True, eq=False)
class Settings:
    """The checked hyper-parameters of a param group: ``columns[hyper][member]``, ``members[member][hyper]``.

    ``vectors``: the param group's own, from which ``columns`` were read. ``buffers``: for each member, the names of the
    state stacks that its update uses. ``counted``: whether every member counts its steps, else those that use stacks.
    """

    vectors: Sequence[MemberVector]
    columns: list[list[float]]
    options: Options
    members: Sequence[Values]
    buffers: Sequence[tuple[str, ...]]
    counted: bool

    @property
    def masters(self) -> bool:
        """True if parameters of half precision have master weights."""
        return bool(self.options.master_weights)

    @cached_property
    def names(self) -> list[str]:
        """The state stacks that some member uses."""
        return list(dict.fromkeys(name for names in self.buffers for name in names))

    @cached_property
    def alike(self) -> bool:
        """True if all members have the same values."""
        return len(set(self.members)) == 1

    @cached_property
    def stateful(self) -> bool:
        """True if some member keeps any state."""
        return self.counted or self.masters or bool(self.names)

    @cached_property
    def advance(self) -> Tensor:
        """The increments of the step counts: float32 ``[B]``, 1 for members whose steps are counted, else 0."""
        return torch.tensor(
            [float(self.counted or bool(names)) for names in self.buffers], dtype=torch.float32, device="cpu"
        )

    @cached_property
    def table(self) -> Tensor:
        """``columns`` as one float64 tensor ``[hyper, member]``."""
        return torch.tensor(self.columns, dtype=torch.float64, device="cpu")

    def vectors_of(self, members: int) -> Values:
        """The hyper-parameters by name, each a float64 vector of the first ``members``."""
        return self.members[0]._make(self.table[:, :members])
