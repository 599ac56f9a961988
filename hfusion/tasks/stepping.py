"""Train the minibatches of a task by compiled steps of `hfusion.train_step`."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.utils import _pytree as pytree

from hfusion.compiler.arguments import Arguments
from hfusion.core.calls import is_stacked
from hfusion.runtime.recipe import Batch
from hfusion.step.step_graph import StepCall
from hfusion.step.step_signatures import CallReport
from hfusion.step.train_step import PreparedStep, train_step
from hfusion.tasks.arrange import Arrangement
from hfusion.tasks.minibatch import Minibatch, moved


class ArrayStep:
    """The compiled steps of one array. The caller does the optimizer updates."""

    def __init__(self, arrangement: Arrangement, name: str) -> None:
        self._name = name
        task = arrangement.task
        # Whether compiling pays was decided before, see `hfusion.tasks.compile_choice`.
        compile = True if task.compile is None else task.compile
        self._step = train_step(arrangement.array, task.loss, arrangement.optimizer, compile=compile, parts=task.parts)
        self._is_compile_set = task.compile is not None
        self._step.tell = self._tell
        # The kinds of calls, for any number of samples, that were compiled in the run that this one resumes.
        self._resumed_calls: set[str] = set()

    def _tell(self, call: str, why: str) -> None:
        if not self._is_compile_set:
            # No warning is needed: the report gives the reason.
            return
        warnings.warn(eagerly(self._name, f"with ({call}), {why}"), stacklevel=2)

    def prepare(self, batch: Batch, device: torch.device) -> PreparedStep:
        """See `hfusion.runtime.recipe.WholeStep`."""
        inputs, target = _on(batch.call, device)
        if self._resumed_calls:
            # The program of a kind serves minibatches with another number of samples, too.
            text = StepCall(batch.call.arguments, Arguments.of((target,), {})).text
            if any_samples(text) in self._resumed_calls:
                self._step.expected_calls.add(text)
        return self._step.prepare(inputs, target)

    def run(self, prepared: PreparedStep, update: Callable[[], object]) -> Tensor:
        """See `hfusion.runtime.recipe.WholeStep`."""
        # Run it through the step, which may use threads of its own.
        self._step.update = lambda losses: update()
        return self._step.run(prepared)

    @property
    def known_calls(self) -> list[str]:
        """See `hfusion.runtime.recipe.WholeStep`."""
        return sorted({*map(any_samples, self._step.known_calls), *self._resumed_calls})

    def expect(self, calls: Sequence[str]) -> None:
        """See `hfusion.runtime.recipe.WholeStep`."""
        self._resumed_calls = set(calls)

    def mark_idle(self, rows: frozenset[int]) -> None:
        """See `hfusion.runtime.recipe.WholeStep`."""
        self._step.idle = rows

    def release(self) -> None:
        """See `hfusion.runtime.recipe.WholeStep`."""
        self._step.release()

    def close(self) -> None:
        """End compilations in other processes."""
        self._step.close()

    @property
    def calls(self) -> tuple[CallReport, ...]:
        """A report for each kind of call."""
        return self._step.report().rows


def eagerly(name: str, why: str) -> str:
    """Return the warning text for a task that was to be compiled, but runs eagerly."""
    return f"task {name!r} runs eagerly, exact but slower: {why}. hf.Task(compile=False) does so without this warning"


def _on(minibatch: Minibatch, device: torch.device) -> tuple[Any, Any]:
    """Return the inputs and target of a minibatch on a device, as `hfusion.train_step` expects them."""
    arguments = minibatch.arguments
    leaves = [moved(leaf, device) for leaf in arguments.leaves]
    target = minibatch.target
    if not isinstance(target, Tensor):
        target = pytree.tree_map(lambda leaf: moved(leaf, device), target, is_leaf=is_stacked)
    else:
        target = moved(target, device)
    if isinstance(arguments.spec, int):
        return tuple(leaves), target
    args, kwargs = pytree.tree_unflatten(leaves, arguments.spec)
    return kwargs or args, target


def any_samples(call: str) -> str:
    """Describe a kind of call for any number of samples; a single sample may have another program.

    >>> any_samples("f32[32,64], stacked i64[3,32]"), any_samples("f32[1,64], f32[]")
    ('f32[*,64], stacked i64[3,*]', 'f32[1,64], f32[]')
    """
    return re.sub(r"(stacked \w+\[\d+,|(?<!stacked )\b\w+\[)(?!1\b)\d+", r"\1*", call)
