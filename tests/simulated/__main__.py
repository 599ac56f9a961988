"""Train on simulated devices in many random orders, ``python -m tests.simulated --orders 1000 --seed 0``."""

from __future__ import annotations

import argparse
import sys
import tempfile
import time
import warnings

import torch

from tests.simulated.device import install


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.simulated", description=__doc__)
    parser.add_argument("--orders", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0, help="of the first order; each order has the next one")
    args = parser.parse_args()
    warnings.simplefilter("error")
    torch.set_num_threads(1)
    install()
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
