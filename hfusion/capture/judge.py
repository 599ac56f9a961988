"""Distinguish caches that forward keeps in attributes from state, by later calls of a copy that was called once.

A graph computes everything in every call. It is exact if no call of a member depends on the calls before it: on their
values, their sizes, the parameters at that time, or on the results that they left.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.capture.attribute_values import NUMBERS, contents, differing, follows, variable_contents
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
from hfusion.capture.named import REMEDY
from hfusion.capture.observe import Observation
from hfusion.capture.python_state import restored
from hfusion.core.copies import copies
from hfusion.core.errors import FusionError
from hfusion.core.program import Capture

# Sizes of the inputs that are tried shortened.
MAX_SIZES = 4


class StateError(FusionError):
    """Forward keeps state in Python attributes, of which an array has none."""


def judge(observed: Observation, captured: Capture | None = None) -> str:
    """Return why a graph would lose what forward does; empty if it loses nothing. Warns of results in attributes.

    Args:
        captured: the graph, if there is one: its results are compared with those of a later call.

    Raises:
        StateError: forward keeps state in attributes.
    """
    with restored(observed.module) as back:
        if not observed.attributes and not observed.variables:
            return _asks_for_gradients(observed) if captured is not None else ""
        try:
            if captured is not None:
                _warn(observed.module, _LaterCalls(observed, captured, back).results())
                return ""
        except Exception:
            # A later call differs, or the graph does by rounding: the code itself shows which.
            pass
        try:
            _warn(observed.module, _LaterCalls(observed, None, back).results())
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
        # Such as torch.autograd.grad in forward: alone, it cannot be called so.
        return ""
    unlike = difference(_tensors_of(without), _tensors_of(observed.outcome), ALIKE)
    if unlike is None:
        return ""
    return (
        f"in forward {unlike} differs while gradients are off (torch.no_grad), and a graph knows one of them only; "
        "ask self.training instead"
    )


def _tensors_of(outcome: Outcome) -> Outcome:
    """Return the tensors that forward returns and leaves in the module, without gradients."""
    outputs = tuple(output for output in outcome.outputs if isinstance(output, Tensor))
    return Outcome(outputs, {name: value for name, value in outcome.values.items() if name.endswith(" afterwards")})


@dataclass(frozen=True)
class _LaterCalls:
    """Compares later calls of the observed copy with first calls, and the last of them with the graph.

    Attributes:
        captured: the graph. Without one, forward itself is run once more, and tried with further spoiled results.
        back: restores Python state outside of the copies; no copy made before may be run after it.
    """

    observed: Observation
    captured: Capture | None
    back: Callable[[], None]

    def results(self) -> list[str]:
        """The attributes in which forward leaves results. Raises FusionError if a later call differs."""
        # Other values as well, so that one run asks several questions; in eval mode parameters change at the end only.
        training = self.observed.module.training
        firsts = list(self._first_calls(training))
        last_call, expected = self._last_call()
        member = self._warmed()
        start = now = self._state(member)
        for call, outcome, state in firsts:
            spoil_changed(member, now, state, math.nan, _same_kind)
            self._compare(outcome, self._run(member, call, training), "another call")
            before, now = now, self._state(member)
            for name in now:
                if not follows(before.get(name), now[name], state.get(name)):
                    raise FusionError(
                        f"forward changes the Python attribute {name} at every call (a counter, a list that grows, its "
                        f"own random numbers?), of which a fused array has none; {REMEDY}"
                    )
        # An integer may be the smallest size so far, which another would hide.
        spoil_changed(member, start, now, math.inf, lambda first, _: first[0] not in ("int", "bool"))
        self._compare(expected, self._run(member, last_call, True, self.captured is not None), "the next call")
        end = self._state(member)
        left = {
            name: list(differing(start.get(name), end[name]))
            for name in end
            if any(differing(start.get(name), now.get(name)))
        }
        if any(first[0] in NUMBERS for parts in left.values() for first, _ in parts):
            for number in (math.inf, -math.inf, 0.0):
                spoil_changed(member, start, end, number, lambda first, _: True)
                self._compare(expected, self._run(member, last_call, True, self.captured is not None), "the next call")
        names = sorted(name for name, parts in left.items() if parts)
        for name in set(names) & set(self.observed.variables):
            raise FusionError(f"forward leaves results in {name}, which other code may read; {REMEDY}")
        return names

    def _first_calls(self, training: bool) -> Iterator[tuple[Any, Outcome, dict[str, Any]]]:
        """Yield calls with other sizes and values, with the outcomes and the state after first calls."""
        for group in _shorter_calls(self.observed.module, *self.observed.call):
            taken = False
            for call in group:
                member = self._fresh(training)
                try:
                    outcome = run(member, *call)
                except Exception:
                    # Forward takes no such inputs: nothing to compare.
                    continue
                taken = True
                yield call, outcome, self._state(member)
            if taken:
                return

    def _last_call(self) -> tuple[Any, Outcome]:
        call = _moved(*self.observed.call)
        if self.captured is not None:
            changed = twin(self.observed.module)
            change_parameters(changed)
            return call, _tensors_of(run_graph(self.captured, changed, *call))
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

    def _run(self, member: nn.Module, call: Any, changed: bool, without_gradients: bool = False) -> Outcome:
        """Call ``member`` with the tensors that it had at first, and changed parameters if ``changed``."""
        reset(member, self.observed.module)
        if changed:
            change_parameters(member)
        try:
            return _tensors_of(run_without_gradients(member, *call)) if without_gradients else run(member, *call)
        except Exception as error:
            raise FusionError(
                f"forward keeps values in the Python attribute {self._names}, with which a later call fails "
                f"({type(error).__name__}: {error}); a fused array has no such state: {REMEDY}"
            ) from error

    def _compare(self, fresh: Outcome, warmed: Outcome, when: str) -> None:
        if warmed.failed and not fresh.failed and not self.observed.module.training:
            # What was kept has a graph that is gone: such a member cannot be trained in this mode, only called.
            fresh, warmed = (Outcome(o.outputs, {}) for o in (fresh, warmed))
        unlike = difference(warmed, fresh, EQUAL)
        if unlike is not None:
            failure = f" ({warmed.failed})" if warmed.failed else ""
            raise FusionError(
                f"forward keeps values in the Python attribute {self._names}, with which {unlike} differs in {when} "
                f"from what a fresh model gives{failure}; a fused array has no such state: {REMEDY}"
            )

    @property
    def _names(self) -> str:
        return ", ".join((*self.observed.attributes, *self.observed.variables))


def _same_kind(first: Any, second: Any) -> bool:
    """Return whether two contents are tensors of one shape and dtype, or floating-point numbers."""
    return bool(first[0] == second[0] == "number" or (first[0] == "tensor" and first[:3] == second[:3]))


def _warn(module: nn.Module, names: list[str]) -> None:
    if names:
        warnings.warn(
            f"forward of {type(module).__name__} leaves results in the attribute {', '.join(names)}, which a fused "
            "array does not: return from forward what is read outside of it",
            stacklevel=3,
        )


def _moved(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """The call with other values: samples in another order, numbers a little smaller."""

    def other(x: Tensor) -> Tensor:
        dims = [dim for dim, size in enumerate(x.shape) if size > 1]
        rolled = x.detach().roll(1, dims[0]) if dims else x.detach()
        return (rolled * 0.75 if x.is_floating_point() else rolled).requires_grad_(x.requires_grad)

    return pytree.tree_map_only(Tensor, other, copies((args, dict(kwargs))))


def _shorter_calls(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Iterator[Sequence[Any]]:
    """Yield groups of calls with other values. If forward takes none of a group, the next one is to be tried.

    The first has half of each size that is none of a parameter, and of first dims; the second half of one size each.
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
    """The call with half of the dims of ``sizes``; of ``features`` only those that come first."""

    def halved(x: Tensor) -> Tensor:
        y = x.detach()
        for dim, size in enumerate(x.shape):
            y = y.narrow(dim, 0, (size + 1) // 2) if size in sizes and (dim == 0 or size not in features) else y
        return y.clone().requires_grad_(x.requires_grad)

    return pytree.tree_map_only(Tensor, halved, call)
