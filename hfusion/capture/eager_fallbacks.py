"""Find the smallest submodules that keep a model from being captured, which must run as eager fallbacks.

`Fitness` decides whether a submodule can run separately, in a loop over members. `survey` finds all submodules that
raise in one trace: it replaces the result of each by the recorded one, and continues the trace. `culprits` goes on
with those around them until a graph is right.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from hfusion.capture.address_access import fills_memory
from hfusion.capture.attribute_fingerprint import RegisteredKey, contents
from hfusion.capture.export import capture, reason
from hfusion.capture.fallback_runtime import OpaqueCall
from hfusion.capture.fallback_tracing import opaque, stand_in
from hfusion.capture.method_interception import WHOLE, Island, Method, intercepted, islands
from hfusion.capture.module_call_trace import RecordedCall, Records
from hfusion.capture.python_reads import MEMORY_QUESTIONS
from hfusion.capture.reachable_code import names_of
from hfusion.capture.registered_tensors import tensors
from hfusion.capture.tensor_references import references
from hfusion.core.copies import module_copy
from hfusion.core.errors import FusionError, KeepsState
from hfusion.core.memory import tensors_in
from hfusion.passes.candidates import Unbatchable

# Types other than tensors that arguments and results of a fallback may have; their values are equal for all members.
ARGUMENTS = (
    str,
    int,
    float,
    complex,
    bytes,
    enum.Enum,
    type,
    torch.dtype,
    torch.device,
    torch.layout,
    torch.memory_format,
)
# Types of results of a submodule, which are the same at every call. Floats are mostly computed from values of tensors.
_RESULTS = (str, int)


@dataclass(frozen=True, eq=False)
class Fitness:
    """Decides which submodules of ``model`` can run alone, from the recorded calls."""

    model: nn.Module
    records: Records
    _unfit_reasons: dict[Island, str | None] = field(default_factory=dict)

    def unfit(self, island: Island) -> str | None:
        """Return why ``island`` cannot run alone; None if it can."""
        if island not in self._unfit_reasons:
            self._unfit_reasons[island] = self._unfit(island)
        return self._unfit_reasons[island]

    def _unfit(self, island: Island) -> str | None:
        label = f"{island} can only run in a loop over members, and"
        if island in self.records.failed:
            return f"{label} raises an error, which forward catches; let it check before it calls"
        for call in self.records.of(island):
            for leaf in pytree.tree_leaves(call.output):
                if leaf is not None and not isinstance(leaf, (Tensor, *(ARGUMENTS if island == WHOLE else _RESULTS))):
                    return (
                        f"{label} returns {_describe(leaf)}; let it return tensors only, in tuples, lists, dicts "
                        f"or classes that torch.utils._pytree knows{_registration(leaf)}{_cacheless(self.model)}"
                    )
            if call.addresses and not self._own_only(island, call):
                return f"{label} uses the address of memory that tensors outside share; use slices, or give it a copy"
            if call.altered and island != WHOLE:
                return f"{label} changes a list, dict or object among its arguments; return what it adds"
            for leaf in pytree.tree_leaves((call.args, call.kwargs)):
                if island != WHOLE and leaf is not None and not isinstance(leaf, (Tensor, *ARGUMENTS)):
                    return f"{label} takes {_describe(leaf)}, which may belong to one member; pass tensors and numbers"
            if island == WHOLE and call.written:
                return f"{label} writes into its input, which members may share; let it write into a copy"
        if island != WHOLE and (written := self.records.state.written(island)) is not None:
            return (
                f"{label} has Python state in its attribute {written}, which may change while forward runs; give it as "
                "an argument, and return it"
            )
        read = MEMORY_QUESTIONS.keys() & self._names_in_code
        if island != WHOLE and read and (read := read & names_of([self.model.get_submodule(island.path)])):
            return f"{label} reads {min(read)} of tensors, which may be its arguments; read it where they are computed"
        held = next(self._held(island), None)
        if held is None:
            return None
        return (
            f"{label} holds {held[1]} in its attribute {held[0]}, where the array cannot put its own tensor; "
            "register it as a parameter, buffer or submodule"
        )

    def _own_only(self, island: Island, call: RecordedCall) -> bool:
        """Return whether each input of the call and each tensor of the island takes up its whole storage."""
        registered = [tensor for _, tensor in tensors(self.model.get_submodule(island.path))]
        inputs = tensors_in((call.args, call.kwargs)) if island != WHOLE else []
        return all(map(fills_memory, (*inputs, *registered)))

    def _held(self, island: Island) -> Iterator[tuple[str, str]]:
        """Yield plain attributes below ``island`` that hold a tensor that cannot be replaced, or a module outside.

        Attributes that forward's code does not name are left out. Yields pairs (attribute, name of what it holds).
        """
        prefix = f"{island.path}." if island.path else ""
        module, ids = self.model.get_submodule(island.path), {name: id(t) for name, t in tensors(self.model)}
        replaced = {
            (
                f"{prefix}{reference.path}.{reference.steps[0].name}".replace("..", ".").strip("."),
                ids[f"{prefix}{name}"],
            )
            for reference in references(module, self._names_in_code)
            for name in reference.names
        }
        for name, value in self._contents.items():
            if name.startswith(prefix) and name.rpartition(".")[2] in self._names_in_code:
                for registered in _registered_names(value):
                    inside = (
                        f"{registered}.".startswith(prefix)
                        if registered in self._paths
                        else (name, ids[registered]) in replaced
                    )
                    if not inside:
                        yield name, registered or "the whole model"

    @cached_property
    def _names_in_code(self) -> frozenset[str]:
        return names_of([self.model])

    @cached_property
    def _contents(self) -> dict[str, Any]:
        return contents(self.model)

    @cached_property
    def _paths(self) -> frozenset[str]:
        return frozenset(path for path, _ in self.model.named_modules())


def _registered_names(value: Any) -> Iterator[str]:
    """Yield the names of the model's registered tensors and modules in a value returned by `contents`."""
    if isinstance(value, RegisteredKey):
        yield value.name
    elif isinstance(value, tuple | frozenset):
        for part in value:
            yield from _registered_names(part)


def _registration(value: Any) -> str:
    name = type(value).__name__
    return f": torch.export.register_dataclass({name}) makes it know {name}" if is_dataclass(value) else ""


def _cacheless(model: nn.Module) -> str:
    """Return advice to switch off the key-value cache if ``model`` is a transformers model that returns it."""
    caches = getattr(getattr(model, "config", None), "use_cache", False)
    return "; call the array with use_cache=False, or set config.use_cache = False in its models" if caches else ""


def _describe(value: Any) -> str:
    return repr(value) if isinstance(value, str | int | float) else type(value).__name__


def survey(model: nn.Module, records: Records, stubs: Mapping[Island, str], fitness: Fitness) -> dict[Island, str]:
    """Return the islands that raise while ``model`` is traced with the ``stubs`` left out, with the reasons.

    For an error in nested calls, the innermost island that can run separately is returned.
    """
    twin = module_copy(model)
    trace = _Trace(twin, records, fitness)
    call = records.top
    others = [island for island in islands(twin) if island not in stubs]
    # The trace may fail: only the islands that raised until then are used.
    with opaque(twin, stubs, records, [twin]), intercepted(twin, others, trace.call), suppress(FusionError):
        capture(twin, call.args, call.kwargs, varying=False)
    # The results that replace other islands may themselves be the reason why the whole fails.
    return {island: why for island, why in trace.raising_islands.items() if island != WHOLE} or trace.raising_islands


class _Trace:
    """State of a trace: ``raising_islands`` are the islands that raised, with the reasons.

    ``_open`` holds the record of each call that has not returned, outermost first; None for calls without a record.
    """

    def __init__(self, model: nn.Module, records: Records, fitness: Fitness) -> None:
        self.raising_islands: dict[Island, str] = {}
        self._model, self._records, self._fitness = model, records, fitness
        self._open: list[RecordedCall | None] = []
        self._call_counts: Counter[tuple[int, Island]] = Counter()
        self._inside: dict[tuple[int, Island], list[RecordedCall]] = defaultdict(list)
        self._opaque_calls: list[OpaqueCall] = []
        for call in records.calls:
            if call.inside:
                self._inside[call.inside[-1], call.island].append(call)

    def call(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``method``; if it raises, return its recorded result instead."""
        island = method.island
        record = self._next(island)
        self._open.append(record)
        try:
            return method.original(*args, **kwargs)
        except Exception as error:
            why = reason(error)
            if record is None or record is self._records.top or self._fitness.unfit(island) is not None:
                if island == WHOLE:
                    self.raising_islands[WHOLE] = why
                raise
            self.raising_islands.setdefault(island, why)
        finally:
            self._open.pop()
        call = stand_in(method, why, record, self._records.changed, self._model, self._opaque_calls)
        return call(*args, **kwargs)

    def _next(self, island: Island) -> RecordedCall | None:
        """Return the recorded call that matches a new call of ``island``, by its index in the surrounding call."""
        if not self._open:
            return self._records.top if island == WHOLE else None
        outer_call = self._open[-1]
        if outer_call is None:
            return None
        key = (outer_call.number, island)
        nth, calls = self._call_counts[key], self._inside[key]
        self._call_counts[key] += 1
        return calls[nth] if nth < len(calls) else None


def culprits(
    model: nn.Module,
    records: Records,
    looped: Mapping[Island, str],
    capture_around: Callable[[Mapping[Island, str]], None],
) -> dict[Island, str]:
    """Return the submodules that must run in a loop, each with the reason.

    These are the smallest ones that raise while the whole model is traced. If the graph around them is refused, those
    that call them run in a loop instead, up to the whole forward.

    Args:
        looped: islands that run in a loop in any case, with the reasons.
        capture_around: captures the whole model with the given islands left out; raises if that fails.

    Raises:
        FusionError: not even the whole forward can run in a loop.
    """
    fitness = Fitness(model, records)
    # The caller has already failed to capture the model without fallbacks.
    fallbacks = dict(looped) or survey(model, records, {}, fitness)
    while WHOLE not in fallbacks:
        why, place = _refusal(fitness, fallbacks, capture_around)
        if why is None:
            return fallbacks
        more = survey(model, records, fallbacks, fitness)
        if not more and place is not None and place not in fallbacks and fitness.unfit(place) is None:
            more = {place: why}
        callers = {caller: reason for island, reason in fallbacks.items() for caller in records.callers(island)}
        fallbacks = fallbacks | more if more else callers or {WHOLE: why}
    if (unfit := fitness.unfit(WHOLE)) is not None:
        raise FusionError(unfit)
    if (written := records.state.written(WHOLE)) is not None:
        raise KeepsState(
            f"forward may change Python state in {written}, and no graph holds all of it: {fallbacks[WHOLE]}", [written]
        )
    return {WHOLE: fallbacks[WHOLE]}


def _refusal(
    fitness: Fitness, stubs: Mapping[Island, str], capture_around: Callable[[Mapping[Island, str]], None]
) -> tuple[str | None, Island | None]:
    """Return why the model cannot be captured with the ``stubs`` left out, and where if one operator is the reason."""
    for stub in stubs:
        if (why := fitness.unfit(stub)) is not None:
            return why, None
    try:
        capture_around(stubs)
    except Unbatchable as error:
        return str(error), Island(module_path(error.node))
    except FusionError as error:
        return str(error), None
    return None, None


def module_path(node: fx.Node) -> str:
    """Return the path of the innermost submodule whose code calls ``node``; empty for the model's own code."""
    return next((path for path, _ in reversed((node.meta.get("nn_module_stack") or {}).values())), "")
