"""Capture one member's forward as a flat graph of ATen operators, by `torch.export` in non-strict training mode.

Source: https://docs.pytorch.org/docs/stable/export.html
"""

from __future__ import annotations

import builtins
import operator
import threading
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from itertools import zip_longest
from typing import Any, TypeAlias

import torch
from torch import Tensor, fx, nn
from torch.export.graph_signature import InputKind
from torch.utils import _pytree as pytree

from hfusion.capture.autograd_grad import derivatives_traced
from hfusion.capture.eager_runs import (
    ALIKE,
    Observation,
    Outcome,
    check_state,
    difference,
    gradient_dependence,
    observe,
    python_random_state,
    run,
    run_graph,
    runnable,
    twin,
)
from hfusion.capture.export_context import assigned_as_writes
from hfusion.capture.python_reads import OpenLengths, PythonReads, original, size_uses
from hfusion.capture.python_state import restored
from hfusion.capture.reachable_code import search_of
from hfusion.core.errors import FusionError
from hfusion.core.exclusive import tracing
from hfusion.core.fingerprint import read_model, tensors_of
from hfusion.core.guards import Guards
from hfusion.core.memory import aliases, contiguous_aliases, tensors_in
from hfusion.core.program import Capture, Kind, Slot, describe_graph, of_kind, writable
from hfusion.core.stages import stage
from hfusion.device.backend import random_states_kept
from hfusion.ops.random import LIKE
from hfusion.passes.check import check_member
from hfusion.passes.functional import functional, out_arguments, without_out
from hfusion.passes.views import depends_on_strides, handed_back, writes
from hfusion.torch_private.dispatch_modes import FakeTensor, enter_autocast, exit_autocast
from hfusion.torch_private.export_state import has_transforms, import_exporter, module_stack_unwound, numbered_parts
from hfusion.torch_private.operator_tables import HigherOrderOperator, correct_lstm_decomposition
from hfusion.torch_private.replaced_functions import autograd_functions_replaced, silence_tracers

# Attempts to export one module while other threads draw from Python's or numpy's random numbers.
MAX_TRIES = 3
aten = torch.ops.aten
_EMBEDDINGS = frozenset({aten.embedding.default, aten.embedding_bag.default, aten.embedding_bag.padding_idx})

_KINDS = {
    InputKind.PARAMETER: Kind.PARAMETER,
    InputKind.BUFFER: Kind.BUFFER,
    InputKind.CONSTANT_TENSOR: Kind.CONSTANT,
    InputKind.USER_INPUT: Kind.INPUT,
}


# Dims to keep dynamic: whether the first of every input is, and further ones for each leaf.
_Open: TypeAlias = tuple[bool, Sequence[Collection[int]]]


def capture(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    *,
    varying: bool = True,
    dims: Sequence[Collection[int]] = (),
    observed: Observation | None = None,
) -> Capture:
    """Capture the forward of ``module`` in its current training mode.

    Args:
        varying: whether to keep the first dim of every input dynamic, unless forward needs its size.
        dims: for each leaf of the arguments, further dims to keep dynamic.
        observed: an eager run of ``module``, if there was one.

    Raises:
        KeepsState: forward changes Python state.
        FusionError: the module cannot be captured faithfully; the message gives the reason.
    """
    # The most general first.
    attempts = [*([(varying, dims)] if any(dims) else []), *([(True, ())] if varying else []), (False, ())]
    with tracing:
        if observed is None and not runnable(module):
            return _exported(module, args, kwargs, attempts, {})
        observed = observed or observe(module, args, kwargs)
        check_state(observed)
        captured = _captured(observed, attempts)
        if lost := gradient_dependence(observed):
            raise FusionError(lost)
        return captured


def _captured(observed: Observation, attempts: Sequence[_Open]) -> Capture:
    """Return a graph that reproduces the eager run: a cached one of an equal module, or a new export."""
    module, args, kwargs = observed.module, observed.args, observed.kwargs
    key = capture_key(module, args, kwargs, attempts)
    if key in _captures:
        _captures.move_to_end(key)
        captured = replace(_captures[key], modes=observed.modes)
        try:
            _check_faithful(captured, module, args, kwargs, observed.outcome)
        except FusionError:
            # Forward depends on state that cannot be seen from here.
            del _captures[key]
        else:
            _tell(module, captured.graph, captured.slots)
            return captured
    captured = _exported(module, args, kwargs, attempts, observed.modes)
    _check_faithful(captured, module, args, kwargs, observed.outcome)
    if key is not None:
        _captures[key] = captured
        if len(_captures) > MAX_CAPTURES:
            _captures.popitem(last=False)
    return captured


def _tell(module: nn.Module, graph: fx.Graph, slots: Sequence[Slot]) -> None:
    name, names = type(module).__name__, writable(graph, slots)
    stage(name, "captured", lambda: describe_graph(f"a member of {name}", graph), lambda: check_member(graph, names))


def _exported(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    attempts: Sequence[_Open],
    modes: Mapping[str, bool],
) -> Capture:
    reads, contiguous = PythonReads(), all(leaf.is_contiguous() for leaf in tensors_in((args, dict(kwargs))))
    needs_strides = False
    try:
        exported, slots, flat, calls, uses = _traced(module, args, kwargs, attempts, contiguous_aliases, reads)
        needs_strides = depends_on_strides(flat, reads.was_contiguous)
    except FusionError:
        if contiguous or not reads.asked_strides:
            raise
    if not contiguous and (needs_strides or reads.asked_strides):
        # Forward reads strides: it is traced with those of the inputs.
        exported, slots, flat, calls, uses = _traced(module, args, kwargs, attempts, aliases, reads)
    placeholders = [node for node in flat.nodes if node.op == "placeholder"]
    try:
        graph = functional(flat, of_kind(flat, slots, Kind.BUFFER), of_kind(flat, slots, Kind.PARAMETER))
    except RuntimeError as error:
        raise FusionError(f"the graph of forward cannot be written without in-place: {_first_line(error)}") from error
    _tell(module, graph, slots)
    for node in graph.nodes:
        if isinstance(node.meta.get("val"), FakeTensor):
            # The fake tensor refers to the real constant, which the graph must not keep alive.
            node.meta["val"].constant = None
    constant_names = [slot.name for slot in slots if slot.kind is Kind.CONSTANT]
    if reads.trains_outside or any(exported.constants[name].requires_grad for name in constant_names):
        raise FusionError(
            "forward computes with a tensor that requires grad, and that the model does not register; register it as a "
            "parameter, or its module as a submodule: if all models have the same object, it is stored once"
        )
    constants: dict[str, Tensor] = {name: exported.constants[name] for name in constant_names}
    examples = [n.meta["val"] for n, slot in zip(placeholders, slots, strict=True) if slot.kind is Kind.INPUT]
    spec, guards = exported.call_spec.out_spec, Guards(tuple(examples))
    return Capture(graph, slots, constants, spec, guards, modes, tuple(calls), tuple(uses), needs_strides)


def _traced(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    attempts: Sequence[_Open],
    alias: Callable[[Any], Any],
    reads: PythonReads,
) -> tuple[torch.export.ExportedProgram, tuple[Slot, ...], fx.Graph, Sequence[Any], Sequence[Any]]:
    """Return an exported module, its graph, which may have in-place operators, and its slots, calls and size uses.

    See `Capture`.
    """
    with size_uses() as uses:
        exported = _drawless(lambda: _export(module, args, kwargs, attempts, alias, reads))
    if has_transforms(exported.graph_module):
        # Such a graph can neither be rewritten nor run in parts: it would leave the thread at another level.
        raise FusionError("forward calls torch.vmap or another transform of torch.func, which no graph holds")
    slots = _slots(exported.graph_signature.input_specs)
    inputs = pytree.tree_leaves((args, dict(kwargs)), lambda leaf: leaf is None)
    trained = _trained(exported.graph_module.graph, slots, inputs)
    calls = _number_calls(exported.graph_module)
    graph = inlined(exported.graph_module, trained)
    for node in graph.nodes:
        if node.target in _EMBEDDINGS:
            # A stack cannot hold sparse gradients.
            index = [argument.name for argument in node.target._schema.arguments].index("sparse")
            if len(node.args) > index:
                node.update_arg(index, False)
    return exported, slots, graph, calls, uses


def _number_calls(module: fx.GraphModule, calls: list[Any] | None = None) -> list[Any]:
    """Number the operators that the code called, in order, in ``meta["call"]``, and return them."""
    calls = [] if calls is None else calls
    for node in module.graph.nodes:
        if isinstance(node.target, HigherOrderOperator):
            regions = [
                getattr(module, str(a.target)) for a in node.args if isinstance(a, fx.Node) and a.op == "get_attr"
            ]
            for region in regions:
                _number_calls(region, calls)
        elif isinstance(node.target, torch._ops.OpOverload) and not node.target._schema.name.startswith("aten::sym_"):
            node.meta["call"] = len(calls)
            calls.append(original(node.target))
    return calls


def _check_faithful(
    captured: Capture, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], real: Outcome
) -> None:
    """Raise FusionError if the graph's results differ from the code's: tracing loses effects that it does not see."""
    try:
        outcome = run_graph(captured, module, args, kwargs)
    except RuntimeError as error:
        raise FusionError(f"the graph of forward fails where forward does not: {_first_line(error)}") from error
    lost = difference(outcome, real, ALIKE)
    if lost is not None:
        raise FusionError(
            f"forward does what a graph would lose (a hook, a seed, random numbers or variables of its own, a write "
            f"past autograd or in a checkpoint?): {lost} of the graph differs from that of the code"
        )


def is_faithful(captured: Capture, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    """Return whether a capture computes the same as ``module``, gradients included."""
    with restored(module):
        real = run(twin(module), args, kwargs, copy_of=module)
    try:
        _check_faithful(captured, module, args, kwargs, real)
    except FusionError:
        return False
    return True


def _export(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    attempts: Sequence[_Open],
    alias: Callable[[Any], Any],
    reads: PythonReads,
) -> torch.export.ExportedProgram:
    """Export with dynamic dims, or with fewer of them if forward needs their sizes; ``alias`` makes its inputs."""
    correct_lstm_decomposition()
    # Imported first: its printing could not be silenced later.
    import_exporter()
    failure: Exception | None = None
    kinds = {leaf.device.type for leaf in tensors_in((args, dict(kwargs)))} or {"cpu"}
    # The caller's autocast applies when the program runs.
    uncast = torch.autocast(kinds.pop(), enabled=False)
    with silence_tracers(), torch.enable_grad(), uncast, numbered_parts(), module_stack_unwound():
        for first, dims in attempts:
            # A failed export leaves marks of varying dims on its inputs.
            args, kwargs = alias((args, dict(kwargs)))
            try:
                shapes = _varying(module, args, kwargs, first, dims) if first or any(dims) else None
                with (
                    restored(module),
                    OpenLengths(),
                    symbolic_len(module) if any(dims) else nullcontext(),
                    assigned_as_writes(module),
                    derivatives_traced(),
                    reads,
                ):
                    return torch.export.export(module, args, dict(kwargs), dynamic_shapes=shapes, strict=False)
            except FusionError:
                raise
            except Exception as error:
                failure = error
    assert failure is not None
    raise FusionError(f"torch.export cannot capture it: {_first_line(failure)}") from failure


def _first_line(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {lines[0][:300] if lines else ''}"


def _varying(
    module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], first: bool, dims: Sequence[Collection[int]]
) -> Any:
    shapes = torch.export.ShapesCollection()
    for leaf, further in zip_longest(pytree.tree_leaves((args, dict(kwargs))), dims, fillvalue=()):
        # A size of 0 or 1 is no symbol.
        sizes = leaf.shape if isinstance(leaf, Tensor) else ()
        opened = [dim for dim in {*([0] if first else []), *further} if dim < len(sizes) and sizes[dim] > 1]
        if opened:
            shapes[leaf] = dict.fromkeys(opened, torch.export.Dim.AUTO)
    return shapes.dynamic_shapes(module, args, dict(kwargs))


def _drawless(export: Callable[[], torch.export.ExportedProgram]) -> torch.export.ExportedProgram:
    """Run ``export``. Raises FusionError for custom backwards, and for draws from Python's or numpy's random numbers.

    A graph would silently lose both. All threads share these generators: if there are other threads, the export is
    tried up to `MAX_TRIES` times.
    """
    thread_id = threading.get_ident()

    def refuse(apply: Callable[..., Any], cls: type, *args: Any, **kwargs: Any) -> Any:
        if threading.get_ident() != thread_id:
            return apply(*args, **kwargs)
        raise FusionError(f"{cls.__qualname__} is a custom autograd.Function, whose backward a graph would lose")

    for _ in range(1 if threading.active_count() == 1 else MAX_TRIES):
        before = python_random_state()
        with autograd_functions_replaced(refuse), random_states_kept():
            exported = export()
        if python_random_state() == before:
            return exported
    raise FusionError("forward draws from Python's or numpy's random numbers; draw from torch's instead")


def _slots(specs: Sequence[Any]) -> tuple[Slot, ...]:
    slots: list[Slot] = []
    for spec in specs:
        kind = _KINDS.get(spec.kind)
        if kind is None:
            raise FusionError(
                f"input {spec.target} of the graph is of kind {spec.kind.name}, which hfusion does not know"
            )
        position = sum(slot.kind is Kind.INPUT for slot in slots)
        slots.append(Slot(kind, str(position) if kind is Kind.INPUT else spec.target))
    return tuple(slots)


def _trained(graph: fx.Graph, slots: Sequence[Slot], inputs: Sequence[Any]) -> frozenset[str]:
    """Return the placeholders that may need a gradient: inputs that require grad, and parameters, even if frozen."""
    names = set()
    for node, slot in zip(graph.find_nodes(op="placeholder"), slots, strict=True):
        leaf = inputs[int(slot.name)] if slot.kind is Kind.INPUT else None
        if slot.kind is Kind.PARAMETER or (isinstance(leaf, Tensor) and leaf.requires_grad):
            names.add(node.name)
    return frozenset(names)


# Cache of the captures of this process: models that are equal in all that forward can read share one graph.

# The most recently used captures are kept, up to this number.
MAX_CAPTURES = 64

_captures: OrderedDict[Any, Capture] = OrderedDict()


def capture_key(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], attempts: Sequence[_Open]) -> Any:
    """Return the cache key of a capture of ``module`` with these arguments; None if it cannot be cached."""
    leaves, spec = pytree.tree_flatten((args, dict(kwargs)))
    ids = [id(leaf) for leaf in leaves]
    kinds = [_kind(leaf) for leaf in leaves]
    state = read_model(module, [leaf for leaf in leaves if not isinstance(leaf, Tensor)])
    # Unregistered tensors of a model belong to it alone, and must not be kept alive by the cache.
    if state is None or any(True for _ in tensors_of(state)):
        return None
    # If one tensor is passed as two arguments, a write into one changes the other.
    ties = [ids.index(leaf_id) for leaf_id in ids]
    return (
        state,
        str(spec),
        tuple(kinds),
        tuple(ties),
        tuple((first, tuple(map(tuple, map(sorted, dims)))) for first, dims in attempts),
        torch.get_default_dtype(),
        torch.get_default_device(),
        torch.are_deterministic_algorithms_enabled(),
    )


def _kind(leaf: Any) -> Any:
    if not isinstance(leaf, Tensor):
        return type(leaf)
    kind = (type(leaf), tuple(leaf.shape), leaf.dtype, leaf.device, leaf.layout, leaf.requires_grad)
    return (*kind, leaf.stride() if leaf.layout is torch.strided else None, leaf.is_conj(), leaf.is_neg())


# Inline the regions of an exported graph that set the grad mode or autocast.

# In-place dropouts and their functional forms, which replace them where nothing is dropped, and so nothing written.
_DROPOUTS = {
    aten.dropout_.default: aten.dropout.default,
    aten.feature_dropout_.default: aten.feature_dropout.default,
    aten.alpha_dropout_.default: aten.alpha_dropout.default,
    aten.feature_alpha_dropout_.default: aten.feature_alpha_dropout.default,
}


def inlined(module: fx.GraphModule, trained: Collection[str]) -> fx.Graph:
    """Return the graph of ``module`` with its regions inlined; ``trained`` names the values that may need a gradient.

    Where gradients are off, a call takes its operands detached. One that returns its operand itself (a dropout that
    drops nothing, ``contiguous``, ``to``) returns it with its history, as the code does.
    """
    inliner = _Inliner(fx.Graph(), frozenset(trained))
    inliner.graph.output(tuple(inliner.inline(module, None, enabled=True)))
    return inliner.graph


@dataclass(frozen=True, eq=False)
class _Inliner:
    """Copies nodes to ``graph``. ``attached``: nodes with a possible gradient; ``detached``: their detached copies."""

    graph: fx.Graph
    trained: frozenset[str]
    attached: set[fx.Node] = field(default_factory=set)
    detached: dict[fx.Node, fx.Node] = field(default_factory=dict)

    def inline(self, module: fx.GraphModule, inputs: Sequence[Any] | None, enabled: bool) -> list[Any]:
        env: dict[fx.Node, Any] = {}
        operands = iter(inputs or ())
        for node in module.graph.nodes:
            if node.op == "placeholder":
                env[node] = self._placeholder(node) if inputs is None else next(operands)
            elif node.op == "get_attr":
                env[node] = getattr(module, node.target)
            elif node.op == "output":
                outputs = node.args[0]
                results = outputs if isinstance(outputs, list | tuple) else [outputs]
                return [env[r] if isinstance(r, fx.Node) else r for r in results]
            elif isinstance(node.target, HigherOrderOperator):
                env[node] = self._region(node, env, enabled)
            elif node.target is operator.getitem and isinstance(env[node.args[0]], list):
                env[node] = env[node.args[0]][node.args[1]]
            else:
                env[node] = self._call(node, env, enabled)
        raise FusionError("a captured region has no output")

    def _placeholder(self, node: fx.Node) -> fx.Node:
        new = self.graph.node_copy(node)
        if node.name in self.trained:
            self.attached.add(new)
        return new

    def _region(self, node: fx.Node, env: Mapping[fx.Node, Any], enabled: bool) -> list[Any]:
        name = str(node.target)
        args: list[Any] = [env[a] if isinstance(a, fx.Node) else a for a in node.args]
        if name == "wrap_with_set_grad_enabled":
            inside, body, *operands = args
            return self.inline(body, operands, inside)
        if name == "wrap_with_autocast":
            device, dtype, active, cache, body, *operands = args
            token = self.graph.call_function(enter_autocast, (device, dtype, active, cache))
            outputs = self.inline(body, operands, enabled)
            self.graph.call_function(exit_autocast, (token,))
            return outputs
        raise FusionError(
            f"forward uses {name}, a control flow that hfusion does not fuse: use torch.where, or call it in a "
            "submodule, which then runs member by member"
        )

    def _call(self, node: fx.Node, env: Mapping[fx.Node, Any], enabled: bool) -> Any:
        new = self.graph.node_copy(node, lambda n: env[n])
        new.target = original(node.target)
        if out_arguments(new.target):
            return self._copied_out(new, enabled)
        if new.target in _DROPOUTS:
            in_place, new.target = new.target, _DROPOUTS[new.target]
            if handed_back(new) is None:
                new.target = in_place
        return self._attach(new, enabled)

    def _copied_out(self, call: fx.Node, enabled: bool) -> Any:
        """Replace an ``out=`` call by its functional form, and copy the results into the ``out`` tensors."""
        functional, tensors = without_out(self.graph, call)
        self.graph.erase_node(call)
        self._attach(functional, enabled)
        copied = []
        for k, tensor in enumerate(tensors):
            result = functional
            if len(tensors) > 1:
                result = self.graph.call_function(operator.getitem, (functional, k))
                result.meta["val"] = functional.meta["val"][k]
                self._attach(result, enabled)
            copy = self.graph.call_function(aten.copy_.default, (tensor, result))
            copy.meta.update(functional.meta | {"val": tensor.meta["val"]})
            copied.append(self._attach(copy, enabled))
        return copied if len(tensors) > 1 else copied[0]

    def _attach(self, new: fx.Node, enabled: bool) -> fx.Node:
        """Detach the operands of a call where gradients are off; returns the node for its result."""
        reached = any(operand in self.attached for operand in new.all_input_nodes)
        if not reached or enabled or new.target is operator.getitem:
            keeps = new.target not in LIKE
        else:
            keeps = handed_back(new) in self.attached
        if keeps:
            if reached:
                self.attached.add(new)
            return new
        written = new.args[0] if writes(new) else None
        with self.graph.inserting_before(new):
            for operand in new.all_input_nodes:
                new.replace_input_with(operand, self._without_history(operand))
        # An in-place operator returns its operand, which keeps its history.
        return written if isinstance(written, fx.Node) and written in self.attached else new

    def _without_history(self, operand: fx.Node) -> fx.Node:
        if operand not in self.attached or not isinstance(operand.meta.get("val"), Tensor):
            return operand
        if operand not in self.detached:
            node = self.graph.call_function(aten.detach.default, (operand,))
            node.meta["val"] = operand.meta["val"]
            self.detached[operand] = node
        return self.detached[operand]


# Keep ``len(x)`` of a tensor dynamic while forward is traced, as in ``x.view(len(x), -1)`` or ``loss.sum() / len(x)``.


@contextmanager
def symbolic_len(module: nn.Module) -> Iterator[None]:
    """Context manager: in the files of the code that ``module`` runs, ``len`` of a tensor returns ``shape[0]``.

    Other threads that run this code meanwhile get the same numbers as from Python's own. Code that takes the length as
    a key of a dict cannot be traced so, and is traced again: use it where sizes have varied.
    """
    files = [space for space, names in search_of([module]).spaces.values() if "len" in names and "len" not in space]
    for names in files:
        names["len"] = _len
    try:
        yield
    finally:
        for names in files:
            names.pop("len", None)


def _len(value: Any) -> Any:
    # For a tensor without dims, Python's own len raises the usual error.
    return value.shape[0] if isinstance(value, Tensor) and value.dim() else builtins.len(value)
