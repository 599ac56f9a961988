"""Distinguish caches that forward keeps in attributes from state, by later calls of a copy that was called once.

A graph computes everything in every call. It is exact if no call of a member depends on the calls before it: on their
values, their sizes, the parameters at that time, or on the results that they left.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.capture.attribute_fingerprint import NUMBERS, contents, differing, follows, variable_contents
from hfusion.capture.eager_runs import (
    ALIKE,
    EQUAL,
    Outcome,
    change_parameters,
    difference,
    reset,
    run,
    run_graph,
    run_without_gradients,
    spoil_changed,
    twin,
)
from hfusion.capture.observe import Observation
from hfusion.capture.python_state import restored
from hfusion.capture.registered_tensors import REMEDY
from hfusion.core.copies import copies
from hfusion.core.errors import FusionError
from hfusion.core.program import Capture

# Largest number of input sizes that are halved one by one.
MAX_SIZES = 4


@dataclass(frozen=True)
class LaterCall:
    """A call of a copy that was called before, and the same call of a fresh copy or of the graph.

    Attributes:
        fresh, warmed: the outcomes of both; the copy that was called before may have raised an error.
        before, after: the Python state of the copy around the call, by attribute and variable.
        first: the Python state of the fresh copy after its call; None for the last calls.
    """

    fresh: Outcome
    warmed: Outcome | Exception
    before: Mapping[str, Any]
    after: Mapping[str, Any]
    first: Mapping[str, Any] | None


def tensors_of(outcome: Outcome) -> Outcome:
    """Return the tensors that forward returns and leaves in the module, without gradients."""
    outputs = tuple(output for output in outcome.outputs if isinstance(output, Tensor))
    return Outcome(outputs, {name: value for name, value in outcome.values.items() if name.endswith(" afterwards")})


def left_between(
    start: Mapping[str, Any], middle: Mapping[str, Any], end: Mapping[str, Any]
) -> dict[str, list[tuple[Any, Any]]]:
    """Return pairs of parts that differ between ``start`` and ``end``, for the names that differ at ``middle``."""
    changed = [name for name in end if any(differing(start.get(name), middle.get(name)))]
    return {name: list(differing(start.get(name), end[name])) for name in changed}


@dataclass(frozen=True)
class LaterCalls:
    """Iterates over later calls. State that a call has changed is overwritten before the next call.

    Attributes:
        captured: the graph that the last calls are compared with. Without one, they are compared with forward itself.
        back: restores Python state outside of the copies; no copy made before may be run after it.
    """

    observed: Observation
    captured: Capture | None
    back: Callable[[], None]

    def __iter__(self) -> Iterator[LaterCall]:
        # The first calls change sizes and values together; in eval mode, parameters change only for the last calls.
        training = self.observed.module.training
        firsts = list(self._first_calls(training))
        last_call, expected = self._last_call()
        member = self._warmed()
        start = current_state = self._state(member)
        for call, outcome, state in firsts:
            spoil_changed(member, current_state, state, math.nan, _same_kind)
            warmed = self._run(member, call, training)
            before, current_state = current_state, self._state(member)
            yield LaterCall(outcome, warmed, before, current_state, state)
        # Integers are kept: one may be the smallest size so far, which another number would hide.
        spoil_changed(member, start, current_state, math.inf, lambda first, _: first[0] not in (int, bool))
        warmed = self._run(member, last_call, True, self.captured is not None)
        end = self._state(member)
        yield LaterCall(expected, warmed, current_state, end, None)
        if any(first[0] in NUMBERS for parts in left_between(start, current_state, end).values() for first, _ in parts):
            for number in (math.inf, -math.inf, 0.0):
                spoil_changed(member, start, end, number, lambda first, _: True)
                warmed = self._run(member, last_call, True, self.captured is not None)
                yield LaterCall(expected, warmed, end, end, None)

    def _first_calls(self, training: bool) -> Iterator[tuple[Any, Outcome, dict[str, Any]]]:
        """Yield calls with other sizes and values, each with the outcome and the state of a fresh copy."""
        for group in _shorter_calls(self.observed.module, *self.observed.call):
            accepted = False
            for call in group:
                member = self._fresh(training)
                try:
                    outcome = run(member, *call)
                except Exception:
                    # Forward takes no such inputs: nothing to compare.
                    continue
                accepted = True
                yield call, outcome, self._state(member)
            if accepted:
                return

    def _last_call(self) -> tuple[Any, Outcome]:
        call = _moved(*self.observed.call)
        if self.captured is not None:
            changed = twin(self.observed.module)
            change_parameters(changed)
            return call, tensors_of(run_graph(self.captured, changed, *call))
        try:
            return call, run(self._fresh(True), *call)
        except Exception:
            return self.observed.call, run(self._fresh(True), *self.observed.call)

    def _fresh(self, changed: bool) -> nn.Module:
        """Return a copy that was not called, with changed parameters if ``changed``."""
        self.back()
        member = twin(self.observed.module)
        if changed:
            change_parameters(member)
        return member

    def _warmed(self) -> nn.Module:
        """Return a copy that was called once."""
        if self.captured is not None and not self.observed.variables:
            return self.observed.called
        member = self._fresh(False)
        run(member, *self.observed.call)
        return member

    def _state(self, member: nn.Module) -> dict[str, Any]:
        return contents(member) | variable_contents(member, self.observed.variables)

    def _run(self, member: nn.Module, call: Any, changed: bool, without_gradients: bool = False) -> Outcome | Exception:
        """Reset the tensors of ``member``, change its parameters if ``changed``, and call it."""
        reset(member, self.observed.module)
        if changed:
            change_parameters(member)
        try:
            return tensors_of(run_without_gradients(member, *call)) if without_gradients else run(member, *call)
        except Exception as error:
            return error


def _same_kind(first: Any, second: Any) -> bool:
    """Return whether two contents are tensors of one shape and dtype, or floating-point numbers."""
    return bool(first[0] == second[0] in (float, complex) or (first[0] == "tensor" and first[:3] == second[:3]))


def _moved(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the call with other values: samples in another order, floating-point numbers a little smaller."""

    def perturbed(x: Tensor) -> Tensor:
        dims = [dim for dim, size in enumerate(x.shape) if size > 1]
        rolled = x.detach().roll(1, dims[0]) if dims else x.detach()
        return (rolled * 0.75 if x.is_floating_point() else rolled).requires_grad_(x.requires_grad)

    return pytree.tree_map_only(Tensor, perturbed, copies((args, dict(kwargs))))


def _shorter_calls(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    """Yield groups of calls to try in order, until forward accepts a call of a group.

    The first group halves all first dims and all sizes that no parameter has; the second halves one such size per call.
    The last two keep the sizes: first with other values, then with the original ones.
    """
    call = _moved(args, kwargs)
    features = {size for parameter in module.parameters() for size in parameter.shape}
    shapes = [leaf.shape for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
    sizes = {size for shape in shapes for k, size in enumerate(shape) if size > 1 and (k == 0 or size not in features)}
    if sizes:
        yield [_halved(call, features, sizes)]
    if len(sizes) > 1:
        yield [_halved(call, features, {size}) for size in sorted(sizes)[:MAX_SIZES]]
    yield [call]
    yield [(args, kwargs)]


def _halved(call: Any, features: Set[int], sizes: Set[int]) -> Any:
    """Return the call with dims of ``sizes`` halved; sizes in ``features`` are halved only in the first dim."""

    def halved(x: Tensor) -> Tensor:
        y = x.detach()
        for dim, size in enumerate(x.shape):
            y = y.narrow(dim, 0, (size + 1) // 2) if size in sizes and (dim == 0 or size not in features) else y
        return y.clone().requires_grad_(x.requires_grad)

    return pytree.tree_map_only(Tensor, halved, call)


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
