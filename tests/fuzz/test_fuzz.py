"""Run a fixed set of random programs, and check that the fuzzer finds, shrinks and prints a wrong rule."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from hfusion.compiler import compiled_program as compiling
from hfusion.core.layout import Layout
from hfusion.ops.rule import Call
from tests.fuzz import __main__ as command
from tests.fuzz.compare import Outcome, Verdict, Worker, outcome, outcome_alone, shrink
from tests.fuzz.generate import SMALL, for_compilation, generate
from tests.fuzz.pieces import COUNT, piece
from tests.fuzz.program import Block, Input, Program, Statement, Step

SEEDS = range(200)


@pytest.mark.parametrize("first", range(0, len(SEEDS), 10))
def test_fused_equals_alone(first: int) -> None:
    for seed in SEEDS[first : first + 10]:
        program = generate(seed, SMALL)
        result = outcome(program.text())
        assert not result.bad, f"{program.text()}\n{result.verdict}: {result.words}"


def test_most_compiled_programs_are_trained() -> None:
    outcomes = []
    for seed in range(40):
        try:
            outcomes.append(outcome_alone(for_compilation(generate(seed, SMALL)).text()))
        except RuntimeError:
            continue
    assert len(outcomes) >= 37


def _program(*statements: Statement, steps: tuple[Step, ...] = (Step("", "step", 3, 3),)) -> str:
    net = Block("Net", (("x0", "vec"),), statements, statements[-1].results[:1])
    loss, optimizer = "out.sin().sum()", "SGD(params, lr=0.1)"
    return Program(5, 2, (net,), (Input("vec"),), ("plain",), Input("vec"), loss, optimizer, steps).text()


def _chain(*steps: Step) -> str:
    """Linear, tanh, and what has nothing to do with them."""
    return _program(
        Statement(piece("vec->vec", module="nn.Linear(6, 6)"), ("x0",), ("v0",), "s0"),
        Statement(piece("vec,vec->vec", "{0} * torch.sigmoid({1})"), ("v0", "x0"), ("v1",), "s1"),
        Statement(piece("vec->", "{0}.mul_(0.5)"), ("v1",), (), "s2"),
        Statement(piece("vec->vec", module="nn.Tanh()"), ("v1",), ("v2",), "s3"),
        Statement(piece("vec->vec", module="nn.LayerNorm(6, eps=[1e-3, 0.1][b])"), ("v2",), ("v4",), "s4"),
        Statement(piece("vec->vec", "{s} += 1\n{o} = {0} / ({s} + 1)", init=COUNT), ("v4",), ("v5",), "s5"),
        steps=steps or (Step("train", "step", 3, 3), Step("eval", "forward", 4, 3)),
    )


class _Here(Worker):
    """Runs programs in this process."""

    def __enter__(self) -> _Here:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def outcome(self, text: str) -> Outcome:
        return outcome(text)


def _others(y: Tensor) -> Tensor:
    """Member b gets what member b - 1 computes."""
    return y.roll(1, 0)


def _fails(y: Tensor) -> Tensor:
    raise IndexError("no such row")


def _plant(monkeypatch: pytest.MonkeyPatch, fault: Callable[[Tensor], Tensor]) -> None:
    """Let the array compute tanh wrongly."""

    def rule(site: Any, self: Any) -> Call:
        return site.call(lambda x: fault(torch.tanh(x)), (self.to(Layout.STACKED),), Layout.STACKED, "planted")

    wrong = {**compiling.RULES, torch.ops.aten.tanh.default: rule}
    monkeypatch.setattr(compiling, "RULES", wrong)


@pytest.mark.parametrize(
    ("fault", "verdict", "words"),
    [
        (_others, Verdict.DIFFERENT, "output 0"),
        (lambda y: y + (y - y.detach()), Verdict.DIFFERENT, "gradient of s0.weight"),
        (lambda y: y.float().to(y.dtype), Verdict.DIFFERENT, "output 0"),
        (_fails, Verdict.RAW, "IndexError: no such row"),
    ],
)
def test_a_wrong_rule_is_found(fault: Any, verdict: Verdict, words: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert outcome(_chain()).verdict is Verdict.EQUAL
    _plant(monkeypatch, fault)
    result = outcome(_chain())
    assert result.verdict is verdict
    assert words in result.words


def test_a_moved_random_state_is_found_in_evaluation(monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch, lambda y: y * 1.0 + 0.0 * torch.rand(y.shape))
    result = outcome(_chain(Step("eval", "forward", 3, 3)))
    assert "random state moved" in result.words


def test_a_fault_is_shrunk_to_its_statement(monkeypatch: pytest.MonkeyPatch) -> None:
    _plant(monkeypatch, _others)
    small = shrink(_chain(), lambda candidate: outcome(candidate).bad)
    assert re.findall(r"self.\w+ = (.*)", small) in (["nn.Linear(6, 6)", "nn.Tanh()"], ["nn.Tanh()"])
    assert "MEMBERS = 2" in small
    assert small.count("Step(") == 1
    assert "mul_" not in small
    exec(small, {"__name__": "printed"})


def test_the_command_prints_the_source_and_fails(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    # Rules are planted in this process.
    monkeypatch.setattr(command, "Worker", _Here)
    monkeypatch.setattr(command, "generate", lambda seed, scale: SimpleNamespace(text=_chain, seed=seed))
    arguments = ["fuzz", "--seed", "3", "--programs", "2", "--shrink", "1"]
    monkeypatch.setattr("sys.argv", arguments)
    assert command.main() == 0
    assert "2 equal" in capsys.readouterr().out
    _plant(monkeypatch, _fails)
    assert command.main() == 1
    printed = capsys.readouterr().out
    assert "class Net(nn.Module):" in printed
    assert "FAULT 2 times: IndexError: no such row" in printed


def _own(code: str) -> str:
    return _program(Statement(piece("vec->vec", code), ("x0",), ("v0",), "s0"))


def test_a_program_that_ends_the_process_is_told() -> None:
    with Worker() as worker:
        assert worker.outcome(_own("import os\nos._exit(3)\n{o} = x0")).verdict is Verdict.INVALID
        result = worker.outcome(_own("import os\nif type(x0) is not torch.Tensor: os._exit(3)\n{o} = x0"))
        assert result == Outcome(Verdict.RAW, "the process ended with the status 3")
        assert worker.outcome(_own("{o} = x0 + 1")).verdict is Verdict.EQUAL
