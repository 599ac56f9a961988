"""Bad parameters and hyper-parameters: the message names what, the values and the remedy."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from hfusion import optim
from hfusion.core.membership import Membership, mark
from hfusion.optim.hyper import MemberVector, member_vector
from tests.optim.arrays import Array


def test_shared_parameters_need_one_value() -> None:
    shared = mark(Parameter(torch.zeros(2)), Membership("base.weight", 2, False))
    with pytest.raises(
        ValueError, match=r"'base.weight' is one tensor for all 2 members, and lr differs .*\[0.1, 0.2\]"
    ):
        optim.Adam([shared], lr=[0.1, 0.2])
    optim.Adam([shared], lr=[0.1, 0.1])


def test_sparse_gradients_are_refused() -> None:
    array = Array(2, shapes=[(3,)])
    fused = optim.SGD(array.params)
    array.params[0].grad = torch.eye(2, 3, dtype=torch.float64).to_sparse()
    with pytest.raises(RuntimeError, match="SGD does not support sparse gradients"):
        fused.step()


@pytest.mark.parametrize("value", [0.1, 1, [0.1, 0.2], (0.1, 0.2), torch.tensor(0.1), [torch.tensor(0.1)] * 2])
def test_values_that_make_a_vector(value: Any) -> None:
    vector = member_vector("lr", value, 2)
    assert vector.dtype == torch.float64
    assert vector.shape == (2,)


def test_a_vector_copies_as_itself_and_pickles_as_a_tensor() -> None:
    vector = member_vector("lr", [0.1, 0.2], 2)
    for copied in (vector.clone(), copy.deepcopy(vector), vector * 2):
        assert type(copied) is MemberVector
    loaded = pickle.loads(pickle.dumps(vector))
    assert type(loaded) is torch.Tensor
    assert loaded.tolist() == [0.1, 0.2]


@pytest.mark.parametrize("kind", ["tensor", "vector"])
def test_groups_that_are_given_one_tensor_have_vectors_of_their_own(kind: str) -> None:
    lr = torch.tensor([0.1, 0.2], dtype=torch.float64)
    value = lr if kind == "tensor" else member_vector("lr", lr, 2)
    opt = optim.SGD([{"params": [param]} for param in Array(2).params[:2]], lr=value)
    opt.param_groups[0]["lr"].mul_(2)
    assert opt.param_groups[1]["lr"].tolist() == value.tolist() == [0.1, 0.2]


def test_fill() -> None:
    vector = member_vector("lr", 0.0, 2)
    assert vector.fill_(torch.tensor([1.0, 2.0])).tolist() == [1.0, 2.0]
    assert vector.fill_(3.0).tolist() == [3.0, 3.0]
    assert vector.fill_(torch.tensor(4.0)).tolist() == [4.0, 4.0]
    with pytest.raises(ValueError, match="cannot write 3 values into a hyper-parameter of 2 members"):
        vector.fill_(torch.zeros(3))
