"""What is no run of hf.train, on a simulated device, ``python -m tests.simulated.pieces``."""

from __future__ import annotations

import sys
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

import hfusion as hf
from hfusion.core.errors import FusionError
from tests.simulated.device import install
from tests.trained import adamw, batches, cross_entropy, fused, momentum

LOADER = batches(torch.float64, 3)
THERE = "sim:0"


def stepped(array: hf.FusedModule, optimizer: hf.optim.FusedOptimizer, x: Tensor, y: Tensor) -> None:
    optimizer.zero_grad()
    hf.per_model(cross_entropy)(array(x), y).sum().backward()
    optimizer.step()


def a_loaded_state_goes_on_wherever_its_numbers_lie() -> None:
    for make in (adamw, momentum):
        array, results = fused().to(THERE), []
        start = {name: tensor.clone() for name, tensor in array.state_dict().items()}
        for loaded in (False, True):
            array.load_state_dict(start)
            torch.manual_seed(0)
            optimizer = make(list(array.parameters()))
            for index, (x, y) in enumerate(LOADER):
                if loaded and index == 1:
                    state = optimizer.state_dict()
                    state["state"] = {
                        key: {name: value.to(THERE) for name, value in entry.items()}
                        for key, entry in state["state"].items()
                    }
                    optimizer = make(list(array.parameters()))
                    optimizer.load_state_dict(state)
                stepped(array, optimizer, x.to(THERE), y.to(THERE))
            results.append([tensor.cpu() for tensor in array.state_dict().values()])
        assert all(map(torch.equal, *results))


def an_array_that_moves_without_its_state_is_refused() -> None:
    array = fused()
    optimizer = adamw(list(array.parameters()))
    stepped(array, optimizer, *LOADER[0])
    array.to(THERE)
    with pytest.raises(FusionError, match="sim:0"):
        stepped(array, optimizer, *(tensor.to(THERE) for tensor in LOADER[1]))


def a_machine_knows_its_devices() -> None:
    found = hf.Machine.detect()
    assert [device.device for device in found.devices] == ["sim:0", "sim:1"]
    assert all(device.memory < 1 << 30 for device in found.devices)


PIECES: tuple[Callable[[], None], ...] = (
    a_loaded_state_goes_on_wherever_its_numbers_lie,
    an_array_that_moves_without_its_state_is_refused,
    a_machine_knows_its_devices,
)


def main() -> int:
    torch.set_num_threads(1)
    install()
    for piece in PIECES:
        piece()
        print(piece.__name__.replace("_", " "), flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
