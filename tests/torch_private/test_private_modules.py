"""Assumptions of hfusion about torch's modules, optimizers, loaders and Inductor hold on the installed torch."""

from __future__ import annotations

import pytest
from torch.utils.data import DataLoader

from hfusion.torch_private import (
    dataloader_workers,
)


@pytest.mark.parametrize("ends", ["killed", "shut down"])
def test_workers_of_a_loader(ends: str) -> None:
    loader = DataLoader([1, 2], num_workers=1, persistent_workers=True)
    assert dataloader_workers.kept_iterator(loader) is None
    iterator = iter(loader)
    next(iterator)
    assert dataloader_workers.has_workers(iterator)
    assert dataloader_workers.may_stay(iterator)
    assert dataloader_workers.kept_iterator(loader) is iterator
    if ends == "killed":
        dataloader_workers.kill_workers(iterator, 60)
        assert not dataloader_workers.may_stay(iterator)
    dataloader_workers.shut_down(loader, iterator)
    assert dataloader_workers.kept_iterator(loader) is None
    assert not any(worker.is_alive() for worker in iterator._workers)
    assert [int(batch) for batch in DataLoader([1, 2])] == [1, 2]
