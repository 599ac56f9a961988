"""The example of all cores at a small size: its ways agree."""

from __future__ import annotations

import pytest
import torch

from tests.step.test_train_step import needs_compiler

pytest.importorskip("sklearn")


@needs_compiler
@pytest.mark.usefixtures("two_threads")
def test_the_ways_agree(capsys: pytest.CaptureFixture[str]) -> None:
    from examples import all_cores

    losses = all_cores.main(["--members", "4", "--steps", "30"])
    assert set(losses) == {"1", "2", "auto"}
    assert torch.equal(losses["2"], losses["auto"])
    torch.testing.assert_close(losses["1"], losses["2"], rtol=1e-3, atol=1e-3)
    assert "2 threads of torch's" in capsys.readouterr().out
