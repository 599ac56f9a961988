"""Eager fallbacks in a graph: one opaque call per submodule, which loops over the members at run time."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from hfusion.capture.fallback_runtime import SIZE, TENSOR, InputSize, OpaqueCall, Result, calls, run
from hfusion.capture.method_interception import WHOLE, Island, Method, intercepted
from hfusion.capture.module_call_trace import RecordedCall, Records
from hfusion.capture.python_reads import STRIDE_QUESTIONS
from hfusion.capture.reachable_code import names_of
from hfusion.capture.registered_tensors import tensors
from hfusion.capture.tensor_references import references
from hfusion.core.errors import FusionError
from hfusion.core.guards import fixed as fixed_size
from hfusion.core.layout import Layout
from hfusion.core.memory import memory_order, tensors_in
from hfusion.ops.rule import Call, MemberScalars, RuleTable, Site, Value
from hfusion.ops.saved import GATES_TWICE
from hfusion.passes.islands import OPAQUE

_numbers = itertools.count()


@torch.library.register_fake(OPAQUE)  # type: ignore[untyped-decorator]
def _fake(
    inputs: Sequence[Tensor],
    fixed: Sequence[Tensor],
    changing: Sequence[Tensor],
    call: int,
    written: Sequence[int],
    links: Sequence[int],
    apart: Sequence[int],
    alive: Sequence[int],
    sizes: Sequence[int],
) -> list[Tensor]:
    results = [result for result in calls[call].results if isinstance(result, Result)]
    return [torch.empty(r.sizes(inputs, sizes), dtype=r.dtype, device=r.device) for r in results]


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


def stand_in(
    method: Method,
    why: str,
    record: RecordedCall,
    changed: frozenset[str],
    model: nn.Module,
    alive: list[OpaqueCall],
) -> Callable[..., Any]:
    """Return a function that traces as an opaque call with the results of ``record``, added to ``alive``."""
    stub = _Stub(method, why, iter([record]), changed, [model], alive)
    return lambda *args, **kwargs: stub.trace(args, kwargs)


class _Stub:
    """Replaces a submodule while forward is traced; ``records`` are its calls in an eager run, in order."""

    def __init__(
        self,
        method: Method,
        why: str,
        records: Iterator[RecordedCall],
        changed: frozenset[str],
        members: Sequence[nn.Module],
        alive: list[OpaqueCall],
    ) -> None:
        island = method.island
        self._module, self._island, self._why, self._records, self._alive = method.module, island, why, records, alive
        prefix = f"{island.path}." if island.path else ""
        self._changed = frozenset(name.removeprefix(prefix) for name in changed if name.startswith(prefix))
        self._bodies = tuple(member.get_submodule(island.path) for member in members)
        names = names_of([members[0]])
        self._references = tuple(references(body, names) for body in self._bodies)
        self._asks_strides = not names_of([method.module]).isdisjoint(STRIDE_QUESTIONS)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        leaves = [_number(leaf) for leaf in leaves]
        inputs = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        record = next(self._records, None)
        if record is None or record.count != len(inputs):
            raise FusionError(
                f"{self._island} is called more often, or with another number of tensors, in a capture than in an "
                "eager run: forward must not ask whether it is traced (torch.compiler.is_compiling)"
            )
        registered = dict(tensors(self._module))
        buffers = dict(self._module.named_buffers(remove_duplicate=False))
        changing = [key for key in registered if key in buffers or key in self._changed]
        fixed = [key for key in registered if key not in changing]
        sizes = [leaf for leaf in leaves if _open(leaf)]
        output, out_spec = pytree.tree_flatten(record.output)
        results = tuple(
            _result(leaf, inputs, sizes, free=self._island == WHOLE) if isinstance(leaf, Tensor) else leaf
            for leaf in output
        )
        call = self._opaque_call(record, leaves, spec, (fixed, changing), results)
        number = numbered(call)
        self._alive.append(call)
        written = [
            *sorted(record.written),
            *(len(inputs) + changing.index(key) for key in changing if key in record.wrote),
        ]
        links = _links(record, {key: len(inputs) + k for k, key in enumerate((*fixed, *changing))})
        held = [registered[k] for k in fixed], [registered[k] for k in changing]
        fresh = iter(OPAQUE(inputs, *held, number, written, links, [], [], sizes))
        # torch.export takes few kinds of values (see `with_values`), and drops the fields of dataclasses that are None.
        others = [0] * len(output) if self._island == WHOLE else output
        leaves = [next(fresh) if isinstance(o, Tensor) else other for o, other in zip(output, others, strict=True)]
        return pytree.tree_unflatten(leaves, out_spec)

    def _opaque_call(
        self,
        record: RecordedCall,
        leaves: Sequence[Any],
        spec: pytree.TreeSpec,
        keys: tuple[Sequence[str], Sequence[str]],
        results: tuple[Any, ...],
    ) -> OpaqueCall:
        """Describe a call. ``keys``: of the tensors that calls only read, and of those that they may change."""
        recorded_inputs = tensors_in((record.args, record.kwargs))
        sizes = (size for leaf in leaves if isinstance(leaf, Tensor) for size in leaf.shape)
        open_sizes = any(map(_open, leaves)) or any(_open(size) and fixed_size(size) is None for size in sizes)
        return OpaqueCall(
            str(self._island),
            self._island.path,
            self._island.method,
            self._why,
            tuple(_marked(leaf) for leaf in leaves),
            spec,
            tuple(keys[0]),
            tuple(keys[1]),
            results,
            tuple(tensor.layout is torch.strided and tensor.is_contiguous() for tensor in recorded_inputs),
            record.written,
            record.assigned,
            self._changed,
            record.addresses,
            record.draws,
            torch.is_grad_enabled(),
            record.attached,
            self._bodies,
            self._references,
            tuple(map(memory_order, recorded_inputs)) if self._asks_strides else (),
            open_sizes,
        )


def with_values(graph: fx.Graph, calls_in_graph: Sequence[OpaqueCall]) -> None:
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


def _result(result: Tensor, inputs: Sequence[Tensor], numbers: Sequence[Any], free: bool) -> Result:
    """Infer which sizes of a result are varying sizes of inputs, by comparing the sizes of a recorded call.

    If the inference is wrong, a run with other sizes raises `OtherSizes`.
    """
    sources: list[tuple[InputSize, Any]] = [
        (InputSize(k, dim), size) for k, x in enumerate(inputs) for dim, size in enumerate(x.shape)
    ]
    sources += [(InputSize(-1 - k, 0), number) for k, number in enumerate(numbers)]
    shape: list[int | InputSize] = []
    for dim, size in enumerate(result.shape):
        equal = [(source, other) for source, other in sources if (other.node.hint if _open(other) else other) == size]
        # Prefer a size of the same dim, then a dynamic size, then any other.
        equal.sort(key=lambda pair: (pair[0].dim != dim, not _open(pair[1]) or fixed_size(pair[1]) is not None))
        varies = bool(equal) and _open(equal[0][1]) and fixed_size(equal[0][1]) is None
        shape.append(equal[0][0] if varies else size)
    return Result(tuple(shape), result.dtype, result.device, free)


def numbered(call: OpaqueCall) -> int:
    """Register ``call``, and return the number by which graphs refer to it while it is alive."""
    number = next(_numbers)
    calls[number] = call
    return number


def _open(leaf: Any) -> bool:
    return isinstance(leaf, torch.SymInt)


def _marked(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return TENSOR
    return SIZE if _open(leaf) else leaf


def _number(leaf: Any) -> Any:
    """Return the number behind a symbol if the trace knows it; unknown sizes stay symbols."""
    if isinstance(leaf, torch.SymInt):
        value = fixed_size(leaf)
        return leaf if value is None else value
    if isinstance(leaf, torch.SymFloat):
        return float(leaf)
    return bool(leaf) if isinstance(leaf, torch.SymBool) else leaf


def _links(record: RecordedCall, keys: Mapping[str, int]) -> list[int]:
    """Return the recorded links as flat pairs of positions (result, source)."""
    sources = record.count + len(keys)
    links = []
    for result, source in sorted(record.links, key=str):
        position = keys.get(source) if isinstance(source, str) else source if source >= 0 else sources - 1 - source
        if position is not None:
            links += [result, position]
    return links


def rule(
    site: Site,
    inputs: list[Value],
    fixed: list[Value],
    changing: list[Value],
    call: int | MemberScalars,
    written: Any,
    links: Any,
    apart: list[Any],
    alive: list[Any],
    sizes: list[Any],
) -> Call:
    """Run the submodule's own code in a loop over members."""
    numbers = call.values if isinstance(call, MemberScalars) else (call,) * site.members
    first = calls[numbers[0]]
    for key, value in zip(first.changing, changing, strict=True):
        if value.shared and key in first.changed:
            raise FusionError(
                f"{key} of {first.path} is one object in all members, but every member writes its own value into it; "
                "give each model its own"
            )
    # Tensors that all members share must not change, unless the capture recorded a write.
    shared = [
        position
        for position, value in enumerate((*inputs, *changing))
        if value.shared and position not in first.written
    ]
    watched = tuple(sorted({*shared, *_numbers_in(alive)}))
    rows = [[v if v.shared else v.to(Layout.LISTED) for v in group] for group in (inputs, fixed, changing)]
    text = f"loop over members, {first.path}: {first.why}"
    args = (numbers, *rows, tuple(_numbers_in(apart)), watched, sizes)
    return site.call(run, args, Layout.STACKED, text, saves=GATES_TWICE, loops=True)


def _numbers_in(items: Sequence[Any]) -> list[int]:
    return [n for item in items for n in (item.values if isinstance(item, MemberScalars) else (item,))]


RULES: RuleTable = {OPAQUE: rule}
