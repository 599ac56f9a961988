"""A cheap check that the modules of a model hold the same parameters, buffers and submodules as before."""

from __future__ import annotations

from itertools import chain
from operator import is_

from torch import nn


class ModuleTables:
    """The parameters, buffers and submodules of all modules of ``model``, as they are when this is made.

    `is_unchanged` compares the objects, not their values, in some microseconds: for checks in every step.
    """

    def __init__(self, model: nn.Module) -> None:
        names = ("_parameters", "_buffers", "_modules")
        self._tables = [getattr(module, name) for module in model.modules() for name in names]
        self._sizes = list(map(len, self._tables))
        self._held = list(chain.from_iterable(map(dict.values, self._tables)))

    def is_unchanged(self) -> bool:
        """Return whether every module holds the same objects as before."""
        return self._sizes == list(map(len, self._tables)) and all(
            map(is_, chain.from_iterable(map(dict.values, self._tables)), self._held)
        )
