"""Alternatives to hfusion's runtime: shards loaded, computed and evicted by hand, and torch's FSDP2."""

from __future__ import annotations

import copy
import time
import warnings
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, fully_shard

from hfusion.array.per_model import per_model
from hfusion.bench.shard_results import Sample, StepTimes, steady, warm
from hfusion.bench.workload import Unavailable
from hfusion.core.program import Kind, Part, Slot
from hfusion.device.backend import backend
from hfusion.runtime.recipe import Batch
from hfusion.schedule.plan import TaskPlan
from hfusion.tasks.arrange import Arrangement


@dataclass
class _Clock:
    """Seconds of computing and of copying both ways, per step."""

    device: torch.device
    steps: list[dict[str, float]] = field(default_factory=list)

    def begin_step(self) -> None:
        self.steps.append({"compute": 0.0, "into": 0.0, "out": 0.0})

    @contextmanager
    def during(self, lane: str) -> Iterator[None]:
        start = time.perf_counter()
        yield
        backend(self.device).wait()
        self.steps[-1][lane] += time.perf_counter() - start

    @property
    def lanes(self) -> StepTimes:
        """Return the lanes of a steady step."""
        return StepTimes.middle([StepTimes(**step) for step in self.steps[warm(len(self.steps)) :]])


class LoadComputeEvict:
    """The shards of a plan trained one after the other: a shard is copied to the device, computed, copied back.

    Like Hydra without its double buffering: nothing is loaded ahead, and the computing waits for every copy. A shard
    that the plan keeps on the device is kept, so no other one may use its weights. Values at a cut go through the host,
    and a backward recomputes its shard, which is right only for models that draw no random numbers.
    """

    def __init__(self, one: Arrangement, plan: TaskPlan, device: torch.device) -> None:
        self._stream, _ = one.trained(plan, per_model(one.task.loss), [device])
        self._plan = plan
        self._pinned = backend(device).pins
        self._optimizer = one.optimizer
        self._optimizer.initialise()
        self._params = dict(one.array.named_parameters(remove_duplicate=False))
        self._home = {
            name: param.data.pin_memory() if self._pinned else param.data for name, param in self._params.items()
        }
        self._device = device
        self._resident_part: Part | None = None
        self._clock = _Clock(device)
        self._moved = 0

    def run(self) -> Sample:
        """Run all steps of the plan."""
        ends, losses = [], []
        for _ in range(self._plan.steps):
            self._clock.begin_step()
            losses.append(self._step(self._stream.next()).cpu())
            ends.append(time.perf_counter())
        plan, moved = self._plan, self._moved / self._plan.steps
        if self._resident_part is not None:
            self._write_back(self._resident_part, changed=True)
        return Sample(
            steady(ends), torch.stack(losses), self._clock.lanes, plan.device_bytes, moved, shards=len(plan.shards)
        )

    def _step(self, batch: Batch) -> Tensor:
        recipe = self._stream.find(batch)
        assert recipe is not None
        self._constants, parts = recipe.constants, recipe.parts
        host: dict[str, Any] = dict(zip(recipe.inputs, batch.inputs, strict=True))
        data = frozenset(host)
        for part in parts[:-1]:
            keys, inputs = self._load(part, host, state=False)
            with self._clock.during("compute"), torch.no_grad():
                outputs = part.on(self._device)(*keys, *inputs)
            with self._clock.during("out"):
                host |= {name: self._copied(value, "cpu") for name, value in zip(part.gives, outputs, strict=True)}
            self._evict(part, changed=False)
        grads: dict[str, Tensor] = {}
        for part in reversed(parts):
            keys, inputs = self._load(part, host, state=True)
            leaves = {
                name: value.requires_grad_()
                for name, value in zip(part.takes, inputs, strict=True)
                if name not in data and isinstance(value, Tensor) and value.is_floating_point()
            }
            with self._clock.during("compute"):
                outputs = part.on(self._device)(*keys, *inputs)
                if part is parts[-1]:
                    losses = recipe.losses(outputs, batch.target)
                    roots = [(losses.sum(), torch.ones((), device=self._device))]
                else:
                    named = zip(part.gives, outputs, strict=True)
                    roots = [(value, grads.pop(name)) for name, value in named if name in grads and value.requires_grad]
                if roots:
                    self._backward(part, roots, leaves, grads)
            if part is parts[-1] and self._plan.keeps_last_shard:
                self._resident_part = part
            else:
                self._evict(part, changed=True)
        return losses.detach()

    def _backward(
        self, part: Part, roots: list[tuple[Tensor, Tensor]], leaves: dict[str, Tensor], grads: dict[str, Tensor]
    ) -> None:
        """Gradients of the inputs into ``grads``, of the parameters into a step of the optimizer."""
        params = [param for param in self._of(part) if param.requires_grad]
        outputs, seeds = zip(*roots, strict=True)
        gradients = torch.autograd.grad(outputs, [*leaves.values(), *params], seeds, allow_unused=True)
        for name, grad in zip(leaves, gradients, strict=False):
            if grad is not None:
                grads[name] = grads[name] + grad if name in grads else grad
        for param, grad in zip(params, gradients[len(leaves) :], strict=True):
            param.grad = grad
        self._optimizer.step()
        for param in params:
            param.grad = None

    def _of(self, part: Part) -> list[nn.Parameter]:
        return [self._params[slot.name] for slot in part.keys if slot.kind is Kind.PARAMETER]

    def _load(self, part: Part, host: dict[str, Any], *, state: bool) -> tuple[list[Tensor], list[Any]]:
        """The part's own tensors and its inputs, on the device."""
        with self._clock.during("into"):
            if part is not self._resident_part:
                for slot in part.keys:
                    if slot.kind is Kind.PARAMETER:
                        self._params[slot.name].data = self._copied(self._home[slot.name], self._device)
                if state:
                    self._move_state(part, self._device)
            return [self._tensor(slot) for slot in part.keys], [self._copied(host[n], self._device) for n in part.takes]

    def _tensor(self, slot: Slot) -> Tensor:
        if slot.kind is Kind.BUFFER:
            raise Unavailable("this loop moves parameters only, and the model has buffers")
        return self._params[slot.name] if slot.kind is Kind.PARAMETER else self._constants[slot.name].to(self._device)

    def _evict(self, part: Part, *, changed: bool) -> None:
        with self._clock.during("out"):
            self._write_back(part, changed=changed)

    def _write_back(self, part: Part, *, changed: bool) -> None:
        for slot in part.keys:
            if slot.kind is Kind.PARAMETER:
                param, home = self._params[slot.name], self._home[slot.name]
                if changed and param.requires_grad:
                    self._keep(home, param.data)
                param.data = home
        if changed:
            self._move_state(part, torch.device("cpu"))
            self._optimizer.forget()

    def _keep(self, home: Tensor, data: Tensor) -> None:
        home.copy_(data)
        self._moved += home.nbytes

    def _move_state(self, part: Part, device: torch.device) -> None:
        for param in self._of(part):
            entry = self._optimizer.state.get(param, {})
            for kind, value in entry.items():
                if kind not in self._optimizer.numbers and isinstance(value, Tensor):
                    entry[kind] = self._copied(value, device)

    def _copied(self, value: Any, device: torch.device | str) -> Any:
        """A copy on ``device``, also where that is the CPU, whose budget is another memory for all we pretend."""
        if not isinstance(value, Tensor):
            return value
        self._moved += value.nbytes
        pinned = self._pinned and torch.device(device).type == "cpu"
        return torch.empty_like(value, device=device, pin_memory=pinned).copy_(value)


class ComputeOnly(LoadComputeEvict):
    """The same computing with everything on the device: the time of a step if copies took none.

    In the loop above a copy leaves its tensor in the cache of the processor that computes with it next, an advantage
    that loading ahead does not have.
    """

    def __init__(self, one: Arrangement, plan: TaskPlan, device: torch.device) -> None:
        super().__init__(one, plan, device)
        self._home = {name: param.data.to(device) for name, param in self._params.items()}

    def _keep(self, home: Tensor, data: Tensor) -> None:
        """Do nothing, since the data is on the device already."""

    def _copied(self, value: Any, device: torch.device | str) -> Any:
        return value.to(self._device) if isinstance(value, Tensor) else value


@dataclass(frozen=True)
class FsdpWorkload:
    """Members to be trained by FSDP2; ``units(model)`` are the modules that it gathers one at a time."""

    models: Sequence[nn.Module]
    units: Callable[[nn.Module], Sequence[nn.Module]]
    rates: Sequence[float]
    loss: Callable[[Any, Any], Tensor]
    batch: tuple[Tensor, Tensor]


def fsdp_offload(workload: FsdpWorkload, steps: int, device: torch.device) -> Sample:
    """Members one after the other in FSDP2 with parameters, gradients and optimizer on the host.

    https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html; one process, so that nothing is sharded
    but all is offloaded. The host's memory is pinned only where there is an accelerator.

    Raises:
        Unavailable: torch cannot run it; the message is torch's.
    """
    if dist.is_initialized():
        raise Unavailable("a process group exists already")
    try:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group(dist.get_default_backend_for_device(device), store=store, rank=0, world_size=1)
        try:
            with warnings.catch_warnings():
                # Views that models return may not be written to from outside, which no code here does.
                warnings.filterwarnings("ignore", "FSDP2-wrapped module .* returned a view tensor")
                return _fsdp_run(workload, steps, device, CPUOffloadPolicy(pin_memory=backend(device).pins))
        finally:
            dist.destroy_process_group()
    except (RuntimeError, ValueError, NotImplementedError) as error:
        raise Unavailable(f"FSDP2: {str(error).splitlines()[0]}") from error


def _fsdp_run(workload: FsdpWorkload, steps: int, device: torch.device, policy: CPUOffloadPolicy) -> Sample:
    mesh = init_device_mesh(device.type, (1,))
    models = [copy.deepcopy(model) for model in workload.models]
    for model in models:
        for unit in (*workload.units(model), model):
            fully_shard(unit, mesh=mesh, offload_policy=policy)
    optimizers = [torch.optim.Adam(model.parameters(), lr=lr) for model, lr in zip(models, workload.rates, strict=True)]
    inputs, target = (tensor.to(device) for tensor in workload.batch)
    ends, losses = [], []
    for _ in range(steps):
        row = []
        for model, optimizer in zip(models, optimizers, strict=True):
            optimizer.zero_grad()
            loss = workload.loss(model(inputs), target)
            loss.backward()
            optimizer.step()
            row.append(loss.detach().cpu())
        backend(device).wait()
        ends.append(time.perf_counter())
        losses.append(torch.stack(row))
    return Sample(steady(ends), torch.stack(losses))
