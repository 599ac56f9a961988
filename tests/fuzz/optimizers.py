"""Random optimizers against members alone: ``python -m tests.fuzz.optimizers --seconds 600``.

Param groups that were given options of their own, while members start, stop, are copied, saved and written to; the same
under the spaces of sweeps, also with population based training; and saves with master weights, resumed bit for bit.
"""

from __future__ import annotations

import argparse
import copy
import random
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf

NUMBERS: dict[str, Callable[[random.Random], Any]] = {
    "lr": lambda draw: draw.uniform(1e-3, 0.05),
    "weight_decay": lambda draw: draw.choice([0.0, draw.uniform(0.0, 0.5)]),
    "eps": lambda draw: draw.uniform(1e-6, 1e-2),
    "momentum": lambda draw: draw.uniform(0.1, 0.9),
    "betas": lambda draw: (draw.uniform(0.5, 0.95), draw.uniform(0.9, 0.99)),
    "alpha": lambda draw: draw.uniform(0.5, 0.99),
    "lr_decay": lambda draw: draw.uniform(0.0, 0.1),
    "momentum_decay": lambda draw: draw.uniform(1e-3, 1e-2),
    "rho": lambda draw: draw.uniform(0.5, 0.95),
}
FLAGS = ("amsgrad", "nesterov", "centered", "decoupled_weight_decay")
KINDS: dict[str, tuple[str, ...]] = {
    "SGD": ("lr", "momentum", "weight_decay", "nesterov"),
    "Adam": ("lr", "betas", "eps", "weight_decay", "amsgrad"),
    "AdamW": ("lr", "betas", "eps", "weight_decay", "amsgrad"),
    "Adadelta": ("lr", "rho", "eps", "weight_decay"),
    "Adagrad": ("lr", "lr_decay", "weight_decay"),
    "Adamax": ("lr", "betas", "weight_decay"),
    "NAdam": ("lr", "betas", "momentum_decay", "weight_decay", "decoupled_weight_decay"),
    "RAdam": ("lr", "betas", "weight_decay", "decoupled_weight_decay"),
    "RMSprop": ("lr", "alpha", "eps", "momentum", "weight_decay", "centered"),
}


class Net(nn.Module):
    def __init__(self, width: int = 5) -> None:
        super().__init__()
        self.body, self.norm, self.head = nn.Linear(4, width), nn.LayerNorm(width), nn.Linear(width, 2)
        self.scale = nn.Parameter(torch.rand(()))
        self.double()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.body(x).tanh())) * self.scale


class Rule:
    """Options of param groups by the first part of a parameter's name, and whether it is a vector."""

    def __init__(self, draw: random.Random, names: tuple[str, ...]) -> None:
        self.options: dict[tuple[str, bool], dict[str, Any]] = {}
        for key in [(part, vector) for part in ("body", "norm", "head", "scale") for vector in (False, True)]:
            chosen = [name for name in names if draw.random() < 0.3]
            self.options[key] = {name: value(draw, name) for name in chosen}
        self._fit(names)

    def _fit(self, names: tuple[str, ...]) -> None:
        for options in self.options.values():
            if options.get("nesterov"):
                options["momentum"] = 0.5

    def __call__(self, name: str, param: Any) -> dict[str, Any]:
        # Sweeps try optimizers on parameters of other names.
        return dict(self.options.get((name.split(".")[0], param.dim() < 2), {}))

    def everywhere(self, model: nn.Module, key: str) -> bool:
        return all(key in self(name, param) for name, param in model.named_parameters())


def value(draw: random.Random, name: str) -> Any:
    return draw.random() < 0.5 if name in FLAGS else NUMBERS[name](draw)


def alone(kind: str, model: nn.Module, rule: Rule, defaults: Mapping[str, Any]) -> torch.optim.Optimizer:
    groups = [{"params": [param], **rule(name, param)} for name, param in model.named_parameters()]
    optimizer: torch.optim.Optimizer = getattr(torch.optim, kind)(groups, **defaults)
    return optimizer


def update(model: nn.Module, optimizer: torch.optim.Optimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    F.mse_loss(model(x), y).backward()
    optimizer.step()


def check(condition: bool, words: str) -> None:
    if not condition:
        raise AssertionError(words)


class Population:
    """A population, and each of its members alone by tag."""

    def __init__(self, seed: int) -> None:
        torch.manual_seed(seed)
        self.draw = draw = random.Random(seed)
        self.kind = draw.choice(list(KINDS))
        names = KINDS[self.kind]
        self.rule = Rule(draw, names)
        flags = {name: value(draw, name) for name in names if name in FLAGS and name != "nesterov"}
        self.numbers = [name for name in names if name in NUMBERS]
        self.defaults = flags | {"lr": 0.01} | ({"momentum": 0.5} if "momentum" in names else {})
        widths = draw.choice([[5], [5, 5, 5], [5, 6, 6]])
        rates = [NUMBERS["lr"](draw) for _ in widths] if draw.random() < 0.5 else None
        self.options: dict[str, Any] = {
            "optimizer": self.make(self.defaults | ({"lr": rates} if rates else {})),
            "loss": F.mse_loss,
            "compile": False,
        }
        models = [Net(width) for width in widths]
        self.each = rates is not None
        self.alone: dict[str, tuple[nn.Module, torch.optim.Optimizer]] = {}
        for row, model in enumerate(copy.deepcopy(models)):
            defaults = self.defaults | ({"lr": rates[row]} if rates else {})
            self.alone[f"member {row}"] = model, alone(self.kind, model, self.rule, defaults)
        self.pop = hf.Population(models, **self.options)
        self.log: list[str] = [f"{self.kind} {self.defaults} {widths} {rates} {self.rule.options}"]

    def make(self, defaults: Mapping[str, Any]) -> Callable[[Any], Any]:
        kind, rule = getattr(hf.optim, self.kind), self.rule
        return lambda params: kind(hf.optim.groups(params, rule), **defaults)

    def tags(self) -> list[str]:
        return [tag for tag in self.pop.tags if tag is not None]

    def step(self) -> None:
        x, y = torch.randn(6, 4).double(), torch.randn(6, 2).double()
        self.pop.step(x, y)
        for model, optimizer in self.alone.values():
            update(model, optimizer, x, y)

    def start(self) -> None:
        chosen = {name: value(self.draw, name) for name in self.numbers if self.draw.random() < 0.4}
        model = Net(self.draw.choice([5, 5, 6]))
        needed = self.each and not self.rule.everywhere(model, "lr")
        if needed:
            chosen.setdefault("lr", value(self.draw, "lr"))
        row = self.draw.choice([None, *[row for row, tag in enumerate(self.pop.tags) if tag is None]])
        other = copy.deepcopy(model)
        refused = any(self.rule.everywhere(model, name) for name in chosen)
        try:
            row = self.pop.start(row, model, **chosen)
        except ValueError as error:
            if not (refused and "was given its own" in str(error)):
                raise
            return
        except hf.FusionError as error:
            if "cannot be fused" not in str(error) and "differ" not in str(error):
                raise
            return
        check(not refused, f"start({chosen}) was not refused")
        tag = self.pop.tags[row]
        assert tag is not None
        self.alone[tag] = other, alone(self.kind, other, self.rule, self.defaults | chosen)
        self.log.append(f"start {tag} {chosen}")

    def stop(self) -> None:
        if len(tags := self.tags()) > 1:
            tag = self.draw.choice(tags)
            self.pop.stop(self.pop.row(tag))
            del self.alone[tag]

    def copy(self) -> None:
        source, target = (self.draw.choice(self.tags()) for _ in range(2))
        self.pop.copy(self.pop.row(source), self.pop.row(target))
        self.alone[target] = copy.deepcopy(self.alone[source])

    def write(self) -> None:
        tag, name = self.draw.choice(self.tags()), self.draw.choice(self.numbers)
        new = value(self.draw, name)
        row, (model, optimizer) = self.pop.row(tag), self.alone[tag]
        try:
            vectors = self.pop.hparams[name]
            for vector, number in zip(vectors, new, strict=True) if isinstance(new, tuple) else [(vectors, new)]:
                vector[row] = number
        except ValueError as error:
            check(self.rule.everywhere(model, name) and "was given its own" in str(error), str(error))
            return
        check(not self.rule.everywhere(model, name), f"hparams[{name!r}] was not refused")
        for group, (key, param) in zip(optimizer.param_groups, model.named_parameters(), strict=True):
            if name not in self.rule(key, param):
                group[name] = new
        self.log.append(f"write {tag} {name}={new}")

    def compact(self) -> None:
        self.pop.compact()

    def deepcopy(self) -> None:
        self.pop = copy.deepcopy(self.pop)

    def save(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            self.pop.save(folder)
            models = {tag: copy.deepcopy(model) for tag, (model, _) in self.alone.items()}
            defaults = self.make(self.defaults) if not self.each else self.make(self.defaults | {"lr": 0.01})
            options = self.options | {"optimizer": defaults}
            self.pop = hf.Population.load(folder, lambda tag: models[tag], **options)

    def compare(self) -> None:
        for tag, (model, _) in self.alone.items():
            member = self.pop.models[self.pop.row(tag)]
            assert member is not None
            for (name, actual), expected in zip(member.named_parameters(), model.parameters(), strict=True):
                torch.testing.assert_close(actual, expected, rtol=1e-8, atol=1e-10, msg=lambda m, n=name: f"{n}: {m}")

    def run(self) -> None:
        acts = [self.start, self.start, self.stop, self.copy, self.write, self.compact, self.deepcopy, self.save]
        for _ in range(8):
            act = self.draw.choice(acts)
            self.log.append(act.__name__)
            try:
                act()
                for _ in range(self.draw.choice([1, 2])):
                    self.step()
                self.compare()
            except Exception as error:
                error.add_note("\n".join(self.log))
                raise


def populations(seed: int) -> None:
    Population(seed).run()


def masters(seed: int) -> None:
    """Save a population with master weights, and resume it."""
    torch.manual_seed(seed)
    draw = random.Random(seed)
    kind, dtype = draw.choice(list(KINDS)), draw.choice([torch.bfloat16, torch.float16])
    rule = Rule(draw, tuple(name for name in KINDS[kind] if name not in FLAGS))
    widths = draw.choice([[5], [5, 5, 5], [5, 6, 6]])

    def make(params: Any) -> Any:
        return getattr(hf.optim, kind)(hf.optim.groups(params, rule), lr=0.01, master_weights=True)

    options: dict[str, Any] = {"optimizer": make, "loss": F.mse_loss, "compile": False}
    pop = hf.Population([Net(width).to(dtype) for width in widths], **options)

    def step(*populations: Any) -> None:
        x, y = torch.randn(6, 4).to(dtype), torch.randn(6, 2).to(dtype)
        losses = [population.step(x, y) for population in populations]
        check(all(torch.equal(loss.nan_to_num(), losses[0].nan_to_num()) for loss in losses), "losses differ")

    for _ in range(draw.randrange(4)):
        step(pop)
    if draw.random() < 0.5:
        pop.copy(0, len(widths) - 1)
    if draw.random() < 0.5:
        pop.start(None, Net(5).to(dtype))
    if draw.random() < 0.5 and len(pop) > 1:
        pop.stop(0)
    for _ in range(draw.randrange(3)):
        step(pop)
    with tempfile.TemporaryDirectory() as folder:
        pop.save(folder)
        models = {tag: copy.deepcopy(pop.models[row]) for row, tag in enumerate(pop.tags) if tag is not None}
        loaded = hf.Population.load(folder, lambda tag: models[tag], **options)
    # A member alone in its group is saved as an array, and loaded as a plain model: half precision rounds otherwise.
    if sorted(map(str, pop.groups)) != sorted(map(str, loaded.groups)):
        return
    for _ in range(3):
        step(pop, loaded)
    for tag in models:
        pairs = zip(pop.models[pop.row(tag)].parameters(), loaded.models[loaded.row(tag)].parameters(), strict=True)
        check(
            all(torch.equal(actual.nan_to_num(), expected.nan_to_num()) for actual, expected in pairs), f"{tag} differs"
        )


def sweeps(seed: int) -> None:
    """Compare the trials of a sweep, some with population based training, with torch."""
    import optuna

    torch.manual_seed(seed)
    draw = random.Random(seed)
    kind = draw.choice(list(KINDS))
    names = KINDS[kind]
    rule = Rule(draw, names)
    chosen = [name for name in names if name in NUMBERS and name != "betas" and draw.random() < 0.6] or ["lr"]
    flags = [name for name in names if name in FLAGS and name != "nesterov" and draw.random() < 0.3]
    defaults = {"momentum": 0.5} if "momentum" in names else {}
    pbt = hf.PBT() if draw.random() < 0.5 else None
    inputs = torch.randn(24, 4).double()
    data = TensorDataset(inputs, inputs[:, :2].sin())
    loader, epochs = list(DataLoader(data, batch_size=8)), 3

    def space(trial: Any) -> dict[str, Any]:
        numbers = {name: trial.suggest_float(name, 1e-3, 0.05 if name == "lr" else 0.5) for name in chosen}
        return numbers | {name: trial.suggest_categorical(name, [False, True]) for name in flags}

    def make(params: Any) -> Any:
        return getattr(hf.optim, kind)(hf.optim.groups(params, rule), **defaults)

    try:
        result = hf.sweep(
            Net, space, F.mse_loss, loader, eval_loader=loader, optimizer=make, trials=6, epochs=epochs, pbt=pbt,
            rows=draw.choice([1, 3]) if pbt is None else 6, processes=0, compile=False,
            sampler=optuna.samplers.RandomSampler(seed=seed), pruner=optuna.pruners.NopPruner(),
        )  # fmt: skip
    except ValueError as error:
        unused = [name for name in [*chosen, *flags] if rule.everywhere(Net(), name)]
        check(bool(unused) and "was given its own" in str(error), str(error))
        return
    runs, values = [], []
    for trial in result.trials:
        torch.manual_seed(trial.number)
        params = trial.user_attrs.get("hfusion:suggested", trial.params)
        model = Net()
        runs.append((model, alone(kind, model, rule, defaults | {name: params[name] for name in [*chosen, *flags]})))
        values.append([])
    for epoch in range(epochs):
        for number, (model, optimizer) in enumerate(runs):
            for x, y in loader:
                update(model, optimizer, x, y)
            values[number].append(F.mse_loss(model(inputs), data.tensors[1]).item())
        before = list(runs)
        for number, trial in enumerate(result.trials):
            for event in trial.user_attrs.get("hfusion:copies", []):
                if event["epoch"] == epoch + 1:
                    model, optimizer = copy.deepcopy(before[event["source"]])
                    for group, (name, param) in zip(optimizer.param_groups, model.named_parameters(), strict=True):
                        group.update({key: event["params"][key] for key in chosen} | rule(name, param))
                    runs[number] = model, optimizer
    for trial, expected in zip(result.trials, values, strict=True):
        actual = torch.tensor(list(trial.intermediate_values.values()))
        same = torch.allclose(actual, torch.tensor(expected), rtol=1e-6, atol=1e-9, equal_nan=True)
        check(same, f"{kind} {rule.options} {trial.params}: {actual.tolist()}, alone {expected}")


SCENES: dict[str, Callable[[int], None]] = {"populations": populations, "masters": masters, "sweeps": sweeps}


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.fuzz.optimizers", description=__doc__)
    parser.add_argument("--seconds", type=float, default=600.0)
    parser.add_argument("--seed", type=int, default=None, help="the first seed; a fresh one if it is left out")
    parser.add_argument("--scene", choices=list(SCENES), default=None)
    arguments = parser.parse_args()
    first = time.time_ns() // 1000 % 10**9 if arguments.seed is None else arguments.seed
    print(f"seeds from {first}", flush=True)
    start, seed, faults = time.monotonic(), first, 0
    while time.monotonic() < start + arguments.seconds:
        for name in SCENES if arguments.scene is None else [arguments.scene]:
            try:
                SCENES[name](seed)
            except Exception as error:
                faults += 1
                notes = "\n".join(getattr(error, "__notes__", []))
                print(f"FAULT {name} seed {seed}: {type(error).__name__}: {error}\n{notes}", flush=True)
        seed += 1
    print(f"{seed - first} seeds in {time.monotonic() - start:.0f} s, {faults} faults")
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
