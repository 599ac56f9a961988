"""Routing of the values that a space returns, by name, to the functions of a sweep."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn

# Prefixes of addresses such as "optimizer.lr": they name the function that takes a value.
OPTIMIZER, MAKE_MODEL, LOADER, LOSS, SCHEDULER, SWEEP = (
    "optimizer",
    "make_model",
    "loader",
    "loss",
    "scheduler",
    "sweep",
)
# Arguments of hf.sweep itself that a space may choose for each trial.
SWEEP_NAMES = ("optimizer", "epochs", "clip_norm", "accumulate")


@dataclass(frozen=True)
class Receiver:
    """A function that takes values of the space.

    Attributes:
        prefix: its name in an address, as in ``"loss.label_smoothing"``.
        label: its name in errors.
        names: the parameters that it takes by name, except for those that hfusion passes.
        signature: its signature; None if Python knows none, or if only names are checked.
        positional: the number of positional arguments that hfusion passes.
        takes_others: it has ``**kwargs`` or no known signature, so that an address may have any name.
    """

    prefix: str
    label: str
    names: tuple[str, ...]
    signature: inspect.Signature | None = None
    positional: int = 0
    takes_others: bool = False

    @staticmethod
    def of_names(prefix: str, label: str, names: Sequence[str]) -> Receiver:
        """Return a receiver that takes these names only."""
        return Receiver(prefix, label, tuple(names))

    @staticmethod
    def of_function(prefix: str, function: Callable[..., Any], positional: int = 0) -> Receiver:
        """Return a receiver of the parameters after the first ``positional`` ones."""
        signature = _signature(function.forward if isinstance(function, nn.Module) else function)
        if signature is None:
            return Receiver(prefix, prefix, (), None, positional, takes_others=True)
        parameters = list(signature.parameters.values())
        named = [p for p in parameters[positional:] if p.kind in (p.POSITIONAL_OR_KEYWORD, p.KEYWORD_ONLY)]
        others = any(p.kind is p.VAR_KEYWORD for p in parameters)
        return Receiver(prefix, f"{prefix}{signature}", tuple(p.name for p in named), signature, positional, others)

    def check(self, number: int, values: Mapping[str, Any]) -> None:
        """Raise ValueError if a call with these values would miss an argument or have an unexpected one."""
        if self.signature is None:
            return
        try:
            self.signature.bind(*[None] * self.positional, **values)
        except TypeError as error:
            raise ValueError(f"trial {number}: space gives {dict(values)} to {self.label}, which {error}") from error


def route(number: int, values: Mapping[str, Any], receivers: Sequence[Receiver]) -> dict[str, dict[str, Any]]:
    """Return the values of a trial by the prefix of the function that takes them.

    A name that is no parameter of any function goes to ``make_model``, if that has ``**kwargs``.

    Raises:
        ValueError: no function takes a name, several functions do, or one function gets a name twice.
    """
    by_prefix = {receiver.prefix: receiver for receiver in receivers}
    routed: dict[str, dict[str, Any]] = {prefix: {} for prefix in (*by_prefix, LOADER, LOSS, SCHEDULER)}
    for key, value in values.items():
        prefix, name = _address(number, key, by_prefix)
        if name in routed[prefix]:
            raise ValueError(f'trial {number}: space gives {name!r} to {prefix} twice, once as "{prefix}.{name}"')
        routed[prefix][name] = value
    for receiver in receivers:
        receiver.check(number, routed[receiver.prefix])
    return routed


def _address(number: int, key: str, receivers: Mapping[str, Receiver]) -> tuple[str, str]:
    """Return the prefix and the name of a key of the space."""
    prefix, dot, name = key.partition(".")
    if dot and prefix in receivers:
        receiver = receivers[prefix]
        if name not in receiver.names and receiver.signature is None and not receiver.takes_others:
            raise ValueError(f"trial {number}: {receiver.label} takes no {name!r}; it takes {_listed(receiver.names)}")
        return prefix, name
    takers = [receiver for receiver in receivers.values() if key in receiver.names]
    if len(takers) > 1:
        labels = [receiver.label for receiver in takers]
        addresses = " or ".join(f'"{receiver.prefix}.{key}"' for receiver in takers)
        raise ValueError(
            f"trial {number}: {', '.join(labels[:-1])} and {labels[-1]} {'both' if len(takers) == 2 else 'all'} take "
            f"{key!r}: let space give it as {addresses}, or give {'both' if len(takers) == 2 else 'several'}"
        )
    if takers:
        return takers[0].prefix, key
    if receivers[MAKE_MODEL].takes_others:
        return MAKE_MODEL, key
    accepted = "; ".join(f"{receiver.label} takes {_listed(receiver.names)}" for receiver in receivers.values())
    hint = "" if LOADER in receivers else "; loader takes nothing, as it is no function: give loader(batch_size)"
    raise ValueError(f"trial {number}: no function takes {key!r} that space gives: {accepted}{hint}")


def _listed(names: Sequence[str]) -> str:
    return ", ".join(names) or "nothing by name"


def _signature(function: Callable[..., Any]) -> inspect.Signature | None:
    """Return the signature of a function; None if Python knows none, as for some built-in functions."""
    try:
        return inspect.signature(function)
    except (TypeError, ValueError):
        return None
