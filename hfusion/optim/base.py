"""The mechanism of the fused optimizers: stacks ``[B, *shape]`` of parameters, vectors ``[B]`` of numbers.

Arithmetic that broadcasts a vector over a stack reads and writes every tensor several times and is slower than a loop
over the members. So kernels are generated from the formula, in C on a CPU (``native_kernels``) and in Triton on a CUDA
device (``gpu``), which make one pass over the memory of a group. Without a kernel the formula runs in torch; for dtypes
of less than 32 bits, torch's own class runs on the members' rows (``torch_steppers``).
"""

from __future__ import annotations

import inspect
from collections import Counter
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from itertools import starmap
from operator import attrgetter, itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from hfusion.core.errors import FusionError
from hfusion.core.gradient_usage import absent_rows, any_absent
from hfusion.core.membership import mark, member_rows, membership
from hfusion.device.backend import Recorder, Recordings, backend, sent
from hfusion.optim import coupling, native_kernels
from hfusion.optim.clip import overflowing
from hfusion.optim.coupling import asked_of_members
from hfusion.optim.formula import Formula, for_all
from hfusion.optim.group import (
    Group,
    State,
    check_gradient,
    check_memory,
    check_padding,
    common_members,
    groups_of,
    membership_of,
    same_objects,
)
from hfusion.optim.hyper import (
    MASTER_STACK,
    MASTER_WEIGHTS,
    Options,
    ParamGroup,
    Settings,
    copy_vectors,
    named,
    plain,
    read,
    state_dtype,
)
from hfusion.optim.native_kernels import WatchedVectors
from hfusion.optim.optimizer_rows import MemberRows, complete_state, first_values, member_state_dicts, saved_entries
from hfusion.optim.torch_steppers import Stepper
from hfusion.torch_private.autograd_engine import is_profiling
from hfusion.torch_private.dispatch_modes import DisableTorchFunctionSubclass
from hfusion.torch_private.export_state import tensor_guards
from hfusion.torch_private.module_hooks import spare_dynamo


class FusedOptimizer(MemberRows, Formula, Optimizer):
    """Base class: a torch.optim.Optimizer whose numeric hyper-parameters have one value per member.

    ``group["lr"]`` and the others are float64 vectors ``[B]``; you may assign one number or a sequence. ``state[p]``
    holds ``step``, the counts ``[B]``, and stacks shaped like ``p``. A subclass is a :class:`Formula`, whose arguments
    are those of its constructor.

    ``master_weights=True``, an option of a param group: bfloat16 and float16 parameters have their state, and a copy
    ``master_param``, in float32. Steps update the copy and round it to the parameter. Other dtypes are not affected.
    """

    keeps_members_apart: ClassVar[bool] = True
    leaves_rows_alone: ClassVar[bool] = True
    # So torch.amp.GradScaler leaves it to the optimizer which gradients to divide and which members must not step, and
    # gives it ``grad_scale`` and ``found_inf`` for the time of a step.
    _step_supports_amp_scaling: ClassVar[bool] = True

    if TYPE_CHECKING:
        # The first argument of every constructor, before those that formulas declare.
        params: Any
    master_weights: bool = for_all(default=False, kw_only=True)

    def __init__(self, params: Any, *args: Any, **kwargs: Any) -> None:
        bound = inspect.signature(type(self)).bind(params, *args, **kwargs)
        bound.apply_defaults()
        if isinstance(params, Module):
            # A fused module can be iterated over, so torch's own error message would be about the members.
            raise TypeError(f"params must be parameters, got {type(params).__name__}. Give fused.parameters().")
        self._prepared: PreparedUpdate | None = None
        # None before the first step; a string says why steps cannot be recorded.
        self._recording: RecordedUpdates | str | None = None
        self.initial_values: list[dict[str, float | None]] = []
        # For each param group the options that its dict had: the optimizer's defaults do not replace them.
        self.explicit_keys: list[frozenset[str]] = []
        self._held: Tensor | None = None
        spare_dynamo()
        super().__init__(params, {name: value for name, value in bound.arguments.items() if name != "params"})
        first = self.param_groups[0]["params"][0]
        if self.elementwise and first.is_cpu and type(first) in (Tensor, Parameter):
            native_kernels.start_compiling()

    @property
    def members(self) -> int:
        """B, the number of members of the array."""
        return membership_of(self.param_groups[0]["params"][0]).members

    def add_param_group(self, param_group: ParamGroup) -> None:
        """Do the same as in torch. Raises ValueError for parameters of no array or of another B, or for bad values."""
        by_stacks, explicit = not asked_of_members(param_group), frozenset(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            members = common_members(group["params"])
            if members != self.members:
                raise ValueError(
                    f"param group {len(self.param_groups) - 1} belongs to an array of {members} members, "
                    f"the first group to one of {self.members}: use one optimizer per array"
                )
            self._check_params(group["params"])
            copy_vectors(group)
            self._settings(group)
            self.initial_values.append(first_values(group, self.hypers, members))
            self.explicit_keys.append(explicit)
        except Exception:
            self.param_groups.pop()
            raise
        if by_stacks:
            coupling.check_groups(self)

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """Do the same as in torch, but open a range of the profiler only if it runs."""
        hooked = Optimizer.profile_hook_step(func)

        @wraps(func)
        def step(self: FusedOptimizer, *args: Any, **kwargs: Any) -> Any:
            return (hooked if _observed(self) else func)(self, *args, **kwargs)

        return step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Do the same as in torch, but open a range of the profiler only if it runs."""
        if not set_to_none or _observed(self):
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Update every member. Returns what ``closure`` returns.

        Parameters whose ``grad`` is None are skipped, as in torch. A member that did not use a parameter, in a branch
        on values, keeps its row of it. Under a torch.amp.GradScaler, only members whose gradients are all finite step.
        Raises ValueError if a hyper-parameter is out of range, and FusionError if the state no longer has the
        parameters' dtype, device and shapes.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = self._work()
        skipped = without_gradient(self._params()) if any_absent() else {}
        if (found_inf := getattr(self, "found_inf", None)) is not None:
            if (overflown := self._unscaled(found_inf)) is not None:
                skip(skipped, self._with_gradients(), overflown)
            work = self._work()
        if self._held is not None:
            skip(skipped, self._with_gradients(), self._held)
        with torch.no_grad(), restore_skipped(skipped, self.state) if skipped else nullcontext():
            if isinstance(self._recording, RecordedUpdates):
                self._recording.step(work)
            else:
                for settings, group, grads in work:
                    group.step(grads, settings)
        return loss

    def _work(self) -> Work:
        """Return the groups of this step with their gradients. Everything that may fail is done before any update."""
        work = None if self._prepared is None else self._prepared.work(self)
        if work is None:
            self.forget()
            self._prepared = PreparedUpdate(self)
            work = self._prepared.work(self)
            assert work is not None
        return work

    def _unscaled(self, found_inf: Tensor) -> Tensor | None:
        """Divide the gradients by the scale of a torch.amp.GradScaler, if it has not, and return who must not step.

        Bool ``[B]``, or None if all members step.

        Raises FusionError if the scaler has found a number that is not finite, and all are finite now.
        """
        active = self._with_gradients()
        grads = [param.grad for param in active if param.grad is not None]
        if (scale := getattr(self, "grad_scale", None)) is not None:
            inverse = scale.double().reciprocal().float()
            for grad in grads:
                grad.detach().mul_(inverse.to(grad.device))
        if not found_inf.item():
            return None
        stacks = [member_rows(grad, membership_of(param)) for param, grad in zip(active, grads, strict=True)]
        bad = overflowing(stacks, self.members)
        if not bad.any():
            raise FusionError(
                "the GradScaler found gradients that are not finite, and there are none left: they were changed "
                "between scaler.unscale_ and scaler.step (clip_grad_value_, nan_to_num_), so that the members they "
                "belong to are unknown; clip with hf.optim.clip_grad_norm_, or change the gradients before "
                "scaler.unscale_"
            )
        return bad

    def _with_gradients(self) -> list[Tensor]:
        return [param for param in self._params() if param.grad is not None]

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @property
    def state_stacks(self) -> int:
        """The number of stacks in the state of a parameter: 2 for Adam, 0 for SGD without momentum."""
        counts = []
        for group in self.param_groups:
            stacks = len(self._settings(group).names)
            doubled = any(state_dtype(param, group[MASTER_WEIGHTS]) != param.dtype for param in group["params"])
            # Each is twice as large; so are the weights, and the gradients that a step converts.
            counts.append(2 * (stacks + 2) if doubled else stacks)
        return max(counts)

    @property
    def launches(self) -> str:
        """Description of how steps are launched on an accelerator, or why they are not recorded; empty on a CPU."""
        return self._recording.how if isinstance(self._recording, RecordedUpdates) else self._recording or ""

    def initialise(self) -> None:
        """Create the state of every trained parameter now instead of at its first step."""
        for group in self.param_groups:
            settings = self._settings(group)
            for param in group["params"]:
                if settings.stateful and param.requires_grad:
                    self._state(param, settings)

    def state_dict(self) -> dict[str, Any]:
        """Same as torch, with hyper-parameters as float64 tensors ``[B]``, which ``weights_only`` accepts."""
        state_dict = super().state_dict()
        groups = [{key: plain(value) for key, value in group.items()} for group in state_dict["param_groups"]]
        # Copied, because later steps increment the counts in place.
        state = {
            key: {name: value.clone() if name in self.numbers else value for name, value in entry.items()}
            for key, entry in state_dict["state"].items()
        }
        return {**state_dict, "state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Do the same as in torch, but copy the state. Raises CheckpointError for a state of another array."""
        saved_entries(self, state_dict)
        state = {
            key: {name: value.clone() for name, value in entry.items()} for key, entry in state_dict["state"].items()
        }
        copied = {**state_dict, "state": state}
        super().load_state_dict(copied)
        # torch gives all of the state but ``step`` the dtype and device of its parameter, which would round numbers.
        for param, saved in saved_entries(self, copied):
            numbers = {name: saved[name] for name in self.numbers if name in saved}
            stacks = {name: value.to(param.device) for name, value in saved.items() if name not in numbers}
            self.state[param].update(numbers | (stacks if MASTER_STACK in saved else {}))

    def unfuse(self) -> list[dict[str, Any]]:
        """Return B state dicts, one per member, for torch.optim's class of the same name."""
        for group in self.param_groups:
            if any(state_dtype(param, group[MASTER_WEIGHTS]) != param.dtype for param in group["params"]):
                raise FusionError(
                    "the state has master weights, which no optimizer of torch.optim has: take the members' models by "
                    "fused.unfuse(), and begin a new optimizer for each; or save opt.state_dict()"
                )
        return member_state_dicts(self)

    def forget(self) -> None:
        """Drop references to tensors that have moved; the next step reads their new addresses."""
        self._prepared = None
        if isinstance(self._recording, RecordedUpdates):
            self._recording.forget()

    def __getstate__(self) -> dict[str, Any]:
        marks = [[membership(param) for param in group["params"]] for group in self.param_groups]
        kept = {"initial_values": self.initial_values, "explicit_keys": self.explicit_keys}
        return {**super().__getstate__(), "memberships": marks, **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        marks = state.pop("memberships", [])
        super().__setstate__(state)
        self._prepared = None
        self._recording = None
        self._held = None
        # A copy of a Parameter has no `Membership`.
        for group, memberships in zip(self.param_groups, marks, strict=False):
            for param, saved_mark in zip(group["params"], memberships, strict=True):
                if membership(param) is None:
                    mark(param, saved_mark)
        for group in self.param_groups:
            self._settings(group)

    def _settings(self, group: ParamGroup) -> Settings:
        """Return the checked settings of ``group``."""
        members = membership_of(group["params"][0]).members
        vectors, columns = read(group, self.hypers, members)
        options = self._options(group)
        for hyper, column in zip(self.hypers, columns, strict=True):
            hyper.check(column)
        values = named("Values", tuple(hyper.field for hyper in self.hypers))
        rows = list(starmap(values, zip(*columns, strict=True)))
        different = dict.fromkeys(rows)
        for row in different:
            self.check(row, options)
        buffers = {row: tuple(self.stacks(row, options)) for row in different}
        if not isinstance(options.master_weights, bool):
            raise ValueError(f"{MASTER_WEIGHTS} is {options.master_weights!r}: give True or False")
        settings = Settings(vectors, columns, options, rows, [buffers[row] for row in rows], self.counts_steps)
        self._check_shared([param for param in group["params"] if param.requires_grad], settings)
        return settings

    def _options(self, group: ParamGroup) -> Options:
        names = (*self.options, MASTER_WEIGHTS)
        values = (tuple(value) if isinstance(value := group[name], list) else value for name in names)
        options: Options = named("Options", names)._make(values)
        return options

    def _check_params(self, params: Sequence[Tensor]) -> None:
        for param in params:
            param_mark = membership_of(param)
            check_padding(param_mark, self)
            if param.requires_grad:
                check_memory(param, f"parameter {param_mark.name!r}")
            self.check_param(param_mark.name, param.shape[1:] if param_mark.stacked else param.shape, param.dtype)

    def _check_shared(self, params: Sequence[Tensor], settings: Settings) -> None:
        for param in [] if settings.alike else params:
            param_mark = membership_of(param)
            if not param_mark.is_own:
                columns = zip(self.hypers, settings.columns, strict=True)
                hyper, column = next((h, c) for h, c in columns if len(set(c)) > 1)
                raise ValueError(
                    f"parameter {param_mark.name!r} is one tensor for all {param_mark.members} members, and "
                    f"{hyper.label} differs between them: {column}; give it a param group with one value, "
                    "or freeze it"
                )

    def _state(self, param: Tensor, settings: Settings) -> State:
        return complete_state(param, self.state[param], settings, type(self))


def _observed(optimizer: Optimizer) -> bool:
    """Return whether a profiler or a hook observes the steps of ``optimizer``."""
    return is_profiling() or coupling.has_hooks(optimizer)


# Members that do not take a step: their rows of parameters, state and step counts stay as they are.

SkippedRows = dict[Tensor, Tensor]
"""For each parameter the members that do not step: bool ``[B]``, or ``[1]`` for a parameter that all members share."""


def without_gradient(params: Iterable[Tensor]) -> SkippedRows:
    """Return the members for which a parameter that has a gradient was not used, and so would have none alone."""
    absent = ((param, absent_rows(param.grad)) for param in params if param.grad is not None)
    return {param: rows.reshape(-1) for param, rows in absent if rows is not None}


def skip(skipped: SkippedRows, params: Iterable[Tensor], members: Tensor) -> None:
    """Let ``members``, bool ``[B]``, skip ``params``, too. One that members share is skipped if all of them do."""
    for param in params:
        rows = members if membership_of(param).stacked else members.all().reshape(1)
        skipped[param] = skipped[param] | rows if param in skipped else rows


@contextmanager
def restore_skipped(skipped: SkippedRows, state: Mapping[Tensor, State]) -> Iterator[None]:
    """Context manager: restore the ``skipped`` rows of parameters and ``state`` after the step inside."""
    saved = []
    device_rows: dict[tuple[int, torch.device], Tensor] = {}
    for param, members in skipped.items():
        rows = members.nonzero().reshape(-1)
        # If no member is skipped, nothing is copied.
        for tensor in (param.detach(), *state.get(param, {}).values()) if len(rows) else ():
            stack, key = member_rows(tensor, membership_of(param)), (id(members), tensor.device)
            if key not in device_rows:
                device_rows[key] = sent(rows, tensor.device)
            saved.append((stack, device_rows[key], stack[device_rows[key]]))
    yield
    for stack, rows, values in saved:
        stack[rows] = values


# Record the launches of an optimizer's steps once and replay them with one call, as a CUDA graph.

# How often gradients must have the same addresses before launches are recorded: autograd may allocate them elsewhere.
STEADY = 3
# Largest number of different sets of gradient addresses that are counted.
MAX_ADDRESS_COUNTS = 64


class _Recorded(NamedTuple):
    """A function that replays recorded launches, and the objects that must stay alive for it."""

    replay: Callable[[], object]
    references: object


class RecordedUpdates:
    """The steps of one optimizer. ``record``: as `hfusion.device.backend.Recorder`."""

    def __init__(self, record: Recorder) -> None:
        self._record = record
        self._address_counts = Counter[Hashable]()
        self._recorded = Recordings[_Recorded]()
        self._unrecordable = ""

    @property
    def how(self) -> str:
        """Description of how a step is launched, with the reason if its launches are not recorded."""
        if self._recorded.why:
            return f"launched one by one: {self._recorded.why}"
        if self._unrecordable:
            return f"launched one by one: {self._unrecordable}"
        if self._recorded:
            return "recorded and replayed as one"
        return f"launched one by one so far: gradients must lie at the same addresses in {STEADY} steps"

    def step(self, work: Work) -> None:
        """Run a step of all groups in ``work``, and record or replay its launches where that is possible."""
        if self._record.recording:
            raise FusionError(
                "opt.step() was called while a graph of the device is being captured, which would repeat this step's "
                "hyper-parameters and counts for ever: capture forward and backward, and call opt.step() behind the "
                "replay, which records its own launches; or use hf.train_step, which records both"
            )
        parts = [(group.stepper, grads) for _, group, grads in work]
        self._unrecordable = next((why for stepper, _ in parts if (why := stepper.unrecordable)), "")
        if self._unrecordable or not work or self._recorded.why:
            for settings, group, grads in work:
                group.step(grads, settings)
            return
        for (settings, group, grads), (stepper, _) in zip(work, parts, strict=True):
            torch.autograd.graph.increment_version(group.written)
            stepper.ready(grads, settings)
        key = tuple((stepper.key, *((grad.data_ptr(), grad.stride()) for grad in grads)) for stepper, grads in parts)
        recorded = self._recorded.get(key)
        if recorded is None and self._steady(key):
            # Recording does not run the launches; the replay below does.
            recorded = self._recorded.add(key, lambda: _Recorded(*self._record(lambda: _launch(parts))))
        if recorded is None:
            _launch(parts)
        else:
            recorded.replay()

    def forget(self) -> None:
        """Discard recordings and counts of addresses, which are no longer valid."""
        self._address_counts.clear()
        self._recorded.forget()

    def _steady(self, key: Hashable) -> bool:
        """Count ``key``, and return whether gradients had these addresses often enough to record the launches."""
        if len(self._address_counts) == MAX_ADDRESS_COUNTS:
            self._address_counts.clear()
        self._address_counts[key] += 1
        return self._address_counts[key] >= STEADY and not self._recorded.full


def _launch(parts: Sequence[tuple[Stepper, Sequence[Tensor]]]) -> object:
    return [stepper.launch(grads) for stepper, grads in parts]


def recording_on(device: torch.device) -> RecordedUpdates | str:
    """Return a `RecordedUpdates` for ``device``, or the reason why it cannot record launches (empty for the host)."""
    record = backend(device).recorder()
    if isinstance(record, str):
        return record and f"launched one by one: {record}"
    return RecordedUpdates(record)


# What a step works on, and a cheap check that nothing of it has changed since the last step but numbers.

_GRAD = attrgetter("grad")

Work: TypeAlias = list[tuple[Settings, Group, list[Tensor]]]
"""The groups of a step, each with the settings of its param group and its gradients."""


def _active(group: ParamGroup) -> list[Tensor]:
    return [param for param in group["params"] if param.grad is not None]


class PreparedUpdate:
    """The settings of all param groups of an optimizer, and its parameters that have gradients, in groups.

    Valid while the same parameters have gradients, and they and their state are tensors of the same kinds at the same
    addresses. Values of hyper-parameters may change. Everything in a step that may fail is done here.
    """

    def __init__(self, optimizer: FusedOptimizer) -> None:
        groups = optimizer.param_groups
        keys = dict.fromkeys([*(hyper.key for hyper in optimizer.hypers), *optimizer.options, MASTER_WEIGHTS])
        # The first key is passed twice, so that itemgetter returns a tuple even for a single key.
        self._read = itemgetter(next(iter(keys)), *keys)
        self._count = len(groups) * (1 + len(keys))
        self._settings = [optimizer._settings(group) for group in groups]
        # Each with the index of its param group, and of the first parameter of that.
        self.groups: list[tuple[int, int, Group]] = []
        self._params: list[Tensor] = []
        self._idle: list[Tensor] = []
        self._tensors: list[Tensor] = []
        for number, (group, settings) in enumerate(zip(groups, self._settings, strict=True)):
            active, first = _active(group), len(self._params)
            self._params += active
            self._idle += [param for param in group["params"] if param.grad is None]
            for param in active:
                check_gradient(param, membership_of(param), param.grad)  # type: ignore[arg-type]
            optimizer._check_shared(active, settings)
            states = [optimizer._state(param, settings) for param in active] if settings.stateful else []
            parts = groups_of(type(optimizer), active, states, settings)
            self.groups += [(number, first, part) for part in parts]
            # The views in the groups keep their memory alive: an address cannot come back with other contents.
            self._tensors += [*active, *(tensor for entry in states for tensor in entry.values())]
        if optimizer._recording is None and self._params:
            optimizer._recording = recording_on(self._params[0].device)
        self._watch_settings(optimizer)
        with DisableTorchFunctionSubclass():
            self._addresses = list(map(Tensor.data_ptr, self._tensors))
            self._unique = list({id(tensor): tensor for tensor in self._tensors}.values())
            self._kinds = tensor_guards(self._unique)
            self._gradients = tensor_guards(list(map(_GRAD, self._params)))

    def work(self, optimizer: FusedOptimizer) -> Work | None:
        """Return the groups with their gradients, or None if this step must be prepared again."""
        objects = self._dependencies(optimizer)
        read = same_objects(objects, self._objects)
        if not read and not same_objects(objects[: -self._count], self._objects[: -self._count]):
            return None
        if self._idle and any(param.grad is not None for param in self._idle):
            return None
        grads = list(map(_GRAD, self._params))
        # The check also fails if a gradient is None.
        if not self._gradients.check(*grads):
            if any(grad is None for grad in grads):
                return None
            for param, grad in zip(self._params, grads, strict=True):
                check_gradient(param, membership_of(param), grad)
            self._gradients = tensor_guards(grads)
        with DisableTorchFunctionSubclass():
            if list(map(Tensor.data_ptr, self._tensors)) != self._addresses or not self._kinds.check(*self._unique):
                return None
            read = read and self._watch is not None and self._watch.all_equal()
        if not read and not self._read_settings(optimizer):
            return None
        if len(self.groups) == 1:
            return [(self._settings[number], group, group.gradients(grads)) for number, _, group in self.groups]
        return [
            (self._settings[number], group, group.gradients([grads[first + index] for index in group.indices]))
            for number, first, group in self.groups
        ]

    def _read_settings(self, optimizer: FusedOptimizer) -> bool:
        """Read the hyper-parameters and options; return whether the groups still fit them."""
        for index, group in enumerate(optimizer.param_groups):
            before, settings = self._settings[index], optimizer._settings(group)
            if (settings.names, settings.options) != (before.names, before.options):
                return False
            optimizer._check_shared(_active(group), settings)
            self._settings[index] = settings
        self._watch_settings(optimizer)
        return True

    def _watch_settings(self, optimizer: FusedOptimizer) -> None:
        """Note from which objects the settings were read, and what these held."""
        self._objects = self._dependencies(optimizer)
        pairs = [pair for settings in self._settings for pair in zip(settings.vectors, settings.table, strict=True)]
        # A list can be changed in place, which a comparison by identity would miss.
        steady = not any(isinstance(value, list) for value in self._objects[-self._count :])
        self._watch = WatchedVectors.of(pairs) if steady else None

    def _dependencies(self, optimizer: FusedOptimizer) -> list[object]:
        """Return every object that a step depends on, the values of hyper-parameters and options at the end.

        A pair of hyper-parameters is one: it can only be replaced.
        """
        state, groups = optimizer.state, optimizer.param_groups
        objects: list[object] = [*state, *state.values(), *groups]
        for entry in state.values():
            objects += entry.values()
        for group in groups:
            objects += group["params"]
        for group in groups:
            objects += self._read(group)
        return objects
