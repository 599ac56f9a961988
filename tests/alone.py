"""Members alone in plain torch: call by call beside an array, and trained by themselves."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler
from torch.utils import _pytree as pytree

import hfusion as hf
from hfusion.capture import fallback_runtime
from hfusion.compiler.fusion_report import ProgramReport
from hfusion.core.calls import is_stacked
from hfusion.passes.functional import OPAQUE

RELATIVE = 1e-9
ABSOLUTE = 1e-11


@dataclass(frozen=True)
class Call:
    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)

    def of_member(self, member: int) -> tuple[tuple[Any, ...], dict[str, Any]]:
        def row(leaf: Any) -> Any:
            return leaf[member] if isinstance(leaf, hf.Ragged) else leaf.tensor[member] if is_stacked(leaf) else leaf

        args, kwargs = pytree.tree_map(row, (self.args, self.kwargs), is_leaf=is_stacked)
        return args, kwargs


def call(*args: Any, **kwargs: Any) -> Call:
    return Call(args, kwargs)


def normal(*shape: int) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64)


class Branch(nn.Linear):
    """Decides by values, so that no graph holds it."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x)
        return y * 2 if y.sum() > 0 else y.sin()


def looped(part: ProgramReport) -> set[str]:
    """The paths of the submodules that run as their own code."""
    nodes = [node for node in part.program.module.graph.nodes if "origin" in node.meta]
    return {fallback_runtime.calls[node.args[0][0]].path for node in nodes if node.meta["origin"].target is OPAQUE}


def assert_alone(
    models: Sequence[nn.Module], *calls: Call | Tensor, grads: bool = True, rate: float = 0.0, copies: bool = True
) -> hf.FusedModule:
    """Fuse ``models``, make the calls, and compare with copies of the members after every one; returns the array.

    Args:
        rate: of the steps that torch's SGD makes of the array and of the members after every call; 0 for none.
        copies: False for models that torch cannot copy, which are called themselves.
    """
    alone = copy.deepcopy(list(models)) if copies else list(models)
    fused = hf.fuse(models)
    trained = (fused, *alone) if rate > 0 else ()
    optimizers = [torch.optim.SGD(module.parameters(), lr=rate, momentum=0.9) for module in trained]
    for k, made in enumerate(calls):
        compare_call(fused, alone, made, f"call {k}", grads=grads)
        if rate > 0:
            for optimizer in optimizers:
                optimizer.step()
            compare_tensors(fused, alone, f"step {k}")
    return fused


def compare_call(
    fused: hf.FusedModule, alone: Sequence[nn.Module], made: Call | Tensor, what: str = "call", *, grads: bool = True
) -> None:
    """Call an array and its members alone, and compare outputs, gradients, parameters and buffers.

    Args:
        what: begins the message of a difference.
    """
    made = made if isinstance(made, Call) else call(made)
    fused.zero_grad()
    for model in alone:
        model.zero_grad()
    ours = fused(*made.args, **made.kwargs)
    rows = map(made.of_member, range(len(alone)))
    theirs = [model(*args, **kwargs) for model, (args, kwargs) in zip(alone, rows, strict=True)]
    _compare_outputs(ours, theirs, what)
    if grads:
        for outputs in (ours, *theirs):
            _backward(outputs)
        compare_gradients(fused, alone, what)
    compare_tensors(fused, alone, what)


def assert_trained_alone(
    models: Sequence[nn.Module],
    loss: Callable[..., Tensor],
    batches: Iterable[tuple[Any, Any]],
    *,
    optimizer: str = "SGD",
    lr: float = 0.1,
    compile: bool = False,
    **options: Any,
) -> Any:
    """Train an array of ``models`` by `hf.train_step`, and the models alone, and compare every step; returns the step.

    Args:
        options: of the optimizer.
    """
    fused, make = hf.fuse(models), partial(getattr(torch.optim, optimizer), **options)
    opt = getattr(hf.optim, optimizer)(fused.parameters(), lr=lr, **options)
    step = hf.train_step(fused, loss, opt, compile=compile)
    members = [Member(model, make, loss, Own(lr)) for model in models]
    for number, batch in enumerate(batches):
        args = [call(*batch).of_member(row)[0] for row in range(len(models))]
        expected = [member.call(*own)[0] for member, own in zip(members, args, strict=True)]
        close(step(*batch), expected, f"losses of step {number}")
        compare_gradients(fused, models, f"step {number}")
        compare_tensors(fused, models, f"step {number}")
    return step


def compare_tensors(fused: hf.FusedModule, alone: Sequence[nn.Module], what: str) -> None:
    """Compare parameters and buffers."""
    for name, parameter in fused.named_parameters():
        close(parameter, [model.get_parameter(name) for model in alone], f"{what}: parameter {name}")
    for name, buffer in fused.named_buffers():
        close(buffer, [model.get_buffer(name) for model in alone], f"{what}: buffer {name}")


def close(stack: Tensor, rows: Sequence[Tensor], what: str) -> None:
    """``stack [B, ...]`` or, for a tensor that is one for all members, ``[...]``, against the members' own."""
    expected = torch.stack(list(rows)) if stack.dim() > rows[0].dim() else rows[0]
    assert stack.dtype == expected.dtype, what
    torch.testing.assert_close(
        stack, expected, rtol=RELATIVE, atol=ABSOLUTE, equal_nan=True, msg=lambda m: f"{what}: {m}"
    )


def _compare_outputs(ours: Any, theirs: Sequence[Any], what: str) -> None:
    leaves, spec = pytree.tree_flatten(ours)
    rows, specs = zip(*(pytree.tree_flatten(t) for t in theirs), strict=True)
    assert all(s == spec for s in specs), what
    for leaf, row in zip(leaves, zip(*rows, strict=True), strict=True):
        if isinstance(leaf, Tensor):
            close(leaf, row, f"{what}: output")
            assert leaf.requires_grad == any(r.requires_grad for r in row), f"{what}: requires_grad"
        else:
            assert all(type(leaf) is type(r) and leaf == r for r in row), what


def _backward(outputs: Any) -> None:
    leaves = [leaf for leaf in pytree.tree_leaves(outputs) if isinstance(leaf, Tensor)]
    parts = [(leaf.abs().sin() * (k + 1)).sum() for k, leaf in enumerate(leaves) if leaf.requires_grad]
    if parts:
        torch.stack(parts).sum().backward()


def compare_gradients(fused: hf.FusedModule, alone: Sequence[nn.Module], what: str) -> None:
    for name, parameter in fused.named_parameters():
        rows = [model.get_parameter(name).grad for model in alone]
        present = [row for row in rows if row is not None]
        if not present:
            assert parameter.grad is None or not parameter.grad.any(), f"{what}: gradient of {name}"
            continue
        assert parameter.grad is not None, f"{what}: no gradient of {name}"
        filled = [torch.zeros_like(present[0]) if row is None else row for row in rows]
        close(parameter.grad, filled, f"{what}: gradient of {name}")


@dataclass
class Own:
    """What a member has of its own besides its model."""

    lr: float = 0.01
    schedule: Callable[[Any], Any] | None = None
    accumulate: int = 1
    norm: float = math.inf
    value: float = math.inf


class Member:
    """A model that plain torch trains alone.

    Args:
        make: makes its optimizer from parameters; the rate of ``own`` is set afterwards.
        scale: the first scale of a GradScaler; None without one.
        nonfinite: what becomes of an update that is not finite: "freeze", "raise" (undone, as with "freeze", but the
            member is free to go on) or "ignore".
        trained: the names of the optimizer's parameters; by default those that require a gradient.
    """

    def __init__(
        self,
        model: nn.Module,
        make: Callable[[Any], Any],
        loss: Callable[..., Tensor],
        own: Own,
        *,
        scale: float | None = None,
        nonfinite: str = "ignore",
        trained: Sequence[str] | None = None,
    ) -> None:
        self.model, self.make, self.loss, self.own = model, make, loss, own
        self.scale, self.nonfinite = scale, nonfinite
        self.names = [n for n, p in model.named_parameters() if p.requires_grad] if trained is None else trained
        self.trained = [model.get_parameter(name) for name in self.names]
        self.opt = make(self.trained)
        for group in self.opt.param_groups:
            group["lr"] = own.lr
        self.scheduler = None if own.schedule is None else own.schedule(self.opt)
        self.scaler = None if scale is None else torch.amp.GradScaler("cpu", init_scale=scale, growth_interval=3)
        self.frozen = False
        self.age = self.calls = 0
        self.before: dict[str, Tensor] = {}
        self.kind: tuple[int, int] = 0, 0

    def twin(self, copied: Callable[[nn.Module], nn.Module]) -> Member:
        """Return a member that goes on as this one would; ``copied`` copies its model."""
        options: dict[str, Any] = {"scale": self.scale, "nonfinite": self.nonfinite, "trained": self.names}
        twin = Member(copied(self.model), self.make, self.loss, self.own, **options)
        state = copy.deepcopy(self.opt.state_dict())
        twin.opt.load_state_dict(state)
        for ours, theirs in zip(self.trained, twin.trained, strict=True):
            theirs.grad = None if ours.grad is None else ours.grad.clone()
            # Loading makes tensors of NAdam float64.
            twin.opt.state[theirs] = copy.deepcopy(self.opt.state.get(ours, {}))
        for mine, other in ((self.scheduler, twin.scheduler), (self.scaler, twin.scaler)):
            if mine is not None and other is not None and mine.state_dict():
                other.load_state_dict(copy.deepcopy(mine.state_dict()))
        twin.kind = self.kind
        twin.frozen, twin.age, twin.calls = self.frozen, self.age, self.calls
        twin.before = {name: tensor.clone() for name, tensor in self.before.items()}
        return twin

    def call(self, inputs: Any, target: Any, weights: Tensor | None = None) -> tuple[Tensor, bool]:
        """Make a call of a training step; return its loss, and whether an update was made."""
        if self.calls == 0:
            self.opt.zero_grad()
            self.model.zero_grad()
        self.before = {name: buffer.clone() for name, buffer in self.model.named_buffers()}
        output = self.model(inputs)
        if weights is None:
            value = self.loss(output, target)
        else:
            value = (self.loss(output, target, reduction="none") * weights).sum() / weights.sum()
        if self.nonfinite != "ignore" and not bool(value.detach().isfinite()):
            self.undo_call()
            return value.detach(), False
        part = value / self.own.accumulate
        (part if self.scaler is None else self.scaler.scale(part)).backward()
        self.calls += 1
        updates = self.calls == self.own.accumulate
        if updates:
            self.update()
        return value.detach(), updates

    def update(self) -> None:
        """Clip the gradients and step; schedules are stepped by the caller."""
        if self.scaler is not None:
            self.scaler.unscale_(self.opt)
        finite = all(bool(p.grad.isfinite().all()) for p in self.trained if p.grad is not None)
        if self.nonfinite != "ignore" and self.scaler is None and not finite:
            self.undo_call()
            return
        if self.own.value < math.inf:
            nn.utils.clip_grad_value_(self.trained, self.own.value)
        if self.own.norm < math.inf:
            nn.utils.clip_grad_norm_(self.trained, self.own.norm)
        if self.scaler is None:
            self.opt.step()
        else:
            self.scaler.step(self.opt)
            self.scaler.update()
        self.age += finite or self.scaler is None
        self.calls = 0

    def undo_call(self) -> None:
        """Undo a call that was not finite, and the update that it is part of."""
        self.frozen = self.nonfinite == "freeze"
        with torch.no_grad():
            for name, buffer in self.model.named_buffers():
                if name in self.before:
                    buffer.copy_(self.before[name])
        self.calls = 0

    def epoch(self, loader: Iterable[Any], *, schedules_steps: bool = False) -> Tensor:
        """Train an epoch, whose last update may be of fewer calls; return the losses of its calls."""
        losses = []
        for inputs, target in loader:
            value, updated = self.call(inputs, target)
            losses.append(value)
            if updated and schedules_steps:
                self.step_schedule(float(value))
        if self.calls:
            self.update()
            if schedules_steps:
                self.step_schedule(float(value))
        return torch.stack(losses)

    def judged(self, loader: Iterable[Any], metric: Callable[..., Any] | None = None) -> float:
        """Return the loss, or a metric, over all samples of a loader, in eval mode."""
        self.model.eval()
        with torch.no_grad():
            outputs, targets = zip(*((self.model(x), y) for x, y in loader), strict=True)
        self.model.train()
        output = pytree.tree_map(lambda *parts: torch.cat(parts), *outputs)
        return float((metric or self.loss)(output, torch.cat(targets)))

    def step_schedule(self, metric: float) -> None:
        if isinstance(self.scheduler, lr_scheduler.ReduceLROnPlateau):
            self.scheduler.step(metric)
        elif self.scheduler is not None:
            self.scheduler.step()
