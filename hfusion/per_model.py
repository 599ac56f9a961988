"""Losses and other functions of tensors, per member."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.compile import Arguments, Compiled, Compiler, Subject
from hfusion.errors import FusionError
from hfusion.inputs import StackedInput, is_stacked, stacked
from hfusion.program import Kind


class _Function(nn.Module):
    """A function as a module, so that it can be captured; a module given as the function is its submodule."""

    def __init__(self, function: Callable[..., Any]) -> None:
        super().__init__()
        self.function = function

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.function(*args, **kwargs)


class PerModel:
    """What `per_model` gives; see there."""

    def __init__(self, function: Callable[..., Any]) -> None:
        self._module = _Function(function)
        self._name = getattr(function, "__name__", type(function).__name__)
        self._compilers: dict[int, Compiler] = {}
        self._programs: dict[Any, Callable[[list[Any]], Any]] = {}

    def __repr__(self) -> str:
        return f"per_model({self._name})"

    def __call__(self, outputs: Any, *args: Any, **kwargs: Any) -> Any:
        arguments = Arguments.of((_all_stacked(outputs), *args), kwargs)
        key = (self._module.training, arguments.key)
        program = self._programs.get(key)
        if program is None:
            program = self._programs[key] = self._prepare(arguments)
        return program(arguments.values)

    def _prepare(self, arguments: Arguments) -> Callable[[list[Any]], Any]:
        members = _members(arguments)
        compiler = self._compilers.get(members)
        if compiler is None:
            keys = frozenset(self._module.state_dict(keep_vars=True))
            subject = Subject(self._name, members, (0,) * members, keys, lambda _: self._module, loops=False)
            compiler = self._compilers[members] = Compiler(subject)
        training = self._module.training
        try:
            compiled = compiler.find(training, arguments) or compiler.make(training, arguments)
        except FusionError:
            return lambda values: _looped(self._module, arguments, members)
        return self._bind(compiled)

    def _bind(self, compiled: Compiled) -> Callable[[list[Any]], Any]:
        program = compiled.program
        held = dict(self._module.state_dict(keep_vars=True)) | compiled.constants
        own = [held[slot.name] for slot in program.slots if slot.kind is not Kind.INPUT]
        run, spec = program.run, program.out_spec
        single = spec.is_leaf()

        def call(inputs: list[Any]) -> Any:
            outputs = run(*own, *inputs)
            return outputs[0] if single else pytree.tree_unflatten(outputs, spec)

        return call


def per_model(function: Callable[..., Any]) -> PerModel:
    """``function`` applied to each member by itself.

    Args:
        function: any functional loss, loss module or function of tensors, such as ``F.cross_entropy``.

    Returns:
        A callable. Its first argument is what a fused module gave: a tensor ``[B, *S]`` or a nest of such. Further
        arguments are seen by every member unless wrapped in `hfusion.stacked`. The result is that of ``function`` with
        a leading dim of B: a mean loss gives ``[B]``.

    Example:
        >>> import torch, torch.nn.functional as F
        >>> losses = per_model(F.mse_loss)(torch.zeros(3, 4), torch.ones(4))
        >>> losses
        tensor([1., 1., 1.])
    """
    return PerModel(function)


def _all_stacked(outputs: Any) -> Any:
    if isinstance(outputs, Tensor):
        return StackedInput(outputs)
    return pytree.tree_map(lambda x: stacked(x) if isinstance(x, Tensor) else x, outputs, is_leaf=is_stacked)


def _members(arguments: Arguments) -> int:
    sizes = [leaf.tensor.shape[0] for leaf in arguments.leaves if isinstance(leaf, StackedInput)]
    if not sizes:
        raise ValueError("per_model's first argument holds no tensor; give it the output [B, ...] of a fused module")
    return int(sizes[0])


def _looped(function: nn.Module, arguments: Arguments, members: int) -> Any:
    """The function, called member by member."""
    rows = []
    for member in range(members):
        args, kwargs = arguments.of_member(member)
        rows.append(pytree.tree_flatten(function(*args, **kwargs)))
    leaves = [
        torch.stack(parts) if isinstance(parts[0], Tensor) else parts[0]
        for parts in zip(*(flat for flat, _ in rows), strict=True)
    ]
    return pytree.tree_unflatten(leaves, rows[0][1])
