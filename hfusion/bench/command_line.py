"""The command line of ``python -m hfusion.bench``."""

from __future__ import annotations

import argparse
import importlib.util
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NoReturn, Protocol, TypeVar

import torch

from hfusion.bench import (
    foretold_benchmark,
    fuse_benchmark,
    optim_benchmark,
    schedule_benchmark,
    search_spaces,
    shard_benchmark,
    shard_cases,
    short_benchmark,
    sweep_benchmark,
    train_benchmark,
)
from hfusion.bench.cases import CASES
from hfusion.bench.contenders import CONTENDERS
from hfusion.bench.policies import COMPARED
from hfusion.bench.results import kept_rows
from hfusion.bench.sweep_contenders import CONTENDERS as SEARCHES
from hfusion.device.backend import accelerators, types
from hfusion.device.native import cores

SUB_BENCHMARKS = {
    "fuse": "one training step of B models, fused and unfused (default)",
    "optim": "optimizers alone, in ns per parameter",
    "shard": "arrays that do not fit their device, in shards, against what one could do by hand",
    "schedule": "policies over many tasks and devices, makespan over the lower bound",
    "foretold": "what hfusion.simulate says of runs, and what they take",
    "train": "minibatches of hfusion.train, compiled, against a loop over train_step",
    "short": "jobs of some seconds, from process start to end, with cold and warm caches",
    "sweep": "a search of hyper-parameters with Hyperband, in several ways",
}
# Those with arguments of their own: see ``python -m hfusion.bench NAME --help``.
SEPARATE = {
    "lora": "many LoRA adapters of one base, against peft one after another (`lora --help`)",
    "contact": "the first run on a GPU: all that runs there, checked and timed, in ten minutes (`contact --help`)",
    "cluster": "CPU seconds of many small tasks, and of the driver of a cluster (`cluster --help`)",
    "unlike-members": "a population of unlike models against plain loops (`unlike-members --help`)",
    "links": "arrays that do not fit an accelerator, simulated by its data sheet (`links --help`)",
}
MEMBERS = (4, 16, 64)
NOT_FOR = {"schedule": ("members", "repeats"), "shard": ("members",), "sweep": ("members",)}
CHOSEN_BY = {
    "models": ("fuse", "foretold", "train", "short", "sweep"),
    "contenders": ("fuse", "short", "sweep"),
    "plot": ("fuse", "sweep"),
}
# What models and contenders are chosen from, other than those of fuse.
ENTRANTS: dict[str, tuple[Sequence[Any], Sequence[Any]]] = {
    "short": (CASES, short_benchmark.CONTENDERS),
    "sweep": (sweep_benchmark.CASES, SEARCHES),
}
QUICK_SWEEP = (6, 3)
AMP = {"bf16": torch.bfloat16}
PICTURES = (".png", ".svg", ".pdf")
WITHOUT = {
    "startup": ("contenders", "repeats", "plot"),
    "memory": ("repeats", "plot"),
    "space": ("models", "contenders", "trials", "epochs", "plot"),
}
QUICK_MODELS = ("mlp-small", "cnn")
QUICK_MEMBERS = (4,)
QUICK_CONTENDERS = ("serial", "vmap", "hfusion")


class Named(Protocol):
    """Anything with a name to choose it by."""

    @property
    def name(self) -> str: ...


N = TypeVar("N", bound=Named)


class OneLineParser(argparse.ArgumentParser):
    """A parser that reports an error in one line, without the usage."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: {message}\n")


def parser() -> argparse.ArgumentParser:
    """Return the parser of all options. Their default is None, so that ``--quick`` only fills gaps."""
    names = ", ".join(SUB_BENCHMARKS)
    option_parser = OneLineParser(
        prog="python -m hfusion.bench", description="Fused against unfused training.", allow_abbrev=False
    )
    option_parser.add_argument("benchmark", nargs="?", default="fuse", help=f"one of {names} (default fuse)")
    option_parser.add_argument("--list", action="store_true", help="print the sub-benchmarks, models and contenders")
    option_parser.add_argument(
        "--models", metavar="A,B", help="fuse, foretold, train, short and sweep: these models only"
    )
    option_parser.add_argument("--members", metavar="4,16", type=_counts, help="numbers of members (default 4,16,64)")
    option_parser.add_argument("--contenders", metavar="A,B", help="fuse, short and sweep: these contenders only")
    option_parser.add_argument(
        "--repeats", type=_count, help="rounds, each timing every contender (default 7; shard, foretold and train 3)"
    )
    option_parser.add_argument(
        "--threads", type=_count, default=1, help="threads of torch (default 1); all cores: their number"
    )
    option_parser.add_argument(
        "--device", type=_device, default=torch.device("cpu"), help="cpu (default), or the type of an accelerator"
    )
    option_parser.add_argument("--trials", type=_count, help="sweep: how many (default 256)")
    option_parser.add_argument("--epochs", type=_count, help="sweep: of a trial that is not pruned (default 9)")
    option_parser.add_argument(
        "--space",
        metavar="A,B",
        help="sweep: search unlike, widths, twins in whole commands against plain torch, instead",
    )
    option_parser.add_argument(
        "--cells", metavar="24x3,96x5", type=_cells, help="--space: trials x epochs (default all three)"
    )
    option_parser.add_argument("--quick", action="store_true", help="few models, members, contenders and rounds")
    option_parser.add_argument("--json", metavar="FILE", type=Path, help="write machine and rows to FILE")
    option_parser.add_argument(
        "--plot",
        metavar="FILE",
        type=Path,
        action="append",
        help="fuse, sweep: draw speed-up, or seconds, as PNG or SVG; may be given again (needs matplotlib)",
    )
    option_parser.add_argument(
        "--amp", choices=sorted(AMP), help="fuse: forward and loss under autocast, for all contenders"
    )
    instead = option_parser.add_mutually_exclusive_group()
    instead.add_argument("--startup", action="store_true", help="fuse: what an array costs before it trains, instead")
    instead.add_argument("--memory", action="store_true", help="fuse: bytes per member of each contender, instead")
    instead.add_argument(
        "--from",
        metavar="FILE",
        type=Path,
        action="append",
        dest="earlier",
        help="fuse: draw what --json wrote in an earlier run, instead; may be given again",
    )
    return option_parser


def parse(arguments: Sequence[str]) -> argparse.Namespace:
    """Parse and check. Exits with status 2 and one line that lists the valid names for an unknown one."""
    option_parser = parser()
    parsed = option_parser.parse_args(arguments)
    _or_error(option_parser, lambda: check_name("sub-benchmark", parsed.benchmark, SUB_BENCHMARKS))
    _check_belonging(option_parser, parsed)
    _check_paths(option_parser, parsed)
    parsed.earlier_rows = _or_error(
        option_parser, lambda: [row for path in parsed.earlier or [] for row in kept_rows(path)]
    )
    if parsed.plot is not None and importlib.util.find_spec("matplotlib") is None:
        option_parser.error(
            "--plot needs matplotlib: pip install matplotlib (extra: hfusion[plot]), or leave --plot out"
        )
    cases, entrants = ENTRANTS.get(parsed.benchmark, (CASES, CONTENDERS))
    parsed.cases = _or_error(option_parser, lambda: choose("model", parsed.models, cases))
    parsed.entrants = _or_error(option_parser, lambda: choose("contender", parsed.contenders, entrants))
    parsed.spaces = _or_error(option_parser, lambda: choose_names("space", parsed.space, [*search_spaces.SPACES]))
    return parsed


def _check_belonging(option_parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Report an error for an option that does not belong to the sub-benchmark, or to the other options."""
    for name in ("models", "contenders", "plot", "amp", "startup", "memory"):
        if parsed.benchmark not in CHOSEN_BY.get(name, ("fuse",)) and getattr(parsed, name):
            option_parser.error(f"--{name} belongs to fuse, not to {parsed.benchmark}: leave it out")
    for name in ("trials", "epochs", "space", "cells"):
        if parsed.benchmark != "sweep" and getattr(parsed, name):
            option_parser.error(f"--{name} belongs to sweep, not to {parsed.benchmark}: leave it out")
    if parsed.earlier and parsed.benchmark != "fuse":
        option_parser.error(f"--from belongs to fuse, not to {parsed.benchmark}: leave it out")
    if parsed.benchmark == "sweep" and not parsed.space:
        if parsed.cells:
            option_parser.error("--cells belongs to --space: say which, as --space unlike,widths,twins")
        if parsed.repeats is not None:
            option_parser.error("--repeats does not belong to sweep without --space: leave it out")
    for name, options in WITHOUT.items():
        for option in options:
            if getattr(parsed, name) and getattr(parsed, option) is not None:
                option_parser.error(f"--{option} does not belong to --{name}: leave it out")
    for benchmark, names in NOT_FOR.items():
        for name in names:
            if parsed.benchmark == benchmark and getattr(parsed, name) is not None:
                option_parser.error(f"--{name} does not belong to {benchmark}: leave it out")


def _check_paths(option_parser: argparse.ArgumentParser, parsed: argparse.Namespace) -> None:
    """Report an error for an output file that cannot be written."""
    for name, paths in {"json": [parsed.json] if parsed.json else [], "plot": parsed.plot or []}.items():
        for path in paths:
            if not path.absolute().parent.is_dir():
                option_parser.error(f"--{name} {path}: there is no directory {path.absolute().parent}")
    for path in parsed.plot or []:
        if path.suffix.lower() not in PICTURES:
            option_parser.error(f"--plot {path}: end it with one of {', '.join(PICTURES)}")
    if parsed.earlier and not parsed.plot:
        option_parser.error("--from draws: say where to with --plot")


def fuse_settings(parsed: argparse.Namespace) -> fuse_benchmark.FuseSettings:
    """Return the settings of the sub-benchmark ``fuse``; explicit options override those of ``--quick``."""
    cases, entrants = parsed.cases, parsed.entrants
    if parsed.quick:
        cases = cases if parsed.models else named(CASES, QUICK_MODELS)
        entrants = entrants if parsed.contenders else named(CONTENDERS, QUICK_CONTENDERS)
    return fuse_benchmark.FuseSettings(
        cases=cases,
        members=_members(parsed),
        contenders=entrants,
        rounds=_rounds(parsed),
        slot=_slot(parsed),
        threads=parsed.threads,
        device=parsed.device,
        amp=AMP.get(parsed.amp),
    )


def optim_settings(parsed: argparse.Namespace) -> optim_benchmark.OptimSettings:
    """The settings of the sub-benchmark ``optim``."""
    return optim_benchmark.OptimSettings(
        cases=optim_benchmark.CASES[:1] if parsed.quick else optim_benchmark.CASES,
        members=_members(parsed),
        rounds=_rounds(parsed),
        slot=_slot(parsed),
        device=parsed.device,
    )


def shard_settings(parsed: argparse.Namespace) -> shard_benchmark.ShardSettings:
    """The settings of the sub-benchmark ``shard``."""
    return shard_benchmark.ShardSettings(
        cases=shard_cases.QUICK_CASES if parsed.quick else shard_cases.CASES,
        rounds=parsed.repeats or (1 if parsed.quick else 3),
        steps=5 if parsed.quick else 24,
        device=parsed.device,
    )


def schedule_settings(parsed: argparse.Namespace) -> schedule_benchmark.ScheduleSettings:
    """The settings of the sub-benchmark ``schedule``."""
    cases = schedule_benchmark.QUICK_CASES if parsed.quick else schedule_benchmark.CASES
    placements = schedule_benchmark.PLACEMENT_CASES[: 1 if parsed.quick else None]
    replanned = schedule_benchmark.REPLANNED_CASES[: 1 if parsed.quick else None]
    return schedule_benchmark.ScheduleSettings(cases, tuple(COMPARED.values()), placements, replanned)


def foretold_settings(parsed: argparse.Namespace) -> foretold_benchmark.ForetoldSettings:
    """The settings of the sub-benchmark ``foretold``."""
    cases = (
        parsed.cases if parsed.models else named(CASES, QUICK_MODELS[:1] if parsed.quick else foretold_benchmark.MODELS)
    )
    rounds = parsed.repeats or (1 if parsed.quick else 3)
    return foretold_benchmark.ForetoldSettings(
        cases, parsed.members or foretold_benchmark.MEMBERS, rounds, parsed.device
    )


def train_settings(parsed: argparse.Namespace) -> train_benchmark.TrainSettings:
    """The settings of the sub-benchmark ``train``."""
    cases = (
        parsed.cases if parsed.models else named(CASES, QUICK_MODELS[:1] if parsed.quick else train_benchmark.MODELS)
    )
    rounds = parsed.repeats or (1 if parsed.quick else 3)
    return train_benchmark.TrainSettings(cases, parsed.members or train_benchmark.MEMBERS, rounds, parsed.device)


def short_settings(parsed: argparse.Namespace) -> short_benchmark.ShortSettings:
    """The settings of the sub-benchmark ``short``."""
    models = tuple(case.name for case in parsed.cases) if parsed.models else tuple(short_benchmark.STEPS)
    return short_benchmark.ShortSettings(
        models=models[:1] if parsed.quick and not parsed.models else models,
        members=parsed.members or short_benchmark.MEMBERS,
        contenders=parsed.entrants,
        rounds=parsed.repeats or (1 if parsed.quick else 3),
        threads=parsed.threads,
    )


def sweep_settings(parsed: argparse.Namespace) -> sweep_benchmark.SweepSettings:
    """The settings of the sub-benchmark ``sweep``."""
    trials, epochs = QUICK_SWEEP if parsed.quick else (256, 9)
    return sweep_benchmark.SweepSettings(
        cases=parsed.cases[:1] if parsed.quick and not parsed.models else parsed.cases,
        contenders=parsed.entrants,
        trials=parsed.trials or trials,
        epochs=parsed.epochs or epochs,
        cores=cores(),
    )


def space_settings(parsed: argparse.Namespace) -> search_spaces.SpaceSettings:
    """The settings of ``sweep --space``."""
    return search_spaces.SpaceSettings(
        spaces=parsed.spaces,
        cells=parsed.cells or (search_spaces.QUICK_CELLS if parsed.quick else search_spaces.CELLS),
        rounds=parsed.repeats or (1 if parsed.quick else 3),
        cores=cores(),
    )


def _members(parsed: argparse.Namespace) -> tuple[int, ...]:
    chosen: tuple[int, ...] | None = parsed.members
    return chosen or (QUICK_MEMBERS if parsed.quick else MEMBERS)


def _rounds(parsed: argparse.Namespace) -> int:
    chosen: int | None = parsed.repeats
    return chosen or (3 if parsed.quick else 7)


def _slot(parsed: argparse.Namespace) -> float:
    return 0.01 if parsed.quick else 0.04


def choose(kind: str, names: str | None, options: Sequence[N]) -> tuple[N, ...]:
    """The options that a comma-separated list names, in its order; all of them for None.

    Raises ValueError with the valid names for an unknown, repeated or missing one.
    """
    return named(options, choose_names(kind, names, [option.name for option in options]))


def choose_names(kind: str, names: str | None, valid: Sequence[str]) -> tuple[str, ...]:
    """Return the chosen names of ``kind``, all ``valid`` ones by default; see ``choose``."""
    if names is None:
        return tuple(valid)
    chosen = tuple(name.strip() for name in names.split(","))
    for name in chosen:
        check_name(kind, name, valid)
    if len(set(chosen)) < len(chosen):
        raise ValueError(f"a {kind} is named twice in {names!r}: name each once")
    return chosen


def named(options: Sequence[N], names: Sequence[str]) -> tuple[N, ...]:
    """The options of these names, in the order of the names."""
    by_name = {option.name: option for option in options}
    return tuple(by_name[name] for name in names)


def check_name(kind: str, name: str, valid: Sequence[str] | dict[str, str]) -> None:
    """Raises ValueError that lists the valid names if ``name`` is none of them."""
    if name not in valid:
        raise ValueError(f"unknown {kind} {name!r}: choose from {', '.join(valid)}")


T = TypeVar("T")


def _or_error(option_parser: argparse.ArgumentParser, check: Callable[[], T]) -> T:
    try:
        return check()
    except ValueError as error:
        option_parser.error(str(error))


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _counts(text: str) -> tuple[int, ...]:
    return tuple(_count(part.strip()) for part in text.split(","))


def _cells(text: str) -> tuple[search_spaces.SearchCell, ...]:
    cells = []
    for part in text.split(","):
        trials, _, epochs = part.strip().partition("x")
        cells.append(search_spaces.SearchCell(_count(trials), _count(epochs)))
    return tuple(cells)


def _device(text: str) -> torch.device:
    names = ("cpu", *types())
    if text not in names:
        raise argparse.ArgumentTypeError(f"unknown device {text!r}: choose from {', '.join(names)}")
    if text != "cpu" and text not in {device.type for device in accelerators()}:
        raise argparse.ArgumentTypeError(f"torch sees no {text} device here: leave --device out")
    return torch.device(text)
