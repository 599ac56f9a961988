"""Devices are asked in one place: no other file names a kind of accelerator."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).parents[2]
FOLDERS = ("hfusion", "ops", "passes", "examples")
NAMED = re.compile(r"cuda|\bxpu\b|\bmps\b|\bhip\b|nccl", re.IGNORECASE)
FACTORIES = re.compile(
    "arange|as_tensor|asarray|empty|empty_strided|eye|full|linspace|normal|ones|rand|randint|randn|randperm|range|"
    "scalar_tensor|tensor|tril_indices|triu_indices|zeros"
)
WHY = {
    "hfusion/device/backend.py": "asks devices, and records graphs of CUDA and ROCm, which torch.accelerator refuses",
    "hfusion/torch_private/seeding.py": "asks devices that were not used yet for the seeds that wait for them",
    "hfusion/core/torch_settings.py": "lists the settings that forward may ask for",
    "hfusion/bench/harness.py": "reads the clock and the temperature of a GPU",
    "hfusion/bench/contact_benchmark.py": "reports the settings of a GPU, and the tests that need one",
    "hfusion/cluster/process_executor.py": "carries the flags of torch.backends to other processes",
}


def words(tree: ast.Module) -> Iterator[str]:
    """Names and texts of code; what only people read is left out."""
    texts = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    for node in ast.walk(tree):
        if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in texts:
            yield node.value
        elif isinstance(node, ast.Attribute):
            yield node.attr
        elif isinstance(node, ast.Name):
            yield node.id
        elif isinstance(node, ast.alias):
            yield node.name


def naming(source: str) -> list[str]:
    return [word for word in words(ast.parse(source)) if NAMED.search(word)]


def test_no_other_file_names_an_accelerator() -> None:
    files = {path for folder in FOLDERS for path in (ROOT / folder).rglob("*.py")}
    names_by_file = {str(path.relative_to(ROOT)): naming(path.read_text()) for path in files}
    assert {name for name, names in names_by_file.items() if names} == set(WHY)


def test_names_of_accelerators_are_found_in_source() -> None:
    assert naming("import torch\nx = torch.cuda.Stream()") == ["cuda"]
    assert naming('"""Of CUDA."""\nx.to("cuda:0")') == ["cuda:0"]
    assert naming('def f():\n    """cuda"""\n    return 1') == []


def without_device(source: str) -> list[str]:
    """Calls of torch that make a tensor on the default device."""
    return [
        ast.unparse(node)
        for node in ast.walk(ast.parse(source))
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and isinstance(node.func.value, ast.Name)
        and node.func.value.id == "torch"
        and FACTORIES.fullmatch(node.func.attr)
        and not any(keyword.arg in ("device", None) for keyword in node.keywords)
    ]


def test_the_default_device_decides_nothing() -> None:
    """Under ``torch.set_default_device``, a tensor of ours would be where nothing expects it."""
    folders = ("hfusion", "ops", "passes")
    files = [path for name in folders for path in (ROOT / name).rglob("*.py") if "bench" not in path.parts]
    calls_by_file = {str(path.relative_to(ROOT)): without_device(path.read_text()) for path in files}
    assert {name: calls for name, calls in calls_by_file.items() if calls} == {}
    assert without_device("torch.zeros(3)") == ["torch.zeros(3)"]
    assert without_device("torch.zeros(3, device=d)\ntorch.zeros_like(x)") == []
