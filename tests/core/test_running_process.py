"""Check if a process runs, as opposed to one that has ended or another one of the same number."""

from __future__ import annotations

import os
import signal
import subprocess
import sys

import pytest

from hfusion.core.running_process import is_running, process_start

pytestmark = pytest.mark.skipif(os.name != "posix", reason="other systems do not tell")


def test_a_process_and_its_end() -> None:
    with subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE) as process:
        start = process_start(process.pid)
        assert is_running(process.pid, start) is True
        if start is not None:
            assert is_running(process.pid, str(int(start) + 1)) is False, "its number was given again"
        process.send_signal(signal.SIGKILL)
        os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
        if start is not None:
            assert is_running(process.pid, start) is False, "it has ended, and nobody has waited for it"
        process.wait()
    assert is_running(process.pid, start) is False
    assert process_start(process.pid) is None
    assert is_running(os.getpid(), process_start(os.getpid())) is True
