"""The sub-benchmark ``links``: its rows hold together, and a faster link is never slower."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from hfusion.bench import links_benchmark
from hfusion.bench.__main__ import main
from hfusion.bench.cases import classified
from hfusion.bench.models import mlp
from hfusion.bench.shard_cases import ShardCase, linears, seeded

WIDE = ShardCase(
    "wide", "", partial(seeded, partial(mlp, *[256] * 9), 2), partial(classified, 4, 256), linears, parts=(1, 2)
)


def test_rows_hold_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(links_benchmark, "QUICK_CASES", (WIDE,))
    assert main(["links", "--quick", "--json", str(tmp_path / "links.json")]) == 0
    rows = [links_benchmark.LinksRow(**row) for row in json.loads((tmp_path / "links.json").read_text())["rows"]]
    assert len(rows) == links_benchmark.pieces([WIDE])
    by_name = {(row.link_gb, row.budget, row.contender): row for row in rows}
    for row in rows:
        assert row.ms is not None
        assert row.ms >= max(row.compute_ms or 0.0, row.transfer_ms or 0.0) * (1 - 1e-9)
        assert (row.shards == 1) == (row.budget == "1/1")
    for link in (12.0, 25.0):
        fused, alone = (by_name[link, "1/2", name] for name in (links_benchmark.OURS, links_benchmark.ALONE))
        assert (fused.ms or 0.0) <= (alone.ms or 0.0)
