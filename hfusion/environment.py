"""Describe this installation (``python -m hfusion env``) and clear its cache (``python -m hfusion cache clear``)."""

from __future__ import annotations

import platform
import shlex
import shutil
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

import torch

from hfusion.core.text import aligned, readable
from hfusion.device.cache import cache_folder
from hfusion.device.native import compiler, processor_name

# Optional packages that the documentation mentions, with the extra of hfusion that installs each.
OPTIONAL = {
    "accelerate": "accelerate",
    "lightning": "lightning",
    "matplotlib": "demo",
    "optuna": "sweep",
    "pandas": "sweep",
    "peft": "lora",
    "plotly": "sweep",
    "ray": "cluster",
    "scikit-learn": "sklearn",
}


def describe(hfusion_version: str) -> str:
    """Return versions, processor, compiler, accelerator and caches as a table to read, or to send with a report."""
    installed = {name: _version(name) for name in OPTIONAL}
    optional = [f"{name} {number}" for name, number in installed.items() if number]
    absent = [f"{name} ([{OPTIONAL[name]}])" for name, number in installed.items() if not number]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    command = compiler()
    rows = [
        ("hfusion", hfusion_version),
        ("python", f"{platform.python_version()}, {platform.platform()}"),
        ("torch", torch.__version__),
        ("optional packages", ", ".join(optional) or "none"),
        ("not installed", ", ".join(absent) or "none"),
        ("processor", f"{processor_name()}, torch uses {torch.get_num_threads()} threads"),
        ("C compiler", shlex.join(command) if command else "none: compiled steps and C kernels are off (set CC)"),
        ("accelerator", str(accelerator) if accelerator else "none"),
        ("cache", _cache_summary(cache_folder())),
    ]
    return "\n".join(aligned(rows, left=2))


def _version(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return ""


def _sizes(folder: Path) -> dict[Path, int]:
    files = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return {path: path.lstat().st_size for path in files}


def _cache_summary(folder: Path) -> str:
    sizes = _sizes(folder)
    steps = sum(size for path, size in sizes.items() if path.name.startswith("step-"))
    return f"{folder}: {len(sizes)} files, {readable(sum(sizes.values()))}, {readable(steps)} of it compiled steps"


def clear_cache() -> str:
    """Delete all files in hfusion's cache folder, and return a line with their number and size.

    Running processes continue with what they have loaded. Later processes measure and compile again.
    """
    folder = cache_folder()
    sizes = _sizes(folder)
    for path in folder.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink(missing_ok=True)
    return f"deleted {len(sizes)} files, {readable(sum(sizes.values()))}, from {folder}"
