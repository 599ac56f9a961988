"""Submodules that no graph can hold: one opaque call in the capture, a loop over the members' own code at run time."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.capture.attribute_writes import names_used
from hfusion.capture.foretell import foretold
from hfusion.capture.intercept import Island, Method, intercepted
from hfusion.capture.named import tensors
from hfusion.capture.own_code import SIZE, TENSOR, OpaqueCall, Result, calls, run
from hfusion.capture.python_reads import STRIDE_QUESTIONS
from hfusion.capture.recorded import RecordedCall, Records, tensors_in
from hfusion.capture.references import references
from hfusion.capture.state_watch import hide
from hfusion.capture.watched import names_of
from hfusion.core.errors import FusionError
from hfusion.core.guards import fixed as fixed_size
from hfusion.core.layout import Layout
from hfusion.core.memory import memory_order
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
    top: RecordedCall | None = None,
) -> Iterator[list[OpaqueCall]]:
    """While active, the ``culprits`` of ``model``, each with the reason, trace as opaque calls.

    Yields the calls met; they must be kept as long as the captured graph is used. ``top`` is the recorded call that is
    traced, by default that of the whole forward.
    """
    met: list[OpaqueCall] = []
    seen = {
        island: itertools.cycle(records.sightings(top or records.top, island, culprits.keys())) for island in culprits
    }
    stubs: dict[Island, _Stub] = {}

    def trace(method: Method, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        island = method.island
        if island not in stubs:
            stubs[island] = _Stub(method, culprits[island], seen[island], records.changed, members, met)
        return stubs[island].trace(args, kwargs)

    with intercepted(model, culprits, trace):
        yield met


def stand_in(
    method: Method, why: str, record: RecordedCall, changed: frozenset[str], model: nn.Module, met: list[OpaqueCall]
) -> Callable[..., Any]:
    """What traces as one call of ``method`` that gives what ``record`` did, for these sizes; ``met`` keeps it alive."""
    stub = _Stub(method, why, iter([(record, [])]), changed, [model], met)
    return lambda *args, **kwargs: stub.trace(args, kwargs)


class _Stub:
    """What stands for an island while forward is traced; ``seen`` are its recorded calls in turn, as at other sizes."""

    def __init__(
        self,
        method: Method,
        why: str,
        seen: Iterator[tuple[RecordedCall, list[RecordedCall] | None]],
        changed: frozenset[str],
        members: Sequence[nn.Module],
        met: list[OpaqueCall],
    ) -> None:
        island = method.island
        self._module, self._island, self._why, self._seen, self._met = method.module, island, why, seen, met
        prefix = f"{island.path}." if island.path else ""
        self._changed = frozenset(name.removeprefix(prefix) for name in changed if name.startswith(prefix))
        self._bodies = tuple(member.get_submodule(island.path) for member in members)
        used = names_used(members[0])
        self._references = tuple(references(body, used) for body in self._bodies)
        self._asks_strides = not names_of([method.module]).isdisjoint(STRIDE_QUESTIONS)

    def trace(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        leaves = [_number(leaf) for leaf in leaves]
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        own = dict(tensors(self._module))
        buffers = dict(self._module.named_buffers(remove_duplicate=False))
        changing = [key for key in own if key in buffers or key in self._changed]
        fixed = [key for key in own if key not in changing]
        record, others = next(self._seen, (None, None))
        if record is None or record.count != len(given):
            raise FusionError(f"{self._island} is called otherwise when it is captured than when it runs")
        seen = tensors_in((record.args, record.kwargs))
        output, out_spec = pytree.tree_flatten(record.output)
        call = OpaqueCall(
            str(self._island),
            self._island.path,
            self._island.method,
            self._why,
            tuple(_marked(leaf) for leaf in leaves),
            spec,
            tuple(fixed),
            tuple(changing),
            foretold(self._island, record, others, [k for k, leaf in enumerate(leaves) if _open(leaf)]),
            tuple(tensor.layout is torch.strided and tensor.is_contiguous() for tensor in seen),
            record.written,
            record.assigned,
            self._changed,
            record.addresses,
            torch.is_grad_enabled(),
            record.attached,
            self._bodies,
            self._references,
            tuple(map(memory_order, seen)) if self._asks_strides else (),
        )
        number = numbered(call)
        self._met.append(call)
        written = [
            *sorted(record.written),
            *(len(given) + changing.index(key) for key in changing if key in record.wrote),
        ]
        links = _links(record, {key: len(given) + k for k, key in enumerate((*fixed, *changing))})
        sizes = [leaf for leaf in leaves if _open(leaf)]
        held = [own[k] for k in fixed], [own[k] for k in changing]
        fresh = iter(OPAQUE(given, *held, number, written, links, [], [], sizes))
        hide(self._island, self._module, record.state.left)
        return pytree.tree_unflatten([next(fresh) if isinstance(o, Tensor) else o for o in output], out_spec)


def numbered(call: OpaqueCall) -> int:
    """The number by which graphs refer to ``call``, as long as somebody keeps it."""
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
    """A number that a trace knows as a number; of those that it does not know, sizes stay open."""
    if isinstance(leaf, torch.SymInt):
        known = fixed_size(leaf)
        return leaf if known is None else known
    if isinstance(leaf, torch.SymFloat):
        return float(leaf)
    return bool(leaf) if isinstance(leaf, torch.SymBool) else leaf


def _links(record: RecordedCall, keys: Mapping[str, int]) -> list[int]:
    """The recorded links as flat pairs of positions."""
    sources = record.count + len(keys)
    found = []
    for result, source in sorted(record.links, key=str):
        place = keys.get(source) if isinstance(source, str) else source if source >= 0 else sources - 1 - source
        if place is not None:
            found += [result, place]
    return found


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
    """A loop over members around the submodule's own code."""
    numbers = call.values if isinstance(call, MemberScalars) else (call,) * site.members
    first = calls[numbers[0]]
    for key, value in zip(first.changing, changing, strict=True):
        if value.shared and key in first.changed:
            raise FusionError(
                f"{key} of {first.path} is one object in all members, but every member writes its own value into it; "
                "give each model its own"
            )
    # What all members see is watched for all of them.
    shared = [place for place, value in enumerate((*inputs, *changing)) if value.shared and place not in first.written]
    watched = tuple(sorted({*shared, *_numbers_in(alive)}))
    rows = [[v if v.shared else v.to(Layout.LISTED) for v in group] for group in (inputs, fixed, changing)]
    text = f"loop over members, {first.path}: {first.why}"
    args = (numbers, *rows, tuple(_numbers_in(apart)), watched, sizes)
    return site.call(run, args, Layout.STACKED, text, saves=GATES_TWICE, loops=True)


def _numbers_in(items: Sequence[Any]) -> list[int]:
    return [n for item in items for n in (item.values if isinstance(item, MemberScalars) else (item,))]


RULES: RuleTable = {OPAQUE: rule}
