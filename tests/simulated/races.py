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
    """What the sanitizer says of a trace, each race of two operators once."""
    found: list[str] = []
    # It notes the stack at every operator: that of a thread is short.
    thread = Thread(target=lambda: found.extend(_races(trace)))
    thread.start()
    thread.join()
    return found


def _races(trace: Trace) -> list[str]:
    from torch.cuda._sanitizer import EventHandler

    handler, pieces = EventHandler(), _Pieces(trace)
    for stream in range(-DEVICES, 1):
        handler._handle_stream_creation(stream)
    events: set[int] = set()
    told: dict[tuple[str, str], str] = {}
    for kind, *values in trace:
        if kind == "launch":
            stream, name, reads, writes = values
            write = {piece for each in writes for piece in pieces.of(each)}
            read = {piece for each in reads for piece in pieces.of(each)} - write
            names: dict[Any, list[str]] = {piece: [] for piece in read | write}
            for error in handler._handle_kernel_launch(stream, read, write, set(), name, names):
                now, before = error.current_access, error.previous_access
                pair = str(now.operator), str(before.operator)
                told.setdefault(pair, f"{pair[0]} in queue {now.stream} and {pair[1]} in queue {before.stream}")
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
    return [*told.values()]


class _Pieces:
    """The parts of each block between the places where what somebody uses begins or ends."""

    def __init__(self, trace: Trace) -> None:
        places: dict[int, set[int]] = defaultdict(set)
        for kind, *values in trace:
            if kind == "launch":
                for block, begin, end in (*values[2], *values[3]):
                    places[block].update((begin, end))
        self._places = {block: sorted(found) for block, found in places.items()}

    def of(self, used: Range) -> Iterable[tuple[int, int]]:
        """The parts that these bytes consist of."""
        block, begin, end = used
        places = self._places[block]
        return [(block, places[k]) for k in range(bisect_left(places, begin), bisect_left(places, end))]
