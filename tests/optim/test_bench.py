"""The sub-benchmark ``optim`` on the smallest case: every contender runs, and none cheats."""

from __future__ import annotations

from dataclasses import asdict

import pytest
import torch
from rich.console import Console

from hfusion.bench import optim_benchmark as bench
from hfusion.bench.progress import Meter

TINY = bench.OptimCase("tiny", "for tests", lambda members: ((3, 2), (3,)))
SETTINGS = bench.OptimSettings(cases=(TINY,), members=(2,), rounds=2, slot=1e-6, device=torch.device("cpu"))


def test_rows_table_and_progress() -> None:
    ticks: list[int] = []
    meter = Meter(say=lambda text: None, advance=ticks.append)
    rows = [row for case_rows in bench.run(SETTINGS, meter) for row in case_rows]
    assert len(rows) == len(bench.OPTIMIZERS) * len(bench.CONTENDERS)
    assert sum(ticks) == bench.pieces(SETTINGS)
    assert all(row.params == 18 and row.members == 2 and row.ns_per_param > 0 for row in rows)
    assert set(asdict(rows[0])) == {
        "optimizer",
        "case",
        "params",
        "members",
        "contender",
        "ns_per_param",
    }
    console = Console(width=200, record=True)
    console.print(bench.table(rows))
    assert "Adadelta" in console.export_text()


@pytest.mark.parametrize("optimizer", bench.OPTIMIZERS)
def test_the_eager_contender_computes_the_same(optimizer: str) -> None:
    workload = bench.OptimWorkload(optimizer, TINY.shapes(2), 2, torch.device("cpu"))
    shapes = workload.tensors(2)
    options = bench.OPTIMIZERS[optimizer]
    alone = [
        getattr(torch.optim, optimizer)([torch.nn.Parameter(p[b].detach().clone()) for p in shapes], lr=lr, **options)
        for b, lr in enumerate(workload.rates)
    ]
    stacks = [param.detach().clone() for param in shapes]
    state = [[torch.zeros_like(param) for param in stacks] for _ in range(2)]
    for count in range(1, 4):
        for index, stack in enumerate(stacks):
            grad = torch.randn_like(stack)
            lr = torch.tensor(workload.rates).view(-1, *[1] * (stack.dim() - 1))
            bench.EAGER[optimizer](stack, grad, state[0][index], state[1][index], lr, count)
            for member, torch_optimizer in enumerate(alone):
                torch_optimizer.param_groups[0]["params"][index].grad = grad[member]
        for torch_optimizer in alone:
            torch_optimizer.step()
    for index, stack in enumerate(stacks):
        expected = torch.stack([o.param_groups[0]["params"][index].detach() for o in alone])
        torch.testing.assert_close(stack, expected, rtol=1e-5, atol=1e-6)


def test_cases_have_the_sizes_they_claim() -> None:
    for case, total in zip(bench.CASES, (1e5, 1e6, 1e7, 512_000), strict=True):
        workload = bench.OptimWorkload("Adam", case.shapes(16), 16, torch.device("cpu"))
        assert workload.params == pytest.approx(total, rel=0.05)
