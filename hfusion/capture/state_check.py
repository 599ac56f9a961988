"""Distinguish caches that forward keeps in attributes from state, by later calls of a copy that was called once.

A graph computes everything in every call. It is exact if no call of a member depends on the calls before it: on their
values, their sizes, the parameters at that time, or on the results that they left.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterable

from torch import nn

from hfusion.capture.attribute_fingerprint import follows
from hfusion.capture.eager_runs import ALIKE, EQUAL, Outcome, difference, run_without_gradients, twin
from hfusion.capture.observe import Observation
from hfusion.capture.python_state import restored
from hfusion.capture.registered_tensors import REMEDY
from hfusion.capture.repeated_calls import LaterCall, LaterCalls, left_between, tensors_of
from hfusion.core.errors import FusionError
from hfusion.core.program import Capture


class StateError(FusionError):
    """Raised if forward keeps state in Python attributes, which an array cannot do."""


def judge(observed: Observation, captured: Capture | None = None) -> str:
    """Return why a graph would not reproduce forward; empty if it would. Warns of results left in attributes.

    Args:
        captured: the graph, if there is one: its results are compared with those of a later call.

    Raises:
        StateError: forward keeps state in attributes.
    """
    with restored(observed.module, observed.search) as back:
        if not observed.attributes and not observed.variables:
            return _asks_for_gradients(observed) if captured is not None else ""
        try:
            if captured is not None:
                _warn(observed.module, _results_left(observed, LaterCalls(observed, captured, back)))
                return ""
        except Exception:
            # A later call differs, or the graph differs by rounding: the comparison with forward below decides.
            pass
        try:
            _warn(observed.module, _results_left(observed, LaterCalls(observed, None, back)))
        except FusionError as error:
            if observed.attributes:
                raise StateError(str(error)) from error
            return str(error)
        back()
        return _asks_for_gradients(observed) if captured is not None else ""


def _asks_for_gradients(observed: Observation) -> str:
    """Describe the difference in forward's results while gradients are off; empty if there is none.

    Forward may read torch.is_grad_enabled() or requires_grad of its values, and a graph holds only one answer.
    """
    try:
        without = run_without_gradients(twin(observed.module), *observed.call)
    except Exception:
        # Forward needs gradients, for example for torch.autograd.grad: nothing to compare.
        return ""
    unlike = difference(tensors_of(without), tensors_of(observed.outcome), ALIKE)
    if unlike is None:
        return ""
    return (
        f"in forward {unlike} differs while gradients are off (torch.no_grad), and a graph knows one of them only; "
        "ask self.training instead"
    )


def _results_left(observed: Observation, calls: Iterable[LaterCall]) -> list[str]:
    """Return the attributes in which forward leaves results. Raises FusionError if a later call differs."""
    others, last = list[LaterCall](), list[LaterCall]()
    for call in calls:
        _check(observed, call)
        (last if call.first is None else others).append(call)
    start = (others or last)[0].before
    differences = left_between(start, others[-1].after if others else start, last[0].after)
    names = sorted(name for name, parts in differences.items() if parts)
    for name in set(names) & set(observed.variables):
        raise FusionError(f"forward leaves results in {name}, which other code may read; {REMEDY}")
    return names


def _check(observed: Observation, call: LaterCall) -> None:
    """Raise FusionError if a call depends on the calls before it."""
    names = ", ".join((*observed.attributes, *observed.variables))
    if isinstance(call.warmed, Exception):
        raise FusionError(
            f"forward keeps values in the Python attribute {names}, with which a later call fails "
            f"({type(call.warmed).__name__}: {call.warmed}); a fused array has no such state: {REMEDY}"
        ) from call.warmed
    fresh, warmed = call.fresh, call.warmed
    if warmed.failed and not fresh.failed and not observed.module.training:
        # Kept values refer to a freed autograd graph: in eval mode, such a member can be called, but not trained.
        fresh, warmed = (Outcome(outcome.outputs, {}) for outcome in (fresh, warmed))
    unlike = difference(warmed, fresh, EQUAL)
    if unlike is not None:
        failure, when = f" ({warmed.failed})" if warmed.failed else "", "the next" if call.first is None else "another"
        raise FusionError(
            f"forward keeps values in the Python attribute {names}, with which {unlike} differs in {when} call from "
            f"what a fresh model gives{failure}; a fused array has no such state: {REMEDY}"
        )
    if call.first is None:
        return
    for name in call.after:
        if not follows(call.before.get(name), call.after[name], call.first.get(name)):
            raise FusionError(
                f"forward changes the Python attribute {name} at every call (a counter, a list that grows, its "
                f"own random numbers?), of which a fused array has none; {REMEDY}"
            )


def _warn(module: nn.Module, names: list[str]) -> None:
    if names:
        warnings.warn(
            f"forward of {type(module).__name__} leaves results in the attribute {', '.join(names)}, which a fused "
            "array does not: return from forward what is read outside of it",
            stacklevel=3,
        )
