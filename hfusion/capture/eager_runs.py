"""Run copies of a member eagerly, and compare the outcomes of runs and graphs."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, fx, nn
from torch.utils import _pytree as pytree

from hfusion.capture.hooks import is_intercepted
from hfusion.capture.registered_tensors import tensors
from hfusion.core.copies import copies, module_copy
from hfusion.core.errors import FusionError
from hfusion.core.layout import same_value
from hfusion.core.memory import norm, relative_difference
from hfusion.core.program import Capture, Kind
from hfusion.core.tree import know_dataclasses
from hfusion.device.backend import draws_kept, python_draws_kept, seed_in_use
from hfusion.passes.side_effects import written_slots
from hfusion.torch_private.autograd_engine import backward_gradients
from hfusion.torch_private.replaced_functions import silence_tracers

# Relative tolerances: a graph has the operators of the code, so rounding hardly differs. Gradients: times `GRADIENTS`.
ALIKE = {torch.float64: 1e-9, torch.float32: 1e-3, torch.bfloat16: 5e-2, torch.float16: 5e-2}
GRADIENTS = 10.0
# A seed that no forward is likely to set itself.
SEED = 7_150_342_987


@dataclass(frozen=True)
class Outcome:
    """The outcome of a run.

    Attributes:
        outputs: the flat outputs, detached.
        values: gradients, flags, and the tensors after the call and after backward, by name.
        failed: the error of backward; empty if there was none.
    """

    outputs: tuple[Any, ...]
    values: dict[str, Tensor]
    failed: str = ""


def runnable(module: nn.Module) -> bool:
    """Return whether ``module`` has no meta tensors and no intercepted methods, so that it can run eagerly."""
    stubs = any(is_intercepted(value) for part in module.modules() for value in vars(part).values())
    return not stubs and not any(tensor.is_meta for _, tensor in tensors(module))


def twin(module: nn.Module) -> nn.Module:
    """Return a copy with copied tensors. Raises FusionError if the module cannot be copied."""
    try:
        return module_copy(module)
    except Exception as error:
        raise FusionError(
            f"{type(module).__name__} cannot be deep-copied ({type(error).__name__}: {error}); keep only tensors that "
            "are leaves, and plain Python values, as attributes"
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
) -> Outcome:
    """Call ``module`` on copies of the arguments, and run backward. Random states are restored afterwards.

    Args:
        watch: called with the tensors among the copied arguments; ``module`` is called in the context that it returns.
        copy_of: the original of the copy ``module``. The outcome refers to its tensors where the copy has equal ones.
    """
    args, kwargs = copies((args, dict(kwargs)))
    leaves = _leaves(dict(module.named_parameters()), (args, kwargs))
    with apart(module), watch([leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, Tensor)]):
        return _called(module, args, kwargs, leaves, {} if copy_of is None else dict(tensors(copy_of)))


def run_without_gradients(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Outcome:
    """Return the same as `run`, under torch.no_grad."""
    args, kwargs = copies((args, dict(kwargs)))
    with apart(module), torch.no_grad():
        return _called(module, args, kwargs, {}, {})


def _called(
    module: nn.Module, args: Any, kwargs: Any, leaves: Mapping[str, Tensor], before: Mapping[str, Tensor]
) -> Outcome:
    result = call_on_copies(module, args, kwargs)
    know_dataclasses(result)
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
    leaf_of = {id(tensor): _own_leaf(tensor, copied=id(tensor) in written) for tensor in before.values()}
    registered = {name: leaf_of[id(tensor)] for name, tensor in before.items()}
    leaves = _leaves({name: registered[name] for name, _ in module.named_parameters()}, (args, kwargs))
    inputs = pytree.tree_leaves((args, kwargs), is_leaf=lambda leaf: leaf is None)
    held = registered | captured.constants
    values = [inputs[int(slot.name)] if slot.kind is Kind.INPUT else held[slot.name] for slot in captured.slots]
    with apart(module):
        outputs = _MemberRun(fx.GraphModule(nn.Module(), captured.graph)).run(*values)
        return _outcome(list(outputs), leaves, registered, before)


def _own_leaf(tensor: Tensor, *, copied: bool) -> Tensor:
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
    outputs: Sequence[Any],
    leaves: Mapping[str, Tensor],
    registered: Mapping[str, Tensor],
    before: Mapping[str, Tensor],
) -> Outcome:
    grads_before = {name: tensor.grad for name, tensor in before.items() if tensor.is_leaf}
    values = {f"{name} afterwards": _snapshot(tensor, before.get(name)) for name, tensor in registered.items()}
    values |= {f".grad of {n}": _snapshot(t.grad, grads_before.get(n)) for n, t in leaves.items() if t.grad is not None}
    copied = tuple(o.detach().clone() if isinstance(o, Tensor) else o for o in outputs)
    flags = {f"requires_grad of output {k}": torch.tensor(o.requires_grad, device="cpu") for k, o in _tensors(outputs)}
    # A buffer that forward makes require a gradient gets one that nothing reads.
    compared = {name: t for name, t in registered.items() if isinstance(t, nn.Parameter) or not t.is_leaf}
    flags |= {f"requires_grad of {name}": torch.tensor(t.requires_grad, device="cpu") for name, t in compared.items()}
    parts = [fixed_projection(o) for _, o in _tensors(outputs) if o.requires_grad]
    if not parts or not leaves:
        return Outcome(copied, values | flags)
    total = torch.stack([part.double().cpu() for part in parts]).sum()
    versions = {name: tensor._version for name, tensor in registered.items()}
    try:
        grads = backward_gradients(total, list(leaves.values()))
    except RuntimeError as error:
        return Outcome(copied, values | flags, str(error).partition("\n")[0])
    gradients = {
        f"gradient of {name}": _dense(g.detach()) for name, g in zip(leaves, grads, strict=True) if g is not None
    }
    # torch.utils.checkpoint runs forward again in backward, which may write.
    written = {
        f"{name} after backward": tensor.detach().clone()
        for name, tensor in registered.items()
        if tensor._version != versions[name]
    }
    return Outcome(copied, values | flags | gradients | written)


def _snapshot(tensor: Tensor, before: Tensor | None) -> Tensor:
    """Return the values of ``tensor``: ``before`` itself if it is equal, to save a copy, else a copy."""
    if before is None or _kind(tensor) != _kind(before) or tensor.layout is not torch.strided:
        return tensor.detach().clone()
    return before if torch.equal(tensor, before) else tensor.detach().clone()


def _kind(tensor: Tensor) -> tuple[torch.layout, torch.dtype, torch.device]:
    """Return the properties that must be equal before two tensors can be compared."""
    return tensor.layout, tensor.dtype, tensor.device


def _tensors(outputs: Sequence[Any]) -> list[tuple[int, Tensor]]:
    return [(k, output) for k, output in enumerate(outputs) if isinstance(output, Tensor)]


def fixed_projection(output: Tensor, *, stacked: bool = False) -> Tensor:
    """Reduce ``output`` to a sum of its elements with fixed weights, the same for every member if they are stacked."""
    dense = _dense(output)
    real = torch.view_as_real(dense.resolve_conj()) if dense.is_complex() else dense
    shape = real.shape[1:] if stacked else real.shape
    weights = torch.arange(1, shape.numel() + 1, dtype=torch.float64, device=real.device).cos().view(shape)
    return (real * weights.to(real.dtype)).sum()


def difference(outcome: Outcome, expected: Outcome, limits: Mapping[torch.dtype, float]) -> str | None:
    """Return the first value in which two outcomes differ by more than ``limits``, by name; None if there is none."""
    if len(outcome.outputs) != len(expected.outputs):
        return "the number of outputs"
    for k, (a, b) in enumerate(zip(outcome.outputs, expected.outputs, strict=True)):
        if isinstance(a, Tensor) != isinstance(b, Tensor) or not _alike(a, b, limits, 0.0, 1.0):
            return f"output {k}"
    floor = 1e-4 * max((norm(t) for n, t in expected.values.items() if n.startswith("gradient of ")), default=0.0)
    for name in {**expected.values, **outcome.values}:
        a, b = outcome.values.get(name), expected.values.get(name)
        gradient = name.startswith("gradient of ")
        if gradient and (a is None or b is None):
            a, b = (torch.zeros_like(b) if a is None else a), (torch.zeros_like(a) if b is None else b)  # type: ignore[arg-type]
        if a is None or b is None or not _alike(a, b, limits, floor, GRADIENTS if gradient else 1.0):
            return name
    return "backward" if outcome.failed != expected.failed else None


def _dense(tensor: Tensor) -> Tensor:
    return tensor if tensor.layout is torch.strided else tensor.to_dense()


def _alike(a: Any, b: Any, limits: Mapping[torch.dtype, float], floor: float, looser: float) -> bool:
    if not isinstance(a, Tensor):
        return same_value(a, b)
    if a is b:
        return True
    if (a.shape, a.dtype, a.layout) != (b.shape, b.dtype, b.layout):
        return False
    a, b = _dense(a), _dense(b)
    if not (a.is_floating_point() or a.is_complex()):
        return torch.equal(a, b)
    limit = limits.get(a.dtype, limits[torch.float64])
    return not relative_difference(a, b, floor) > looser * limit
