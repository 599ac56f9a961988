"""Settings of a process that its results depend on, carried over to its workers."""

from __future__ import annotations

import random
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from operator import attrgetter
from typing import Any

import numpy as np
import torch


@dataclass(frozen=True, eq=False)
class ProcessSettings:
    """Settings of torch, and the states of the generators of Python and numpy.

    Attributes:
        threads: the number of threads of torch's operators.
        deterministic: whether only deterministic algorithms are used, and whether others warn only.
        flags: values of flags of ``torch.backends``, by module and name.
    """

    threads: int
    dtype: torch.dtype
    matmul_precision: str
    deterministic: tuple[bool, bool]
    flags: dict[tuple[str, str], Any]
    python_state: Any
    numpy_state: Any

    @staticmethod
    def current() -> ProcessSettings:
        """Return the settings of this process."""
        return ProcessSettings(
            torch.get_num_threads(),
            torch.get_default_dtype(),
            torch.get_float32_matmul_precision(),
            (torch.are_deterministic_algorithms_enabled(), torch.is_deterministic_algorithms_warn_only_enabled()),
            {flag: value for names in _FLAGS for flag, value in _first_readable(names)},
            random.getstate(),
            np.random.get_state(),
        )

    def apply(self) -> None:
        """Apply the settings to this process."""
        torch.set_num_threads(self.threads)
        torch.set_default_dtype(self.dtype)
        if torch.get_float32_matmul_precision() != self.matmul_precision:
            torch.set_float32_matmul_precision(self.matmul_precision)
        torch.use_deterministic_algorithms(self.deterministic[0], warn_only=self.deterministic[1])
        for flag, value in self.flags.items():
            if (flag, value) not in _first_readable((flag,)):
                setattr(attrgetter(flag[0])(torch.backends), flag[1], value)
        random.setstate(self.python_state)
        np.random.set_state(self.numpy_state)


# The first readable name of each row is used: torch refuses to read the older one once the newer one was set.
_FLAGS: tuple[tuple[tuple[str, str], ...], ...] = (
    (("cudnn", "enabled"),),
    (("cudnn", "benchmark"),),
    (("cudnn", "deterministic"),),
    (("cudnn", "allow_tf32"), ("cudnn.conv", "fp32_precision")),
    (("cuda.matmul", "allow_tf32"), ("cuda.matmul", "fp32_precision")),
    (("cuda.matmul", "allow_fp16_reduced_precision_reduction"),),
    (("cuda.matmul", "allow_bf16_reduced_precision_reduction"),),
    (("mkldnn", "enabled"),),
)


def _first_readable(flags: Sequence[tuple[str, str]]) -> list[tuple[tuple[str, str], Any]]:
    for holder, name in flags:
        with suppress(RuntimeError, AttributeError):
            return [((holder, name), getattr(attrgetter(holder)(torch.backends), name))]
    return []
