from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, sys, threading, torch
from hfusion.device.allocator import keep_large_blocks
size = int(sys.argv[1])
kept = keep_large_blocks(size)
def work():
    torch.zeros(size // 4)
    before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
    for _ in range(3):
        torch.zeros(size // 4)
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


# glibc keeps blocks of up to 32 MiB by itself; a heap of a thread holds less than 64.
@pytest.mark.parametrize("size", [40 << 20, 100 << 20])
@pytest.mark.parametrize(("setting", "is_kept"), [("1", True), ("0", False)])
def test_large_blocks_are_mapped_once(setting: str, is_kept: bool, size: int) -> None:
    environment = {**os.environ, "HFUSION_KEEP_MEMORY": setting}
    command = [sys.executable, "-c", SCRIPT, str(size)]
    result = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    main, thread = (line.split() for line in result.stdout.splitlines())
    assert main[0] == thread[0] == str(is_kept)
    # Memory that is handed back is faulted in again all three times.
    faults = 2 * (size >> 12)
    assert (int(main[1]) < faults) == (int(thread[1]) < faults) == is_kept


def test_threads_have_heaps_of_their_own_unless_blocks_are_too_large_for_them() -> None:
    """A thread's first block of memory lies in a heap of 64 MiB, or in the one of the process."""
    script = """
import sys, threading
from hfusion.device.allocator import keep_large_blocks
import torch
keep_large_blocks(int(sys.argv[1]))
main, found = torch.empty(1 << 16).data_ptr(), []
thread = threading.Thread(target=lambda: found.append(torch.empty(1 << 16).data_ptr()))
thread.start()
thread.join()
print(abs(found[0] - main) > 1 << 30)
"""
    for size, separate in ((40 << 20, "True"), (100 << 20, "False")):
        command = [sys.executable, "-c", script, str(size)]
        assert subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip() == separate
