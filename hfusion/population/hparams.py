"""The hyper-parameters of a population, live: what is written there holds from the next step on."""

from __future__ import annotations

from collections.abc import Iterator, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

from hfusion.optim import FusedOptimizer
from hfusion.optim.hyper import MemberVector, member_vector, read
from hfusion.optim.optimizer_rows import explicit_everywhere, groups_taking


class EveryGroup:
    """One hyper-parameter in several param groups: reading gives what they agree on, writing writes to all.

    ``refusal``: the error message of writes, if every group was given its own value.
    """

    def __init__(self, label: str, vectors: Sequence[MemberVector], refusal: str) -> None:
        self._label, self._vectors, self._refusal = label, vectors, refusal

    def __len__(self) -> int:
        return len(self._vectors[0])

    def __getitem__(self, rows: Any) -> Tensor:
        """Raises ValueError where the groups differ."""
        values = [vector[rows] for vector in self._vectors]
        if not all(torch.equal(value, values[0]) for value in values):
            raise ValueError(
                f"{self._label} differs between the param groups: read and write optimizer.param_groups[...] instead"
            )
        return values[0].as_subclass(Tensor)

    def __setitem__(self, rows: Any, value: Any) -> None:
        """Raises ValueError where every group was given its own value."""
        if self._refusal:
            raise ValueError(self._refusal)
        for vector in self._vectors:
            vector[rows] = torch.as_tensor(value, dtype=torch.float64, device="cpu")

    def copy_(self, values: Tensor) -> None:
        self[:] = values

    def tolist(self) -> list[float]:
        values: list[float] = self[:].tolist()
        return values

    def __repr__(self) -> str:
        return f"{self._label} of {len(self._vectors)} param groups: {[vector.tolist() for vector in self._vectors]}"


class Hparams(MutableMapping[str, Any]):
    """By name a float64 vector ``[rows]`` to read and write, a pair of them for betas.

    With several param groups it is the value of those that take the optimizer's default. A group that was given its own
    keeps it: read and write ``optimizer.param_groups[...]``. See `EveryGroup`.
    """

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._optimizer = optimizer

    def __getitem__(self, key: str) -> Any:
        hypers = [hyper for hyper in self._optimizer.hypers if hyper.key == key]
        if not hypers:
            raise KeyError(f"{key!r} is no hyper-parameter of {type(self._optimizer).__name__}; it has {list(self)}")
        taking = groups_taking(self._optimizer, key)
        refusal = "" if taking else explicit_everywhere(self._optimizer, key)
        columns = zip(
            *(read(group, hypers, self._optimizer.members)[0] for group in taking or self._optimizer.param_groups),
            strict=True,
        )
        vectors = [
            column[0] if len(column) == 1 else EveryGroup(hyper.label, column, refusal)
            for hyper, column in zip(hypers, columns, strict=True)
        ]
        return vectors[0] if hypers[0].index is None else tuple(vectors)

    def __setitem__(self, key: str, value: Any) -> None:
        """Raises ValueError for what is no number or one for each row, and is out of range."""
        held = self[key]
        if isinstance(held, tuple) and (not isinstance(value, tuple | list) or len(value) != len(held)):
            raise ValueError(f"{key}={value!r} is not a pair")
        hypers = [hyper for hyper in self._optimizer.hypers if hyper.key == key]
        values = value if isinstance(held, tuple) else (value,)
        new_vectors = [
            member_vector(hyper.label, member_values, self._optimizer.members).as_subclass(Tensor)
            for hyper, member_values in zip(hypers, values, strict=True)
        ]
        for hyper, vector in zip(hypers, new_vectors, strict=True):
            hyper.check(vector.tolist())
        for vectors, vector in zip(held if isinstance(held, tuple) else (held,), new_vectors, strict=True):
            vectors.copy_(vector)

    def __delitem__(self, key: str) -> None:
        raise TypeError("hyper-parameters cannot be taken away")

    def __iter__(self) -> Iterator[str]:
        return iter(dict.fromkeys(hyper.key for hyper in self._optimizer.hypers))

    def __len__(self) -> int:
        return len(list(iter(self)))

    def __repr__(self) -> str:
        return f"Hparams({', '.join(f'{key}={self[key]}' for key in self)})"
