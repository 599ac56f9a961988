"""Groups of models of one structure with equal forwards, whose trials share an array."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from hfusion.capture.attribute_fingerprint import fingerprint
from hfusion.capture.registered_tensors import tensors
from hfusion.compiler.sandbox import without_trace
from hfusion.core.calls import call_arguments
from hfusion.core.errors import FusionError
from hfusion.torch_private.thread_draws import seen_in_modes
from hfusion.torch_private.unimported_dynamo import sparing_dynamo


class SameForward:
    """Compares models with a first one, on the CPU.

    Args:
        inputs: returns the inputs of a minibatch.
        evaluates: compare forwards in eval mode, too.
    """

    def __init__(self, first: nn.Module, inputs: Callable[[], Any], *, evaluates: bool) -> None:
        self._first, self._inputs, self._evaluates = first, inputs, evaluates
        self._traces: list[Any] | None = None
        self._answers: dict[Any, bool] = {}

    def same_as(self, model: nn.Module) -> bool:
        """Return whether ``model`` calls the same operators as the first model, whatever their scalar arguments.

        Models with equal attributes need not be called. For others, the operator calls of one forward are compared, and
        the captured graphs if the calls differ. Random or inspected numbers may change the calls, but not the graph.
        """
        if not self._answers:
            self._answers[fingerprint(self._first)] = True
        content = fingerprint(model)
        if content not in self._answers:
            self._answers[content] = self._traced(model) == self._first_traces() or self._same_graphs(model)
        return self._answers[content]

    def _first_traces(self) -> list[Any]:
        if self._traces is None:
            self._traces = self._traced(self._first)
        return self._traces

    def _traced(self, model: nn.Module) -> list[Any]:
        """Return the operator calls of a forward in train mode and, if models are evaluated, of one in eval mode."""
        model = _on_cpu(copy.deepcopy(model))
        args, kwargs = call_arguments(copy.deepcopy(self._inputs()), {})
        traces = [_trace(model, args, kwargs, training=True)]
        if self._evaluates:
            traces.append(_trace(model.eval(), args, kwargs, training=False))
        return traces

    def _same_graphs(self, model: nn.Module) -> bool:
        # The compiler is imported only if a model needs it: most sweeps of few epochs do not.
        from hfusion.array.fuse import fuse
        from hfusion.compiler.arguments import Arguments

        args, kwargs = call_arguments(self._inputs(), {})
        arguments = Arguments.of(args, kwargs)
        try:
            fused = fuse([_on_cpu(member) for member in (self._first, model)])
            fused.compiled(arguments)
            if self._evaluates:
                with fused.evaluating():
                    fused.compiled(arguments)
        except FusionError:
            # The graphs differ, or one model cannot be captured: then its own array raises the error.
            return False
        return True


def _on_cpu(model: nn.Module) -> nn.Module:
    """Return ``model`` if it is on the CPU, else a copy that is."""
    return model if all(tensor.is_cpu for _, tensor in tensors(model)) else copy.deepcopy(model).cpu()


def _trace(model: nn.Module, args: Sequence[Any], kwargs: dict[str, Any], *, training: bool) -> Any:
    with without_trace(), torch.set_grad_enabled(training), _OperatorCalls(model) as calls:
        outputs = model(*args, **kwargs)
    leaves, spec = pytree.tree_flatten(outputs)
    return calls.noted, spec, calls.shape_of(leaves)


@sparing_dynamo
class _OperatorCalls(TorchDispatchMode):
    """Records which operators are called with which tensors. Tensors are numbered, those of the model first."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.noted: list[Any] = []
        self._numbered_tensors: dict[int, tuple[int, Tensor]] = {}
        self.shape_of([tensor for _, tensor in tensors(model)])

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        inputs = self.shape_of((args, kwargs))
        with seen_in_modes():
            outputs = func(*args, **(kwargs or {}))
        self.noted.append((func, inputs, self.shape_of(outputs)))
        return outputs

    def shape_of(self, nest: Any) -> Any:
        """Return ``nest`` with an index in place of each tensor, and None in place of other leaves."""
        if isinstance(nest, Tensor):
            # Keep the tensor alive, so that no other tensor gets its id.
            return self._numbered_tensors.setdefault(id(nest), (len(self._numbered_tensors), nest))[0]
        if isinstance(nest, list | tuple):
            return tuple(self.shape_of(part) for part in nest)
        if isinstance(nest, dict):
            return tuple((name, self.shape_of(part)) for name, part in nest.items())
        return None
