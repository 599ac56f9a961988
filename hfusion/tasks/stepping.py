"""Steps of tasks by `hfusion.train_step`: which tasks take them, and how each has run."""

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
    """The compiled steps of one array, but for its updates."""

    def __init__(self, one: Arrangement, name: str) -> None:
        self._name = name
        task = one.task
        # That it pays is decided, see `hfusion.tasks.compile_choice`.
        compile = True if task.compile is None else task.compile
        self._step = train_step(one.array, task.loss, one.optimizer, compile=compile, parts=task.parts)
        self._asked = task.compile is not None
        self._step.tell = self._tell
        # What the kinds of calls that were known to the run that is gone on with have in common.
        self._before: set[str] = set()

    def _tell(self, call: str, why: str) -> None:
        if not self._asked:
            # The report says why.
            return
        warnings.warn(eagerly(self._name, f"with ({call}), {why}"), stacklevel=2)

    def prepare(self, batch: Batch, device: torch.device) -> PreparedStep:
        """As `hfusion.runtime.recipe.WholeStep`."""
        inputs, target = _on(batch.call, device)
        if self._before:
            # The program of a kind serves minibatches with another number of samples, too.
            text = StepCall(batch.call.arguments, Arguments.of((target,), {})).text
            if any_samples(text) in self._before:
                self._step.expected_calls.add(text)
        return self._step.prepare(inputs, target)

    def run(self, prepared: PreparedStep, update: Callable[[], object]) -> Tensor:
        """As `hfusion.runtime.recipe.WholeStep`."""
        # By way of the step, whose threads may help.
        self._step.update = lambda losses: update()
        return self._step.run(prepared)

    @property
    def known_calls(self) -> list[str]:
        """As `hfusion.runtime.recipe.WholeStep`."""
        return sorted({*map(any_samples, self._step.known_calls), *self._before})

    def expect(self, calls: Sequence[str]) -> None:
        """As `hfusion.runtime.recipe.WholeStep`."""
        self._before = set(calls)

    def rest(self, rows: frozenset[int]) -> None:
        """As `hfusion.runtime.recipe.WholeStep`."""
        self._step.idle = rows

    def release(self) -> None:
        """As `hfusion.runtime.recipe.WholeStep`."""
        self._step.release()

    def close(self) -> None:
        """No other process compiles any longer."""
        self._step.close()

    @property
    def calls(self) -> tuple[CallReport, ...]:
        """Reports of each kind of call."""
        return self._step.report().rows


def eagerly(name: str, why: str) -> str:
    """The warning that a task runs eagerly that was to be compiled."""
    return f"task {name!r} runs eagerly, exact but slower: {why}. hf.Task(compile=False) does so without this warning"


def _on(minibatch: Minibatch, device: torch.device) -> tuple[Any, Any]:
    """A minibatch on a device, as a step takes it."""
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
