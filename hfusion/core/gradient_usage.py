"""Track which members used a parameter in a step: a model alone has no gradient for an unused parameter.

A looped submodule may branch on values, so that a parameter reaches the losses of some members only. Its gradient is
still a stack, with zeros in the rows of the other members; an optimizer would decay these rows and count a step. A run
of a program with looped submodules therefore hooks the places where gradients arrive: the members' rows of the inputs
of these submodules, and the results of the program. The autograd graph tells which parameters lie behind them. Absent
rows are stored as an attribute of the gradient. A program in parts has a run and a backward pass for each part:
`never_reached` returns what a pass found for an input of its part, to pass to `exclude` of the part that computed it.
"""

from __future__ import annotations

import functools
import operator
import threading
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node

from hfusion.core.layout import Listed
from hfusion.core.membership import has_rows, keep_marks, own_hook
from hfusion.core.memory import lies_within
from hfusion.torch_private.autograd_engine import (
    AccumulateGrad,
    at_end_of_backward,
    backward_id,
    backward_node,
    nodes_behind,
)
from hfusion.torch_private.dispatch_modes import in_transform
from hfusion.torch_private.replaced_functions import replaced

_ABSENT = "_hfusion_absent_rows"
_MISSING = "_hfusion_missing_rows"
_FROZEN = "_hfusion_frozen_rows"
_SINK = "_hfusion_sink"
# Attribute of a leaf: the handle of the hook that ends the marks of its gradient.
_PENDING = "_hfusion_pending"
# Limits the notes that are left by backward passes which raised an error.
_MAX_PASSES = 16


def absent_rows(grad: Tensor) -> Tensor | None:
    """Return the members, bool ``[B]``, that have no gradient in a stacked one; None if all have one."""
    return getattr(grad, _ABSENT, None)


def mark_absent(grad: Tensor | None, rows: Tensor | None) -> None:
    """Store on a gradient the members that `absent_rows` returns."""
    _store(grad, _ABSENT, rows)


def frozen_rows(param: Tensor) -> Tensor | None:
    """Return the members, bool ``[B]``, that do not train a stacked parameter which others train; None if all do."""
    return getattr(param, _FROZEN, None)


def freeze_rows(param: Tensor, rows: Tensor | None) -> None:
    """Store on a stacked parameter the members that `frozen_rows` returns."""
    _store(param, _FROZEN, rows)


def _store(tensor: Tensor | None, name: str, rows: Tensor | None) -> None:
    if tensor is not None and rows is not None and rows.any():
        setattr(tensor, name, rows)
        _seen.set()
    elif hasattr(tensor, name):
        delattr(tensor, name)


def never_reached(leaf: Tensor) -> Tensor | None:
    """Return the members, bool ``[B]``, whose losses did not reach an input of a part; None if unknown.

    Args:
        leaf: what the part took from another one, marked as stacked (`hfusion.core.membership.mark`).
    """
    missing: Tensor | None = vars(leaf).pop(_MISSING, None)
    return missing


def exclude(output: Tensor, members: Tensor | None) -> None:
    """Let the next backward pass ignore the gradient of a part's ``output`` for ``members``, bool ``[B]``."""
    sink = getattr(output, _SINK, None)
    if sink is not None:
        sink.excluded = 0 if members is None else mask_of(members.nonzero().reshape(-1).tolist())


def _zero_rows(grad: Tensor, candidates: Tensor) -> Tensor:
    """Return which rows ``[B]`` of ``candidates`` are zero in ``grad``, which is not read if there are none."""
    # A row that is not zero has a gradient from elsewhere, such as a penalty on the parameter.
    return candidates & ~grad.detach().reshape(len(grad), -1).any(1).cpu() if candidates.any() else candidates


_seen = threading.Event()


def any_absent() -> bool:
    """Return whether gradients of this process may have absent rows: cheaper than checking each gradient."""
    return _seen.is_set()


@dataclass(eq=False)
class _Sink:
    """A consumer of a value: a looped submodule, row by row, or the caller.

    ``leaves``: parameters it depends on without a looped submodule in between. ``excluded``: the members,
    as a mask, whose gradients do not count.
    """

    leaves: set[Tensor] = field(default_factory=set)
    excluded: int = 0


@dataclass(eq=False)
class _Pass:
    """One backward pass.

    Attributes:
        reached: the members, as a mask, whose rows of each sink the pass has reached.
        previous_grads: the gradient of each leaf before the pass, and its version.
    """

    reached: dict[_Sink, int] = field(default_factory=dict)
    previous_grads: dict[Tensor, tuple[Tensor | None, int]] = field(default_factory=dict)

    def note(self, sink: _Sink, members: int) -> None:
        for leaf in sink.leaves if sink not in self.reached else ():
            self.previous_grads.setdefault(leaf, (leaf.grad, 0 if leaf.grad is None else leaf.grad._version))
        self.reached[sink] = (self.reached.get(sink, 0) | members) & ~sink.excluded

    def missing(self, sinks: Iterable[_Sink], members: int) -> Tensor:
        """Return for which members, bool ``[B]``, none of ``sinks`` was reached."""
        live = functools.reduce(operator.or_, (self.reached.get(sink, 0) for sink in sinks), 0)
        return torch.tensor([not live >> member & 1 for member in range(members)], device="cpu")

    def finish(self) -> None:
        """Mark rows that were never reached as absent in the gradients that the pass created or added to."""
        for leaf, (before, version) in self.previous_grads.items():
            grad, missing = leaf.grad, self.missing([s for s in self.reached if leaf in s.leaves], len(leaf))
            if not isinstance(leaf, nn.Parameter):
                setattr(leaf, _MISSING, missing)
            if grad is None or (grad is before and grad._version == version) or grad.layout is not torch.strided:
                # The pass may accumulate nowhere, as in torch.autograd.grad.
                continue
            # A gradient that was there before stays, and so does one from elsewhere.
            earlier = missing if before is None else absent_rows(before)
            absent = None if earlier is None else earlier & _zero_rows(grad, missing)
            mark_absent_until_next(leaf, absent)


def mark_absent_until_next(leaf: Tensor, rows: Tensor | None) -> None:
    """Mark members as without a gradient in the gradient of ``leaf``, until autograd accumulates one for all."""
    mark_absent(leaf.grad, rows)
    trained = isinstance(leaf, nn.Parameter) and leaf.requires_grad
    if trained and rows is not None and rows.any() and not hasattr(leaf, _PENDING):
        setattr(leaf, _PENDING, leaf.register_post_accumulate_grad_hook(_all_present))


@own_hook
def _all_present(leaf: Tensor) -> None:
    getattr(leaf, _PENDING).remove()
    delattr(leaf, _PENDING)
    watching = _passes.get(backward_id())
    # Where the pass is watched, its end finds out which members have a gradient.
    if leaf.grad is not None and (watching is None or leaf not in watching.previous_grads):
        mark_absent(leaf.grad, None)


_passes: dict[int, _Pass] = {}


def _pass() -> _Pass:
    """Return the pass that autograd is in."""
    number = backward_id()
    if number not in _passes:
        while len(_passes) >= _MAX_PASSES:
            del _passes[next(iter(_passes))]
        _passes[number] = _Pass()
        at_end_of_backward(lambda: _passes.pop(number, _Pass()).finish())
    return _passes[number]


class ProgramRun:
    """One run of a program with looped submodules."""

    def __init__(self) -> None:
        self._sinks: list[tuple[_Sink, list[Node]]] = []
        self._count = 0

    def took(self, rows: Sequence[Tensor]) -> None:
        """Watch the gradients of ``rows``, the inputs of a looped submodule, one for each member."""
        self._count = len(rows)
        self._watch(_Sink(), [(1 << member, row) for member, row in enumerate(rows) if _has_history(row)])

    def gave(self, results: Sequence[Any], members: int | None = None) -> None:
        """End the run: watch the gradients of ``results``, and find the parameters behind all watched values.

        ``members``: as of `watched`.
        """
        count = members or self._count
        for result in results if count else ():
            if _has_history(result):
                sink = _Sink()
                setattr(result, _SINK, sink)
                self._watch(sink, [(mask_of(range(count)), result)])
            elif isinstance(result, Listed):
                self.took(result)
        joined: Any = backward_node(Join)
        for sink, nodes in self._sinks:
            # Behind a joined result, other sinks are the ones that matter.
            for node in nodes_behind(nodes, joined):
                if isinstance(node, joined):
                    node.sinks.append(sink)
                elif isinstance(node, AccumulateGrad) and has_rows(node.variable):
                    sink.leaves.add(node.variable)
        self._sinks.clear()

    def _watch(self, sink: _Sink, values: Sequence[tuple[int, Tensor]]) -> None:
        """Note which gradients of ``values`` arrive; beside each is the mask of its members."""
        outputs: dict[Any, list[tuple[int, int]]] = {}
        for mask, value in values:
            outputs.setdefault(value.grad_fn, []).append((mask, value.output_nr))
        for node, node_outputs in outputs.items():
            node.register_prehook(partial(_arrived, sink, node_outputs))
        self._sinks.append((sink, list(outputs)))


def _has_history(value: Any) -> bool:
    return isinstance(value, Tensor) and value.grad_fn is not None


def _arrived(sink: _Sink, outputs: Sequence[tuple[int, int]], grads: Sequence[Tensor | None]) -> None:
    """Note the members whose gradients have arrived. ``outputs``: masks of members, each with an output index."""
    members = functools.reduce(operator.or_, (mask for mask, result in outputs if grads[result] is not None), 0)
    if members:
        _pass().note(sink, members)


class Join(torch.autograd.Function):
    """`torch.stack` of the members' results, without a gradient for members whose part is unused."""

    @staticmethod
    def forward(ctx: Any, *parts: Tensor) -> Tensor:
        ctx.set_materialize_grads(False)
        ctx.sinks = []
        return torch.stack(parts)

    @staticmethod
    def backward(ctx: Any, grad: Tensor | None) -> Any:
        if grad is None:
            return (None,) * len(ctx.needs_input_grad)
        absent = _zero_rows(grad, _pass().missing(ctx.sinks, len(grad))).tolist()
        return tuple(None if unused else row for row, unused in zip(grad.unbind(), absent, strict=True))


_active = threading.local()


def running() -> ProgramRun | None:
    """Return the run that this thread is in; None outside of runs."""
    return getattr(_active, "run", None)


def join(parts: Sequence[Tensor]) -> Tensor:
    """Return the members' results as one stack."""
    watched = running() is not None and any(part.requires_grad for part in parts)
    return Join.apply(*parts) if watched else torch.stack(list(parts))  # type: ignore[no-untyped-call]


def watched(run: Callable[..., Any], members: int | None = None) -> Callable[..., Any]:
    """Return ``run``, which runs a program with or without looped submodules, as a function that tracks usage.

    ``members``: B, for a part of a program; its results are watched even if looped submodules are in other parts.
    """

    def call(*inputs: Any) -> Any:
        # For an array inside a member of another array, the members of the outer one are tracked.
        tracks = running() is None and torch.is_grad_enabled() and not in_transform()
        program_run = ProgramRun() if tracks else None
        with replaced(_active, {"run": program_run}):
            results = run(*inputs)
        if program_run is not None:
            program_run.gave(results, members)
        return results

    return call


def mask_of(members: Iterable[int]) -> int:
    """Return the bit mask of ``members``: unions of small tensors take longer than a node of autograd."""
    return sum(1 << member for member in members)


# Parameters of one member of an array: leaves in the memory of a stack's row, whose gradient is a row of the stack's.

# The descriptor of torch, which stores what autograd accumulates in a leaf.
_LEAF_GRAD: Any = Tensor.grad
_DATA: Any = Tensor.data


class RowParameter(nn.Parameter):
    """A member's parameter. A copy, by deepcopy or pickle, is a parameter by itself."""

    # The class of the parameter where it is by itself: nn.Parameter, or one that a user has derived from it.
    _hfusion_kind: type[nn.Parameter] = nn.Parameter
    _hfusion_row: tuple[Tensor, int]

    @property
    def grad(self) -> Tensor | None:
        """The row of the stack's gradient, a view; None if the member has no gradient."""
        stack, row = self._hfusion_row
        whole = stack.grad
        absent = None if whole is None else absent_rows(whole)
        return None if whole is None or (absent is not None and absent[row]) else whole.detach()[row]

    @grad.setter
    @torch.no_grad()
    def grad(self, value: Tensor | None) -> None:
        stack, row = self._hfusion_row
        whole = stack.grad
        if value is not None:
            # Torch checks the shape, dtype and device.
            _LEAF_GRAD.__set__(self, value)
            _LEAF_GRAD.__set__(self, None)
        elif whole is None:
            return
        before = None if whole is None else absent_rows(whole)
        absent = torch.full((len(stack),), whole is None, device="cpu") if before is None else before.clone()
        absent[row] = value is None
        if absent.all():
            stack.grad = None
            return
        stack.grad = torch.zeros_like(stack) if whole is None else whole.to_dense()
        target = stack.grad.detach()[row]
        if value is None:
            target.zero_()
        elif value.data_ptr() != target.data_ptr():
            target.copy_(value.to_dense())
        mark_absent_until_next(stack, absent)

    @grad.deleter
    def grad(self) -> None:
        self.grad = None

    @property
    def data(self) -> Tensor:
        """The row without autograd. What is assigned is written into the row."""
        held: Tensor = _DATA.__get__(self)
        return held

    @data.setter
    def data(self, value: Tensor) -> None:
        held, kinds = self.data, [(t.shape, t.dtype, t.device, t.layout) for t in (self, value)]
        stack, row = self._hfusion_row
        if kinds[0] == kinds[1] and lies_in(self, stack, row) and not lies_within(value, stack):
            held.copy_(value.detach())
        else:
            # The array adopts it at its next call, with what others are assigned then, or refuses it.
            move(self, value)

    def __deepcopy__(self, memo: dict[int, Any]) -> nn.Parameter:
        return _alone(self, self.detach().clone(memory_format=torch.preserve_format))

    def __reduce_ex__(self, protocol: Any) -> Any:
        alone = keep_marks(_alone(self, self.detach()), self)
        return alone.__reduce_ex__(protocol)


def move(tensor: Tensor, memory: Tensor) -> None:
    """Let a member's tensor lie in other memory, as ``tensor.data = memory`` does with other tensors."""
    _DATA.__set__(tensor, memory)


def tie(parameter: Any, stack: Tensor, row: int) -> None:
    """Make ``parameter``, which lies in the memory of a row of ``stack``, that member's parameter."""
    if not isinstance(parameter, RowParameter):
        kind: Any = type(parameter)
        parameter.__class__ = _row_class(kind)
        if (parameter.is_floating_point() or parameter.is_complex()) and not parameter.is_inference():
            trained = parameter.requires_grad
            # A hook can be registered only where a gradient is required, and stays when it is not.
            parameter.requires_grad_().register_post_accumulate_grad_hook(_add_to_row)
            parameter.requires_grad_(trained)
    parameter._hfusion_row = stack, row


def untie(parameter: Any) -> None:
    """Make a member's parameter one by itself, without a gradient."""
    if not hasattr(parameter, "_hfusion_row"):
        return
    del parameter._hfusion_row
    parameter.__class__ = parameter._hfusion_kind
    hooks = parameter._post_accumulate_grad_hooks
    for key in [key for key, hook in (hooks or {}).items() if hook is _add_to_row]:
        del hooks[key]


@functools.cache
def _row_class(kind: Any) -> type[RowParameter]:
    """Return the class for parameters of a class that users have derived from nn.Parameter."""
    own = {"__module__": kind.__module__, "_hfusion_kind": kind}
    return RowParameter if kind is nn.Parameter else type(kind.__name__, (RowParameter, kind), own)


def _alone(parameter: RowParameter, values: Tensor) -> nn.Parameter:
    copied = nn.Parameter(values, requires_grad=parameter.requires_grad)
    copied.__class__ = parameter._hfusion_kind
    return copied


def lies_in(tensor: Tensor, stack: Tensor, row: int) -> bool:
    """Return whether a member's ``tensor`` lies in its row of ``stack``."""
    kinds = tensor.dtype == stack.dtype and tensor.device == stack.device and tensor.shape == stack.shape[1:]
    address = stack.data_ptr() + row * stack.stride(0) * stack.element_size()
    return kinds and (tensor.data_ptr() == address or not tensor.numel()) and tensor.stride() == stack.stride()[1:]


@own_hook
def _add_to_row(parameter: RowParameter) -> None:
    """Add what autograd has accumulated in a member's parameter to its row of the stack's gradient."""
    new, before = _LEAF_GRAD.__get__(parameter), parameter.grad
    _LEAF_GRAD.__set__(parameter, None)
    parameter.grad = new if before is None else before + new
