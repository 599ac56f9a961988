"""Capture one member's graph; submodules that cannot be captured become eager fallbacks in it.

A forward that specializes a size that varies runs as a whole member by member: its graph would hold for one size only.
"""

from __future__ import annotations

import enum
import itertools
import operator
import types
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence, Set
from contextlib import contextmanager
from dataclasses import dataclass, field, is_dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from hfusion.capture.attribute_fingerprint import python_attributes, registered_names
from hfusion.capture.eager_runs import Observation, apart, call_on_copies, check_state, observe, runnable, twin
from hfusion.capture.export import capture
from hfusion.capture.fallback_runtime import TENSOR, OpaqueCall, Result, numbered, share_memory, value_text
from hfusion.capture.hooks import WHOLE, Island, Method, intercepted, islands
from hfusion.capture.python_reads import ADDRESSES, EXACT_CLASS, GRADIENT_QUESTIONS, MEMORY_QUESTIONS, STRIDE_QUESTIONS
from hfusion.capture.python_state import CODE, GENERATORS, MUTABLE_CONTAINERS, restored
from hfusion.capture.reachable_code import GlobalVariables, names_added, names_of, names_written, search_of
from hfusion.capture.registered_tensors import tensors
from hfusion.core.errors import FusionError, KeepsState
from hfusion.core.guards import fixed
from hfusion.core.memory import copies, same_values, tensors_in
from hfusion.core.program import Capture, Kind, Slot
from hfusion.core.python_values import PLAIN, Link, parts, walk
from hfusion.core.tree import know_dataclasses
from hfusion.passes.candidates import Unbatchable
from hfusion.passes.functional import OPAQUE
from hfusion.torch_private.dispatch_modes import is_wrapped

_KNOWS_SIZES = (
    "it needs to know a size that varies, as a Python loop over a length does, so that a graph would hold for one size "
    "only; pad to a few sizes to have it fused"
)
_LOOPS_AND_SIZES = "sizes vary, and a part of it runs as members' own code; pad to a few sizes to have the rest fused"


@dataclass(frozen=True)
class VaryingSizes:
    """The dims that vary, for each leaf of the arguments, and whether they must stay dynamic.

    ``whole``: the reason why result sizes of eager fallbacks cannot be inferred, so that all of forward is one
    fallback.
    """

    dims: Sequence[Collection[int]] = ()
    open: bool = False
    whole: str = ""


def specializes(graph: fx.Graph, slots: Sequence[Slot], dims: Sequence[Collection[int]]) -> bool:
    """Return whether a graph holds for one size only of one of the ``dims`` of its inputs; of 0 and 1 all do."""
    placeholders = graph.find_nodes(op="placeholder")
    examples = [node.meta.get("val") for node, slot in zip(placeholders, slots, strict=True) if slot.kind is Kind.INPUT]
    sizes = [fixed(example.shape[dim]) for example, of_input in zip(examples, dims, strict=True) for dim in of_input]
    return any(size is not None and size > 1 for size in sizes)


@dataclass(frozen=True)
class Member:
    """A model to capture, with its arguments."""

    model: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


def capture_member(member: Member, sizes: VaryingSizes, looped: Mapping[Island, str], loops: bool) -> Capture:
    """Return the graph of a member.

    Args:
        looped: submodules that must run in a loop, with the reasons.
        loops: whether calls may run in a loop; if not, raise instead.

    Raises:
        FusionError: the member cannot be captured; the message gives the reason.
    """
    refusal: FusionError | None = None
    observed: Observation | None = None
    if not looped:
        if runnable(member.model):
            observed = observe(member.model, member.args, member.kwargs)
        try:
            graph = capture(member.model, member.args, member.kwargs, dims=sizes.dims, observed=observed)
        except KeepsState:
            raise
        except FusionError as error:
            if not loops:
                raise
            refusal = error
        else:
            if not sizes.open or not specializes(graph.graph, graph.slots, sizes.dims):
                return graph
            looped = {WHOLE: _KNOWS_SIZES}
            if not loops:
                raise FusionError(f"forward cannot be captured for all sizes: {_KNOWS_SIZES}")
    try:
        return _with_loops(member, sizes, looped, observed, str(refusal))
    except FusionError as error:
        raise error from refusal


def _with_loops(
    member: Member, sizes: VaryingSizes, looped: Mapping[Island, str], observed: Observation | None, refusal: str
) -> Capture:
    model, args, kwargs = member.model, member.args, member.kwargs
    if not torch.is_grad_enabled() and not names_of([model]).isdisjoint(GRADIENT_QUESTIONS):
        # A trace is made with gradients, and the stand-in of a looped call cannot be compared with the code.
        looped = {WHOLE: "it reads gradients or their mode, and is called without gradients"}
    if sizes.open and WHOLE not in looped:
        # Sizes of what a submodule gives are known for one size of the inputs.
        looped = {WHOLE: _LOOPS_AND_SIZES}
    if torch.is_inference_mode_enabled():
        # Trial runs compare version counters, which inference tensors do not have.
        with torch.inference_mode(False):
            args, kwargs = copies((args, dict(kwargs)))
            return _with_loops(replace(member, args=args, kwargs=kwargs), sizes, looped, None, refusal)
    if observed is None:
        observed = observe(model, args, kwargs)
        check_state(observed)
    records = record(model, args, kwargs, [WHOLE] if WHOLE in looped else [*islands(model)])
    modes = observed.modes
    graphs: dict[frozenset[Island], Capture] = {}

    def capture_around(stubs: Mapping[Island, str]) -> None:
        with opaque(model, stubs, records) as calls:
            graph = capture(model, args, kwargs, varying=False, dims=sizes.dims if WHOLE in stubs else ())
        _add_values(graph.graph, calls)
        graphs[frozenset(stubs)] = replace(graph, modes=modes, opaque=tuple(calls))

    fallbacks = culprits(model, records, looped, capture_around, refusal)
    if frozenset(fallbacks) not in graphs:
        capture_around(fallbacks)
    _check_modes(modes, [island.path for island in fallbacks])
    return graphs[frozenset(fallbacks)]


def _add_values(graph: fx.Graph, calls_in_graph: Sequence[OpaqueCall]) -> None:
    """Let the graph of a forward that runs as a whole member by member return its values that are no tensors."""
    for call in calls_in_graph:
        if call.is_whole and call.values:
            (node,) = graph.find_nodes(op="call_function", target=OPAQUE)
            output = next(iter(reversed(graph.nodes)))
            results: list[Any] = list(output.args[0])
            position = len(node.meta["val"])
            node.meta["val"] = [*node.meta["val"], *call.values]
            for index, value in enumerate(call.results):
                if not isinstance(value, Result):
                    with graph.inserting_before(output):
                        results[index] = graph.call_function(operator.getitem, (node, position))
                    results[index].meta["val"] = value
                    position += 1
            output.args = (tuple(results),)


def _check_modes(modes: Mapping[str, bool], looped: Sequence[str]) -> None:
    """Raise FusionError if a fallback at one of the paths ``looped`` contains a module whose mode forward changes."""
    for name in modes:
        if any(not path or name == path or name.startswith(f"{path}.") for path in looped):
            raise FusionError(
                f"forward leaves {name or '(root)'} in another mode (train or eval), and can only run in a loop over "
                "members there, whose modes an array cannot follow; set modes by train and eval"
            )


# Find the smallest submodules that keep a model from being captured, and capture around them.

# `record` records the calls of all submodules in one eager run. `Fitness` decides whether a submodule can run
# separately, in a loop over members. `culprits` traces the model until a graph is right: whatever raises is left out of
# the next trace, together with the submodules like it, or else what is around it. In the graph, `opaque` makes each one
# call that loops over the members at run time.

# Types other than tensors that arguments and results of a fallback may have; their values are equal for all members.
ARGUMENTS = (*PLAIN, enum.Enum, type, torch.layout, torch.memory_format)
# Types of results of a submodule, which are the same at every call. Floats are mostly computed from values of tensors.
_RESULTS = (str, int)


# The calls of submodules in one eager run.


@dataclass(frozen=True, eq=False)
class RecordedCall:
    """One call of an island.

    Attributes:
        around: the islands whose calls are around this one, outermost first.
        leaves: its flat arguments.
        contiguous: whether its inputs were contiguous.
        written: whether it wrote into an input.
        does: what it did that a call on copies would lose; empty for nothing.
    """

    island: Island
    around: tuple[Island, ...]
    leaves: Sequence[Any]
    output: Any
    contiguous: bool
    written: bool
    does: str


@dataclass(eq=False)
class Records:
    """The recorded calls of one run of a model.

    Attributes:
        calls: the calls in the order in which they ended.
        failed: the islands with a call that raised an error, which forward caught.
        changed: the keys of the model's tensors that the run changed.
        open: the islands of the calls that have not ended.
    """

    calls: list[RecordedCall] = field(default_factory=list)
    failed: set[Island] = field(default_factory=set)
    changed: set[str] = field(default_factory=set)
    open: list[Island] = field(default_factory=list)

    def of(self, island: Island) -> list[RecordedCall]:
        return [call for call in self.calls if call.island == island]

    def outside(self, island: Island, stubs: Set[Island]) -> list[RecordedCall]:
        """Return the calls of ``island`` that are not inside a call of one of the ``stubs``."""
        return [call for call in self.of(island) if stubs.isdisjoint(call.around)]

    def callers(self, island: Island) -> list[Island]:
        """Return the islands that call ``island`` directly."""
        return [call.around[-1] for call in self.of(island) if call.around]

    def call(self, method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call ``method``, and record the call."""
        island, module = method.island, method.module
        know_dataclasses((args, kwargs))
        own = [tensor for _, tensor in tensors(module)]
        # Tensors wrapped by torch.func's transforms mean nothing outside of them.
        if any(map(is_wrapped, [*tensors_in((args, kwargs)), *own])):
            return method.original(*args, **kwargs)
        leaves, spec = pytree.tree_flatten((args, kwargs))
        inputs = [(tensor, tensor._version, tensor.detach().clone()) for tensor in tensors_in(leaves)]
        contiguous = all(x.layout is torch.strided and x.is_contiguous() for x, _, _ in inputs)
        self.open.append(island)
        try:
            output = method.original(*args, **kwargs)
        except Exception:
            self.failed.add(island)
            raise
        finally:
            self.open.pop()
        know_dataclasses(output)
        results = tensors_in(output)
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
        recorded = pytree.tree_map(lambda leaf: leaf, output)
        self.calls.append(RecordedCall(island, tuple(self.open), leaves, recorded, contiguous, written, does))
        return output


def record(model: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], recorded: Sequence[Island]) -> Records:
    """Run a copy of ``model`` and record the calls in it. Inputs and random states are not changed.

    Args:
        recorded: the islands whose calls are recorded, with that of the whole forward.

    Raises:
        FusionError: forward is no plain method.
    """
    if WHOLE not in islands(model):
        raise FusionError(
            f"forward of {type(model).__name__} is no plain method, and can only run in a loop over members; define it "
            "by def forward(self, ...)"
        )
    member, records = twin(model), Records()
    before = {name: (tensor, _state(tensor)) for name, tensor in tensors(member)}
    with restored(model), apart(member):
        args, kwargs = copies((args, dict(kwargs)))
        with intercepted(member, recorded, records.call):
            call_on_copies(member, args, kwargs)
        originals = dict(tensors(model))
        for name, tensor in tensors(member):
            held, state = before[name]
            if held is not tensor or state != _state(held) or not same_values(tensor, originals[name]):
                records.changed.add(name)
    return records


def _state(tensor: Tensor) -> tuple[int, int]:
    """Return version and address; a write changes the former, an assignment of ``tensor.data`` the latter."""
    return tensor._version, tensor.data_ptr() if tensor.layout is torch.strided else 0


# Which submodules run in a loop.

# Types whose contents are no state of a model.
_LEAVES = (*PLAIN, Tensor, type, types.ModuleType, types.BuiltinFunctionType, nn.Module, fx.Graph)


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
                    f"{label} returns {value_text(leaf)}; let it return tensors only, in tuples, lists, dicts "
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
                return f"{label} takes {value_text(leaf)}, which may belong to one member; pass tensors and numbers"
        written = self.written(island)
        if (place := f"its attribute {written}" if written is not None else self._variable_written) is not None:
            return (
                f"{label} has Python state in {place}, which may change while forward runs; give it as "
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

    def written(self, island: Island) -> str | None:
        """Return an attribute in reach of ``island`` that forward may change or add; None if there is none."""
        module = self.model.get_submodule(island.path)
        modules = list(module.modules())
        held = {id(module): list(python_attributes(module)) for module in modules}

        def visit(holder: Any) -> list[Any]:
            if not isinstance(holder, nn.Module):
                named = ((name if link is Link.ATTRIBUTE else "", part) for link, name, part in parts(holder))
                held[id(holder)] = list(named)
            return [value for _, value in held[id(holder)] if not isinstance(value, _LEAVES)]

        reached = walk(modules, visit)
        # Assignments in code are known by names alone, and objects of other files, such as a configuration, have many.
        files = {type(module).__module__ for module in modules}
        assigned, filled = self._names_written
        changed = (
            name
            for key, holder in reached.items()
            for name, value in held[key]
            if (name in assigned and (type(holder).__module__ in files or type(holder) is types.SimpleNamespace))
            or (name in filled and isinstance(value, (*MUTABLE_CONTAINERS, Tensor)))
            or isinstance(value, GENERATORS)
        )
        tensors_and_modules = {name for name, _ in (*tensors(module), *module.named_modules())}
        added = names_added(module, island.method) - {name.rpartition(".")[2] for name in tensors_and_modules}
        return min((*changed, *added), default=None)

    @cached_property
    def _names_written(self) -> tuple[frozenset[str], frozenset[str]]:
        return names_written(self.model)

    @cached_property
    def _variable_written(self) -> str | None:
        """A variable of a class or file of the model's own code that forward may change; None if there is none."""
        files = {type(module).__module__ for module in self.model.modules()}
        assigned, filled = self._names_written
        for holder in search_of([self.model]).holders:
            held = holder.held
            kind = held if isinstance(held, type | types.FunctionType) else type(held)
            file = held.get("__name__") if isinstance(holder, GlobalVariables) else kind.__module__
            for name in holder.names if file in files else ():
                value = holder.read(name)
                changes = name in assigned or (name in filled and isinstance(value, MUTABLE_CONTAINERS))
                if changes and not isinstance(value, CODE):
                    return f"{holder.title}{name}"
        return None

    def held(self, island: Island) -> str | None:
        """Describe a plain attribute below ``island`` that holds a registered tensor, or a module outside of it.

        Attributes that forward's code does not name are left out.
        """
        prefix, own = f"{island.path}." if island.path else "", dict(tensors(self.model))
        names = registered_names(self.model)

        def visit(value: Any) -> list[Any]:
            is_leaf = id(value) in names or isinstance(value, (*PLAIN, Tensor, type, types.ModuleType, fx.Graph))
            return [] if is_leaf else [part for _, _, part in parts(value)]

        for path, module in self.model.get_submodule(island.path).named_modules(prefix=island.path):
            for name, value in python_attributes(module):
                reached = walk([value], visit) if name in self._names_in_code else ()
                for registered in (names[key] for key in reached if key in names):
                    if registered in own or not f"{registered}.".startswith(prefix):
                        return (
                            f"holds {registered or 'the whole model'} in its attribute {f'{path}.{name}'.strip('.')}, "
                            "where the array cannot put its own tensor; register it as a parameter, buffer or submodule"
                        )
        return None

    @cached_property
    def _names_in_code(self) -> frozenset[str]:
        return names_of([self.model])


def _registration(value: Any) -> str:
    name = type(value).__name__
    return f": torch.export.register_dataclass({name}) makes it know {name}" if is_dataclass(value) else ""


def _cacheless(model: nn.Module) -> str:
    """Return advice to switch off the key-value cache if ``model`` is a transformers model that returns it."""
    caches = getattr(getattr(model, "config", None), "use_cache", False)
    return "; call the array with use_cache=False, or set config.use_cache = False in its models" if caches else ""


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
            called = [other for other in alike(model, place) if records.outside(other, fallbacks.keys())]
            fallbacks |= dict.fromkeys([place, *(other for other in called if fitness.unfit(other) is None)], why)
        else:
            callers = {caller: reason for island, reason in fallbacks.items() for caller in records.callers(island)}
            fallbacks = callers or {WHOLE: why}
    if (unfit := fitness.unfit(WHOLE)) is not None:
        raise FusionError(unfit)
    if (written := fitness.written(WHOLE)) is not None:
        raise KeepsState(
            f"forward may change Python state in {written}, and no graph holds all of it: {fallbacks[WHOLE]}", [written]
        )
    if (held := fitness.held(WHOLE)) is not None:
        raise KeepsState(f"forward {held}: {fallbacks[WHOLE]}")
    return {WHOLE: fallbacks[WHOLE]}


def alike(model: nn.Module, place: Island) -> Iterator[Island]:
    """Yield the islands of ``model`` with the code of ``place``, which have the same operators."""
    kind = type(model.get_submodule(place.path))
    return (Island(path, place.method) for path, module in model.named_modules() if type(module) is kind)


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
def opaque(model: nn.Module, culprits: Mapping[Island, str], records: Records) -> Iterator[list[OpaqueCall]]:
    """Context manager: trace the ``culprits`` of ``model``, given with the reasons, as opaque calls.

    Yields the list of the traced calls; keep it as long as the captured graph is used.
    """
    traced_calls: list[OpaqueCall] = []
    recorded_calls = {island: itertools.cycle(records.outside(island, culprits.keys())) for island in culprits}

    def trace(method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Add a call of `OPAQUE` to the trace, and return results of the structure of the recorded call."""
        island, module = method.island, method.module
        leaves, spec = pytree.tree_flatten((args, kwargs))
        if any(isinstance(leaf, torch.SymInt | torch.SymFloat | torch.SymBool) for leaf in leaves):
            raise FusionError(f"{island} takes a size that varies, and can only run in a loop over members")
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        record = next(recorded_calls[island], None)
        if record is None or len(tensors_in(record.leaves)) != len(inputs):
            raise FusionError(
                f"{island} is called more often, or with another number of tensors, in a capture than in an "
                "eager run: forward must not ask whether it is traced (torch.compiler.is_compiling)"
            )
        prefix = f"{island.path}." if island.path else ""
        changed = frozenset(name.removeprefix(prefix) for name in records.changed if name.startswith(prefix))
        registered, buffers = dict(tensors(module)), dict(module.named_buffers(remove_duplicate=False))
        changing = [key for key in registered if key in buffers or key in changed]
        fixed = [key for key in registered if key not in changing]
        output, out_spec = pytree.tree_flatten(record.output)
        names = names_of([module])
        call = OpaqueCall(
            island,
            culprits[island],
            tuple(TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves),
            spec,
            tuple(fixed),
            tuple(changing),
            tuple(Result.of(leaf) if isinstance(leaf, Tensor) else leaf for leaf in output),
            changed,
            not names.isdisjoint(ADDRESSES),
            "Parameter" in names and not names.isdisjoint(EXACT_CLASS),
            torch.is_grad_enabled(),
        )
        traced_calls.append(call)
        own = [registered[key] for key in fixed], [registered[key] for key in changing]
        fresh = iter(OPAQUE(inputs, *own, numbered(call)))
        # torch.export takes few kinds of values, which are added later, and drops fields of dataclasses that are None.
        others = [0] * len(output) if island == WHOLE else output
        leaves = [next(fresh) if isinstance(o, Tensor) else other for o, other in zip(output, others, strict=True)]
        return pytree.tree_unflatten(leaves, out_spec)

    with intercepted(model, culprits, trace):
        yield traced_calls
