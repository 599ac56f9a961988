"""Set up each process that a benchmark starts on the null CUDA device: Python imports this file from PYTHONPATH.

Comparisons on the device say that all is equal, as in the tests of the folder above. As a process ends, it writes the
calls that were refused to a file of the folder that `REFUSED_CALLS` names.
"""

from __future__ import annotations

import atexit
import os
import sys
from pathlib import Path

# Compilers that Inductor starts need none of this, and no import of torch. `contact` runs the tests marked ``gpu``.
if any(word.startswith(("hfusion.bench", "pytest")) for word in sys.orig_argv):
    sys.path.insert(0, str(Path(__file__).resolve().parents[3]))
    from tests.null.calls import REFUSED_CALLS, compare_as_equal, since_reset

    _library = compare_as_equal()

    def _write() -> None:
        Path(os.environ[REFUSED_CALLS], str(os.getpid())).write_text("\n".join(since_reset().refused))

    atexit.register(_write)
