"""Parts of a program: run one after the other they are the program, wherever it is cut."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.core.errors import PlanError
from hfusion.core.program import Kind, Part, Program
from hfusion.passes.cost.cost import operators
from hfusion.passes.partition.split_program import input_names, split
from tests.trained import Knotted, fused

X = torch.randn(5, 6, dtype=torch.float64, generator=torch.Generator().manual_seed(2))


@cache
def knotted() -> hf.FusedModule:
    torch.manual_seed(0)
    return fused(Knotted)


def program_of(array: hf.FusedModule, x: Tensor) -> Program:
    array(x)
    (part,) = array.report().parts
    return part.program


def run(array: hf.FusedModule, program: Program, parts: tuple[Part, ...], *inputs: Any) -> Any:
    """The flat outputs of the program, part by part; a part sees what it says it takes."""
    state = {name: tensor.clone() for name, tensor in array.state_dict().items()}
    values = dict(zip(input_names(program), inputs, strict=True))
    torch.manual_seed(4)
    for part in parts:
        outputs = part.on(torch.device("cpu"))(
            *(state[slot.name] for slot in part.keys), *(values[name] for name in part.takes)
        )
        values |= dict(zip(part.gives, outputs, strict=False))
    return outputs, state


@pytest.mark.parametrize("count", [1, 2, 3, 5, 99])
def test_the_parts_are_the_program(count: int) -> None:
    array = knotted()
    before = {name: tensor.clone() for name, tensor in array.state_dict().items()}
    program = program_of(array, X)
    array.load_state_dict(before)
    total = len(operators(program))
    ends = sorted({max(1, total * index // count) for index in range(1, count + 1)})
    parts = split(program, ends)
    torch.manual_seed(4)
    (expected,), after = (array(X),), {name: tensor.clone() for name, tensor in array.state_dict().items()}
    array.load_state_dict(before)
    (output,), state = run(array, program, parts, X)
    assert torch.equal(output, expected)
    for name, tensor in state.items():
        assert torch.equal(tensor, after[name]), name
    assert parts[-1].gives == ()
    _check_values(program, parts)


def _check_values(program: Program, parts: tuple[Part, ...]) -> None:
    """No weight crosses a cut; what a part gives is taken later; what it takes is given before."""
    state_names = {slot.name for slot in program.slots if slot.kind is not Kind.INPUT}
    assert {slot.name for part in parts for slot in part.keys} <= state_names
    available = set(input_names(program))
    for index, part in enumerate(parts):
        assert set(part.takes) <= available
        later = {name for after in parts[index + 1 :] for name in after.takes}
        assert set(part.gives) <= later
        assert not set(part.gives) & available
        available |= set(part.gives)
    buffers = {slot.name for slot in program.slots if slot.kind is Kind.BUFFER}
    written = set().union(*(part.writes for part in parts))
    assert written == {name for name in buffers if name.startswith("norm.")}


class Viewed(nn.Module):
    """Two uses of a view of a view of a weight."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.randn(6, 4, dtype=torch.float64))

    def forward(self, x: Tensor) -> Tensor:
        first, second = self.weight.view(2, 3, 4).transpose(1, 2).unbind(0)
        return torch.cat([x[:, :4] @ first, x[:, :4].sin() @ second, x[:, 4:]], 1)


def test_views_of_weights_are_recomputed_in_each_part() -> None:
    array = hf.fuse([Viewed(), Viewed()])
    expected = array(X)
    program = program_of(array, X)
    total = len(operators(program))
    for cut_index in range(1, total):
        parts = split(program, [cut_index, total])
        (output,), _ = run(array, program, parts, X)
        assert torch.equal(output, expected)
        for name in parts[0].gives:
            assert name not in {"view", "transpose", "unbind"}
        for part in parts:
            assert {slot.name for slot in part.keys} <= {"weight"}


@pytest.mark.parametrize("missing", [-1, 1])
def test_shards_of_another_program(missing: int) -> None:
    program = program_of(knotted(), X)
    total = len(operators(program))
    with pytest.raises(
        PlanError, match=f"has {total} operators, but the shards given are of one with {total + missing}"
    ):
        split(program, [3, total + missing])
