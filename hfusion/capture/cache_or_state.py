"""Distinguish caches that forward keeps in attributes from state, by running copies of the member.

Cached values are no state if a member that has them computes the same as one without them: for the same inputs, for
others, for other sizes, and after the parameters have changed. Then a graph that computes them again is exact.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.capture.attribute_values import contents
from hfusion.capture.eager_runs import (
    ALIKE,
    EQUAL,
    MAX_SIZES,
    Outcome,
    change_parameters,
    changed_modes,
    difference,
    other_calls,
    reset,
    run,
    run_without_gradients,
    shortener,
    spoil,
    spoiled,
    twin,
)
from hfusion.capture.named import REMEDY, Registered, check_registered, tensors
from hfusion.capture.python_state import restored, variables
from hfusion.core.copies import copies
from hfusion.core.errors import FusionError


@dataclass(frozen=True)
class Rehearsal:
    """The result of a trial run; ``lost`` describes effects that a graph would lose, such as state in global variables.

    ``modes``: the submodules, by path, whose mode it changed, with the new one: train (True) or eval.
    """

    outcome: Outcome
    modes: Mapping[str, bool]
    lost: str = ""


def rehearse(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Rehearsal:
    """Run a copy of ``module``; warns of results that forward leaves in attributes.

    Raises:
        FusionError: forward keeps state of a member where an array has none: in Python attributes, in parameters, in
            tensors that it registers.
    """
    with restored(module) as back:
        subject = _Rehearsed(module, args, kwargs, back)
        first = subject.member()
        before, around, registered = contents(first), variables(first), Registered.of(first)
        outcome = run(first, args, kwargs)
        modes = changed_modes(module, first)
        _check_gradients(module, first)
        check_registered(module, registered, first)
        _check_flags(subject, first, outcome)
        changed = _changed(before, contents(first))
        varied = _changed(around, variables(first))
        if changed and not varied and (results := _results_left(subject, first, changed, outcome)) is not None:
            _warn(module, results)
            return Rehearsal(outcome, modes)
        if changed:
            _warn(module, _judge(subject, changed, outcome))
        elif varied:
            try:
                _judge(subject, varied, outcome)
            except FusionError as error:
                return Rehearsal(outcome, modes, str(error))
        return Rehearsal(outcome, modes, _asks_for_gradients(subject, outcome))


@dataclass(frozen=True)
class _Rehearsed:
    """A member before the call, and the call. ``back`` restores Python state outside of the members."""

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    back: Callable[[], None]

    def member(self) -> nn.Module:
        """Return a copy that was not called. Copies returned earlier must not be used any more."""
        self.back()
        return twin(self.module)

    def warmed(self, call: Any = None) -> nn.Module:
        """Return a member that was called once, with the tensors that it had before the call."""
        member = self.member()
        args, kwargs = call or (self.args, self.kwargs)
        run(member, args, kwargs)
        reset(member, self.module)
        return member


def _check_flags(subject: _Rehearsed, called: nn.Module, outcome: Outcome) -> None:
    """Raise a FusionError if forward makes a buffer require a gradient and depends on that flag in its next call."""
    before = dict(tensors(subject.module))
    flagged = [name for name, t in tensors(called) if t.is_leaf and t.requires_grad and not before[name].requires_grad]
    if flagged:
        call = (subject.args, subject.kwargs)
        again = _run_kept(subject.warmed(), call, f"{flagged[0]}.requires_grad")
        _compare(subject, f"{flagged[0]}.requires_grad", "the next call", outcome, again)


def _check_gradients(module: nn.Module, called: nn.Module) -> None:
    """Raise a FusionError if forward accumulates gradients of its own parameters."""
    before = dict(module.named_parameters())
    for name, parameter in called.named_parameters():
        if parameter.grad is not None and (name not in before or before[name].grad is None):
            raise FusionError(
                f"forward leaves a gradient in {name}.grad, as backward() does, where the array has its own; compute "
                "it by torch.autograd.grad"
            )


def _asks_for_gradients(subject: _Rehearsed, outcome: Outcome) -> str:
    """Describe the difference in forward's results while gradients are off; empty if there is none.

    Forward may read torch.is_grad_enabled() or requires_grad of its values, and a graph holds only one answer.
    """
    try:
        without = run_without_gradients(subject.member(), subject.args, subject.kwargs)
    except Exception:
        # Such as torch.autograd.grad in forward: alone, it cannot be called so.
        return ""
    unlike = difference(_tensors_of(without), _tensors_of(outcome), ALIKE)
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


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [name for name in {**after, **before} if after.get(name) != before.get(name)]


def _results_left(subject: _Rehearsed, called: nn.Module, changed: list[str], outcome: Outcome) -> list[str] | None:
    """Answer as `_judge` does, by few runs that each ask several questions; None where one of them shows a difference.

    Args:
        called: the member that gave ``outcome``.
        changed: the attributes that it changed.
    """
    call, training = (subject.args, subject.kwargs), subject.module.training
    _, other = next(other_calls(*call))
    cached = contents(called)
    try:
        fresh = subject.member()
        if training:
            change_parameters(fresh)
        expected = run(fresh, *other)
        after = contents(fresh)
        results = sorted(set(_changed(cached, after)) & set(changed))
        reset(called, subject.module)
        # Either all are overwritten before they are read, or all are values that do not depend on the call.
        if (
            results not in ([], sorted(changed))
            or not (training or results)
            or not _spoil_tensors(called, results, math.nan)
        ):
            return None
        if training:
            change_parameters(called)
        # A second call here, and the first there: what counts calls differs.
        unlike = difference(run(called, *other), expected, EQUAL)
        if unlike is not None or _changed(contents(called), after):
            return None
        if not results and (shorter := _shorter(subject)) is not None:
            fresh = subject.member()
            reset(called, subject.module)
            if difference(run(called, *shorter), run(fresh, *shorter), EQUAL) is not None:
                return None
        reset(fresh, subject.module)
        _spoil_tensors(fresh, results, math.inf, halved=True)
        again = run_without_gradients(fresh, *call)
        return results if difference(_tensors_of(again), _tensors_of(outcome), EQUAL) is None else None
    except Exception:
        # Runs that ask one question each say what is wrong.
        return None


def _spoil_tensors(member: nn.Module, names: list[str], value: float, halved: bool = False) -> bool:
    """Overwrite the tensors in attributes ``names``; False where one holds something else.

    ``halved``: and drop half of their first dim.
    """
    for name in names:
        path, _, attribute = name.rpartition(".")
        attributes = vars(member.get_submodule(path))
        tensor = attributes.get(attribute)
        if not isinstance(tensor, Tensor):
            return False
        spoil(tensor, value)
        if halved and tensor.dim():
            attributes[attribute] = tensor.detach()[: (len(tensor) + 1) // 2].clone()
    return True


def _shorter(subject: _Rehearsed) -> Any:
    """The call with half of each size that is none of a parameter; None where there is no such size.

    Raises ValueError where a size that may vary is one of a parameter as well.
    """
    call = (subject.args, dict(subject.kwargs))
    inputs = [leaf for leaf in pytree.tree_leaves(call) if isinstance(leaf, Tensor)]
    features = {size for parameter in subject.module.parameters() for size in parameter.shape}
    last = {x.shape[-1] for x in inputs if x.dim() > 1 and x.is_floating_point()} & features
    sizes = {size for x in inputs for size in x.shape if size > 1} - last
    if sizes & features or len(sizes) > MAX_SIZES or any(size in last for x in inputs for size in x.shape[:-1]):
        raise ValueError("one size after the other must be tried")
    for size in sizes:
        call = pytree.tree_map_only(Tensor, shortener(size), call)
    return copies(call) if sizes else None


def _judge(subject: _Rehearsed, changed: list[str], outcome: Outcome) -> list[str]:
    """The attributes in which forward leaves results for a reader. Raises FusionError for state."""
    names = ", ".join(changed)
    second = subject.member()
    run(second, subject.args, subject.kwargs)
    reset(second, subject.module)
    cached, outside = contents(second), variables(second)
    again = run(second, subject.args, subject.kwargs)
    further = _changed(cached | outside, contents(second) | variables(second))
    if further:
        raise FusionError(
            f"forward changes the Python attribute {further[0]} at every call (a counter, a list that grows, its own "
            f"random numbers?), of which a fused array has none; {REMEDY}"
        )
    _compare(subject, names, "the same inputs", outcome, again)
    _compare_calls(subject, names, outcome)
    by_parameters = _compare_parameters(subject, names, cached)
    by_inputs = _dependent(subject, cached)
    results = by_inputs | (by_parameters if subject.module.training else set())
    _check_unread(subject, sorted(results), outcome)
    return sorted(results)


def _compare(subject: _Rehearsed, names: str, when: str, fresh: Outcome, warmed: Outcome) -> None:
    if warmed.failed and not fresh.failed and not subject.module.training:
        # What was kept has a graph that is gone: such a member cannot be trained in this mode, only called.
        fresh, warmed = (Outcome(o.outputs, {}) for o in (fresh, warmed))
    unlike = difference(warmed, fresh, EQUAL)
    if unlike is not None:
        raise FusionError(
            f"forward keeps values in the Python attribute {names}, with which {unlike} differs for {when} from what a "
            f"fresh model gives{_failure(warmed)}; a fused array has no such state: {REMEDY}"
        )


def _failure(outcome: Outcome) -> str:
    return f" ({outcome.failed})" if outcome.failed else ""


def _compare_calls(subject: _Rehearsed, names: str, outcome: Outcome) -> None:
    """Other values, and other sizes where forward takes them, before and after the call."""
    for when, call in other_calls(subject.args, subject.kwargs):
        try:
            fresh = run(subject.member(), *call)
        except Exception:
            # Forward takes no such inputs: nothing to compare.
            continue
        _compare(subject, names, when, fresh, _run_kept(subject.warmed(), call, names))
        original = (subject.args, subject.kwargs)
        _compare(
            subject, names, f"these inputs after {when}", outcome, _run_kept(subject.warmed(call), original, names)
        )


def _run_kept(member: nn.Module, call: Any, names: str) -> Outcome:
    try:
        return run(member, *call)
    except Exception as error:
        raise FusionError(
            f"forward keeps values in the Python attribute {names}, with which a later call fails "
            f"({type(error).__name__}: {error}); a fused array has no such state: {REMEDY}"
        ) from error


def _compare_parameters(subject: _Rehearsed, names: str, cached: Mapping[str, Any]) -> set[str]:
    """Check that cached values follow changed parameters; return the attributes that depend on parameters."""
    fresh = subject.member()
    change_parameters(fresh)
    theirs = run(fresh, subject.args, subject.kwargs)
    depend = set(_changed(cached, contents(fresh)))
    warmed = subject.warmed()
    change_parameters(warmed)
    ours = _run_kept(warmed, (subject.args, subject.kwargs), names)
    _compare(subject, names, "changed parameters", theirs, ours)
    return depend


def _dependent(subject: _Rehearsed, cached: Mapping[str, Any]) -> set[str]:
    """The attributes whose content depends on the values of the inputs."""
    _, call = next(other_calls(subject.args, subject.kwargs))
    member = subject.member()
    run(member, *call)
    return set(_changed(cached, contents(member)))


def _check_unread(subject: _Rehearsed, names: list[str], outcome: Outcome) -> None:
    """Raise if forward reads results of an earlier call in attributes before it overwrites them."""
    if not names:
        return
    for value in (float("nan"), float("inf"), float("-inf"), 0.0):
        member = subject.warmed()
        for name in names:
            path, _, attribute = name.rpartition(".")
            held = vars(member.get_submodule(path))
            held[attribute] = spoiled(held[attribute], value)
        reset(member, subject.module)
        original = (subject.args, subject.kwargs)
        _compare(subject, ", ".join(names), "the next call", outcome, _run_kept(member, original, names[0]))


def _warn(module: nn.Module, names: list[str]) -> None:
    if names:
        warnings.warn(
            f"forward of {type(module).__name__} leaves results in the attribute {', '.join(names)}, which a fused "
            "array does not: return from forward what is read outside of it",
            stacklevel=3,
        )
