"""Members with hooks of torch's own tools train as alone: pruning, the old norms, fake quantisers."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune

import hfusion as hf

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


class Branch(nn.Linear):
    """Runs member by member."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x if float(x.detach().sum()) > -1e9 else -x)


HOOKED: dict[str, Callable[[nn.Module], nn.Module]] = {
    "unstructured": lambda m: prune.l1_unstructured(m, "weight", 0.5),
    "random": lambda m: prune.random_unstructured(m, "bias", 0.5),
    "structured": lambda m: prune.random_structured(m, "weight", 0.5, dim=0),
    "by norm": lambda m: prune.ln_structured(m, "weight", 1, n=2, dim=1),
    "identity": lambda m: prune.identity(m, "weight"),
    "by mask": lambda m: prune.custom_from_mask(m, "weight", torch.eye(4)),
    "own method": by_threshold,
    "twice": lambda m: prune.l1_unstructured(prune.random_structured(m, "weight", 0.25, dim=0), "weight", 2),
    "both": lambda m: prune.l1_unstructured(prune.l1_unstructured(m, "weight", 2), "bias", 1),
    "old weight norm": lambda m: nn.utils.weight_norm(m, dim=1),
    "old spectral norm": lambda m: nn.utils.spectral_norm(m, n_power_iterations=2),
}
LAYERS: dict[str, Callable[[], nn.Module]] = {"dense": lambda: nn.Linear(4, 4), "looped": lambda: Branch(4, 4)}


def compare_training(members: list[nn.Module], x: Tensor) -> hf.FusedModule:
    """Assert that an array trains as ``members`` alone do; gives the array, in eval mode."""
    array = hf.fuse(members)
    optimizers = [torch.optim.SGD(network.parameters(), lr=0.1, momentum=0.9) for network in (array, *members)]
    for _ in range(3):
        outputs, *rows = [module(x) for module in (array, *members)]
        torch.testing.assert_close(outputs, torch.stack(rows), rtol=1e-9, atol=1e-12)
        for optimizer, output in zip(optimizers, (outputs, *rows), strict=True):
            optimizer.zero_grad()
            output.sin().sum().backward()
            optimizer.step()
    for module in (array, *members):
        module.eval()
    expected = torch.stack([member(x) for member in members])
    torch.testing.assert_close(array(x), expected, rtol=1e-9, atol=1e-12)
    torch.testing.assert_close(torch.stack([m(x) for m in array.unfuse()]), expected, rtol=1e-9, atol=1e-12)
    for name, stack in array.state_dict().items():
        torch.testing.assert_close(stack, torch.stack([m.state_dict()[name] for m in members]), rtol=1e-9, atol=1e-12)
    return array


@pytest.mark.parametrize("layer", LAYERS)
@pytest.mark.parametrize("name", HOOKED)
def test_hooked_members_train_as_alone(name: str, layer: str) -> None:
    torch.manual_seed(0)
    members = [
        nn.Sequential(nn.Linear(4, 4), nn.Tanh(), HOOKED[name](LAYERS[layer]())).double() for _ in range(MEMBERS)
    ]
    compare_training(members, torch.randn(5, 4, dtype=torch.float64))


def prepared(kind: str) -> nn.Module:
    from torch.ao import quantization
    from torch.ao.quantization.quantize_fx import prepare_qat_fx

    torch.manual_seed(len(kind))
    model = nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 4))
    if kind == "graph":
        mapping = quantization.get_default_qat_qconfig_mapping("fbgemm")
        return prepare_qat_fx(model, mapping, (torch.randn(2, 4),))
    fake, weight = quantization.default_fake_quant, quantization.default_weight_fake_quant
    shared_qconfig = quantization.QConfig(activation=fake, weight=weight)
    model.qconfig = shared_qconfig if kind == "plain" else quantization.get_default_qat_qconfig("fbgemm")
    return quantization.prepare_qat(model)


@pytest.mark.parametrize("kind", ["plain", "fused observers", "graph"])
def test_quantisation_aware_training(kind: str) -> None:
    from torch.ao.quantization import convert

    members = [prepared(kind) for _ in range(2)]
    x = torch.randn(6, 4)
    for member in members:
        # The ranges of channels get their size at the first call.
        member(x)
    array = hf.fuse(members)
    for _ in range(3):
        for module in (array, *members):
            module.zero_grad()
            module(x).sin().sum().backward()
        for name, stack in array.named_parameters():
            torch.testing.assert_close(stack.grad, torch.stack([m.get_parameter(name).grad for m in members]))
        for name, stack in array.named_buffers():
            torch.testing.assert_close(stack, torch.stack([m.get_buffer(name) for m in members]))
    if kind != "graph":
        quantized = [convert(model.eval()) for model in (array.unfuse()[1], members[1])]
        assert [type(part) for part in quantized[0]] == [type(part) for part in quantized[1]]
