"""Every contender of the benchmarks trains as the members alone, or says why it cannot."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import pytest
import torch
import torch.nn.functional as F

from benchmarks.rivals import FORMS, RIVALS
from hfusion.bench import cases, contenders, optim_benchmark
from hfusion.bench.cases import FuseCase, Running, Unavailable, Workload, check_agreement, losses
from hfusion.bench.contenders import start_hfusion, start_processes, start_serial, start_train_step, start_vmap
from tests.bench.tiny import ADAPTERS, BATCH_NORM, BRANCHING, CPU, IMAGES, TINY, workload
from tests.step.test_train_step import needs_compiler

STEPS = 5
BF16 = replace(workload(), amp=torch.bfloat16)
DERIVATIVES = [case for case in cases.CASES if case.make_functional]


@pytest.fixture(autouse=True)
def two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(contenders, "cores", lambda: 2)


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_every_model_learns_its_batch(case: FuseCase) -> None:
    measured = losses(start_serial(workload(case, members=1)), 4)
    assert measured.shape == (4, 1)
    assert measured[-1] < measured[0]


# torch's forward mode calls torch.jit.script.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize(
    ("start", "chosen", "note"),
    [
        pytest.param(start_vmap, workload(), "", id="vmap"),
        pytest.param(start_vmap, workload(BATCH_NORM), "without BatchNorm's running statistics", id="vmap, BatchNorm"),
        pytest.param(start_vmap, workload(ADAPTERS), "", id="vmap, adapters"),
        pytest.param(start_vmap, BF16, "", id="vmap, bf16"),
        *(pytest.param(start_vmap, workload(case, 2), "", id=f"vmap, {case.name}") for case in DERIVATIVES),
        pytest.param(partial(start_serial, channels_last=True), workload(IMAGES), "", id="channels_last"),
        pytest.param(start_processes, workload(), "", id="processes"),
        pytest.param(partial(start_processes, channels_last=True), workload(IMAGES), "", id="processes, channels_last"),
        pytest.param(
            partial(start_processes, compiled=True), workload(), "", id="processes, compiled", marks=needs_compiler
        ),
        pytest.param(start_hfusion, workload(BATCH_NORM), "", id="hfusion"),
        pytest.param(start_hfusion, workload(ADAPTERS), "", id="hfusion, adapters"),
        pytest.param(start_hfusion, BF16, "", id="hfusion, bf16"),
        pytest.param(partial(start_train_step, compile=False, limited=True), workload(), "", id="blocks"),
        pytest.param(start_train_step, workload(BATCH_NORM), "", id="train_step", marks=needs_compiler),
        pytest.param(start_train_step, workload(BRANCHING), "eager: forward runs in a loop", id="train_step, eager"),
    ],
)
def test_contenders_train_as_the_serial_loop(start: Callable[[Workload], Running], chosen: Workload, note: str) -> None:
    running = start(chosen)
    try:
        assert running.note.startswith(note)
        assert bool(running.note) == bool(note)
        expected = losses(start_serial(chosen), STEPS)
        check_agreement("it", expected, losses(running, STEPS), max(1e-3, chosen.tolerance))
    finally:
        running.close()


@pytest.mark.parametrize(
    ("start", "members", "reason"),
    [
        (partial(start_serial, channels_last=True), 2, "no convolution"),
        (partial(start_processes, channels_last=True), 2, "no convolution"),
        (start_processes, 1, "at least 2 members and 2 cores"),
        (partial(start_vmap, written_out=True), 2, "no attention"),
        (RIVALS[0].start, 2, "needs --device cuda"),
    ],
)
def test_contenders_that_cannot_run_say_why(start: Callable[[Workload], Running], members: int, reason: str) -> None:
    with pytest.raises(Unavailable, match=reason):
        start(workload(members=members))


def test_an_error_of_a_worker_is_given() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        running = start_processes(workload(replace(TINY, loss=F.mse_loss)))
        with pytest.raises(RuntimeError, match="in a worker process: RuntimeError: The size of tensor a"):
            running.step()
    running.close()


@pytest.mark.gpu
@pytest.mark.parametrize("amp", [None, torch.bfloat16])
@pytest.mark.parametrize("case", [TINY, BATCH_NORM], ids=lambda case: case.name)
def test_graphs_train_as_the_serial_loop(case: FuseCase, amp: torch.dtype | None) -> None:
    chosen = Workload(case, 3, torch.device("cuda"), amp)
    check_agreement("it", losses(start_serial(chosen), 5), losses(RIVALS[0].start(chosen), 5), chosen.tolerance)


@pytest.mark.parametrize("name", FORMS)
def test_every_form_in_jax_trains_as_the_serial_loop(name: str) -> None:
    pytest.importorskip("jax")
    (case,) = (case for case in cases.CASES if case.name == name)
    chosen = workload(case, members=2)
    check_agreement("jax", losses(start_serial(chosen), 3), losses(RIVALS[1].start(chosen), 3), 1e-3)


@pytest.mark.parametrize("rival", RIVALS[2:], ids=lambda rival: rival.name)
def test_rivals_of_other_packages(rival: cases.Contender) -> None:
    pytest.importorskip({"modelbatch": "modelbatch", "ensemble-module": "tensordict"}[rival.name])
    chosen = replace(workload(BATCH_NORM), one_rate=rival.one_rate)
    check_agreement("it", losses(start_serial(chosen), 4), losses(rival.start(chosen), 4), 1e-3)


@pytest.mark.parametrize("optimizer", optim_benchmark.OPTIMIZERS)
def test_the_eager_optimizer_computes_as_torchs(optimizer: str) -> None:
    chosen = optim_benchmark.OptimWorkload(optimizer, ((3, 2), (3,)), 2, CPU)
    stacks = [param.detach().clone() for param in chosen.tensors(2)]
    alone = [
        chosen.torch_optimizer([torch.nn.Parameter(stack[member].clone()) for stack in stacks], lr, fast=False)
        for member, lr in enumerate(chosen.rates)
    ]
    state = [[torch.zeros_like(param) for param in stacks] for _ in range(2)]
    for count in range(1, 4):
        for index, stack in enumerate(stacks):
            grad, lr = torch.randn_like(stack), torch.tensor(chosen.rates).view(-1, *[1] * (stack.dim() - 1))
            optim_benchmark.EAGER[optimizer](stack, grad, state[0][index], state[1][index], lr, count)
            for member, torch_optimizer in enumerate(alone):
                torch_optimizer.param_groups[0]["params"][index].grad = grad[member]
        for torch_optimizer in alone:
            torch_optimizer.step()
    for index, stack in enumerate(stacks):
        expected = torch.stack([each.param_groups[0]["params"][index].detach() for each in alone])
        torch.testing.assert_close(stack, expected, rtol=1e-5, atol=1e-6)
