"""Command line of hfusion.

``python -m hfusion run SCRIPT --resume FOLDER`` runs a script whose sweeps and tasks go on where they were stopped.
Slurm, SkyPilot and Kubernetes end a job by SIGTERM, and start the same command again. Under it each call of hf.sweep
and hf.train that names no folder of its own is saved in one of FOLDER, by the order of the calls. SIGTERM ends the
script as Ctrl-C does, with status 143: at most the work since the last save is done again.

``python -m hfusion status FOLDER`` shows what the runs saved in FOLDER are doing, also while they run.

``python -m hfusion env`` prints versions, processor, compiler and caches; ``python -m hfusion cache clear`` empties the
cache; ``python -m hfusion --version`` prints the version.
"""

from __future__ import annotations

import argparse
import platform
import runpy
import shlex
import shutil
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from importlib.metadata import distributions
from pathlib import Path
from typing import Any, NoReturn

import torch

from hfusion import __version__
from hfusion.core.errors import CheckpointError
from hfusion.core.event_log import resuming
from hfusion.core.text import aligned, readable
from hfusion.device.cache import cache_folder
from hfusion.device.native import compiler, processor_name

# What shells say of a process that these ended.
TERMINATED, INTERRUPTED = 128 + signal.SIGTERM, 128 + signal.SIGINT


def main(arguments: Sequence[str]) -> int:
    """Run one command and return its exit status."""
    parser = argparse.ArgumentParser(prog="python -m hfusion", description="Tools of hfusion.", allow_abbrev=False)
    parser.add_argument("--version", action="version", version=f"hfusion {__version__}")
    commands = parser.add_subparsers(dest="command", required=True)
    run = commands.add_parser("run", help="run a script that resumes where it was stopped", allow_abbrev=False)
    run.add_argument("script", type=Path)
    run.add_argument("--resume", metavar="FOLDER", type=Path, help="where to save, and to resume from")
    status = commands.add_parser("status", help="show what the runs saved in a folder are doing", allow_abbrev=False)
    status.add_argument("folder", type=Path, help="of hf.train(checkpoint=), hf.sweep(directory=) or run --resume")
    status.add_argument("--json", action="store_true", help="print JSON instead of tables")
    commands.add_parser("env", help="print versions, processor, compiler and caches")
    caches = commands.add_parser("cache", help="empty the cache of compiled steps and measurements")
    caches.add_argument("action", choices=["clear"])
    end = arguments.index("--") if "--" in arguments else len(arguments)
    parsed, rest = parser.parse_known_args(arguments[:end])
    if parsed.command == "run":
        if not parsed.script.is_file():
            parser.exit(2, f"python -m hfusion: there is no script {parsed.script}\n")
        # The script's arguments are those that are not known here, and all after ``--``.
        return _run(parsed, [*rest, *arguments[end + 1 :]])
    if len(rest) + len(arguments) > end:
        parser.error(f"unknown arguments of {parsed.command}: {' '.join([*rest, *arguments[end:]])}")
    if parsed.command == "status":
        # Scripts that are run need nothing of it.
        from hfusion.status import print_status, read_status, to_json

        try:
            runs = read_status(parsed.folder)
        except CheckpointError as error:
            print(f"python -m hfusion: {error}", file=sys.stderr)
            return 2
        if parsed.json:
            print(to_json(runs))
        else:
            print_status(runs)
    else:
        print(describe() if parsed.command == "env" else clear_cache())
    return 0


def _run(parsed: argparse.Namespace, rest: list[str]) -> int:
    """Run a script as its own main program, and return its exit status."""
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = [str(parsed.script), *rest], str(parsed.script.parent.absolute())
    signals: list[int] = []

    def terminate(number: int, frame: Any) -> NoReturn:
        signals.append(number)
        # Whatever ends well at Ctrl-C does so now. Whoever sends another signal does not want to wait.
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        raise KeyboardInterrupt

    previous_handler = signal.signal(signal.SIGTERM, terminate)
    resume_hint = "" if parsed.resume is None else "; the same command goes on"
    try:
        with nullcontext() if parsed.resume is None else resuming(parsed.resume.absolute()):
            runpy.run_path(str(parsed.script), run_name="__main__")
    except (Exception, KeyboardInterrupt) as error:
        if isinstance(error, Exception):
            # If the whole process group gets SIGTERM, this process may see first that its child processes have ended.
            if not signals:
                raise
            traceback.print_exc()
        print(f"{'ended by SIGTERM' if signals else 'interrupted'}{resume_hint}", file=sys.stderr)
        return TERMINATED if signals else INTERRUPTED
    finally:
        signal.signal(signal.SIGTERM, previous_handler)
        sys.argv, sys.path[:] = argv, path
    return 0


# Describe this installation (``python -m hfusion env``) and clear its cache (``python -m hfusion cache clear``).

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


def describe() -> str:
    """Return versions, processor, compiler, accelerator and caches as a table to read, or to send with a report."""
    installed = {found.name.lower(): found.version for found in distributions()}
    optional = [f"{name} {installed[name]}" for name in OPTIONAL if name in installed]
    absent = [f"{name} ([{extra}])" for name, extra in OPTIONAL.items() if name not in installed]
    accelerator = torch.accelerator.current_accelerator(check_available=True)
    command, folder = compiler(), cache_folder()
    sizes = _sizes(folder)
    steps = sum(size for path, size in sizes.items() if path.name.startswith("step-"))
    held = f"{len(sizes)} files, {readable(sum(sizes.values()))}, {readable(steps)} of it compiled steps"
    rows = [
        ("hfusion", __version__),
        ("python", f"{platform.python_version()}, {platform.platform()}"),
        ("torch", torch.__version__),
        ("optional packages", ", ".join(optional) or "none"),
        ("not installed", ", ".join(absent) or "none"),
        ("processor", f"{processor_name()}, torch uses {torch.get_num_threads()} threads"),
        ("C compiler", shlex.join(command) if command else "none: compiled steps and C kernels are off (set CC)"),
        ("accelerator", str(accelerator) if accelerator else "none"),
        ("cache", f"{folder}: {held}"),
    ]
    return "\n".join(aligned(rows, left=2))


def _sizes(folder: Path) -> dict[Path, int]:
    files = [path for path in folder.rglob("*") if path.is_symlink() or not path.is_dir()]
    return {path: path.lstat().st_size for path in files}


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


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
