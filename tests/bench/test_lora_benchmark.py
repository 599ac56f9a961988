"""The benchmark of adapters: all ways to train them compute the same, and the table shows each."""

from __future__ import annotations

import pytest
import torch

from hfusion.bench import lora_benchmark
from hfusion.bench.workload import Disagreement

pytest.importorskip("peft")
pytest.importorskip("transformers")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
@pytest.mark.parametrize("case", [lora_benchmark.CASES[0], lora_benchmark.CASES[-1]], ids=lambda case: case.name)
def test_contenders_compute_the_same(case: lora_benchmark.LoraCase) -> None:
    # What is compiled is tested where it is compiled.
    names = [name for name in lora_benchmark.CONTENDERS if name != "hfusion-compiled"]
    steps = {name: lora_benchmark.CONTENDERS[name](case, 2) for name in names}
    lora_benchmark.check(steps)
    steps["wrong"] = lambda: torch.zeros(2)
    with pytest.raises(Disagreement, match="wrong: member 0 has loss 0"):
        lora_benchmark.check(steps)


def test_the_table_has_a_cell_for_each_contender() -> None:
    rows = [
        lora_benchmark.LoraRow("llama", 4, name, 10.0 * k, 1.0 * k, 0.1)
        for k, name in enumerate(lora_benchmark.CONTENDERS, 1)
    ]
    shown = lora_benchmark.table(rows)
    assert shown.row_count == 1
    assert [next(iter(column.cells)) for column in shown.columns][2:] == [
        "10.0  1.00x",
        "20.0  2.00x",
        "30.0  3.00x",
        "40.0  4.00x",
    ]
