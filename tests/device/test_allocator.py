from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, threading, torch
from hfusion.device.allocator import keep_large_blocks
kept = keep_large_blocks()
def work():
    torch.zeros(1 << 24)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(5):
        torch.zeros(1 << 24)
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
found = []
# A thread may get a heap that another one, of before, has left.
for _ in range(8):
    thread = threading.Thread(target=work)
    work() if sys.argv[1] == "main" else (thread.start(), thread.join())
print(kept, min(found))
"""


@pytest.mark.parametrize("where", ["main", "thread"])
@pytest.mark.parametrize(("setting", "kept"), [("1", True), ("0", False)])
def test_large_blocks_are_mapped_once(setting: str, kept: bool, where: str) -> None:
    environment = {**os.environ, "HFUSION_KEEP_MEMORY": setting}
    result = subprocess.run(
        [sys.executable, "-c", SCRIPT, where], env=environment, capture_output=True, text=True, check=True
    )
    found, faults = result.stdout.split()
    assert found == str(kept)
    # 64 MiB are 16384 pages; memory that is handed back is faulted in again all five times.
    assert (int(faults) < 3 * 16384) == kept
