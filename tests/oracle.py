"""The one oracle: fused equals the loop over members, in float64, values and gradients."""

from __future__ import annotations

import itertools
import math
import operator
import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, fx
from torch._ops import OpOverload
from torch._subclasses.fake_tensor import FakeTensorMode

from hfusion.core.layout import CONVERSIONS, Layout
from hfusion.ops import RULES
from hfusion.passes.batch import batch
from hfusion.passes.candidates import candidates, result
from hfusion.passes.check import check_array
from hfusion.passes.layouts import Choice

RELATIVE = 1e-9
MAX_MIXES = 24


@dataclass(frozen=True)
class Draw:
    """A tensor to be drawn: its shape, and from what.

    ``kind`` is normal, positive, unit, bool, sign (1 or -1, without gradient), or integers below ``high``;
    ``grad`` tells whether floats get a gradient.
    """

    shape: tuple[int, ...]
    kind: str = "normal"
    high: int = 0
    grad: bool = True

    def sample(self, generator: torch.Generator) -> Tensor:
        if self.kind == "integers":
            return torch.randint(self.high, self.shape, generator=generator)
        if self.kind == "bool":
            return torch.rand(self.shape, generator=generator) < 0.5
        if self.kind == "sign":
            return torch.randint(2, self.shape, generator=generator).double() * 2 - 1
        x = torch.randn(self.shape, generator=generator, dtype=torch.float64)
        if self.kind == "positive":
            return x.abs() + 0.1
        if self.kind == "unit":
            return torch.rand(self.shape, generator=generator, dtype=torch.float64) * 0.9 + 0.05
        return x


def t(*shape: int, kind: str = "normal", high: int = 0, grad: bool = True) -> Draw:
    return Draw(shape, kind, high, grad and kind != "sign")


@dataclass(frozen=True)
class Case:
    """One operator with one choice of arguments; every `Draw` is an operand that may be shared or per member."""

    target: OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    members: tuple[int, ...] = (1, 2, 5)

    def __str__(self) -> str:
        return f"{self.target}{self.args}{self.kwargs or ''}".replace("Draw", "")


def draws(arguments: Any) -> list[Draw]:
    if isinstance(arguments, Draw):
        return [arguments]
    if isinstance(arguments, dict):
        return [d for item in arguments.values() for d in draws(item)]
    if isinstance(arguments, list | tuple):
        return [d for item in arguments for d in draws(item)]
    return []


def fill(arguments: Any, operands: Iterator[Any]) -> Any:
    if isinstance(arguments, Draw):
        return next(operands)
    if isinstance(arguments, dict):
        return {name: fill(item, operands) for name, item in arguments.items()}
    if isinstance(arguments, list | tuple):
        return type(arguments)(fill(item, operands) for item in arguments)
    return arguments


def mixes(case: Case) -> list[tuple[Layout, ...]]:
    """Legal layouts of the operands: all mixes, or a fixed sample of them where there are many."""
    choices = [
        [Layout.SHARED, Layout.STACKED, Layout.LISTED] + ([Layout.PACKED] if len(d.shape) >= 2 else [])
        for d in draws((case.args, case.kwargs))
    ]
    count = math.prod(map(len, choices))
    if count <= MAX_MIXES:
        return list(itertools.product(*choices))
    uniform = [(layout,) * len(choices) for layout in Layout if all(layout in choice for choice in choices)]
    places = random.Random(0).sample(range(count), MAX_MIXES - len(uniform))
    return uniform + [_mix(choices, place) for place in places]


def _mix(choices: list[list[Layout]], place: int) -> tuple[Layout, ...]:
    """The one at ``place`` of all mixes, of which there may be millions."""
    found = []
    for choice in choices:
        place, here = divmod(place, len(choice))
        found.append(choice[here])
    return tuple(found)


def arrays(case: Case) -> list[tuple[int, tuple[Layout, ...]]]:
    """Numbers of members and layouts of the operands: each number with each layout for all, the mixes in turn."""
    uniform = [mix for mix in mixes(case) if len(set(mix)) <= 1]
    mixed = [mix for mix in mixes(case) if len(set(mix)) > 1]
    return [*itertools.product(case.members, uniform), *zip(itertools.cycle(case.members), mixed)]


def check(case: Case) -> None:
    """Assert that every lowering of the operator equals the stack of single calls for every mix of layouts."""
    generator = torch.Generator().manual_seed(7)
    graph = member_graph(case, [d.sample(generator) for d in draws((case.args, case.kwargs))])
    for members, mix in arrays(case):
        try:
            _check(case, graph, members, mix)
        except Exception as error:
            names = ", ".join(layout.value for layout in mix)
            raise AssertionError(f"{case} with {members} members and operands ({names}): {error}") from error


def _check(case: Case, graph: fx.Graph, members: int, mix: Sequence[Layout]) -> None:
    generator = torch.Generator().manual_seed(7)
    drawn = draws((case.args, case.kwargs))
    rows = [
        [d.sample(generator) for _ in range(1 if layout is Layout.SHARED else members)]
        for d, layout in zip(drawn, mix, strict=True)
    ]
    leaves = [
        [x.requires_grad_(d.grad and x.is_floating_point()) for x in row] for d, row in zip(drawn, rows, strict=True)
    ]
    single = [_flat(_call(case, [row[b % len(row)] for row in leaves])) for b in range(members)]
    expected = [torch.stack([outputs[k] for outputs in single]) for k in range(len(single[0]))]
    told = [x.shape for x in _flat(next(n for n in graph.nodes if n.op == "call_function").meta["val"])]
    for module in lowerings(graph, mix, members):
        # Where torch describes its own operator as it is not, nothing can be compared with that.
        if told == [x.shape for x in single[0]]:
            check_array(module, members)
        got = module(*(_arrange(row, layout, members) for row, layout in zip(leaves, mix, strict=True)))
        assert len(got) == len(expected)
        for a, b in zip(got, expected, strict=True):
            torch.testing.assert_close(a, b, rtol=RELATIVE, atol=1e-11, equal_nan=True)
        _check_gradients([x for row in leaves for x in row if x.requires_grad], got, expected)


def lowerings(graph: fx.Graph, layouts: Sequence[Layout], members: int) -> Iterator[fx.GraphModule]:
    """The array's graph with every candidate of the one operator in ``graph``, one after the other."""
    waiting = iter(layouts)
    env = {n: result(n, next(waiting), n.meta["val"]) for n in graph.nodes if n.op == "placeholder"}
    call = next(node for node in graph.nodes if node.op == "call_function")
    for place, _ in enumerate(candidates(call, env, members, RULES)):
        yield batch(graph, layouts, members, RULES, {call: Choice(place, 0.0)})


def _check_gradients(leaves: list[Tensor], got: Sequence[Tensor], expected: Sequence[Tensor]) -> None:
    weights = [torch.randn(e.shape, dtype=torch.float64) if e.requires_grad else None for e in expected]
    if not leaves or all(w is None for w in weights):
        return
    ours, theirs = (
        torch.autograd.grad(
            sum((o * w).sum() for o, w in zip(outputs, weights, strict=True) if w is not None),  # type: ignore[arg-type]
            leaves,
            retain_graph=True,
            allow_unused=True,
        )
        for outputs in (got, expected)
    )
    for ours_one, theirs_one in zip(ours, theirs, strict=True):
        if theirs_one is None:
            assert ours_one is None or not ours_one.any()
        else:
            assert ours_one is not None
            torch.testing.assert_close(ours_one, theirs_one, rtol=RELATIVE, atol=1e-11, equal_nan=True)


def _call(case: Case, operands: list[Tensor]) -> Any:
    args, kwargs = fill((case.args, case.kwargs), iter(operands))
    return case.target(*args, **kwargs)


def _flat(outputs: Any) -> list[Tensor]:
    return [outputs] if isinstance(outputs, Tensor) else [o for o in outputs if isinstance(o, Tensor)]


def member_graph(case: Case, operands: list[Tensor]) -> fx.Graph:
    """The case as a captured graph: placeholders, one call, the flat outputs."""
    graph, mode = fx.Graph(), FakeTensorMode()
    placeholders = []
    for k, operand in enumerate(operands):
        node = graph.placeholder(f"x{k}")
        node.meta["val"] = mode.from_tensor(operand)
        placeholders.append(node)
    args, kwargs = fill((case.args, case.kwargs), iter(placeholders))
    call = graph.call_function(case.target, args, kwargs)
    with mode:
        result = _call(case, [node.meta["val"] for node in placeholders])
    call.meta["val"] = result
    outputs = [call]
    if not isinstance(result, Tensor):
        outputs = []
        for k, part in enumerate(result):
            if isinstance(part, Tensor):
                outputs.append(graph.call_function(operator.getitem, (call, k)))
                outputs[-1].meta["val"] = part
    graph.output(tuple(outputs))
    return graph


def _arrange(row: list[Tensor], layout: Layout, members: int) -> Any:
    if layout is Layout.SHARED:
        return row[0]
    stacked = torch.stack(row)
    return stacked if layout is Layout.STACKED else CONVERSIONS[Layout.STACKED, layout](stacked, members)
