"""Checks of peft configurations: which can share an array, and which fields may differ between members."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Collection, Mapping, Sequence
from typing import Any, TypeAlias

from hfusion.core.errors import FusionError

Config: TypeAlias = Any
"""A `peft.LoraConfig`."""

Change: TypeAlias = Mapping[str, Any]
"""Fields of a LoraConfig by name."""

# Fields that may differ between members: they change sizes, which are padded, scales, probabilities or initial values.
OWN = frozenset(
    (
        "r",
        "lora_alpha",
        "lora_dropout",
        "rank_pattern",
        "alpha_pattern",
        "target_modules",
        "exclude_modules",
        "layers_to_transform",
        "layers_pattern",
        "init_lora_weights",
        "base_model_name_or_path",
        "revision",
        "inference_mode",
    )
)
# Fields that must be equal: they change which tensors and modules exist.
COMMON = ("task_type", "bias", "use_rslora", "modules_to_save", "use_dora", "lora_bias", "fan_in_fan_out")
# Fields without influence on the adapter.
_SILENT = frozenset(("peft_type", "auto_mapping", "peft_version", "runtime_config"))
_INITS = (True, False, "gaussian", "orthogonal")


def configs(config: Config, members: int | Sequence[Config | Change]) -> list[Config]:
    """Return ``config`` with the changes in ``members``, for each member. Raises FusionError, ValueError."""
    check(config, "config")
    if isinstance(members, int):
        if members < 1:
            raise ValueError(f"members={members}: give their number, at least 1, or what each has of its own")
        return [copy.deepcopy(config) for _ in range(members)]
    if isinstance(members, str | Mapping) or not isinstance(members, Sequence):
        raise ValueError(
            f"members={members!r}: give their number, or a list with a LoraConfig, or a dict of its fields, for each"
        )
    if not members:
        raise ValueError("members is an empty list; give at least one")
    return [changed(config, member, f"member {index}") for index, member in enumerate(members)]


def changed(config: Config, change: Config | Change, label: str) -> Config:
    """Return ``config`` with the fields of ``change``, or a copy of ``change`` if it is a configuration.

    Raises:
        FusionError: it cannot share an array with ``config``.
    """
    if not isinstance(change, Mapping):
        check(change, label)
        check_common(config, change, label)
        return copy.deepcopy(change)
    fields = {field.name for field in dataclasses.fields(config)}
    for name in change:
        if name not in fields:
            raise ValueError(f"{label}: {name!r} is no field of LoraConfig; those of its own are {sorted(OWN)}")
    new_config = dataclasses.replace(copy.deepcopy(config), **change)
    check(new_config, label)
    check_common(config, new_config, label)
    return new_config


def target_only(config: Config, paths: Collection[str]) -> None:
    """Let a configuration adapt exactly the layers ``paths``, instead of those that it selected before."""
    config.target_modules = set(paths)
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None


def check(config: Config, label: str) -> None:
    """Raise FusionError for a configuration that cannot be fused, ValueError for an object that is no LoraConfig."""
    from peft import LoraConfig

    if not isinstance(config, LoraConfig):
        raise ValueError(f"{label} must be a peft.LoraConfig, got {type(config).__name__}")
    for field in dataclasses.fields(config):
        if field.name in OWN or field.name in COMMON or field.name in _SILENT:
            continue
        value, plain = getattr(config, field.name), _default(field)
        if value and value != plain:
            raise FusionError(
                f"{label}: LoraConfig.{field.name}={value!r} has no form for many adapters of one base in hf.lora; "
                f"leave it at {plain!r}, or train these adapters one after another by peft"
            )
    if config.init_lora_weights not in _INITS:
        raise FusionError(
            f"{label}: init_lora_weights={config.init_lora_weights!r} computes the start of an adapter from the "
            "weights of the base or from data, and most of these change the base, which the members share; take one of "
            f"{', '.join(map(repr, _INITS))}, or prepare adapters by peft, save them as plain LoRA "
            "(path_initial_model_for_weight_conversion) and give their folders to Adapters.load"
        )
    if config.inference_mode:
        raise FusionError(f"{label}: inference_mode=True leaves nothing to train; give inference_mode=False")


def _default(field: dataclasses.Field[Any]) -> Any:
    if field.default is not dataclasses.MISSING:
        return field.default
    return field.default_factory() if field.default_factory is not dataclasses.MISSING else None


def check_common(config: Config, other: Config, label: str) -> None:
    """Raise a FusionError if members with these two configurations would have different tensors or modules."""
    for name in COMMON:
        array_value, value = getattr(config, name), getattr(other, name)
        if _plain(array_value) != _plain(value):
            remedy = (
                "write the scale into lora_alpha: alpha / sqrt(r) is what lora_alpha = alpha * sqrt(r) gives without it"
                if name == "use_rslora"
                else "make an array for each kind, by a call of hf.lora each"
            )
            raise FusionError(
                f"{label} has {name}={value!r}, the array {array_value!r}, and its members have one shape; {remedy}"
            )


def _plain(value: Any) -> Any:
    """Return lists of names as sets, as order does not matter and peft may list a name twice."""
    return frozenset(value) if isinstance(value, list | set | tuple) else value
