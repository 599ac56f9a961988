"""Ways in which a save may be damaged, drawn at random; ``python -m tests.checkpoint.damage`` tries many."""

from __future__ import annotations

import argparse
import json
import os
import random
import shutil
import struct
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from hashlib import blake2b
from pathlib import Path
from typing import Any

import hfusion as hf
from hfusion.checkpoint.files import CHECKSUM, MANIFEST, TENSORS
from tests.checkpoint.living import OPTIONS, Batches, Net, population, train

FILES = (MANIFEST, CHECKSUM, TENSORS)
Damage = Callable[[Path, Path, random.Random], None]


def truncated(save: Path, other: Path, draw: random.Random) -> None:
    file = save / draw.choice(FILES)
    os.truncate(file, draw.randrange(file.stat().st_size))


def flipped(save: Path, other: Path, draw: random.Random) -> None:
    file = save / draw.choice(FILES)
    content = bytearray(file.read_bytes())
    for _ in range(draw.choice([1, 1, 1, 5])):
        content[draw.randrange(len(content))] ^= 1 << draw.randrange(8)
    if bytes(content) == file.read_bytes():
        content[0] ^= 1
    file.write_bytes(content)


def longer(save: Path, other: Path, draw: random.Random) -> None:
    with open(save / draw.choice(FILES), "ab") as file:
        file.write(draw.randbytes(draw.choice([1, 8, 4096])))


def missing(save: Path, other: Path, draw: random.Random) -> None:
    (save / draw.choice(FILES)).unlink()


def swapped(save: Path, other: Path, draw: random.Random) -> None:
    first, second = draw.sample(FILES, 2)
    os.rename(save / first, save / "aside")
    os.rename(save / second, save / first)
    os.rename(save / "aside", save / second)


def of_another(save: Path, other: Path, draw: random.Random) -> None:
    """A file of another save; its checksum does not tell."""
    for name in draw.choice([(MANIFEST,), (CHECKSUM,), (TENSORS,), (MANIFEST, CHECKSUM)]):
        shutil.copy(other / name, save / name)


def no_file(save: Path, other: Path, draw: random.Random) -> None:
    """A link that leads elsewhere, a pipe that never ends, a folder."""
    file = save / draw.choice(FILES)
    file.unlink()
    kind = draw.randrange(3)
    if kind == 0:
        file.symlink_to(other / file.name)
    elif kind == 1:
        os.mkfifo(file)
    else:
        file.mkdir()


def huge_header(save: Path, other: Path, draw: random.Random) -> None:
    content = bytearray((save / TENSORS).read_bytes())
    content[:8] = struct.pack("<Q", draw.choice([len(content), 1 << 40, (1 << 64) - 1, (1 << 63)]))
    (save / TENSORS).write_bytes(content)
    if draw.random() < 0.5:
        _signed(save, lambda manifest: {**manifest, "header": "0" * 64})


def other_version(save: Path, other: Path, draw: random.Random) -> None:
    value = draw.choice([0, 1, 99, -1, "1.0", None, [1], 1e308])
    key = draw.choice(["version", "format"])
    _signed(save, lambda manifest: {**manifest, key: value})


def nested(save: Path, other: Path, draw: random.Random) -> None:
    depth = draw.choice([2000, 100_000])
    text = (save / MANIFEST).read_text()
    deep = draw.choice(['{"a":', "["]) * depth
    _sign(save, (deep if draw.random() < 0.5 else text.replace('"body": {', f'"deep": {deep}, "body": {{', 1)).encode())


SURE: dict[str, Damage] = {
    function.__name__: function
    for function in (
        truncated, flipped, longer, missing, swapped, of_another, no_file, huge_header, other_version, nested
    )
}  # fmt: skip


def forged(save: Path, other: Path, draw: random.Random) -> None:
    """Replace a value of the manifest and correct the checksum. Obvious nonsense must be reported."""
    odds: list[Any] = [None, -1, 1 << 70, 1e300, "", "../../etc/passwd", [], {}, [[[]]], True, {"~": "code", "v": "x"},
                       {"~": "tensor", "v": "../x"}, {"~": "dict", "v": [[[1], 2]]}, "F64", "a" * 5000]  # fmt: skip
    odd = draw.choice(odds)

    def change(manifest: Any) -> Any:
        places = list(_places(manifest))
        path = draw.choice(places)
        at = manifest
        for key in path[:-1]:
            at = at[key]
        if draw.random() < 0.3 and isinstance(at, dict):
            del at[path[-1]]
        else:
            at[path[-1]] = odd
        return manifest

    _signed(save, change)


def _places(value: Any, path: tuple[Any, ...] = ()) -> Any:
    items = value.items() if isinstance(value, dict) else enumerate(value) if isinstance(value, list) else ()
    for key, item in items:
        yield (*path, key)
        if len(path) < 6:
            yield from _places(item, (*path, key))


def _signed(save: Path, change: Callable[[Any], Any]) -> None:
    _sign(save, json.dumps(change(json.loads((save / MANIFEST).read_text()))).encode())


def _sign(save: Path, text: bytes) -> None:
    (save / MANIFEST).write_bytes(text)
    (save / CHECKSUM).write_bytes(blake2b(text).hexdigest().encode())


class Trial:
    """Two saves, and a place for copies that are damaged and loaded."""

    def __init__(self, folder: Path) -> None:
        self._copy = folder / "damaged"
        self._pop, batches = population(2), Batches()
        train(self._pop, batches, 2)
        self._saves = [self._pop.save(folder / "one", loader=batches)]
        train(self._pop, batches, 1)
        self._saves.append(self._pop.save(folder / "other", loader=batches))
        self.whole = 0

    def damage(self, name: str, seed: int) -> None:
        """Damage a copy and load it. Raises AssertionError unless that is a CheckpointError that names a file."""
        shutil.rmtree(self._copy, ignore_errors=True)
        shutil.copytree(self._saves[0], self._copy)
        draw = random.Random(seed)
        (SURE | {"forged": forged})[name](self._copy, self._saves[1], draw)
        before = {key: value.clone() for key, value in self._pop.fused.state_dict().items()}
        try:
            if name == "forged" and draw.random() < 0.2:
                hf.Population.load(self._copy, Net, random=False, **OPTIONS)
            else:
                self._load()
        except hf.CheckpointError as error:
            message = str(error)
        except Exception as error:
            raise AssertionError(f"{name} with seed {seed}: {type(error).__name__}: {error}") from error
        else:
            # Another learning rate, another age: a save like any other.
            assert name == "forged", f"{name} with seed {seed} was loaded without a word"
            self.whole += 1
            return
        assert str(self._copy) in message, f"{name} {seed}: {message}"
        after = self._pop.fused.state_dict()
        assert all(before[key].equal(after[key]) for key in before), f"{name} {seed}: written"

    def _load(self) -> None:
        pop = self._pop
        hf.load(self._copy, pop.fused, pop.optimizer, scheduler=pop.scheduler, loader=Batches(), random=False)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--files", type=int, default=10_000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    names, counts = [*SURE, "forged"], Counter[str]()
    start = time.monotonic()
    with tempfile.TemporaryDirectory() as folder:
        trial = Trial(Path(folder))
        for number in range(options.files):
            name = names[number % len(names)]
            trial.damage(name, options.seed + number)
            counts[name] += 1
        seconds = time.monotonic() - start
        kinds = ", ".join(f"{name} {count}" for name, count in counts.items())
        print(f"{options.files} damaged checkpoints in {seconds:.0f} s: {kinds}")
        print(f"{options.files - trial.whole} CheckpointErrors that name the file, {trial.whole} forged ones that load")


if __name__ == "__main__":
    main()
