from __future__ import annotations

import pytest
import torch

from hfusion.bench import cuda_graph, fuse_benchmark, memory_benchmark, serial
from hfusion.bench.cases import FuseCase
from hfusion.bench.contenders import start_hfusion
from hfusion.bench.progress import Meter
from hfusion.bench.workload import Contender, Unavailable, Workload, check_agreement, losses
from tests.bench.tiny import TINY, TINY_BATCH_NORM, workload

CUDA = torch.device("cuda")


def test_it_needs_a_cuda_device() -> None:
    with pytest.raises(Unavailable, match="needs --device cuda"):
        cuda_graph.start(workload())


@pytest.mark.gpu
@pytest.mark.parametrize("amp", [None, torch.bfloat16])
@pytest.mark.parametrize("case", [TINY, TINY_BATCH_NORM], ids=lambda case: case.name)
def test_graphs_train_as_the_serial_loop(case: FuseCase, amp: torch.dtype | None) -> None:
    chosen = Workload(case, 3, CUDA, amp)
    expected = losses(serial.start(chosen), 5)
    check_agreement("serial-cuda-graph", expected, losses(cuda_graph.start(chosen), 5), chosen.tolerance)


@pytest.mark.gpu
def test_times_and_bytes_on_a_gpu() -> None:
    contenders = (Contender("serial", "", serial.start), Contender("hfusion", "", start_hfusion))
    chosen = fuse_benchmark.FuseSettings(
        (TINY,), members=(2,), contenders=contenders, rounds=1, slot=1e-3, threads=1, device=CUDA
    )
    meter = Meter(say=lambda _: None, advance=lambda _: None)
    (comparison,) = fuse_benchmark.run(chosen, meter)
    assert all(row.ms and row.ms > 0 for row in comparison.rows())
    (rows,) = memory_benchmark.run(chosen, meter)
    assert all(row.bytes and row.bytes > 0 for row in rows)
