"""Bad parameters and hyper-parameters: the message names what, the values and the remedy."""

from __future__ import annotations

import copy
import pickle
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import Parameter

import hfusion as hf
from hfusion import optim
from hfusion.core.membership import Membership, mark
from hfusion.optim.hyper import MemberVector, member_vector
from tests.optim.arrays import Array

NAN = float("nan")


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        (
            "Adam",
            {"lr": [0.1, 0.2]},
            "lr has 2 values for an array of 3 members: give one value, or 3 of them",
        ),
        ("Adam", {"lr": [[0.1, 0.2, 0.3]]}, r"lr has shape \[1, 3\] for an array of 3 members"),
        ("Adam", {"lr": "fast"}, "lr='fast' is not a number"),
        ("Adam", {"lr": None}, "lr=None is not a number"),
        ("Adam", {"lr": -1.0}, "lr of member 0 is -1.0: it must be finite and at least 0"),
        ("Adam", {"lr": [0.1, NAN, 0.1]}, "lr of member 1 is nan"),
        ("Adam", {"lr": [0.1, 0.1, float("inf")]}, "lr of member 2 is inf"),
        (
            "Adam",
            {"betas": (0.9, [0.9, 1.0, 0.9])},
            r"betas\[1\] of member 1 is 1.0: .* at least 0 and below 1",
        ),
        ("Adam", {"betas": (-0.1, 0.9)}, r"betas\[0\] of member 0 is -0.1"),
        ("Adam", {"betas": 0.9}, "betas=0.9 is not a pair"),
        ("Adam", {"betas": ([0.9, 0.8], 0.9)}, r"betas\[0\] has 2 values for an array of 3 members"),
        ("AdamW", {"eps": -1e-8}, "eps of member 0 is -1e-08"),
        ("AdamW", {"weight_decay": [0.0, 0.0, -1.0]}, "weight_decay of member 2 is -1.0"),
        ("SGD", {"momentum": [0.9, -0.9, 0.9]}, "momentum of member 1 is -0.9"),
        ("SGD", {"dampening": NAN}, "dampening of member 0 is nan: it must be finite"),
        ("SGD", {"nesterov": True, "momentum": [0.9, 0.0, 0.9]}, "nesterov needs a momentum .* momentum=0.0"),
        ("SGD", {"nesterov": True, "momentum": 0.9, "dampening": [0, 0, 0.5]}, "nesterov .* dampening=0.5"),
        ("RMSprop", {"alpha": [0.9, -0.9, 0.9]}, "alpha of member 1 is -0.9"),
        ("Adagrad", {"initial_accumulator_value": [0.0, 0.0, -1.0]}, "initial_accumulator_value of member 2 is -1.0"),
        ("NAdam", {"momentum_decay": NAN}, "momentum_decay of member 0 is nan: it must be finite"),
        ("RAdam", {"betas": (0.9, [0.9, 1.0, 0.9])}, r"betas\[1\] of member 1 is 1.0"),
        ("Adamax", {"eps": [1e-8, 1e-8, -1.0]}, "eps of member 2 is -1.0"),
        ("Lion", {"betas": (1.0, 0.99)}, r"betas\[0\] of member 0 is 1.0: .* below 1"),
        ("Adadelta", {"rho": [0.9, 0.9, 1.5]}, "rho of member 2 is 1.5: it must be at least 0 and at most 1"),
    ],
)
def test_bad_values_are_refused(name: str, options: dict[str, Any], message: str) -> None:
    array = Array(3)
    with pytest.raises(ValueError, match=message):
        getattr(optim, name)(array.params, **options)
    fused = getattr(optim, name)(array.params[:2])
    with pytest.raises(ValueError, match=message):
        fused.add_param_group({"params": array.params[2:], **options})
    assert len(fused.param_groups) == 1
    array.draw_grads()
    before = [param.detach().clone() for param in array.params]
    fused.param_groups[0].update(options)
    with pytest.raises(ValueError, match=message):
        fused.step()
    assert all(torch.equal(param.detach(), old) for param, old in zip(array.params, before, strict=True))


def test_parameters_of_no_array_are_refused() -> None:
    array = Array(3)
    plain = Parameter(torch.zeros(2, 3))
    message = r"parameter 1 \(shape \[2, 3\]\) belongs to no fused module: pass fused.parameters\(\)"
    with pytest.raises(ValueError, match=message):
        optim.SGD([array.params[0], plain])
    with pytest.raises(ValueError, match=r"parameter 1 \('p0'\) belongs to an array of 2 members, those before"):
        optim.SGD([array.params[0], Array(2).params[0]])
    fused = optim.SGD(array.params)
    with pytest.raises(ValueError, match="param group 1 belongs to an array of 2 members, the first group to one of 3"):
        fused.add_param_group({"params": Array(2).params})
    assert len(fused.param_groups) == 1
    assert len(fused.param_groups) == 1


def test_a_module_is_refused_in_words() -> None:
    with pytest.raises(TypeError, match=r"params must be parameters, got FusedModule. Give fused.parameters\(\)"):
        optim.Adam(hf.fuse([nn.Linear(2, 1) for _ in range(2)]))


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
