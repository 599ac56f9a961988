"""Train on simulated devices in many random orders, or with planted faults, each of which must be seen.

``python -m tests.simulated --orders 1000 --seed 0``, ``python -m tests.simulated --faults 16``.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings

import torch

from tests.simulated.device import install


def faults_seen(single: int) -> bool:
    """Plant ``single`` faults of each kind, one in a run, and then all of a kind: return whether each kind is seen.

    A fault that changes no value that is read is none: a wait that another one repeats, an operator in the default
    queue that the next copy waits for.
    """
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
            planted = 0 if kind == "wait" else single
            numbers = [counts[kind] * k // planted for k in range(planted)]
            detected = [k for k in numbers if run(k, disk, Fault(kind, k), order=order)]
            if numbers:
                print(f"{kind}: {len(detected)} of {len(numbers)} single ones seen", flush=True)
                unseen += [] if detected else [kind]
        errors = broken(0, disk, Fault("wait device"))
        print(f"wait device, after an error: {errors[:1]}", flush=True)
        unseen += [] if errors else ["wait device"]
    return not unseen


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulated", description=__doc__)
    parser.add_argument("--orders", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first order; each order has the next one")
    parser.add_argument("--faults", type=int, default=0, help="plant so many faults of each kind instead")
    args = parser.parse_args()
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    install()
    if args.faults:
        return not faults_seen(args.faults)
    from tests.simulated.orders import broken, run
    from tests.simulated.queues import QUEUES

    faults, operators, reads, start = 0, 0, 0, time.monotonic()
    with tempfile.TemporaryDirectory() as disk:
        for seed in range(args.seed, args.seed + args.orders):
            # Every tenth is ended by an error.
            wrong = broken(seed, disk) if seed % 10 == 9 else run(seed, disk)
            faults += bool(wrong)
            operators += QUEUES.operators
            reads += QUEUES.reads
            for words in wrong[:10]:
                print(f"seed {seed}: {words}", flush=True)
            if (seed - args.seed) % 100 == 99:
                print(f"up to seed {seed}: {faults} wrong, {time.monotonic() - start:.0f} s", flush=True)
    seconds = time.monotonic() - start
    print(
        f"{args.orders} orders, {operators:,} operators, {reads:,} reads by the host, {seconds:.0f} s: {faults} wrong"
    )
    return bool(faults)


if __name__ == "__main__":
    sys.exit(main())
