"""The mechanism of the fused optimizers: stacks ``[B, *shape]`` of parameters, vectors ``[B]`` of numbers.

Arithmetic that broadcasts a vector over a stack reads and writes every tensor several times and is slower than a loop
over the members. So kernels are generated from the formula, in C on a CPU (``native_kernels``) and in Triton on a CUDA
device (``gpu``), which make one pass over the memory of a group. Without a kernel the formula runs in torch; for dtypes
of less than 32 bits, torch's own class runs on the members' rows (``group``).
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import Tensor
from torch.nn import Module, Parameter
from torch.optim import Optimizer

from hfusion.core.errors import CheckpointError, FusionError
from hfusion.core.gradient_usage import absent_rows, any_absent
from hfusion.core.member_table import MemberTable, check_once, copied, kept_rows, rows_of
from hfusion.core.membership import mark, member_rows, membership
from hfusion.device.backend import Recordings, sent
from hfusion.optim import coupling
from hfusion.optim.clip import overflowing, unscale
from hfusion.optim.coupling import AskedParams
from hfusion.optim.formula import Formula, for_all
from hfusion.optim.group import STEADY, PreparedUpdate, Work, check_memory, common_members, membership_of
from hfusion.optim.hyper import MASTER_STACK, MASTER_WEIGHTS, ParamGroup, Settings, State, member_vector, plain, read
from hfusion.optim.optimizer_rows import begin_rows, group_table, move, rearrange, width
from hfusion.torch_private.autograd_engine import is_profiling
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
        self._recordings: Recordings[Any] | None = None
        self.initial_values: list[dict[str, float | None]] = []
        # For each param group the options that its dict had: the optimizer's defaults do not replace them.
        self.explicit_keys: list[frozenset[str]] = []
        self._held: Tensor | None = None
        self._begin: Callable[[], object] | None = None
        spare_dynamo()
        super().__init__(params, {name: value for name, value in bound.arguments.items() if name != "params"})

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
                if param_mark.padded and not self.elementwise:
                    raise ValueError(
                        f"parameter {param_mark.name!r} has zeros beside what a member trains, as its rank may be "
                        f"smaller, and a step of {type(self).__name__} depends on a matrix as a whole; give it to "
                        "another optimizer, such as hf.optim.AdamW"
                    )
                if param.requires_grad:
                    check_memory(param, f"parameter {param_mark.name!r}")
                self.check_param(param_mark.name, param.shape[1:] if param_mark.stacked else param.shape, param.dtype)
            for hyper in self.hypers:
                # A copy, so that a write into one group never changes another.
                hyper.put(group, member_vector(hyper.label, hyper.get(group), members))
            columns = zip(self.hypers, zip(*self._settings(group).members, strict=True), strict=True)
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
        for param in self._params():
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
        resting = self._held
        # A torch.amp.GradScaler has these for the time of a step.
        if (found_inf := getattr(self, "found_inf", None)) is not None:
            grads = [member_rows(p.grad.detach(), membership_of(p)) for p in self._params() if p.grad is not None]
            if (scale := getattr(self, "grad_scale", None)) is not None:
                unscale(grads, scale.reshape(1))
            if found_inf.item():
                overflown = overflowing(grads, self.members)
                if not overflown.any():
                    raise FusionError(
                        "the GradScaler found gradients that are not finite, and there are none left: they were "
                        "changed between scaler.unscale_ and scaler.step (clip_grad_value_, nan_to_num_), so that the "
                        "members they belong to are unknown; clip with hf.optim.clip_grad_norm_, or change the "
                        "gradients before scaler.unscale_"
                    )
                resting = overflown if resting is None else resting | overflown
            work = self._work()
        with torch.no_grad():
            saved = self._rows_that_stay(resting) if resting is not None or any_absent() else ()
            if self._begin is not None:
                self._begin()
            if self._recordings is not None and self._prepared is not None and work:
                self._prepared.step(work, self._recordings)
            for stack, rows, values in saved:
                stack[rows] = values
        return loss

    def _rows_that_stay(self, resting: Tensor | None) -> list[tuple[Tensor, Tensor, Tensor]]:
        """Return each stack of parameters and state with the rows that a step leaves as they are, and their values.

        They are the rows of members that are ``resting``, and of a parameter those of members that did not use it, and
        so would have no gradient alone.
        """
        saved, on = [], cache(lambda places, device: sent(torch.tensor(places, device="cpu"), device))
        for param in self._params():
            if param.grad is None:
                continue
            mark, absent = membership_of(param), absent_rows(param.grad)
            staying = torch.zeros(len(member_rows(param, mark)), dtype=torch.bool, device="cpu")
            if absent is not None:
                staying |= absent.reshape(-1)
            if resting is not None:
                # What members share stays if all of them rest.
                staying |= resting if mark.stacked else resting.all()
            places = tuple(staying.nonzero().reshape(-1).tolist())
            # If no member stays, nothing is copied.
            for tensor in (param.detach(), *self.state.get(param, {}).values()) if places else ():
                stack, rows = member_rows(tensor, mark), on(places, tensor.device)
                saved.append((stack, rows, stack[rows]))
        return saved

    def _work(self) -> Work:
        """Return the groups of this step with their gradients. Everything that may fail is done before any update."""
        work = None if self._prepared is None else self._prepared.work(self)
        if work is None:
            self.forget()
            self._prepared = PreparedUpdate(self)
            work = self._prepared.work(self)
            assert work is not None
        return work

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @property
    def state_stacks(self) -> int:
        """The number of stacks in the state of a parameter: 2 for Adam, 0 for SGD without momentum."""
        pairs = [(self._settings(group), group["params"]) for group in self.param_groups]
        # With master weights each is twice as large; so are the weights, and the gradients that a step converts.
        return max(2 * (len(s.names) + 2) if any(map(s.has_masters, ps)) else len(s.names) for s, ps in pairs)

    @property
    def launches(self) -> str:
        """Description of how steps are launched on an accelerator, or why they are not recorded; empty on a CPU."""
        recordings = self._recordings
        if recordings is None or recordings.record == "":
            return ""
        if why := recordings.why or ("" if self._prepared is None else self._prepared.unrecordable):
            return f"launched one by one: {why}"
        if recordings:
            return "recorded and replayed as one"
        return f"launched one by one so far: gradients must lie at the same addresses in {STEADY} steps"

    def initialise(self) -> None:
        """Create the state of every trained parameter now instead of at its first step."""
        for group in self.param_groups:
            settings = self._settings(group)
            for param in group["params"]:
                if settings.stateful and param.requires_grad:
                    self._state(param, group, settings)

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
        entries: list[tuple[Tensor, dict[str, Any]]] = []

        def check(_: Any, given: Any) -> None:
            entries.extend(self._checked_state(given))

        def keep_dtypes(_: Any) -> None:
            # torch gives all of the state but ``step`` the dtype and device of its parameter, which would round.
            for param, saved in entries:
                dtype = torch.float32 if MASTER_STACK in saved else param.dtype
                for name, value in saved.items():
                    stack = value.clone() if name in self.numbers else value.to(param.device, dtype, copy=True)
                    self.state[param][name] = stack

        # Between the hooks of the user, which may give another state, and change what was loaded.
        before = self.register_load_state_dict_pre_hook(check)
        after = self.register_load_state_dict_post_hook(keep_dtypes, prepend=True)
        try:
            super().load_state_dict(dict(state_dict) if isinstance(state_dict, Mapping) else {})
        finally:
            before.remove()
            after.remove()

    def _checked_state(self, state_dict: Mapping[str, Any]) -> list[tuple[Tensor, dict[str, Any]]]:
        """Return the parameters with the state of each. Raises CheckpointError for a state of another array."""
        try:
            state, groups = state_dict["state"], state_dict["param_groups"]
            for group, saved in zip(self.param_groups, groups, strict=False):
                self._settings({**saved, "params": group["params"]})
            keys = [key for group in groups for key in group["params"]]
            if unknown := state.keys() - keys:
                raise ValueError(f"it has a parameter {min(unknown)!r} that is in none of its param groups")
            entries = [(k, param, dict(state[k])) for k, param in zip(keys, self._params(), strict=False) if k in state]
        except (KeyError, ValueError, TypeError, AttributeError) as why:
            raise CheckpointError(f"the state is not one of this array and of {type(self).__name__}: {why}") from why
        for key, param, entry in entries:
            vector = list(param.shape[:1]) if membership_of(param).stacked else []
            for name, value in entry.items():
                shape = vector if name in self.numbers else list(param.shape)
                if not isinstance(value, Tensor) or list(value.shape) != shape:
                    actual = f"shape {list(value.shape)}" if isinstance(value, Tensor) else type(value).__name__
                    raise CheckpointError(
                        f"the state {name!r} of parameter {key} has {actual}, this optimizer needs a tensor of shape "
                        f"{shape}: load the state of an array with the same members"
                    )
        return [(param, entry) for _, param, entry in entries]

    def unfuse(self) -> list[dict[str, Any]]:
        """Return B state dicts, one per member, for torch.optim's class of the same name; the state is copied."""
        for group in self.param_groups:
            if any(map(self._settings(group).has_masters, group["params"])):
                raise FusionError(
                    "the state has master weights, which no optimizer of torch.optim has: take the members' models by "
                    "fused.unfuse(), and begin a new optimizer for each; or save opt.state_dict()"
                )
        kind: Any = self.torch_class
        defaults = {} if kind is None else kind([torch.zeros(1, 1, device="cpu")]).param_groups[0]
        # State that does not begin with zeros is there before the first step, also in torch's class.
        early = self.begin is not Formula.begin
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
            groups = []
            for group in self.param_groups:
                values = {key: own(plain(value), member) for key, value in group.items() if key != MASTER_WEIGHTS}
                groups.append({**defaults, **values, "params": [indices[param] for param in group["params"]]})
            state_dicts.append({"state": states, "param_groups": groups})
        return state_dicts

    @contextmanager
    def holding(self, members: Tensor, begin: Callable[[], object] | None = None) -> Iterator[None]:
        """Context manager: ``members``, bool ``[B]``, take no step; their parameters, state and counts stay.

        ``begin`` is called before the update, when everything that may fail has been done.
        """
        before = self._held, self._begin
        everybody = members if self._held is None else members | self._held
        self._held, self._begin = everybody if bool(everybody.any()) else None, begin or self._begin
        try:
            yield
        finally:
            self._held, self._begin = before

    @property
    def held_members(self) -> list[int]:
        """The members that take no step now, see `holding`."""
        return [] if self._held is None else [int(row) for row in self._held.nonzero().reshape(-1)]

    def keep(self, rows: Sequence[int]) -> None:
        """Keep the state and the hyper-parameters of members ``rows`` only, in this order.

        Raises:
            ValueError: no rows, a repeated row, or a row out of range.
            FusionError: a scheduler of torch has base rates that differ between rows, and members change theirs.
        """
        move(self, kept_rows(rows, width(self)))

    def copy(self, src: int | Sequence[int], dst: int | Sequence[int]) -> None:
        """Copy state, counts and hyper-parameters of members ``src`` to ``dst``: ints or lists.

        Raises:
            ValueError: a row is out of range or written twice, or ``src`` and ``dst`` differ in number.
            FusionError: a scheduler of torch has base rates that differ between ``src`` and ``dst``.
        """
        move(self, copied(src, dst, width(self)))

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

    @torch.no_grad()
    def put(self, rows: Sequence[int], tables: Mapping[str, MemberTable]) -> None:
        """Give members ``rows`` the state and hyper-parameters of the first rows of ``tables``, from `tables`.

        State that ``tables`` lack begins anew.
        """
        members = width(self)
        for number, group in enumerate(self.param_groups):
            if (vectors := tables.get(f"param group {number}")) is not None:
                group_table(self, group, members).put(rows, vectors)
            for param in group["params"]:
                param_mark = membership_of(param)
                entry, part = self.state.get(param, {}), tables.get(f"state/{param_mark.name}", MemberTable(0))
                if part.columns.keys() - entry.keys():
                    entry = self._state(param, group, self._settings(group), part.columns)
                if param_mark.is_own:
                    if lacking := entry.keys() - part.columns.keys():
                        begin_rows(self, group, param, lacking, rows)
                    own = {name: member_rows(entry[name], param_mark) for name in part.columns}
                    MemberTable(members, own).put(rows, part)

    def forget(self) -> None:
        """Drop references to tensors that have moved; the next step reads their new addresses."""
        self._prepared = None
        if self._recordings is not None:
            self._recordings.forget()

    def __getstate__(self) -> dict[str, Any]:
        marks = [[membership(param) for param in group["params"]] for group in self.param_groups]
        kept = {"initial_values": self.initial_values, "explicit_keys": self.explicit_keys}
        return {**super().__getstate__(), "memberships": marks, **kept}

    def __setstate__(self, state: dict[str, Any]) -> None:
        marks = state.pop("memberships", [])
        super().__setstate__(state)
        self._prepared = self._recordings = self._held = self._begin = None
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
        for name, value in options._asdict().items():
            if isinstance(self.arguments[name].default, bool) and not isinstance(value, bool):
                raise ValueError(f"{name} is {value!r}: give True or False, one for all members of a param group")
        for hyper, column in zip(self.hypers, columns, strict=True):
            hyper.check(column)
        rows = list(map(self.Values, *columns))
        buffers: dict[Any, tuple[str, ...]] = {}
        for row in dict.fromkeys(rows):
            self.check(row, options)
            buffers[row] = tuple(self.stacks(row, options))
        settings = Settings(vectors, options, rows, [buffers[row] for row in rows], self.counts_steps)
        for param in group["params"] if len(buffers) > 1 else ():
            param_mark = membership_of(param)
            if not param_mark.is_own and (param.requires_grad or param.grad is not None):
                hyper, column = next((h, c) for h, c in zip(self.hypers, columns, strict=True) if len(set(c)) > 1)
                raise ValueError(
                    f"parameter {param_mark.name!r} is one tensor for all {param_mark.members} members, and "
                    f"{hyper.label} differs between them: {column}; give it a param group with one value, "
                    "or freeze it"
                )
        return settings

    def _options(self, group: ParamGroup) -> Any:
        # A list could be changed in place, which a comparison of objects would miss.
        group.update({name: tuple(group[name]) for name in self.options if isinstance(group[name], list)})
        return self.Options(*map(group.__getitem__, self.options), group[MASTER_WEIGHTS])

    def _state(self, param: Tensor, group: ParamGroup, settings: Settings, names: Iterable[str] = ()) -> State:
        """Add what a step needs and the state of a parameter lacks, at its initial values; return the state.

        ``names``: of further state that the present settings do not use, as if a momentum was set to 0 later.
        """
        state: State = self.state[param]
        dtype = torch.float32 if (masters := settings.has_masters(param)) else param.dtype
        if masters and MASTER_STACK not in state:
            state[MASTER_STACK] = param.detach().to(torch.float32, copy=True)
        param_mark, wide = membership_of(param), torch.get_default_dtype() == torch.float64
        for name, first in self.numbers.items():
            # The dtypes in which torch's optimizers keep scalar state.
            kind = torch.float64 if wide and name != "step" else torch.float32
            shape = param.shape[:1] if param_mark.stacked else ()
            state.setdefault(name, torch.full(shape, first, dtype=kind, device="cpu"))
        lacking = [name for name in dict.fromkeys([*settings.names, *names]) if name not in state]
        for name in lacking:
            state[name] = torch.zeros_like(param, dtype=dtype, memory_format=torch.preserve_format)
        if self.begin is not Formula.begin:
            begin_rows(self, group, param, lacking, range(len(member_rows(param, param_mark))))
        return state


# From B running optimizers of torch.optim to a fused one.

# Not what a step computes; the last three are how torch runs it.
_INTERNAL = ("params", "param_names", "differentiable", "foreach", "fused", "capturable")


def fuse(optimizers: Sequence[Optimizer], fused: Any, into: type[FusedOptimizer] | None = None) -> FusedOptimizer:
    """Return a fused optimizer that continues from the state of ``optimizers``.

    Args:
        optimizers: one optimizer of torch.optim per member, of one class, over that member's original parameters, with
            the same param groups. Hyper-parameters, step counts and state may differ. The state is copied.
        fused: the array of these members.
        into: the class of hf.optim to create; by default the one of the same name.

    Raises:
        FusionError: optimizers of several classes, other parameters or other groups.
        ValueError: a value is out of range.
    """
    originals = _checked(optimizers, fused, into)
    cls = into or _counterpart(originals)
    params = dict(fused.named_parameters())
    keys = _aligned_keys(originals, fused, params)
    groups: list[ParamGroup] = []
    for index, names in enumerate(keys):
        member_groups = [original.param_groups[index] for original in originals]
        group: ParamGroup = {"params": AskedParams(params[name] for name in names)}
        groups.append(group)
        if "param_names" in member_groups[0]:
            group["param_names"] = list(member_groups[0]["param_names"])
        for key in member_groups[0]:
            if key in _INTERNAL or (key == "decoupled_weight_decay" and key not in cls.options):
                continue
            _the_same(f"whether group {index} has an option {key!r}", [key in of_member for of_member in member_groups])
            where, options = f"option {key!r} of group {index}", [of_member[key] for of_member in member_groups]
            group[key] = _the_same(where, options) if key in cls.options else _fuse_option(where, options)
    optimizer: FusedOptimizer = cls(groups)
    optimizer.explicit_keys = [_explicit_keys(originals, index) for index in range(len(groups))]
    for group, *member_groups in zip(optimizer.param_groups, *(o.param_groups for o in originals), strict=True):
        for stack, *params_of_members in zip(group["params"], *(g["params"] for g in member_groups), strict=True):
            states: list[dict[str, Tensor]] = []
            for original, param in zip(originals, params_of_members, strict=True):
                values = {k: v for k, v in original.state.get(param, {}).items() if isinstance(v, Tensor | float | int)}
                tensors = {key: torch.as_tensor(value) for key, value in values.items()}
                state = {key: t for key, t in tensors.items() if key in cls.numbers or t.shape == param.shape}
                # SGD and Muon keep no count in torch; here one step means that the momentum buffer has begun.
                states.append({"step": torch.ones((), device="cpu"), **state} if state else {})
            kept = dict.fromkeys(key for state in states for key in state)
            entry = optimizer._state(stack, group, optimizer._settings(group), kept) if kept else {}
            for name in kept:
                rows = [row for row, state in enumerate(states) if name in state]
                column = member_rows(entry[name], membership_of(stack))
                column[rows] = torch.stack([states[row][name] for row in rows]).to(column)
    return optimizer


def _checked(optimizers: Any, fused: Any, into: Any) -> list[Optimizer]:
    """Return the optimizers as a list. Raises FusionError for arguments of other kinds."""
    if not hasattr(fused, "origin"):
        raise FusionError(
            f"hf.optim.fuse expects optimizers and the array of their members, got {type(fused).__name__} for the "
            "array. Call hf.optim.fuse([opt, ...], fused) with what hf.fuse or hf.build returned."
        )
    if not isinstance(optimizers, Iterable) or isinstance(optimizers, str | Module):
        raise FusionError(f"hf.optim.fuse expects a list of one optimizer per member, got {type(optimizers).__name__}")
    if into is not None and not (isinstance(into, type) and issubclass(into, FusedOptimizer)):
        raise FusionError(f"into={into!r}: give a class of hf.optim, such as into=hf.optim.Adam")
    optimizer_list = list(optimizers)
    for member, optimizer in enumerate(optimizer_list):
        if not isinstance(optimizer, Optimizer):
            is_class = isinstance(optimizer, type)
            got = f"the class {optimizer.__name__}" if is_class else type(optimizer).__name__
            raise FusionError(
                f"optimizer {member} must be an optimizer, got {got}. "
                "Give one per member, such as [torch.optim.Adam(model.parameters()) for model in models]."
            )
        if any(group.get("differentiable") for group in optimizer.param_groups):
            raise FusionError(
                f"optimizer {member} has differentiable=True, which a fused optimizer cannot do: set it to False"
            )
    if len(optimizer_list) != len(fused):
        raise FusionError(
            f"{len(optimizer_list)} optimizers for an array of {len(fused)} members: give one per member, in their "
            "order"
        )
    _the_same("the class of the optimizer", [type(optimizer).__name__ for optimizer in optimizer_list])
    return optimizer_list


def _torch_classes(cls: type[FusedOptimizer] = FusedOptimizer) -> dict[Any, type[FusedOptimizer]]:
    """Return the subclasses by their own ``torch_class``."""
    classes: dict[Any, type[FusedOptimizer]] = {}
    for subclass in cls.__subclasses__():
        classes |= {vars(subclass).get("torch_class"): subclass, **_torch_classes(subclass)}
    return classes


def _counterpart(optimizers: list[Optimizer]) -> type[FusedOptimizer]:
    """Return the class of hf.optim that does the same. Raises FusionError if there is none."""
    kind, classes = type(optimizers[0]), _torch_classes()
    if kind not in classes:
        names = ", ".join(sorted(f"torch.optim.{known.__name__}" for known in classes if known))
        raise FusionError(
            f"optimizer 0 is {kind.__name__}; supported are {names}; for another one, give the class of hf.optim that "
            "computes the same as into="
        )
    if kind not in (torch.optim.Adam, torch.optim.AdamW):
        return classes[kind]
    decoupled = [bool(group.get("decoupled_weight_decay")) for opt in optimizers for group in opt.param_groups]
    if len(set(decoupled)) > 1:
        raise FusionError(f"decoupled_weight_decay={decoupled} in the param groups of all optimizers: use one value")
    return classes[torch.optim.AdamW if decoupled[0] else torch.optim.Adam]


def _aligned_keys(optimizers: list[Optimizer], fused: Any, params: dict[str, Parameter]) -> list[list[str]]:
    """Return the keys of the parameters in each param group. Raises FusionError if the members' groups differ."""
    keys: list[list[list[str]]] = []
    for member, optimizer in enumerate(optimizers):
        keys.append([[] for _ in optimizer.param_groups])
        for number, group in enumerate(optimizer.param_groups):
            for index, param in enumerate(group["params"]):
                where = f"parameter {index} (shape {list(param.shape)}) in group {number} of optimizer {member}"
                origin = fused.origin(param) if isinstance(param, Parameter) else None
                if origin is None:
                    raise FusionError(
                        f"{where} is no original parameter of this array: give optimizers over the models that were "
                        "fused"
                    )
                owner, key = origin
                mark = membership_of(params[key])
                if owner != member and mark.stacked:
                    raise FusionError(
                        f"{where} is {key!r} of member {owner}: give one optimizer per member, in their order"
                    )
                if not mark.stacked and mark.members > 1 and optimizer.state.get(param):
                    raise FusionError(
                        f"parameter {mark.name!r} is one tensor for all members, and {mark.members} optimizers have "
                        "updated it: train it with one optimizer of its own, or freeze it"
                    )
                keys[member][number].append(key)
    _the_same("the number of param groups", [len(groups) for groups in keys])
    for number, names in enumerate(zip(*keys, strict=True)):
        _the_same(f"the list of parameters, in their order, in param group {number}", names)
    return keys[0]


def _fuse_option(where: str, values: list[Any]) -> Any:
    if isinstance(values[0], (tuple, list)):
        return tuple(_fuse_option(where, list(column)) for column in zip(*values, strict=True))
    if isinstance(values[0], Tensor) or (isinstance(values[0], (int, float)) and not isinstance(values[0], bool)):
        return torch.tensor([float(value) for value in values], dtype=torch.float64, device="cpu")
    return _the_same(where, values)


def _the_same(where: str, values: Sequence[Any]) -> Any:
    """Return the value that all members have. Raises FusionError if they differ."""
    for member, value in enumerate(values):
        if value != values[0]:
            raise FusionError(
                f"{where} is {value!r} for member {member} and {values[0]!r} for member 0: it must be the same"
            )
    return values[0]


def _explicit_keys(optimizers: Sequence[Optimizer], index: int) -> frozenset[str]:
    """Return the options in which a param group of torch differs from other groups and from the defaults.

    torch does not store which options a group was given itself.
    """
    explicit = set()
    for optimizer in optimizers:
        for key, default in optimizer.defaults.items():
            # A scheduler of torch has changed the rate of all groups since.
            values = [group.get(f"initial_{key}", group.get(key)) for group in optimizer.param_groups]
            if values[index] != default and any(value != values[index] for value in values):
                explicit.add(key)
    return frozenset(explicit)


def _observed(optimizer: Optimizer) -> bool:
    """Return whether a profiler or a hook observes the steps of ``optimizer``."""
    return is_profiling() or coupling.has_hooks(optimizer)
