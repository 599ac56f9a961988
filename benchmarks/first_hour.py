"""Do short jobs pay? Seven jobs of a first hour with hfusion, each as a whole process, against the plain loop.

A process imports torch and what the job needs, makes its data, trains, and ends. The loop trains one model after
another by torch's fused Adam. hfusion is called as the documentation tells a new user, *cold* with empty cache
folders, and then *warm*, with those that the cold run has left. Both ways must give the same numbers. hfusion is
compiled to bytecode first, as pip does.

    python benchmarks/first_hour.py  # all jobs, three rounds: a quarter of an hour on two cores
    python benchmarks/first_hour.py --jobs seeds,folds --rounds 1 --json rows.json
    python benchmarks/first_hour.py --startup  # processor seconds of imports and of the first steps of a small MLP
"""

from __future__ import annotations

import argparse
import compileall
import copy
import json
import os
import resource
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from functools import partial

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

import hfusion as hf

Numbers = list[float]


def digits(count: int = 1347) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return shuffled images ``[N, 64]`` and labels: ``count`` to train with, the rest to judge by."""
    from sklearn.datasets import load_digits

    x, y = (torch.from_numpy(part) for part in load_digits(return_X_y=True))
    order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))
    x, y = (x / 16).float()[order], y[order]
    return x[:count], y[:count], x[count:], y[count:]


def mlp() -> nn.Module:
    return nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))


def fused_adam(model: nn.Module, lr: float = 1e-3) -> torch.optim.Optimizer:
    return torch.optim.Adam(model.parameters(), lr=lr, fused=True)


def train_epoch(model: nn.Module, optimizer: torch.optim.Optimizer, loss: Callable[..., Tensor], loader) -> Tensor:
    """The plain loop: train for one epoch, and return the last loss."""
    for inputs, target in loader:
        optimizer.zero_grad()
        last = loss(model(inputs), target)
        last.backward()
        optimizer.step()
    return last.detach()


# Twenty seeds of an MLP on the same minibatches.

SEEDS, SEED_EPOCHS = range(20), 24


def seed_batches() -> list[tuple[Tensor, Tensor]]:
    x, y, *_ = digits()
    generator = torch.Generator().manual_seed(1)
    rows = [part for _ in range(SEED_EPOCHS) for part in torch.randperm(len(x), generator=generator).split(32)]
    return [(x[part], y[part]) for part in rows]


def seeds_loop() -> Numbers:
    batches, losses = seed_batches(), []
    for seed in SEEDS:
        torch.manual_seed(seed)
        model = mlp()
        losses.append(train_epoch(model, fused_adam(model), F.cross_entropy, batches).item())
    return losses


def seeds_fused() -> Numbers:
    batches = seed_batches()
    fused = hf.build(mlp, seeds=SEEDS)
    optimizer = hf.optim.Adam(fused.parameters(), lr=1e-3)
    step = hf.train_step(fused, F.cross_entropy, optimizer)
    for inputs, target in batches:
        losses = step(inputs, target)
    return losses.tolist()


# A search of 40 trials by TPE, with Optuna's median pruner.

TRIALS, TRIAL_EPOCHS = 40, 12


def search_space(trial) -> dict[str, float]:
    return {
        "lr": trial.suggest_float("lr", 1e-4, 1e-1, log=True),
        "weight_decay": trial.suggest_float("weight_decay", 1e-5, 1e-1, log=True),
        "p": trial.suggest_float("p", 0.0, 0.5),
        "width": trial.suggest_categorical("width", [32, 64, 128]),
    }


def search_model(width: int, p: float) -> nn.Module:
    return nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Dropout(p), nn.Linear(width, 10))


def accuracy(output: Tensor, target: Tensor) -> Tensor:
    return (output.argmax(1) == target).double().mean()


def search_loop() -> Numbers:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    x, y, x_held, y_held = digits()
    batches = list(zip(x.split(64), y.split(64), strict=True))

    def objective(trial: optuna.Trial) -> float:
        values = search_space(trial)
        torch.manual_seed(trial.number)
        model = search_model(values["width"], values["p"])
        opt = torch.optim.AdamW(model.parameters(), lr=values["lr"], weight_decay=values["weight_decay"], fused=True)
        for epoch in range(TRIAL_EPOCHS):
            train_epoch(model.train(), opt, F.cross_entropy, batches)
            with torch.no_grad():
                value = accuracy(model.eval()(x_held), y_held).item()
            trial.report(value, epoch)
            if trial.should_prune():
                raise optuna.TrialPruned
        return value

    study = optuna.create_study(direction="maximize", sampler=optuna.samplers.TPESampler(seed=0))
    study.optimize(objective, n_trials=TRIALS)
    return [study.best_value]


def search_fused() -> Numbers:
    import optuna

    optuna.logging.set_verbosity(optuna.logging.WARNING)
    x, y, x_held, y_held = digits()
    result = hf.sweep(
        search_model,
        search_space,
        F.cross_entropy,
        list(zip(x.split(64), y.split(64), strict=True)),
        eval_loader=[(x_held, y_held)],
        metric=accuracy,
        direction="maximize",
        sampler=optuna.samplers.TPESampler(seed=0),
        trials=TRIALS,
        epochs=TRIAL_EPOCHS,
    )
    return [result.study.best_value]


# Five folds, each until its loss has not improved for five epochs.

FOLDS, MOST_EPOCHS, PATIENCE = 5, 40, 5


def folds() -> tuple[Tensor, Tensor, list[Tensor], list[DataLoader]]:
    x, y, *_ = digits(1797)
    parts = torch.arange(len(x)).tensor_split(FOLDS)
    trained = [torch.cat([part for part in parts if part is not held]) for held in parts]
    return x, y, list(parts), [loader_of(x[rows], y[rows], seed) for seed, rows in enumerate(trained)]


def loader_of(x: Tensor, y: Tensor, seed: int) -> DataLoader:
    return DataLoader(TensorDataset(x, y), batch_size=32, shuffle=True, generator=torch.Generator().manual_seed(seed))


def folds_loop() -> Numbers:
    x, y, parts, loaders = folds()
    scores = []
    for part, loader in zip(parts, loaders, strict=True):
        torch.manual_seed(0)
        model = mlp()
        optimizer, best, waited = fused_adam(model), float("inf"), 0
        for _ in range(MOST_EPOCHS):
            train_epoch(model, optimizer, F.cross_entropy, loader)
            with torch.no_grad():
                score = F.cross_entropy(model(x[part]), y[part]).item()
            waited = 0 if score < best else waited + 1
            if score < best:
                best, state = score, copy.deepcopy(model.state_dict())
            if waited == PATIENCE:
                break
        model.load_state_dict(state)
        scores.append(F.cross_entropy(model(x[part]), y[part]).item())
    return scores


def folds_fused() -> Numbers:
    x, y, parts, loaders = folds()
    pop = hf.Population(
        hf.build(mlp, seeds=[0] * FOLDS),
        optimizer=lambda params: hf.optim.Adam(params, lr=1e-3),
        loss=F.cross_entropy,
        compile=False,
    )
    held_out = hf.stacked([x[part] for part in parts]), hf.stacked([y[part] for part in parts])
    patience, trained = hf.Patience(PATIENCE, restore_best=True), {}
    for _ in range(MOST_EPOCHS):
        epochs = [0 if model is None else 1 for model in pop.models]
        for inputs, target, rows in hf.zip_loaders(loaders, epochs=epochs):
            pop.step(inputs, target, rows=rows)
        for row in patience(pop, pop.evaluate(F.cross_entropy, [held_out])):
            trained[row] = pop.stop(row)
        if len(trained) == FOLDS:
            break
    pop.best.restore()
    models = [trained.get(row, model) for row, model in enumerate(pop.models)]
    return [F.cross_entropy(model(x[part]), y[part]).item() for model, part in zip(models, parts, strict=True)]


# A model for each of 30 stores, with 40 to 400 rows each.

STORES, STORE_EPOCHS = 30, 40


def store_model() -> nn.Module:
    return nn.Sequential(nn.Linear(6, 32), nn.Tanh(), nn.Linear(32, 1))


def store_data() -> list[tuple[Tensor, Tensor]]:
    generator, data = torch.Generator().manual_seed(0), []
    for _ in range(STORES):
        x = torch.randn(int(torch.randint(40, 401, (), generator=generator)), 6, generator=generator)
        data.append((x, (x @ torch.randn(6, 1, generator=generator)).tanh()))
    return data


def stores_loop() -> Numbers:
    scores = []
    for store, (x, y) in enumerate(store_data()):
        torch.manual_seed(store)
        model = store_model()
        optimizer, loader = fused_adam(model, 1e-2), loader_of(x, y, store)
        for _ in range(STORE_EPOCHS):
            train_epoch(model, optimizer, F.mse_loss, loader)
        scores.append(F.mse_loss(model(x), y).item())
    return scores


def stores_fused() -> Numbers:
    data = store_data()
    pop = hf.Population(
        hf.build(store_model, seeds=range(STORES)),
        optimizer=lambda params: hf.optim.Adam(params, lr=1e-2),
        loss=F.mse_loss,
        compile=False,
    )
    loaders = [loader_of(x, y, store) for store, (x, y) in enumerate(data)]
    for inputs, target, rows in hf.zip_loaders(loaders, epochs=STORE_EPOCHS):
        pop.step(inputs, target, rows=rows)
    return [F.mse_loss(model(x), y).item() for model, (x, y) in zip(pop.models, data, strict=True)]


# Critics of reinforcement learning with target networks: two that share a target, or ten Q networks.

Q_STEPS = 1000


def critic() -> nn.Module:
    return nn.Sequential(nn.Linear(23, 256), nn.ReLU(), nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 1))


def q_network() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 128), nn.ReLU(), nn.Linear(128, 128), nn.ReLU(), nn.Linear(128, 4))


def transitions(features: int) -> Iterator[tuple[Tensor, Tensor, Tensor, Tensor]]:
    """Yield states, actions, rewards and next states of each step."""
    generator = torch.Generator().manual_seed(0)
    states, following = torch.randn(2, 10_000, features, generator=generator)
    actions, rewards = torch.randint(4, (10_000, 1), generator=generator), states[:, :1].tanh()
    for _ in range(Q_STEPS):
        rows = torch.randint(10_000, (128,), generator=generator)
        yield states[rows], actions[rows], rewards[rows], following[rows]


def q_loss(values: Tensor, target: tuple[Tensor, Tensor]) -> Tensor:
    action, wanted = target
    return F.mse_loss(values.gather(1, action), wanted)


@torch.no_grad()
def follow(target: nn.Module, online: nn.Module, tau: float = 0.005) -> None:
    torch._foreach_lerp_(list(target.parameters()), list(online.parameters()), tau)


def seeded(make: Callable[[], nn.Module], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return make()


def twins_loop() -> Numbers:
    critics = [seeded(critic, seed) for seed in range(2)]
    targets = [copy.deepcopy(model).requires_grad_(False) for model in critics]
    optimizers = [fused_adam(model) for model in critics]
    for state, _, reward, following in transitions(23):
        wanted = reward + 0.99 * torch.minimum(*(target(following) for target in targets))
        pairs = zip(critics, optimizers, strict=True)
        losses = [train_epoch(model, opt, F.mse_loss, [(state, wanted)]).item() for model, opt in pairs]
        for target, model in zip(targets, critics, strict=True):
            follow(target, model)
    return losses


def twins_fused() -> Numbers:
    online = hf.build(critic, seeds=range(2))
    target = copy.deepcopy(online).requires_grad_(False)
    step = hf.train_step(online, F.mse_loss, hf.optim.Adam(online.parameters(), lr=1e-3))
    for state, _, reward, following in transitions(23):
        losses = step(state, reward + 0.99 * target(following).amin(0))
        follow(target, online)
    return losses.tolist()


def networks_loop() -> Numbers:
    networks = [seeded(q_network, seed) for seed in range(10)]
    targets = [copy.deepcopy(model).requires_grad_(False) for model in networks]
    optimizers = [fused_adam(model) for model in networks]
    for state, action, reward, following in transitions(8):
        losses = []
        for model, target, optimizer in zip(networks, targets, optimizers, strict=True):
            wanted = reward + 0.99 * target(following).amax(-1, keepdim=True)
            losses.append(train_epoch(model, optimizer, q_loss, [(state, (action, wanted))]).item())
            follow(target, model)
    return losses


def networks_fused() -> Numbers:
    online = hf.build(q_network, seeds=range(10))
    target = copy.deepcopy(online).requires_grad_(False)
    step = hf.train_step(online, q_loss, hf.optim.Adam(online.parameters(), lr=1e-3))
    for state, action, reward, following in transitions(8):
        wanted = reward + 0.99 * target(following).amax(-1, keepdim=True)
        losses = step(state, (action, hf.stacked(wanted)))
        follow(target, online)
    return losses.tolist()


# Three classes of models, each with eight learning rates.

RATES, CLASS_EPOCHS = [1e-4 * 2**k for k in range(8)], 12


class Convolutions(nn.Sequential):
    def __init__(self) -> None:
        image, pool = nn.Unflatten(1, (1, 8, 8)), nn.MaxPool2d(2)
        first, second = nn.Conv2d(1, 8, 3, padding=1), nn.Conv2d(8, 16, 3, padding=1)
        super().__init__(image, first, nn.ReLU(), pool, second, nn.ReLU(), nn.Flatten(), nn.Linear(256, 10))


class Rows(nn.Module):
    """Read an image row by row."""

    def __init__(self) -> None:
        super().__init__()
        self.gru, self.head = nn.GRU(8, 32, batch_first=True), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.gru(x.unflatten(1, (8, 8)))[0][:, -1])


CLASSES = {"mlp": mlp, "convolutions": Convolutions, "rows": Rows}


def class_batches() -> list[tuple[Tensor, Tensor]]:
    x, y, *_ = digits(1344)
    return list(zip(x.split(32), y.split(32), strict=True))


def classes_loop() -> Numbers:
    batches, losses = class_batches(), []
    for make in CLASSES.values():
        for seed, rate in enumerate(RATES):
            model = seeded(make, seed)
            optimizer = fused_adam(model, rate)
            for _ in range(CLASS_EPOCHS):
                last = train_epoch(model, optimizer, F.cross_entropy, batches)
            losses.append(last.item())
    return losses


def classes_fused() -> Numbers:
    batches, optimizer = class_batches(), partial(hf.optim.Adam, lr=RATES)
    models = {name: [seeded(make, seed) for seed in range(8)] for name, make in CLASSES.items()}
    options = {"optimizer": optimizer, "loader": batches, "epochs": CLASS_EPOCHS}
    report = hf.train([hf.Task(models[name], loss=F.cross_entropy, name=name, **options) for name in models])
    return [loss for name in CLASSES for loss in report[name].losses[-1].tolist()]


# By name: the two ways, and how far numbers may be apart. Float32 rounds differently, thousands of steps amplify that,
# and the searches see different trials.
JOBS: dict[str, tuple[Callable[[], Numbers], Callable[[], Numbers], float]] = {
    "seeds": (seeds_loop, seeds_fused, 0.05),
    "search": (search_loop, search_fused, 0.02),
    "folds": (folds_loop, folds_fused, 0.05),
    "stores": (stores_loop, stores_fused, 0.05),
    "twins": (twins_loop, twins_fused, 0.05),
    "networks": (networks_loop, networks_fused, 0.05),
    "classes": (classes_loop, classes_fused, 0.05),
}


def timed(job: str, way: int, folder: str) -> tuple[Numbers, float, float]:
    """Run a process with its caches in ``folder``. Returns its numbers, wall seconds, and processor seconds."""
    caches = {"XDG_CACHE_HOME": folder, "TORCHINDUCTOR_CACHE_DIR": f"{folder}/inductor"}
    before, began = resource.getrusage(resource.RUSAGE_CHILDREN), time.perf_counter()
    command = [sys.executable, __file__, "--run", job, str(way)]
    done = subprocess.run(command, env=os.environ | caches, stdout=subprocess.PIPE, text=True, check=True)
    seconds, after = time.perf_counter() - began, resource.getrusage(resource.RUSAGE_CHILDREN)
    processor = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return json.loads(done.stdout.splitlines()[-1]), seconds, processor


def compare(job: str, rounds: int) -> dict[str, object]:
    """Print a line for one job, and return it as a row. Raises AssertionError if both ways end elsewhere."""
    times: dict[str, list[tuple[float, float]]] = {"loop": [], "cold": [], "warm": []}
    for _ in range(rounds):
        with tempfile.TemporaryDirectory() as folder, tempfile.TemporaryDirectory() as other:
            ended = []
            for name, way, caches in (("loop", 0, other), ("cold", 1, folder), ("warm", 1, folder)):
                numbers, *seconds = timed(job, way, caches)
                times[name].append(tuple(seconds))
                ended.append(torch.tensor(numbers))
                torch.testing.assert_close(ended[-1], ended[0], rtol=JOBS[job][2], atol=JOBS[job][2])
    medians = {name: [*map(statistics.median, zip(*pairs, strict=True))] for name, pairs in times.items()}
    cells = (f"{wall:.1f} ({processor:.1f})" for wall, processor in medians.values())
    ratios = (f"{medians['loop'][0] / medians[name][0]:.2f}" for name in ("cold", "warm"))
    print(f"| {job} | {' | '.join([*cells, *ratios])} |", flush=True)
    return {"job": job, "rounds": rounds, **medians}


def startup() -> None:
    """Print what this process has spent on torch, on what torch's own optimizers import, and on hfusion."""
    began = [time.process_time()]

    def spent(what: str) -> None:
        began.append(time.process_time())
        print(f"{began[-1] - began[-2]:.2f} s  {what}")

    fused_adam(mlp())
    spent("torch.optim.Adam, which imports Dynamo")
    inputs, target = torch.randn(32, 64), torch.randint(10, (32,))
    fused = hf.build(mlp, seeds=SEEDS)
    step = hf.train_step(fused, F.cross_entropy, hf.optim.Adam(fused.parameters(), lr=1e-3))
    spent("hf.build and hf.train_step, with their imports")
    step(inputs, target)
    spent("the first step")
    step(inputs, target)
    spent("the second step")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jobs", default=",".join(JOBS), help="of " + ", ".join(JOBS))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--json", help="a file for the rows")
    parser.add_argument("--run", nargs=2, metavar=("JOB", "WAY"), help=argparse.SUPPRESS)
    parser.add_argument("--startup", action="store_true", help="print the parts of the start of a process")
    options = parser.parse_args()
    if options.startup:
        startup()
        return
    if options.run:
        warnings.simplefilter("ignore")
        print(json.dumps(JOBS[options.run[0]][int(options.run[1])]()))
        return
    for folder in ("", "ops", "passes"):  # compileall follows no links in a folder.
        compileall.compile_dir(os.path.join(*hf.__path__, folder), quiet=1)
    print("| job | loop | cold | warm | loop / cold | loop / warm |\n|---|---|---|---|---|---|")
    rows = [compare(job, options.rounds) for job in options.jobs.split(",")]
    if options.json:
        with open(options.json, "w") as file:
            json.dump(rows, file, indent=1)


if __name__ == "__main__":
    main()
