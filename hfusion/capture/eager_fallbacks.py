"""Find the smallest submodules that keep a model from being captured, which must run as eager fallbacks.

`Fitness` decides whether a submodule can run separately, in a loop over members. `survey` finds all submodules that
raise in one trace: it replaces the result of each by the recorded one, and continues the trace. `culprits` searches
the others, submodule by submodule.
"""

from __future__ import annotations

import enum
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator, Mapping
from contextlib import suppress
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
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
from hfusion.core.errors import FusionError
from hfusion.core.memory import tensors_in

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
        if island != WHOLE and (shared := self.records.state.shared(island)) is not None:
            return (
                f"{label} has Python state in its attribute {shared} that changes outside of it, or can be read there, "
                "while forward runs; give it as an argument, and return it"
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
    return trace.raising_islands


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
    """Return the smallest submodules that must run in a loop, each with the reason.

    A few traces of the whole model find all islands that raise while it is traced. Only islands whose graph is refused
    later, because its result differs from the code's, are searched one by one, and equal islands once.

    Args:
        looped: islands that run in a loop in any case, with the reasons; they are part of the result.
        capture_around: captures the whole model with the given islands left out; raises if that fails.

    Raises:
        FusionError: not even the whole forward can run in a loop.
    """
    search = _Search(model, records, Fitness(model, records), capture_around, looped)
    # The caller has already failed to capture the model without fallbacks.
    fallbacks = dict(looped) or search.surveyed()
    while WHOLE not in fallbacks and search.refusal(WHOLE, fallbacks) is not None:
        search = replace(search, fallbacks=fallbacks, below={})
        more = search.surveyed()
        fallbacks = fallbacks | more if more else search.culprits(WHOLE)
        if not more:
            break
    if WHOLE not in fallbacks:
        return fallbacks
    if (why := search.fitness.unfit(WHOLE)) is not None:
        raise FusionError(why)
    return {WHOLE: fallbacks[WHOLE]}


@dataclass(frozen=True, eq=False)
class _Search:
    """Captures islands separately.

    Attributes:
        fallbacks: islands that run in a loop in any case, with the reasons.
        below: cached results of `culprits` for each island.
        verdicts: cached results of `refusal`, shared by equal islands, see `_likeness`.
    """

    model: nn.Module
    records: Records
    fitness: Fitness
    capture_around: Callable[[Mapping[Island, str]], None]
    fallbacks: Mapping[Island, str]
    below: dict[Island, dict[Island, str]] = field(default_factory=dict)
    verdicts: dict[Any, str | None] = field(default_factory=dict)

    def surveyed(self) -> dict[Island, str]:
        """Return the islands that raise in a trace with the ``fallbacks`` left out."""
        raising = survey(self.model, self.records, self.fallbacks, self.fitness)
        # The results that replace other islands may themselves be the reason why the whole fails.
        return {island: why for island, why in raising.items() if island != WHOLE} or raising

    def culprits(self, island: Island) -> dict[Island, str]:
        """Return the fallbacks among ``island`` and the submodules that it calls."""
        if island not in self.below:
            # Ends the recursion if an island calls itself through others.
            self.below[island] = {}
            self.below[island] = self._find_culprits(island)
        return self.below[island]

    def _find_culprits(self, island: Island) -> dict[Island, str]:
        if island in self.fallbacks:
            return {island: self.fallbacks[island]}
        if not self._runs_alone(island):
            # The island around it shows whether replacing these submodules suffices.
            return {stub: why for child in self.records.children(island) for stub, why in self.culprits(child).items()}
        below = self.records.below(island)
        inner = {stub: why for stub, why in self.fallbacks.items() if stub in below}
        why = self.refusal(island, inner)
        if why is None:
            return inner
        inside: dict[Island, str] = {}
        for child in self.records.children(island):
            inside |= self.culprits(child)
        if inside.keys() != inner.keys() and island not in inside:
            remaining = self.refusal(island, inside)
            if remaining is None:
                return inside
            why = f"{why}; {remaining}"
        return {island: why}

    def _runs_alone(self, island: Island) -> bool:
        """Return whether a trial can reuse the recorded arguments of ``island``: objects may have changed since."""
        call = self.records.first(island)
        leaves = pytree.tree_leaves((call.args, call.kwargs))
        return island == WHOLE or all(leaf is None or isinstance(leaf, (Tensor, *ARGUMENTS)) for leaf in leaves)

    def refusal(self, island: Island, stubs: Mapping[Island, str]) -> str | None:
        """Return why ``island`` cannot be captured with the ``stubs`` left out; None if it can."""
        for stub in stubs:
            if (why := self.fitness.unfit(stub)) is not None:
                return why
        key = self._likeness(island, stubs)
        if key not in self.verdicts:
            self.verdicts[key] = self._refusal(island, stubs)
        return self.verdicts[key]

    def _refusal(self, island: Island, stubs: Mapping[Island, str]) -> str | None:
        try:
            if island == WHOLE:
                self.capture_around(stubs)
            else:
                self._capture_alone(island, stubs)
        except FusionError as error:
            return str(error)
        except Exception as error:
            return f"it cannot be run separately: {type(error).__name__}: {error}"
        return None

    def _capture_alone(self, island: Island, stubs: Mapping[Island, str]) -> None:
        top = self.records.first(island)
        args, kwargs = top.args, top.kwargs
        if top.written:
            # Called alone, the island would write into leaves that require grad.
            args, kwargs = pytree.tree_map_only(Tensor, torch.detach, (args, kwargs))
        twin = module_copy(self.model)
        with opaque(twin, stubs, self.records, [twin], top):
            module = twin.get_submodule(island.path)
            target = module if island.method == "forward" else _MethodAsModule(module, island.method)
            capture(target, args, kwargs, varying=False)

    def _likeness(self, island: Island, stubs: Mapping[Island, str]) -> Any:
        """Return a key that is equal for islands that differ at most in the values of their tensors."""
        prefix = f"{island.path}." if island.path else ""
        paths = frozenset((stub.path.removeprefix(prefix), stub.method) for stub in stubs)
        if not all(stub.path.startswith(prefix) for stub in stubs):
            return island, frozenset(stubs)
        module, call = self.model.get_submodule(island.path), self.records.first(island)
        leaves, spec = pytree.tree_flatten((call.args, call.kwargs))
        if not all(leaf is None or isinstance(leaf, (Tensor, *ARGUMENTS)) for leaf in leaves):
            return island, frozenset(stubs)
        try:
            held = tuple(contents(module).items())
        except FusionError:
            return island, frozenset(stubs)
        parts = tuple((path, type(part), part.training) for path, part in module.named_modules())
        registered = tuple((name, _kind(tensor)) for name, tensor in tensors(module))
        arguments = tuple(_kind(leaf) if isinstance(leaf, Tensor) else (type(leaf), leaf) for leaf in leaves)
        return island.method, parts, registered, held, arguments, spec, call.written, paths


def _kind(tensor: Tensor) -> Any:
    return tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device, tensor.requires_grad


class _MethodAsModule(nn.Module):
    """A module whose forward is another module's method."""

    def __init__(self, module: nn.Module, method: str) -> None:
        super().__init__()
        self.module = module
        self.method = method

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return getattr(self.module, self.method)(*args, **kwargs)
