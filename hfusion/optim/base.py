"""The mechanism of the fused optimizers: stacks ``[B, *shape]`` of parameters, vectors ``[B]`` of numbers.

Arithmetic that broadcasts a vector over a stack reads and writes every tensor several times and is slower
than a loop over the members. So a kernel of our own, in C on a CPU (``native``) and in Triton on a CUDA device
(``gpu``), takes the vectors and makes one pass over the memory of a group. Elsewhere, and where it cannot be compiled,
the kernels of torch.optim, which take scalars, run on rows: each run of neighbouring members with equal
hyper-parameters and step counts is one call.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import wraps
from itertools import repeat
from operator import attrgetter, is_
from typing import Any, ClassVar, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer
from torch.optim import optimizer as optimizer_module

from hfusion.core.errors import CheckpointError
from hfusion.core.membership import mark, membership
from hfusion.core.usage import any_absent
from hfusion.optim import coupling, native
from hfusion.optim.cohort import Cohort, Cohorts, State, membership_of, same_objects
from hfusion.optim.hyper import Hyper, Values, own, plain, read, unchanged
from hfusion.optim.ready import Ready, Work
from hfusion.optim.resting import Resting, left_alone, together, without_gradient
from hfusion.optim.rows import Row
from hfusion.optim.scaled import divide, overflown
from hfusion.optim.settings import Flags, Settings

_LAYOUT = attrgetter("layout")

Group: TypeAlias = dict[str, Any]


class FusedOptimizer(Optimizer):
    """Base class: a torch.optim.Optimizer whose every numeric hyper-parameter has one value per member.

    ``group["lr"]`` and the others are float64 vectors ``[B]``; a user may also write one number or a sequence
    there. ``state[p]`` holds ``step``, the counts ``[B]``, and stacks shaped like ``p``. A subclass lists its
    hyper-parameters and flags, names its native kernel and gives two of torch's.
    """

    hypers: ClassVar[tuple[Hyper, ...]]
    """The learning rate first, the weight decay last."""
    flags: ClassVar[tuple[str, ...]]
    torch_class: ClassVar[type[Optimizer]]
    counts_steps: ClassVar[bool] = True
    """Whether torch's class has a ``step`` in its state."""
    kernel: ClassVar[str]
    """The name of the kernel in ``kernels.c``, and in ``gpu.py``."""

    keeps_members_apart: ClassVar[bool] = True
    # So torch.amp.GradScaler leaves it to the optimizer which gradients to divide and who must not step, and gives it
    # ``grad_scale`` and ``found_inf`` for the time of a step.
    _step_supports_amp_scaling: ClassVar[bool] = True

    def __init__(self, params: Any, defaults: Mapping[str, Any]) -> None:
        self._known: dict[int, tuple[Settings, Cohorts | None]] = {}
        self._released: dict[tuple[int, ...], Cohorts] = {}
        self._ready: Ready | None = None
        super().__init__(params, dict(defaults))

    @staticmethod
    def buffers(values: Values, flags: Flags) -> tuple[str, ...]:
        """Names of the state stacks that a member with these values needs."""
        raise NotImplementedError

    @staticmethod
    def fused(row: Row, values: Values, flags: Flags) -> None:
        """Update a row of contiguous float32 or float64 tensors on a CPU or CUDA device with torch's fastest kernel."""
        raise NotImplementedError

    @staticmethod
    def general(row: Row, values: Values, flags: Flags) -> None:
        """Update a row of any dtype, device and strides, with torch's default implementation."""
        raise NotImplementedError

    @staticmethod
    def check(values: Values, flags: Flags) -> None:
        """ValueError if one member's values do not go together."""

    @property
    def members(self) -> int:
        """B, the number of members of the array."""
        return membership_of(self.param_groups[0]["params"][0]).members

    def add_param_group(self, param_group: Group) -> None:
        """As torch's; ValueError for parameters of no array or of another B, or for bad values."""
        super().add_param_group(param_group)
        group = self.param_groups[-1]
        try:
            members = _members(group)
            if members != self.members:
                raise ValueError(
                    f"param group {len(self.param_groups) - 1} belongs to an array of {members} members, "
                    f"the first group to one of {self.members}: use one optimizer per array"
                )
            own(group)
            self._settings(group)
        except Exception:
            self.param_groups.pop()
            raise

    @staticmethod
    def profile_hook_step(func: Callable[..., Any]) -> Callable[..., Any]:
        """As torch's, which opens a profiler's range at every step, whether anybody looks or not."""
        hooked = Optimizer.profile_hook_step(func)

        @wraps(func)
        def step(self: FusedOptimizer, *args: Any, **kwargs: Any) -> Any:
            return (hooked if _observed(self) else func)(self, *args, **kwargs)

        return step

    def zero_grad(self, set_to_none: bool = True) -> None:
        """As torch's, without its profiler's range where nobody looks."""
        if not set_to_none or _observed(self):
            super().zero_grad(set_to_none)
            return
        for group in self.param_groups:
            for param in group["params"]:
                param.grad = None

    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One update of every member; returns what ``closure`` returns.

        Parameters whose ``grad`` is None are skipped, as in torch, and a member that has not used a parameter, in a
        branch on values, keeps its row of it. Under a torch.amp.GradScaler a member whose gradients are not all finite
        does not step, and the others do. Raises ValueError if a hyper-parameter was set to something out of range,
        FusionError if the state is no longer of the parameters' dtype, device and shapes.
        """
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        work = self._work()
        resting = without_gradient(self._params()) if any_absent() else {}
        if (found_inf := getattr(self, "found_inf", None)) is not None:
            resting = together(resting, self._unscaled(found_inf))
            work = self._work()
        with torch.no_grad(), left_alone(resting, self.state) if resting else nullcontext():
            for settings, cohort, grads in work:
                self._update(settings, cohort, grads)
        return loss

    def _work(self) -> Work:
        """The cohorts of this step with their gradients; whatever may fail has been checked, and nothing is written."""
        work = self._ready.work(self.param_groups, self.state) if self._ready is not None else None
        if work is None:
            before = [cohorts for _, cohorts in self._known.values()]
            work = [part for index, group in enumerate(self.param_groups) for part in self._prepare(index, group)]
            # Not at the first step of its kind: shards come and go.
            again = same_objects(before, [cohorts for _, cohorts in self._known.values()])
            self._ready = self._remembered() if again else None
        return work

    def _update(self, settings: Settings, cohort: Cohort, grads: list[Tensor]) -> None:
        """Count a step of a cohort and make it."""
        if cohort.planned:
            cohort.step(grads, settings)
            return
        kernel = self.fused if cohort.fused else self.general
        for row, values in cohort.rows(grads, settings):
            kernel(row, values, settings.flags)

    def _unscaled(self, found_inf: Tensor) -> Resting:
        """Do what a GradScaler left to do: divide the gradients by its scale, and find who must not step."""
        active = [param for param in self._params() if param.grad is not None]
        scale = getattr(self, "grad_scale", None)
        if scale is not None:
            divide(active, scale)
        return overflown(active, self.members) if found_inf.item() else {}

    def _params(self) -> list[Tensor]:
        return [param for group in self.param_groups for param in group["params"]]

    @property
    def state_stacks(self) -> int:
        """The most stacks that the state of a parameter holds: 2 for Adam, 0 for SGD without momentum."""
        return max(len(self._settings(group).names) for group in self.param_groups)

    def initialise(self) -> None:
        """Make the state of every trained parameter now, which otherwise happens at its first step."""
        for group in self.param_groups:
            names = self._settings(group).names
            for param in group["params"]:
                if names and param.requires_grad:
                    self._state(param, names)

    def state_dict(self) -> dict[str, Any]:
        """As torch's, with hyper-parameters as plain float64 tensors ``[B]``: ``weights_only`` loads it."""
        found = super().state_dict()
        groups = [{key: plain(value) for key, value in group.items()} for group in found["param_groups"]]
        # In the optimizer the counts of many parameters lie in one storage, which a file would hold whole.
        state = {
            key: {name: value.clone() if name == "step" else value for name, value in entry.items()}
            for key, entry in found["state"].items()
        }
        return {**found, "state": state, "param_groups": groups}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """As torch's, but the state is copied; CheckpointError if it is the state of another array."""
        for group, saved in zip(self.param_groups, state_dict["param_groups"], strict=False):
            try:
                self._settings({**saved, "params": group["params"]})
            except (KeyError, ValueError) as error:
                raise CheckpointError(
                    f"the state is not one of this array and of {type(self).__name__}: {error}"
                ) from error
        self._check_shapes(state_dict)
        state = {
            key: {name: value.clone() if isinstance(value, Tensor) else value for name, value in entry.items()}
            for key, entry in state_dict["state"].items()
        }
        super().load_state_dict({**state_dict, "state": state})

    def unfuse(self) -> list[dict[str, Any]]:
        """B state dicts, one per member, from which torch.optim's class of the same name continues."""
        from hfusion.optim.convert import unfuse

        return unfuse(self)

    def forget(self) -> None:
        """Let go of the memory of tensors that are moved; the next step looks where they lie."""
        self._ready = None
        for index, (settings, cohorts) in list(self._known.items()):
            self._known[index] = settings, None
            if cohorts is not None:
                cohorts.release()
                self._released[cohorts.key] = cohorts

    def __getstate__(self) -> dict[str, Any]:
        marks = [[membership(param) for param in group["params"]] for group in self.param_groups]
        return {**super().__getstate__(), "memberships": marks}

    def __setstate__(self, state: dict[str, Any]) -> None:
        marks = state.pop("memberships", [])
        super().__setstate__(state)
        self._known = {}
        self._released = {}
        self._ready = None
        # A copy of a Parameter has lost its mark.
        for group, memberships in zip(self.param_groups, marks, strict=False):
            for param, found in zip(group["params"], memberships, strict=True):
                if membership(param) is None:
                    mark(param, found)
        for group in self.param_groups:
            self._settings(group)

    def _settings(self, group: Group, known: Settings | None = None) -> Settings:
        """The checked values of ``group``; ``known`` itself if they are still the same."""
        if known and unchanged(group, self.hypers, known.vectors, known.columns) and self._flags(group) == known.flags:
            return known
        vectors, columns = read(group, self.hypers, membership_of(group["params"][0]).members)
        flags = self._flags(group)
        for hyper, column in zip(self.hypers, columns, strict=True):
            hyper.check(column)
        members = list(zip(*columns, strict=True))
        for values in dict.fromkeys(members):
            self.check(values, flags)
        buffers = [self.buffers(values, flags) for values in members]
        settings = Settings(vectors, columns, flags, members, buffers)
        if len(settings.lengths) > 1:
            self._check_shared([param for param in group["params"] if param.requires_grad], settings)
        return settings

    def _flags(self, group: Group) -> Flags:
        return tuple(bool(group[name]) for name in self.flags)

    def _check_shared(self, params: Sequence[Tensor], settings: Settings) -> None:
        for param in params:
            found = membership_of(param)
            if not found.stacked:
                columns = zip(self.hypers, settings.columns, strict=True)
                hyper, column = next((h, c) for h, c in columns if len(set(c)) > 1)
                raise ValueError(
                    f"parameter {found.name!r} is one tensor for all {found.members} members, and "
                    f"{hyper.label} differs between them: {column}; give it a param group with one value, "
                    "or freeze it"
                )

    def _check_shapes(self, state_dict: Mapping[str, Any]) -> None:
        params = [param for group in self.param_groups for param in group["params"]]
        keys = [key for group in state_dict["param_groups"] for key in group["params"]]
        for key, param in zip(keys, params, strict=False):
            for name, value in state_dict["state"].get(key, {}).items():
                wanted = _counts_shape(param) if name == "step" else param.shape
                if value.shape != wanted:
                    raise CheckpointError(
                        f"the state {name!r} of parameter {key} has shape {list(value.shape)}, this "
                        f"optimizer needs {list(wanted)}: load the state of an array with the same members"
                    )

    def _prepare(self, index: int, group: Group) -> Work:
        """Everything of a step that may fail, before anything is written: cohorts with their gradients."""
        before, cohorts = self._known.get(index, (None, None))
        settings = self._settings(group, before)
        names = settings.names
        grads = [grad for param in group["params"] if (grad := param.grad) is not None]
        active = group["params"]
        if len(grads) < len(active):
            active = [param for param in active if param.grad is not None]
        if not all(map(is_, map(_LAYOUT, grads), repeat(torch.strided))):
            raise RuntimeError(f"{type(self).__name__} does not support sparse gradients: use dense ones")
        state = list(map(self.state.get, active)) if names else []
        held = cohorts is not None and cohorts.holds(active, state, names)
        if len(settings.lengths) > 1 and not (held and settings is before):
            self._check_shared(active, settings)
        if cohorts is None or not held:
            cohorts = self._cohorts(active, state, names)
        cohorts.check(grads)
        self._known[index] = (settings, cohorts)
        return [(settings, cohort, part) for cohort, part in cohorts.load(grads)]

    def _cohorts(self, active: Sequence[Tensor], state: Sequence[State | None], names: list[str]) -> Cohorts:
        """Those of parameters that were there before and have moved, or new ones."""
        found = self._released.pop(tuple(map(id, active)), None)
        if found is not None and found.move(active, state, names):
            return found
        return Cohorts(active, [self._state(param, names) for param in active] if names else [], names, self.kernel)

    def _remembered(self) -> Ready | None:
        """What the preparation of this step found, if the next one may start from there."""
        groups = self.param_groups
        known = [
            (settings, cohorts) for settings, cohorts in map(self._known.__getitem__, range(len(groups))) if cohorts
        ]
        keys = list(dict.fromkeys([*(hyper.key for hyper in self.hypers), *self.flags]))
        steady = (
            all(type(param.grad) is Tensor for group in groups for param in group["params"])
            and all(cohort.planned for _, cohorts in known for cohort in cohorts.all)
            and not isinstance(native.library(), str)
            and all(vector.is_contiguous() for settings, _ in known for vector in settings.vectors)
            # A list may change and stay the same object.
            and not any(isinstance(group[key], list) for group in groups for key in keys)
        )
        return Ready(groups, self.state, keys, known) if steady else None

    def _state(self, param: Tensor, names: Sequence[str]) -> State:
        state: State = self.state[param]
        if not state.keys() >= {"step", *names}:
            state.setdefault("step", torch.zeros(_counts_shape(param), dtype=torch.float32))
            for name in names:
                if name not in state:
                    state[name] = torch.zeros_like(param, memory_format=torch.preserve_format)
        return state


def _observed(optimizer: Optimizer) -> bool:
    """Whether a profiler or a hook wants to know of a step."""
    return bool(
        torch._C._autograd._profiler_enabled()
        or optimizer._optimizer_step_pre_hooks
        or optimizer._optimizer_step_post_hooks
        or len(optimizer_module._global_optimizer_pre_hooks) > coupling.hooks()
        or optimizer_module._global_optimizer_post_hooks
    )


def _members(group: Group) -> int:
    """B of the array that the parameters of ``group`` belong to."""
    members = None
    for index, param in enumerate(group["params"]):
        found = membership_of(param, index)
        if members is None:
            members = found.members
        elif members != found.members:
            raise ValueError(
                f"parameter {index} ({found.name!r}) belongs to an array of {found.members} members, those "
                f"before it to one of {members}: use one optimizer per array"
            )
    if members is None:
        raise ValueError("a param group without parameters has no number of members")
    return members


def _counts_shape(param: Tensor) -> torch.Size:
    found = membership_of(param)
    return torch.Size([found.members] if found.stacked else [])
