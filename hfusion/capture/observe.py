"""Run a copy of a member once, and record what forward returns, reads and writes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.capture.attribute_fingerprint import contents, results
from hfusion.capture.eager_runs import (
    ALIKE,
    GRADIENT,
    Outcome,
    changed_modes,
    difference,
    run,
    twin,
)
from hfusion.capture.python_reads import CLASSES, GRADIENT_QUESTIONS, STRIDE_QUESTIONS, UNANSWERABLE, RefusedReads
from hfusion.capture.python_state import CODE, check_restorable, restored, variables
from hfusion.capture.reachable_code import CodeSearch, search_of
from hfusion.capture.registered_tensors import check_registered, shared_memory, tensors
from hfusion.capture.skeleton import is_restrided
from hfusion.core.errors import FusionError, KeepsState
from hfusion.core.memory import same_values
from hfusion.core.program import describe_value
from hfusion.core.python_values import safe_repr
from hfusion.core.stages import stage

# Number of attributes and variables that a message names.
_MOST = 3


@dataclass(frozen=True, eq=False)
class Observation:
    """One eager run of a copy of ``module``.

    Attributes:
        module, args, kwargs: the module before the run, and its arguments.
        outcome: outputs, gradients, and the tensors of the copy afterwards.
        modes: the new mode, train (True) or eval, of each submodule whose mode it changed, by path.
        attributes: the Python attributes that it changed, and the flags of buffers that it made require a gradient, if
            its code may read them.
        variables: the variables of classes and files that it changed.
        search: the code that forward may run.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outcome: Outcome
    modes: Mapping[str, bool]
    attributes: tuple[str, ...]
    variables: tuple[str, ...]
    search: CodeSearch

    def __str__(self) -> str:
        after = self.outcome
        gradients = [name.removeprefix(GRADIENT) for name in after if name.startswith(GRADIENT)]
        written = [n for n, t in tensors(self.module) if not same_values(after.get(f"{n} afterwards", t), t)]
        held = ((f"{holder.title}{name}", holder.read(name)) for holder in self.search.holders for name in holder.names)
        sections = {
            "inputs": map(_described, pytree.tree_leaves((self.args, dict(self.kwargs)))),
            "reads": sorted(name for name, value in held if not isinstance(value, CODE)),
            "writes": (*written, *self.attributes, *self.variables, *(f"{path}.training" for path in self.modes)),
            "outputs": [_described(value) for name, value in after.items() if name.startswith("output ")],
            "gradients": gradients or [after.get("backward", "none")],
        }
        lines = [f"one run of {type(self.module).__name__} in {'train' if self.module.training else 'eval'} mode"]
        for title, entries in sections.items():
            lines += [title, *(f"  {entry}" for entry in list(entries) or ["nothing"])]
        return "\n".join(lines)


def observe(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Observation:
    """Run a copy of ``module`` once. Python state, arguments and random numbers stay as they were.

    Raises:
        FusionError: forward accumulates gradients, changes registered tensors in a way that no stack can follow, or
            reads properties of tensors that differ between an array and a member alone.
    """
    search = search_of([module])
    with restored(module, search):
        called = twin(module)
        before, around, registered = contents(called), variables(search), dict(tensors(called))
        shared = shared_memory(registered)
        outcome = run(called, args, kwargs, _watch(module, called, (args, kwargs), search.all_names), copy_of=module)
        _check_gradients(module, called)
        check_registered(module, registered, shared, called)
        changed = _changed(around, variables(search))
        check_restorable(search, changed)
        flags = {name: tensor.requires_grad for name, tensor in tensors(module)}
        flagged = [f"{n}.requires_grad" for n, t in tensors(called) if t.is_leaf and t.requires_grad and not flags[n]]
        if search.all_names.isdisjoint(GRADIENT_QUESTIONS):
            flagged = []
        attributes = _changed(before, after := contents(called))
        _check_own(attributes, after, contents(module) if attributes else {})
        observed = Observation(
            module,
            args,
            kwargs,
            outcome,
            changed_modes(module, called),
            (*attributes, *flagged),
            tuple(changed),
            search,
        )
    stage(type(module).__name__, "observed", lambda: str(observed), lambda: None)
    return observed


def _check_own(changed: Sequence[str], after: Mapping[str, Any], of_original: Mapping[str, Any]) -> None:
    """Raise FusionError if a copy, and so one member, changes state that the original, and other members, share."""
    for name in changed:
        if name in after and of_original.get(name) == after[name]:
            raise FusionError(
                f"forward changes {name}, which copies of a model share, such as a function or what it is closed over; "
                "keep it in an attribute of the model, or in a registered buffer"
            )


def check_state(observed: Observation) -> None:
    """Raise KeepsState if the run changed Python state: the next call may compute something else than this one.

    The members' own objects fill a cache in their first call, so that a later call, which changes nothing, can be
    captured.
    """
    names = [*observed.attributes, *observed.variables]
    if not names:
        # What a call has left with a history belongs to one batch: a copy of the model has its values at best.
        names = [path for path in results(observed.module) if not observed.search.all_names.isdisjoint(path.split("."))]
    if names:
        shown = ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")
        raise KeepsState(
            f"forward changes Python state in {shown}. A cache is captured once it is filled; return results, and keep "
            "what changes at every call in a registered buffer, to have it fused",
            names,
        )


def gradient_dependence(observed: Observation) -> str:
    """Describe the difference in forward's results while gradients are off; empty if there is none.

    Forward may read torch.is_grad_enabled() or requires_grad of its values, and a graph holds only one answer.
    """
    try:
        without = run(twin(observed.module), observed.args, observed.kwargs, gradients=False)
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


def tensors_of(outcome: Outcome) -> Outcome:
    """Return the tensors that forward returns and leaves in the module, without gradients."""
    return {
        name: value
        for name, value in outcome.items()
        if isinstance(value, Tensor) and (name.startswith("output ") or name.endswith(" afterwards"))
    }


def _watch(
    module: nn.Module, called: nn.Module, arguments: Any, names: frozenset[str]
) -> Callable[[Sequence[Tensor]], AbstractContextManager[Any]]:
    """Return a function that makes a context manager, which refuses reads of properties that differ in an array.

    Args:
        names: the names in forward's code.
    """
    restrided = any(is_restrided(tensor) for _, tensor in tensors(module))
    parameters = [k for k, leaf in enumerate(pytree.tree_leaves(arguments)) if isinstance(leaf, nn.Parameter)]
    if parameters and not names.isdisjoint(CLASSES):
        raise FusionError(
            f"input {parameters[0]} is an nn.Parameter, which members of an array see as a plain tensor, and forward's "
            f"code reads classes ({', '.join(sorted(names & CLASSES))}): give it as a tensor, such as x.view_as(x)"
        )
    if names.isdisjoint(UNANSWERABLE | (STRIDE_QUESTIONS if restrided else frozenset())):
        return nullcontext
    return lambda inputs: RefusedReads(inputs, [tensor for _, tensor in tensors(called)], restrided)


def _check_gradients(module: nn.Module, called: nn.Module) -> None:
    """Raise a FusionError if forward accumulates gradients of its own parameters."""
    before = dict(module.named_parameters())
    for name, parameter in called.named_parameters():
        if parameter.grad is not None and (name not in before or before[name].grad is None):
            raise FusionError(
                f"forward leaves a gradient in {name}.grad, as backward() does, where the array has its own; compute "
                "it by torch.autograd.grad"
            )


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [name for name in {**after, **before} if after.get(name) != before.get(name)]


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return describe_value(value, None, 0) + (", needs a gradient" if value.requires_grad else "")
    return safe_repr(value)
