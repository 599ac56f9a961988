"""The example of members at their own pace at a small size: each makes the updates that its data give."""

from __future__ import annotations


def test_every_shop_goes_through_its_own_sales() -> None:
    from examples import own_pace

    pop = own_pace.main(["--shops", "4", "--epochs", "2", "--eager"])
    assert pop.ages.tolist() == [2 * -(-len(y) // own_pace.BATCH) for _, y in own_pace.sales(4)]
