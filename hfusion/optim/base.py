"""The mechanism of the fused optimizers: stacks ``[B, *shape]`` of parameters, vectors ``[B]`` of numbers.

Arithmetic that broadcasts a vector over a stack reads and writes every tensor several times and is slower than a loop
over the members. So kernels are generated from the formula, in C on a CPU (``native_kernels``) and in Triton on a CUDA
device (``gpu``), which make one pass over the memory of a group. Without a kernel the formula runs in torch; for dtypes
of less than 32 bits, torch's own class runs on the members' rows (``torch_steppers``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Hashable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from functools import wraps
from itertools import repeat, starmap
from operator import attrgetter, is_, itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from hfusion.core.errors import FusionError
from hfusion.core.gradient_usage import absent_rows, any_absent
from hfusion.core.membership import mark, membership
from hfusion.device.backend import Recorder, backend
from hfusion.device.recordings import Recordings, sent
from hfusion.optim import coupling, native_kernels
from hfusion.optim.clip import overflowing
from hfusion.optim.formula import Formula, for_all
from hfusion.optim.group import (
    Group,
    Groups,
    State,
    check_memory,
    check_padding,
    common_members,
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
    unchanged,
)
from hfusion.optim.native_kernels import MemoryPairs
from hfusion.optim.optimizer_rows import MemberRows, first_values
from hfusion.optim.optimizer_state import complete_state, member_state_dicts, saved_entries
from hfusion.optim.param_groups import asked_of_members
from hfusion.optim.torch_steppers import Stepper
from hfusion.torch_private.autograd_engine import is_profiling
from hfusion.torch_private.dispatch_modes import DisableTorchFunctionSubclass
from hfusion.torch_private.dynamo_state import tensor_guards
from hfusion.torch_private.module_hooks import spare_dynamo

_LAYOUT = attrgetter("layout")


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
        self._prepared: dict[int, tuple[Settings, Groups | None]] = {}
        self._cache: StepCache | None = None
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
            skipped = together(skipped, self._unscaled(found_inf))
            work = self._work()
        if self._held is not None:
            skipped = together(skipped, of_members(self._active(), self._held))
        with torch.no_grad(), restore_skipped(skipped, self.state) if skipped else nullcontext():
            if isinstance(self._recording, RecordedUpdates):
                self._recording.step(work)
            else:
                for settings, group, grads in work:
                    group.step(grads, settings)
        return loss

    def _work(self) -> Work:
        """Return the groups of this step with their gradients. Everything that may fail is done before any update."""
        work = self._cache.work(self.param_groups, self.state) if self._cache is not None else None
        if work is None:
            before = [groups for _, groups in self._prepared.values()]
            work = [part for index, group in enumerate(self.param_groups) for part in self._prepare(index, group)]
            # Cache only if the groups are the same as in the last step, since shards come and go.
            again = same_objects(before, [groups for _, groups in self._prepared.values()])
            self._cache = self._remembered() if again else None
        return work

    def _unscaled(self, found_inf: Tensor) -> SkippedRows:
        """Divide the gradients by the scale of a torch.amp.GradScaler, if it has not, and return who must not step.

        Raises FusionError if the scaler has found a number that is not finite, and all are finite now.
        """
        active = self._active()
        grads = [param.grad for param in active if param.grad is not None]
        if (scale := getattr(self, "grad_scale", None)) is not None:
            inverse = scale.double().reciprocal().float()
            for grad in grads:
                grad.detach().mul_(inverse.to(grad.device))
        if not found_inf.item():
            return {}
        stacks = [g if membership_of(p).stacked else g.unsqueeze(0) for p, g in zip(active, grads, strict=True)]
        bad = overflowing(stacks, self.members)
        if not bad.any():
            raise FusionError(
                "the GradScaler found gradients that are not finite, and there are none left: they were changed "
                "between scaler.unscale_ and scaler.step (clip_grad_value_, nan_to_num_), so that the members they "
                "belong to are unknown; clip with hf.optim.clip_grad_norm_, or change the gradients before "
                "scaler.unscale_"
            )
        return of_members(active, bad)

    def _active(self) -> list[Tensor]:
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
        self._cache = None
        if isinstance(self._recording, RecordedUpdates):
            self._recording.forget()
        self._prepared = {index: (settings, None) for index, (settings, _) in self._prepared.items()}

    def __getstate__(self) -> dict[str, Any]:
        marks = [[membership(param) for param in group["params"]] for group in self.param_groups]
        kept = {"initial_values": self.initial_values, "explicit_keys": self.explicit_keys}
        return {**super().__getstate__(), "memberships": marks, **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        marks = state.pop("memberships", [])
        super().__setstate__(state)
        self._prepared = {}
        self._cache = None
        self._recording = None
        self._held = None
        # A copy of a Parameter has no `Membership`.
        for group, memberships in zip(self.param_groups, marks, strict=False):
            for param, saved_mark in zip(group["params"], memberships, strict=True):
                if membership(param) is None:
                    mark(param, saved_mark)
        for group in self.param_groups:
            self._settings(group)

    def _settings(self, group: ParamGroup, cached: Settings | None = None) -> Settings:
        """Return the checked settings of ``group``, or ``cached`` if its values have not changed."""
        members = membership_of(group["params"][0]).members
        if (
            cached
            and len(cached.members) == members
            and unchanged(group, self.hypers, cached.vectors, cached.columns)
            and self._options(group) == cached.options
        ):
            return cached
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
        if not settings.alike:
            self._check_shared([param for param in group["params"] if param.requires_grad], settings)
        return settings

    def _options(self, group: ParamGroup) -> Options:
        names = (*self.options, MASTER_WEIGHTS)
        options: Options = named("Options", names)._make(group[name] for name in names)
        return options

    def _check_params(self, params: Sequence[Tensor]) -> None:
        for param in params:
            param_mark = membership_of(param)
            check_padding(param_mark, self)
            if param.requires_grad:
                check_memory(param, f"parameter {param_mark.name!r}")
            self.check_param(param_mark.name, param.shape[1:] if param_mark.stacked else param.shape, param.dtype)

    def _check_shared(self, params: Sequence[Tensor], settings: Settings) -> None:
        for param in params:
            param_mark = membership_of(param)
            if not param_mark.is_own:
                columns = zip(self.hypers, settings.columns, strict=True)
                hyper, column = next((h, c) for h, c in columns if len(set(c)) > 1)
                raise ValueError(
                    f"parameter {param_mark.name!r} is one tensor for all {param_mark.members} members, and "
                    f"{hyper.label} differs between them: {column}; give it a param group with one value, "
                    "or freeze it"
                )

    def _prepare(self, index: int, group: ParamGroup) -> Work:
        """Do everything in a step that may fail, before any update; return groups with their gradients."""
        before, groups = self._prepared.get(index, (None, None))
        settings = self._settings(group, before)
        grads = [grad for param in group["params"] if (grad := param.grad) is not None]
        active = group["params"]
        if len(grads) < len(active):
            active = [param for param in active if param.grad is not None]
        if not all(map(is_, map(_LAYOUT, grads), repeat(torch.strided))):
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients: use dense ones")
        state = list(map(self.state.get, active)) if settings.stateful else []
        held = groups is not None and groups.is_valid_for(active, state, settings)
        if not settings.alike and not (held and settings is before):
            self._check_shared(active, settings)
        if groups is None or not held:
            if self._recording is None and active:
                self._recording = recording_on(active[0].device)
            states = [self._state(param, settings) for param in active] if settings.stateful else []
            groups = Groups(type(self), active, states, settings)
        groups.check(grads)
        self._prepared[index] = (settings, groups)
        return [(settings, part, part_grads) for part, part_grads in groups.with_gradients(grads)]

    def _remembered(self) -> StepCache | None:
        """Return a `StepCache` of this step's preparation, or None if the next step must prepare again."""
        groups = self.param_groups
        pairs = [(settings, parts) for settings, parts in map(self._prepared.__getitem__, range(len(groups))) if parts]
        keys = list(dict.fromkeys([*(hyper.key for hyper in self.hypers), *self.options, MASTER_WEIGHTS]))
        steady = (
            all(type(param.grad) is Tensor for group in groups for param in group["params"])
            and not isinstance(native_kernels.library(), str)
            and all(vector.is_contiguous() for settings, _ in pairs for vector in settings.vectors)
            # A list can be changed in place, which a comparison by identity would miss.
            and not any(isinstance(group[key], list) for group in groups for key in keys)
        )
        return StepCache(groups, self.state, keys, pairs) if steady else None

    def _state(self, param: Tensor, settings: Settings) -> State:
        return complete_state(param, self.state[param], settings, type(self))


def _observed(optimizer: Optimizer) -> bool:
    """Return whether a profiler or a hook observes the steps of ``optimizer``."""
    return is_profiling() or coupling.has_hooks(optimizer)


# Members that do not take a step: their rows of parameters, state and step counts stay as they are.

SkippedRows = dict[Tensor, Tensor]
"""For each parameter the members that do not step: bool ``[B]``, or ``[]`` for a parameter that all members share."""


def without_gradient(params: Iterable[Tensor]) -> SkippedRows:
    """The members for which a parameter that has a gradient was not used, and so would have none alone."""
    skipped = {}
    for param in params:
        rows = absent_rows(param.grad) if param.grad is not None else None
        if rows is not None:
            skipped[param] = rows
    return skipped


def of_members(params: Iterable[Tensor], members: Tensor) -> SkippedRows:
    """Return ``members``, bool ``[B]``, for each parameter. One that members share is skipped if all of them are."""
    return {param: members if membership_of(param).stacked else members.all() for param in params}


def together(*several: SkippedRows) -> SkippedRows:
    """Return the union: the members that are skipped by at least one of ``several``."""
    union: SkippedRows = {}
    for skipped in several:
        for param, rows in skipped.items():
            union[param] = union[param] | rows if param in union else rows
    return union


@contextmanager
def restore_skipped(skipped: SkippedRows, state: Mapping[Tensor, State]) -> Iterator[None]:
    """Context manager: restore the ``skipped`` rows of parameters and ``state`` after the step inside."""
    saved = [(tensor, rows, tensor[rows]) for tensor, rows in _rows(skipped, state)]
    yield
    for tensor, rows, values in saved:
        tensor[rows] = values


def _rows(skipped: SkippedRows, state: Mapping[Tensor, State]) -> Sequence[tuple[Tensor, Tensor]]:
    pairs = []
    device_rows: dict[tuple[int, torch.device], Tensor] = {}
    for param, members in skipped.items():
        # If no member is skipped, nothing is copied. A tensor without a member dim is handled as a stack of one row.
        rows = members.reshape(-1).nonzero().reshape(-1)
        if len(rows):
            for tensor in (param.detach(), *state.get(param, {}).values()):
                stack = tensor if members.dim() else tensor.unsqueeze(0)
                key = id(members), tensor.device
                if key not in device_rows:
                    device_rows[key] = sent(rows, tensor.device)
                pairs.append((stack, device_rows[key]))
    return pairs


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
        self._groups: list[Group] = []
        self._address_counts: dict[Hashable, int] = {}
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
        self._look([group for _, group, _ in work])
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
        self._groups = []
        self._address_counts.clear()
        self._recorded.forget()

    def _look(self, groups: list[Group]) -> None:
        if not same_objects(groups, self._groups):
            self.forget()
            self._groups = groups

    def _steady(self, key: Hashable) -> bool:
        """Count ``key``, and return whether gradients had these addresses often enough to record the launches."""
        if len(self._address_counts) == MAX_ADDRESS_COUNTS:
            self._address_counts.clear()
        count = self._address_counts[key] = self._address_counts.get(key, 0) + 1
        return count >= STEADY and not self._recorded.full


def _launch(parts: Sequence[tuple[Stepper, Sequence[Tensor]]]) -> object:
    return [stepper.launch(grads) for stepper, grads in parts]


def recording_on(device: torch.device) -> RecordedUpdates | str:
    """Return a `RecordedUpdates` for ``device``, or the reason why it cannot record launches (empty for the host)."""
    record = backend(device).recorder()
    if isinstance(record, str):
        return record and f"launched one by one: {record}"
    return RecordedUpdates(record)


# Fast path of a step: check cheaply that nothing but the gradients has changed since the last step.

_GRAD = attrgetter("grad")

Work: TypeAlias = list[tuple[Settings, Group, list[Tensor]]]
"""The groups of a step, each with the settings of its param group and its gradients."""


class StepCache:
    """The state of all param groups at a step in which every parameter had a gradient.

    ``keys``: those of hyper-parameters and options in a param group. ``prepared_groups``: for each param group its
    settings and groups.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        state: Mapping[Tensor, State],
        keys: Sequence[str],
        prepared_groups: Sequence[tuple[Settings, Groups]],
    ) -> None:
        # The first key is passed twice, so that itemgetter returns a tuple even for a single key.
        self._values = itemgetter(keys[0], *keys)
        self._prepared_groups = list(prepared_groups)
        self._objects = self._dependencies(groups, state)
        params = [param for group in groups for param in group["params"]]
        vectors = [vector for settings, _ in prepared_groups for vector in settings.vectors]
        self._params = params
        self._tensors = [*vectors, *(tensor for _, parts in prepared_groups for tensor in parts.tensors)]
        with DisableTorchFunctionSubclass():
            self._addresses = self._current_addresses()
            self._unique_tensors = list({id(tensor): tensor for tensor in self._tensors}.values())
            self._kinds = tensor_guards(self._unique_tensors)
            self._gradients = tensor_guards(list(map(_GRAD, params)))
            rows = [
                pair for settings, _ in prepared_groups for pair in zip(settings.vectors, settings.table, strict=True)
            ]
            self._memory = MemoryPairs(rows)

    def work(self, groups: Sequence[ParamGroup], state: Mapping[Tensor, State]) -> Work | None:
        """Return the groups of this step with their gradients, or None if anything else has changed."""
        if not same_objects(self._dependencies(groups, state), self._objects):
            return None
        grads = list(map(_GRAD, self._params))
        # The check also fails if a gradient is None.
        if not self._gradients.check(*grads):
            return None
        with DisableTorchFunctionSubclass():
            if (
                self._current_addresses() != self._addresses
                or not self._kinds.check(*self._unique_tensors)
                or not self._memory.all_equal()
            ):
                return None
        if len(self._prepared_groups) == 1:
            settings, parts = self._prepared_groups[0]
            return [(settings, group, part) for group, part in parts.with_gradients(grads)]
        fresh = iter(grads)
        return [
            (settings, group, part)
            for settings, parts in self._prepared_groups
            for group, part in parts.with_gradients([next(fresh) for _ in range(parts.count)])
        ]

    def _dependencies(self, groups: Sequence[ParamGroup], state: Mapping[Tensor, State]) -> list[object]:
        """Return every object that a step depends on. A pair of hyper-parameters is one: it can only be replaced."""
        objects: list[object] = [*state, *state.values(), *groups]
        for entry in state.values():
            objects += entry.values()
        for group in groups:
            objects += group["params"]
            objects += self._values(group)
        return objects

    def _current_addresses(self) -> list[int]:
        """Return the current addresses of all tensors."""
        return list(map(Tensor.data_ptr, self._tensors))
