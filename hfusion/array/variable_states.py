"""Variables other than tensors that the members' code names: programs are cached by their values."""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from hfusion.capture.hooks import WHOLE, Island
from hfusion.capture.python_reads import GRADIENT_QUESTIONS, STRIDE_QUESTIONS
from hfusion.capture.python_state import Variables
from hfusion.capture.reachable_code import names_in_torch
from hfusion.compiler.arguments import Arguments
from hfusion.core.errors import FusionError
from hfusion.core.exclusive import tracing
from hfusion.core.fingerprint import RANDOM_STATE, global_hooks, read_settings
from hfusion.device.backend import AUTOCAST_QUESTIONS, active_autocast
from hfusion.torch_private.module_hooks import Orthogonal, caches_parametrizations

# Maximum number of values of one variable, or of the attributes of members, for which programs are compiled.
MAX_VALUES = 4
# Names by which code may read attributes that it does not name.
_BY_ANY_NAME = ("__dict__", "vars", "dir", "getattr", "__getattribute__", "attrgetter", "eval", "exec", "deepcopy")


class Situations:
    """Numbers the states of the variables of files, classes, objects and closures that forward's code names.

    The states include the other properties that the code may read: settings of torch, whether parameters need a
    gradient, strides of inputs. ``looped``: what runs member by member from now on, as it names variables that change
    too often, with the reason; the variables are then read when it runs.
    """

    def __init__(self) -> None:
        self.number = 0
        self.looped: dict[Island, str] = {}
        self._around: Any = None
        self._models: Sequence[nn.Module] = ()
        self._variables: Variables | None = None
        # The names in torch's own methods of the models, which read attributes, too.
        self._in_torch = frozenset[str]()
        self._left_out: frozenset[str] = frozenset()
        self._numbers: dict[Any, int] = {}
        self._observed_values: dict[str, set[Any]] = {}

    def look(self, models: Sequence[nn.Module], tree: Sequence[nn.Module], arguments: Arguments | None) -> int:
        """Return the number of the present state, as far as the code of ``models`` reads it.

        Args:
            tree: the array's modules, with its parameters.
            arguments: of the call; None where it is not known.

        Raises:
            FusionError: an input carries a Python attribute that the code names; tensors of an array have none.
        """
        if caches_parametrizations():
            check_cached(models)
        variables = self._variables
        if variables is None or self._models != models or not variables.is_unchanged():
            with tracing:
                variables = self._look(models)
        around = _around(variables, tree, arguments)
        if around != self._around:
            with tracing:
                self._around = around
                self.number = self._numbers.setdefault(self._key(variables.values), len(self._numbers))
        return self.number

    @property
    def state(self) -> Any:
        """The state at the last `look`, hashable."""
        return None if self._variables is None else self._key(self._variables.values)

    def may_read(self, attributes: Set[str] | None) -> bool:
        """Return whether forward may read one of the ``attributes`` of the members; None stands for any."""
        if attributes is None or (attributes and (self._variables is None or not self._variables.is_complete)):
            return True
        names = frozenset() if self._variables is None else self._variables.names
        named = not names.isdisjoint((*attributes, *_BY_ANY_NAME)) or not self._in_torch.isdisjoint(attributes)
        return bool(attributes) and named

    def _look(self, models: Sequence[nn.Module]) -> Variables:
        """Read the variables that the code of ``models`` names now; `look` computes their number afterwards."""
        variables = Variables(models, self._left_out)
        for name, value in variables.values.items():
            self._observed_values.setdefault(name, set()).add(value)
        unstable = {name for name in variables.values if len(self._observed_values[name]) > MAX_VALUES}
        if unstable:
            for name in sorted(unstable):
                why = f"it names {name}, which has had more than {MAX_VALUES} values"
                self.looped.setdefault(WHOLE, f"{why}; make that an argument of forward or a buffer")
                del self._observed_values[name]
            self._left_out |= unstable
            variables = Variables(models, self._left_out)
        if not variables.names.isdisjoint(RANDOM_STATE):
            self.looped.setdefault(WHOLE, "it reads the state of random numbers, which a graph does not have")
        kinds: set[Any] = {type(part) for model in models for part in model.modules()}
        self._in_torch = frozenset[str]().union(*map(names_in_torch, kinds))
        self._models, self._variables, self._around = models, variables, None
        return variables

    def _key(self, values: dict[str, Any]) -> Any:
        # What loops reads variables itself.
        return self._around, len(self.looped), tuple(values.items())


def _around(variables: Variables, tree: Sequence[nn.Module], arguments: Arguments | None) -> Any:
    """Return further state that a program depends on: of the process, the thread, the array and the call."""
    names = variables.names
    for index, tensor in enumerate(() if arguments is None else arguments.values):
        attributes = vars(tensor) if isinstance(tensor, Tensor) else None
        if attributes and (read := sorted(names & attributes.keys())):
            raise FusionError(
                f"input {index} carries the Python attribute {read[0]}, a name that forward's code has, and a tensor "
                "of an array has no attributes; give its value as an argument of its own, and the tensor as "
                "x.view_as(x)"
            )
    return (
        torch.get_default_dtype(),
        global_hooks(),
        None if names.isdisjoint(AUTOCAST_QUESTIONS) else active_autocast(),
        read_settings(variables.settings) if variables.settings else None,
        tuple([p.requires_grad for module in tree for p in module._parameters.values() if p is not None])
        if "requires_grad" in names
        else None,
        None if names.isdisjoint(GRADIENT_QUESTIONS) else torch.is_grad_enabled(),
        None if arguments is None or names.isdisjoint(STRIDE_QUESTIONS) else arguments.memory_orders,
    )


def check_cached(models: Sequence[nn.Module]) -> None:
    """Raise a FusionError if a parametrization has buffers that it would update at each use instead of once."""
    for path, module in models[0].named_modules():
        if isinstance(module, parametrize.ParametrizationList):
            for part in module:
                if part.training and not isinstance(part, Orthogonal) and any(True for _ in part.buffers()):
                    raise FusionError(
                        f"{path} ({type(part).__name__}) has buffers, and an array that is called inside of "
                        "torch.nn.utils.parametrize.cached() computes it at every use; put the region into forward, or "
                        "call the array outside of it"
                    )
