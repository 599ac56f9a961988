from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from hfusion.bench import cases, processes, serial, vmapped
from hfusion.bench.contenders import start_hfusion, start_hfusion_compiled
from hfusion.bench.fuse_benchmark import prepare
from hfusion.bench.workload import Contender, Disagreement, Running, Unavailable, Workload, check_agreement, losses
from tests.bench.tiny import TINY, TINY_BATCH_NORM, TINY_BRANCHING, TINY_IMAGES, workload
from tests.step.test_train_step import needs_compiler

(ADAPTERS,) = (case for case in cases.CASES if case.make_base is not None)
STEPS = 5


@pytest.mark.parametrize("case", cases.CASES, ids=lambda case: case.name)
def test_every_model_learns_its_batch(case: cases.FuseCase) -> None:
    measured = losses(serial.start(workload(case, members=1)), 4)
    assert measured.shape == (4, 1)
    assert measured[-1] < measured[0]


def test_members_differ_in_seed_and_rate_and_are_reproducible() -> None:
    chosen = workload()
    first, again, other = (*chosen.models([0, 0, 1]),)
    for a, b in zip(first.parameters(), again.parameters(), strict=True):
        assert torch.equal(a, b)
    assert not torch.equal(next(first.parameters()), next(other.parameters()))
    assert chosen.rates == pytest.approx((3e-4, 3e-4 * 10**0.5, 3e-3))


def test_vmap_trains_as_the_serial_loop() -> None:
    chosen = workload()
    expected = losses(serial.start(chosen), STEPS)
    check_agreement("vmap", expected, losses(vmapped.start(chosen), STEPS), 1e-5)


def test_members_share_a_base() -> None:
    chosen = workload(ADAPTERS)
    first, second, third = chosen.models()
    (again,) = chosen.models([1])
    for a, b, c in zip(*(dict(model.named_parameters()).items() for model in (first, second, again)), strict=True):
        assert (a[1] is b[1]) == (not a[1].requires_grad)
        assert torch.equal(b[1], c[1])
    assert not torch.equal(first[0].down.weight, third[0].down.weight)


@pytest.mark.parametrize("start", [vmapped.start, start_hfusion], ids=["vmap", "hfusion"])
def test_adapters_train_and_their_base_does_not(start: Callable[[Workload], Running]) -> None:
    chosen = workload(ADAPTERS)
    check_agreement("it", losses(serial.start(chosen), STEPS), losses(start(chosen), STEPS), 1e-4)


@pytest.mark.parametrize("start", [vmapped.start, start_hfusion], ids=["vmap", "hfusion"])
def test_forward_and_loss_under_autocast(start: Callable[[Workload], Running]) -> None:
    plain, chosen = workload(), replace(workload(), amp=torch.bfloat16)
    expected = losses(serial.start(chosen), STEPS)
    assert not torch.equal(expected, losses(serial.start(plain), STEPS))
    check_agreement("it", expected, losses(start(chosen), STEPS), chosen.tolerance)


def test_vmap_says_what_it_leaves_out_of_batch_norm() -> None:
    chosen = workload(TINY_BATCH_NORM)
    running = vmapped.start(chosen)
    assert "running statistics" in running.note
    check_agreement("vmap", losses(serial.start(chosen), STEPS), losses(running, STEPS), 1e-3)


@pytest.mark.parametrize(
    ("start", "cores", "members", "tolerance"),
    [
        pytest.param(processes.start, 2, 3, 1e-6, id="eager"),
        pytest.param(processes.start_compiled, 8, 2, 1e-5, id="compiled", marks=needs_compiler),
    ],
)
def test_processes_train_as_the_serial_loop(
    start: Callable[[Workload], Running], cores: int, members: int, tolerance: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(processes, "cores", lambda: cores)
    chosen = workload(members=members)
    running = start(chosen)
    try:
        assert running.cores == 2
        check_agreement("processes", losses(serial.start(chosen), STEPS), losses(running, STEPS), tolerance)
    finally:
        running.close()


def test_convolutions_in_channels_last_train_as_the_serial_loop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "cores", lambda: 2)
    chosen = workload(TINY_IMAGES)
    loop = serial.SerialLoop.of(chosen, range(2), channels_last=True)
    assert loop.inputs.is_contiguous(memory_format=torch.channels_last)
    assert loop.models[0][0].weight.is_contiguous(memory_format=torch.channels_last)
    expected = losses(serial.start(chosen), STEPS)
    check_agreement("it", expected, losses(serial.start_channels_last(chosen), STEPS), 1e-5)
    running = processes.start_channels_last(chosen)
    try:
        check_agreement("processes", expected, losses(running, STEPS), 1e-5)
    finally:
        running.close()


@pytest.mark.parametrize("start", [serial.start_channels_last, processes.start_channels_last])
def test_channels_last_is_for_models_with_convolutions(start: Callable[[Workload], Running]) -> None:
    with pytest.raises(Unavailable, match="no convolution"):
        start(workload())


# torch's forward mode calls torch.jit.script.
@pytest.mark.filterwarnings("ignore:.*torch.jit.script.*")
@pytest.mark.parametrize("case", [case for case in cases.CASES if case.make_functional], ids=lambda case: case.name)
def test_derivatives_by_autograd_and_by_functions_are_the_same(case: cases.FuseCase) -> None:
    chosen = workload(case, members=2)
    expected = losses(serial.start(chosen), STEPS)
    check_agreement("functional", expected, losses(serial.start(chosen.functional()), STEPS), 1e-5)
    check_agreement("vmap", expected, losses(vmapped.start(chosen), STEPS), 1e-5)


def test_an_error_of_a_worker_is_given(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "cores", lambda: 2)
    broken = replace(TINY, loss=F.mse_loss)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        running = processes.start(workload(broken))
        with pytest.raises(RuntimeError, match="in a worker process: RuntimeError: The size of tensor a"):
            running.step()
    running.close()


def test_a_contender_with_one_rate_is_compared_with_members_of_that_rate() -> None:
    contender = Contender("one", "the loop with one rate", serial.start, one_rate=True)
    chosen = workload()
    assert isinstance(prepare(contender, chosen, losses(serial.start(chosen), STEPS)), Running)
    assert set(replace(chosen, one_rate=True).rates) == {3e-4}


@pytest.mark.parametrize(("members", "cores"), [(1, 4), (4, 1)])
def test_processes_need_two_members_and_cores(members: int, cores: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(processes, "cores", lambda: cores)
    with pytest.raises(Unavailable, match="at least 2 members and 2 cores"):
        processes.start(workload(members=members))


def test_vmap_with_attention_is_for_models_that_have_it() -> None:
    with pytest.raises(Unavailable, match="no attention"):
        vmapped.start_attention(workload())


def test_hfusion_trains_as_the_serial_loop() -> None:
    chosen = workload(TINY_BATCH_NORM)
    measured = losses(start_hfusion(chosen), STEPS)
    check_agreement("hfusion", losses(serial.start(chosen), STEPS), measured, 1e-3)


@needs_compiler
def test_compiled_hfusion_trains_as_the_serial_loop() -> None:
    chosen = workload(TINY_BATCH_NORM)
    running = start_hfusion_compiled(chosen)
    assert running.note == ""
    check_agreement("hfusion-compiled", losses(serial.start(chosen), STEPS), losses(running, STEPS), 1e-3)


def test_compiled_hfusion_says_what_runs_eagerly() -> None:
    chosen = workload(TINY_BRANCHING)
    running = start_hfusion_compiled(chosen)
    assert running.note.startswith("eager: forward runs in a loop over members")
    check_agreement("hfusion-compiled", losses(serial.start(chosen), STEPS), losses(running, STEPS), 1e-3)


def test_disagreement_names_member_and_step() -> None:
    expected = torch.ones(2, 3)
    wrong = expected.clone()
    wrong[1, 2] = 1.5
    with pytest.raises(Disagreement, match=r"^x: member 2 has loss 1.5 at step 1, trained alone 1 "):
        check_agreement("x", expected, wrong, 1e-3)


def test_not_a_number_disagrees() -> None:
    with pytest.raises(Disagreement, match="member 0 has loss nan"):
        check_agreement("x", torch.ones(1, 1), torch.full((1, 1), torch.nan), 1e-3)


def test_another_number_of_members_disagrees() -> None:
    with pytest.raises(Disagreement, match=r"shape \[1, 2\], serial \[1, 3\]"):
        check_agreement("x", torch.ones(1, 3), torch.ones(1, 2), 1e-3)
