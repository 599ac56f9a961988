"""A save in memory, to send to another process as bytes, since pickle does not support every tensor dtype."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from hfusion.checkpoint.files import Saved
from hfusion.core.memory import real_view


@dataclass(frozen=True)
class PackedSave:
    """The arguments of `hfusion.checkpoint.files.write`. ``complex``: keys of complex tensors."""

    body: str
    tensors: bytes
    complex: frozenset[str]
    step: int

    @staticmethod
    def of(body: Any, tensors: Mapping[str, Tensor], step: int) -> PackedSave:
        """Pack the contents of a save. ``tensors`` must be on the CPU."""
        # Imported late: it imports sympy.
        from safetensors.torch import save

        odd = frozenset(key for key, tensor in tensors.items() if tensor.is_complex())
        plain = {key: real_view(tensor).contiguous() for key, tensor in tensors.items()}
        return PackedSave(json.dumps(body), save(plain), odd, step)

    def saved(self) -> Saved:
        """Return the contents as a `Saved`, as if read from a folder."""
        from safetensors.torch import load

        tensors = load(self.tensors)
        unpacked = {
            key: torch.view_as_complex(tensor) if key in self.complex else tensor for key, tensor in tensors.items()
        }
        return Saved(Path("a save in memory"), json.loads(self.body), unpacked, self.step, None)
