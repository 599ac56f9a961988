"""Keep ``len(x)`` of a tensor dynamic while forward is traced, as in ``x.view(len(x), -1)`` or ``loss.sum() / len(x)``.

Python makes an int of what ``len`` returns, so that a graph would hold for one size of batches. Dynamo reads ``len(x)``
as ``x.shape[0]``; torch.export without Dynamo runs the code itself.
"""

from __future__ import annotations

import builtins
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import Tensor, nn

from hfusion.capture.reachable_code import search_of


@contextmanager
def symbolic_len(module: nn.Module) -> Iterator[None]:
    """Context manager: in the files of the code that ``module`` runs, ``len`` of a tensor returns ``shape[0]``.

    Other threads that run this code meanwhile get the same numbers as from Python's own. Code that takes the length as
    a key of a dict cannot be traced so, and is traced again: use it where sizes have varied.
    """
    files = [space for space, names in search_of([module]).spaces.values() if "len" in names and "len" not in space]
    for names in files:
        names["len"] = _len
    try:
        yield
    finally:
        for names in files:
            names.pop("len", None)


def _len(value: Any) -> Any:
    # For a tensor without dims, Python's own len raises the usual error.
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else builtins.len(value)
