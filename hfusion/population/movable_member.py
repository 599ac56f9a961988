"""Decide whether a forked process may compute a plain member, and detect changes that it does not know of."""

from __future__ import annotations

import dis
import functools
import logging
import types
import weakref
from collections.abc import Callable, Iterable
from operator import is_, itemgetter
from typing import Any, cast

import torch
from torch import Tensor, nn

from hfusion.array.member_module import HOOKS, tensor_states
from hfusion.capture.attribute_bytecode import holder_variable
from hfusion.capture.attribute_fingerprint import python_attributes
from hfusion.capture.attribute_writes import CHANGING_METHODS, functions_called, functions_reached
from hfusion.capture.registered_tensors import is_array, tensors
from hfusion.capture.variable_guards import Variables, content
from hfusion.capture.variable_scopes import MISSING
from hfusion.core.fingerprint import names_in, read_state
from hfusion.core.memory import is_plain
from hfusion.core.module_tables import ModuleTables
from hfusion.core.python_values import CONTAINERS, MAPPINGS, SCALARS
from hfusion.population.plain_member import PlainMember
from hfusion.population.plain_module import PlainModule, is_shared
from hfusion.population.shared_arena import SharedArena, arena_bytes
from hfusion.population.update_guard import LIMITS
from hfusion.torch_private.dispatch_modes import DisableTorchFunctionSubclass
from hfusion.torch_private.storages import has_views

_log = logging.getLogger(__name__)
_END = object()

# Names of functions with effects beyond a process, or that a search by names cannot follow.
_BEYOND = frozenset(
    {"print", "input", "open", "exec", "eval", "globals", "vars", "setattr", "delattr", "__dict__", "random", "logging"}
)
_WRITES = frozenset(
    {"STORE_ATTR", "DELETE_ATTR", "STORE_GLOBAL", "DELETE_GLOBAL", "STORE_SUBSCR", "DELETE_SUBSCR", "STORE_SLICE"}
)
_STANDARD = frozenset(nn.Module().__dict__)
_READ_HOOKS = itemgetter(*HOOKS)
_VALUES = (*SCALARS, torch.dtype, torch.device, torch.Size, type, types.FunctionType, types.ModuleType)


class MovableMember:
    """The state of a plain member when this process was forked, which is all that the fork knows of it.

    Attributes:
        why_not: why the member is computed in this process; empty if a fork may compute it.
        stays: whether this process computes it nevertheless, for a reason that was found later.
    """

    def __init__(self, member: PlainMember) -> None:
        module = cast(PlainModule, member.fused)
        model = module.model
        self._model, self._member, self.stays = model, weakref.ref(member), False
        self._variables = Variables([model])
        self.why_not = _why_not(module, self._variables)
        if self.why_not:
            return
        self._modules = list(map(vars, model.modules()))
        named = [["training", *(name for name in held if name not in _STANDARD), "training"] for held in self._modules]
        readers = [itemgetter(*names) for names in named]
        self._attributes = [
            (held, len(held), read, read(held)) for held, read in zip(self._modules, readers, strict=True)
        ]
        self._tables = ModuleTables(model)
        self._contents = [(value, content(value)) for _, value in _attributes(model) if isinstance(value, CONTAINERS)]
        self._parameters, self._buffers = list(model.parameters()), list(model.buffers())
        # Addresses of tensors in memory that forks share, by id.
        self._shared: dict[int, int] = {}
        self._updating: list[Any] = []
        self._note_tensors()

    def _note_tensors(self) -> None:
        self._states = tensor_states(self._parameters)
        self._addresses = [buffer.data_ptr() for buffer in self._buffers]

    @property
    def member(self) -> PlainMember:
        member = self._member()
        assert member is not None
        return member

    @property
    def vectors(self) -> list[Tensor]:
        """The hyper-parameters and limits of updates, which users and schedules write to."""
        return [value for value in self._updating if isinstance(value, Tensor) and id(value) not in self._shared]

    @property
    def versions(self) -> list[int]:
        with DisableTorchFunctionSubclass():
            return [vector._version for vector in self.vectors]

    @property
    def shared_bytes(self) -> int:
        """The maximum number of bytes of its tensors and gradients in memory that forks share."""
        held = [*self._parameters, *self._parameters, *self._buffers, *_state_tensors(self.member)]
        return sum(map(arena_bytes, held)) + arena_bytes(torch.zeros((), dtype=torch.uint8, device="cpu"))

    def move(self, arena: SharedArena) -> bool:
        """Move its tensors to memory that forks share. Return False if a view of one exists, which would not follow."""
        state = _state_tensors(self.member)
        held = [*self._parameters, *self._buffers, *state]
        held = [tensor for tensor in held if self._shared.get(id(tensor)) != tensor.data_ptr()]
        if any(map(has_views, held)):
            self.stay("a view of one of its tensors exists")
            return False
        for tensor in held:
            tensor.data = arena.like(tensor)
            self._shared[id(tensor)] = tensor.data_ptr()
        self._updating = _read_by_updates(self.member)
        self._note_tensors()
        return True

    def stay(self, why: str) -> None:
        """Compute the member in this process from now on, and log the reason."""
        self.stays = True
        _log.info("a %s is computed in this process: %s", type(self._model).__name__, why)

    def is_unchanged(self) -> bool:
        """Return whether the member is unchanged, apart from the values of its tensors."""
        try:
            unchanged = all(
                len(attributes) == n and all(map(is_, read(attributes), recorded))
                for attributes, n, read, recorded in self._attributes
            )
        except KeyError:
            return False
        return (
            unchanged
            and self._tables.is_unchanged()
            and not any(map(any, map(_READ_HOOKS, self._modules)))
            and all(content(value) == recorded for value, recorded in self._contents)
            and tensor_states(self._parameters) == self._states
            and [buffer.data_ptr() for buffer in self._buffers] == self._addresses
            and self._variables.is_unchanged()
            and (not self._updating or all(map(is_, _read_by_updates(self.member), self._updating)))
        )


def _state_tensors(member: PlainMember) -> list[Tensor]:
    return [value for entry in member.optimizer.state.values() for value in entry.values() if isinstance(value, Tensor)]


def _read_by_updates(member: PlainMember) -> list[Any]:
    """Return all objects that an update reads besides parameters and gradients, to detect that one is replaced."""
    objects: list[Any] = [value for entry in member.optimizer.state.values() for value in entry.values()]
    for group in member.optimizer.param_groups:
        for value in group.values():
            objects += value if isinstance(value, tuple | list) else [value]
    return [*objects, *(member.table[name] for name in LIMITS if name in member.table), _END]


def why_not_loss(loss: Callable[..., Any]) -> str:
    """Return why a fork cannot compute a loss; empty if it can."""
    if read_state(loss) is None:
        return "what the loss reads cannot be compared"
    if isinstance(loss, nn.Module) and not type(loss).__module__.startswith("torch."):
        return "the loss is a module"
    return next(filter(None, map(_side_effect, functions_called(loss))), "")


def _attributes(model: nn.Module) -> Iterable[tuple[str, Any]]:
    for path, part in model.named_modules():
        yield from ((f"{path}.{name}".strip("."), value) for name, value in python_attributes(part))


def _why_not(module: PlainModule, variables: Variables) -> str:
    model = module.model
    for path, part in model.named_modules():
        if any(vars(part)[name] for name in HOOKS):
            return f"{path or 'the model'} has a hook"
        if is_array(part) or isinstance(part, torch.jit.ScriptModule):
            return f"{path or 'the model'} is of class {type(part).__name__}"
    for name, tensor in tensors(model):
        if not is_plain(tensor) or tensor.device.type != "cpu" or is_shared(tensor):
            return f"{name} is no tensor of the member alone"
    outside = ((f"{holder.title}{name}", holder.read(name)) for holder in variables.holders for name in holder.names)
    for name, value in (*_attributes(model), *outside):
        if value is not MISSING and not _is_value(value):
            return f"{name} is of class {type(value).__name__}"
    if variables.questions.random_state:
        return "forward reads the state of random numbers"
    return next(filter(None, map(_side_effect, functions_reached(model))), "")


def _is_value(value: Any) -> bool:
    """Return whether a value is data or code, which a fork has like this process."""
    if isinstance(value, MAPPINGS):
        return all(_is_value(item) for pair in value.items() for item in pair)
    if isinstance(value, CONTAINERS):
        return all(map(_is_value, value))
    if isinstance(value, types.BuiltinFunctionType):
        return value.__self__ is None or isinstance(value.__self__, types.ModuleType)
    return isinstance(value, (*_VALUES, property, staticmethod, classmethod, torch._ops.OpOverloadPacket))


def _side_effect(function: types.FunctionType) -> str:
    effect = _effect_of(function.__code__)
    return f"{function.__qualname__} {effect}" if effect else ""


@functools.lru_cache(maxsize=4096)
def _effect_of(code: types.CodeType) -> str:
    """Return what code may do besides computing; empty if nothing is seen."""
    if named := sorted(_BEYOND.intersection(names_in(code).all)):
        return f"names {named[0]}"
    steps = list(dis.get_instructions(code))
    local = set(code.co_varnames[1:])
    for k, step in enumerate(steps):
        if step.opname in _WRITES or (
            step.opname in ("STORE_DEREF", "DELETE_DEREF") and step.argval in code.co_freevars
        ):
            return f"assigns {step.argval}" if step.argval else "assigns items"
        changes = step.opname in ("LOAD_ATTR", "LOAD_METHOD") and step.argval in CHANGING_METHODS
        if changes and k and holder_variable(steps, k) not in (*local, "torch"):
            return f"calls {step.argval}"
    return next(filter(None, (_effect_of(const) for const in code.co_consts if isinstance(const, types.CodeType))), "")
