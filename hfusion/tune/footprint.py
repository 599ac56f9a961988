"""Estimated bytes and seconds of trials of one shape, from the operators of one forward, without a capture."""

from __future__ import annotations

import copy
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.utils._python_dispatch import TorchDispatchMode

from hfusion.capture.registered_tensors import tensors
from hfusion.cluster.messages import DeviceInfo
from hfusion.core.calls import call_arguments
from hfusion.core.memory import tensors_in
from hfusion.device.generators import draws_kept
from hfusion.torch_private.dynamo_state import sparing_dynamo

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
# steps over the estimate. Assumed, not fitted to measurements.
_STARTUP, _STARTUP_PER_OPERATOR, _SLOWER = 2.2, 0.02, 1.9
# The narrowest array is chosen whose time per member is at most this factor above the minimum: with narrower arrays,
# samplers and pruners decide with more finished trials. As in `hfusion.tasks.arrange`, but for the gain.
_NEAR = 1.05


class Footprint:
    """Memory and time of trials of a shape on a device, as an array or in a loop.

    Args:
        model: a model of the shape; a copy of it is called once, on the CPU, since the device may not have the memory.
        inputs: the inputs of a minibatch; forward may write into them.
        stacks: the number of tensors that the optimizer holds for each parameter.
        evaluated: minibatches whose outputs are held at once to evaluate a metric.
        saved: trials are saved, with copies on the host.

    Attributes:
        shared: bytes of tensors that all trials of the shape share, such as a frozen base.
    """

    def __init__(
        self, model: nn.Module, stacks: float, inputs: Any, device: DeviceInfo, *, evaluated: int, saved: bool
    ) -> None:
        model = copy.deepcopy(model).cpu()
        args, kwargs = call_arguments(inputs, {})
        costs = _OperatorCosts()
        with draws_kept(), torch.enable_grad(), costs.saving(), costs:
            outputs = model(*args, **kwargs)
        self.shared = 0
        self._weights = sum(map(_bytes, {id(tensor): tensor for _, tensor in tensors(model)}.values()))
        trained = [_bytes(param) for param in model.parameters() if param.requires_grad]
        self._gradients, self._largest = sum(trained), max(trained, default=0)
        self._optimizer = int(stacks * self._gradients)
        self._activations = costs.saved + sum(map(_bytes, tensors_in(outputs)))
        self._outputs = 2 * evaluated * sum(map(_bytes, tensors_in(outputs)))
        self._copies = _SAVING if saved and device.physical.type == "cpu" else 0
        self._operators = max(1, costs.calls)
        rates = device.rates
        update = (2 + 2 * stacks) * self._gradients / rates.memory
        self._call = _PASSES * costs.calls / rates.calls + _ACTIONS * rates.action_seconds
        products = sum(count / rates.flops_of(dtype) for dtype, count in costs.flops.items())
        self._row = _PASSES * max(products, costs.moved / rates.memory) + update

    def held(self, rows: int) -> int:
        """Return the bytes held between epochs: weights, buffers, optimizer state, and models without a row."""
        own = self._weights - self.shared
        return self.shared + _ASIDE * own + rows * (own + self._optimizer)

    def passing(self, rows: int, *, loops: bool = False) -> int:
        """Return the peak of temporary bytes in a step, capture, evaluation or save. ``loops``: without arrays."""
        if not rows:
            return 0
        step = self._gradients + max(2 * self._activations, _UPDATING * self._largest, self._outputs)
        capture = 0 if loops else _CAPTURING * (step + self._weights)
        return max((1 if loops else rows) * step, capture, self._copies * self.held(rows))

    def seconds(self, rows: int) -> float:
        """Return the estimated seconds of a step of an array of ``rows`` rows."""
        return self._call + rows * self._row if rows else 0.0

    def array_seconds(self, rows: int, plain: float) -> float:
        """Return the seconds of a step of an array of ``rows`` rows, if a step of a plain trial takes ``plain``.

        The overhead of a plain step, in addition to its arithmetic, occurs once per step of an array, not once per row.
        """
        return _SLOWER * (plain + (rows - 1) * min(self._row, plain))

    @property
    def startup(self) -> float:
        """Estimated seconds until an array is captured and checked."""
        return _STARTUP + _STARTUP_PER_OPERATOR * self._operators


def fits(budget: int, sizes: Iterable[tuple[Footprint, int, bool]]) -> bool:
    """Return whether trials fit into ``budget`` bytes together: footprints, rows, and whether they are in a loop.

    All hold their state; one at a time has temporaries.
    """
    sizes = list(sizes)
    held = sum(footprint.held(rows) for footprint, rows, _ in sizes)
    passing = (footprint.passing(rows, loops=loops) for footprint, rows, loops in sizes)
    return held + max(passing, default=0) <= budget


def fastest_width(seconds: Callable[[int], float], most: int) -> int:
    """Return the fewest rows, of 1, 2, 4, ..., ``most``, with about the least time per member.

    ``seconds``: returns the seconds of a step of an array, for a number of rows.
    """
    widths = [1 << power for power in range(most.bit_length()) if 1 << power < most] + [most]
    times = {rows: seconds(rows) / rows for rows in widths}
    return min(rows for rows in widths if times[rows] <= _NEAR * min(times.values()))


@sparing_dynamo
class _OperatorCosts(TorchDispatchMode):
    """Counts the operators of a forward, their FLOP, bytes that they read and write, and bytes saved by autograd."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.calls = self.moved = self.saved = 0
        # By the dtype of the result.
        self.flops: Counter[torch.dtype] = Counter()

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Context manager: count the bytes of the storages that autograd saves, without parameters."""
        packed: list[list[Tensor]] = []

        def pack(tensor: Tensor) -> list[Tensor]:
            packed.append([tensor])
            return packed[-1]

        with saved_tensors_hooks(pack, lambda entry: entry[0]):
            yield
        storages = [entry[0].untyped_storage() for entry in packed if not isinstance(entry[0], nn.Parameter)]
        self.saved = sum({storage.data_ptr(): storage.nbytes() for storage in storages}.values())
        for entry in packed:
            # A result that its own operator saves would keep itself alive.
            entry.clear()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        outputs = func(*args, **(kwargs or {}))
        if func.is_view:
            return outputs
        self.calls += 1
        operands: Sequence[Tensor] = [*tensors_in((args, kwargs)), *tensors_in(outputs)]
        self.moved += sum(map(_bytes, operands))
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


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
