"""Parameters of half precision with weights in float32 beside them, as loops over members keep them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn import Parameter

import hfusion as hf
from hfusion.optim import group
from tests.optim.arrays import CASES, Array, Per, alone_class, for_array, for_member, run, start
from tests.optim.interpreted import Closure, forget, interpret

SHAPES = ((7, 5), (2,), (0,), (131,))
DTYPES = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bfloat16", "float16"])


class Masters:
    """The members' optimizers of torch over float32 copies of their parameters."""

    def __init__(self, name: str, options: dict[str, Any], array: Array) -> None:
        self.array = array
        self.copies = [[Parameter(param.detach().float()) for param in params] for params in array.members]
        pairs = enumerate(self.copies)
        self.optimizers = [alone_class(name)(params, **for_member(options, member)) for member, params in pairs]

    def step(self) -> None:
        for optimizer, copies, params in zip(self.optimizers, self.copies, self.array.members, strict=True):
            for master, param in zip(copies, params, strict=True):
                master.grad = None if param.grad is None else param.grad.float()
            optimizer.step()
            for master, param in zip(copies, params, strict=True):
                param.data.copy_(master.detach())


def fused_optimizer(name: str, options: dict[str, Any], array: Array) -> Any:
    return getattr(hf.optim, name)(array.params, **for_array(options, len(array)), master_weights=True)


def check(fused: Any, alone: Masters) -> None:
    for index, param in enumerate(alone.array.params):
        state = fused.state[param]
        expected = torch.stack([copies[index].detach() for copies in alone.copies])
        torch.testing.assert_close(state["master_param"], expected, rtol=2e-6, atol=2e-6)
        assert torch.equal(param.detach(), state["master_param"].to(param.dtype))
        stacks = {key: value.dtype for key, value in state.items() if key not in fused.numbers}
        assert set(stacks.values()) == {torch.float32}


@DTYPES
@pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)
def test_steps_are_those_of_float32_copies(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    array = Array(3, SHAPES, dtype)
    fused, alone = fused_optimizer(name, options, array), Masters(name, options, array)
    run(array, fused, [alone], 4, steady=True)
    check(fused, alone)


def models(count: int = 3, dtype: torch.dtype = torch.bfloat16) -> list[nn.Module]:
    torch.manual_seed(5)
    return [nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3)).to(dtype) for _ in range(count)]


def batch(dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, Tensor]:
    return torch.randn(16, 4).to(dtype), torch.randn(16, 3).to(dtype)


def steps(optimizer: Any, fused: Any, batches: list[tuple[Tensor, Tensor]]) -> None:
    step = hf.train_step(fused, F.mse_loss, optimizer, compile=False)
    for x, y in batches:
        step(x, y)


def weights(fused: Any) -> list[Tensor]:
    return [param.detach().clone() for param in fused.parameters()]


SAVED = ["SGD", "Adagrad", "AdamW", "NAdam"]


def with_masters(name: str) -> Callable[[Any], Any]:
    momentum = {"momentum": 0.9} if name in ("SGD", "RMSprop") else {}
    return functools.partial(getattr(hf.optim, name), lr=1e-2, master_weights=True, **momentum)


def all_state(fused: Any, optimizer: Any) -> list[Tensor]:
    entries = [optimizer.state[param] for param in fused.parameters()]
    assert all("master_param" in entry for entry in entries)
    return [*weights(fused), *(entry[key].clone() for entry in entries for key in sorted(entry))]


@DTYPES
@pytest.mark.parametrize("name", SAVED)
def test_a_save_goes_on_with_the_same_bits(name: str, dtype: torch.dtype, tmp_path: Path) -> None:
    batches = [batch(dtype) for _ in range(6)]
    whole, again = (hf.fuse(models(2, dtype)) for _ in range(2))
    optimizer, loaded = (with_masters(name)(fused.parameters()) for fused in (whole, again))
    steps(optimizer, whole, batches[:3])
    hf.save(tmp_path, whole, optimizer)
    hf.load(tmp_path, again, loaded)
    for fused_optimizer, fused in ((optimizer, whole), (loaded, again)):
        steps(fused_optimizer, fused, batches[3:])
    for actual, expected in zip(all_state(again, loaded), all_state(whole, optimizer), strict=True):
        assert actual.dtype == expected.dtype
        assert torch.equal(actual, expected)


def test_a_save_with_master_weights_needs_an_optimizer_with_them(tmp_path: Path) -> None:
    fused = hf.fuse(models())
    optimizer = hf.optim.AdamW(fused.parameters(), master_weights=True)
    steps(optimizer, fused, [batch()])
    hf.save(tmp_path, fused, optimizer)
    with pytest.raises(hf.CheckpointError, match="make it with master_weights=True"):
        hf.load(tmp_path, fused, hf.optim.AdamW(fused.parameters()))


def test_weights_that_are_written_count() -> None:
    fused = hf.fuse(models())
    optimizer = hf.optim.SGD(fused.parameters(), lr=0.0, master_weights=True)
    steps(optimizer, fused, [batch()])
    with torch.no_grad():
        fused.stacks["0.weight"][1] = 0.5
    before = weights(fused)
    steps(optimizer, fused, [batch()])
    for weight, other in zip(weights(fused), before, strict=True):
        assert torch.equal(weight, other)


def test_invalid_use_is_refused() -> None:
    fused = hf.fuse(models())
    with pytest.raises(ValueError, match="master_weights is 1: give True or False"):
        hf.optim.AdamW(fused.parameters(), master_weights=1)  # type: ignore[arg-type]
    optimizer = hf.optim.AdamW(fused.parameters(), master_weights=True)
    steps(optimizer, fused, [batch()])
    with pytest.raises(hf.FusionError, match=r"no optimizer of torch\.optim has"):
        optimizer.unfuse()
    optimizer.param_groups[0]["master_weights"] = False
    with pytest.raises(hf.FusionError, match="is float32"):
        steps(optimizer, fused, [batch()])


# Parameters of half precision have the bits of B optimizers of torch.optim, by Triton kernels and by torch's class.

ROUNDED_ALIKE = {
    case: (name, options)
    for case, (name, options) in CASES.items()
    if hasattr(torch.optim, name) and name not in ("Adagrad", "NAdam", "RAdam") and case != "rmsprop-all"
}
"""Of these, torch's implementations for CPUs and for GPUs round the same results; a centered variance cancels."""
EXACT = {
    "lr": Per(0.125, 0.5),
    "momentum": Per(0.5, 0.5),
    # What is left of 1: 1/2, 1/4, -1/8.
    "dampening": Per(0.5, 1.5),
    "weight_decay": Per(0.125, 0.5),
    "eps": Per(2**-10, 2.0),
}
"""Powers of 2: on a CPU, other than on CUDA, ``add`` rounds ``alpha``, and products with it, to the dtype."""


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Steps by the Triton kernels, in the interpreter, whose launches are recorded."""
    interpret(monkeypatch)
    recordings = group.Recordings
    monkeypatch.setattr(group, "Recordings", lambda record, after: recordings(Closure(), after))
    yield
    forget()


def exact(options: Mapping[str, Any]) -> dict[str, Any]:
    """``options`` with such hyper-parameters; the default eps rounds to zero in float16."""
    return {name: EXACT.get(name, value) if value else value for name, value in ({"eps": 1.0} | options).items()}


def unequal(name: str, options: Mapping[str, Any], array: Array, steps: int) -> tuple[Any, dict[str, int]]:
    """Step an array: its optimizer, and how many elements of parameters and state differ from the members' own.

    Gradients lie in the same memory at each step, so that steps are recorded.
    """
    fused, alone = start(name, options, array)
    array.draw_grads()
    run(array, fused, alone, steps, steady=True)
    differences = {}
    for index, param in enumerate(array.params):
        member_params = [params[index] for params in array.members]
        differences[f"p{index}"] = _count(param.detach(), [member.detach() for member in member_params])
        states = [optimizer.state[member] for optimizer, member in zip(alone, member_params, strict=True)]
        for key in fused.state[param].keys() - fused.numbers.keys():
            # torch keeps no buffer for a member without momentum.
            rows = [row for row, state in enumerate(states) if state.get(key) is not None]
            differences[f"p{index}.{key}"] = _count(fused.state[param][key][rows], [states[row][key] for row in rows])
    return fused, differences


def _count(actual: Tensor, expected: list[Tensor]) -> int:
    whole = torch.stack(expected)
    assert actual.dtype is whole.dtype
    # Whatever has other bits is next to them.
    eps = torch.finfo(whole.dtype).eps
    torch.testing.assert_close(actual, whole, rtol=4 * eps, atol=eps * 2**-4, equal_nan=True)
    return int((actual != whole).sum())


@DTYPES
@pytest.mark.parametrize(("name", "options"), ROUNDED_ALIKE.values(), ids=ROUNDED_ALIKE)
@pytest.mark.usefixtures("recorded")
def test_kernels_round_where_torch_does(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    array = Array(3, SHAPES, dtype)
    options = exact(options)
    if name == "SGD":
        del options["eps"]
    fused, differences = unequal(name, options, array, 4)
    # A CPU rounds products that CUDA and the kernels do not round.
    assert sum(differences.values()) <= 2, differences
    assert fused.launches == "recorded and replayed as one"


@pytest.mark.gpu
@DTYPES
@pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)
@pytest.mark.parametrize("strided", [False, True])
def test_equals_alone_on_a_gpu(name: str, options: dict[str, Any], strided: bool, dtype: torch.dtype) -> None:
    array = Array(3, ((7, 5), (), (3, 300), (0,), (1025,), (64, 48)), dtype, "cuda")
    if strided:
        array.params[0].data = array.params[0].data.transpose(1, 2).contiguous().transpose(1, 2)
    if dtype is torch.float16 and name not in ("SGD", "Lion"):
        options = {**options, "eps": Per(1e-4, 2.0)}
    if not hasattr(torch.optim, name):
        pytest.skip("torch has none")
    fused, differences = unequal(name, options, array, 6)
    # What torch contracts to one operation is its compiler's choice.
    assert sum(differences.values()) <= 1e-3 * sum(param.numel() for param in array.params), differences
    if not strided:
        assert fused.launches == "recorded and replayed as one"
