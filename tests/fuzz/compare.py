"""A program run fused and by its members alone, step by step in float64, and what came of it."""

from __future__ import annotations

import copy
import linecache
import math
import random
import traceback
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from itertools import count
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import ANY

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hfusion as hf
from tests.fuzz.program import SIZES, Input, Program, Step

RELATIVE = 1e-9
FLOOR = 1e-11
"""A difference below this is none: gradients that cancel are nothing but rounding."""
NOISE_FACTOR = 1e3
NOISE_RUNS = 3
LARGEST = 1e8
WORDS = (hf.HFusionError, ValueError)
_numbers = count()


class Verdict(StrEnum):
    EQUAL = "equal"
    REFUSED = "refused in words"
    INVALID = "not runnable alone"
    UNTAME = "untame"
    DIFFERENT = "different"
    RAW = "raw error"


@dataclass(frozen=True)
class Outcome:
    verdict: Verdict
    words: str = ""

    @property
    def bad(self) -> bool:
        return self.verdict in (Verdict.DIFFERENT, Verdict.RAW)


@dataclass
class Seen:
    """What one step showed: values by name, and the plain ones among the outputs."""

    values: dict[str, Tensor] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)


class _Different(Exception):
    """In words, what differs."""


class Trial:
    """A program's source, loaded."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.names = names
        self.members: int = names["MEMBERS"]
        self.steps: Sequence[Step] = names["STEPS"]
        self.inputs: Sequence[Input] = names["INPUTS"]

    @staticmethod
    def of(program: Program) -> Trial:
        name, text = f"<program {program.seed}.{next(_numbers)}>", program.text()
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        names: dict[str, Any] = {"__name__": "fuzzed"}
        exec(compile(text, name, "exec"), names)
        return Trial(names)

    def models(self) -> list[nn.Module]:
        torch.manual_seed(self.names["SEED"])
        kept: dict[str, nn.Module] = {}

        def once(key: str, make: Any) -> nn.Module:
            if key not in kept:
                kept[key] = make()
            return kept[key]

        return [self.names["Net"](b, once) for b in range(self.members)]

    def turn_to(self, place: int) -> None:
        """Give the globals of the program the values that they have in a step."""
        self.names["tick"], self.names["tock"] = place % 3, place % 2 == 1

    def draw(self, place: int) -> tuple[list[Tensor], Tensor]:
        """The inputs of a step, and its target; stacked ones ``[B, ...]``."""
        generator = torch.Generator().manual_seed(1000 * self.names["SEED"] + place)
        step = self.steps[place]
        drawn = [self._drawn(one, step, generator) for one in (*self.inputs, self.names["TARGET"])]
        return drawn[:-1], drawn[-1]

    def _drawn(self, one: Input, step: Step, generator: torch.Generator) -> Tensor:
        shape = [{"n": step.n, "t": step.t}.get(size, size) for size in SIZES[one.kind]]
        shape = [self.members, *shape] if one.stacked else shape
        if one.kind in ("ids", "lab"):
            return torch.randint(5, shape, generator=generator)
        if one.kind == "mask":
            return torch.rand(shape, generator=generator) < 0.5
        dtype = torch.complex128 if one.kind == "cvec" else torch.float64
        drawn = torch.randn(shape, generator=generator, dtype=dtype)
        # Now and then samples are the last dim in memory, as after a transpose.
        if len(SIZES[one.kind]) > 1 and torch.rand((), generator=generator) < 0.1:
            first = int(one.stacked)
            drawn = drawn.transpose(first, -1).contiguous().transpose(first, -1)
        return drawn.requires_grad_(one.grad)


def outcome(program: Program) -> Outcome:
    """Run ``program`` both ways."""
    try:
        trial = Trial.of(program)
    except SyntaxError:
        return Outcome(Verdict.INVALID, traceback.format_exc(limit=-1))
    return run(trial)


def outcome_alone(program: Program) -> Outcome:
    """What comes of the members by themselves."""
    with _float64(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for seen in alone(Trial.of(program)):
            del seen
    return Outcome(Verdict.EQUAL)


def run(trial: Trial) -> Outcome:
    with _float64(), warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return _run(trial)


def _run(trial: Trial) -> Outcome:
    try:
        expected = list(alone(trial))
    except Exception as error:
        return Outcome(Verdict.INVALID, _told(error))
    if not all(_tame(seen) for seen in expected):
        return Outcome(Verdict.UNTAME, "not finite, or large")
    try:
        for seen in fused(trial, expected):
            del seen
    except _Different as found:
        return _different(trial, expected, str(found))
    except WORDS as error:
        if str(error).startswith("self-check"):
            return _different(trial, expected, _told(error))
        if not isinstance(error, hf.HFusionError) and not _raised_by_us(error):
            return Outcome(Verdict.RAW, _told(error))
        return Outcome(Verdict.REFUSED, str(error))
    except Exception as error:
        return Outcome(Verdict.RAW, _told(error))
    return Outcome(Verdict.EQUAL)


def _different(trial: Trial, expected: Sequence[Seen], words: str) -> Outcome:
    if _noisy(trial, expected):
        return Outcome(Verdict.UNTAME, "rounding alone moves it")
    return Outcome(Verdict.DIFFERENT, words)


def alone(trial: Trial, moved: int = 0) -> Iterator[Seen]:
    """Each member by itself; ``moved`` > 0 moves parameters and inputs by a rounding step."""
    models = trial.models()
    _move([*_state(models[0]).values(), *(t for m in models[1:] for t in _state(m).values())], moved)
    optimizers: list[Any] = [None] * len(models)
    for place, step in enumerate(trial.steps):
        trial.turn_to(place)
        inputs, target = trial.draw(place)
        _move(inputs, moved)
        rows = [_rows(x, one.stacked, len(models)) for x, one in zip(inputs, trial.inputs, strict=True)]
        targets = _rows(target, trial.names["TARGET"].stacked, len(models))
        found = []
        for b, model in enumerate(models):
            _set(model, step)
            before = _random_state()
            found.append(_step_alone(trial, step, b, model, [row[b] for row in rows], targets[b], optimizers))
            found[-1].plain["random state moved"] = before != _random_state()
        yield _stacked(trial, models, inputs, rows, found)


def _step_alone(
    trial: Trial, step: Step, b: int, model: nn.Module, inputs: list[Tensor], target: Tensor, optimizers: list[Any]
) -> Seen:
    if step.zeros:
        model.zero_grad()
    seen = Seen()
    if step.does == "forward":
        with torch.no_grad():
            _note(seen, trial.names["call"](model, *inputs))
        return seen
    out = trial.names["call"](model, *inputs)
    _note(seen, out)
    loss = trial.names["loss"](out, target)
    seen.values["loss"] = loss.detach().clone()
    if loss.requires_grad or trial.names["JOINT"]:
        loss.backward()
    if step.does == "step":
        if optimizers[b] is None:
            params = [p for p in model.parameters() if p.requires_grad]
            optimizers[b] = (
                trial.names["optimizer"](torch.optim, params, lambda v: v[b])
                if params
                else SimpleNamespace(step=lambda: None)
            )
        optimizers[b].step()
    return seen


def _stacked(
    trial: Trial,
    models: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    rows: Sequence[Sequence[Tensor]],
    found: Sequence[Seen],
) -> Seen:
    """What the array should show: the members' values stacked."""
    seen = Seen(plain=dict(found[0].plain))
    for one in found[1:]:
        if one.plain != found[0].plain or one.values.keys() != found[0].values.keys():
            raise ValueError("the members give different structures")
    for name in found[0].values:
        seen.values[name] = torch.stack([one.values[name] for one in found])
    seen.plain["random state moved"] = any(one.plain["random state moved"] for one in found)
    tables = [_state(model) for model in models]
    for name, first in tables[0].items():
        shared = len(models) > 1 and all(table[name] is first for table in tables)
        parts = [table[name] for table in tables]
        seen.values[f"state {name}"] = first.detach().clone() if shared else torch.stack([p.detach() for p in parts])
        if isinstance(first, nn.Parameter) and first.requires_grad:
            seen.values[f"gradient of {name}"] = torch.stack([_gradient(p) for p in parts])
    for k, (x, one, row) in enumerate(zip(inputs, trial.inputs, rows, strict=True)):
        now = torch.stack([r.detach() for r in row]) if one.stacked else row[0].detach()
        seen.plain[f"input {k} written"] = not _same(now, x.detach())
        if one.grad:
            seen.values[f"gradient of input {k}"] = (
                torch.stack([_gradient(r) for r in row]) if one.stacked else _gradient(row[0])
            )
    return seen


def fused(trial: Trial, expected: Sequence[Seen]) -> Iterator[Seen]:
    """The array, compared after every step; raises `_Different`, and what the array raises."""
    models = trial.models()
    pristine = copy.deepcopy([(_state(m), [x.training for x in m.modules()]) for m in models])
    array = hf.fuse(models, verify=trial.names["VERIFY"])
    optimizer: Any = None
    loss_fn = hf.per_model(trial.names["loss"])
    step_fn: Any = None
    for place, (step, theirs) in enumerate(zip(trial.steps, expected, strict=True)):
        trial.turn_to(place)
        inputs, target = trial.draw(place)
        kept = [(x.detach().clone(), x._version, x.stride()) for x in (*inputs, target)]
        given = [hf.stacked(x) if one.stacked else x for x, one in zip(inputs, trial.inputs, strict=True)]
        aim = hf.stacked(target) if trial.names["TARGET"].stacked else target
        _set(array, step)
        before, ours = _random_state(), Seen()
        if step.zeros:
            array.zero_grad()
        if step.does == "step" and optimizer is None:
            params = [p for p in array.parameters() if p.requires_grad]
            optimizer = (
                trial.names["optimizer"](hf.optim, params, lambda v: v[: trial.members])
                if params
                else SimpleNamespace(step=lambda: None, param_groups=[], zero_grad=lambda: None)
            )
            step_fn = (
                hf.train_step(array, trial.names["loss"], optimizer, compile=True)
                if trial.names["JOINT"] and params
                else None
            )
        try:
            if step.does == "forward":
                with torch.no_grad():
                    _note(ours, trial.names["call"](array, *given))
            elif step.does == "step" and step_fn is not None:
                ours.values["loss"] = trial.names["call"](_Stepped(step_fn, aim), *given).clone()
            else:
                out = trial.names["call"](array, *given)
                _note(ours, out)
                losses = loss_fn(out, aim)
                ours.values["loss"] = losses.detach().clone()
                if losses.requires_grad:
                    losses.sum().backward()
                if step.does == "step":
                    optimizer.step()
        finally:
            _check_kept(place, (*inputs, target), kept)
        # In training an array draws in its own way: for all members at once, and not what nothing uses.
        if any(module.training for module in array.modules()):
            ours.plain["random state moved"] = theirs.plain["random state moved"]
        else:
            ours.plain["random state moved"] = before != _random_state()
        for name, tensor in _state(array).items():
            ours.values[f"state {name}"] = tensor.detach()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                ours.values[f"gradient of {name}"] = _gradient(tensor)
        for k, x in enumerate(inputs):
            ours.plain[f"input {k} written"] = False
            if trial.inputs[k].grad:
                ours.values[f"gradient of input {k}"] = _gradient(x)
        _compare(place, ours, theirs, partial=step.does == "step" and step_fn is not None)
        _check_models(place, models, pristine)
        yield ours


class _Stepped:
    """Lets ``call(model, ...)`` call a step."""

    def __init__(self, step: Any, target: Any) -> None:
        self._step, self._target = step, target

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._step(args, self._target, **kwargs)


def _compare(place: int, ours: Seen, theirs: Seen, partial: bool) -> None:
    plain = {k: v for k, v in theirs.plain.items() if k in ours.plain} if partial else theirs.plain
    if ours.plain != plain:
        both = [k for k in {*plain, *ours.plain} if ours.plain.get(k) != plain.get(k)]
        told = "; ".join(f"{k} is {ours.plain.get(k)}, alone {plain.get(k)}" for k in sorted(both))
        raise _Different(f"step {place}: {told}")
    # What is nearest to the cause first.
    names = sorted((n for n in theirs.values if n in ours.values or not partial), key=lambda n: n.startswith("state"))
    if not partial and ours.values.keys() != theirs.values.keys():
        raise _Different(f"step {place}: {sorted(ours.values.keys() ^ theirs.values.keys())} on one side only")
    for name in names:
        _close(f"step {place}: {name}", ours.values[name], theirs.values[name])


def _close(what: str, ours: Tensor, theirs: Tensor) -> None:
    if ours.shape != theirs.shape and ours.shape == theirs.shape[1:]:
        theirs = theirs[0]
    if (ours.shape, ours.dtype) != (theirs.shape, theirs.dtype):
        raise _Different(f"{what} is {tuple(ours.shape)} {ours.dtype}, alone {tuple(theirs.shape)} {theirs.dtype}")
    gap = distance(ours, theirs)
    if gap > RELATIVE:
        raise _Different(f"{what} differs by {gap:.1e}")


def distance(ours: Tensor, theirs: Tensor) -> float:
    """The largest difference relative to the largest value; what lies below `FLOOR` is no difference."""
    if ours.numel() == 0:
        return 0.0
    if not (ours.is_floating_point() or ours.is_complex()):
        return float(not torch.equal(ours, theirs))
    gap = float((ours - theirs).abs().max())
    if math.isnan(gap):
        return float("inf")
    return 0.0 if gap <= FLOOR else gap / max(float(theirs.abs().max()), 1e-2)


def _noisy(trial: Trial, expected: Sequence[Seen]) -> bool:
    """Whether moving the members' values by a rounding step explains differences of this size."""
    for run in range(1, NOISE_RUNS + 1):
        try:
            for seen, moved in zip(expected, alone(trial, run), strict=True):
                if seen.plain != moved.plain:
                    return True
                for name, value in seen.values.items():
                    if (
                        value.shape != moved.values[name].shape
                        or distance(moved.values[name], value) * NOISE_FACTOR > RELATIVE
                    ):
                        return True
        except Exception:
            return True
    return False


def _move(tensors: Sequence[Tensor], run: int) -> None:
    if run == 0:
        return
    generator = torch.Generator().manual_seed(run)
    once = {id(t): t for t in tensors}
    for tensor in once.values():
        if tensor.is_floating_point() or tensor.is_complex():
            step = torch.randint(-1, 2, tensor.shape, generator=generator)
            with torch.no_grad():
                tensor.mul_(1 + step * 4e-16)


def _note(seen: Seen, out: Any) -> None:
    leaves, spec = pytree.tree_flatten(out)
    seen.plain["structure"] = spec
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            seen.values[f"output {k}"] = leaf.detach().clone()
            # A view taken in torch.no_grad requires a gradient that goes nowhere; so does what is made of it.
            unknown = leaf.requires_grad and not _leads_back(leaf)
            seen.plain[f"output {k} has a gradient"] = ANY if unknown else leaf.requires_grad
        else:
            seen.plain[f"output {k}"] = leaf


def _leads_back(tensor: Tensor) -> bool:
    """Whether a gradient of ``tensor`` reaches a tensor that was made to have one."""
    seen, left = set[Any](), [tensor.grad_fn]
    while left:
        node = left.pop()
        if node is None or node in seen:
            continue
        seen.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and not variable._is_view():
            return True
        left.extend(before for before, _ in node.next_functions)
    return False


def _check_kept(place: int, tensors: Sequence[Tensor], kept: Sequence[tuple[Tensor, int, Any]]) -> None:
    for k, (tensor, (value, _, stride)) in enumerate(zip(tensors, kept, strict=True)):
        if not _same(tensor.detach(), value) or tensor.stride() != stride:
            raise _Different(f"step {place}: the caller's tensor {k} was changed")


def _check_models(place: int, models: Sequence[nn.Module], pristine: Any) -> None:
    for b, (model, (state, flags)) in enumerate(zip(models, pristine, strict=True)):
        for name, tensor in _state(model).items():
            if not _same(tensor.detach(), state[name].detach()):
                raise _Different(f"step {place}: {name} of the caller's model {b} was changed")
        if [x.training for x in model.modules()] != flags:
            raise _Different(f"step {place}: the training flags of the caller's model {b} were changed")


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _set(module: nn.Module, step: Step) -> None:
    if step.mode:
        module.train(step.mode == "train")


def _state(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.detach().clone()


def _rows(x: Tensor, stacked: bool, members: int) -> list[Tensor]:
    if not stacked:
        # One leaf: what members add to its gradient sums up, and what they write is seen by the next.
        one = x.detach().clone().requires_grad_(x.requires_grad)
        return [one] * members
    return [x[b].detach().clone().requires_grad_(x.requires_grad) for b in range(members)]


def _tame(seen: Seen) -> bool:
    floats = [v for v in seen.values.values() if v.is_floating_point() or v.is_complex()]
    return all(bool(v.abs().max() < LARGEST) for v in floats if v.numel())


def _random_state() -> Any:
    return torch.get_rng_state().numpy().tobytes(), random.getstate()


def _raised_by_us(error: BaseException) -> bool:
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    parts = Path(last).parts
    return "torch" not in parts and any(part in parts for part in ("hfusion", "ops", "passes"))


def _told(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    places = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(places[-4:]))
    return f"{type(error).__name__}: {' '.join(lines)[:400]} [{where}]"


@contextmanager
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def main(names: Mapping[str, Any]) -> None:
    """Run a printed program."""
    found = run(Trial(names))
    print(found.verdict, found.words)
