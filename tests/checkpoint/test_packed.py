"""A save in memory holds what one on disk does, in another process, too."""

from __future__ import annotations

import pickle
from pathlib import Path

import torch

import hfusion as hf
from hfusion.checkpoint import files
from hfusion.population.saving import gathered, packed
from tests.checkpoint.living import OPTIONS, Net


def test_a_packed_population_is_the_saved_one(tmp_path: Path) -> None:
    """Among its tensors is a state of numpy's in uint32, which pickle writes and does not read."""
    pop = hf.Population([Net() for _ in range(3)], tags=["a", "b", "c"], **OPTIONS)
    pop.save(tmp_path).result()
    written, unpacked = files.read(tmp_path), pickle.loads(pickle.dumps(packed(pop))).saved()
    assert unpacked.body == written.body
    assert unpacked.tensors.keys() == written.tensors.keys()
    assert torch.uint32 in {tensor.dtype for tensor in unpacked.tensors.values()}
    for key, tensor in written.tensors.items():
        torch.testing.assert_close(unpacked.tensors[key], tensor, rtol=0, atol=0, equal_nan=True)
    again = hf.Population.load(unpacked, Net, random=False, **OPTIONS)
    pop.stop(1)
    again.stop(1)
    assert gathered(again, None, None).body["population"] == gathered(pop, None, None).body["population"]
