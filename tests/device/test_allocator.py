from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, threading, torch
from hfusion.device.allocator import keep_large_blocks
kept = keep_large_blocks()
def work():
    torch.zeros(10 << 20)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        torch.zeros(10 << 20)
    found.append(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
def thread():
    started = threading.Thread(target=work)
    started.start()
    started.join()
for place in (work, thread):
    found = []
    # A thread may get a heap that another one, of before, has left.
    for _ in range(4):
        place()
    print(kept, min(found))
"""


@pytest.mark.parametrize(("setting", "kept"), [("1", True), ("0", False)])
def test_large_blocks_are_mapped_once(setting: str, kept: bool) -> None:
    environment = {**os.environ, "HFUSION_KEEP_MEMORY": setting}
    result = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    main, thread = (line.split() for line in result.stdout.splitlines())
    assert main[0] == thread[0] == str(kept)
    # 40 MiB, more than glibc keeps by itself, are 10240 pages; memory that is handed back is faulted in again all three
    # times.
    assert (int(main[1]) < 2 * 10240) == (int(thread[1]) < 2 * 10240) == kept
