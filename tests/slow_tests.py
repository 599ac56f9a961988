"""The tests that `make test` leaves out and `make test-all` runs: the list in slow_tests.txt, and how it is made.

Of a function in the list, `make test` still runs the rows that find a planted fault: see planted_faults.py.

``pytest --junitxml=build/junit.xml``, then ``python -m tests.slow_tests build/junit.xml --minutes 7 --workers 2``
leaves out the slowest test functions until the others take no longer; each file keeps its fastest one.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Collection, Mapping
from functools import cache
from itertools import chain
from pathlib import Path
from xml.etree import ElementTree

LIST, RECORD = Path(__file__).with_suffix(".txt"), Path(__file__).with_name("planted_faults.json")


def function_of(test: str) -> str:
    """Return a test's id without its parameters."""
    return test.partition("[")[0]


@cache
def slow_functions() -> Collection[str]:
    """Return the ids of the functions that are left out."""
    return frozenset(LIST.read_text().split("\n")) - {""}


@cache
def finders() -> Collection[str]:
    """Return the ids of the tests that find planted faults."""
    return frozenset(chain(*json.loads(RECORD.read_text()).values()))


def is_slow(test: str) -> bool:
    """Return whether a test is left out; a row that finds a planted fault is not."""
    return function_of(test) in slow_functions() and not ("[" in test and test in finders())


def chosen(seconds: Mapping[str, float], budget: float, wanted: Collection[str] = ()) -> list[str]:
    """Return the functions to leave out, so that the others take ``budget`` seconds in all.

    Args:
        seconds: of each function.
        wanted: functions that stay until all others that take a quarter of their time are left out.

    >>> chosen({"a.py::one": 1.0, "a.py::two": 9.0, "b.py::one": 5.0}, budget=6.0)
    ['a.py::two']
    """
    left = Counter(name.partition("::")[0] for name in seconds)
    total, found = sum(seconds.values()), []
    for name in sorted(seconds, key=lambda name: -seconds[name] / (4 if name in wanted else 1)):
        file = name.partition("::")[0]
        if total > budget and left[file] > 1:
            left[file] -= 1
            total -= seconds[name]
            found.append(name)
    return sorted(found)


def measured(report: Path) -> dict[str, float]:
    """Return the seconds of each function in a JUnit report of pytest."""
    seconds: Counter[str] = Counter()
    for case in ElementTree.parse(report).iter("testcase"):
        path = case.attrib["classname"].replace(".", "/") + ".py"
        seconds[function_of(f"{path}::{case.attrib['name']}")] += float(case.attrib["time"])
    return dict(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("report", type=Path, help="a JUnit report of the whole suite")
    parser.add_argument("--minutes", type=float, default=7.0, help="that the other tests may take")
    parser.add_argument("--workers", type=int, default=2)
    options = parser.parse_args()
    found = chosen(measured(options.report), 60 * options.minutes * options.workers, finders())
    LIST.write_text("".join(f"{name}\n" for name in found))
    print(f"{len(found)} functions are left out")


if __name__ == "__main__":
    main()
