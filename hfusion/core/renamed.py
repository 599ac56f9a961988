"""Former names of arguments and attributes, accepted for one version with a DeprecationWarning."""

from __future__ import annotations

import functools
import warnings
from collections.abc import Callable, Mapping
from typing import Any, ParamSpec, TypeVar

P = ParamSpec("P")
R = TypeVar("R")


def renamed_arguments(**names: str) -> Callable[[Callable[P, R]], Callable[P, R]]:
    """Return a decorator: the function also takes keyword arguments by their former names.

    Args:
        names: the present name of each former one.

    Example:
        >>> import warnings
        >>> warnings.simplefilter("ignore")
        >>> @renamed_arguments(size="count")
        ... def repeat(text, count=1):
        ...     return text * count
        >>> repeat("a", size=2)
        'aa'
    """

    def decorate(function: Callable[P, R]) -> Callable[P, R]:
        @functools.wraps(function)
        def called(*args: P.args, **kwargs: P.kwargs) -> R:
            if not names.keys().isdisjoint(kwargs):
                renamed: dict[str, Any] = with_present_names(kwargs, names, function.__qualname__, stacklevel=3)
                return function(*args, **renamed)
            return function(*args, **kwargs)

        return called

    return decorate


def with_present_names(
    values: Mapping[str, Any], names: Mapping[str, str], owner: str, *, stacklevel: int = 2
) -> dict[str, Any]:
    """Return ``values`` with present names in place of former ones, and warn of these.

    Raises:
        TypeError: a value is given by both of its names.
    """
    renamed = dict(values)
    for former in [name for name in values if name in names]:
        present = names[former]
        if present in renamed:
            raise TypeError(f"{owner} got both {former!r} and {present!r}, which are one: give {present!r}")
        warn_of_former_name(former, present, owner, stacklevel=stacklevel + 1)
        renamed[present] = renamed.pop(former)
    return renamed


def warn_of_former_name(former: str, present: str, owner: str, *, stacklevel: int = 3) -> None:
    """Warn that something of ``owner`` has another name now, at the line that used the former one."""
    text = f"{owner}: {former!r} is now {present!r}; the next version knows only {present!r}"
    warnings.warn(text, DeprecationWarning, stacklevel=stacklevel)
