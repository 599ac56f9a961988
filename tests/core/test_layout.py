"""A value that all members share becomes one value for each of them."""

from __future__ import annotations

import pytest
import torch

from hfusion.core.layout import shared_to_stacked


@pytest.mark.filterwarnings("ignore:ComplexHalf support:UserWarning")
def test_half_precision_complex_numbers_get_the_sum_of_gradients() -> None:
    x = torch.tensor([1 + 2j, 3 - 1j], dtype=torch.complex64, requires_grad=True)
    stack = shared_to_stacked(x.to(torch.complex32), 3)
    assert torch.equal(stack.to(torch.complex64), x.detach().expand(3, 2))
    grad = torch.tensor([[1, 1j], [2, 2j], [3, 3j]], dtype=torch.complex64)
    stack.backward(grad.to(torch.complex32))
    assert x.grad is not None
    assert torch.equal(x.grad, grad.sum(0))
