"""Every public name shows how it is used."""

from __future__ import annotations

import pytest

import hfusion as hf

# The examples of `hf.fuse` and `hf.build` show the arrays that these make.
NAMES = [name for name in hf.__all__ if callable(getattr(hf, name)) and name != "FusedModule"]


@pytest.mark.parametrize("name", NAMES)
def test_a_public_name_has_an_example(name: str) -> None:
    assert ">>>" in (getattr(hf, name).__doc__ or ""), f"the docstring of hf.{name} has no example"
