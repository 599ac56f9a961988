"""Private names of torch are in a table, exist, and are used in one folder."""

from __future__ import annotations

import ast
import importlib
import logging
import tomllib
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils import _pytree as pytree
from torch.utils.data import DataLoader

import hfusion as hf
from hfusion.torch_private import autograd_engine, dispatch_modes, export_state, replaced_functions
from hfusion.torch_private.inductor import quick_inductor
from hfusion.torch_private.replaced_functions import silence_tracers
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


class Twice(torch.autograd.Function):
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
    "an autograd.Function": lambda: Twice,
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


# Private names of torch are used in one folder only, and each is in its table.
ROOM = ROOT / "hfusion" / "torch_private"
TABLE = {name if " " in owner else f"{owner}.{name}" for row in PRIVATE_NAMES for owner, name in row.pairs()}
ATTRIBUTES = {name for row in PRIVATE_NAMES if row.everywhere for _, name in row.pairs()}
# Underscored attributes of Python's library and of other packages.
OTHERS = {
    *(
        "_getframe",
        "_current_frames",
        "_exit",
        "_replace",
        "_asdict",
        "_lru_cache_wrapper",
        "_is_owned",
        "_at_fork_reinit",
    ),
    *("_base_sampler", "_stop_flag", "_storage", "_study_id", "_thread_local", "_trial_id"),
    *("_avoid_premature_stop", "_get_unvisited_grid_ids"),
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


# What hfusion assumes of torch's export, autograd and loaders holds on the installed torch.


# Assumptions of hfusion about torch's dispatch, export and autograd hold on the installed torch.
class Failing(nn.Module):
    """Its submodule fails while it is traced; and it says what it sees of the export."""

    def __init__(self) -> None:
        super().__init__()
        self.part = Inner()

    def forward(self, x: Tensor) -> Tensor:
        assert export_state.exporting()
        with export_state.outside_export():
            assert not torch.compiler.is_exporting()
        try:
            return self.part(x)
        except RuntimeError:
            return x + 1


class Inner(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        raise RuntimeError("refused")


class Mapped(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.vmap(torch.sin)(x)


@pytest.mark.filterwarnings("ignore")
def test_an_export() -> None:
    export_state.import_exporter()
    nodes = dict(pytree.SUPPORTED_NODES)
    with export_state.module_stack_unwound(), export_state.numbered_parts():
        exported = torch.export.export(Failing(), (torch.zeros(2),), strict=False)
        mapped = torch.export.export(Mapped(), (torch.zeros(2),), strict=False)
    assert nodes == pytree.SUPPORTED_NODES
    assert not export_state.exporting()
    assert torch.equal(exported.module()(torch.zeros(2)), torch.ones(2))
    assert export_state.has_transforms(mapped.graph_module)
    assert not export_state.has_transforms(exported.graph_module)


def test_a_backward_pass() -> None:
    x = torch.ones(1, requires_grad=True)
    order: list[str] = []

    def note(grad: Tensor) -> None:
        assert autograd_engine.backward_id() >= 0
        order.append("hook")
        if len(order) == 1:
            autograd_engine.at_end_of_backward(lambda: order.append("end"))

    y = Twice.apply(x)
    assert isinstance(y.grad_fn, autograd_engine.backward_node(Twice))
    assert isinstance(y.grad_fn.next_functions[0][0], autograd_engine.AccumulateGrad)
    y.register_hook(note)
    x.register_hook(lambda grad: order.append("leaf"))
    y.backward()
    assert order == ["hook", "leaf", "end"]
    assert autograd_engine.backward_id() == -1


def test_attributes_that_were_not_there_go_again() -> None:
    class Base:
        kind = "inherited"

    class Own(Base):
        name = "before"

    before = dict(vars(Own))
    with replaced_functions.replaced(Own, {"kind": "put", "name": "put", "new": "put"}):
        assert (Own.kind, Own.name, vars(Own)["new"]) == ("put", "put", "put")
    assert dict(vars(Own)) == before


def test_replaced_functions() -> None:
    x = torch.ones(1, requires_grad=True)
    called: list[str] = []

    def noted(name: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
        return lambda run: lambda *args, **kwargs: (called.append(name), run(*args, **kwargs))[1]

    def apply(run: Callable[..., Any], function: type, *args: Any) -> Any:
        called.append(function.__name__)
        return run(*args)

    with replaced_functions.autograd_grad_replaced(noted("grad")):
        torch.autograd.grad((x * x).sum(), x)
    with replaced_functions.autograd_functions_replaced(apply):
        assert Twice.apply(x).item() == 2
    with replaced_functions.torch_functions_replaced(
        ("is_autocast_enabled", "no_such"), lambda name, run: lambda: name
    ):
        assert torch.is_autocast_enabled() == "is_autocast_enabled"
    from torch.fx.experimental.symbolic_shapes import ShapeEnv

    mode = dispatch_modes.FakeTensorMode(shape_env=ShapeEnv())
    size = dispatch_modes.with_dynamic_dims(mode, torch.zeros(5), [True], "x").shape[0]
    with replaced_functions.number_operators_replaced(noted("number")):
        size + 1
    assert called == ["grad", "Twice", "number"]
    size + 1
    torch.autograd.grad((x * x).sum(), x)
    Twice.apply(x)
    assert len(called) == 3
    assert torch.is_autocast_enabled() is False


# Assumptions of hfusion about torch's modules, optimizers, loaders and Inductor hold on the installed torch.


# The seed that torch keeps for an unused accelerator remains the one that the user set.
def waiting() -> Any:
    return torch.cuda._lazy_seed_tracker.get_calls()[-1][0]


@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a CUDA that was not used")
@pytest.mark.parametrize("others", [False, True])
def test_arrays_leave_the_seed_of_an_accelerator_that_was_not_used(others: bool) -> None:
    """A capture runs forward under a separate seed, and build under the members' seeds."""
    with ThreadPoolExecutor(1) as pool:
        if others:
            pool.submit(torch.get_rng_state).result()
        torch.manual_seed(7)
        pending, drawn = waiting(), torch.get_rng_state()
        fused = hf.build(lambda: nn.Sequential(nn.Linear(3, 2), nn.Dropout(0.5)), seeds=[1, 2])
        assert waiting() is pending
        assert torch.equal(torch.get_rng_state(), drawn)
        fused(torch.ones(4, 3))
        assert waiting() is pending


# Inductor patches apply during one compilation and are undone afterwards.


def test_torch_is_left_as_it_was() -> None:
    from torch._inductor.codecache import CppWrapperCodeCache
    from torch._inductor.dtype_propagation import DtypePropagationOpsHandler

    def state() -> list[Any]:
        names = ("_get_uncompiled_header", "load_pybinding")
        return [DtypePropagationOpsHandler.__init__, *(CppWrapperCodeCache.__dict__.get(name) for name in names)]

    def fail() -> None:
        with quick_inductor():
            assert all(patched is not original for patched, original in zip(state()[:2], before[:2], strict=True))
            assert CppWrapperCodeCache._get_uncompiled_header("cuda:0") == "torch/csrc/inductor/cpp_wrapper/cuda.h"
            raise KeyError

    before = state()
    with pytest.raises(KeyError):
        fail()
    assert state() == before


# Tracers are silent, and leave the process as it was.


def speak() -> None:
    warnings.warn("a warning", stacklevel=1)
    logging.getLogger("torch.export").error("a log of torch's")
    logging.getLogger("mine").warning("a log of mine")


def test_only_torch_is_silent(caplog: pytest.LogCaptureFixture) -> None:
    before = list(warnings.filters), list(logging.getLogger("torch").filters)
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with silence_tracers():
            with silence_tracers():
                speak()
            speak()
            assert not heard
            assert caplog.messages == ["a log of mine"] * 2
        speak()
        assert len(heard) == 1
    assert caplog.messages.count("a log of torch's") == 1
    assert logging.root.manager.disable == 0
    assert (list(warnings.filters), list(logging.getLogger("torch").filters)) == before
