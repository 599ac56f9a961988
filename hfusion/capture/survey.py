"""Find in one trace of a model all submodules whose code raises while it is traced.

Where one raises, what it gave in a real run stands in for it, and the trace goes on.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Mapping
from contextlib import suppress
from typing import Any

from torch import nn

from hfusion.capture.call_trace import RecordedCall, Records
from hfusion.capture.export import capture, reason
from hfusion.capture.fitness import Fitness
from hfusion.capture.intercept import WHOLE, Island, Method, intercepted, islands
from hfusion.capture.opaque import opaque, stand_in
from hfusion.capture.own_code import OpaqueCall
from hfusion.core.copies import module_copy
from hfusion.core.errors import FusionError


def survey(model: nn.Module, records: Records, stubs: Mapping[Island, str], fitness: Fitness) -> dict[Island, str]:
    """What raises while ``model`` is traced with the ``stubs`` left out, each with the reason.

    Of calls in one another it is the innermost that can run by itself.
    """
    twin = module_copy(model)
    trace = _Trace(twin, records, fitness)
    call = records.top
    others = [island for island in islands(twin) if island not in stubs]
    # Of interest is what was met on the way.
    with opaque(twin, stubs, records, [twin]), intercepted(twin, others, trace.call), suppress(FusionError):
        capture(twin, call.args, call.kwargs, varying=False)
    return trace.found


class _Trace:
    """``found`` is what raised so far; ``open`` are the recorded calls that the trace is in, None for others."""

    def __init__(self, model: nn.Module, records: Records, fitness: Fitness) -> None:
        self.found: dict[Island, str] = {}
        self._model, self._records, self._fitness = model, records, fitness
        self._open: list[RecordedCall | None] = []
        self._begun: Counter[tuple[int, Island]] = Counter()
        self._inside: dict[tuple[int, Island], list[RecordedCall]] = defaultdict(list)
        self._met: list[OpaqueCall] = []
        for call in records.calls:
            if call.inside:
                self._inside[call.inside[-1], call.island].append(call)

    def call(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """A call of ``method``, or what stands in for it where it raises."""
        island = method.island
        record = self._next(island)
        self._open.append(record)
        try:
            return method.original(*args, **kwargs)
        except Exception as error:
            why = reason(error)
            if record is None or record is self._records.top or self._fitness.unfit(island) is not None:
                if island == WHOLE:
                    self.found[WHOLE] = why
                raise
            self.found.setdefault(island, why)
        finally:
            self._open.pop()
        call = stand_in(method, why, record, self._records.changed, self._model, self._met)
        return call(*args, **kwargs)

    def _next(self, island: Island) -> RecordedCall | None:
        """The recorded call that the one of ``island`` that begins now is: by its place in the call around it."""
        if not self._open:
            return self._records.top if island == WHOLE else None
        around = self._open[-1]
        if around is None:
            return None
        place = (around.number, island)
        nth, calls = self._begun[place], self._inside[place]
        self._begun[place] += 1
        return calls[nth] if nth < len(calls) else None
