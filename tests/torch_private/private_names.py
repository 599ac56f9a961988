"""Read private_names.toml: torch's private names, the versions they were tried on, and what happens without them."""

from __future__ import annotations

import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

_TABLE = tomllib.loads(Path(__file__).with_suffix(".toml").read_text())


@dataclass(frozen=True)
class PrivateNames:
    """Names of torch that its documentation does not promise, used for one purpose."""

    purpose: str
    names: list[str]
    tried: str
    without: str
    everywhere: bool = False

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield each name with its owner: a module, a class, or "a Tensor"."""
        for part in self.names:
            owner, _, names = part.partition(": ")
            yield from ((owner, name) for name in names.split())


PUBLIC = frozenset(_TABLE["public"])
PRIVATE_NAMES = tuple(PrivateNames(**row) for row in _TABLE["uses"])
