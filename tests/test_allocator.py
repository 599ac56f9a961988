from __future__ import annotations

import os
import subprocess
import sys

import pytest

SCRIPT = """
import resource, torch
from hfusion.allocator import keep_large_blocks
kept = keep_large_blocks()
torch.zeros(1 << 24)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(5):
    torch.zeros(1 << 24)
print(kept, resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.parametrize(("setting", "kept"), [("1", True), ("0", False)])
def test_large_blocks_are_mapped_once(setting: str, kept: bool) -> None:
    environment = {**os.environ, "HFUSION_KEEP_MEMORY": setting}
    result = subprocess.run([sys.executable, "-c", SCRIPT], env=environment, capture_output=True, text=True, check=True)
    found, faults = result.stdout.split()
    assert found == str(kept)
    # 64 MiB are 16384 pages; memory that is handed back is faulted in again all five times.
    assert (int(faults) < 3 * 16384) == kept
