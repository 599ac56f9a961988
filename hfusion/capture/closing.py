"""Find the submodules whose code needs to know a size that varies, so that a graph holds for one size only."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.capture.export import capture
from hfusion.capture.intercept import Island, Method, intercepted, islands
from hfusion.core.errors import FusionError
from hfusion.core.guards import fixed


def closing(
    model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], dims: Sequence[Collection[int]]
) -> dict[Island, str]:
    """What fixes one of the ``dims`` of the leaves while forward is traced with them open, each with the reason."""
    watch = _SizeWatch()
    # Of interest is what was met before.
    with intercepted(model, islands(model), watch.call), suppress(FusionError):
        capture(model, args, kwargs, varying=False, dims=dims)
    return watch.found or {Island(""): _why("a size that varies")}


@dataclass(eq=False)
class _SizeWatch:
    """``sizes`` are the symbols of the arguments of forward, ``told`` those of them that are known to be fixed."""

    sizes: list[Any] = field(default_factory=list)
    told: set[int] = field(default_factory=set)
    found: dict[Island, str] = field(default_factory=dict)
    inside: list[Island] = field(default_factory=list)

    def call(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of ``method``, before and after which sizes are looked at."""
        if self.inside:
            self._look(self.inside[-1])
        else:
            self._begin((args, kwargs))
        self.inside.append(method.island)
        try:
            result = method.original(*args, **kwargs)
            self._look(method.island)
        except Exception:
            if self.sizes and not self.found:
                self.found[method.island] = _why("a size that varies")
            raise
        finally:
            self.inside.pop()
        return result

    def _begin(self, arguments: Any) -> None:
        inputs = [leaf for leaf in pytree.tree_leaves(arguments) if isinstance(leaf, Tensor)]
        self.sizes = [size for x in inputs for size in x.shape if isinstance(size, torch.SymInt)]
        self.told = {k for k, size in enumerate(self.sizes) if fixed(size) is not None}

    def _look(self, island: Island) -> None:
        """Note ``island``, in which the trace is, if a size was fixed since the last look."""
        closed = {k for k, size in enumerate(self.sizes) if k not in self.told and fixed(size) is not None}
        if closed:
            self.told |= closed
            self.found.setdefault(island, _why(f"a size that varies ({fixed(self.sizes[min(closed)])} now)"))


def _why(what: str) -> str:
    return (
        f"it needs to know {what}, as a Python loop over a length does, so that a graph would hold for one size only; "
        "pad to a few sizes to have it fused"
    )
