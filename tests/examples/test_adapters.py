"""The example of adapters at a small size: it learns, and peft loads what it writes."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

pytest.importorskip("peft")
pytest.importorskip("transformers")


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_adapters_learn_and_are_written_for_peft(tmp_path: Path) -> None:
    from peft import PeftModel

    from examples import adapters

    losses = adapters.main(["--members", "3", "--steps", "30", "--eager", "--out", str(tmp_path)])
    assert losses.shape == (30, 3)
    base, ids = adapters.make_base(30), adapters.windows(adapters.text("heapq"), torch.Generator().manual_seed(5))
    before = adapters.next_letter(base(ids), ids).item()
    model = PeftModel.from_pretrained(base, tmp_path / "heapq")
    assert adapters.next_letter(model(ids), ids) < before
