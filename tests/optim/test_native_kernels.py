"""The native kernels: the same bits however the memory is cut, and torch's kernels where they cannot be had."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import Parameter

from hfusion import optim
from hfusion.bench import optim_benchmark as bench
from hfusion.core.membership import Membership, mark
from hfusion.device import native as machine
from hfusion.device.team import helped_by, team
from hfusion.optim import group, native_kernels
from tests.optim.arrays import CASES, Array, for_array, run, start
from tests.optim.interpreted import Closure, Tape, forget, interpret

BOTH = pytest.mark.parametrize(("name", "options"), CASES.values(), ids=CASES)
DTYPES = pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
MEMBERS = 5


@pytest.fixture
def fresh(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Iterator[None]:
    """A process that has not looked for the kernels yet, with an empty cache."""
    monkeypatch.delenv("HFUSION_NATIVE", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    machine._loaded.cache_clear()
    yield
    machine._loaded.cache_clear()


def trained(name: str, options: dict[str, Any], shape: tuple[int, ...], dtype: torch.dtype, cut: Any) -> Any:
    """Parameters and state after some steps of the tensors that ``cut`` makes of one."""
    torch.manual_seed(1)
    whole, *grads = torch.randn(5, MEMBERS, *shape, dtype=dtype)
    params = [
        mark(Parameter(part.clone()), Membership(str(i), len(part), True)) for i, part in enumerate(cut(whole.clone()))
    ]
    fused = getattr(optim, name)(params, **options)
    for grad in grads:
        for param, part in zip(params, cut(grad), strict=True):
            param.grad = part.clone()
        fused.step()
    stacks = [key for key in fused.state[params[0]] if key not in fused.numbers] if fused.state else []
    return [params, *[[fused.state[param][key] for param in params] for key in stacks]]


@BOTH
@DTYPES
@pytest.mark.usefixtures("compiler")
def test_a_cut_between_elements_changes_no_bit(name: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    shape, sizes = (71, 3), [1, 2, 9, 17, 42]
    values = for_array(options, MEMBERS)
    whole = trained(name, values, shape, dtype, lambda tensor: [tensor])
    parts = trained(name, values, shape, dtype, lambda tensor: torch.split(tensor, sizes, dim=1))
    for (full,), several in zip(whole, parts, strict=True):
        assert torch.equal(full, torch.cat(several, dim=1))


@BOTH
@pytest.mark.usefixtures("compiler")
def test_threads_change_no_bit(name: str, options: dict[str, Any]) -> None:
    shape, values = (20011,), for_array(options, MEMBERS)
    serial = trained(name, values, shape, torch.float32, lambda tensor: [tensor])
    try:
        torch.set_num_threads(3)
        threaded = trained(name, values, shape, torch.float32, lambda tensor: [tensor])
    finally:
        torch.set_num_threads(1)
    with helped_by(team(3)):
        shared = trained(name, values, shape, torch.float32, lambda tensor: [tensor])
    for (expected,), *others in zip(serial, threaded, shared, strict=True):
        assert all(torch.equal(expected, other) for (other,) in others)


@pytest.mark.usefixtures("fresh")
@pytest.mark.parametrize(
    ("variable", "value", "reason"),
    [
        ("HFUSION_NATIVE", "0", "HFUSION_NATIVE=0"),
        ("CC", "no-such-compiler -x", "FileNotFoundError.*no-such-compiler"),
        ("PATH", "", "no C compiler .* was found"),
    ],
)
def test_without_a_library_formulas_run(
    variable: str, value: str, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(variable, value)
    if variable == "PATH":
        monkeypatch.delenv("CC", raising=False)
    error = native_kernels.library()
    assert isinstance(error, str)
    assert native_kernels.library() is error or variable == "HFUSION_NATIVE"
    with pytest.raises(AssertionError, match=reason):
        raise AssertionError(error)
    assert bench.form(torch.device("cpu")) == f"formula: {error}"
    array = Array(3)
    fused, alone = start("Adam", CASES["adam"][1], array)
    run(array, fused, alone, 2)
    array.assert_equal()


@pytest.mark.usefixtures("compiler")
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_numbers_that_are_not_finite_are_found_wherever_they_are(dtype: torch.dtype) -> None:
    check, largest = native_kernels.FiniteCheck(), torch.finfo(dtype).max
    tensors = [torch.full((3, 1025), largest, dtype=dtype), torch.zeros(0, dtype=dtype), torch.ones(1, dtype=dtype)]
    assert check(tensors) is True
    for bad in (float("nan"), float("inf"), -float("inf")):
        for tensor_index, position in ((0, 0), (0, 1023), (0, 1024), (0, 3074), (2, 0)):
            values = [tensor.clone() for tensor in tensors]
            values[tensor_index].view(-1)[position] = bad
            assert check(values) is False
    assert check(tensors[:1]) is True
    assert check([tensors[0][:2], *tensors[1:]]) is True


# Steps whose launches are recorded equal B optimizers of torch.optim.

Made = tuple[Array, Any, list[Any], Tape]
WAYS = [("formula", name) for name in CASES] + [
    ("triton", name)
    for name in ("sgd-nesterov", "adam-decay", "adam-far", "adamw-all", "adadelta-all", "nadam", "rmsprop-all")
]


@pytest.fixture(params=WAYS, ids="-".join)
def recorded_case(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Made]:
    """An array whose optimizer's launches are recorded, on the CPU, with the members' own optimizers."""
    kind, case = request.param
    yield from _made(monkeypatch, kind, *CASES[case])


def _made(patch: pytest.MonkeyPatch, kind: str, name: str, options: dict[str, Any]) -> Iterator[Made]:
    tape = Tape() if kind == "formula" else Closure()
    if kind == "formula":
        patch.setenv("HFUSION_NATIVE", "0")
        patch.setattr(group, "KERNELS", {})
    else:
        interpret(patch)
    recordings = group.Recordings
    patch.setattr(group, "Recordings", lambda record, after: recordings(tape, after))
    array = Array(3)
    yield array, *start(name, options, array), tape
    if kind == "triton":
        forget()


def test_equals_alone_with_rates_that_change_between_replays(recorded_case: Made) -> None:
    array, fused, alone, tape = recorded_case
    run(array, fused, alone, 5, steady=True)
    assert (tape.made, tape.replayed) == (1, 3)
    for step in range(3):
        fused.param_groups[0]["lr"] = rates = [0.1 / (step + 1), 0.0, 0.3]
        for optimizer, rate in zip(alone, rates, strict=True):
            optimizer.param_groups[0]["lr"] = rate
        run(array, fused, alone, 1, steady=True)
    array.assert_equal()
    assert (tape.made, tape.replayed) == (1, 6)
    assert fused.launches == "recorded and replayed as one"
    # Where hyper-parameters of 0 leave operators out, the launches are others.
    if "weight_decay" in fused.param_groups[0]:
        fused.param_groups[0]["weight_decay"] = 0.0
        for optimizer in alone:
            optimizer.param_groups[0]["weight_decay"] = 0.0
        run(array, fused, alone, 4, steady=True)
        array.assert_equal()


def test_gradients_that_lie_elsewhere_at_every_step_are_not_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    array, fused, alone, tape = next(_made(monkeypatch, "formula", *CASES["lion"]))
    gradients = []
    for _ in range(6):
        run(array, fused, alone, 1)
        gradients.append([param.grad for param in array.params])
    array.assert_equal()
    assert tape.made == 0
    assert fused.launches.startswith("launched one by one so far: gradients must lie at the same addresses")
