"""Run a program fused and member by member, in float64, and compare every step."""

from __future__ import annotations

import copy
import linecache
import math
import multiprocessing
import random
import re
import time
import traceback
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import StrEnum
from functools import cache, partial
from itertools import count
from multiprocessing.connection import Connection
from operator import itemgetter
from pathlib import Path
from types import SimpleNamespace, TracebackType
from typing import Any
from unittest.mock import ANY

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

import hfusion as hf
from tests.fuzz.program import SIZES, Input, Step

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
    """Results of one step: tensors by name, and values that are no tensors."""

    values: dict[str, Tensor] = field(default_factory=dict)
    plain: dict[str, Any] = field(default_factory=dict)


class _Different(Exception):
    """Describes the difference."""


class Trial:
    """A program's source, loaded."""

    def __init__(self, names: Mapping[str, Any]) -> None:
        self.names = names
        self.members: int = names["MEMBERS"]
        self.steps: Sequence[Step] = names["STEPS"]
        self.inputs: Sequence[Input] = names["INPUTS"]

    @staticmethod
    def of(text: str) -> Trial:
        name = f"<program {next(_numbers)}>"
        linecache.cache[name] = (len(text), None, text.splitlines(keepends=True), name)
        names: dict[str, Any] = {"__name__": "fuzzed"}
        exec(compile(text, name, "exec"), names)
        return Trial(names)

    def models(self) -> list[nn.Module]:
        torch.manual_seed(self.names["SEED"])
        shared_modules: dict[str, nn.Module] = {}

        def once(key: str, make: Any) -> nn.Module:
            if key not in shared_modules:
                shared_modules[key] = make()
            return shared_modules[key]

        return [self.names["Net"](b, once) for b in range(self.members)]

    def optimizer(self, optim: Any, module: nn.Module, own: Callable[[Any], Any]) -> Any:
        """Return an optimizer of the trained parameters; ``own`` takes from four values those of the members."""
        params = [p for p in module.parameters() if p.requires_grad]
        return self.names["optimizer"](optim, params, own) if params else SimpleNamespace(step=lambda: None)

    def draw(self, index: int) -> tuple[list[Tensor], Tensor]:
        """The inputs of a step, and its target; stacked ones ``[B, ...]``."""
        generator = torch.Generator().manual_seed(1000 * self.names["SEED"] + index)
        step = self.steps[index]
        drawn = [self._drawn(spec, step, generator) for spec in (*self.inputs, self.names["TARGET"])]
        return drawn[:-1], drawn[-1]

    def _drawn(self, spec: Input, step: Step, generator: torch.Generator) -> Tensor:
        shape = [{"n": step.n, "t": step.t}.get(size, size) for size in SIZES[spec.kind]]
        shape = [self.members, *shape] if spec.stacked else shape
        if spec.kind in ("ids", "lab"):
            return torch.randint(5, shape, generator=generator)
        if spec.kind == "mask":
            return torch.rand(shape, generator=generator) < 0.5
        dtype = torch.complex128 if spec.kind == "cvec" else torch.float64
        drawn = torch.randn(shape, generator=generator, dtype=dtype)
        # Now and then samples are the last dim in memory, as after a transpose.
        if len(SIZES[spec.kind]) > 1 and torch.rand((), generator=generator) < 0.1:
            first = int(spec.stacked)
            drawn = drawn.transpose(first, -1).contiguous().transpose(first, -1)
        return drawn.requires_grad_(spec.grad)


def outcome(text: str) -> Outcome:
    """Run a program fused and member by member."""
    try:
        trial = Trial.of(text)
    except Exception:
        return Outcome(Verdict.INVALID, traceback.format_exc(limit=-1))
    return run(trial)


def outcome_alone(text: str) -> Outcome:
    """Run the members alone, without comparison."""
    with _float64():
        alone(Trial.of(text))
    return Outcome(Verdict.EQUAL)


def run(trial: Trial) -> Outcome:
    with _float64():
        try:
            expected = alone(trial)
        except Exception as error:
            return Outcome(Verdict.INVALID, _describe(error))
        if not all(_tame(step_values) for step_values in expected):
            return Outcome(Verdict.UNTAME, "not finite, or large")
        try:
            compare_array(trial, expected)
        except _Different as difference:
            return _different(trial, expected, str(difference))
        except WORDS as error:
            if str(error).startswith("self-check"):
                return _different(trial, expected, _describe(error))
            if not isinstance(error, hf.HFusionError) and not _raised_by_us(error):
                return Outcome(Verdict.RAW, _describe(error))
            return Outcome(Verdict.REFUSED, str(error))
        except Exception as error:
            return Outcome(Verdict.RAW, _describe(error))
    return Outcome(Verdict.EQUAL)


def _different(trial: Trial, expected: Sequence[Seen], words: str) -> Outcome:
    if _noisy(trial, expected):
        return Outcome(Verdict.UNTAME, "rounding alone moves it")
    return Outcome(Verdict.DIFFERENT, words)


def alone(trial: Trial, moved: int = 0) -> list[Seen]:
    """Run the members one after the other, and return what each step gives.

    Args:
        moved: moves parameters and inputs by a rounding step if it is not 0.
    """
    models, found = trial.models(), []
    _move([*_state(models[0]).values(), *(t for m in models[1:] for t in _state(m).values())], moved)
    optimizers = [cache(partial(trial.optimizer, torch.optim, m, itemgetter(b))) for b, m in enumerate(models)]
    for index, step in enumerate(trial.steps):
        inputs, target = trial.draw(index)
        _move(inputs, moved)
        rows = [_rows(x, spec.stacked, len(models)) for x, spec in zip(inputs, trial.inputs, strict=True)]
        targets = _rows(target, trial.names["TARGET"].stacked, len(models))
        recorded = []
        for b, model in enumerate(models):
            before = _random_state()
            args = [row[b] for row in rows], targets[b]
            recorded.append(_make_step(trial, step, model, *args, trial.names["loss"], optimizers[b]))
            recorded[-1].plain["random state moved"] = before != _random_state()
        found.append(_stacked(trial, models, inputs, rows, recorded))
    return found


def _make_step(
    trial: Trial, step: Step, model: nn.Module, inputs: list[Any], target: Any, loss: Any, optimizer: Callable[[], Any]
) -> Seen:
    """Make a step of a member or of an array."""
    recorded = Seen()
    if step.mode:
        model.train(step.mode == "train")
    if step.zeros:
        model.zero_grad()
    with torch.set_grad_enabled(step.does != "forward"):
        out = trial.names["call"](model, *inputs)
    _note(recorded, out)
    if step.does != "forward":
        losses = loss(out, target)
        recorded.values["loss"] = losses.detach().clone()
        if losses.requires_grad or trial.names["JOINT"]:
            losses.sum().backward()
        if step.does == "step":
            optimizer().step()
    return recorded


def _stacked(
    trial: Trial,
    models: Sequence[nn.Module],
    inputs: Sequence[Tensor],
    rows: Sequence[Sequence[Tensor]],
    recorded: Sequence[Seen],
) -> Seen:
    """The expected results of the array: the members' values stacked."""
    combined = Seen(plain=dict(recorded[0].plain))
    for member in recorded[1:]:
        if member.plain != recorded[0].plain or member.values.keys() != recorded[0].values.keys():
            raise ValueError("the members give different structures")
    for name in recorded[0].values:
        combined.values[name] = torch.stack([member.values[name] for member in recorded])
    combined.plain["random state moved"] = any(member.plain["random state moved"] for member in recorded)
    tables = [_state(model) for model in models]
    for name, first in tables[0].items():
        shared = len(models) > 1 and all(table[name] is first for table in tables)
        parts = [table[name] for table in tables]
        combined.values[f"state {name}"] = (
            first.detach().clone() if shared else torch.stack([p.detach() for p in parts])
        )
        if isinstance(first, nn.Parameter) and first.requires_grad:
            combined.values[f"gradient of {name}"] = torch.stack([_gradient(p) for p in parts])
    for k, (x, spec, row) in enumerate(zip(inputs, trial.inputs, rows, strict=True)):
        current = torch.stack([r.detach() for r in row]) if spec.stacked else row[0].detach()
        combined.plain[f"input {k} written"] = not _same(current, x.detach())
        if spec.grad:
            combined.values[f"gradient of input {k}"] = (
                torch.stack([_gradient(r) for r in row]) if spec.stacked else _gradient(row[0])
            )
    return combined


def compare_array(trial: Trial, expected: Sequence[Seen]) -> None:
    """Run the array, and compare it after every step. Raises `_Different`, and errors of the array."""
    models = trial.models()
    pristine = copy.deepcopy([(_state(m), [x.training for x in m.modules()]) for m in models])
    array = hf.fuse(models, verify=trial.names["VERIFY"])
    optimizer = cache(partial(trial.optimizer, hf.optim, array, itemgetter(slice(trial.members))))
    step_fn = cache(lambda: hf.train_step(array, trial.names["loss"], optimizer(), compile=True))
    loss_fn = hf.per_model(trial.names["loss"])
    for index, (step, expected_values) in enumerate(zip(trial.steps, expected, strict=True)):
        inputs, target = trial.draw(index)
        copies = [(x.detach().clone(), x.stride()) for x in (*inputs, target)]
        stacked_inputs = [hf.stacked(x) if spec.stacked else x for x, spec in zip(inputs, trial.inputs, strict=True)]
        aim = hf.stacked(target) if trial.names["TARGET"].stacked else target
        before, joint = _random_state(), step.does == "step" and bool(trial.names["JOINT"])
        try:
            if joint:
                array.train(step.mode == "train")
                step_call = lambda *args, aim=aim, **kwargs: step_fn()(args, aim, **kwargs)  # noqa: E731
                losses = trial.names["call"](step_call, *stacked_inputs)
                actual_values = Seen({"loss": losses.clone()})
            else:
                actual_values = _make_step(trial, step, array, stacked_inputs, aim, loss_fn, optimizer)
        finally:
            _check_kept(index, (*inputs, target), copies)
        # In training an array draws in its own way: for all members at once, and not what nothing uses.
        if any(module.training for module in array.modules()):
            actual_values.plain["random state moved"] = expected_values.plain["random state moved"]
        else:
            actual_values.plain["random state moved"] = before != _random_state()
        for name, tensor in _state(array).items():
            actual_values.values[f"state {name}"] = tensor.detach()
            if isinstance(tensor, nn.Parameter) and tensor.requires_grad:
                actual_values.values[f"gradient of {name}"] = _gradient(tensor)
        for k, x in enumerate(inputs):
            actual_values.plain[f"input {k} written"] = False
            if trial.inputs[k].grad:
                actual_values.values[f"gradient of input {k}"] = _gradient(x)
        _compare(index, actual_values, expected_values, partial=joint)
        _check_models(index, models, pristine)


def _compare(index: int, actual: Seen, expected: Seen, partial: bool) -> None:
    plain = {k: v for k, v in expected.plain.items() if k in actual.plain} if partial else expected.plain
    if actual.plain != plain:
        differing = [k for k in {*plain, *actual.plain} if actual.plain.get(k) != plain.get(k)]
        message = "; ".join(f"{k} is {actual.plain.get(k)}, alone {plain.get(k)}" for k in sorted(differing))
        raise _Different(f"step {index}: {message}")
    # Compare the values nearest to the cause first.
    names = sorted(
        (n for n in expected.values if n in actual.values or not partial), key=lambda n: n.startswith("state")
    )
    if not partial and actual.values.keys() != expected.values.keys():
        raise _Different(f"step {index}: {sorted(actual.values.keys() ^ expected.values.keys())} on one side only")
    for name in names:
        _close(f"step {index}: {name}", actual.values[name], expected.values[name])


def _close(title: str, actual: Tensor, expected: Tensor) -> None:
    if actual.shape != expected.shape and actual.shape == expected.shape[1:]:
        expected = expected[0]
    if (actual.shape, actual.dtype) != (expected.shape, expected.dtype):
        raise _Different(
            f"{title} is {tuple(actual.shape)} {actual.dtype}, alone {tuple(expected.shape)} {expected.dtype}"
        )
    gap = distance(actual, expected)
    if gap > RELATIVE:
        raise _Different(f"{title} differs by {gap:.1e}")


def distance(actual: Tensor, expected: Tensor) -> float:
    """The largest difference relative to the largest value; differences below `FLOOR` count as 0."""
    if actual.numel() == 0:
        return 0.0
    if not (actual.is_floating_point() or actual.is_complex()):
        return float(not torch.equal(actual, expected))
    gap = float((actual - expected).abs().max())
    if math.isnan(gap):
        return float("inf")
    return 0.0 if gap <= FLOOR else gap / max(float(expected.abs().max()), 1e-2)


def _noisy(trial: Trial, expected: Sequence[Seen]) -> bool:
    """Return whether moving the members' values by a rounding step explains differences of this size."""
    for run in range(1, NOISE_RUNS + 1):
        try:
            for recorded, moved in zip(expected, alone(trial, run), strict=True):
                if recorded.plain != moved.plain:
                    return True
                for name, value in recorded.values.items():
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


def _note(recorded: Seen, out: Any) -> None:
    leaves, spec = pytree.tree_flatten(out)
    recorded.plain["structure"] = spec
    for k, leaf in enumerate(leaves):
        if isinstance(leaf, Tensor):
            recorded.values[f"output {k}"] = leaf.detach().clone()
            # A view taken in torch.no_grad requires a gradient that goes nowhere; so does what is made of it.
            unknown = leaf.requires_grad and not _leads_back(leaf)
            recorded.plain[f"output {k} has a gradient"] = ANY if unknown else leaf.requires_grad


def _leads_back(tensor: Tensor) -> bool:
    """Return whether a gradient of ``tensor`` reaches a leaf that requires one."""
    visited, pending = set[Any](), [tensor.grad_fn]
    while pending:
        node = pending.pop()
        if node is None or node in visited:
            continue
        visited.add(node)
        variable = getattr(node, "variable", None)
        if variable is not None and not variable._is_view():
            return True
        pending.extend(before for before, _ in node.next_functions)
    return False


def _check_kept(index: int, tensors: Sequence[Tensor], copies: Sequence[tuple[Tensor, Any]]) -> None:
    for k, (tensor, (value, stride)) in enumerate(zip(tensors, copies, strict=True)):
        if not _same(tensor.detach(), value) or tensor.stride() != stride:
            raise _Different(f"step {index}: the caller's tensor {k} was changed")


def _check_models(index: int, models: Sequence[nn.Module], pristine: Any) -> None:
    for b, (model, (state, flags)) in enumerate(zip(models, pristine, strict=True)):
        for name, tensor in _state(model).items():
            if not _same(tensor.detach(), state[name].detach()):
                raise _Different(f"step {index}: {name} of the caller's model {b} was changed")
        if [x.training for x in model.modules()] != flags:
            raise _Different(f"step {index}: the training flags of the caller's model {b} were changed")


def _same(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and torch.equal(a, b)


def _state(module: nn.Module) -> dict[str, Tensor]:
    return dict([*module.named_parameters(remove_duplicate=False), *module.named_buffers(remove_duplicate=False)])


def _gradient(tensor: Tensor) -> Tensor:
    return torch.zeros_like(tensor) if tensor.grad is None else tensor.grad.detach().clone()


def _rows(x: Tensor, stacked: bool, members: int) -> list[Tensor]:
    if not stacked:
        # One leaf: what members add to its gradient sums up, and what they write is seen by the next.
        leaf = x.detach().clone().requires_grad_(x.requires_grad)
        return [leaf] * members
    return [x[b].detach().clone().requires_grad_(x.requires_grad) for b in range(members)]


def _tame(recorded: Seen) -> bool:
    floats = [v for v in recorded.values.values() if v.is_floating_point() or v.is_complex()]
    return all(bool(v.abs().max() < LARGEST) for v in floats if v.numel())


def _random_state() -> Any:
    return torch.get_rng_state().numpy().tobytes(), random.getstate()


def _raised_by_us(error: BaseException) -> bool:
    last = traceback.extract_tb(error.__traceback__)[-1].filename
    parts = Path(last).parts
    return "torch" not in parts and any(part in parts for part in ("hfusion", "ops", "passes"))


def _describe(error: BaseException) -> str:
    lines = [line for line in str(error).splitlines() if line.strip()]
    places = [f for f in traceback.extract_tb(error.__traceback__) if "site-packages" not in f.filename]
    where = " < ".join(f"{Path(f.filename).name}:{f.lineno}" for f in reversed(places[-4:]))
    return f"{type(error).__name__}: {' '.join(lines)[:400]} [{where}]"


@contextmanager
def _float64() -> Iterator[None]:
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with warnings.catch_warnings(action="ignore"):
            yield
    finally:
        torch.set_default_dtype(before)


class Worker:
    """A process that runs programs, and is restarted after a crash. Use it in a with block.

    Kernels of torch, and ours, may crash a process where they should raise.
    """

    def __enter__(self) -> Worker:
        self._begin()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._end()

    def outcome(self, text: str) -> Outcome:
        """As `outcome`; a process that ended is a fault, unless it ends with the members alone, too."""
        result = self._ask(text, alone=False)
        if result is not None:
            return result
        words = f"the process ended with the status {self._process.exitcode}"
        self._begin()
        if self._ask(text, alone=True) is not None:
            return Outcome(Verdict.RAW, words)
        self._begin()
        return Outcome(Verdict.INVALID, words)

    def _ask(self, text: str, *, alone: bool) -> Outcome | None:
        """Return the outcome, or None if the process ended."""
        try:
            self._pipe.send((text, alone))
            result: Outcome = self._pipe.recv()
        except (EOFError, BrokenPipeError, ConnectionResetError):
            self._end()
            return None
        return result

    def _begin(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, worker_pipe = context.Pipe()
        self._process = context.Process(target=_answer, args=(worker_pipe,), daemon=True)
        self._process.start()
        worker_pipe.close()

    def _end(self) -> None:
        self._pipe.close()
        self._process.join()


def _answer(pipe: Connection) -> None:
    torch.set_num_threads(1)
    while True:
        try:
            text, alone = pipe.recv()
        except (EOFError, KeyboardInterrupt):
            return
        pipe.send(outcome_alone(text) if alone else outcome(text))


def main(names: Mapping[str, Any]) -> None:
    """Run a printed program."""
    result = run(Trial(names))
    print(result.verdict, result.words)


# Find a smaller program with the same fault, by leaving out lines of its text, or letting statements compute nothing.

STATEMENT = r"( +(?:[vh]\d+[abc]?|trained)) = (.*)"
VALUE = r"\b[xvh]\d+[abc]?\b"


def shrink(text: str, faulty: Callable[[str], bool], seconds: float = 300.0) -> str:
    """Return a text for which ``faulty`` still holds, and for none of the smaller ones that can be made of it."""
    end, before = time.monotonic() + seconds, ""
    while text != before:
        before, place = text, 0
        while place < len(candidates := list(smaller(text))) and time.monotonic() < end:
            if faulty(candidates[place]):
                text = candidates[place]
            else:
                place += 1
    return text


def smaller(text: str) -> Iterator[str]:
    """Yield texts with something less. Many of them are no programs, or fail with the members alone."""
    lines = text.splitlines(keepends=True)
    first, last = (next(k for k, line in enumerate(lines) if line.startswith(s)) for s in ("STEPS = (", "def call("))
    for begin in reversed(range(first, last)):
        before = "".join(lines[:begin])
        yield from (before + "".join(lines[end:]) for end in range(begin + 1, min(begin + 5, last + 1)))
        if match := re.match(STATEMENT, lines[begin]):
            operands = set(re.findall(VALUE, match[2])) - {match[2]}
            yield from (f"{before}{match[1]} = {x}\n{''.join(lines[begin + 1 :])}" for x in sorted(operands))
