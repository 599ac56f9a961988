"""Golden numbers: what a training step of each model of the benchmark asks of the null CUDA device.

Measure them all, and write ``golden.json`` and the table of docs/devices.md again:

    HFUSION_NULL_CUDA=build/null tests/null/run.sh .venv-null/bin/python -m tests.null.test_golden

With the name of a model, its numbers are printed as a line of JSON.
"""

from __future__ import annotations

import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from itertools import takewhile
from pathlib import Path
from statistics import mode

import pytest
import torch
from torch import Tensor

import hfusion as hf
from hfusion.bench.cases import CASES, FuseCase, Running, Workload
from hfusion.bench.contenders import eager_step, start_serial, trained
from tests.null.calls import Calls, absence, by_name, calls_per_step, compare_as_equal, reset, since_reset

MEMBERS = 16
FIRST_STEPS = 2
"""Steps in which programs are compiled and checked, which takes additional memory."""
WARM_STEPS, COUNTED_STEPS = 8, 12
"""Steps in which launches are recorded, and those that are counted."""
ROOT = Path(__file__).resolve().parents[2]
FILE = Path(__file__).with_name("golden.json")
PAGE = ROOT / "docs" / "devices.md"
# Lowerings do not depend on the machine, and the workspaces of cuBLAS hide no memory of a step.
ENVIRONMENT = {"HFUSION_RATES": "standard", "CUBLAS_WORKSPACE_CONFIG": ":16:8", "CUBLASLT_WORKSPACE_SIZE": "1"}


def start_eager(workload: Workload) -> Running:
    """Start the loop of the README. Nothing is verified, as nothing is computed."""
    fused = hf.fuse(workload.models(), verify=False)
    return Running(eager_step(workload, fused, hf.optim.Adam(trained(fused), lr=1e-3)))


def start_compiled(workload: Workload) -> Running:
    """Start `hf.train_step`, compiled."""
    fused = hf.fuse(workload.models(), verify=False)
    optimizer = hf.optim.Adam(trained(fused), lr=1e-3)
    train = hf.train_step(fused, workload.case.loss, optimizer, compile=True)
    inputs, target = workload.batch()

    def step() -> Tensor:
        with workload.autocast():
            return train(inputs, target)

    return Running(step)


@dataclass(frozen=True)
class Contender:
    """A way to train the members of a workload.

    Attributes:
        title: of its column in the table.
        steady: whether all steps are alike. Eager gradients change their addresses by chance. The new addresses are
            copied to the device, and the optimizer's launches are recorded once they stay for three steps.
    """

    name: str
    title: str
    start: Callable[[Workload], Running]
    amp: torch.dtype | None = None
    steady: bool = True


CONTENDERS = (
    Contender("serial", "loop", start_serial),
    Contender("eager", "eager array", start_eager, steady=False),
    Contender("compiled", "`hf.train_step`", start_compiled),
    Contender("compiled bf16", "bf16 autocast", start_compiled, torch.bfloat16),
)


def _row(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"


TITLES = [contender.title for contender in CONTENDERS]
HEAD = _row("model", *TITLES, *(f"MiB, {title}" for title in TITLES))


@dataclass(frozen=True)
class StepCounts:
    """The numbers of one training step of all members; more is worse.

    Attributes:
        launches: kernels, library calls, copies and fills, without those that a graph replays.
        graphs: replayed graphs.
        replayed: kernels, copies and fills of these graphs.
        waits: times that the host waits for the device.
        pageable: copies from or to host memory that is not pinned.
        bytes: allocated at the peak of the steps in which graphs are recorded, with the models.
    """

    launches: int
    graphs: int
    replayed: int
    waits: int
    pageable: int
    bytes: int

    def worse_than(self, golden: StepCounts) -> list[str]:
        """Describe the numbers that are larger than the golden ones."""
        names = [field.name for field in fields(self)]
        pairs = [(name, getattr(self, name), getattr(golden, name)) for name in names]
        return [f"{name}: {value}, golden {most}" for name, value, most in pairs if value > most]

    def text(self) -> str:
        """Return the counts without the bytes, as a cell of the table."""
        graphs = f" + {self.graphs} graph{'s' * (self.graphs > 1)} of {self.replayed}" if self.graphs else ""
        parts = (
            f"{self.launches}{graphs}",
            f"{self.waits} waits" if self.waits else "",
            f"{self.pageable} pageable" if self.pageable else "",
        )
        return ", ".join(filter(None, parts))


Golden = Mapping[str, Mapping[str, StepCounts]]
"""The numbers of each model, by the name of the contender."""


def measure(case: FuseCase, contender: Contender) -> StepCounts:
    """Return the numbers of most steps, after those in which graphs are recorded."""
    gc.collect()
    torch.cuda.empty_cache()
    before = torch.cuda.memory_allocated()
    reset()
    running = contender.start(Workload(case, MEMBERS, torch.device("cuda"), contender.amp))
    for _ in range(FIRST_STEPS):
        running.step()
    torch.cuda.reset_peak_memory_stats()
    for _ in range(WARM_STEPS):
        running.step()
    refuse_none(since_reset())
    counts = [counted(running.step) for _ in range(COUNTED_STEPS)]
    peak = torch.cuda.max_memory_allocated() - before
    running.close()
    assert not contender.steady or len(set(counts)) == 1, counts
    return StepCounts(*mode(counts), peak)


def refuse_none(calls: Calls) -> None:
    """Raise an AssertionError if a real device would have refused a call."""
    assert not calls.refused, calls.refused


def counted(step: Callable[[], object]) -> tuple[int, ...]:
    """Return the counts of one step."""
    calls = calls_per_step(step, warm=0, steps=1)
    refuse_none(calls)
    replayed = by_name().get("nodes replayed", 0)
    return tuple(map(int, (calls.launches, calls.graphs, replayed, calls.waits, calls.pageable)))


def measure_apart(model: str) -> dict[str, StepCounts]:
    """Measure a model in a separate process, so that nothing depends on what ran before."""
    command = [sys.executable, "-m", "tests.null.test_golden", model]
    done = subprocess.run(command, cwd=ROOT, env=os.environ | ENVIRONMENT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return {name: StepCounts(**numbers) for name, numbers in json.loads(done.stdout.splitlines()[-1]).items()}


def version() -> str:
    """Return the release of torch of which the golden numbers are."""
    return str(json.loads(FILE.read_text())["torch"])


def read() -> Golden:
    """Return the golden numbers."""
    models = json.loads(FILE.read_text())["models"]
    return {model: {name: StepCounts(**counts) for name, counts in row.items()} for model, row in models.items()}


def write(golden: Golden) -> None:
    """Write the golden numbers, and their table in place of that of the page."""
    models = {model: {name: asdict(counts) for name, counts in row.items()} for model, row in golden.items()}
    FILE.write_text(json.dumps({"torch": torch.__version__, "members": MEMBERS, "models": models}, indent=1) + "\n")
    page = PAGE.read_text()
    PAGE.write_text(page.replace("\n".join(shown(page)), "\n".join(table(golden))))


def shown(page: str) -> list[str]:
    """Return the lines of the table in the page."""
    lines = page.splitlines()
    return list(takewhile(lambda line: line.startswith("|"), lines[lines.index(HEAD) :]))


def table(golden: Golden) -> Iterator[str]:
    """Yield the lines of a Markdown table: a row for each model, first the counts, then the MiB."""
    yield HEAD
    yield _row(*["---"] * (1 + 2 * len(CONTENDERS)))
    for model, row in golden.items():
        counts = [row[contender.name] for contender in CONTENDERS]
        yield _row(model, *(cell.text() for cell in counts), *(f"{cell.bytes / 2**20:.3g}" for cell in counts))


MODELS = [case.name for case in CASES]
MOST_GRAPHS = 3


@pytest.mark.null
@pytest.mark.parametrize("model", MODELS)
def test_no_number_is_worse(model: str) -> None:
    assert torch.__version__ == version(), "the golden numbers are of one release: NULL_TORCH in the Makefile"
    numbers = read()[model]
    faults = [
        f"{name}: {fault}"
        for name, counts in measure_apart(model).items()
        for fault in counts.worse_than(numbers[name])
    ]
    assert not faults, f"{'; '.join(faults)}. If it cannot be helped, measure again: python -m tests.null.test_golden"


@pytest.mark.parametrize("model", MODELS)
def test_a_compiled_step_is_a_few_graphs_without_a_wait(model: str) -> None:
    for name in ("compiled", "compiled bf16"):
        counts = read()[model][name]
        assert (counts.waits, counts.pageable) == (0, 0)
        assert counts.graphs <= MOST_GRAPHS


def test_all_models_have_numbers() -> None:
    numbers = read()
    assert list(numbers) == MODELS
    assert {tuple(row) for row in numbers.values()} == {tuple(contender.name for contender in CONTENDERS)}


def test_the_page_shows_them() -> None:
    assert shown(PAGE.read_text()) == list(table(read()))


def main() -> None:
    """Print the numbers of one model, or measure all, report what has become worse, and write."""
    if reason := absence():
        sys.exit(reason)
    if len(sys.argv) > 1:
        (case,) = (case for case in CASES if case.name == sys.argv[1])
        library = compare_as_equal()
        print(json.dumps({contender.name: asdict(measure(case, contender)) for contender in CONTENDERS}))
        library._destroy()
        return
    earlier: Golden = read() if FILE.exists() else {}
    golden: dict[str, Mapping[str, StepCounts]] = {}
    for case in CASES:
        golden[case.name] = measure_apart(case.name)
        for name, counts in golden[case.name].items():
            earlier_counts = earlier.get(case.name, {}).get(name)
            faults = counts.worse_than(earlier_counts) if earlier_counts else []
            print(f"{case.name}, {name}: {counts.text()}, {counts.bytes / 2**20:.3g} MiB", *faults, flush=True)
    write(golden)


if __name__ == "__main__":
    main()
