"""The process of a check of ``contact``: ``python -m hfusion.bench.contact_child CHECK RESULT``, two files."""

from __future__ import annotations

import faulthandler
import json
import os
import pickle
import signal
import sys
import traceback
from collections.abc import Sequence
from pathlib import Path
from threading import Thread

import torch

from hfusion.bench.contact_item import CheckResult, ContactItem, ContactStatus
from hfusion.bench.fuse_benchmark import reason_of


def main(arguments: Sequence[str]) -> None:
    """Run the pickled check and device of the file CHECK, and write the outcome to RESULT."""
    faulthandler.enable()
    check, result = map(Path, arguments)
    Thread(target=_end_with_parent, daemon=True).start()
    item, device = pickle.loads(check.read_bytes())
    result.write_text(write(run(item, device)))


def _end_with_parent() -> None:
    """Kill this process and all that it has started when the other end of its input is closed."""
    sys.stdin.buffer.read()
    if hasattr(os, "killpg"):
        os.killpg(0, signal.SIGKILL)
    os._exit(1)


def run(item: ContactItem, device: torch.device) -> CheckResult:
    """Run a check. An error is its outcome."""
    try:
        return item.run(device)
    except Exception as error:
        values = {"traceback": traceback.format_exc()}
        return CheckResult(ContactStatus.FAILED, reason_of(error), values=values)


def write(result: CheckResult) -> str:
    """Return ``result`` as JSON; values that JSON does not know become text."""
    fields = {"status": result.status.value, "reason": result.reason, "summary": result.summary}
    return json.dumps({**fields, "values": dict(result.values)}, default=str)


def read(text: str) -> CheckResult:
    """Return the result that `write` wrote as ``text``."""
    fields = json.loads(text)
    return CheckResult(ContactStatus(fields["status"]), fields["reason"], fields["summary"], fields["values"])


if __name__ == "__main__":
    main(sys.argv[1:])
