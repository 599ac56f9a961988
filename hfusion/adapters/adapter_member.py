"""A member of an array of adapters: a peft model whose layers have room for the largest rank of the array.

It computes the same as a peft model of its own rank, and is saved and merged as such a model.
"""

from __future__ import annotations

import copy
import re
from collections import Counter
from collections.abc import Mapping
from typing import Any, NoReturn, cast

from torch import nn

from hfusion.adapters.configs import target_only
from hfusion.adapters.layers import NAME, cut, dropout, layers, lora_names
from hfusion.core.copies import module_copy
from hfusion.core.errors import FusionError

PREFIX = "base_model.model."


class AdapterMember(nn.Module):
    """Overrides of the peft class that a member derives from."""

    caches: Mapping[str, bool]
    """The ``use_cache`` setting of modules of the base that have one, by path: it is turned off in a member."""

    @property
    def padded(self) -> frozenset[str]:
        """The names of the tensors that hold zeros where the rank is less than the largest of the array."""
        return lora_names(layers(self))

    def plain(self) -> nn.Module:
        """Return this adapter as a plain peft model of its own rank: its tensors are copied, the base's are shared."""
        return plain(self)

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        """Save the adapter in its own rank, as peft does, for ``PeftModel.from_pretrained(base, save_directory)``."""
        cast(Any, plain(self)).save_pretrained(save_directory, **options)

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> Any:
        """Same as in peft, but in a copy of the base: the base of the array is not changed."""
        return cast(Any, plain(self, own_base=True)).merge_and_unload(*args, **kwargs)

    def merge_adapter(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise a FusionError, as merging would write into the base that all members share."""
        raise FusionError(
            "merge_adapter would write into the base that all members of the array share; take merge_and_unload, which "
            "copies it, or member.plain(), a peft model of its own"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is created dynamically, so pickle cannot find it by name.
        return _blank, (kind_of(self),), self.__dict__


_classes: dict[Any, Any] = {}


def member_class(kind: Any) -> Any:
    """Return the class of members for ``kind``, a class of peft models."""
    if kind not in _classes:
        _classes[kind] = type(kind.__name__, (AdapterMember, kind), {"__doc__": AdapterMember.__doc__})
    return _classes[kind]


def kind_of(member: nn.Module) -> type[nn.Module]:
    """Return the peft class from which the class of a member was derived."""
    peft_class: type[nn.Module] = type(member).__mro__[2]
    return peft_class


def _blank(kind: type[nn.Module]) -> Any:
    member_type = member_class(kind)
    return member_type.__new__(member_type)


def plain(member: AdapterMember, own_base: bool = False) -> nn.Module:
    """Return a peft model with this adapter only, in its own rank. ``own_base``: copy the base as well."""
    frozen = [] if own_base else [tensor for tensor in member.parameters() if not tensor.requires_grad]
    model = module_copy(member, {id(tensor): tensor for tensor in frozen})
    caches: Mapping[str, bool] = vars(model).pop("caches")
    model.__class__ = kind_of(member)
    for path, value in caches.items():
        cast(Any, model.get_submodule(f"{PREFIX}{path}".rstrip("."))).config.use_cache = value
    adapter_layers = layers(model)
    sizes = {path: cut(layer) for path, layer in adapter_layers.items()}
    for path, (size, _) in sizes.items():
        if not size:
            _take_out(model, path, adapter_layers[path])
    cast(Any, model).base_model.peft_config[NAME] = _own_config(model, adapter_layers, sizes)
    return model


def _take_out(model: nn.Module, path: str, layer: Any) -> None:
    parent, _, name = path.rpartition(".")
    setattr(model.get_submodule(parent), name, layer.base_layer)
    names = cast(Any, model).base_model.targeted_module_names
    names.remove(path.removeprefix(PREFIX))


def _own_config(model: nn.Module, adapter_layers: Mapping[str, Any], sizes: Mapping[str, tuple[int, float]]) -> Any:
    """Return the LoraConfig from which peft creates exactly the adapter layers that this member has."""
    config = copy.deepcopy(cast(Any, model).peft_config[NAME])
    active_sizes = {path.removeprefix(PREFIX): terms for path, terms in sizes.items() if terms[0]}
    if not active_sizes:
        raise FusionError("this member has no adapter in any layer: there is nothing to save")
    if len(active_sizes) < len(sizes):
        target_only(config, active_sizes)
    config.r, config.rank_pattern = _most({path: size for path, (size, _) in active_sizes.items()})
    config.lora_alpha, config.alpha_pattern = _most({path: alpha for path, (_, alpha) in active_sizes.items()})
    config.lora_dropout = max(dropout(adapter_layers[PREFIX + path]) for path in active_sizes)
    return config


def _most(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the most common value, and a pattern of the other values by path."""
    common, _ = Counter(values.values()).most_common(1)[0]
    return common, patterns({path: value for path, value in values.items() if value != common})


def patterns(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pattern of ranks or alphas for peft, whose keys are regular expressions that may match anywhere."""
    return {f"^{re.escape(path)}": value for path, value in values.items()}
