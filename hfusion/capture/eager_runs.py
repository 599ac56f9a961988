"""Run copies of a member eagerly: what forward returns, reads and writes, and whether a graph does the same."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from hfusion.capture.attribute_fingerprint import contents, results
from hfusion.capture.hooks import is_intercepted
from hfusion.capture.python_reads import CLASSES, GRADIENT_QUESTIONS, STRIDE_QUESTIONS, UNANSWERABLE, RefusedReads
from hfusion.capture.python_state import CODE, check_restorable, restored, variables
from hfusion.capture.reachable_code import CodeSearch, search_of
from hfusion.capture.registered_tensors import RESTRIDED, check_registered, shared_memory, tensors
from hfusion.core.errors import FusionError, KeepsState
from hfusion.core.layout import same_value
from hfusion.core.memory import copies, module_copy, norm, relative_difference, same_values, tensors_in
from hfusion.core.program import Capture, Kind, describe_value
from hfusion.core.python_values import safe_repr
from hfusion.core.stages import stage
from hfusion.core.tree import know_dataclasses
from hfusion.device.backend import draws_kept, python_draws_kept, seed_in_use
from hfusion.passes.side_effects import written_slots
from hfusion.torch_private.autograd_engine import backward_gradients
from hfusion.torch_private.replaced_functions import silence_tracers

# Relative tolerances: a graph has the operators of the code, so rounding hardly differs. Gradients: times `GRADIENTS`.
ALIKE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
ALIKE |= {torch.complex128: 1e-9, torch.complex64: 1e-3}
GRADIENTS = 10.0
# What the names of gradients in an outcome begin with.
GRADIENT = "gradient of "
# A seed that no forward is likely to set itself.
SEED = 7_150_342_987


# The outcome of a run, by name: outputs, gradients, flags, the tensors after the call and after backward, and the error
# of backward if there was one.
Outcome: TypeAlias = dict[str, Any]


def runnable(module: nn.Module) -> bool:
    """Return whether ``module`` has no meta tensors and no intercepted methods, so that it can run eagerly."""
    stubs = any(is_intercepted(value) for part in module.modules() for value in vars(part).values())
    return not stubs and not any(tensor.is_meta for _, tensor in tensors(module))


def twin(module: nn.Module, memo: dict[int, Any] | None = None, label: str = "") -> nn.Module:
    """Return a copy with copied tensors.

    Args:
        memo: copies to take for some objects, by id.
        label: what to call the module in a message.

    Raises:
        FusionError: the module cannot be copied.
    """
    try:
        return module_copy(module, memo)
    except Exception as error:
        raise FusionError(
            f"{label or type(module).__name__} cannot be deep-copied ({type(error).__name__}: {error}); keep only "
            "tensors that are leaves, and plain Python values, as attributes"
        ) from error


def changed_modes(before: nn.Module, after: nn.Module) -> dict[str, bool]:
    """Return the paths and modes of submodules whose mode differs between ``before`` and its called copy ``after``."""
    modes_before = {path: part.training for path, part in before.named_modules(remove_duplicate=False)}
    modes_after = {path: part.training for path, part in after.named_modules(remove_duplicate=False)}
    return {path: training for path, training in modes_after.items() if modes_before.get(path, training) != training}


def run(
    module: nn.Module,
    args: tuple[Any, ...],
    kwargs: Mapping[str, Any],
    watch: Callable[[Sequence[Tensor]], AbstractContextManager[Any]] = nullcontext,
    copy_of: nn.Module | None = None,
    gradients: bool = True,
) -> Outcome:
    """Call ``module`` on copies of the arguments, and run backward. Random states are restored afterwards.

    Args:
        watch: called with the tensors among the copied arguments; ``module`` is called in the context that it returns.
        copy_of: the original of the copy ``module``. The outcome refers to its tensors where the copy has equal ones.
        gradients: False to run under torch.no_grad.
    """
    args, kwargs = copies((args, dict(kwargs)))
    leaves = _leaves(dict(module.named_parameters()), (args, kwargs)) if gradients else {}
    with apart(module), torch.set_grad_enabled(gradients), watch(tensors_in((args, kwargs))):
        result = call_on_copies(module, args, kwargs)
        know_dataclasses(result)
        before = {} if copy_of is None else dict(tensors(copy_of))
        return _outcome(pytree.tree_leaves(result), leaves, dict(tensors(module)), before)


def call_on_copies(module: nn.Module, args: Any, kwargs: Any) -> Any:
    """Call ``module`` with copied arguments, which are leaves.

    Raises:
        FusionError: ``module`` writes into an argument that requires grad.
    """
    try:
        return module(*args, **kwargs)
    except RuntimeError as error:
        needs_gradient = any(isinstance(x, Tensor) and x.requires_grad for x in pytree.tree_leaves((args, kwargs)))
        if not needs_gradient or "a leaf Variable that requires grad" not in str(error):
            raise
        raise FusionError(
            "forward writes into an input that needs a gradient, which members may share; let it write into a copy"
        ) from error


def run_graph(captured: Capture, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
    """Run a graph that was captured from ``module``. The tensors of ``module`` do not change."""
    args, kwargs = copies((args, dict(kwargs)))
    before = dict(tensors(module))
    written = {id(before[name]) for name in written_slots(captured.graph, captured.slots) if name in before}
    # A tensor that is registered under two names is one leaf.
    leaf_of = {id(tensor): own_leaf(tensor, copied=id(tensor) in written) for tensor in before.values()}
    registered = {name: leaf_of[id(tensor)] for name, tensor in before.items()}
    leaves = _leaves({name: registered[name] for name, _ in module.named_parameters()}, (args, kwargs))
    inputs = pytree.tree_leaves((args, kwargs), is_leaf=lambda leaf: leaf is None)
    held = registered | captured.constants
    values = [inputs[int(slot.name)] if slot.kind is Kind.INPUT else held[slot.name] for slot in captured.slots]
    with apart(module):
        outputs = _MemberRun(fx.GraphModule(nn.Module(), captured.graph)).run(*values)
        return _outcome(list(outputs), leaves, registered, before)


def own_leaf(tensor: Tensor, *, copied: bool) -> Tensor:
    """Return a new leaf with the values of a parameter or buffer. Parameters share memory unless ``copied``."""
    values = tensor.detach().clone() if copied or not isinstance(tensor, nn.Parameter) else tensor.detach()
    if not isinstance(tensor, nn.Parameter):
        return values.requires_grad_(tensor.requires_grad)
    leaf = nn.Parameter(values, tensor.requires_grad)
    leaf.grad = tensor.grad
    return leaf


class _MemberRun(fx.Interpreter):
    """Runs a member's graph, whose writes into parameters autograd does not see."""

    def call_function(self, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        unseen = target is torch.ops.aten.copy_.default and isinstance(args[0], nn.Parameter)
        with torch.set_grad_enabled(torch.is_grad_enabled() and not unseen):
            return super().call_function(target, args, kwargs)


def python_random_state() -> Any:
    """Return the state of Python's and of numpy's random numbers in a comparable form."""
    name, keys, *rest = np.random.get_state(legacy=True)
    return random.getstate(), name, np.asarray(keys).tobytes(), tuple(rest)


@contextmanager
def apart(module: nn.Module) -> Iterator[None]:
    """Context manager: run with a fixed seed, gradients on and autocast off; restores all of them afterwards."""
    kinds = {tensor.device.type for _, tensor in tensors(module)} or {"cpu"}
    with draws_kept(), silence_tracers(), python_draws_kept():
        seed_in_use(SEED)
        with torch.enable_grad(), torch.autocast(kinds.pop(), enabled=False):
            yield


def _leaves(parameters: Mapping[str, Tensor], arguments: Any) -> dict[str, Tensor]:
    """Return the parameters and input tensors that require grad, by name."""
    inputs = {f"input {k}": x for k, x in enumerate(pytree.tree_leaves(arguments)) if isinstance(x, Tensor)}
    return {name: t for name, t in {**parameters, **inputs}.items() if t.requires_grad}


def _outcome(
    outputs: Sequence[Any], leaves: Mapping[str, Tensor], registered: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> Outcome:
    grads_before = {name: tensor.grad for name, tensor in before.items() if tensor.is_leaf}
    outcome: Outcome = {
        f"output {k}": o.detach().clone() if isinstance(o, Tensor) else o for k, o in enumerate(outputs)
    }
    outcome |= {f"{name} afterwards": _snapshot(tensor, before.get(name)) for name, tensor in registered.items()}
    outcome |= {
        f".grad of {n}": _snapshot(t.grad, grads_before.get(n)) for n, t in leaves.items() if t.grad is not None
    }
    given = {f"output {k}": o for k, o in enumerate(outputs) if isinstance(o, Tensor)}
    # A buffer that forward makes require a gradient gets one that nothing reads.
    compared = {name: t for name, t in registered.items() if isinstance(t, nn.Parameter) or not t.is_leaf}
    outcome |= {f"requires_grad of {name}": t.requires_grad for name, t in {**given, **compared}.items()}
    parts = [fixed_projection(o) for o in given.values() if o.requires_grad]
    if not parts or not leaves:
        return outcome
    versions = {name: tensor._version for name, tensor in registered.items()}
    try:
        outcome |= gradients_of(parts, leaves)
    except RuntimeError as error:
        return outcome | {"backward": str(error).partition("\n")[0]}
    # torch.utils.checkpoint runs forward again in backward, which may write.
    written = {name: tensor for name, tensor in registered.items() if tensor._version != versions[name]}
    return outcome | {f"{name} after backward": tensor.detach().clone() for name, tensor in written.items()}


def gradients_of(parts: Sequence[Tensor], leaves: Mapping[str, Tensor]) -> Outcome:
    """Return the gradients of the sum of ``parts`` by ``leaves``, by name."""
    total = torch.stack([part.cpu().double() for part in parts]).sum()
    grads = backward_gradients(total, list(leaves.values()))
    return {f"{GRADIENT}{name}": _dense(g.detach()) for name, g in zip(leaves, grads, strict=True) if g is not None}


def _snapshot(tensor: Tensor, before: Tensor | None) -> Tensor:
    """Return the values of ``tensor``: ``before`` itself if it is equal, to save a copy, else a copy."""
    if before is None or tensor.layout is not torch.strided:
        return tensor.detach().clone()
    alike = (tensor.layout, tensor.dtype, tensor.device) == (before.layout, before.dtype, before.device)
    return before if alike and torch.equal(tensor, before) else tensor.detach().clone()


def fixed_projection(output: Tensor, *, stacked: bool = False) -> Tensor:
    """Reduce ``output`` to a sum of its elements with fixed weights, the same for every member if they are stacked."""
    dense = _dense(output)
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    shape = real.shape[1:] if stacked else real.shape
    weights = torch.arange(1, shape.numel() + 1, dtype=torch.float64, device=real.device).cos().view(shape)
    return (real * weights.to(real.dtype)).sum()


def difference(outcome: Outcome, expected: Outcome, limits: Mapping[torch.dtype, float]) -> str | None:
    """Return the first value in which two outcomes differ by more than ``limits``, by name; None if there is none."""
    return next((name for name, _ in excesses(outcome, expected, limits)), None)


def excesses(outcome: Outcome, expected: Outcome, limits: Mapping[torch.dtype, float]) -> Iterator[tuple[str, float]]:
    """Yield the `differences` of two outcomes that are larger than ``limits``; those of gradients may be larger."""
    for name, gap in differences(outcome, expected):
        dtype: Any = getattr(expected.get(name, outcome.get(name)), "dtype", None)
        if gap > (GRADIENTS if name.startswith(GRADIENT) else 1.0) * limits.get(dtype, 1e-2):
            yield name, gap


def differences(outcome: Outcome, expected: Outcome) -> Iterator[tuple[str, float]]:
    """Yield the relative difference of each value of two outcomes, by name; infinity where one cannot be computed.

    A gradient that is missing counts as zero, and so does one that is far smaller than the others, like that of a bias
    before a BatchNorm.
    """
    gradients = [tensor for name, tensor in expected.items() if name.startswith(GRADIENT)]
    floor = 1e-4 * max(map(norm, gradients), default=0.0)
    for name in {**expected, **outcome}:
        a, b = outcome.get(name), expected.get(name)
        if name.startswith(GRADIENT):
            a, b = (torch.zeros_like(b) if a is None else a), (torch.zeros_like(a) if b is None else b)  # type: ignore[arg-type]
        yield name, _difference(a, b, floor if name.startswith(GRADIENT) else 0.0)


def _difference(a: Any, b: Any, floor: float) -> float:
    if not (isinstance(a, Tensor) and isinstance(b, Tensor)):
        return 0.0 if same_value(a, b) else math.inf
    if a is b:
        return 0.0
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
        return math.inf
    a, b = _dense(a), _dense(b)
    if not (a.is_floating_point() or a.is_complex()):
        return 0.0 if torch.equal(a, b) else math.inf
    return relative_difference(a, b, max(floor, torch.finfo(b.dtype).eps))


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


# Observe one run of a copy: what forward returns, reads and writes.

# Number of attributes and variables that a message names.
_MOST = 3


@dataclass(frozen=True, eq=False)
class Observation:
    """One eager run of a copy of ``module``.

    Attributes:
        module, args, kwargs: the module before the run, and its arguments.
        outcome: outputs, gradients, and the tensors of the copy afterwards.
        modes: the new mode, train (True) or eval, of each submodule whose mode it changed, by path.
        attributes: the Python attributes that it changed, and the flags of buffers that it made require a gradient, if
            its code may read them.
        variables: the variables of classes and files that it changed.
        search: the code that forward may run.
    """

    module: nn.Module
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    outcome: Outcome
    modes: Mapping[str, bool]
    attributes: tuple[str, ...]
    variables: tuple[str, ...]
    search: CodeSearch

    def __str__(self) -> str:
        after = self.outcome
        gradients = [name.removeprefix(GRADIENT) for name in after if name.startswith(GRADIENT)]
        written = [n for n, t in tensors(self.module) if not same_values(after.get(f"{n} afterwards", t), t)]
        held = ((f"{holder.title}{name}", holder.read(name)) for holder in self.search.holders for name in holder.names)
        sections = {
            "inputs": map(_described, pytree.tree_leaves((self.args, dict(self.kwargs)))),
            "reads": sorted(name for name, value in held if not isinstance(value, CODE)),
            "writes": (*written, *self.attributes, *self.variables, *(f"{path}.training" for path in self.modes)),
            "outputs": [_described(value) for name, value in after.items() if name.startswith("output ")],
            "gradients": gradients or [after.get("backward", "none")],
        }
        lines = [f"one run of {type(self.module).__name__} in {'train' if self.module.training else 'eval'} mode"]
        for title, entries in sections.items():
            lines += [title, *(f"  {entry}" for entry in list(entries) or ["nothing"])]
        return "\n".join(lines)


def observe(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Observation:
    """Run a copy of ``module`` once. Python state, arguments and random numbers stay as they were.

    Raises:
        FusionError: forward accumulates gradients, changes registered tensors in a way that no stack can follow, or
            reads properties of tensors that differ between an array and a member alone.
    """
    search = search_of([module])
    with restored(module, search):
        called = twin(module)
        before, around, registered = contents(called), variables(search), dict(tensors(called))
        shared = shared_memory(registered)
        outcome = run(called, args, kwargs, _watch(module, called, (args, kwargs), search.all_names), copy_of=module)
        _check_gradients(module, called)
        check_registered(module, registered, shared, called)
        changed = _changed(around, variables(search))
        check_restorable(search, changed)
        flags = {name: tensor.requires_grad for name, tensor in tensors(module)}
        flagged = [f"{n}.requires_grad" for n, t in tensors(called) if t.is_leaf and t.requires_grad and not flags[n]]
        if search.all_names.isdisjoint(GRADIENT_QUESTIONS):
            flagged = []
        attributes = _changed(before, after := contents(called))
        _check_own(attributes, after, contents(module) if attributes else {})
        observed = Observation(
            module,
            args,
            kwargs,
            outcome,
            changed_modes(module, called),
            (*attributes, *flagged),
            tuple(changed),
            search,
        )
    stage(type(module).__name__, "observed", lambda: str(observed), lambda: None)
    return observed


def _check_own(changed: Sequence[str], after: Mapping[str, Any], of_original: Mapping[str, Any]) -> None:
    """Raise FusionError if a copy, and so one member, changes state that the original, and other members, share."""
    for name in changed:
        if name in after and of_original.get(name) == after[name]:
            raise FusionError(
                f"forward changes {name}, which copies of a model share, such as a function or what it is closed over; "
                "keep it in an attribute of the model, or in a registered buffer"
            )


def check_state(observed: Observation) -> None:
    """Raise KeepsState if the run changed Python state: the next call may compute something else than this one.

    The members' own objects fill a cache in their first call, so that a later call, which changes nothing, can be
    captured.
    """
    names = [*observed.attributes, *observed.variables]
    if not names:
        # What a call has left with a history belongs to one batch: a copy of the model has its values at best.
        names = [path for path in results(observed.module) if not observed.search.all_names.isdisjoint(path.split("."))]
    if names:
        shown = ", ".join(names[:_MOST]) + (f" and {len(names) - _MOST} more" if len(names) > _MOST else "")
        raise KeepsState(
            f"forward changes Python state in {shown}. A cache is captured once it is filled; return results, and keep "
            "what changes at every call in a registered buffer, to have it fused",
            names,
        )


def gradient_dependence(observed: Observation) -> str:
    """Describe the difference in forward's results while gradients are off; empty if there is none.

    Forward may read torch.is_grad_enabled() or requires_grad of its values, and a graph holds only one answer.
    """
    try:
        without = run(twin(observed.module), observed.args, observed.kwargs, gradients=False)
    except Exception:
        # Forward needs gradients, for example for torch.autograd.grad: nothing to compare.
        return ""
    # What forward returns and leaves in the module, without gradients.
    results, expected = (
        {
            name: value
            for name, value in outcome.items()
            if isinstance(value, Tensor) and (name.startswith("output ") or name.endswith(" afterwards"))
        }
        for outcome in (without, observed.outcome)
    )
    unlike = difference(results, expected, ALIKE)
    if unlike is None:
        return ""
    return (
        f"in forward {unlike} differs while gradients are off (torch.no_grad), and a graph knows one of them only; "
        "ask self.training instead"
    )


def _watch(
    module: nn.Module, called: nn.Module, arguments: Any, names: frozenset[str]
) -> Callable[[Sequence[Tensor]], AbstractContextManager[Any]]:
    """Return a function that makes a context manager, which refuses reads of properties that differ in an array.

    Args:
        names: the names in forward's code.
    """
    restrided = any(hasattr(tensor, RESTRIDED) for _, tensor in tensors(module))
    parameters = [k for k, leaf in enumerate(pytree.tree_leaves(arguments)) if isinstance(leaf, nn.Parameter)]
    if parameters and not names.isdisjoint(CLASSES):
        raise FusionError(
            f"input {parameters[0]} is an nn.Parameter, which members of an array see as a plain tensor, and forward's "
            f"code reads classes ({', '.join(sorted(names & CLASSES))}): give it as a tensor, such as x.view_as(x)"
        )
    if names.isdisjoint(UNANSWERABLE | (STRIDE_QUESTIONS if restrided else frozenset())):
        return nullcontext
    return lambda inputs: RefusedReads(inputs, [tensor for _, tensor in tensors(called)], restrided)


def _check_gradients(module: nn.Module, called: nn.Module) -> None:
    """Raise a FusionError if forward accumulates gradients of its own parameters."""
    before = dict(module.named_parameters())
    for name, parameter in called.named_parameters():
        if parameter.grad is not None and (name not in before or before[name].grad is None):
            raise FusionError(
                f"forward leaves a gradient in {name}.grad, as backward() does, where the array has its own; compute "
                "it by torch.autograd.grad"
            )


def _changed(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
    return [name for name in {**after, **before} if after.get(name) != before.get(name)]


def _described(value: Any) -> str:
    if isinstance(value, Tensor):
        return describe_value(value, None, 0) + (", needs a gradient" if value.requires_grad else "")
    return safe_repr(value)
