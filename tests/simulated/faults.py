"""Plant faults in a run on simulated devices, ``python -m tests.simulated.faults``: each must be seen.

A fault that changes no value that is read is none: a wait that another one repeats, an operator in the default
queue that the next copy waits for.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import warnings

import torch

from tests.simulated.device import install


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulated.faults", description=__doc__)
    parser.add_argument("--single", type=int, default=0, help="so many faults of each kind, one in a run")
    arguments = parser.parse_args()
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    install()
    from tests.simulated.orders import Order, broken, run
    from tests.simulated.queues import QUEUES, Fault

    order = Order((1,), (4,), (False,), (False,), ("sim:0",), 5_000, "fifo", "1GiB")
    unseen = []
    with tempfile.TemporaryDirectory() as disk:
        for seed in range(2):
            # The first run captures, too.
            assert not run(seed, disk, order=order)
        counts = dict(QUEUES.counts)
        for kind in ("wait stream", "wait", "queue", "free"):
            errors = run(0, disk, Fault(kind), order=order)
            print(f"{kind}: all {counts[kind]}: {errors[:1]}", flush=True)
            unseen += [] if errors else [kind]
            # The wait for one action is repeated by that for the next one of its queue.
            single = 0 if kind == "wait" else arguments.single
            numbers = [counts[kind] * k // single for k in range(single)]
            detected = [k for k in numbers if run(k, disk, Fault(kind, k), order=order)]
            if numbers:
                print(f"{kind}: {len(detected)} of {len(numbers)} single ones seen", flush=True)
                unseen += [] if detected else [kind]
        errors = broken(0, disk, Fault("wait device"))
        print(f"wait device, after an error: {errors[:1]}", flush=True)
        unseen += [] if errors else ["wait device"]
    return bool(unseen)


if __name__ == "__main__":
    sys.exit(main())
