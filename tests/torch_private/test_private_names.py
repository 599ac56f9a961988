"""Private names of torch are in a table, exist, and are used in one folder."""

from __future__ import annotations

import ast
import importlib
import tomllib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils.data import DataLoader

from tests.test_files import ROOT, files

# Read private_names.toml: torch's private names, the versions they were tried on, and what happens without them.
_TABLE = tomllib.loads(Path(__file__).with_name("private_names.toml").read_text())


@dataclass(frozen=True)
class PrivateNames:
    """Names of torch that its documentation does not promise, used for one purpose."""

    purpose: str
    names: list[str]
    tried: str
    without: str
    everywhere: bool = False

    def pairs(self) -> Iterator[tuple[str, str]]:
        """Yield each name with its owner: a module, a class, or "a Tensor"."""
        for part in self.names:
            owner, _, names = part.partition(": ")
            yield from ((owner, name) for name in names.split())


PUBLIC = frozenset(_TABLE["public"])
PRIVATE_NAMES = tuple(PrivateNames(**row) for row in _TABLE["uses"])


# Each private name of torch in the table exists on the installed torch.
aten = torch.ops.aten


class Doubled(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return 2 * x

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return 2 * grad


def optimizer() -> torch.optim.Optimizer:
    return torch.optim.SGD([nn.Parameter(torch.zeros(1))], lr=0.1)


def stepped() -> torch.optim.Optimizer:
    """An optimizer whose step a scheduler has seen."""
    opt = optimizer()
    torch.optim.lr_scheduler.StepLR(opt, 1)
    opt.step()
    return opt


def read_by_workers() -> Any:
    iterator = iter(DataLoader([1, 2], num_workers=1))
    assert len(list(iterator)) == 2
    return iterator


OWNERS: dict[str, Callable[[], Any]] = {
    "a Tensor": lambda: torch.zeros(1),
    "an UntypedStorage": lambda: torch.zeros(1).untyped_storage(),
    "a Generator": torch.Generator,
    "an autograd.Function": lambda: Doubled,
    "an Optimizer": optimizer,
    "the step of an optimizer": stepped,
    "a DataLoader": lambda: DataLoader([1]),
    "an iterator of a DataLoader": read_by_workers,
    "a Module": lambda: nn.Linear(2, 2),
    "a state dict": lambda: nn.Linear(2, 2).state_dict(),
    "a pruning method": lambda: next(iter(prune.identity(nn.Linear(2, 2), "weight")._forward_pre_hooks.values())),
    "an OptimizedModule": lambda: torch.compile(nn.Linear(2, 2)),
    "an OpOverload": lambda: aten.add.Tensor,
    "an OpOverloadPacket": lambda: aten.add,
}


def owner(path: str) -> Any:
    """The object that the table names: of a kind, or a module, or what follows its name."""
    if path in OWNERS:
        return OWNERS[path]()
    try:
        return importlib.import_module(path)
    except ModuleNotFoundError:
        parent, _, name = path.rpartition(".")
        return getattr(owner(parent), name)


@pytest.mark.parametrize("row", PRIVATE_NAMES, ids=lambda row: row.purpose)
def test_the_names_exist(row: PrivateNames) -> None:
    first, installed = (tuple(map(int, text.split(".")[:2])) for text in (row.tried.split()[0], torch.__version__))
    if installed < first:
        pytest.skip(f"tried from torch {row.tried.split()[0]} on")
    held: dict[str, Any] = {}
    missing = []
    for path, name in row.pairs():
        if path not in held:
            held[path] = owner(path)
        try:
            # Some modules are imported by their names only.
            present = hasattr(held[path], name) or importlib.import_module(f"{path}.{name}")
        except ModuleNotFoundError:
            present = False
        missing += [] if present else [f"{path}.{name}"]
    assert missing == []


def test_no_row_is_there_twice() -> None:
    assert len({row.purpose for row in PRIVATE_NAMES}) == len(PRIVATE_NAMES)


# Private names of torch are used in one folder only, and each is in its table.
ROOM = ROOT / "hfusion" / "torch_private"
TABLE = {name if " " in owner else f"{owner}.{name}" for row in PRIVATE_NAMES for owner, name in row.pairs()}
ATTRIBUTES = {name for row in PRIVATE_NAMES if row.everywhere for _, name in row.pairs()}
# Underscored attributes of Python's library and of other packages.
OTHERS = {
    *("_getframe", "_current_frames", "_exit", "_replace", "_asdict", "_lru_cache_wrapper"),
    *("_base_sampler", "_stop_flag", "_storage", "_study_id", "_thread_local", "_trial_id"),
    *("_cached_frozen_trial", "_popsize", "_population_size", "_suggest", "_wrapped_pruner"),
}


# Several tests look at each file.
parsed = cache(ast.parse)


@cache
def imported(tree: ast.Module) -> dict[str, str]:
    """The path below torch of each name that a file imports from there."""
    paths = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for alias in node.names:
                if alias.name.partition(".")[0] == "torch":
                    paths[alias.asname or "torch"] = alias.name if alias.asname else "torch"
        elif isinstance(node, ast.ImportFrom) and (node.module or "").partition(".")[0] == "torch":
            paths |= {alias.asname or alias.name: f"{node.module}.{alias.name}" for alias in node.names}
    return paths


def path_of(node: ast.AST, paths: dict[str, str]) -> str:
    if isinstance(node, ast.Name):
        return paths.get(node.id, "")
    owner = path_of(node.value, paths) if isinstance(node, ast.Attribute) else ""
    return f"{owner}.{node.attr}" if owner and isinstance(node, ast.Attribute) else ""


def is_private(path: str) -> bool:
    public = path.startswith("torch.ops.") or any(path == name or path.startswith(f"{name}.") for name in PUBLIC)
    return not public and any(part.startswith("_") and not part.endswith("__") for part in path.split("."))


def private_paths(source: str) -> Iterator[str]:
    """Yield the private paths below torch that a file imports, reads or names in a text."""
    tree = parsed(source)
    paths = imported(tree)
    modules = {alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names}
    # Of a chain of attributes the whole.
    inner = {node.value for node in ast.walk(tree) if isinstance(node, ast.Attribute)}
    read = {path_of(node, paths) for node in ast.walk(tree) if isinstance(node, ast.Attribute) and node not in inner}
    texts = {node.value for node in ast.walk(tree) if isinstance(node, ast.Constant) and isinstance(node.value, str)}
    named = {
        text for text in texts if text.startswith("torch.") and text.replace(".", "").isidentifier() and text[-1] != "_"
    }
    yield from sorted(filter(is_private, {*modules, *paths.values(), *read, *named}))


def foreign_attributes(source: str, own_names: set[str]) -> Iterator[str]:
    """Yield the underscored attributes that a file reads of objects, and that no file of hfusion defines."""
    tree = parsed(source)
    paths = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr.startswith("_") and not node.attr.startswith("__"):
            operator = isinstance(node.value, ast.Name) and node.value.id in ("aten", "_aten")
            if node.attr not in own_names and not path_of(node, paths) and not operator:
                yield node.attr


def defined(source: str) -> Iterator[str]:
    for node in ast.walk(parsed(source)):
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            yield node.name
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            yield node.id
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and isinstance(node.value, ast.Name):
            yield from [node.attr] if node.value.id in ("self", "cls") else []
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.startswith("_hfusion_"):
            yield node.value


def patches(source: str) -> Iterator[str]:
    """Yield the statements that assign an attribute of something of torch."""
    tree = parsed(source)
    paths = imported(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store | ast.Del) and path_of(node.value, paths):
            yield ast.unparse(node)
        if isinstance(node, ast.Call) and ast.unparse(node.func) in ("setattr", "delattr"):
            yield from [ast.unparse(node)] if path_of(node.args[0], paths) else []


def outside() -> dict[Path, str]:
    texts = {path: path.read_text() for path in files()}
    return {path: text for path, text in texts.items() if path.parent != ROOM and "bench" not in path.parts}


def test_no_other_folder_uses_a_private_name() -> None:
    names_by_file = {path.relative_to(ROOT).as_posix(): list(private_paths(text)) for path, text in outside().items()}
    assert {path: names for path, names in names_by_file.items() if names} == {}


def test_no_other_folder_reads_a_private_attribute() -> None:
    own_names = {name for path in files() for name in defined(path.read_text())}
    allowed = ATTRIBUTES | OTHERS
    attributes = {
        path.relative_to(ROOT).as_posix(): set(foreign_attributes(text, own_names)) - allowed
        for path, text in outside().items()
    }
    assert {path: names for path, names in attributes.items() if names} == {}


def test_no_other_folder_replaces_a_function_of_torch() -> None:
    patched = {path.relative_to(ROOT).as_posix(): list(patches(text)) for path, text in outside().items()}
    assert {path: names for path, names in patched.items() if names} == {}


def test_every_private_name_of_the_folder_is_in_the_table() -> None:
    missing = {}
    for path in ROOM.glob("*.py"):
        text = path.read_text()
        attributes = set(foreign_attributes(text, {*defined(text), *OTHERS}))
        listed = {name.rpartition(".")[2] for name in TABLE}
        missing[path.name] = {name for name in private_paths(text) if not in_table(name)} | (attributes - listed)
    assert {path: names for path, names in missing.items() if names} == {}


def in_table(path: str) -> bool:
    """Return whether a path is a name of the table, lies below one, or is a module of one."""
    return any(f"{path}.".startswith(f"{name}.") or f"{name}.".startswith(f"{path}.") for name in TABLE)
