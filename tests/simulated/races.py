"""Races in what simulated devices were asked for: found by torch's own sanitizer, whatever order it was done in.

Two queues race if both use the same bytes, one of them to write, and neither waits for the other. The sanitizer takes
all threads for one: it lets each know what any of them has waited for.
Source: https://docs.pytorch.org/docs/stable/cuda._sanitizer.html
"""

from __future__ import annotations

from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterable, Sequence
from threading import Thread
from typing import Any

from tests.simulated.queues import DEVICES

Trace = Sequence[tuple[Any, ...]]
Range = tuple[int, int, int]


def races(trace: Trace) -> list[str]:
    """Return the races that the sanitizer finds in a trace, each pair of operators once."""
    errors: list[str] = []
    # It notes the stack at every operator: that of a thread is short.
    thread = Thread(target=lambda: errors.extend(_races(trace)))
    thread.start()
    thread.join()
    return errors


def _races(trace: Trace) -> list[str]:
    from torch.cuda._sanitizer import EventHandler

    handler, pieces = EventHandler(), _Pieces(trace)
    for stream in range(-DEVICES, 1):
        handler._handle_stream_creation(stream)
    events: set[int] = set()
    messages: dict[tuple[str, str], str] = {}
    for kind, *values in trace:
        if kind == "launch":
            stream, name, reads, writes = values
            write = {piece for byte_range in writes for piece in pieces.of(byte_range)}
            read = {piece for byte_range in reads for piece in pieces.of(byte_range)} - write
            names: dict[Any, list[str]] = {piece: [] for piece in read | write}
            for error in handler._handle_kernel_launch(stream, read, write, set(), name, names):
                current, previous = error.current_access, error.previous_access
                pair = str(current.operator), str(previous.operator)
                messages.setdefault(
                    pair, f"{pair[0]} in queue {current.stream} and {pair[1]} in queue {previous.stream}"
                )
        elif kind == "stream":
            handler._handle_stream_creation(values[0])
        elif kind == "record":
            if values[0] not in events:
                handler._handle_event_creation(values[0])
                events.add(values[0])
            handler._handle_event_record(*values)
        elif kind == "stream waits":
            handler._handle_event_wait(*values)
        elif kind == "wait":
            handler._handle_event_synchronization(values[0])
        elif kind == "wait stream":
            handler._handle_stream_synchronization(values[0])
    return [*messages.values()]


class _Pieces:
    """The parts of each block between the offsets at which used ranges begin or end."""

    def __init__(self, trace: Trace) -> None:
        boundaries: dict[int, set[int]] = defaultdict(set)
        for kind, *values in trace:
            if kind == "launch":
                for block, start, end in (*values[2], *values[3]):
                    boundaries[block].update((start, end))
        self._places = {block: sorted(offsets) for block, offsets in boundaries.items()}

    def of(self, byte_range: Range) -> Iterable[tuple[int, int]]:
        """The parts that these bytes consist of."""
        block, start, end = byte_range
        boundaries = self._places[block]
        return [(block, boundaries[k]) for k in range(bisect_left(boundaries, start), bisect_left(boundaries, end))]
