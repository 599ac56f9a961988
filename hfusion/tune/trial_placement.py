"""Which trials share an array, where they are trained, and what they are estimated to take."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from hfusion.capture.compare_models import check_pair
from hfusion.capture.registered_tensors import tensors
from hfusion.cluster.messages import DeviceInfo, DeviceLost
from hfusion.core.calls import call_arguments
from hfusion.core.errors import FusionError, PlanError
from hfusion.core.member_table import Widths
from hfusion.core.memory import tensors_in
from hfusion.device.backend import draws_kept
from hfusion.device.calibrate import Rates
from hfusion.torch_private.export_state import sparing_dynamo
from hfusion.tune.population_based_training import PBT
from hfusion.tune.space import SweepTrial, sample_optimizer
from hfusion.tune.sweep_workers import RowsCall, SweepWorkers
from hfusion.tune.trial_rows import SweepRecipe, first_inputs, minibatches

# Time of forward and backward, in units of forward.
_PASSES = 3
# Actions of a step: forward, backward and update. In addition to its operators, `Population.step` takes 0.31 ms, the
# time of three actions, where a call of an operator takes 2 us.
_ACTIONS = 3
# Copies of an array's state that are alive while a save on the host is written: a clone, and its packed bytes.
_SAVING = 2
# Temporaries of a parameter's size during its eager update: the maximum in hf.optim, of SGD with momentum and RAdam, as
# counted on the simulated device of the tests. Kernels need none.
_UPDATING = 4
# Models of a shape that are alive without a row: one to compare others with, one that waits, and one for estimates.
_ASIDE = 3
# Memory of a capture and of the check of an array's first step, in units of the memory of a step of one row: it was at
# most 1.6 for MLPs, a CNN and a PointNet, counted in the same way.
_CAPTURING = 2
# Seconds until an array is captured and checked, of any model and per operator of its forward, and the time of its
# steps over that of a plain trial, beyond the estimates of both. Assumed, not fitted to measurements.
_STARTUP, _STARTUP_PER_OPERATOR, _SLOWER = 2.2, 0.02, 1.9


@dataclass(frozen=True)
class Extent:
    """The size and limits of a sweep.

    Attributes:
        concurrent: returns the maximum number of concurrent trials.
        catch: exceptions that fail their trial only.
        deadline: the time, by time.monotonic, after which no more trials start.
        asynchronous: whether each array reports when it is ready.
        arguments: of the sweep, as texts that a save is compared by.
    """

    trials: int
    epochs: int
    seed: int
    catch: tuple[type[BaseException], ...]
    pbt: PBT | None
    deadline: float
    concurrent: Callable[[], int]
    asynchronous: bool
    arguments: dict[str, str]


class Shape:
    """Trials that can share an array: models of one structure with equal array choices. It estimates what they take.

    Bytes and seconds are estimated from the operators of one forward, without a capture.

    Args:
        first: the first trial of the shape, with which others are compared. A copy of its model is called on the CPU,
            since the device may not have the memory.
        read: the inputs of a minibatch, into which forward may write, and the seconds to read one: once for an array,
            and once for each plain trial.
        saved: trials are saved, with copies on the host.
        together: its trials must be an array.

    Attributes:
        startup: estimated seconds until an array is captured and checked.
    """

    def __init__(
        self, first: SweepTrial, recipe: SweepRecipe, read: tuple[Any, float], *, saved: bool, together: bool
    ) -> None:
        choices = first.suggestion.choices
        loader = recipe.loaders.loader(choices.loader)
        counted = recipe.loaders.function is not None or hasattr(loader, "__len__")
        # They would begin anew for each plain trial, and a fork cannot begin them.
        has_workers = any(getattr(each, "num_workers", 0) for each in (loader, recipe.eval_loader))
        self.first, self.is_array = first, together or bool(recipe.compile) or has_workers or not counted
        inputs, self._reading = read
        # Minibatches per epoch, and those whose outputs are held at once to evaluate a metric.
        self._minibatches, self._saved = minibatches(loader) if counted else 1, saved
        evaluated = minibatches(recipe.judged(choices)[1]) if recipe.evaluates else 0
        # How many tensors the optimizer holds for each parameter.
        stacks = sample_optimizer(choices.optimizer, choices.options, [first.suggestion.hypers]).state_stacks
        model: nn.Module = copy.deepcopy(first.model).cpu()
        args, kwargs = call_arguments(inputs, {})
        storages: dict[int, torch.UntypedStorage] = {}

        def held_for_backward(tensor: Tensor) -> Tensor:
            if not isinstance(tensor, nn.Parameter):
                storages[tensor.untyped_storage().data_ptr()] = tensor.untyped_storage()
            # Detached, as a result that its own operator saves would keep itself alive.
            return tensor.detach()

        self._costs, hooks = _OperatorCosts(), saved_tensors_hooks(held_for_backward, lambda tensor: tensor)
        with draws_kept(), torch.enable_grad(), hooks, self._costs:
            outputs = model(*args, **kwargs)
        # Bytes of tensors that all trials share, such as a frozen base.
        self._shared = 0
        self._weights = sum({id(tensor): tensor.nbytes for _, tensor in tensors(model)}.values())
        trained = [param.nbytes for param in model.parameters() if param.requires_grad]
        self._gradients, self._largest = sum(trained), max(trained, default=0)
        self._optimizer = int(stacks * self._gradients)
        self._updated = (2 + 2 * stacks) * self._gradients
        returned = sum(tensor.nbytes for tensor in tensors_in(outputs))
        self._activations = sum(storage.nbytes() for storage in storages.values()) + returned
        self._outputs = 2 * evaluated * returned
        self.startup = _STARTUP + _STARTUP_PER_OPERATOR * max(1, self._costs.calls)

    def takes(self, candidate: SweepTrial) -> bool:
        """Return whether a trial can share an array with the trials of this shape."""
        if not candidate.suggestion.choices.matches(self.first.suggestion.choices):
            return False
        try:
            check_pair(self.first.model, 0, candidate.model)
        except FusionError:
            return False
        held = {id(tensor) for _, tensor in tensors(self.first.model)}
        self._shared = sum({id(t): t.nbytes for _, t in tensors(candidate.model) if id(t) in held}.values())
        # An array has the tensors that its members share once.
        self.is_array = self.is_array or self._shared > 0
        return True

    def held(self, rows: int) -> int:
        """Return the bytes held between epochs: weights, buffers, optimizer state, and models without a row."""
        own = self._weights - self._shared
        return self._shared + _ASIDE * own + rows * (own + self._optimizer)

    def passing(self, rows: int, device: DeviceInfo) -> int:
        """Return the peak of temporary bytes in a step, capture, evaluation or save."""
        if not rows:
            return 0
        step = self._gradients + max(2 * self._activations, _UPDATING * self._largest, self._outputs)
        capture = _CAPTURING * (step + self._weights) if self.is_array else 0
        copies = _SAVING * self.held(rows) if self._saved and device.physical.type == "cpu" else 0
        return max(rows * step if self.is_array else step, capture, copies)

    def seconds(self, rows: int, rates: Rates) -> float:
        """Return the estimated seconds of an epoch of ``rows`` rows; of a minibatch if nothing has a length."""
        costs = self._costs
        call = self._reading + _PASSES * costs.calls / rates.calls + _ACTIONS * rates.action_seconds
        products = sum(count / rates.flops_of(dtype) for dtype, count in costs.flops.items())
        row = _PASSES * max(products, costs.moved / rates.memory) + self._updated / rates.memory
        return self._minibatches * (call + rows * row) if rows else 0.0


class ShapeArray:
    """Trials of a shape on the device with index ``device``: an array, or one trial in plain torch.

    Trials in ``joining`` wait for a row. ``cost``: the estimated seconds of an epoch of a plain trial.
    """

    def __init__(self, name: str, shape: Shape, device: int, *, plain: bool = False) -> None:
        self.name, self.shape, self.device, self.plain = name, shape, device, plain
        self.cost = 0.0
        # The fork of this process that has the trial; 0: none has it.
        self.fork = 0
        # Set by `SweepWorkers`: the calls since the last save, how many of them are done, and how often it was lost.
        self.calls: list[RowsCall | bytes] = []
        self.done = self.losses = 0
        self.slots: dict[str, SweepTrial] = {}
        self.joining: list[SweepTrial] = []
        # The number of rows with which it began; 0 before that.
        self.first = 0
        # True from the start of an epoch until its result is reported.
        self.training = False
        # Path of its last save, relative to the sweep's folder; empty if it has changed since.
        self.save = ""

    @property
    def worker(self) -> int:
        """The worker that trains it."""
        return self.fork or self.device

    @property
    def round(self) -> int | None:
        """The round that it trains next, counted as `SweepTrial.began`; None without trials."""
        return next((slot.began + slot.epochs for slot in self.slots.values()), None)

    @property
    def trial_count(self) -> int:
        """Number of trials that have a row or wait for one."""
        return len(self.slots) + len(self.joining)

    def rows(self, more: int = 0) -> int:
        """Return the number of rows with ``more`` members."""
        members = self.trial_count + more
        return Widths(self.first or members).of(members) if members else 0

    def assign_slots(self, round_: int) -> Sequence[SweepTrial]:
        """Give rows to waiting trials, and return them. Their first round is the array's next one, else ``round_``."""
        began = round_ if self.round is None else self.round
        new, self.joining, self.save = self.joining, [], ""
        self.first = self.first or len(new)
        for trial in new:
            trial.began, self.slots[trial.tag] = began, trial
        return new


class TrialPlacement:
    """The arrays of a sweep on its devices, at most one of a shape on each, and its plain trials.

    Args:
        saved: trials are saved, with copies on the host.
    """

    def __init__(self, workers: SweepWorkers, recipe: SweepRecipe, extent: Extent, *, saved: bool) -> None:
        self.arrays: list[ShapeArray] = []
        self.opened = 0
        self._workers, self._recipe, self._concurrent = workers, recipe, extent.concurrent
        # How many trials use an array one after another.
        self._waves = max(1.0, extent.trials / extent.concurrent())
        # Population based training compares and copies trials, so all of a shape must be in one array.
        self._saved, self._together = saved, extent.pbt is not None
        # The inputs of the first minibatch of each loader, and the seconds to read one, by id.
        self._inputs: dict[int, tuple[Any, float]] = {}

    def shape(self, candidate: SweepTrial) -> Shape:
        """Return the shape of an array that the trial can share, or a new shape. Raises PlanError if none fits it."""
        for shape in dict.fromkeys(array.shape for array in self.arrays):
            if shape.takes(candidate):
                return shape
        loader = self._recipe.loaders.loader(candidate.suggestion.choices.loader)
        if id(loader) not in self._inputs:
            self._inputs[id(loader)] = first_inputs(loader)
        # The candidate itself loses its model to a worker.
        first, read = replace(candidate), self._inputs[id(loader)]
        return Shape(first, self._recipe, read, saved=self._saved, together=self._together)

    def check(self, shape: Shape, what: str) -> None:
        """Raise PlanError if no device has memory for one trial of a shape. ``what``: the trial, in the message."""
        device = max(self._workers.devices, key=lambda info: info.budget)
        if (need := shape.held(1) + shape.passing(1, device)) > device.budget:
            raise PlanError(
                f"{what} needs {need:,} bytes to be trained, and device {device.name} has {device.budget:,}: bound the "
                "space, give a smaller minibatch, or let such trials fail with catch=(hf.PlanError,)"
            )

    @property
    def full(self) -> bool:
        """Return whether the maximum number of trials is training."""
        return sum(array.trial_count for array in self.arrays) >= self._concurrent()

    def join(self, shape: Shape, candidate: SweepTrial) -> bool:
        """Let a trial wait for a row, on the device with memory whose round then ends first. Return whether it can."""
        shape_arrays = [array for array in self.arrays if array.shape is shape and not array.plain]
        # Trials join and leave an array only while neither it nor its device is training.
        choices = [array for array in shape_arrays if not array.training and array.device not in self._workers.busy]
        if not shape_arrays or not self._together:
            occupied = {array.device for array in shape_arrays} | set(self._workers.busy)
            new = [device for device in self._live_devices if device not in occupied]
            choices += [ShapeArray(f"array-{self.opened}", shape, device) for device in new]

        def end(array: ShapeArray) -> tuple[float, int]:
            others = [placed for placed in self._on(array.device) if placed is not array]
            return sum(map(self._epoch_seconds, others)) + self._epoch_seconds(array, 1), array.device

        for array in sorted(choices, key=end):
            if self._has_room(array):
                array.joining.append(candidate)
                if array not in self.arrays:
                    self.opened += 1
                    self.arrays.append(array)
                return True
        return False

    def open(self) -> list[ShapeArray]:
        """Decide which waiting trials become arrays. Return what they join; plain trials last, the longest first."""
        plain: list[ShapeArray] = []
        for array in [array for array in self.arrays if not array.first and not array.plain]:
            shape, device = array.shape, self._workers.devices[array.device]
            if not shape.is_array:
                epochs = [member.suggestion.epochs for member in array.joining]
                saved = seconds_saved(epochs, self._waves, shape, device.rates, self._workers.side_by_side)
                # Whether it fits is asked of a shape that is an array. Later trials of the shape then join it.
                shape.is_array = saved > 0
                shape.is_array &= self._fits(array.device, self._on(array.device))
            if shape.is_array:
                continue
            self.arrays.remove(array)
            for member in array.joining:
                trial = ShapeArray(member.tag.replace(" ", "-"), array.shape, array.device, plain=True)
                trial.joining = [member]
                trial.cost = self._epoch_seconds(trial)
                plain.append(trial)
        self.arrays += sorted(plain, key=lambda array: (-array.cost, array.joining[0].number))
        return [array for array in self.arrays if array.joining]

    def restored(self, name: str, shape: Shape, slots: Sequence[SweepTrial], rows: int, *, plain: bool) -> ShapeArray:
        """Place a saved array on the device whose round ends first, among those with memory for it if there are any.

        ``rows``: those with which it began.
        """
        array = ShapeArray(name, shape, self._live_devices[0], plain=plain)
        array.slots, array.first = {slot.tag: slot for slot in slots}, rows
        self._place(array)
        array.cost = self._epoch_seconds(array)
        shape.is_array = shape.is_array or not plain
        self.arrays.append(array)
        return array

    def _place(self, array: ShapeArray) -> bool:
        """Place an array where the round ends first among devices with memory for it; return whether there is one."""
        order = sorted(self._live_devices, key=lambda device: sum(map(self._epoch_seconds, self._on(device))))
        fitting = [device for device in order if self._fits(device, [array, *self._on(device)])]
        array.device = fitting[0] if fitting else array.device
        return bool(fitting)

    def drop_empty(self) -> None:
        """Drop arrays without trials."""
        for array in self.arrays:
            if not array.trial_count:
                self._workers.drop(array)
        self.arrays = [array for array in self.arrays if array.trial_count]

    def _on(self, device: int) -> list[ShapeArray]:
        return [array for array in self.arrays if array.device == device]

    def _fits(self, device: int, arrays: Iterable[ShapeArray], more: ShapeArray | None = None) -> bool:
        """Return whether arrays, with one more member in ``more``, fit into a device's memory budget.

        All hold their state; one at a time has temporaries.
        """
        info = self._workers.devices[device]
        rows = Counter[Shape]()
        for array in arrays:
            rows[array.shape] += array.rows(1 if array is more else 0)
        passing = max((shape.passing(count, info) for shape, count in rows.items()), default=0)
        return sum(shape.held(count) for shape, count in rows.items()) + passing <= info.budget

    @property
    def _live_devices(self) -> list[int]:
        """The devices that are not lost."""
        return [device for device in range(len(self._workers.devices)) if device not in self._workers.lost_devices]

    def _epoch_seconds(self, array: ShapeArray, more: int = 0) -> float:
        """Return the estimated seconds of an epoch of an array with ``more`` members."""
        return array.shape.seconds(array.rows(more), self._workers.devices[array.device].rates)

    def _has_room(self, array: ShapeArray) -> bool:
        """Return whether a device has memory for one more member of an array, without those that have no trials."""
        for _ in range(2):
            others = [placed for placed in self._on(array.device) if placed is not array]
            if self._fits(array.device, [array, *others], array):
                return True
            self.drop_empty()
            if array not in self.arrays:
                # It had no trials, and was dropped.
                array.first = 0
        return False

    def move(self, array: ShapeArray) -> None:
        """Move an array of a lost device to another. Raises DeviceLost if none has room for it."""
        if not self._place(array):
            live, count = len(self._live_devices), len(self._workers.devices)
            raise DeviceLost(
                f"{count - live} of {count} devices are lost, and no other has room for the {len(array.slots)} trials "
                f"of {array.name}: with a directory the same call goes on when there are more"
            )


def seconds_saved(epochs: Sequence[int], waves: float, shape: Shape, rates: Rates, side_by_side: int) -> float:
    """Return the estimated seconds that an array saves over plain trials.

    Args:
        epochs: the epochs of each trial.
        waves: the number of trials of the sweep over those that train at once.
        side_by_side: how many plain trials are trained at the same time.
    """
    looped = sum(epochs) / min(side_by_side, len(epochs)) * shape.seconds(1, rates)
    together = max(epochs) * _SLOWER * shape.seconds(len(epochs), rates)
    return waves * (looped - together) - shape.startup


@sparing_dynamo
class _OperatorCosts(TorchDispatchMode):
    """Counts the operators of a forward, their FLOP by the dtype of the result, and bytes that they read and write."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.moved = 0
        self.flops: Counter[torch.dtype] = Counter()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func.is_view:
            return outputs
        self.calls += 1
        operands: Sequence[Tensor] = [*tensors_in((args, kwargs)), *tensors_in(outputs)]
        self.moved += sum(operand.nbytes for operand in operands)
        if count := _flops(func.overloadpacket, operands, outputs):
            self.flops[outputs.dtype] += count
        return outputs


def _flops(operator: Any, operands: Sequence[Tensor], outputs: Any) -> int:
    """Return the FLOP of a matrix product or convolution, and 0 for other operators, which are bound by memory.

    torch.utils.flop_counter knows more, and takes a second to import, with Triton.
    """
    aten = torch.ops.aten
    if operator in (aten.mm, aten.bmm, aten.addmm, aten.baddbmm):
        # The last operands are the factors, and the result.
        return 2 * int(outputs.numel()) * operands[-3].shape[-1]
    if operator is aten.convolution:
        return 2 * int(outputs.numel()) * operands[1][0].numel()
    return 0
