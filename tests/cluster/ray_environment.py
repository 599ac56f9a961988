"""The environment variables under which tests start Ray on this machine."""

from __future__ import annotations

# Ray lowers the priority of its workers (15) below that of whatever else runs: beside four busy processes on two cores
# they get a thirtieth of a core.
RAY_ENVIRONMENT = {"RAY_AUTH_MODE": "disabled", "RAY_worker_niceness": "0"}
