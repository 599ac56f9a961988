"""Passes over the graphs that Inductor compiles. Importing this file imports Inductor."""

from __future__ import annotations

from typing import Any

from torch._inductor import config
from torch._inductor.custom_graph_pass import CustomGraphPass, get_hash_for_files

__all__ = ["CustomGraphPass", "get_hash_for_files", "passes_already_set"]


def passes_already_set() -> tuple[Any, ...]:
    """Return the custom passes that the settings of the process run last on a graph."""
    custom_pass: Any = config.post_grad_custom_post_pass
    return () if custom_pass is None else (custom_pass,) if callable(custom_pass) else tuple(custom_pass)
