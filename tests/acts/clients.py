"""Trainings by hfusion that acts are done to: each holds members by row, and says what it can do."""

from __future__ import annotations

import copy
import pickle
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch.optim import lr_scheduler as ls

import hfusion as hf
from hfusion.population import group_step
from tests.acts.zoo import Entry, loss, own_copy
from tests.alone import Own
from tests.trained import machine, planned

SCALE = 2.0**40
# No eps is so small that rounding of a gradient that is zero in truth becomes a step, or that steps amplify rounding.
OPTIMIZERS: dict[str, tuple[str, dict[str, Any]]] = {
    "sgd": ("SGD", {"momentum": 0.9, "nesterov": True, "weight_decay": 0.01}),
    "adamw": ("AdamW", {"weight_decay": 0.1, "eps": 1e-3}),
    "amsgrad": ("Adam", {"amsgrad": True, "betas": (0.8, 0.9), "eps": 1e-3, "weight_decay": 0.01}),
    "adagrad": ("Adagrad", {"lr_decay": 0.1, "initial_accumulator_value": 0.1, "eps": 1e-3}),
    "rmsprop": ("RMSprop", {"momentum": 0.5, "eps": 0.1, "weight_decay": 0.01}),
    "nadam": ("NAdam", {"momentum_decay": 0.01, "eps": 1e-3}),
    "radam": ("RAdam", {"eps": 1e-3, "weight_decay": 0.01}),
    "adadelta": ("Adadelta", {"rho": 0.8, "eps": 1e-3}),
    "adamax": ("Adamax", {"eps": 1e-3}),
}


def two_parts(optimizer: Any) -> Any:
    return ls.SequentialLR(
        optimizer, [ls.LinearLR(optimizer, 0.5, total_iters=2), ls.ExponentialLR(optimizer, 0.9)], [3]
    )


# Functions that pickle finds by name.
SCHEDULES: list[Callable[[Any], Any]] = [
    partial(ls.StepLR, step_size=3, gamma=0.5),
    partial(ls.CosineAnnealingWarmRestarts, T_0=4),
    partial(ls.ReduceLROnPlateau, factor=0.5, patience=1),
    partial(ls.OneCycleLR, max_lr=0.05, total_steps=4000, cycle_momentum=False),
    two_parts,
]


def make_optimizer(name: str, lr: Any, alone: bool, params: Any) -> Any:
    kind, options = OPTIMIZERS[name]
    return getattr(torch.optim if alone else hf.optim, kind)(params, lr=lr, **options)


@dataclass(frozen=True)
class Setup:
    """How all members of a walk are trained; what differs between members is in their `Own`."""

    entry: Entry
    optimizer: str = "adamw"
    scheduled: bool = False
    scaled: bool = False
    clips_norm: bool = False
    clips_value: bool = False
    accumulate: tuple[int, ...] = (1,)
    nonfinite: str = "freeze"

    def __str__(self) -> str:
        names = ("scheduled", "scaled", "clips_norm", "clips_value")
        on = [name for name in names if getattr(self, name)]
        return ", ".join([str(self.entry), self.optimizer, *on, f"accumulate {self.accumulate}", self.nonfinite])

    def maker(self, lr: Any, *, alone: bool = False) -> Callable[[Any], Any]:
        """Return a function, which pickle knows, that makes the optimizer from parameters."""
        return partial(make_optimizer, self.optimizer, lr, alone)


@dataclass
class Batch:
    """A minibatch as an array takes it, and of each row that steps.

    Attributes:
        rows: the rows that step; None for all.
        parts: input and target of each of these rows.
        weights: of samples, ``[N]`` or one vector for each of these rows.
    """

    inputs: Any
    target: Any
    parts: list[tuple[Tensor, Tensor]]
    rows: list[int] | None = None
    weights: Any = None


ROWS = {"stop", "start", "copy", "put", "permute"}
NUMBERS = {"rate", "decay"}
COPIES = {"deepcopy", "pickle", "save"}
MEMBER = {"write", "mode", "hook", "freeze one"}
ALL_ROWS = {"freeze", "cast", "state dict", "convert"}


class Client:
    """A training of members by row."""

    acts: frozenset[str] = frozenset()
    moves_clocks = False  # whether members may be in the middle of updates of their own
    plain_depths: Sequence[int] = (0,)  # classes of the members in turn: several make groups

    def __init__(self, setup: Setup, models: Sequence[nn.Module], owns: Sequence[Own]) -> None:
        raise NotImplementedError

    def calls(self, batches: Sequence[Batch]) -> list[Tensor]:
        """Train on batches, and return the losses of each, ``[rows]``."""
        raise NotImplementedError

    def state(self, row: int) -> dict[str, Tensor]:
        raise NotImplementedError

    def rates(self) -> list[float]:
        raise NotImplementedError

    def scales(self) -> list[float] | None:
        """Return the loss scale of each row; None where nothing is scaled, or by several scalers."""
        return None

    def close(self) -> None:
        """End processes."""


class Loop(Client):
    """The loop that people write around `hf.fuse`."""

    acts = frozenset({"step", "size", "poison", "overflow", "evaluate"} | ROWS | NUMBERS | COPIES | MEMBER | ALL_ROWS)
    ages: list[int] | None = None

    def __init__(self, setup: Setup, models: Sequence[nn.Module], owns: Sequence[Own]) -> None:
        self.setup, self.owns, self.done = setup, list(owns), 0
        self.fused = hf.fuse([own_copy(model) for model in models])
        self.opt = setup.maker([own.lr for own in owns])(self.fused.parameters())
        self.scheduler = None
        if setup.scheduled:
            self.scheduler = hf.optim.lr_scheduler.PerMember(self.opt, [own.schedule for own in owns])  # type: ignore[list-item]
        self.scaler = hf.optim.GradScaler(init_scale=SCALE, growth_interval=3) if setup.scaled else None
        self.begin()

    def begin(self) -> None:
        """Make what holds no state of its own, for the present array and optimizer."""
        self.loss = hf.per_model(loss)

    def calls(self, batches: Sequence[Batch]) -> list[Tensor]:
        return [self.call(batch.inputs, batch.target) for batch in batches]

    def call(self, inputs: Any, target: Any) -> Tensor:
        if self.done == 0:
            self.opt.zero_grad()
            self.fused.zero_grad()
        losses = self.loss(self.fused(inputs), target)
        parts = losses / self.setup.accumulate[0]
        (parts if self.scaler is None else self.scaler.scale(parts)).sum().backward()
        self.done += 1
        if self.done == self.setup.accumulate[0]:
            self.done = 0
            if self.scaler is None:
                self.clip()
                self.opt.step()
            else:
                self.scaler.unscale_(self.opt)
                self.clip()
                self.scaler.step(self.opt)
                self.scaler.update()
            if self.scheduler is not None:
                self.scheduler.step(metrics=losses.detach())
        return losses.detach()

    def clip(self, *_: Any) -> None:
        if self.setup.clips_value:
            hf.optim.clip_grad_value_(self.fused.parameters(), [own.value for own in self.owns])
        if self.setup.clips_norm:
            hf.optim.clip_grad_norm_(self.fused.parameters(), [own.norm for own in self.owns])

    def state(self, row: int) -> dict[str, Tensor]:
        return {
            name: tensor[row] if tensor.dim() > self.template[name].dim() else tensor
            for name, tensor in self.fused.state_dict().items()
        }

    @cached_property
    def template(self) -> dict[str, Tensor]:
        return self.setup.entry.model(0).state_dict()

    def grads(self, row: int) -> dict[str, Tensor | None]:
        return {
            name: None if p.grad is None else p.grad[row] if p.dim() > self.template[name].dim() else p.grad
            for name, p in self.fused.named_parameters()
        }

    def scales(self) -> list[float] | None:
        return None if self.scaler is None else self.scaler.get_scale().tolist()

    def rates(self) -> list[float]:
        lr = self.opt.param_groups[0]["lr"]
        return lr.tolist() if isinstance(lr, Tensor) else [lr] * len(self.fused)

    def outputs(self, inputs: Any) -> Any:
        self.fused.eval()
        with torch.no_grad():
            outputs = self.fused(inputs)
        self.fused.train()
        return outputs

    def member(self, row: int) -> nn.Module:
        return self.fused[row]

    def set_number(self, name: str, row: int, value: float) -> None:
        group = self.opt.param_groups[0]
        if not isinstance(group[name], Tensor):
            group[name] = self.number(name)
        group[name][row] = value

    def number(self, name: str) -> list[float]:
        value = self.opt.param_groups[0][name]
        return value.tolist() if isinstance(value, Tensor) else [value] * len(self.fused)

    def keep(self, rows: list[int]) -> None:
        self.owns = [self.owns[row] for row in rows]
        for part in (self.fused, self.opt, self.scheduler, self.scaler):
            if part is not None:
                part.keep(rows)

    def copy(self, src: list[int], dst: list[int]) -> None:
        owns = [self.owns[row] for row in src]
        for part in (self.fused, self.opt, self.scheduler, self.scaler):
            if part is not None:
                part.copy(src, dst)
        for row, own in zip(dst, owns, strict=True):
            self.owns[row] = own

    @property
    def numbers(self) -> dict[str, Any]:
        """What members join with that others may have changed."""
        options = OPTIMIZERS[self.setup.optimizer][1]
        return {name: options[name] for name in ("weight_decay", "eps") if name in options}

    def append(self, model: nn.Module, own: Own) -> None:
        self.fused.append([own_copy(model)])
        self.opt.append(1, lr=own.lr, **self.numbers)
        if self.scheduler is not None:
            self.scheduler.append(1, own.schedule)
        if self.scaler is not None:
            self.scaler.append(1)
        self.owns.append(own)

    def put(self, row: int, model: nn.Module, own: Own) -> None:
        self.fused.put(row, own_copy(model))
        self.opt.restart(row, lr=own.lr, **self.numbers)
        if self.scheduler is not None:
            self.scheduler.restart([row], own.schedule)
        if self.scaler is not None:
            self.scaler.restart(row)
        self.owns[row] = own

    def convert(self) -> None:
        """Take the array apart into models with optimizers of torch, and fuse these."""
        models, states = self.fused.unfuse(), self.opt.unfuse()
        opts = [self.setup.maker(0.1, alone=True)(model.parameters()) for model in models]
        for opt, state in zip(opts, states, strict=True):
            opt.load_state_dict(state)
            for index, param in enumerate(opt.param_groups[0]["params"]):
                # Loading makes tensors of NAdam float64.
                opt.state[param].update(state["state"].get(index, {}))
        rates = self.rates()
        self.fused = hf.fuse(models)
        old, self.opt = self.scheduler, hf.optim.fuse(opts, self.fused)
        if old is not None:
            self.scheduler = hf.optim.lr_scheduler.PerMember(self.opt, [own.schedule for own in self.owns])  # type: ignore[list-item]
            self.scheduler.load_state_dict(old.state_dict())
            for row, rate in enumerate(rates):
                self.set_number("lr", row, rate)
        self.begin()

    def state_dict(self) -> None:
        """Go back to a state that was kept in memory, by dicts."""
        parts = [part for part in (self.fused, self.opt, self.scheduler, self.scaler) if part is not None]
        for part in parts:
            part.load_state_dict(copy.deepcopy(part.state_dict()))

    def deepcopy(self) -> None:
        parts = copy.deepcopy((self.fused, self.opt, self.scheduler, self.scaler))
        self.fused, self.opt, self.scheduler, self.scaler = parts
        self.begin()

    def pickle(self) -> None:
        parts = pickle.loads(pickle.dumps((self.fused, self.opt, self.scheduler, self.scaler)))
        self.fused, self.opt, self.scheduler, self.scaler = parts
        self.begin()

    def save(self, fresh: Callable[[int], nn.Module]) -> None:
        """Save, and load into a training that was made anew."""
        with tempfile.TemporaryDirectory() as folder:
            more = {"scheduler": self.scheduler, "scaler": self.scaler}
            hf.save(folder, self.fused, self.opt, **more)
            models = [fresh(row) for row in range(len(self.fused))]
            type(self).__init__(self, self.setup, models, self.owns)
            more = {"scheduler": self.scheduler, "scaler": self.scaler}
            hf.load(folder, self.fused, self.opt, **more)


class Step(Loop):
    """`hf.train_step`, eager."""

    compile: Any = False
    acts = Loop.acts - {"overflow"}

    def begin(self) -> None:
        self.opt.register_step_pre_hook(self.clip)
        self.step = hf.train_step(self.fused, loss, self.opt, compile=self.compile)

    def call(self, inputs: Any, target: Any) -> Tensor:
        losses = self.step(inputs, target)
        if self.scheduler is not None:
            self.scheduler.step(metrics=losses)
        return losses

    def deepcopy(self) -> None:
        self.opt._optimizer_step_pre_hooks.clear()
        super().deepcopy()

    def pickle(self) -> None:
        self.opt._optimizer_step_pre_hooks.clear()
        super().pickle()


class Resident(Loop):
    """`hf.train` of an array that stays on its device; each call trains one epoch."""

    acts = Loop.acts - {"poison", "overflow", "pickle", "mode", "hook", "freeze one"} | {"leave", "interrupt", "best"}

    def begin(self) -> None:
        self.machine = machine()

    def task(self, loader: Any, **more: Any) -> hf.Task:
        return hf.Task(
            self.fused,
            loss,
            self.opt,
            loader,
            clip_norm=[own.norm for own in self.owns] if self.setup.clips_norm else None,
            accumulate=self.setup.accumulate[0],
            scheduler=self.scheduler,
            scheduler_interval="step",
            compile=False,
            seed=0,
            **more,
        )

    def train(self, task: hf.Task, **more: Any) -> Any:
        return hf.train([task], self.machine, plan=self.plan(task), **more)["task"]

    def plan(self, task: hf.Task) -> Any:
        return None

    def calls(self, batches: Sequence[Batch]) -> list[Tensor]:
        return list(self.train(self.task([(batch.inputs, batch.target) for batch in batches])).losses)


class Spilled(Resident):
    """`hf.train` of an array in three shards that do not stay on the device."""

    def plan(self, task: hf.Task) -> Any:
        return planned([task], self.machine, [3], [False])


class Alike(Client):
    """`hf.Population` of models that share an array."""

    acts = frozenset(
        {"step", "size", "some", "weights", "poison", "thaw", "overflow", "evaluate", "best", "average", "compact"}
        | {"grow", "write"} | ROWS - {"permute"} | NUMBERS | COPIES
    )  # fmt: skip
    moves_clocks = True
    processes = 1

    def __init__(self, setup: Setup, models: Sequence[nn.Module], owns: Sequence[Own]) -> None:
        self.setup, self.names = setup, len(models)
        tags = [f"m{row}" for row in range(len(models))]
        self.owns = dict(zip(tags, owns, strict=True))
        self.patches = ExitStack()
        if self.processes > 1:
            # Members leave at every step.
            self.patches.enter_context(mock.patch.object(group_step, "_QUIET_STEPS", 0))
        self.pop = hf.Population([own_copy(model) for model in models], **self.given(tags, owns), tags=tags)

    def given(self, tags: Sequence[str | None], owns: Sequence[Own]) -> dict[str, Any]:
        setup, rates = self.setup, [own.lr for own in owns]
        return {
            "optimizer": setup.maker(rates[0] if len(set(rates)) == 1 else rates),
            "loss": loss,
            "scheduler": [own.schedule for own in owns] if setup.scheduled else None,
            "scaler": hf.optim.GradScaler(init_scale=SCALE, growth_interval=3) if setup.scaled else None,
            "clip_norm": [own.norm for own in owns] if setup.clips_norm else None,
            "clip_value": [own.value for own in owns] if setup.clips_value else None,
            "accumulate": [own.accumulate for own in owns],
            "on_nonfinite": setup.nonfinite,
            "compile": False,
            "processes": self.processes,
        }

    def calls(self, batches: Sequence[Batch]) -> list[Tensor]:
        found = []
        for batch in batches:
            ages = self.pop.ages.clone() if self.setup.scheduled else None
            found.append(self.pop.step(batch.inputs, batch.target, rows=batch.rows, weights=batch.weights))
            if ages is not None and self.pop.scheduler is not None:
                updated: list[int] = (self.pop.ages > ages).nonzero().reshape(-1).tolist()
                self.pop.scheduler.step(metrics=found[-1], rows=updated)
        return found

    def state(self, row: int) -> dict[str, Tensor]:
        model = self.pop.models[row]
        assert model is not None
        return model.state_dict()

    def rates(self) -> list[float]:
        return self.number("lr")

    def scales(self) -> list[float] | None:
        # A population of several groups has one for each.
        scaler = getattr(self.pop, "scaler", None)
        return None if scaler is None else scaler.get_scale().tolist()

    def number(self, name: str) -> list[float]:
        return self.pop.hparams[name].tolist()

    def set_number(self, name: str, row: int, value: float) -> None:
        self.pop.hparams[name][row] = value

    @property
    def ages(self) -> list[int]:
        return self.pop.ages.tolist()

    def member(self, row: int) -> nn.Module:
        model = self.pop.models[row]
        assert model is not None
        return model

    def start(self, row: int | None, model: nn.Module, own: Own) -> int:
        more: dict[str, Any] = {"lr": own.lr, "accumulate": own.accumulate}
        if self.setup.scheduled:
            more["scheduler"] = own.schedule
        if self.setup.clips_norm:
            more["clip_norm"] = own.norm
        if self.setup.clips_value:
            more["clip_value"] = own.value
        tag = f"m{self.names}"
        self.names, self.owns[tag] = self.names + 1, own
        place: int = self.pop.start(row, own_copy(model), tag=tag, **more)
        return place

    def deepcopy(self) -> None:
        self.pop = copy.deepcopy(self.pop)

    def pickle(self) -> None:
        self.pop = pickle.loads(pickle.dumps(self.pop))

    def save(self, fresh: Callable[[int], nn.Module], rows: Sequence[int], owns: Sequence[Own], every: bool) -> None:
        """Save, and load all members, or those in ``rows``, in this order."""
        with tempfile.TemporaryDirectory() as folder:
            self.pop.save(folder)
            tags = self.pop.tags
            given = self.given(tags, owns) | {"optimizer": self.setup.maker(0.5)}
            del given["accumulate"]
            names = None if every else [tags[row] for row in rows]
            self.pop = hf.Population.load(folder, lambda tag: fresh(tags.index(tag)), tags=names, **given)  # type: ignore[arg-type]

    def close(self) -> None:
        self.patches.close()


class Unlike(Alike):
    """`hf.Population` of an array of two and of two plain models."""

    plain_depths = (0, 0, 1, 2)


class Processes(Unlike):
    """The same with plain models only, divided between this process and a fork."""

    plain_depths = (0, 1, 2, 3)
    processes = 2


CLIENTS: dict[str, type[Client]] = {
    kind.__name__.lower(): kind for kind in (Loop, Step, Resident, Spilled, Alike, Unlike, Processes)
}
