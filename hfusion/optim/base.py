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
from operator import itemgetter
from typing import TYPE_CHECKING, Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from hfusion.core.errors import FusionError
from hfusion.core.gradient_usage import absent_rows, any_absent
from hfusion.core.member_table import MemberTable
from hfusion.core.membership import mark, member_rows, membership
from hfusion.core.row_indices import check_once, copied, kept_rows, rows_of
from hfusion.device.backend import Recorder, Recordings, backend, sent
from hfusion.optim import coupling, native_kernels
from hfusion.optim.clip import overflowing
from hfusion.optim.coupling import AskedParams
from hfusion.optim.formula import Formula, for_all
from hfusion.optim.group import (
    Group,
    State,
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
from hfusion.optim.optimizer_rows import complete_state, group_table, put, rearrange, saved_entries, width
from hfusion.torch_private.autograd_engine import is_profiling
from hfusion.torch_private.dispatch_modes import DisableTorchFunctionSubclass
from hfusion.torch_private.export_state import tensor_guards
from hfusion.torch_private.module_hooks import spare_dynamo


class FusedOptimizer(Formula, Optimizer):
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
        # None before the first step.
        self._recording: RecordedUpdates | None = None
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
        by_stacks = not (isinstance(param_group, dict) and isinstance(param_group.get("params"), AskedParams))
        explicit = frozenset(param_group)
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            members = common_members(group["params"])
            if members != self.members:
                raise ValueError(
                    f"param group {len(self.param_groups) - 1} belongs to an array of {members} members, "
                    f"the first group to one of {self.members}: use one optimizer per array"
                )
            for param in group["params"]:
                param_mark = membership_of(param)
                check_padding(param_mark, self)
                if param.requires_grad:
                    check_memory(param, f"parameter {param_mark.name!r}")
                self.check_param(param_mark.name, param.shape[1:] if param_mark.stacked else param.shape, param.dtype)
            copy_vectors(group)
            columns = zip(self.hypers, self._settings(group).columns, strict=True)
            self.initial_values.append({h.label: c[0] if len(set(c)) == 1 else None for h, c in columns})
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
        # Members for which a parameter that has a gradient was not used, and so would have none alone.
        absent = [(p, absent_rows(p.grad)) for p in self._params() if p.grad is not None] if any_absent() else []
        skipped: SkippedRows = {param: rows.reshape(-1) for param, rows in absent if rows is not None}
        if (found_inf := getattr(self, "found_inf", None)) is not None:
            if (overflown := self._unscaled(found_inf)) is not None:
                skip(skipped, self._with_gradients(), overflown)
            work = self._work()
        if self._held is not None:
            skip(skipped, self._with_gradients(), self._held)
        with torch.no_grad(), restore_skipped(skipped, self.state) if skipped else nullcontext():
            if self._recording is not None:
                self._recording.step(work)
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
        return "" if self._recording is None else self._recording.how

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
        entries = saved_entries(self, state_dict)
        super().load_state_dict(dict(state_dict))
        # torch gives all of the state but ``step`` the dtype and device of its parameter, which would round numbers.
        for param, saved in entries:
            loaded = self.state[param]
            for name, value in saved.items():
                stack = value.to(param.device) if MASTER_STACK in saved else loaded[name]
                loaded[name] = (value if name in self.numbers else stack).clone()

    def unfuse(self) -> list[dict[str, Any]]:
        """Return B state dicts, one per member, for torch.optim's class of the same name; the state is copied."""
        for group in self.param_groups:
            if any(state_dtype(param, group[MASTER_WEIGHTS]) != param.dtype for param in group["params"]):
                raise FusionError(
                    "the state has master weights, which no optimizer of torch.optim has: take the members' models by "
                    "fused.unfuse(), and begin a new optimizer for each; or save opt.state_dict()"
                )
        kind: Any = self.torch_class
        example = None if kind is None else kind([torch.zeros(1, 1, device="cpu")])
        # Some classes have state before their first step.
        early = example is not None and bool(example.state)
        if early:
            self.initialise()
        members, indices = self.members, {param: index for index, param in enumerate(self._params())}

        def own(value: Any, member: int) -> Any:
            if isinstance(value, Tensor) and value.shape == (members,):
                return float(value[member])
            return tuple(own(item, member) for item in value) if isinstance(value, tuple) else value

        state_dicts = []
        for member in range(members):
            states = {}
            for param, index in indices.items():
                entry = self.state.get(param, {}).items()
                rows = {name: value[member] if membership_of(param).stacked else value for name, value in entry}
                if rows and (early or rows["step"] > 0):
                    kept = rows.keys() - ({"step"} if not self.counts_steps else ())
                    states[index] = {name: rows[name].clone(memory_format=torch.contiguous_format) for name in kept}
            groups = [{} if example is None else dict(example.param_groups[0]) for _ in self.param_groups]
            for values, group in zip(groups, self.param_groups, strict=True):
                values |= {key: own(plain(value), member) for key, value in group.items() if key != MASTER_WEIGHTS}
                values["params"] = [indices[param] for param in group["params"]]
            state_dicts.append({"state": states, "param_groups": groups})
        return state_dicts

    @contextmanager
    def holding(self, members: Tensor) -> Iterator[None]:
        """Context manager: ``members``, bool ``[B]``, take no step; their parameters, state and counts stay."""
        before = self._held
        everybody = members if before is None else members | before
        self._held = everybody if bool(everybody.any()) else None
        try:
            yield
        finally:
            self._held = before

    @property
    def held_members(self) -> list[int]:
        """The members that take no step now, see `holding`."""
        return [] if self._held is None else [int(row) for row in self._held.nonzero().reshape(-1)]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the state and the hyper-parameters of members ``rows`` only, in this order.

        Raises:
            ValueError: no rows, a repeated row, or a row out of range.
        """
        rearrange(self, kept_rows(rows, width(self)), {})

    def copy(self, src: int | Sequence[int], dst: int | Sequence[int]) -> None:
        """Copy state, counts and hyper-parameters of members ``src`` to ``dst``: ints or lists.

        Raises:
            ValueError: a row is out of range or written twice, or ``src`` and ``dst`` differ in number.
        """
        rearrange(self, copied(src, dst, width(self)), {})

    def append(self, count: int = 1, **hypers: Any) -> None:
        """Add ``count`` members at the end, without state and with counts of 0, as in a new optimizer.

        Args:
            hypers: their hyper-parameters, one value or ``count`` values each, for the param groups that take the
                optimizer's default. As in torch, a group that was given its own value keeps it; only if it was given
                one for each member, new members get the value from here. By default the initial value, if that is one
                for all members.

        Raises:
            ValueError: a hyper-parameter that differs between members is missing, or a value is out of range; or every
                param group has its own.
        """
        if count < 1:
            raise ValueError(f"append() needs at least one member, got {count}.")
        rearrange(self, [*range(width(self)), *[None] * count], hypers)

    def restart(self, rows: int | Sequence[int], **hypers: Any) -> None:
        """Restart members ``rows``: clear their state and set their counts to 0.

        Args:
            hypers: new hyper-parameters, one value or one for each of ``rows``, for the same param groups as in
                `append`. By default they do not change.

        Raises:
            ValueError: a row is out of range or repeated, or a value is out of range, or no param group takes it.
        """
        members = width(self)
        fresh = rows_of(rows, members)
        check_once(fresh)
        rearrange(self, [None if row in fresh else row for row in range(members)], hypers, restart=True)

    def tables(self) -> dict[str, MemberTable]:
        """The members' hyper-parameters of each param group, and their state of each parameter: live, by name."""
        members = width(self)
        tables: dict[str, MemberTable] = {}
        for number, group in enumerate(self.param_groups):
            tables[f"param group {number}"] = group_table(self, group, members)
            for param in group["params"]:
                param_mark = membership_of(param)
                if param_mark.is_own:
                    entry = self.state.get(param, {})
                    rows = {name: member_rows(value, param_mark) for name, value in entry.items()}
                    tables[f"state/{param_mark.name}"] = MemberTable(members, rows)
        return tables

    def put(self, rows: Sequence[int], tables: Mapping[str, MemberTable]) -> None:
        """Give members ``rows`` the state and hyper-parameters of the first rows of ``tables``, from `tables`.

        State that ``tables`` lack begins anew.
        """
        put(self, rows, tables)

    def forget(self) -> None:
        """Drop references to tensors that have moved; the next step reads their new addresses."""
        self._prepared = None
        if self._recording is not None:
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
        for param in group["params"] if not settings.alike else ():
            param_mark = membership_of(param)
            if not param_mark.is_own and (param.requires_grad or param.grad is not None):
                hyper, column = next((h, c) for h, c in zip(self.hypers, columns, strict=True) if len(set(c)) > 1)
                raise ValueError(
                    f"parameter {param_mark.name!r} is one tensor for all {param_mark.members} members, and "
                    f"{hyper.label} differs between them: {column}; give it a param group with one value, "
                    "or freeze it"
                )
        return settings

    def _options(self, group: ParamGroup) -> Options:
        names = (*self.options, MASTER_WEIGHTS)
        values = (tuple(value) if isinstance(value := group[name], list) else value for name in names)
        options: Options = named("Options", names)._make(values)
        return options

    def _state(self, param: Tensor, settings: Settings) -> State:
        return complete_state(param, self.state[param], settings, type(self))


def _observed(optimizer: Optimizer) -> bool:
    """Return whether a profiler or a hook observes the steps of ``optimizer``."""
    return is_profiling() or coupling.has_hooks(optimizer)


# Members that do not take a step: their rows of parameters, state and step counts stay as they are.

SkippedRows = dict[Tensor, Tensor]
"""For each parameter the members that do not step: bool ``[B]``, or ``[1]`` for a parameter that all members share."""


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


class RecordedUpdates:
    """The steps of one optimizer. ``record``: records launches; a string says why none are, empty on the host."""

    def __init__(self, record: Recorder | str) -> None:
        self._record = record
        self._address_counts = Counter[Hashable]()
        # Each replays recorded launches; beside it the objects that must stay alive for it.
        self._recorded = Recordings[tuple[Callable[[], object], object]](record if isinstance(record, str) else "")
        self._unrecordable = ""

    @property
    def how(self) -> str:
        """Description of how a step is launched, with the reason if its launches are not recorded; empty on a CPU."""
        if why := self._recorded.why or self._unrecordable:
            return f"launched one by one: {why}"
        if isinstance(self._record, str):
            return ""
        if self._recorded:
            return "recorded and replayed as one"
        return f"launched one by one so far: gradients must lie at the same addresses in {STEADY} steps"

    def step(self, work: Work) -> None:
        """Run a step of all groups in ``work``, and record or replay its launches where that is possible."""
        record = self._record
        if not isinstance(record, str) and record.recording:
            raise FusionError(
                "opt.step() was called while a graph of the device is being captured, which would repeat this step's "
                "hyper-parameters and counts for ever: capture forward and backward, and call opt.step() behind the "
                "replay, which records its own launches; or use hf.train_step, which records both"
            )
        for settings, group, grads in work:
            # Autograd detects by version counters that a saved tensor was overwritten; kernels do not increment these.
            torch.autograd.graph.increment_version(group.written)
            group.stepper.ready(grads, settings)

        def launch() -> object:
            return [group.stepper.launch(grads) for _, group, grads in work]

        (launch if isinstance(record, str) else self._recorded_launch(record, work, launch))()

    def _recorded_launch(self, record: Recorder, work: Work, launch: Callable[[], object]) -> Callable[[], object]:
        """Return what replays the launches of ``work``, or ``launch`` where they are not recorded."""
        self._unrecordable = next((why for _, group, _ in work if (why := group.stepper.unrecordable)), "")
        if self._unrecordable or not work or self._recorded.why:
            return launch
        key = tuple(
            (group.stepper.key, *((grad.data_ptr(), grad.stride()) for grad in grads)) for _, group, grads in work
        )
        recorded = self._recorded.get(key)
        if recorded is None:
            if len(self._address_counts) == MAX_ADDRESS_COUNTS:
                self._address_counts.clear()
            self._address_counts[key] += 1
            if self._address_counts[key] >= STEADY and not self._recorded.full:
                # Recording does not run the launches; the replay does.
                recorded = self._recorded.add(key, lambda: record(launch))
        return launch if recorded is None else recorded[0]

    def forget(self) -> None:
        """Discard recordings and counts of addresses, which are no longer valid."""
        self._address_counts.clear()
        self._recorded.forget()


# What a step works on, and a cheap check that nothing of it has changed since the last step but numbers.

Work: TypeAlias = list[tuple[Settings, Group, list[Tensor]]]
"""The groups of a step, each with the settings of its param group and its gradients."""


class PreparedUpdate:
    """The settings of all param groups of an optimizer, and its parameters that have gradients, in groups.

    Valid while the same parameters have gradients, and they and their state are tensors of the same kinds at the same
    addresses. Values of hyper-parameters may change. Everything in a step that may fail is done here.
    """

    def __init__(self, optimizer: FusedOptimizer) -> None:
        keys = dict.fromkeys([*(hyper.key for hyper in optimizer.hypers), *optimizer.options, MASTER_WEIGHTS])
        # The first key is passed twice, so that itemgetter returns a tuple even for a single key.
        self._read = itemgetter(next(iter(keys)), *keys)
        self._settings = [optimizer._settings(group) for group in optimizer.param_groups]
        # Each with the index of its param group.
        self.groups: list[tuple[int, Group]] = []
        self._idle: list[Tensor] = []
        tensors: list[Tensor] = []
        for number, (group, settings) in enumerate(zip(optimizer.param_groups, self._settings, strict=True)):
            active = [param for param in group["params"] if param.grad is not None]
            self._idle += [param for param in group["params"] if param.grad is None]
            states = [optimizer._state(param, settings) for param in active] if settings.stateful else []
            self.groups += [(number, part) for part in groups_of(type(optimizer), active, states, settings)]
            # The views in the groups keep their memory alive: an address cannot come back with other contents.
            tensors += [*active, *(tensor for entry in states for tensor in entry.values())]
        if optimizer._recording is None and tensors:
            optimizer._recording = RecordedUpdates(backend(tensors[0].device).recorder())
        self._objects = self._dependencies(optimizer)
        self._note_values(optimizer)
        with DisableTorchFunctionSubclass():
            self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
            self._addresses = list(map(Tensor.data_ptr, self._tensors))
            self._kinds = tensor_guards(self._tensors)

    def work(self, optimizer: FusedOptimizer) -> Work | None:
        """Return the groups with their gradients, or None if this step must be prepared again."""
        if not same_objects(self._dependencies(optimizer), self._objects):
            return None
        if self._idle and any(param.grad is not None for param in self._idle):
            return None
        with DisableTorchFunctionSubclass():
            if list(map(Tensor.data_ptr, self._tensors)) != self._addresses or not self._kinds.check(*self._tensors):
                return None
            unchanged = self._steady and same_objects(self._values(optimizer), self._read_values)
            if not (unchanged and self._vector_contents() == self._contents):
                for index, group in enumerate(optimizer.param_groups):
                    before, settings = self._settings[index], optimizer._settings(group)
                    if (settings.names, settings.options) != (before.names, before.options):
                        return None
                    self._settings[index] = settings
                self._note_values(optimizer)
        work: Work = []
        for number, part in self.groups:
            if (grads := part.gradients()) is None:
                return None
            work.append((self._settings[number], part, grads))
        return work

    def _note_values(self, optimizer: FusedOptimizer) -> None:
        """Note from which objects the settings were read, and what these held."""
        self._read_values = self._values(optimizer)
        # A list can be changed in place, which a comparison by identity would miss.
        self._steady = not any(isinstance(value, list) for value in self._read_values)
        self._vectors = [vector for settings in self._settings for vector in settings.vectors]
        with DisableTorchFunctionSubclass():
            self._arrays = [vector.numpy() for vector in self._vectors]
            self._contents = self._vector_contents()

    def _vector_contents(self) -> list[int | bytes]:
        """Return where the hyper-parameters lie, and their bytes, which also what numpy has written is in."""
        return [*map(Tensor.data_ptr, self._vectors), *(array.tobytes() for array in self._arrays)]

    def _values(self, optimizer: FusedOptimizer) -> list[object]:
        """Return the values of hyper-parameters and options. A pair is one: it can only be replaced."""
        return [value for group in optimizer.param_groups for value in self._read(group)]

    def _dependencies(self, optimizer: FusedOptimizer) -> list[object]:
        """Return every other object that a step depends on."""
        state, groups = optimizer.state, optimizer.param_groups
        objects: list[object] = [*state, *state.values(), *groups]
        for entry in state.values():
            objects += entry.values()
        for group in groups:
            objects += group["params"]
        return objects
