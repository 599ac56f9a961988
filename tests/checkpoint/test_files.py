"""Saves as files: their folders, their numbers in JSON, and a save in memory."""

from __future__ import annotations

import enum
import json
import math
import os
import subprocess
import sys
from collections import Counter, OrderedDict, defaultdict, deque, namedtuple
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, StepLR

import hfusion as hf
from hfusion.checkpoint import files
from hfusion.checkpoint.files import saves
from hfusion.checkpoint.json_tree import decode, encode
from tests.checkpoint.damage import SURE, Trial
from tests.checkpoint.living import OPTIONS, Batches, Net, population, train


# Folders of saves that others change: taken names, saves that go while they are read, writers side by side.
def save(folder: Path, step: int = 0, keep: int = 3) -> Path:
    return files.write(folder, {"members": ["a"]}, {"x": torch.full((2,), float(step))}, step=step, keep=keep)


def _full(path: Path) -> None:
    path.mkdir()
    (path / "file").touch()


TAKEN: dict[str, Callable[[Path], object]] = {
    "file": Path.touch,
    "broken link": lambda path: path.symlink_to("nowhere"),
    "link to a file": lambda path: path.symlink_to(__file__),
    "folder": _full,
    "pipe": os.mkfifo,
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_save_takes_the_next_name_that_is_free(name: str, tmp_path: Path) -> None:
    first = save(tmp_path, 1)
    TAKEN[name](tmp_path / "save-000000000002")
    second = save(tmp_path, 2)
    assert (first.name, second.name) == ("save-000000000001", "save-000000000003")
    assert files.read(tmp_path).step == 2
    assert list(tmp_path.glob(".aside-*")) == []


def test_sizes_that_were_exchanged_in_the_header_are_damage(tmp_path: Path) -> None:
    """The bytes of the tensor, and how many there are, fit both."""
    path = files.write(tmp_path, {}, {"x": torch.arange(6.0).view(2, 3)}, step=0, keep=1) / files.TENSORS
    content = path.read_bytes()
    changed = content.replace(b'"shape":[2,3]', b'"shape":[3,2]')
    assert changed != content
    path.write_bytes(changed)
    with pytest.raises(hf.CheckpointError, match="is damaged: it does not have the checksum in"):
        files.read(tmp_path)


def test_every_kind_of_number_comes_back(tmp_path: Path) -> None:
    """Complex tensors are stored as pairs of real numbers."""
    dtypes = (torch.complex64, torch.complex128, torch.bfloat16, torch.uint32, torch.bool, torch.float8_e4m3fn)
    tensors = {str(dtype): torch.ones(2, 3).to(dtype) for dtype in dtypes}
    tensors |= {"transposed": torch.randn(4, 2).T, "number": torch.tensor(2), "empty": torch.empty(0, 3)}
    files.write(tmp_path, {}, tensors, step=0, keep=1)
    read = files.read(tmp_path).tensors
    assert read.keys() == tensors.keys()
    for key, tensor in tensors.items():
        assert (read[key].dtype, read[key].shape) == (tensor.dtype, tensor.shape)
        assert torch.equal(
            read[key].float() if tensor.is_floating_point() else read[key],
            tensor.float() if tensor.is_floating_point() else tensor,
        )


def test_links_are_removed_and_what_they_lead_to_is_not(tmp_path: Path) -> None:
    """A save that is a link goes when it is too old; links that an older version has set aside go as well."""
    elsewhere = save(tmp_path / "elsewhere")
    root = tmp_path / "root"
    root.mkdir()
    (root / "save-000000000001").symlink_to(elsewhere)
    (root / ".aside-0").symlink_to(elsewhere)
    (root / ".aside-1").symlink_to("nowhere")
    for step in range(2):
        save(root, step, keep=1)
    assert [path.name for path in root.iterdir()] == ["save-000000000003"]
    assert files.read(elsewhere).step == 0


def test_a_save_that_cannot_be_written_to_goes(tmp_path: Path) -> None:
    save(tmp_path).chmod(0o500)
    save(tmp_path, 1, keep=1)
    assert [path.name for path in tmp_path.iterdir()] == ["save-000000000002"]


def test_a_save_that_goes_while_it_is_read_is_read_as_the_next(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    save(tmp_path)
    read, steps = files.read_manifest, iter(range(1, 4))

    def slow(path: Path) -> dict[str, object]:
        manifest = read(path)
        if (step := next(steps, None)) is not None:
            monkeypatch.setattr(files, "read_manifest", read)
            save(tmp_path, step, keep=1)
            monkeypatch.setattr(files, "read_manifest", slow)
        return manifest

    monkeypatch.setattr(files, "read_manifest", slow)
    saved = files.read(tmp_path)
    assert saved.step == 3
    assert torch.equal(saved.tensors["x"], torch.full((2,), 3.0))


def test_writers_and_a_reader_side_by_side(tmp_path: Path) -> None:
    save(tmp_path)

    def write(start: int) -> None:
        for step in range(start, start + 12):
            save(tmp_path, step, keep=1)

    with ThreadPoolExecutor(2) as pool:
        writers = [pool.submit(write, start) for start in (100, 200)]
        while not all(writer.done() for writer in writers):
            saved = files.read(tmp_path)
            assert torch.equal(saved.tensors["x"], torch.full((2,), float(saved.step)))
    for writer in writers:
        writer.result()
    save(tmp_path, 300, keep=1)
    assert len(list(tmp_path.iterdir())) == 1


def test_saves_are_ordered_by_number(tmp_path: Path) -> None:
    for number in (999_999_999_999, 1_000_000_000_000, 7):
        (tmp_path / f"save-{number:012d}").mkdir()
    assert [path.name for path in files.saves(tmp_path)] == [
        "save-000000000007",
        "save-999999999999",
        "save-1000000000000",
    ]


# Nests of values come back from JSON with the types that they had, or are refused by name.
ALIKE: list[Any] = [
    None, True, 1, 10**30, "a", 1.5, -0.0, math.inf, 2j, complex(math.nan, -0.0), b"\x00a", -math.inf,
    (1, (2,)), {1, 2}, frozenset([1]), {frozenset([1]): [2]}, {(1, 2): {"~": 1}}, [], {}, (), torch.Size([1, 2]),
    OrderedDict(b=1, a=(2,)), defaultdict(list, {1: [2]}), defaultdict(None, a=1), Counter("aab"),
    np.float32(0.1), np.float64(math.nan), np.int8(-3), np.bool_(True), np.complex64(1j),
    np.array(5.0), np.arange(6, dtype=np.uint16).reshape(2, 3), np.zeros((0, 2)), np.array([True]),
    torch.ones(2, dtype=torch.complex64), torch.tensor(3), nn.Parameter(torch.ones(2)),
    nn.Parameter(torch.ones(2), requires_grad=False), [OrderedDict(x=[{"y": frozenset([(1, 2)])}])],
]  # fmt: skip


def back(value: Any) -> Any:
    tensors: dict[str, Tensor] = {}
    return decode(json.loads(json.dumps(encode(value, tensors, "extra"), allow_nan=False)), tensors)


@pytest.mark.parametrize("value", ALIKE, ids=lambda value: f"{type(value).__name__} {value!r}"[:40])
def test_a_value_comes_back_as_it_was(value: Any) -> None:
    decoded = back(value)
    assert type(decoded) is type(value)
    assert repr(decoded) == repr(value)
    if isinstance(value, np.ndarray | Tensor):
        assert (decoded.dtype, decoded.shape) == (value.dtype, value.shape)
    if isinstance(value, dict):
        assert list(decoded.items()) == list(value.items())


def test_a_state_dict_of_torch_keeps_its_versions() -> None:
    state = nn.BatchNorm1d(2).state_dict()
    decoded = back({"model": state})["model"]
    assert decoded._metadata == state._metadata  # type: ignore[attr-defined]
    assert type(decoded._metadata) is OrderedDict
    assert list(decoded) == list(state)


def test_a_defaultdict_goes_on_making_values() -> None:
    assert back(defaultdict(list))["new"] == []


Point = namedtuple("Point", "x y")


class Level(enum.IntEnum):
    LOW = 1


class Table(dict):  # type: ignore[type-arg]
    pass


REFUSED: dict[str, tuple[Any, str]] = {
    "namedtuple": (Point(1, 2), r"extra is of class .*Point, .*give tuple\(\.\.\.\) of it"),
    "structseq": (torch.ones(2).max(0), r"torch\.return_types\.max, .*give tuple\("),
    "enum": (Level.LOW, r"Level, .*give its \.value"),
    "dict": (Table(a=1), r"Table, .*give dict\("),
    "defaultdict": (defaultdict(lambda: 1), r"defaultdict of <function .*give dict\("),
    "deque": (deque([1]), r"collections\.deque, .*keep plain values"),
    "byte order": (np.ones(1, dtype=">f8"), r"numpy\.ndarray of >f8"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_values_that_only_code_creates_are_refused_by_name(name: str) -> None:
    value, message = REFUSED[name]
    with pytest.raises(hf.CheckpointError, match=message):
        encode(value, {}, "extra")


# Loading members into arrays of other widths and bases; invalid values, scores, names and schedulers are reported.
BATCH = torch.randn(6, 4), torch.randint(3, (6,))


@pytest.mark.parametrize("trained", [False, True])
def test_one_of_the_members_of_a_base(trained: bool, tmp_path: Path) -> None:
    """Alone it has the base for itself, with its state in the optimizer; all of them go on as they were."""

    def array(*bases: nn.Module) -> tuple[hf.FusedModule, hf.optim.SGD]:
        fused = hf.fuse([nn.Sequential(base.requires_grad_(trained), nn.Linear(4, 3)) for base in bases])
        return fused, hf.optim.SGD(fused.parameters(), lr=0.1, momentum=0.9)

    fused, optimizer = array(*[nn.Linear(4, 4)] * 3)
    step = hf.train_step(fused, F.cross_entropy, optimizer, compile=False)
    step(*BATCH)
    hf.save(tmp_path, fused, optimizer)
    again, other = array(*[nn.Linear(4, 4)] * 3)
    hf.load(tmp_path, again, other)
    loaded, own = array(nn.Linear(4, 4))
    hf.load(tmp_path, loaded, own, tags="member 1")
    for name, tensor in loaded.named_parameters():
        stack = dict(fused.named_parameters())[name]
        expected = stack[1] if stack.dim() == tensor.dim() else stack
        torch.testing.assert_close(tensor[0], expected, rtol=0, atol=0)
        if tensor.requires_grad:
            moved = optimizer.state[stack]["momentum_buffer"]
            momentum = own.state[tensor]["momentum_buffer"][0]
            assert torch.equal(momentum, moved[1] if moved.dim() > momentum.dim() else moved)
    assert hf.train_step(loaded, F.cross_entropy, own, compile=False)(*BATCH).isfinite().all()
    steps = (step, hf.train_step(again, F.cross_entropy, other, compile=False))
    for _ in range(2):
        assert torch.equal(*(each(*BATCH) for each in steps))
    if trained:
        with pytest.raises(
            hf.CheckpointError, match=r"0\.weight is trained and each member's own here, and was not in"
        ):
            hf.load(tmp_path, *array(*[nn.Linear(4, 4) for _ in range(3)]))


def test_free_rows_have_no_schedule_to_go_on(tmp_path: Path) -> None:
    """Members have schedules of different kinds, by name; who starts in a free row brings one."""
    makes: dict[str, Any] = {
        "a": lambda o: LinearLR(o, 0.1, total_iters=5),
        "b": lambda o: StepLR(o, 2),
        "c": lambda o: CosineAnnealingLR(o, 9),
    }
    options = {**OPTIONS, "scheduler": list(makes.values())}
    pop = hf.Population([Net() for _ in makes], **options, tags=list(makes))
    train(pop, Batches(), 2)
    pop.stop(0)
    pop.save(tmp_path)
    again = hf.Population.load(tmp_path, Net, **{**OPTIONS, "scheduler": makes})
    assert again.tags == [None, "b", "c"]
    assert again.scheduler is not None
    assert again.scheduler.kinds[1:] == ["StepLR", "CosineAnnealingLR"]
    assert torch.equal(again.hparams["lr"][1:], pop.hparams["lr"][1:])
    again.start(0, Net(), lr=0.1, scheduler=makes["a"])
    assert again.scheduler.last_epochs.tolist() == [0, 2, 2]
    with pytest.raises(hf.CheckpointError, match=r"scheduler has none for 'b': give one for each of \['b', 'c'\]"):
        hf.Population.load(tmp_path, Net, **{**OPTIONS, "scheduler": {"a": makes["a"]}})
    with pytest.raises(hf.CheckpointError, match="holds StepLR for 'b', and its scheduler here is Cosine"):
        hf.Population.load(tmp_path, Net, **OPTIONS)
    with pytest.raises(hf.CheckpointError, match="holds CosineAnnealingLR for 'c', and its scheduler here is Step"):
        hf.Population.load(tmp_path, Net, **{**OPTIONS, "scheduler": {"b": makes["b"], "c": makes["b"]}})
    with pytest.warns(UserWarning, match="holds a scheduler, and scheduler= was not given"):
        hf.Population.load(tmp_path, Net, **{**OPTIONS, "scheduler": None})


def test_a_name_is_loaded_once(tmp_path: Path) -> None:
    pop = population(3)
    pop.save(tmp_path)
    assert hf.load(tmp_path, Net(), tags="net 0.2").tags == ["net 0.2"]
    with pytest.raises(hf.CheckpointError, match=r"'net 0\.1' is named twice: load it once"):
        hf.Population.load(tmp_path, Net, tags=["net 0.1", "net 0.1"], **OPTIONS)
    with pytest.raises(hf.CheckpointError, match="no folder was given"):
        hf.Population.load([], Net, **OPTIONS)
    pop.save(tmp_path / "copy")
    with pytest.raises(hf.CheckpointError, match=r"'net 0\.0' is a member in .* and in .*copy"):
        hf.Population.load([tmp_path, tmp_path / "copy"], Net, **OPTIONS)


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "NaN": ({"score": math.nan}, "score=nan: no save is better or worse than this"),
    "text": ({"score": "a"}, "score='a': give one number, or None"),
    "part": ({"keep": 1.5}, "keep=1.5: give how many saves are left, at least 1"),
    "sparse": ({"extra": torch.eye(2).to_sparse()}, "extra is a tensor that is torch.sparse_coo on cpu"),
    "code": ({"extra": [{"what": lambda: None}]}, "extra/0/what is of class builtins.function, which only code can"),
    "loader": ({"loader": 3}, "loader must have a state_dict, .* got int"),
}


@pytest.mark.parametrize("name", ODD)
def test_invalid_values_are_refused_before_anything_is_written(name: str, tmp_path: Path) -> None:
    pop = population(2)
    options, words = ODD[name]
    with pytest.raises(hf.CheckpointError, match=words):
        pop.save(tmp_path, **options)
    assert list(tmp_path.iterdir()) == []


def test_a_save_that_fails_in_the_background_warns(tmp_path: Path) -> None:
    pop = population(2)
    (tmp_path / "file").write_text("")
    with pytest.raises(hf.CheckpointError, match="could not write a checkpoint, and the last one stands"):
        pop.save(tmp_path / "file")
    with pytest.warns(UserWarning, match=r"a save has failed: .*file could not write a checkpoint"):
        assert isinstance(pop.save(tmp_path / "file", wait=False).exception(), hf.CheckpointError)
    assert pop.save(tmp_path / "good").name == "save-000000000001"


def test_a_save_without_its_files_names_another(tmp_path: Path) -> None:
    pop = population(2)
    pop.save(tmp_path)
    (tmp_path / "save-000000000009").mkdir()
    with pytest.raises(hf.CheckpointError, match=r"manifest.json is missing; another save is .*save-000000000001"):
        hf.load(tmp_path, pop.fused)
    (tmp_path / "save-999999999999").mkdir()
    assert pop.save(tmp_path) == saves(tmp_path)[-1] == tmp_path / "save-1000000000000"


def test_unsupported_optimizers_are_refused(tmp_path: Path) -> None:
    fused = hf.fuse([nn.Linear(4, 3) for _ in range(2)])
    other: Any = torch.optim.SGD(fused.parameters(), lr=0.1)
    hf.save(tmp_path, fused)
    words = r"optimizer must be of hf\.optim, got torch\.optim\.sgd\.SGD, whose state has no rows"
    for use in (hf.save, hf.load):
        with pytest.raises(hf.CheckpointError, match=words):
            use(tmp_path, fused, other)


# Damaged, torn and impossible checkpoints: `make soak` tries more of each.
@pytest.fixture(scope="module")
def trial(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Trial]:
    return Trial(tmp_path_factory.mktemp("saves"))


@settings(
    max_examples=300, deadline=None, derandomize=True, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(name=st.sampled_from([*SURE, "forged"]), seed=st.integers(0, 1 << 20))
def test_every_damage_is_an_error_that_names_the_file(trial: Trial, name: str, seed: int) -> None:
    trial.damage(name, seed)


@pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork")
def test_a_killed_run_is_resumed_and_ends_the_same() -> None:
    command = [sys.executable, "-W", "ignore", "-m", "tests.checkpoint.killed", "--kills", "4"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=1200)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("4 kills of ")


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_a_full_disk_leaves_the_last_save(tmp_path: Path) -> None:
    """A limit of the size of files does in one process what a full disk does in all."""
    code = f"""
import resource, signal
from pathlib import Path
import hfusion as hf
from tests.checkpoint.living import population
pop, root = population(2), Path({str(tmp_path)!r})
pop.save(root)
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
resource.setrlimit(resource.RLIMIT_FSIZE, (1000, resource.RLIM_INFINITY))
try:
    pop.save(root)
except hf.CheckpointError as error:
    assert "the last one stands" in str(error) and "too large" in str(error), error
    assert [path.name for path in root.iterdir()] == ["save-000000000001"], list(root.iterdir())
    hf.load(root, pop.fused)
    print("told")
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout == "told\n", done.stderr


def test_leftovers_of_a_killed_save_are_cleaned_up(tmp_path: Path) -> None:
    pop = population(2)
    leftover = tmp_path / ".aside-abc"
    leftover.mkdir()
    (leftover / "tensors.safetensors").write_bytes(b"torn")
    with pytest.raises(hf.CheckpointError, match="holds no save"):
        hf.load(tmp_path, pop.fused)
    pop.save(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["save-000000000001"]
