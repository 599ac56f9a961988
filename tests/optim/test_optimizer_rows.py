"""Members that leave, join, are copied and restart equal torch.optim run alone, for every optimizer and option."""

from __future__ import annotations

import torch

from hfusion import optim
from tests.optim.arrays import Array


def test_a_hold_within_another_adds_to_it() -> None:
    array = Array(3, shapes=[(2,)])
    opt, before = optim.SGD(array.params, lr=0.1), array.params[0].detach().clone()
    array.draw_grads()
    with opt.holding(torch.tensor([True, False, False])):
        with opt.holding(torch.tensor([False, True, False])):
            assert opt.held_members == [0, 1]
            opt.step()
        assert opt.held_members == [0]
    assert opt.held_members == []
    assert (array.params[0].detach() != before).any(1).tolist() == [False, False, True]
