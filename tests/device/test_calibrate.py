"""The machines and devices for which measured rates are kept."""

from __future__ import annotations

import platform

import pytest
import torch

from hfusion.device import calibrate
from hfusion.device.cache import cache_file

CPU = torch.device("cpu")


def kept_at() -> str:
    return str(cache_file("compute", calibrate.describe(CPU)))


def test_rates_do_not_depend_on_the_name_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    before = kept_at()
    monkeypatch.setattr(platform, "node", lambda: "another")
    assert kept_at() == before


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("processor_name", "Another Processor"),
        ("processor", "flags: fpu avx512f"),
        ("cores", 96),
        ("core_cache", 1 << 30),
    ],
)
def test_each_processor_has_rates_of_its_own(monkeypatch: pytest.MonkeyPatch, name: str, value: object) -> None:
    before = kept_at()
    monkeypatch.setattr(calibrate, name, lambda: value)
    assert kept_at() != before
