"""``python -m hfusion run SCRIPT --resume FOLDER``: a script whose sweeps and tasks go on where they were stopped.

Slurm, SkyPilot and Kubernetes end a job by SIGTERM, and start the same command again. Under it each call of hf.sweep
and hf.train that names no folder of its own is saved in one of FOLDER, by the order of the calls. SIGTERM ends the
script as Ctrl-C does, with status 143: at most the work since the last save is done again.
"""

from __future__ import annotations

import argparse
import runpy
import signal
import sys
import traceback
from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NoReturn

from hfusion.core.resuming import resuming

# What shells say of a process that these ended.
TERMINATED, INTERRUPTED = 128 + signal.SIGTERM, 128 + signal.SIGINT


class Terminated(KeyboardInterrupt):
    """SIGTERM has come. Whatever ends well at Ctrl-C does so now."""


def _terminate(come: list[int], number: int, frame: Any) -> NoReturn:
    come.append(number)
    # Whoever sends another does not want to wait.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    raise Terminated


def _parsed(arguments: Sequence[str]) -> tuple[argparse.Namespace, list[str]]:
    """The options, and what is the script's: what is not known here, and all after ``--``."""
    parser = argparse.ArgumentParser(prog="python -m hfusion", description=__doc__, allow_abbrev=False)
    parser.add_argument("command", choices=["run"])
    parser.add_argument("script", type=Path)
    parser.add_argument("--resume", metavar="FOLDER", type=Path, help="where to save, and to go on from")
    place = arguments.index("--") if "--" in arguments else len(arguments)
    parsed, rest = parser.parse_known_args(arguments[:place])
    if not parsed.script.is_file():
        parser.exit(2, f"python -m hfusion: there is no script {parsed.script}\n")
    return parsed, [*rest, *arguments[place + 1 :]]


def main(arguments: Sequence[str]) -> int:
    """Run a script as its own main program; its exit status."""
    parsed, rest = _parsed(arguments)
    argv, path = sys.argv, list(sys.path)
    sys.argv, sys.path[0] = [str(parsed.script), *rest], str(parsed.script.parent.absolute())
    come: list[int] = []
    before = signal.signal(signal.SIGTERM, partial(_terminate, come))
    again = "" if parsed.resume is None else "; the same command goes on"
    try:
        with nullcontext() if parsed.resume is None else resuming(parsed.resume.absolute()):
            runpy.run_path(str(parsed.script), run_name="__main__")
    except Terminated:
        print(f"ended by SIGTERM{again}", file=sys.stderr)
        return TERMINATED
    except KeyboardInterrupt:
        print(f"interrupted{again}", file=sys.stderr)
        return INTERRUPTED
    except Exception:
        # Who is sent SIGTERM with his processes may see first that these are gone.
        if not come:
            raise
        traceback.print_exc()
        print(f"ended by SIGTERM{again}", file=sys.stderr)
        return TERMINATED
    finally:
        signal.signal(signal.SIGTERM, before)
        sys.argv, sys.path[:] = argv, path
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
