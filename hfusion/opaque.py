"""Submodules that no graph can hold: one opaque call in the capture, a loop over the members' own code at run time."""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.compare import tensors
from hfusion.errors import FusionError
from hfusion.layout import Layout, Listed
from hfusion.ops.rule import Call, PerMember, RuleTable, Site, Value
from hfusion.usage import join, running

_library = torch.library.Library("hfusion", "DEF")
_library.define("opaque(Tensor[] inputs, int call) -> Tensor[]")
_numbers = itertools.count()

# Not None, which is an argument like any other.
_TENSOR = object()


@dataclass(frozen=True)
class Result:
    """What a tensor is like."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device


@dataclass(frozen=True, eq=False)
class OpaqueCall:
    """One call of a submodule in forward.

    ``leaves`` are its flat arguments, `_TENSOR` where a tensor comes; ``keys`` its own tensors, which follow the
    arguments in the graph; ``results`` what one member gave, ``bodies`` the submodule of every member.
    """

    path: str
    why: str
    leaves: tuple[Any, ...]
    spec: Any
    keys: tuple[str, ...]
    results: tuple[Result, ...]
    bodies: tuple[nn.Module, ...]


_calls: WeakValueDictionary[int, OpaqueCall] = WeakValueDictionary()


@torch.library.register_fake("hfusion::opaque", lib=_library)  # type: ignore[untyped-decorator]
def _fake(inputs: Sequence[Tensor], call: int) -> list[Tensor]:
    return [torch.empty(r.shape, dtype=r.dtype, device=r.device) for r in _calls[call].results]


@dataclass(frozen=True)
class Recorded:
    """What a submodule was called with in a real run, what it gave, and whether it wrote into its inputs."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any
    writes: bool


@contextmanager
def opaque(
    model: nn.Module,
    culprits: Mapping[str, str],
    records: Mapping[str, Sequence[Recorded]],
    members: Sequence[nn.Module],
) -> Iterator[list[OpaqueCall]]:
    """While active, the submodules of ``model`` named in ``culprits`` (path to reason) trace as opaque calls.

    Yields the calls met; they must be kept as long as the captured graph is used.
    """
    calls: list[OpaqueCall] = []
    patched = []
    for path, why in culprits.items():
        module = model.get_submodule(path)
        bodies = tuple(member.get_submodule(path) for member in members)
        stub = _stub(module, path, why, itertools.cycle(records[path]), bodies, calls)
        module.forward = functools.wraps(module.forward)(stub)
        patched.append(module)
    try:
        yield calls
    finally:
        for module in patched:
            del module.forward


def _stub(
    module: nn.Module,
    path: str,
    why: str,
    records: Iterator[Recorded],
    bodies: tuple[nn.Module, ...],
    calls: list[OpaqueCall],
) -> Any:
    def forward(*args: Any, **kwargs: Any) -> Any:
        leaves, spec = pytree.tree_flatten((args, kwargs))
        given = [leaf for leaf in leaves if isinstance(leaf, Tensor)]
        own = dict(tensors(module))
        output, out_spec = pytree.tree_flatten(next(records).output)
        blanks = tuple(_TENSOR if isinstance(leaf, Tensor) else leaf for leaf in leaves)
        results = tuple(Result(tuple(t.shape), t.dtype, t.device) for t in output if isinstance(t, Tensor))
        call = OpaqueCall(path, why, blanks, spec, tuple(own), results, bodies)
        number = next(_numbers)
        _calls[number] = call
        calls.append(call)
        fresh = iter(torch.ops.hfusion.opaque([*given, *own.values()], number))
        return pytree.tree_unflatten([next(fresh) if isinstance(o, Tensor) else o for o in output], out_spec)

    forward.hfusion_opaque = True  # type: ignore[attr-defined]
    return forward


def run(numbers: Sequence[int], inputs: Sequence[Any]) -> list[Tensor]:
    """The members' own code, one after another; each result stacked ``[B, *S]``. ``numbers[b]`` is member b's call."""
    rows, watching = [], running()
    for x in inputs:
        if watching is not None and isinstance(x, Listed):
            watching.took(x)
    for member, number in enumerate(numbers):
        given = [x[member] if isinstance(x, Listed) else x for x in inputs]
        rows.append(_run_member(_calls[number], member, given))
    return [_stack(_calls[numbers[0]], parts) for parts in zip(*rows, strict=True)]


def _stack(call: OpaqueCall, parts: Sequence[Tensor]) -> Tensor:
    if len({part.shape for part in parts}) > 1:
        shapes = ", ".join(str(tuple(part.shape)) for part in parts)
        raise FusionError(
            f"{call.path or 'forward'} gave different shapes for the members: {shapes}; they cannot be stacked"
        )
    return join(parts)


def _run_member(call: OpaqueCall, member: int, given: Sequence[Tensor]) -> list[Tensor]:
    count = len(given) - len(call.keys)
    arguments = iter(given[:count])
    leaves = [next(arguments) if leaf is _TENSOR else leaf for leaf in call.leaves]
    args, kwargs = pytree.tree_unflatten(leaves, call.spec)
    own = dict(zip(call.keys, given[count:], strict=True))
    with _filled(call.bodies[member], own) as body:
        output = body(*args, **kwargs)
    found = [leaf for leaf in pytree.tree_leaves(output) if isinstance(leaf, Tensor)]
    for result, expected in zip(found, call.results, strict=True):
        if tuple(result.shape) != expected.shape:
            raise FusionError(
                f"{call.path or 'forward'} of model {member} gave a result of shape {tuple(result.shape)}, where it "
                f"gave {expected.shape} when it was captured; shapes that depend on values cannot be fused"
            )
    return found


@contextmanager
def _filled(body: nn.Module, own: Mapping[str, Tensor]) -> Iterator[nn.Module]:
    """``body`` around the tensors of ``own``; a buffer that it assigns anew is written back.

    The tensors stay when the call is over: a checkpoint runs the body again in backward.
    """
    places = []
    for key, tensor in own.items():
        path, _, name = key.rpartition(".")
        module = body.get_submodule(path)
        holder = module._parameters if name in module._parameters else module._buffers
        places.append((holder, name, tensor))
        holder[name] = tensor  # type: ignore[assignment]
    try:
        yield body
    finally:
        for holder, name, tensor in places:
            after = holder[name]
            if after is not tensor and after is not None:
                with torch.no_grad():
                    tensor.copy_(after)
                holder[name] = tensor  # type: ignore[assignment]


def rule(site: Site, inputs: list[Value], call: int | PerMember) -> Call:
    """A loop over members around the submodule's own code."""
    numbers = call.values if isinstance(call, PerMember) else (call,) * site.members
    operands = [v if v.shared else v.to(Layout.LISTED) for v in inputs]
    return Call(run, (numbers, operands), Layout.STACKED, f"loop over members: {_calls[numbers[0]].why}")


RULES: RuleTable = {torch.ops.hfusion.opaque.default: rule}
