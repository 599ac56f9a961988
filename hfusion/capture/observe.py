"""Run a copy of a member once, and record what forward returns, reads and writes."""

from __future__ import annotations

import types
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.capture.attribute_fingerprint import contents, python_attributes
from hfusion.capture.eager_runs import Outcome, changed_modes, run, twin
from hfusion.capture.python_reads import CLASSES, STRIDE_QUESTIONS, UNANSWERABLE, RefusedReads
from hfusion.capture.python_state import check_restorable, restored, variables
from hfusion.capture.reachable_code import CodeSearch, search_of
from hfusion.capture.registered_tensors import Registered, check_registered, tensors
from hfusion.capture.skeleton import is_restrided
from hfusion.capture.variable_guards import Questions
from hfusion.capture.variable_scopes import MISSING
from hfusion.core.errors import FusionError
from hfusion.core.memory import same_values
from hfusion.core.program import describe_value
from hfusion.core.stages import stage


@dataclass(frozen=True)
class Access:
    """Something that forward may read, or that a run has changed.

    Attributes:
        kind: what it is: a Python attribute of a module; a variable of a file, class, closure or object; a setting
            of torch; a registered tensor; or the mode (train or eval) of a submodule.
        name: its name, with the path of the module or the name of the file.
        value: the value before the run, if forward may read it; for a mode, the new mode.
    """

    kind: Literal["attribute", "variable", "setting", "tensor", "mode"]
    name: str
    value: Any = None

    def __str__(self) -> str:
        return f"{self.kind:<9} {self.name}" + ("" if self.value is None else f" = {_described(self.value)}")


@dataclass(frozen=True, eq=False)
class Observation:
    """One eager run of a copy of ``module``.

    Attributes:
        module, args, kwargs: the module before the run, and its arguments.
        outcome: outputs, gradients, and the tensors of the copy afterwards.
        called: the copy after the run.
        modes: the new mode, train (True) or eval, of each submodule whose mode it changed, by path.
        attributes: the Python attributes that it changed, and the flags of buffers that it made require a gradient.
        variables: the variables of classes and files that it changed.
        search: the code that forward may run.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outcome: Outcome
    called: nn.Module
    modes: Mapping[str, bool]
    attributes: tuple[str, ...]
    variables: tuple[str, ...]
    search: CodeSearch

    @property
    def call(self) -> Any:
        """The arguments, positional and by name."""
        return self.args, self.kwargs

    @cached_property
    def reads(self) -> tuple[Access, ...]:
        """The values that forward may read, also on branches that were not taken. A graph has them as constants."""
        names = self.search.all_names
        read = [
            Access("attribute", f"{path}.{name}".strip("."), value)
            for path, part in self.module.named_modules()
            for name, value in python_attributes(part)
            if name in names
        ]
        for holder in self.search.holders:
            held = {f"{holder.title}{name}": holder.read(name) for name in sorted(holder.names)}
            values = {name: value for name, value in held.items() if value is not MISSING}
            read += [Access("variable", name, value) for name, value in values.items() if not isinstance(value, _CODE)]
        questions = Questions.of(names)
        read += [Access("setting", ask.__name__, ask()) for ask in questions.settings]
        flags = {
            "autocast": questions.autocast,
            "requires_grad of tensors": questions.gradients,
            "strides of tensors": questions.strides,
            "state of random numbers": questions.random_state,
        }
        return (*read, *(Access("setting", name) for name, is_asked in flags.items() if is_asked))

    @cached_property
    def writes(self) -> tuple[Access, ...]:
        """The tensors, attributes and variables that the run has changed."""
        after = self.outcome.values
        named = [(n, tensor, after.get(f"{n} afterwards")) for n, tensor in tensors(self.module)]
        changed = [name for name, old, new in named if new is not None and not same_values(old, new)]
        return (
            *(Access("tensor", name) for name in changed),
            *(Access("attribute", name) for name in self.attributes),
            *(Access("variable", name) for name in self.variables),
            *(Access("mode", path, "train" if training else "eval") for path, training in self.modes.items()),
        )

    def __str__(self) -> str:
        inputs = [_described(leaf) for leaf in pytree.tree_leaves((self.args, dict(self.kwargs)))]
        gradients = [
            name.removeprefix("gradient of ") for name in self.outcome.values if name.startswith("gradient of ")
        ]
        sections = {
            "inputs": inputs,
            "reads": self.reads,
            "writes": self.writes,
            "outputs": [_described(output) for output in self.outcome.outputs],
            "gradients": gradients or [self.outcome.failed or "none"],
        }
        lines = [f"one run of {type(self.module).__name__} in {'train' if self.module.training else 'eval'} mode"]
        for title, items in sections.items():
            lines += [title, *(f"  {item}" for item in items or ["nothing"])]
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
        before, around, registered = contents(called), variables(search), Registered.of(called)
        outcome = run(called, args, kwargs, _watch(module, called, (args, kwargs), search.all_names), copy_of=module)
        _check_gradients(module, called)
        check_registered(module, registered, called)
        changed = _changed(around, variables(search))
        check_restorable(search, changed)
        flags = {name: tensor.requires_grad for name, tensor in tensors(module)}
        flagged = [f"{n}.requires_grad" for n, t in tensors(called) if t.is_leaf and t.requires_grad and not flags[n]]
        observed = Observation(
            module,
            args,
            kwargs,
            outcome,
            called,
            changed_modes(module, called),
            (*_changed(before, contents(called)), *flagged),
            tuple(changed),
            search,
        )
    stage(type(module).__name__, "observed", lambda: str(observed), lambda: None)
    return observed


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


# Objects that code refers to by name, but that are not reported as values.
_CODE = (types.ModuleType, types.FunctionType, types.BuiltinFunctionType, type)


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return describe_value(value, None, 0) + (", needs a gradient" if value.requires_grad else "")
    if isinstance(value, str | int | float | complex | None):
        return repr(value)
    if isinstance(value, list | tuple) and len(value) < 5:
        inside = ", ".join(map(_described, value))
        return f"[{inside}]" if isinstance(value, list) else f"({inside})"
    return f"a {type(value).__name__}"
