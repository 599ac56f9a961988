"""Records of measurements, kept in the user's cache folder for later processes on the same machine."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Generic, Protocol, TypeVar, get_type_hints

from hfusion.device.cache import cache_file, number, read_json, write_json

# A file keeps the latest MAX_ROWS records. An estimate uses the _NEAREST records by size.
MAX_ROWS, _NEAREST = 128, 5
_COUNTS, _SECONDS = (1, 1e9), (1e-6, 1e6)


@dataclass(frozen=True)
class TimeRecord:
    """A duration in seconds."""

    seconds: float


class SizedRecord(Protocol):
    """A record of a program with this number of operators."""

    @property
    def operators(self) -> int: ...


# Cache of parsed files, with inode, modification time and size to detect changes: many tasks read the same file.
_read: dict[tuple[Path, type], tuple[tuple[int, ...], list[Any]]] = {}

Record = TypeVar("Record", bound=Any)
Sized = TypeVar("Sized", bound=SizedRecord)


@dataclass(frozen=True)
class RecordFile(Generic[Record]):
    """Records of one kind on one machine, the oldest first.

    Attributes:
        record: a dataclass whose fields are of type ``int`` (a count), ``float`` (seconds or a ratio), ``bool``, or
            ``float | None``.
        name: the beginning of the file's name.
        machine: the description of the machine, from `hfusion.device.calibrate.describe`.
    """

    record: type[Record]
    name: str
    machine: Mapping[str, str]

    def read(self) -> list[Record]:
        """Return the records; none if the file is missing, unreadable or invalid."""
        path = cache_file(self.name, self.machine)
        try:
            stat = path.stat()
            stamp = stat.st_ino, stat.st_mtime_ns, stat.st_size
            if _read.get((path, self.record), ((), []))[0] != stamp:
                _read[path, self.record] = stamp, self._parsed(path)
            return list(_read[path, self.record][1])
        except (OSError, ValueError, LookupError, TypeError):
            return []

    def _parsed(self, path: Path) -> list[Record]:
        fields = get_type_hints(self.record)
        rows = read_json(path)["rows"]
        return [self.record(**{key: _value(row[key], kind) for key, kind in fields.items()}) for row in rows]

    def add(self, record: Record) -> None:
        """Keep one more record, if the folder can be written: without it estimates are only worse."""
        rows = [asdict(row) for row in [*self.read(), record][-MAX_ROWS:]]
        with suppress(OSError):
            write_json(cache_file(self.name, self.machine), {"machine": self.machine, "rows": rows})


def nearest(records: Sequence[Sized], operators: int) -> list[Sized]:
    """Return the few records nearest in size, the latest where sizes are equal."""

    def distance(record: Sized) -> float:
        return max(record.operators, operators) / max(1, min(record.operators, operators))

    latest_first = list(reversed(records))
    return sorted(latest_first, key=distance)[:_NEAREST]


def _value(value: object, kind: Any) -> Any:
    """Return the value of a field. Raises ValueError for one that it cannot have."""
    if kind is bool:
        return bool(value)
    if kind is int:
        return int(number(value, *_COUNTS))
    return None if value is None and kind is not float else number(value, *_SECONDS)
