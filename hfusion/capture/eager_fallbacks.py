"""Find the smallest submodules that keep a model from being captured, and capture around them.

`record` records the calls of all submodules in one eager run. `Fitness` decides whether a submodule can run
separately, in a loop over members. `culprits` traces the model until a graph is right: whatever raises is left out of
the next trace, together with the submodules like it, or else what is around it. In the graph, `opaque` makes each one
call that loops over the members at run time.
"""

from __future__ import annotations

import enum
import itertools
import types
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from hfusion.capture.attribute_fingerprint import RegisteredKey, contents, python_attributes
from hfusion.capture.eager_runs import apart, call_on_copies, twin
from hfusion.capture.fallback_runtime import (
    TENSOR,
    OpaqueCall,
    Result,
    numbered,
    share_memory,
)
from hfusion.capture.hooks import WHOLE, Island, Method, intercepted, islands
from hfusion.capture.python_reads import ADDRESSES, MEMORY_QUESTIONS, STRIDE_QUESTIONS
from hfusion.capture.python_state import MUTABLE_CONTAINERS, compared_variables, identity, restored
from hfusion.capture.reachable_code import names_of, names_written, search_of
from hfusion.capture.registered_tensors import tensors
from hfusion.core.copies import copies
from hfusion.core.errors import FusionError, KeepsState
from hfusion.core.memory import same_values, tensors_in
from hfusion.core.python_values import PLAIN, IdentityRef, Link, container_key, parts, walk
from hfusion.core.tree import know_dataclasses
from hfusion.passes.candidates import Unbatchable
from hfusion.passes.functional import OPAQUE
from hfusion.torch_private.dispatch_modes import is_wrapped

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


# The calls of submodules in one eager run.


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One call of an island.

    Attributes:
        number, inside: the number of the call, and the numbers of the calls around it, outermost first.
        leaves: its flat arguments.
        contiguous: whether its inputs were contiguous.
        written: whether it wrote into an input.
        does: what it did that a call on copies would lose; empty for nothing.
    """

    island: Island
    number: int
    inside: tuple[int, ...]
    leaves: Sequence[Any]
    output: Any
    contiguous: bool
    written: bool
    does: str


@dataclass(frozen=True, eq=False)
class Records:
    """The recorded calls of one run of a model.

    Attributes:
        calls: the calls in the order in which they began.
        changed: the keys of the model's tensors that the run changed.
        failed: the islands with a call that raised an error, which forward caught.
        modes: see `Capture`.
        state: how the model's Python state changes during the run.
    """

    calls: Sequence[RecordedCall]
    changed: frozenset[str]
    failed: frozenset[Island]
    modes: Mapping[str, bool]
    state: StateWatch

    def of(self, island: Island) -> list[RecordedCall]:
        return [call for call in self.calls if call.island == island]

    def outside(self, island: Island, stubs: Set[Island]) -> list[RecordedCall]:
        """Return the calls of ``island`` that are not inside a call of one of the ``stubs``."""
        entered = {call.number for call in self.calls if call.island in stubs}
        return [call for call in self.of(island) if entered.isdisjoint(call.inside)]

    def callers(self, island: Island) -> list[Island]:
        """Return the islands that call ``island`` directly."""
        by_number = {call.number: call.island for call in self.calls}
        return [by_number[call.inside[-1]] for call in self.of(island) if call.inside and call.inside[-1] in by_number]


def record(
    model: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    modes: Mapping[str, bool],
    recorded: Sequence[Island],
) -> Records:
    """Run a copy of ``model`` and record the calls in it. Inputs and random states are not changed.

    Args:
        modes: see `Capture`.
        recorded: the islands whose calls are recorded, with that of the whole forward.

    Raises:
        FusionError: forward is no plain method.
    """
    if WHOLE not in islands(model):
        raise FusionError(
            f"forward of {type(model).__name__} is no plain method, and can only run in a loop over members; define it "
            "by def forward(self, ...)"
        )
    member = twin(model)
    recorder = _CallRecorder(StateWatch(member))
    registered = dict(tensors(member))
    before = {name: _state(tensor) for name, tensor in registered.items()}
    with restored(model), apart(member):
        args, kwargs = copies((args, dict(kwargs)))
        with intercepted(member, recorded, recorder.call):
            call_on_copies(member, args, kwargs)
        after, originals = dict(tensors(member)), dict(tensors(model))
        changed = {name for name, tensor in after.items() if not same_values(tensor, originals[name])}
        changed |= {
            name
            for name in registered
            if registered[name] is not after[name] or _state(registered[name]) != before[name]
        }
    calls = [call for call in recorder.calls if call is not None]
    return Records(calls, frozenset(changed), frozenset(recorder.failed), modes, recorder.state)


def _state(tensor: Tensor) -> tuple[int, int]:
    """Return version and address; a write changes the former, an assignment of ``tensor.data`` the latter."""
    return tensor._version, tensor.data_ptr() if tensor.layout is torch.strided else 0


@dataclass
class _CallRecorder:
    """Records calls.

    Attributes:
        calls: the calls by number; None for those that raised an error, or have not ended.
        failed: the islands that raised errors.
        open: the numbers of the calls that have not ended.
    """

    state: StateWatch
    calls: list[RecordedCall | None] = field(default_factory=list)
    failed: set[Island] = field(default_factory=set)
    open: list[int] = field(default_factory=list)

    def call(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``method``, and record the call."""
        island, module, number = method.island, method.module, len(self.calls)
        know_dataclasses((args, kwargs))
        own = [tensor for _, tensor in tensors(module)]
        # Tensors wrapped by torch.func's transforms mean nothing outside of them.
        if any(map(is_wrapped, [*tensors_in((args, kwargs)), *own])):
            return method.original(*args, **kwargs)
        self.state.look(island, module)
        self.calls.append(None)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        inputs = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors_in(leaves)]
        contiguous = all(x.layout is torch.strided and x.is_contiguous() for x, _, _ in inputs)
        self.open.append(number)
        try:
            output = method.original(*args, **kwargs)
        except Exception:
            self.failed.add(island)
            raise
        finally:
            self.open.pop()
        know_dataclasses(output)
        results = tensors_in(output)
        self.state.look(island, module)
        if any(map(is_wrapped, results)):
            return output
        later_leaves, later_spec = pytree.tree_flatten((args, kwargs))
        altered = spec != later_spec or any(a is not b for a, b in zip(leaves, later_leaves, strict=True))
        written = any(x._version != version or not same_values(x, copied) for x, version, copied in inputs)
        sources = [*(x for x, _, _ in inputs), *own, *(tensor for _, tensor in tensors(module))]
        does = ""
        if share_memory(results, sources):
            does = "gives back its input, a tensor of its own or one tensor twice, or a view of it"
        elif not torch.is_grad_enabled() and any(result.requires_grad for result in results):
            does = "gives results with a gradient while gradients are off; switch them on around it"
        elif altered:
            does = "changes a list, dict or object among its arguments; return what it adds"
        # A new container is recorded: forward may change the original later.
        self.calls[number] = RecordedCall(
            island,
            number,
            tuple(self.open),
            leaves,
            pytree.tree_map(lambda leaf: leaf, output),
            contiguous,
            written,
            does,
        )
        return output


def _path(*parts: str) -> str:
    return ".".join(filter(None, parts))


# Types whose contents are no state of a model.
_LEAVES = (*PLAIN, Tensor, type, types.ModuleType, types.BuiltinFunctionType, nn.Module, fx.Graph)
# Nested levels of containers whose items are compared.
_DEPTH = 4


class StateWatch:
    """Compares the Python state of ``model`` with that at the beginning of a run of its forward.

    Attributes:
        changing: the islands of which a call began or ended with another state in reach, with an attribute of it.
    """

    def __init__(self, model: nn.Module) -> None:
        self.changing: dict[Island, str] = {}
        self._model, self._search = model, search_of([model])
        self._registered = {id(tensor) for _, tensor in tensors(model)}
        self._start = self._read("", model)

    def look(self, island: Island, module: nn.Module) -> None:
        """Compare the state in reach of ``module``, of which a call begins or ends."""
        if island not in self.changing:
            state, prefix = self._read(island.path, module), f"{island.path}." if island.path else ""
            before = {name: key for name, key in self._start.items() if name.startswith(prefix) or name in state}
            changed = [name for name in {**before, **state} if before.get(name) != state.get(name)]
            if changed:
                self.changing[island] = min(changed)

    def _read(self, path: str, module: nn.Module) -> dict[str, Any]:
        """Return the attributes of ``module`` and of its submodules, and all variables that code names."""
        held = {
            _path(path, inner, name): container_key(value, self._key, _DEPTH)
            for inner, part in module.named_modules(remove_duplicate=False)
            for name, value in python_attributes(part)
        }
        return held | dict(compared_variables(self._search.holders))

    def _key(self, value: Any) -> Any:
        # What is written into registered tensors is no Python state.
        return IdentityRef(value) if id(value) in self._registered else identity(value)

    @cached_property
    def _names_written(self) -> tuple[frozenset[str], frozenset[str]]:
        return names_written(self._model)

    def written(self, island: Island) -> str | None:
        """Return an attribute in reach of ``island`` that forward changes, or may change; None if there is none."""
        if island in self.changing:
            return self.changing[island]
        modules = list(self._model.get_submodule(island.path).modules())
        held = {id(module): [(name, value) for name, value in python_attributes(module)] for module in modules}

        def visit(holder: Any) -> list[Any]:
            if not isinstance(holder, nn.Module):
                held[id(holder)] = [
                    (name if link is Link.ATTRIBUTE else "", part) for link, name, part in parts(holder)
                ]
            return [value for _, value in held[id(holder)] if not isinstance(value, _LEAVES)]

        reached = walk(modules, visit)
        # Assignments in code are known by names alone, and objects of other files, such as a configuration, have many.
        files = {type(module).__module__ for module in modules}
        assigned, filled = self._names_written
        return min(
            (
                name
                for key, holder in reached.items()
                for name, value in held[key]
                if (name in assigned and (type(holder).__module__ in files or type(holder) is types.SimpleNamespace))
                or (name in filled and isinstance(value, MUTABLE_CONTAINERS))
            ),
            default=None,
        )


# Which submodules run in a loop.


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
        calls, kinds = self.records.of(island), ARGUMENTS if island == WHOLE else _RESULTS
        for leaf in pytree.tree_leaves([call.output for call in calls]):
            if leaf is not None and not isinstance(leaf, (Tensor, *kinds)):
                return (
                    f"{label} returns {_describe(leaf)}; let it return tensors only, in tuples, lists, dicts "
                    f"or classes that torch.utils._pytree knows{_registration(leaf)}{_cacheless(self.model)}"
                )
        if any(call.written for call in calls):
            return f"{label} writes into its input, which members may share; let it write into a copy"
        if island == WHOLE:
            return None
        if does := next((call.does for call in calls if call.does), ""):
            return f"{label} {does}"
        for leaf in itertools.chain.from_iterable(call.leaves for call in calls):
            if leaf is not None and not isinstance(leaf, (Tensor, *ARGUMENTS)):
                return f"{label} takes {_describe(leaf)}, which may belong to one member; pass tensors and numbers"
        if (written := self.records.state.written(island)) is not None:
            return (
                f"{label} has Python state in its attribute {written}, which may change while forward runs; give it as "
                "an argument, and return it"
            )
        read = ADDRESSES.union(MEMORY_QUESTIONS)
        if not all(call.contiguous for call in calls):
            read |= STRIDE_QUESTIONS
        if (read & self._names_in_code) and (read := read & names_of([self.model.get_submodule(island.path)])):
            return f"{label} reads {min(read)} of tensors, which may be its arguments; read it where they are computed"
        if (held := self.held(island)) is not None:
            return f"{label} {held}"
        return None

    def held(self, island: Island) -> str | None:
        """Describe a plain attribute below ``island`` that holds a registered tensor, or a module outside of it.

        Attributes that forward's code does not name are left out.
        """
        prefix, own = f"{island.path}." if island.path else "", dict(tensors(self.model))
        for name, value in self._contents.items():
            if name.startswith(prefix) and name.rpartition(".")[2] in self._names_in_code:
                for registered in _registered_names(value):
                    if registered in own or not f"{registered}.".startswith(prefix):
                        return (
                            f"holds {registered or 'the whole model'} in its attribute {name}, where the array cannot "
                            "put its own tensor; register it as a parameter, buffer or submodule"
                        )
        return None

    @cached_property
    def _names_in_code(self) -> frozenset[str]:
        return names_of([self.model])

    @cached_property
    def _contents(self) -> dict[str, Any]:
        return contents(self.model)


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


class _Raising:
    """The ``islands`` whose calls have raised the last error of a trace, innermost first.

    An error that forward catches is followed by another, or by none that ends the trace.
    """

    def __init__(self) -> None:
        self.islands: list[Island] = []
        self._error: Exception | None = None

    def call(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``method``."""
        if method.island == WHOLE:
            # A trace begins, perhaps after one that has failed.
            self.islands = []
        try:
            return method.original(*args, **kwargs)
        except Exception as error:
            self.islands = [*(self.islands if error is self._error else ()), method.island]
            self._error = error
            raise


def culprits(
    model: nn.Module,
    records: Records,
    looped: Mapping[Island, str],
    capture_around: Callable[[Mapping[Island, str]], None],
    refusal: str,
) -> dict[Island, str]:
    """Return the submodules that must run in a loop, each with the reason.

    These are the smallest ones that raise while the whole model is traced. If the graph around them is refused, those
    that call them run in a loop instead, up to the whole forward.

    Args:
        looped: islands that run in a loop in any case, with the reasons.
        capture_around: captures the whole model with the given islands left out; raises if that fails.
        refusal: why the model cannot be captured with nothing left out.

    Raises:
        KeepsState: only the array's own members can run in a loop.
        FusionError: not even the whole forward can run in a loop.
    """
    fitness, fallbacks = Fitness(model, records), dict(looped)
    while WHOLE not in fallbacks:
        why, place = _refusal(fitness, fallbacks, capture_around)
        if why is None and fallbacks:
            return fallbacks
        # A trace alone does not show what a graph loses.
        why = why or refusal
        if place is not None and place not in fallbacks and fitness.unfit(place) is None:
            fallbacks |= dict.fromkeys([place, *_like(place, fitness, fallbacks)], why)
        else:
            callers = {caller: reason for island, reason in fallbacks.items() for caller in records.callers(island)}
            fallbacks = callers or {WHOLE: why}
    if (unfit := fitness.unfit(WHOLE)) is not None:
        raise FusionError(unfit)
    if (written := records.state.written(WHOLE)) is not None:
        raise KeepsState(
            f"forward may change Python state in {written}, and no graph holds all of it: {fallbacks[WHOLE]}", [written]
        )
    if (held := fitness.held(WHOLE)) is not None:
        raise KeepsState(f"forward {held}: {fallbacks[WHOLE]}")
    return {WHOLE: fallbacks[WHOLE]}


def _like(place: Island, fitness: Fitness, stubs: Mapping[Island, str]) -> Iterator[Island]:
    """Yield the islands with the code of ``place`` that can run alone and are called outside of the ``stubs``."""
    model, kind = fitness.model, type(fitness.model.get_submodule(place.path))
    for path, module in model.named_modules():
        island = Island(path, place.method)
        called = type(module) is kind and fitness.records.outside(island, stubs.keys())
        if called and fitness.unfit(island) is None:
            yield island


def _refusal(
    fitness: Fitness, stubs: Mapping[Island, str], capture_around: Callable[[Mapping[Island, str]], None]
) -> tuple[str | None, Island | None]:
    """Return why the model cannot be captured with the ``stubs`` left out, and the submodule that is the reason."""
    for stub in stubs:
        if (why := fitness.unfit(stub)) is not None:
            return why, None
    raising = _Raising()
    others = [island for island in islands(fitness.model) if island not in stubs]
    try:
        with intercepted(fitness.model, others, raising.call):
            capture_around(stubs)
    except Unbatchable as error:
        return str(error), Island(module_path(error.node))
    except FusionError as error:
        return str(error), next((island for island in raising.islands if fitness.unfit(island) is None), None)
    return None, None


def module_path(node: fx.Node) -> str:
    """Return the path of the innermost submodule whose code calls ``node``; empty for the model's own code."""
    return next((path for path, _ in reversed((node.meta.get("nn_module_stack") or {}).values())), "")


# The fallbacks in a trace.


@contextmanager
def opaque(
    model: nn.Module,
    culprits: Mapping[Island, str],
    records: Records,
    members: Sequence[nn.Module],
) -> Iterator[list[OpaqueCall]]:
    """Context manager: trace the ``culprits`` of ``model``, given with the reasons, as opaque calls.

    Yields the list of the traced calls; keep it as long as the captured graph is used.
    """
    traced_calls: list[OpaqueCall] = []
    recorded_calls = {island: itertools.cycle(records.outside(island, culprits.keys())) for island in culprits}
    stubs: dict[Island, _Stub] = {}

    def trace(method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        island = method.island
        if island not in stubs:
            stubs[island] = _Stub(
                method, culprits[island], recorded_calls[island], records.changed, members, traced_calls
            )
        return stubs[island].trace(args, kwargs)

    with intercepted(model, culprits, trace):
        yield traced_calls


@dataclass(eq=False)
class _Stub:
    """Replaces a method of a submodule while forward is traced.

    Attributes:
        records: its calls in an eager run, in order.
        changed: the keys of the model's tensors that the run changed.
        members: every member's model.
        traced_calls: the calls that were traced, with those of other stubs.
    """

    method: Method
    why: str
    records: Iterator[RecordedCall]
    changed: frozenset[str]
    members: Sequence[nn.Module]
    traced_calls: list[OpaqueCall]

    @cached_property
    def bodies(self) -> tuple[nn.Module, ...]:
        return tuple(member.get_submodule(self.method.island.path) for member in self.members)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add a call of `OPAQUE` to the trace, and return results of the structure of the recorded call."""
        island, module = self.method.island, self.method.module
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves):
            raise FusionError(f"{island} takes a size that varies, and can only run in a loop over members")
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        record = next(self.records, None)
        if record is None or len(tensors_in(record.leaves)) != len(inputs):
            raise FusionError(
                f"{island} is called more often, or with another number of tensors, in a capture than in an "
                "eager run: forward must not ask whether it is traced (torch.compiler.is_compiling)"
            )
        prefix = f"{island.path}." if island.path else ""
        changed = frozenset(name.removeprefix(prefix) for name in self.changed if name.startswith(prefix))
        registered, buffers = dict(tensors(module)), dict(module.named_buffers(remove_duplicate=False))
        changing = [key for key in registered if key in buffers or key in changed]
        fixed = [key for key in registered if key not in changing]
        output, out_spec = pytree.tree_flatten(record.output)
        call = OpaqueCall(
            str(island),
            island.path,
            island.method,
            self.why,
            tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves),
            spec,
            tuple(fixed),
            tuple(changing),
            tuple(Result.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in output),
            changed,
            not names_of([module]).isdisjoint(ADDRESSES),
            torch.is_grad_enabled(),
            self.bodies,
        )
        self.traced_calls.append(call)
        own = [registered[key] for key in fixed], [registered[key] for key in changing]
        fresh = iter(OPAQUE(inputs, *own, numbered(call)))
        # torch.export takes few kinds of values, which are added later, and drops fields of dataclasses that are None.
        others = [0] * len(output) if island == WHOLE else output
        leaves = [next(fresh) if isinstance(o, Tensor) else other for o, other in zip(output, others, strict=True)]
        return pytree.tree_unflatten(leaves, out_spec)
