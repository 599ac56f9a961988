"""The checks of ``contact``: the most informative first, timed ones last, and the longest at the end."""

from __future__ import annotations

from hfusion.bench.contact_facts import fact_items
from hfusion.bench.contact_item import ContactItem
from hfusion.bench.contact_lowering import lowering_items
from hfusion.bench.contact_speed import speed_items
from hfusion.bench.contact_steps import optimizer_items, step_items
from hfusion.bench.contact_training import training_items


def items(quick: bool = False) -> tuple[ContactItem, ...]:
    """Return the checks in the order in which they start; ``quick``: of each kind some, which are small."""
    groups = (fact_items, step_items, optimizer_items, training_items, lowering_items, speed_items)
    return tuple(item for group in groups for item in group(quick))
