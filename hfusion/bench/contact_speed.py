"""Times of ``contact``: training steps of all members against other ways to train them."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from statistics import median

import torch

from hfusion.bench import contenders, fuse_benchmark, serial, timing
from hfusion.bench.cases import CASES
from hfusion.bench.command_line import named
from hfusion.bench.contact_item import CheckResult, ContactItem, ContactStatus, computes
from hfusion.bench.mps import multi_process_service
from hfusion.bench.results import Cell
from hfusion.bench.workload import Contender, Running, Workload, losses

MODELS = ("mlp-small", "resnet8", "transformer")
MEMBERS = (16, 64, 4, 1)
QUICK = (("mlp-small", 4),)
OURS = ("hfusion", "hfusion-compiled")
CONTENDERS = ("serial", "serial-cuda-graph", "vmap-compiled", "processes", *OURS)
ROUNDS, SLOT = 5, 0.05


def speed_items(quick: bool) -> Iterator[ContactItem]:
    """Yield the times of each model and number of members, first of all models with 16."""
    for model, members in QUICK if quick else [(model, members) for members in MEMBERS for model in MODELS]:
        yield ContactItem(
            f"speed {model} B={members}", partial(time_steps, model, members), limit=200.0, exclusive=True
        )


def time_steps(model: str, members: int, device: torch.device) -> CheckResult:
    """Time a training step of all members by every contender whose losses are right."""
    (case,) = named(CASES, [model])
    workload = Workload(case, members, device)
    expected = losses(serial.start(workload), fuse_benchmark.AGREEMENT_STEPS)
    steps, absent, wrong = {}, {}, []
    with ExitStack() as stack:
        mps = stack.enter_context(multi_process_service()) if device.type == "cuda" else "needs a CUDA device"
        for contender in contenders.CONTENDERS:
            if contender.name not in CONTENDERS:
                continue
            # The last line of a process that takes too long says where it was.
            print(f"preparing {contender.name}", flush=True)
            started = _start(contender, workload, expected)
            if isinstance(started, Running):
                stack.callback(started.close)
                steps[contender.name] = started.step
            else:
                absent[contender.name] = started.reason
                wrong += [started.reason] if started.disagrees else []
        print("timing", flush=True)
        seconds = timing.interleave(steps, rounds=ROUNDS, slot=SLOT, device=device, tick=lambda: None)
    milliseconds = {name: round(1e3 * median(times), 4) for name, times in seconds.items()}
    result = CheckResult(
        ContactStatus.OK if computes(device) else ContactStatus.NOT_COMPUTED,
        summary=", ".join(f"{name} {time:.3g} ms" for name, time in milliseconds.items()),
        values={"ms": milliseconds, "absent": absent, "mps": mps},
    )
    if wrong:
        return CheckResult(ContactStatus.WRONG, "; ".join(wrong), result.summary, result.values)
    return result.unless_fault("; ".join(absent[name] for name in OURS if name in absent))


def _start(contender: Contender, workload: Workload, expected: torch.Tensor) -> Running | Cell:
    """Return a contender that is ready, its losses compared where the device computes any."""
    if computes(workload.device):
        return fuse_benchmark.prepare(contender, workload, expected)
    try:
        return contender.start(workload)
    except Exception as error:
        return Cell(contender.name, reason=fuse_benchmark.reason_of(error))
