"""Parameters that are stepped together, the data kept for them between steps, and a step of all of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from inspect import unwrap
from operator import attrgetter, is_, methodcaller
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeAlias

import torch
from torch import Tensor
from torch.optim import Optimizer

from hfusion.core.errors import FusionError
from hfusion.core.membership import Membership, member_rows, membership
from hfusion.core.memory import has_address, is_plain, real_view
from hfusion.device.backend import DeviceNumbers, Recordings, backend
from hfusion.optim import gpu, native_kernels
from hfusion.optim.formula import Formula, KernelProgram, Stepper, StepTensors, program
from hfusion.optim.hyper import HALVES, MASTER_STACK, Settings, State
from hfusion.torch_private.dispatch_modes import DisableTorchFunctionSubclass, FakeTensor
from hfusion.torch_private.export_state import TensorGuards, tensor_guards

if TYPE_CHECKING:
    from hfusion.optim.base import FusedOptimizer

_GRAD, _BYTES = attrgetter("grad"), methodcaller("tobytes")

# Kernels by type of device; for types that are not listed, `gpu.plan` uses Triton.
KERNELS: Mapping[str, Callable[[KernelProgram, StepTensors], Stepper | None]] = {"cpu": native_kernels.plan}
# A large tensor is updated in so many pieces, of at least so many elements.
_PIECES, _LEAST_PIECE = 16, 1 << 14


class Group:
    """Parameters of one device and dtype in a param group, all stacked or all shared.

    Args:
        formula: what a step computes.
        pairs: each parameter with its state, which is empty if none is kept. A shared one is handled as a stack of one
            row.
        settings: of the param group.
    """

    def __init__(self, formula: type[Formula], pairs: Sequence[tuple[Tensor, State]], settings: Settings) -> None:
        names, params, state = settings.names, [param for param, _ in pairs], [entry for _, entry in pairs]
        self._params = params
        mark = self._mark = membership_of(params[0])
        self._dtype = params[0].dtype
        masters = settings.has_masters(params[0])
        columns = [MASTER_STACK, *names] if masters else names
        tensors = [[param.detach() for param in params], *[[entry[name] for entry in state] for name in columns]]
        stacks = [[member_rows(tensor, mark) for tensor in column] for column in tensors]
        numbers = {name: [member_rows(entry[name], mark) for entry in state] for name in formula.numbers if state[0]}
        inner = _stepper(StepTensors(formula, settings.options, names, stacks[masters:], numbers))
        self.stepper: Stepper = MasterStepper(stacks[0], stacks[1], inner) if masters else inner
        # The parameters, as `torch.autograd.graph.increment_version` takes them. Steppers may hold addresses only.
        self.written, self._stacks = stacks[0], stacks
        self._guards: TensorGuards | None = None

    def gradients(self) -> list[Tensor] | None:
        """Return the gradients in the form that the stepper reads; None if a parameter has none.

        Raises RuntimeError or FusionError for one that does not fit its parameter.
        """
        grads: list[Tensor] = list(map(_GRAD, self._params))
        # The check also fails if a gradient is None.
        if self._guards is None or not self._guards.check(*grads):
            if any(grad is None for grad in grads):
                return None
            for param, grad in zip(self._params, grads, strict=True):
                check_gradient(param, membership_of(param), grad)
            self._guards = tensor_guards(grads)
        dtype = self._dtype
        if not self._mark.stacked:
            grads = [grad.unsqueeze(0) for grad in grads]
        if dtype.is_complex:
            grads = [grad.resolve_conj() for grad in grads]
        if not self.stepper.contiguous:
            return [grad if grad.dtype is dtype else grad.to(dtype) for grad in grads]
        return [grad if grad.dtype is dtype and grad.is_contiguous() else grad.to(dtype).contiguous() for grad in grads]


def _stepper(tensors: StepTensors) -> Stepper:
    """Return the fastest stepper that computes the same as each member's own optimizer would."""
    first = tensors.stacks[0][0]
    if all(tensor.is_contiguous() for stack in tensors.stacks for tensor in stack) and backend(first.device).fuses:
        kernels = program(tensors.formula, tensors.options, tuple(tensors.names))
        stepper = None if kernels is None else KERNELS.get(first.device.type, gpu.plan)(kernels, tensors)
        if stepper is not None:
            return stepper
    # Formulas round once, after the update.
    if first.dtype in HALVES and tensors.formula.torch_class is not None:
        return MemberLoop(tensors)
    return StackedStepper(tensors)


def groups_of(formula: type[Formula], pairs: Sequence[tuple[Tensor, State]], settings: Settings) -> list[Group]:
    """Return parameters of one param group by device, dtype, and whether they are stacked.

    Valid while all tensors keep their addresses. The arguments are as those of `Group`. Raises FusionError.
    """
    alike: dict[object, list[tuple[Tensor, State]]] = {}
    taken = set[int]()
    for param, entry in pairs:
        param_mark = membership_of(param)
        check_memory(param, f"parameter {param_mark.name!r}")
        if param_mark.stacked and param.shape[:1] != (param_mark.members,):
            raise FusionError(
                f"parameter {param_mark.name!r} has shape {list(param.shape)} in an array of {param_mark.members} "
                f"members: it was replaced through .data; a stack has {param_mark.members} rows, and keep, append and "
                "put of the fused module change their number"
            )
        has_masters, shape = settings.has_masters(param), [param_mark.members] if param_mark.stacked else []
        dtype = torch.float32 if has_masters else param.dtype
        for name in [*settings.names, *[MASTER_STACK] * has_masters] if entry else ():
            stack = entry[name]
            check_memory(stack, f"the state {name!r} of parameter {param_mark.name!r}")
            kind = (param.shape, param.device, param.layout, dtype)
            if (stack.shape, stack.device, stack.layout, stack.dtype) != kind:
                raise FusionError(
                    f"the state {name!r} of parameter {param_mark.name!r} is {_text(stack)}, the parameter "
                    f"{_text(param)}: one of them was converted, moved or replaced after the other was made; bring the "
                    "state to the parameters by opt.load_state_dict(opt.state_dict()), or make a new optimizer"
                )
        for name in formula.numbers if entry else ():
            value = entry[name]
            if not isinstance(value, Tensor) or list(value.shape) != shape or value.is_meta:
                actual = _text(value) if isinstance(value, Tensor) else repr(value)
                label = "step counts" if name == "step" else f"state {name!r}"
                raise FusionError(
                    f"the {label} of parameter {param_mark.name!r} are {actual}; they must be numbers of shape {shape}"
                )
            # Kernels advance numbers on the CPU, each its own.
            number = value.detach().to("cpu", torch.float32 if name == "step" else value.dtype).contiguous()
            entry[name] = number.clone() if number.data_ptr() in taken else number
            taken.add(entry[name].data_ptr())
        alike.setdefault((param_mark.stacked, param.device, param.dtype), []).append((param, entry))
    return [Group(formula, part, settings) for part in alike.values()]


def membership_of(param: Tensor, index: int = 0) -> Membership:
    """Return the `Membership` of ``param``. Raises ValueError if it belongs to no fused module."""
    mark = membership(param)
    if mark is None:
        raise ValueError(
            f"parameter {index} (shape {list(param.shape)}) belongs to no fused module: pass fused.parameters(), or "
            "take what torch has for it"
        )
    return mark


def common_members(params: Sequence[Tensor]) -> int:
    """Return the number of members of the array that all ``params`` belong to. Raises ValueError if they differ."""
    marks = [membership_of(param, index) for index, param in enumerate(params)]
    if not marks:
        raise ValueError(
            "a param group is empty: leave it out; if a rule such as p.dim() >= 2 chose the groups, it was asked of "
            "stacks [B, *shape], which have one dim more than a member's parameter: let hf.optim.groups(fused, rule) "
            "ask the members' own"
        )
    for index, mark in enumerate(marks):
        if mark.members != marks[0].members:
            raise ValueError(
                f"parameter {index} ({mark.name!r}) belongs to an array of {mark.members} members, those "
                f"before it to one of {marks[0].members}: take each array by itself"
            )
    return marks[0].members


def same_objects(first: Sequence[object], second: Sequence[object]) -> bool:
    """Return whether two sequences hold the same objects in the same order."""
    return len(first) == len(second) and all(map(is_, first, second))


# Checks of the properties that kernels assume of the tensors whose memory they read and write.


def check_memory(tensor: Tensor, label: str) -> None:
    """Raise a FusionError if ``tensor`` keeps its values elsewhere than in this process's memory.

    Tensors on the meta device have no values, and pass: a step then computes shapes only, as in torch.optim.
    """
    if has_address(tensor) or (tensor.is_meta and is_plain(tensor)):
        return
    kind = type(tensor).__name__ if type(tensor) not in (Tensor, torch.nn.Parameter) else f"{tensor.layout} tensor"
    if isinstance(tensor, FakeTensor):
        remedy = "step outside the FakeTensorMode, with tensors that have values"
    elif hasattr(tensor, "placements"):
        remedy = (
            "do not shard what it trains: give each rank members of its own, hf.fuse(models[hf.rows(len(models))]); "
            "shard a frozen base only, fully_shard(fused, ignored_params={those that are trained}); or use the "
            "optimizer of this name in torch.optim, which has one value of each hyper-parameter for all members"
        )
    else:
        remedy = "use torch.optim, or convert it to an ordinary torch.Tensor before the optimizer is made"
    raise FusionError(f"{label} must be an ordinary tensor in memory to be updated by hf.optim, got {kind}: {remedy}")


def check_gradient(param: Tensor, mark: Membership, grad: Tensor) -> None:
    """Raise RuntimeError for a sparse gradient or one that does not fit ``param``, FusionError if it has no memory."""
    if grad.layout is not torch.strided:
        raise RuntimeError(f"the gradient of {mark.name!r} is sparse ({grad.layout}): hf.optim needs dense ones")
    if grad.shape != param.shape:
        mismatch = f"has shape {list(grad.shape)}, the parameter {list(param.shape)}"
    elif grad.device != param.device:
        mismatch = f"is on {grad.device}, the parameter on {param.device}"
    elif not torch.can_cast(grad.dtype, param.dtype):
        mismatch = f"is {grad.dtype}, the parameter {param.dtype}"
    else:
        if type(grad) is not Tensor:
            check_memory(grad, f"the gradient of {mark.name!r}")
        return
    raise RuntimeError(f"the gradient of {mark.name!r} {mismatch}: one of them was replaced through .data")


def _text(tensor: Tensor) -> str:
    layout = "" if tensor.layout is torch.strided else f" ({tensor.layout})"
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)} on {tensor.device}{layout}"


# Steppers without a kernel of their own: a formula on whole stacks, torch's own classes on rows, or another stepper.


class StackedStepper(Stepper):
    """The steps of a formula in torch, for any tensors."""

    def __init__(self, tensors: StepTensors) -> None:
        self._step = tensors
        stacks = tensors.stacks
        real = [[real_view(tensor) for tensor in stack] for stack in stacks]
        self._members, first = len(stacks[0][0]), real[0][0]
        self._dtype = torch.promote_types(first.dtype, torch.float32)
        self._parameter_tensors = list(zip(*real, strict=True))
        self._device_scalars = DeviceNumbers(first.device, self._dtype)
        self._scalars: Sequence[Mapping[str, Tensor]] = ()

    def ready(self, grads: Sequence[Tensor], settings: Settings) -> None:
        scalars = self._step.advance(settings)
        written = self._device_scalars.write(torch.stack(list(scalars.values()), dim=1))
        key = (tuple(scalars), written.data_ptr())
        if key != self.key:
            self.key = key
            self._scalars = [dict(zip(scalars, vectors.unbind(), strict=True)) for vectors in written.unbind()]

    def launch(self, grads: Sequence[Tensor]) -> object:
        for tensors, whole_grad, scalars in zip(self._parameter_tensors, grads, self._scalars, strict=True):
            for *piece, piece_grad in self._pieces((*tensors, real_view(whole_grad))):
                shape = [self._members, *[1] * (piece_grad.dim() - 1)]
                s = SimpleNamespace(**{name: vector.view(shape) for name, vector in scalars.items()})
                param, *stacks = old = [tensor.to(self._dtype) for tensor in piece]
                state = dict(zip(self._step.names, stacks, strict=True))
                grad = piece_grad.to(self._dtype)
                new, new_state = self._step.formula.update(param, grad, state, s, self._step.options)
                # Cloned, where a stack becomes what another one was.
                values = [new, *map(new_state.__getitem__, self._step.names)]
                values = [value.clone() if any(value is tensor for tensor in old) else value for value in values]
                for tensor, value in zip(piece, values, strict=True):
                    tensor.copy_(value)
        return self._scalars

    def _pieces(self, tensors: tuple[Tensor, ...]) -> Iterator[Sequence[Tensor]]:
        """Yield pieces of the tensors one after the other, so that temporaries are small beside the whole."""
        count = tensors[0].numel()
        if not self._step.formula.elementwise or not all(map(Tensor.is_contiguous, tensors)):
            yield from [tensors] if count else []
            return
        columns = max(1, max(_LEAST_PIECE, count // _PIECES) // self._members)
        rows = [tensor.view(self._members, -1) for tensor in tensors] if count else []
        yield from zip(*(tensor.split(columns, dim=1) for tensor in rows), strict=True)


class MemberLoop(Stepper):
    """Steps by torch's own class, one member after the other: it rounds half precision as for a model alone."""

    def __init__(self, tensors: StepTensors) -> None:
        assert tensors.formula.torch_class is not None
        self._class: type[Optimizer] = tensors.formula.torch_class
        self._step = tensors
        columns, names = (*tensors.stacks, *tensors.numbers.values()), (*tensors.names, *tensors.numbers)
        # Each parameter, and its stacks and numbers by name.
        self._states = [(param, dict(zip(names, state, strict=True))) for param, *state in zip(*columns, strict=True)]
        dtype = str(tensors.stacks[0][0].dtype).removeprefix("torch.")
        self.unrecordable = (
            f"torch's own {self._class.__name__} steps the members of {dtype} parameters: there is no kernel for them, "
            "or they or their state are not contiguous"
        )

    def ready(self, grads: Sequence[Tensor], settings: Settings) -> None:
        self._settings = settings

    def launch(self, grads: Sequence[Tensor]) -> object:
        settings, formula, numbers = self._settings, self._step.formula, self._step.numbers
        for member, buffers in zip(range(len(self._states[0][0])), settings.buffers, strict=False):
            options: dict[str, Any] = {name: getattr(settings.options, name) for name in formula.options}
            for hyper, value in zip(formula.hypers, settings.members[member], strict=True):
                options[hyper.key] = value if hyper.index is None else (*options.get(hyper.key, ()), value)
            params = [stack.detach()[member] for stack, _ in self._states]
            optimizer = self._class(params, **options)
            # Some classes, such as Adagrad, create state for their parameters here.
            early = bool(optimizer.state)
            states = [{name: state[name][member] for name in (*buffers, *numbers)} for _, state in self._states]
            for param, rows, grad in zip(params, states, grads, strict=True):
                param.grad = grad[member]
                if rows and (early or rows["step"] > 0):
                    # Copies of numbers, since not all classes count.
                    optimizer.state[param] |= {n: row.clone() if n in numbers else row for n, row in rows.items()}
            # Step hooks must not run here, since this is only a part of a step.
            unwrap(self._class.step)(optimizer)
            for param, rows in zip(params, states, strict=True):
                for name, row in rows.items():
                    if name == "step":
                        row.add_(settings.advance[member])
                    elif (new := optimizer.state[param][name]) is not row:
                        row.copy_(new)
        return None


class MasterStepper(Stepper):
    """Steps of half-precision parameters by ``inner``, which steps their master weights.

    Where a parameter is not what its master weights round to, it has been written to: the master weights are then
    read from it, so that loaded, copied and restarted rows need nothing else.

    Args:
        params: stacks ``[B, *shape]`` of bfloat16 or float16.
        masters: the same in float32.
        inner: made for ``masters``.
    """

    def __init__(self, params: Sequence[Tensor], masters: Sequence[Tensor], inner: Stepper) -> None:
        self._params, self._masters, self._inner = list(params), list(masters), inner
        self.unrecordable = inner.unrecordable
        # At the same addresses in every step, which recorded launches read.
        self._gradients = [torch.empty_like(master) for master in masters]

    def ready(self, grads: Sequence[Tensor], settings: Settings) -> None:
        self._inner.ready(self._gradients, settings)
        self.key = self._inner.key

    def launch(self, grads: Sequence[Tensor]) -> object:
        torch._foreach_copy_(self._gradients, list(grads))
        for param, master in zip(self._params, self._masters, strict=True):
            # A parameter that was written to is read.
            master.copy_(torch.where(master.to(param.dtype) == param, master, param.float()))
        references = self._inner.launch(self._gradients)
        torch._foreach_copy_(self._params, self._masters)
        return references, self._gradients


# What a step works on, and a cheap check that nothing of it has changed since the last step but numbers. The launches
# of a step are recorded once and replayed with one call, as a CUDA graph.

# How often gradients must have the same addresses before launches are recorded: autograd may allocate them elsewhere.
STEADY = 3

Work: TypeAlias = list[tuple[Settings, Group, list[Tensor]]]
"""The groups of a step, each with the settings of its param group and its gradients."""


class PreparedUpdate:
    """The settings of all param groups of an optimizer, and its parameters that have gradients, in groups.

    Valid while the same parameters have gradients, and they and their state are tensors of the same kinds at the same
    addresses. Values of hyper-parameters may change. Everything in a step that may fail is done here.
    """

    def __init__(self, optimizer: FusedOptimizer) -> None:
        self._read(optimizer)
        # Each with the index of its param group.
        self.groups: list[tuple[int, Group]] = []
        self._idle: list[Tensor] = []
        tensors: list[Tensor] = []
        for number, (group, settings) in enumerate(zip(optimizer.param_groups, self._settings, strict=True)):
            active = [param for param in group["params"] if param.grad is not None]
            self._idle += [param for param in group["params"] if param.grad is None]
            pairs = [(p, optimizer._state(p, group, settings) if settings.stateful else {}) for p in active]
            self.groups += [(number, part) for part in groups_of(type(optimizer), pairs, settings)]
            # The views in the groups keep their memory alive: an address cannot come back with other contents.
            tensors += [tensor for param, entry in pairs for tensor in (param, *entry.values())]
        self.unrecordable = next((why for _, part in self.groups if (why := part.stepper.unrecordable)), "")
        if optimizer._recordings is None and tensors:
            # Each replays recorded launches; beside it are the objects that must stay alive for it.
            optimizer._recordings = Recordings(backend(tensors[0].device).recorder(), STEADY)
        self._objects = self._dependencies(optimizer)
        with DisableTorchFunctionSubclass():
            self._tensors = list({id(tensor): tensor for tensor in tensors}.values())
            self._addresses = list(map(Tensor.data_ptr, self._tensors))
            self._kinds = tensor_guards(self._tensors)

    def work(self, optimizer: FusedOptimizer) -> Work | None:
        """Return the groups with their gradients, or None if this step must be prepared again."""
        if not same_objects(self._dependencies(optimizer), self._objects):
            return None
        if any(param.grad is not None for param in self._idle):
            return None
        with DisableTorchFunctionSubclass():
            if list(map(Tensor.data_ptr, self._tensors)) != self._addresses or not self._kinds.check(*self._tensors):
                return None
            unchanged = same_objects(self._values(optimizer), self._read_values)
            if not (unchanged and self._vector_contents() == self._contents):
                before = [(settings.names, settings.options) for settings in self._settings]
                self._read(optimizer)
                if before != [(settings.names, settings.options) for settings in self._settings]:
                    return None
        work: Work = []
        for number, part in self.groups:
            if (grads := part.gradients()) is None:
                return None
            work.append((self._settings[number], part, grads))
        return work

    def step(self, work: Work, recordings: Recordings[Any]) -> None:
        """Run a step of all groups in ``work``, and record or replay its launches where that is possible."""
        record = recordings.record
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

        if isinstance(record, str) or self.unrecordable or recordings.why:
            launch()
            return
        key = tuple(
            (group.stepper.key, *((grad.data_ptr(), grad.stride()) for grad in grads)) for _, group, grads in work
        )
        # Recording does not run the launches; the replay does.
        recorded = recordings.find(key, lambda: record(launch))
        (launch if recorded is None else recorded[0])()

    def _read(self, optimizer: FusedOptimizer) -> None:
        """Read the settings, and note from which objects, and what these held."""
        self._settings = [optimizer._settings(group) for group in optimizer.param_groups]
        self._read_values = self._values(optimizer)
        self._vectors = [vector for settings in self._settings for vector in settings.vectors]
        with DisableTorchFunctionSubclass():
            self._arrays = [vector.numpy() for vector in self._vectors]
            self._contents = self._vector_contents()

    def _vector_contents(self) -> list[int | bytes]:
        """Return where the hyper-parameters lie, and their bytes, which also what numpy has written is in."""
        return [*map(Tensor.data_ptr, self._vectors), *map(_BYTES, self._arrays)]

    def _values(self, optimizer: FusedOptimizer) -> list[object]:
        """Return the values of hyper-parameters and options. A pair is one: it can only be replaced."""
        return [group[key] for group in optimizer.param_groups for key in optimizer.arguments]

    def _dependencies(self, optimizer: FusedOptimizer) -> list[object]:
        """Return every other object that a step depends on."""
        state = optimizer.state
        tensors = itertools.chain.from_iterable(map(dict.values, state.values()))
        return [*state, *state.values(), *tensors, *optimizer.param_groups, *optimizer._params()]
