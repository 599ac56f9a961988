"""Writes the save of version 1 that the tests read for ever: ``python -m tests.checkpoint.version_1``."""

from __future__ import annotations

import json
from pathlib import Path

from tests.checkpoint.living import Batches, population, train


def main() -> None:
    folder = Path(__file__).with_name("version-1")
    batches, pop = Batches(), population(3)
    train(pop, batches, 3)
    pop.stop(1)
    train(pop, batches, 2)
    pop.save(folder, loader=batches)
    pop.fused.eval()
    losses = pop.step(*next(iter(batches)))
    (folder / "losses.json").write_text(json.dumps(losses[[0, 2]].tolist()))


if __name__ == "__main__":
    main()
