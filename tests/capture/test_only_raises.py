"""Which conditions only decide whether to raise, by the bytecode of the code that asks."""

from __future__ import annotations

import sys
import warnings
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from hfusion.capture.python_reads import truth_without_raise
from tests.asserting import asserts, asserts_by_bool, asserts_not, asserts_with_text


class Asked:
    """A value that notes what is read of the code that asks for its truth."""

    def __init__(self, truth: bool) -> None:
        self.truth, self.read = truth, "not asked"

    def __bool__(self) -> bool:
        self.read = truth_without_raise(sys._getframe(1))  # type: ignore[assignment]
        return self.truth

    item = __bool__


def raises(value: Any) -> int:
    if value:
        raise ValueError(f"{[k * 2 for k in range(3)]}")
    return 1


def raises_unless(value: Any) -> int:
    if not value:
        raise ValueError
    return 1


def of_a_call(value: Any) -> None:
    if value.item():
        raise ValueError


def of_a_call_negated(value: Any) -> int:
    if not value.item():
        raise ValueError
    return 1


def in_a_region(value: Any) -> int:
    with nullcontext():
        if value:
            raise ValueError
    return 1


def in_the_else(value: Any) -> None:
    if value:
        print()
    else:
        raise ValueError


def in_a_loop(value: Any) -> None:
    for _ in range(2):
        if value:
            raise ValueError


def one_of_two(value: Any) -> None:
    if value or len("") == 1:
        raise ValueError


def both_of_two(value: Any) -> None:
    if value and len("") == 0:
        raise ValueError


def caught(value: Any) -> int:
    try:
        if value:
            raise ValueError
    except ValueError:
        return 2
    return 1


def warns(value: Any) -> None:
    if value:
        warnings.warn("text", stacklevel=1)


def returns(value: Any) -> int:
    return 1 if value else 2


def kept(value: Any) -> bool:
    result = value and True
    return bool(result)


READ: dict[Callable[[Any], object], bool | None] = {
    raises: False,
    raises_unless: True,
    asserts: True,
    asserts_not: False,
    asserts_by_bool: True,
    asserts_with_text: True,
    of_a_call: False,
    of_a_call_negated: True,
    in_a_region: False,
    in_the_else: True,
    in_a_loop: False,
    one_of_two: False,
    caught: None,
    warns: None,
    both_of_two: None,
    returns: None,
    kept: None,
}


@pytest.mark.parametrize("function", READ, ids=lambda function: function.__name__)
def test_truth_without_raise(function: Callable[[Any], object]) -> None:
    # Python specializes the instructions of code that runs often.
    for _ in range(50):
        value = Asked(bool(READ[function]))
        function(value)
        assert value.read is READ[function]
