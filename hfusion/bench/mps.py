"""Worker processes that share a GPU by NVIDIA's Multi-Process Service (MPS).

https://docs.nvidia.com/deploy/mps/index.html
"""

from __future__ import annotations

import os
import shutil
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

from hfusion.bench import processes
from hfusion.bench.workload import Running, Unavailable, Workload
from hfusion.device.native import cores

_DAEMON, _DAEMON_SECONDS = "nvidia-cuda-mps-control", 10.0
_PIPES, _LOGS = "CUDA_MPS_PIPE_DIRECTORY", "CUDA_MPS_LOG_DIRECTORY"
_ABSENT = "none: "


def start(workload: Workload) -> Running:
    """Start a process for each core, all under MPS. Raises Unavailable where there is none, or work for one only."""
    if workload.device.type != "cuda":
        raise Unavailable("needs --device cuda")
    with ExitStack() as stack:
        service = stack.enter_context(multi_process_service())
        if service.startswith(_ABSENT):
            raise Unavailable(f"MPS: {service.removeprefix(_ABSENT)}")
        workers = processes.start(workload, most=cores())
        stack.callback(workers.close)
        # Processes that start later have the GPU as without MPS.
        if service == "started":
            for name in (_PIPES, _LOGS):
                del os.environ[name]
        return Running(workers.step, stack.pop_all().close, cores=workers.cores, note=f"MPS: {service}")


@contextmanager
def multi_process_service() -> Iterator[str]:
    """Let processes that start in the block share a GPU by MPS. Yields how, or why they do not."""
    if Path(os.environ.get(_PIPES, "/tmp/nvidia-mps"), "control").exists():
        yield "runs already"
        return
    program = shutil.which(_DAEMON)
    if program is None:
        yield f"{_ABSENT}{_DAEMON} is not installed"
        return
    with tempfile.TemporaryDirectory() as folder, ExitStack() as stack:
        variables = {_PIPES: folder, _LOGS: folder}
        # In the foreground, so that it ends with the process group of the check at the latest.
        daemon = subprocess.Popen(
            [program, "-f"], env=os.environ | variables, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
        )
        stack.callback(daemon.wait)
        stack.callback(daemon.terminate)
        until = time.monotonic() + _DAEMON_SECONDS
        while daemon.poll() is None and not Path(folder, "control").exists() and time.monotonic() < until:
            time.sleep(0.1)
        if not Path(folder, "control").exists():
            yield f"{_ABSENT}{_DAEMON} -f did not start, exit status {daemon.poll()}"
            return
        os.environ.update(variables)
        for name in variables:
            stack.callback(os.environ.pop, name, None)
        yield "started"
