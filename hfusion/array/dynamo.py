"""The fused module under torch.compile: its program is looked up while Dynamo traces, and traced in its place.

Dynamo cannot trace capture or the choice of a program, but it calls a function that is marked as constant with the
real tensors. The values that determine the choice, the training pattern and the sizes, are passed as constants, on
which Dynamo guards; so every batch size gets a trace of its own.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Mapping
from functools import reduce
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from hfusion.compiler.arguments import Arguments
from hfusion.compiler.compiled_program import Compiled
from hfusion.core.calls import StackedInput
from hfusion.core.program import Kind
from hfusion.torch_private.dynamo_state import outside_trace

Find = Callable[[Arguments], Compiled]


class Inlined(nn.Module):
    """A program for Dynamo: a module whose submodules it follows.

    ``paths``: the attributes of the fused module that lead to the program's tensors, empty for ``constants``.
    """

    def __init__(self, compiled: Compiled) -> None:
        super().__init__()
        program = compiled.program
        slots = [slot for slot in program.slots if slot.kind is not Kind.INPUT]
        self.code = program.code
        self.paths = tuple(() if s.kind is Kind.CONSTANT else tuple(s.name.split(".")) for s in slots)
        self.constants = tuple(compiled.constants[s.name] for s in slots if s.kind is Kind.CONSTANT)
        self.spec = program.out_spec
        self.single = program.out_spec.is_leaf()

    def forward(self, owner: nn.Module, inputs: list[Any]) -> Any:
        constants = iter(self.constants)
        tensors = [reduce(_child, path, owner) if path else next(constants) for path in self.paths]
        outputs = self.code(*tensors, *inputs)
        return outputs[0] if self.single else pytree.tree_unflatten(list(outputs), self.spec)


def _child(module: Any, name: str) -> Any:
    for table in (module._parameters, module._buffers):
        if name in table:
            return table[name]
    return module._modules[name]


def finder(owner: nn.Module, find: Find) -> Callable[..., str]:
    """Return a function that Dynamo treats as constant: it returns the name of the program in ``owner``."""
    names: dict[int, str] = {}

    def find_program_name(signature: Any, *args: Any, **kwargs: Any) -> str:
        """Find the program. ``signature``: the positions and names of stacked arguments, then other constants."""
        positions, keys = signature[0], signature[1]
        plain = [StackedInput(value) if k in positions else value for k, value in enumerate(args)]
        named = {key: StackedInput(value) if key in keys else value for key, value in kwargs.items()}
        # Hide the trace: assumptions made during capture must not become its guards.
        with outside_trace():
            compiled = find(Arguments.of(tuple(plain), named))
        if id(compiled) not in names:
            name = names[id(compiled)] = f"_inlined_{len(names)}"
            object.__setattr__(owner, name, Inlined(compiled))
        return names[id(compiled)]

    marked: Callable[..., str] = torch.compiler.assume_constant_result(find_program_name)
    return marked


def inline(
    owner: nn.Module, find_name: Callable[..., str], pattern: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]
) -> Any:
    """Return the result of a call of ``owner`` in a form that Dynamo traces."""
    positions = tuple([k for k, value in enumerate(args) if isinstance(value, StackedInput)])
    keys = tuple([key for key, value in kwargs.items() if isinstance(value, StackedInput)])
    plain = [_tensor(value) for value in args]
    named = {key: _tensor(value) for key, value in kwargs.items()}
    sizes = tuple(
        [tuple([operator.index(n) for n in v.shape]) for v in (*plain, *named.values()) if isinstance(v, Tensor)]
    )
    program = getattr(owner, find_name((positions, keys, pattern, sizes), *plain, **named))
    leaves, _ = pytree.tree_flatten((tuple(plain), named))
    return program(owner, leaves)


def _tensor(value: Any) -> Any:
    return value.tensor if isinstance(value, StackedInput) else value
