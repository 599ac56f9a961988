"""Checks of ``contact``: each optimizer against torch.optim, and training steps against the loop over members."""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from copy import deepcopy
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

import hfusion as hf
from hfusion.bench import serial
from hfusion.bench.cases import CASES
from hfusion.bench.command_line import named
from hfusion.bench.contact_item import CheckResult, ContactItem, compare, compare_losses, computes, difference
from hfusion.bench.workload import Running, Workload, losses
from hfusion.core.membership import Membership, mark
from hfusion.device.backend import backend
from hfusion.step.train_step import TrainStep

OPTIMIZERS = ("SGD", "Adam", "AdamW", "Adadelta", "Adagrad", "Adamax", "Lion", "Muon", "NAdam", "RAdam", "RMSprop")
DTYPES = {"float32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
QUICK_OPTIMIZERS = ("AdamW",)
MODELS = ("mlp-small", "cnn", "resnet8", "mobilenet-v3", "dcgan", "transformer", "bert", "lstm")
AMPS = {"float32": None, "bf16-autocast": torch.bfloat16}
MEMBERS = (1, 16)
QUICK_STEPS = (("mlp-small", "bf16-autocast", 4),)
LOSSES = 5
# Calls until a step is compiled and recorded: for three steps before that, gradients have kept their addresses.
SETTLING = 8
RECORDED = "recorded and replayed as one"

_SHAPES = ((7, 5), (64, 48), (3, 300))
_RATES = (0.01, 0.02, 0.005, 0.01)
# Of ten steps, of how far the parameters moved: roundings of parameters of size 0.1, which move by about 0.1.
_TOLERANCES = {"float32": 1e-4, "bf16": 0.1, "fp16": 0.02}
# It multiplies matrices in bfloat16, whatever the parameters are.
_MUON = 0.1


class LionAlone:
    """Lion of one member, which torch has not (Chen et al., "Symbolic discovery of optimization algorithms", 2023)."""

    def __init__(self, params: Sequence[Tensor], lr: float) -> None:
        self._params, self._lr = params, lr
        self._momenta = [torch.zeros_like(param) for param in params]

    @torch.no_grad()
    def step(self) -> None:
        for param, momentum in zip(self._params, self._momenta, strict=True):
            assert param.grad is not None
            param.sub_(momentum.lerp(param.grad, 0.1).sign_(), alpha=self._lr)
            momentum.lerp_(param.grad, 0.01)


def optimizer_items(quick: bool) -> Iterator[ContactItem]:
    """Yield a check of every optimizer and precision of its parameters."""
    for name in QUICK_OPTIMIZERS if quick else OPTIMIZERS:
        for precision in DTYPES:
            yield ContactItem(f"optimizer {name} {precision}", partial(check_optimizer, name, precision))


def check_optimizer(name: str, precision: str, device: torch.device) -> CheckResult:
    """Make ten steps of an array of four and of its members alone, on equal gradients, by rates of their own."""
    dtype = DTYPES[precision]
    # What moves little at the rates of the others.
    rates = [100 * rate if name == "Adadelta" else rate for rate in _RATES]
    # Others round to zero in half precision, and divide by it.
    options: dict[str, float] = {"eps": 1e-4} if dtype is torch.float16 and name not in ("SGD", "Lion", "Muon") else {}
    generator = torch.Generator().manual_seed(0)
    starts = [0.1 * torch.randn(len(rates), *shape, generator=generator) for shape in _SHAPES]
    stacks = [
        mark(_parameter(start, dtype, device), Membership(f"p{index}", len(rates), True))
        for index, start in enumerate(starts)
    ]
    members = [[_parameter(start[member], dtype, device) for start in starts] for member in range(len(rates))]
    fused = getattr(hf.optim, name)(stacks, lr=rates, **options)
    alone_class: Any = getattr(torch.optim, name, LionAlone)
    alone = [alone_class(params, lr=rate, **options) for params, rate in zip(members, rates, strict=True)]
    for _ in range(10):
        _draw_gradients(stacks, members, generator)
        fused.step()
        for optimizer in alone:
            optimizer.step()
    differences = {}
    for index, start in enumerate(starts):
        origin = start.to(dtype).to(device)
        expected = torch.stack([params[index] for params in members]) - origin
        differences[f"parameter {_SHAPES[index]}"] = difference(expected, stacks[index] - origin)
    tolerance = _MUON if name == "Muon" else _TOLERANCES[precision]
    result = compare(device, differences, tolerance, fused.launches or "by torch's functions")
    # Torch's own class steps half precision where there is no kernel.
    recorded = dtype is torch.float32 or fused.kernel is not None or fused.torch_class is None
    must = recorded and _records(device)
    return result.unless_fault("" if not must or fused.launches == RECORDED else f"not recorded: {fused.launches}")


def _parameter(values: Tensor, dtype: torch.dtype, device: torch.device) -> nn.Parameter:
    param = nn.Parameter(values.detach().to(device, dtype, copy=True))
    param.grad = torch.zeros_like(param)
    return param


def _draw_gradients(stacks: Sequence[Tensor], members: Sequence[Sequence[Tensor]], generator: torch.Generator) -> None:
    """Write equal gradients of stacks and members into the memory in which they are."""
    for index, stack in enumerate(stacks):
        assert stack.grad is not None
        stack.grad.copy_(torch.randn(stack.shape, generator=generator))
        for member, params in enumerate(members):
            gradient = params[index].grad
            assert gradient is not None
            gradient.copy_(stack.grad[member])


def _records(device: torch.device) -> bool:
    """Return whether ``device`` can record launches."""
    return device.type != "cpu" and not isinstance(backend(device).recorder(), str)


def step_items(quick: bool) -> Iterator[ContactItem]:
    """Yield a check of hf.train_step for each model, precision and number of members."""
    every = [(model, precision, members) for model in MODELS for precision in AMPS for members in MEMBERS]
    for model, precision, members in QUICK_STEPS if quick else every:
        name = f"train_step {model} {precision} B={members}"
        yield ContactItem(name, partial(check_step, model, precision, members), limit=300.0)


def check_step(model: str, precision: str, members: int, device: torch.device) -> CheckResult:
    """Compare five losses with the loop's: of the first steps, when steps are recorded, and after parameters moved."""
    (case,) = named(CASES, [model])
    workload = Workload(case, members, device, AMPS[precision])
    expected = losses(serial.start(workload), LOSSES)
    fused = hf.fuse(workload.models(), verify=computes(device))
    optimizer = hf.optim.Adam(serial.trained(fused), lr=list(workload.rates))
    train = hf.train_step(fused, case.loss, optimizer, compile=True)
    states = deepcopy(fused.state_dict()), deepcopy(optimizer.state_dict())
    inputs, target = workload.batch()

    def step() -> Tensor:
        with workload.autocast():
            return train(inputs, target)

    actual, runs = {}, {}
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        for stage in ("first steps", "settled", "moved"):
            # The last line of a process that takes too long says where it was.
            print(stage, flush=True)
            if stage == "moved":
                _move(fused)
            actual[stage] = losses(Running(step), LOSSES)
            for _ in range(SETTLING):
                step()
            runs[stage] = _how(train)
            fused.load_state_dict(states[0])
            optimizer.load_state_dict(deepcopy(states[1]))
    remarks = list(dict.fromkeys(str(warning.message).splitlines()[0] for warning in caught))
    values = {"runs": runs, "optimizer": optimizer.launches, "remarks": remarks}
    result = compare_losses(device, expected, actual, workload.tolerance, runs["settled"], **values)
    missing = [f"{stage}: {how}" for stage, how in runs.items() if not how.endswith(RECORDED)]
    return result.unless_fault(f"not recorded, {missing[0]}" if missing and _records(device) else "")


def _how(train: TrainStep) -> str:
    """Return how steps run, and why not otherwise."""
    return "; ".join(f"{row.how}: {row.why}" if row.why else row.how for row in train.report().rows)


def _move(fused: nn.Module) -> None:
    """Move all parameters to new memory, as moves between devices and changes of members do."""
    for param in fused.parameters():
        param.data = param.data.clone()
