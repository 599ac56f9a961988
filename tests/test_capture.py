"""Captures: how often forward runs, and members with containers of their own."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field, fields
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.utils import _pytree as pytree

import hfusion as hf
from hfusion.capture.export import capture
from hfusion.core.program import Capture
from tests.alone import Branch, assert_alone, assert_trained_alone, compare_call, normal
from tests.forwards.table import linear, module

# How often forward is traced and run: captures are found again, and few runs answer all questions of one.
SCALE = 2.0
SETTINGS: dict[str, Any] = {"power": 1}


def scaled(x: Tensor) -> Tensor:
    return x * SCALE


class Helper:
    shift = 1.0

    def apply(self, x: Tensor) -> Tensor:
        return x + self.shift


class Reading(nn.Module):
    """Reads an attribute, variables of its file through a function and a method, a class and an object."""

    factor = 1.0

    def __init__(self) -> None:
        super().__init__()
        self.linear, self.drop = nn.Linear(3, 3), nn.Dropout(0.0)
        self.slope, self.table, self.helper = 0.1, [0.0, 1.0, 2.0], Helper()

    def power(self, x: Tensor) -> Tensor:
        return x ** SETTINGS["power"]

    def forward(self, x: Tensor) -> Tensor:
        h = scaled(self.power(self.linear(x.to(self.linear.weight)))) * self.factor + torch.tensor(self.table)
        return nn.functional.leaky_relu(self.helper.apply(self.drop(h)), self.slope)


class Other(Reading):
    def power(self, x: Tensor) -> Tensor:
        return -super().power(x)


def found(module: nn.Module, *args: Any, **options: Any) -> Capture:
    return capture(module, args or (torch.ones(4, 3),), {}, **options)


CHANGES: dict[str, Callable[[Reading], Any]] = {
    "attribute": lambda m: setattr(m, "slope", 0.2),
    "zero of another sign": lambda m: setattr(m, "slope", -0.1),
    "dtype": lambda m: m.double(),
    "mode": lambda m: m.eval(),
    "frozen": lambda m: m.linear.weight.requires_grad_(False),
    "table": lambda m: m.table.__setitem__(0, 1.0),
    "object": lambda m: setattr(m.helper, "shift", 4.0),
    "hook": lambda m: m.drop.register_forward_hook(lambda part, args, output: output * 3),
    "own method": lambda m: setattr(m, "power", lambda x: x * 5),
    "class": lambda m: setattr(m, "__class__", Other),
    "width": lambda m: setattr(m, "linear", nn.Linear(3, 3, bias=False)),
}
NAMED = [("SCALE", 3.0), ("scaled", lambda x: x), ("Reading.factor", 2.0), ("Helper.shift", 3.0)]


def test_a_capture_is_found_again_only_where_nothing_is_different(monkeypatch: pytest.MonkeyPatch) -> None:
    first_model = Reading()
    first = found(first_model).graph
    assert found(Reading()).graph is first
    for name, change in CHANGES.items():
        model = Reading()
        change(model)
        assert found(model).graph is not first, name
    for name, value in NAMED:
        with monkeypatch.context() as changed:
            changed.setattr(f"{__name__}.{name}", value)
            assert found(Reading()).graph is not first, name
    monkeypatch.setitem(SETTINGS, "power", 2)
    assert found(Reading()).graph is not first
    monkeypatch.setitem(SETTINGS, "power", 1)
    x = torch.ones(4, 3)
    graphs = [
        found(first_model, *args, **options).graph
        for args, options in [
            ([torch.ones(5, 3)], {}),
            ([torch.ones(4, 3, requires_grad=True)], {}),
            ([x], {"varying": False}),
            ([torch.ones(4, 2, 3)], {}),
            ([x], {"dims": [{1}]}),
            ([x.double()], {}),
        ]
    ]
    assert len({id(graph) for graph in [first, *graphs]}) == 7
    torch.set_default_dtype(torch.float64)
    assert found(first_model, x).graph is not first


# Members that give, and hand to one another, containers of their author's own.
@dataclass
class Plain:
    sample: Tensor
    extra: Any = None


@dataclass(frozen=True)
class Frozen:
    sample: Tensor
    count: int = 3


@dataclass
class Mapped(OrderedDict[str, Any]):
    """As diffusers and transformers have them: an ordered dict of the fields that are not None, known to torch."""

    sample: Tensor | None = None
    extra: Any = None

    def __post_init__(self) -> None:
        for entry in fields(self):
            if getattr(self, entry.name) is not None:
                self[entry.name] = getattr(self, entry.name)

    def __setattr__(self, name: str, value: Any) -> None:
        if name in self:
            super().__setitem__(name, value)
        super().__setattr__(name, value)


pytree.register_pytree_node(
    Mapped,
    lambda mapped: (list(mapped.values()), list(mapped.keys())),
    lambda values, keys: Mapped(**dict(zip(keys, values, strict=True))),
)


@dataclass
class Counting:
    """Has more than its fields say."""

    sample: Tensor
    norm: Tensor = field(init=False)

    def __post_init__(self) -> None:
        self.norm = self.sample.norm()


class Around:
    def __init__(self, sample: Tensor) -> None:
        self.sample = sample


OUTPUTS: dict[str, Callable[[Tensor], Any]] = {
    "dataclass": Plain,
    "mapping": lambda y: Mapped(sample=y, extra=(y * 2, None)),
    "dataclass in a dataclass": lambda y: Plain(y, {"more": Frozen(y * 2)}),
}


class Net(nn.Module):
    def __init__(self, output: Callable[[Tensor], Any], leaf: nn.Module | None = None) -> None:
        super().__init__()
        self.output, self.fc, self.leaf = output, nn.Linear(4, 3).double(), leaf

    def forward(self, x: Tensor) -> Any:
        y = self.output(self.fc(x))
        return y if self.leaf is None else self.leaf(y)


def loss(output: Any, target: Tensor) -> Tensor:
    return F.mse_loss(output.sample, target)


@pytest.mark.parametrize("compile", [False, True])
@pytest.mark.parametrize("name", OUTPUTS)
def test_losses_read_their_attributes(name: str, compile: bool) -> None:
    models: list[nn.Module] = [Net(OUTPUTS[name]) for _ in range(2)]
    x, target = normal(5, 4), normal(5, 3)
    assert type(hf.fuse(models)(x)) is type(models[0](x))
    step = assert_trained_alone(models, loss, [(x, target)] * 3, compile=compile)
    assert compile == all(row.how != "eager" for row in step.report().rows)


@pytest.mark.parametrize("output", [Counting, Around])
def test_containers_with_more_than_their_fields_are_refused(output: Callable[[Tensor], Any]) -> None:
    with pytest.raises(hf.FusionError, match=f"returns (a )?{output.__name__}; let it return tensors only"):  # type: ignore[attr-defined]
        hf.fuse([Net(output), Net(output)])(normal(5, 4))


# Members with hooks of torch's own tools train as alone: pruning, the old norms, fake quantisers.

MEMBERS = 3

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*weight_norm.* is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.ao.quantization is deprecated"),
    pytest.mark.filterwarnings("ignore:Please use quant_min and quant_max"),
    pytest.mark.filterwarnings("ignore:_aminmax is deprecated"),
    pytest.mark.filterwarnings("ignore:torch.quantize_per_tensor"),
]


class Threshold(prune.BasePruningMethod):
    PRUNING_TYPE = "unstructured"

    def compute_mask(self, tensor: Tensor, default_mask: Tensor) -> Tensor:
        return default_mask * (tensor.abs() > 0.2)


def by_threshold(module: nn.Module) -> nn.Module:
    Threshold.apply(module, "weight")
    return module


HOOKED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "unstructured": lambda m: prune.l1_unstructured(m, "weight", 0.5),
    "own method": by_threshold,
    "twice": lambda m: prune.l1_unstructured(prune.random_structured(m, "weight", 0.25, dim=0), "weight", 2),
    "old weight norm": lambda m: nn.utils.weight_norm(m, dim=1),
    "old spectral norm": lambda m: nn.utils.spectral_norm(m, n_power_iterations=2),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {"dense": lambda: nn.Linear(4, 4), "looped": lambda: Branch(4, 4)}


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", HOOKED)
def test_hooked_members_train_as_alone(name: str, layer: str) -> None:
    members = [
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), HOOKED[name](LAYERS[layer]())).double() for _ in range(MEMBERS)
    ]
    x = normal(5, 4)
    array = assert_alone(members, x, x, normal(5, 4), rate=0.1, copies=False).eval()
    expected = torch.stack([member.eval()(x) for member in members])
    for outputs in (array(x), torch.stack([member(x) for member in array.unfuse()])):
        torch.testing.assert_close(outputs, expected, rtol=1e-9, atol=1e-12)
    assert list(array.state_dict()) == list(members[0].state_dict())


def prepared() -> nn.Module:
    from torch.ao import quantization

    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
    fake, weight = quantization.default_fake_quant, quantization.default_weight_fake_quant
    shared_qconfig = quantization.QConfig(activation=fake, weight=weight)
    model.qconfig = shared_qconfig
    return quantization.prepare_qat(model)


def test_quantisation_aware_training(monkeypatch: pytest.MonkeyPatch) -> None:
    from torch.ao.quantization import convert

    monkeypatch.setattr("tests.alone.RELATIVE", 1e-6)
    monkeypatch.setattr("tests.alone.ABSOLUTE", 1e-5)
    members = [prepared() for _ in range(2)]
    x = torch.randn(6, 4)
    for member in members:
        # The ranges of channels get their size at the first call.
        member(x)
    array = hf.fuse(members)
    for _ in range(3):
        compare_call(array, members, x)
    quantized = [convert(model.eval()) for model in (array.unfuse()[1], members[1])]
    assert [type(part) for part in quantized[0]] == [type(part) for part in quantized[1]]


# Writes into its input where that is not negative, and changes no bit of it.
Clamping = module(lambda self, x: self.fc(x.relu_() if float(x.detach().min()) >= 0 else x), fc=linear)


def test_a_write_of_the_same_bits_into_an_input_that_members_share_is_refused() -> None:
    fused = hf.fuse([Clamping() for _ in range(2)])
    ones = torch.ones(3, 4, dtype=torch.float64)
    fused(-ones)
    with pytest.raises(hf.FusionError, match="writes into its input of shape"):
        fused(ones)
