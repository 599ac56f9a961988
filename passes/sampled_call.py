"""The dim of a batch's samples in the values of a member's graph, and the operator that a rule is given."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeAlias

from torch import fx

from hfusion.core.tree import leaves


class SamplesMix(Exception):
    """An operator that is not known to compute every sample independently; says why."""


@dataclass(frozen=True)
class SampleDim:
    """The dim of a value that holds samples: sample n of N has the indices ``(o * N + n) * inner + i``.

    Attributes:
        dim: the dim, counted from 0.
        outer: the range of o; 1 unless other dims were merged into this one, before the samples.
        inner: the range of i; 1 unless other dims were merged into this one, behind the samples.
    """

    dim: int
    outer: Any = 1
    inner: Any = 1


Where: TypeAlias = SampleDim | None


@dataclass(frozen=True)
class SampledCall:
    """An operator: its arguments by name, with nodes for values; the dims of these; the shape of its first result."""

    arguments: Mapping[str, Any]
    where: Mapping[fx.Node, Any]
    shape_of: Callable[[Any], tuple[Any, ...]]
    result: tuple[Any, ...]
    samples: Any

    def __getitem__(self, name: str) -> Any:
        return self.arguments[name]

    def __contains__(self, name: str) -> bool:
        return name in self.arguments

    def at(self, node: fx.Node | None) -> Where:
        """Return the dim of samples of an operand; None if it holds none."""
        return None if node is None else self.where[node]

    def shape(self, node: fx.Node) -> tuple[Any, ...]:
        return self.shape_of(node.meta["val"])

    def rank(self, node: fx.Node) -> int:
        return len(self.shape(node))

    def dims(self, name: str, rank: int) -> list[int]:
        """The dims that an argument names, counted from 0; all of them for None and for an empty list."""
        argument = self[name]
        if argument is None or argument == []:
            return list(range(rank))
        return [dim % rank for dim in ([argument] if isinstance(argument, int) else argument)]

    def only(self, *names: str) -> SampleDim:
        """Return the dim in which all operands of these names hold samples; no other operand may hold any."""
        operands = [node for name in names for node in leaves(self[name], fx.Node)]
        for node in leaves(dict(self.arguments), fx.Node):
            if node not in operands and self.where[node] is not None:
                raise SamplesMix("weights are computed from samples")
        dims = {self.at(node) for node in operands}
        if len(dims) != 1 or None in dims:
            raise SamplesMix("operands hold samples in different dims")
        return next(dim for dim in dims if dim is not None)


def check(holds: bool, why: str) -> None:
    """Raise `SamplesMix` with the reason ``why`` unless ``holds``."""
    if not holds:
        raise SamplesMix(why)
