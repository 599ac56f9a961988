"""Gradients of a stack and of its members in shared memory, so that a change of either is seen in the other.

``stack.grad`` is ``[B, *shape]``; the parameters of a member are leaves of their own, in the memory of its row, with a
``grad`` of their own. These are tied: a member's gradient is a view of its row of the stack's gradient. If a member has
no gradient (never computed, or cleared by zero_grad), its row is zero and marked as absent, see `absent_rows`. Hooks
run where autograd accumulates; gradients assigned or cleared by hand are noticed at the next backward, call or step.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node, get_gradient_edge

from hfusion.core.gradient_usage import absent_rows, frozen_rows, listeners, mark_absent, note_cleared, reached

_tied: dict[int, weakref.ref[RowGradients]] = {}
_used = threading.Event()
_NONE = (None, None)


def settle(params: Iterable[Tensor]) -> None:
    """Synchronise the gradients of ``params``, stacks or members' parameters: the latest change counts."""
    if _used.is_set():
        for param in params:
            tie = _tied.get(id(param))
            row_gradients = None if tie is None else tie()
            if row_gradients is not None:
                row_gradients.settle()


class RowGradients:
    """Ties the gradient of ``stack`` to those of members' parameters, ``rows[b]``, which lie in its memory.

    ``watched``: rows whose gradients user code may read or set; they are synchronised whenever autograd runs.
    """

    def __init__(self, stack: Tensor, watched: set[int]) -> None:
        self.stack = stack
        self._watched = watched
        self.rows: dict[int, Tensor] = {}
        # The gradients of the stack and of each row as last synchronised.
        self._synchronised: dict[int, tuple[Tensor | None, Tensor | None]] = {}
        self._whole: Tensor | None = None
        self._absent: Tensor | None = None
        self._nodes: dict[int, tuple[Node, list[Any]]] = {}
        _used.set()
        self._hold(stack)

    def _hold(self, param: Tensor) -> None:
        _tied[id(param)] = weakref.ref(self, partial(_forget_tie, id(param)))

    def tie(self, row: int, param: Tensor) -> None:
        """Make ``param`` the parameter of member ``row``; if it replaces one, the gradient of ``param`` counts."""
        if self.rows.get(row) is not param:
            synchronised = self._synchronised.get(row)
            self.untie(row)
            self.rows[row] = param
            if synchronised is not None:
                self._synchronised[row] = synchronised
            self._hold(param)
        self._watch(self.stack)
        self._watch(param)
        self.settle([row])

    def release(self, row: int) -> None:
        """Release the gradient of member ``row``, which no user code references; `settle` restores it."""
        self.rows[row].grad = None
        self._synchronised.pop(row, None)

    def untie(self, row: int) -> None:
        """Stop tracking the parameter of member ``row``."""
        old_param = self.rows.pop(row, None)
        self._synchronised.pop(row, None)
        if old_param is not None:
            _tied.pop(id(old_param), None)
            self._unwatch(id(old_param))

    def untie_all(self) -> None:
        """Stop tracking all members' parameters."""
        for row in list(self.rows):
            self.untie(row)

    def watch(self) -> None:
        """Hook the nodes at which autograd accumulates; needed again after a conversion, which creates new nodes."""
        for param in (self.stack, *self.rows.values()):
            self._watch(param)

    def _watch(self, param: Tensor) -> None:
        hooked = self._nodes.get(id(param))
        node = get_gradient_edge(param).node if param.requires_grad else None
        if hooked is not None and hooked[0] is node:
            return
        self._unwatch(id(param))
        if node is not None:
            whole = param is self.stack
            hooks = [node.register_prehook(_prehook(self, whole)), node.register_hook(_posthook(self, whole))]
            self._nodes[id(param)] = node, hooks

    def _unwatch(self, key: int) -> None:
        for hook in self._nodes.pop(key, (None, []))[1]:
            hook.remove()

    def pre_accumulate_grad(self, grad: Tensor) -> Tensor:
        """Return the part of ``grad`` that the stack accumulates: zero for members that do not train it."""
        self.settle()
        whole, frozen = self.stack.grad, frozen_rows(self.stack)
        if frozen is None and whole is None:
            self._absent = None
            return grad
        absent = torch.ones(len(grad), dtype=torch.bool, device="cpu") if whole is None else absent_rows(whole)
        self._absent = None if frozen is None or absent is None else absent & frozen
        return grad if frozen is None else grad.index_fill(0, frozen.nonzero().reshape(-1).to(grad.device), 0)

    def post_accumulate_grad(self) -> None:
        """Update absent rows after the stack has accumulated, and call the hooks of members' parameters."""
        whole, live = self.stack.grad, reached(self.stack)
        if whole is not None and (self._absent is not None or absent_rows(whole) is not None):
            absent = torch.zeros(len(whole), dtype=torch.bool, device="cpu") if self._absent is None else self._absent
            if live is not None:
                # The others are handled at the end of the pass.
                absent_before = absent_rows(whole)
                absent = absent if absent_before is None else absent | (absent_before & ~live)
            mark_absent(whole, absent)
        self._whole = whole
        self.settle()
        for row, param in self.rows.items():
            # Autograd calls them only where it accumulates into the member's own leaf.
            hooks = param._post_accumulate_grad_hooks
            if hooks and param.requires_grad and (live is None or live[row]):
                self.settle([row])
                for hook in list(hooks.values()):
                    hook(param)
                if param.grad is None:
                    note_cleared(self.stack, row)
                self.settle([row])

    def settle(self, rows: Iterable[int] | None = None) -> None:
        """Synchronise both sides, for ``rows`` or for the watched rows; the latest change counts."""
        stack, whole = self.stack, self.stack.grad
        if self._moved():
            return
        frozen = frozen_rows(stack)
        if frozen is not None and whole is not None and whole is not self._whole:
            # Assigned by a program, which computes all rows.
            whole.detach()[frozen.to(whole.device)] = 0
            absent = absent_rows(whole)
            mark_absent(whole, frozen if absent is None else absent | frozen)
        if rows is None and not self._watched:
            self._whole = whole
            return
        absent = None if whole is None else absent_rows(whole)
        is_absent = [whole is None] * len(stack) if absent is None else absent.tolist()
        # Some members may have no such parameter.
        tied_rows = [row for row in (self._watched if rows is None else rows) if row in self.rows]
        candidates = [(row, self.rows[row], *self._synchronised.get(row, _NONE)) for row in tied_rows]
        changed = [
            (row, param, old_whole, old_grad)
            for row, param, old_whole, old_grad in candidates
            if (grad := param.grad) is not old_grad or whole is not old_whole or (grad is None) != is_absent[row]
        ]
        if changed:
            with torch.no_grad():
                self._let_agree(whole, is_absent, changed)
        self._whole = stack.grad

    def _moved(self) -> bool:
        """Return whether the stack is on another device during a run; its members follow afterwards."""
        stack, row = self.stack, next(iter(self.rows.values()), None)
        return row is not None and (stack.device != row.device or row.shape != stack.shape[1:])

    def _let_agree(self, whole: Tensor | None, is_absent: list[bool], changed: Sequence[Any]) -> None:
        """Copy the newer side over the other. ``changed``: rows, parameters, and the last synchronised gradients."""
        stack, views = self.stack, None
        cleared = all(
            param.grad is None and old_grad is not None and whole is old_whole
            for _, param, old_whole, old_grad in changed
        )
        if cleared and len(changed) == len(stack):
            whole = stack.grad = None
            is_absent = [True] * len(stack)
        for row, param, old_whole, old_grad in changed:
            grad = param.grad
            if grad is old_grad or (grad is None and whole is not None and whole is not old_whole):
                if whole is not None and views is None:
                    views = whole.detach().unbind()
                param.grad = None if views is None or is_absent[row] else views[row]
                continue
            if grad is not None and whole is None:
                whole = stack.grad = torch.zeros_like(stack)
                is_absent, views = [True] * len(stack), None
            if whole is not None:
                self._write(whole, row, param, is_absent)
        if whole is not None:
            mark_absent(whole, torch.tensor(is_absent, device="cpu"))
            if all(is_absent):
                stack.grad = None
        self._synchronised |= {row: (stack.grad, param.grad) for row, param, _, _ in changed}

    def _write(self, whole: Tensor, row: int, param: Tensor, is_absent: list[bool]) -> None:
        """Write the member's gradient, or zeros if it has none, into its row."""
        target = whole.detach()[row]
        is_absent[row] = param.grad is None
        if param.grad is None:
            target.zero_()
            return
        if param.grad.data_ptr() != target.data_ptr():
            target.copy_(param.grad)
        param.grad = target


def lies_in(tensor: Tensor, stack: Tensor, row: int) -> bool:
    """Return whether a member's ``tensor`` lies in its row of ``stack``."""
    kinds = tensor.dtype == stack.dtype and tensor.device == stack.device and tensor.shape == stack.shape[1:]
    address = stack.data_ptr() + row * stack.stride(0) * stack.element_size()
    return kinds and (tensor.data_ptr() == address or not tensor.numel()) and tensor.stride() == stack.stride()[1:]


def _forget_tie(key: int, _: Any) -> None:
    _tied.pop(key, None)


def _prehook(tie: RowGradients, whole: bool) -> Any:
    """Return a hook with a weak reference to the tie, which itself keeps the hooked node alive."""
    tie_ref = weakref.ref(tie)

    def hook(grads: tuple[Tensor | None, ...]) -> Any:
        tie, grad = tie_ref(), grads[0]
        if tie is None:
            return None
        if whole and grad is not None:
            return (tie.pre_accumulate_grad(grad),)
        return tie.settle()

    return hook


def _posthook(tie: RowGradients, whole: bool) -> Any:
    tie_ref = weakref.ref(tie)

    def hook(*_: Any) -> None:
        tie = tie_ref()
        if tie is not None:
            (tie.post_accumulate_grad if whole else tie.settle)()

    return hook


listeners.append(lambda leaf: settle([leaf]))
