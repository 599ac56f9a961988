"""``hf.lora``: members are adapters of one base model, which the array stores once."""

from __future__ import annotations

import copy
import dataclasses
import re
from collections import Counter
from collections.abc import Collection, Iterable, Mapping, Sequence
from contextlib import nullcontext
from functools import cache
from typing import Any, NoReturn, TypeAlias, cast

import torch
from torch import Tensor, nn

from hfusion.capture.registered_tensors import check_materialized
from hfusion.core.errors import FusionError
from hfusion.core.member_table import is_row
from hfusion.core.memory import module_copy
from hfusion.device.backend import draws_kept


def lora(
    base: nn.Module,
    config: Config,
    members: int | Sequence[Config | Change] = 1,
    *,
    seeds: Sequence[int] | None = None,
    max_rank: int | None = None,
    autocast_adapter_dtype: bool = True,
) -> Adapters:
    """Make many LoRA adapters of one frozen base: a list of peft models for `hfusion.fuse`, `Population` and `Task`.

    Member b starts as ``peft.get_peft_model(base, config_b)``, and trains as that model alone. All members have the
    same parameters of the base, so an array stores them once, without a copy. The base is not changed.

    Args:
        base: any model that peft adapts, such as those of transformers. It computes equal inputs once for all members,
            and stacked inputs as one batch.
        config: a `peft.LoraConfig`.
        members: the number of members; or for each member a LoraConfig, or a dict of the fields that differ from
            ``config``. Members may differ in r, lora_alpha, lora_dropout, rank_pattern, alpha_pattern,
            init_lora_weights, and in target_modules and the other fields that choose layers. Smaller ranks are padded
            with zeros, which stay zero.
        seeds: one per member: its adapter is initialised after ``torch.manual_seed(seed)``, and the caller's random
            state is restored. By default adapters are initialised one after the other.
        max_rank: the largest rank that members may have, including members that join later.
        autocast_adapter_dtype: as in `peft.get_peft_model`.

    Raises:
        FusionError: a configuration cannot be fused, or members differ in other fields.
        ValueError: not a LoraConfig, an unknown field, or different numbers of members and seeds.
        ImportError: peft is not installed.

    Example:
        >>> import torch, hfusion as hf
        >>> from peft import LoraConfig
        >>> base = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> adapters = hf.lora(base, LoraConfig(target_modules=["0"]), [{"r": 2}, {"r": 4}], seeds=[0, 1])
        >>> hf.fuse(adapters)(torch.zeros(3, 8)).shape
        torch.Size([2, 3, 2])
    """
    try:
        from peft.tuners.tuners_utils import BaseTunerLayer
    except ImportError as error:
        raise ImportError("hf.lora needs peft: pip install peft (extra: hfusion[lora])") from error
    member_configs = configs(config, members)
    if seeds is not None and not (isinstance(seeds, Sequence) and all(map(is_row, seeds))):
        raise ValueError(f"seeds={seeds!r}: give a list of whole numbers, one per member")
    if max_rank is not None and not is_row(max_rank):
        raise ValueError(f"max_rank={max_rank!r}: give a whole number, or None")
    if seeds is not None and len(seeds) != len(member_configs):
        raise ValueError(f"{len(seeds)} seeds for {len(member_configs)} members: give one for each")
    if not isinstance(base, nn.Module):
        raise FusionError(f"base must be a torch.nn.Module, got {type(base).__name__}")
    check_materialized(base, "base")
    for path, module in base.named_modules():
        if isinstance(module, BaseTunerLayer):
            raise FusionError(
                f"base has an adapter already, in {path or '(root)'}; give the model without it: model.unload(), or "
                "merge_and_unload() where the adapters are to be part of the base"
            )
    frozen = FrozenBase(base, autocast_adapter_dtype)
    member_seeds: Sequence[int | None] = seeds or [None] * len(member_configs)
    adapted = [
        frozen.adapted(member_config, seed) for member_config, seed in zip(member_configs, member_seeds, strict=True)
    ]
    return Adapters(frozen, _template(frozen, member_configs[0], adapted, max_rank), config, adapted)


class Adapters(list[Any]):
    """The members that `hfusion.lora` returns: peft models around one base. `member` and `load` create more.

    A member, ``fused[b]``, ``pop.models[row]`` and the model that ``pop.stop(row)`` returns have ``save_pretrained``,
    ``merge_and_unload`` and ``plain()``. They act on this adapter alone, in its own rank.

    Example:
        >>> import torch, hfusion as hf
        >>> from peft import LoraConfig
        >>> base = torch.nn.Sequential(torch.nn.Linear(8, 4), torch.nn.ReLU(), torch.nn.Linear(4, 2))
        >>> adapters = hf.lora(base, LoraConfig(target_modules=["0"]), 2, seeds=[0, 1])
        >>> len(adapters), type(adapters.member(seed=2)).__name__
        (2, 'PeftModel')
    """

    def __init__(
        self, frozen: FrozenBase, template: AdapterMember, config: Config, adapted: Sequence[nn.Module]
    ) -> None:
        self._frozen, self._template, self._config = frozen, template, config
        super().__init__(self._padded(model, f"member {index}") for index, model in enumerate(adapted))

    def __repr__(self) -> str:
        ranks = [int(max(layer.rank for layer in layers(member).values())) for member in self]
        return f"Adapters({len(self)} of one {type(self._frozen.base).__name__}, ranks {ranks})"

    def member(self, config: Config | None = None, *, seed: int | None = None, **own: Any) -> AdapterMember:
        """Return one more member: ``pop.start(row, adapters.member(r=4, seed=7), lr=1e-3)``.

        Args:
            config: a LoraConfig; by default the one of the array.
            seed: as in `hfusion.lora`.
            own: fields of the config to change.

        Raises:
            FusionError: it does not fit the array, such as a larger rank, or a layer that no initial member adapts.
        """
        label = "the member that joins"
        member_config = changed(self._config, changed(self._config if config is None else config, own, label), label)
        return self._padded(self._frozen.adapted(member_config, seed), label)

    def load(self, directory: Any) -> AdapterMember:
        """Return a member that continues from an adapter that peft, or a member's ``save_pretrained``, has saved.

        Raises:
            FusionError: it does not fit the array, see `member`.
        """
        from peft import LoraConfig, PeftModel

        config = LoraConfig.from_pretrained(directory)
        config.inference_mode = False
        check_config(config, str(directory))
        check_common(cast(Any, self._template).peft_config[NAME], config, str(directory))
        with draws_kept():
            model = PeftModel.from_pretrained(self._frozen.copy(), directory, is_trainable=True)
        return self._padded(self._frozen.part(model), str(directory))

    @torch.no_grad()
    def _padded(self, model: nn.Module, label: str) -> AdapterMember:
        """Return a member that computes the same as the peft model ``model``, padded to the ranks of the array."""
        member = cast(AdapterMember, self._frozen.copy_of(self._template))
        padded_layers, source_layers = layers(member), layers(model)
        for path in source_layers:
            if path not in padded_layers:
                raise FusionError(
                    f"{label} adapts {path}, which none of the members adapts that the array was made with; make it "
                    "with a member that does"
                )
            fill(padded_layers[path], source_layers[path], f"{label}, {path}")
        tensors = dict([*member.named_parameters(), *member.named_buffers()])
        for name, source in [*model.named_parameters(), *model.named_buffers()]:
            if name in tensors and tensors[name] is not source:
                # The rows and columns behind its rank stay zero, as in the template.
                tensors[name][tuple(map(slice, source.shape))].copy_(source)
        trained = {name for name, tensor in model.named_parameters() if tensor.requires_grad}
        trained |= lora_names(padded_layers.keys() - source_layers.keys())
        for name, tensor in member.named_parameters():
            if tensor.requires_grad and name not in trained:
                raise FusionError(
                    f"{label} does not train {name}, which others of the array do: with bias, lora_bias or use_dora "
                    "all members adapt the same layers; give them the same target_modules"
                )
        return member


class FrozenBase:
    """A base model whose frozen parameters are the same objects in every copy of it."""

    def __init__(self, base: nn.Module, autocast: bool) -> None:
        self._autocast = autocast
        # Buffers of the state dict, such as running statistics, are separate for each member, as forward may write to
        # them. Others hold what can be computed again, such as masks.
        own = {id(tensor) for tensor in base.state_dict(keep_vars=True).values()}
        memo: dict[int, Tensor] = {id(buffer): buffer for buffer in base.buffers() if id(buffer) not in own}
        for parameter in base.parameters():
            memo[id(parameter)] = nn.Parameter(parameter.detach(), requires_grad=False)
        self._shared = {id(tensor): tensor for tensor in memo.values()}
        # Copy the modules, as peft changes those of the base that it is given.
        self.base = module_copy(base, memo)
        self.caches = {
            path: bool(module.config.use_cache)
            for path, module in cast(Any, base).named_modules()
            if getattr(getattr(module, "config", None), "use_cache", None) is not None
        }

    def copy(self) -> Any:
        """Return a copy of the base that shares its frozen parameters."""
        model = self.copy_of(self.base)
        # Key-value caches are of no use in training, and a graph cannot return them.
        for path in self.caches:
            cast(Any, model.get_submodule(path)).config.use_cache = False
        return model

    def copy_of(self, model: Any) -> Any:
        """Return a copy of a model that contains the base or a copy of it, sharing the same frozen parameters."""
        return module_copy(model, dict(self._shared))

    def adapted(self, config: Config, seed: int | None) -> nn.Module:
        """Return the peft model of the base and ``config``."""
        from peft import get_peft_model

        # peft writes into configurations.
        config = copy.deepcopy(config)
        with draws_kept() if seed is not None else nullcontext():
            if seed is not None:
                torch.manual_seed(seed)
            return self.part(get_peft_model(self.copy(), config, autocast_adapter_dtype=self._autocast))

    def part(self, model: nn.Module) -> nn.Module:
        """Return ``model`` with its own copies of base parameters that it trains, as with ``bias="all"``."""
        copies: dict[int, nn.Parameter] = {}
        for module in model.modules():
            for name, parameter in module.named_parameters(recurse=False):
                if id(parameter) in self._shared and parameter.requires_grad:
                    if id(parameter) not in copies:
                        copies[id(parameter)] = nn.Parameter(parameter.detach().clone())
                    setattr(module, name, copies[id(parameter)])
        for tensor in self._shared.values():
            if isinstance(tensor, nn.Parameter):
                tensor.requires_grad_(False)
        return model


def _template(frozen: FrozenBase, config: Config, adapted: Sequence[nn.Module], max_rank: int | None) -> AdapterMember:
    """Return the template of the members: all layers that any of them adapts, with room for the largest rank."""
    from peft.tuners._buffer_dict import BufferDict

    layers_by_member = [layers(model) for model in adapted]
    ranks: dict[str, int] = {}
    for member_layers in layers_by_member:
        for path, layer in member_layers.items():
            ranks[path] = max(ranks.get(path, 0), rank(layer))
    largest_rank = max(ranks.values())
    if max_rank is not None:
        if max_rank < largest_rank:
            raise ValueError(f"max_rank={max_rank} is less than the rank {largest_rank} of a member")
        ranks = dict.fromkeys(ranks, max_rank)
    chosen = copy.deepcopy(config)
    target_only(chosen, {path.removeprefix(PREFIX) for path in ranks})
    chosen.rank_pattern = patterns({path.removeprefix(PREFIX): size for path, size in ranks.items()})
    chosen.lora_dropout = max(dropout(layer) for member_layers in layers_by_member for layer in member_layers.values())
    chosen.init_lora_weights = True
    template: Any = frozen.adapted(chosen, 0)
    for layer in layers(template).values():
        for _, _, room in _rooms(layer):
            nn.init.zeros_(room)
        # The scale, rank and alpha become buffers.
        device = next(layer.parameters()).device
        layer.scaling = BufferDict({NAME: torch.zeros((), dtype=torch.float64, device=device)}, persistent=True)
        layer.register_buffer("rank", torch.zeros((), dtype=torch.int64, device=device))
        layer.register_buffer("alpha", torch.zeros((), dtype=torch.float64, device=device))
    # Attributes that rebuild a member, except those stored in its buffers.
    saved_config = copy.deepcopy(cast(Any, adapted[0]).peft_config[NAME])
    if not all(member_layers.keys() == ranks.keys() for member_layers in layers_by_member):
        target_only(saved_config, chosen.target_modules)
    template.base_model.peft_config[NAME] = saved_config
    template.__class__ = member_class(template.__class__)
    template.caches = frozen.caches
    return cast(AdapterMember, template)


# A member of an array of adapters: a peft model whose layers have room for the largest rank of the array.

PREFIX = "base_model.model."


class AdapterMember(nn.Module):
    """Overrides of the peft class that a member derives from."""

    peft_class: Any
    """The class of peft that the class of the member derives from."""

    caches: Mapping[str, bool]
    """The ``use_cache`` setting of modules of the base that have one, by path: it is turned off in a member."""

    @property
    def padded(self) -> frozenset[str]:
        """The names of the tensors that hold zeros where the rank is less than the largest of the array."""
        return lora_names(layers(self))

    def plain(self, *, own_base: bool = False) -> Any:
        """Return this adapter as a plain peft model of its own rank, whose tensors are copies.

        own_base: copy those of the base, too, in place of sharing them.
        """
        frozen = [] if own_base else [tensor for tensor in self.parameters() if not tensor.requires_grad]
        model: Any = module_copy(self, {id(tensor): tensor for tensor in frozen})
        caches: Mapping[str, bool] = vars(model).pop("caches")
        model.__class__ = self.peft_class
        for path, value in caches.items():
            model.get_submodule(f"{PREFIX}{path}".rstrip(".")).config.use_cache = value
        adapter_layers = layers(model)
        sizes = {path: cut(layer) for path, layer in adapter_layers.items()}
        for path, (size, _) in sizes.items():
            if not size:
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, adapter_layers[path].base_layer)
                model.base_model.targeted_module_names.remove(path.removeprefix(PREFIX))
        # The LoraConfig from which peft creates exactly the adapter layers that this member has.
        config = copy.deepcopy(model.peft_config[NAME])
        active_sizes = {path.removeprefix(PREFIX): terms for path, terms in sizes.items() if terms[0]}
        if not active_sizes:
            raise FusionError("this member has no adapter in any layer: there is nothing to save")
        if len(active_sizes) < len(sizes):
            target_only(config, active_sizes)
        config.r, config.rank_pattern = _most({path: size for path, (size, _) in active_sizes.items()})
        config.lora_alpha, config.alpha_pattern = _most({path: alpha for path, (_, alpha) in active_sizes.items()})
        config.lora_dropout = max(dropout(adapter_layers[PREFIX + path]) for path in active_sizes)
        model.base_model.peft_config[NAME] = config
        return model

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        """Save the adapter in its own rank, as peft does, for ``PeftModel.from_pretrained(base, save_directory)``."""
        self.plain().save_pretrained(save_directory, **options)

    def merge_and_unload(self, *args: Any, **kwargs: Any) -> Any:
        """Same as in peft, but in a copy of the base: the base of the array is not changed."""
        return self.plain(own_base=True).merge_and_unload(*args, **kwargs)

    def merge_adapter(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Raise a FusionError, as merging would write into the base that all members share."""
        raise FusionError(
            "merge_adapter would write into the base that all members of the array share; take merge_and_unload, which "
            "copies it, or member.plain(), a peft model of its own"
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        # The class is created dynamically, so pickle cannot find it by name.
        return _blank, (self.peft_class,), self.__dict__


@cache
def member_class(kind: Any) -> Any:
    """Return the class of members for ``kind``, a class of peft models."""
    return type(kind.__name__, (AdapterMember, kind), {"__doc__": AdapterMember.__doc__, "peft_class": kind})


def _blank(kind: Any) -> Any:
    return nn.Module.__new__(member_class(kind))


def _most(values: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Return the most common value, and a pattern of the other values by path."""
    common, _ = Counter(values.values()).most_common(1)[0]
    return common, patterns({path: value for path, value in values.items() if value != common})


def patterns(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return a pattern of ranks or alphas for peft, whose keys are regular expressions that may match anywhere."""
    return {f"^{re.escape(path)}": value for path, value in values.items()}


# Checks of peft configurations: which can share an array, and which fields may differ between members.

Config: TypeAlias = Any
"""A `peft.LoraConfig`."""

Change: TypeAlias = Mapping[str, Any]
"""Fields of a LoraConfig by name."""

# Fields that choose the layers that a member adapts.
_LAYERS = ("target_modules", "exclude_modules", "layers_to_transform", "layers_pattern")
# Fields of sizes, which are padded, scales and probabilities.
_SIZED = ("r", "lora_alpha", "lora_dropout", "rank_pattern", "alpha_pattern")
# Fields that may differ between members.
OWN = frozenset((*_LAYERS, *_SIZED, "init_lora_weights", "base_model_name_or_path", "revision", "inference_mode"))
# Fields that must be equal: they change which tensors and modules exist.
COMMON = ("task_type", "bias", "use_rslora", "modules_to_save", "use_dora", "lora_bias", "fan_in_fan_out")
# Fields without influence on the adapter.
_SILENT = frozenset(("peft_type", "auto_mapping", "peft_version", "runtime_config"))
_INITS = (True, False, "gaussian", "orthogonal")


def configs(config: Config, members: int | Sequence[Config | Change]) -> list[Config]:
    """Return ``config`` with the changes in ``members``, for each member. Raises FusionError, ValueError."""
    check_config(config, "config")
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
    if isinstance(change, Mapping):
        if unknown := change.keys() - {field.name for field in dataclasses.fields(config)}:
            raise ValueError(f"{label}: {min(unknown)!r} is no field of LoraConfig; those of its own are {sorted(OWN)}")
        change = dataclasses.replace(config, **change)
    new_config = copy.deepcopy(change)
    check_config(new_config, label)
    check_common(config, new_config, label)
    return new_config


def target_only(config: Config, paths: Collection[str]) -> None:
    """Let a configuration adapt exactly the layers ``paths``, instead of those that it selected before."""
    config.target_modules = set(paths)
    config.exclude_modules = config.layers_to_transform = config.layers_pattern = None


def check_config(config: Config, label: str) -> None:
    """Raise FusionError for a configuration that cannot be fused, ValueError for an object that is no LoraConfig."""
    from peft import LoraConfig

    if not isinstance(config, LoraConfig):
        raise ValueError(f"{label} must be a peft.LoraConfig, got {type(config).__name__}")
    for field in dataclasses.fields(config):
        if field.name in OWN or field.name in COMMON or field.name in _SILENT:
            continue
        value, plain = getattr(config, field.name), getattr(LoraConfig(), field.name)
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


# Adapter layers of one size for all members: smaller ranks are padded with zeros, and cut again for peft.
#
# The padding stays zero: in ``x A^T B^T``, the gradient of a row of A is a product with the matching column of B, and
# vice versa. A zero with a zero gradient stays zero in every optimizer of hf.optim except Muon, whose step depends on
# the whole matrix, and adds nothing to a norm. So a member of rank 4 in layers of rank 16 trains as it does alone.
#
# The scale of an adapter becomes a buffer, so that one program serves all members, including those that join later. Its
# rank and alpha become buffers too, so that they move with a member's row. Private attributes of peft's layers that are
# used, tested with 0.21: ``scaling``, ``r`` and ``lora_alpha``.

NAME = "default"
"""The name of each member's adapter in peft."""

# The dim of the rank, by the name of the tensor within its layer.
_RANK_DIMS = {
    f"lora_A.{NAME}.weight": 0,
    f"lora_B.{NAME}.weight": 1,
    f"lora_embedding_A.{NAME}": 0,
    f"lora_embedding_B.{NAME}": 1,
}
_SIZES = ("out_features", "out_channels"), ("in_features", "in_channels")


def layers(model: nn.Module) -> dict[str, Any]:
    """Return the adapter layers of a peft model by path. Raises FusionError if one has no array form."""
    from peft.tuners.lora import layer as kinds
    from peft.tuners.tuners_utils import BaseTunerLayer

    supported = (kinds.Linear, kinds.Embedding, kinds.Conv1d, kinds.Conv2d, kinds.Conv3d)
    adapter_layers = {}
    for path, module in model.named_modules():
        if not isinstance(module, BaseTunerLayer):
            continue
        if type(module) not in supported:
            raise FusionError(
                f"{path} is adapted by {type(module).__module__}.{type(module).__name__}, which has no array form: "
                "hf.lora adapts dense Linear, Conv1D, Embedding and convolution layers; choose target_modules without "
                "it, or a base that is not quantized"
            )
        adapter_layers[path] = module
    return adapter_layers


def rank(layer: Any) -> int:
    """Return the rank of an original peft layer."""
    return int(layer.r[NAME])


def _rooms(layer: Any) -> list[tuple[str, int, Tensor]]:
    """Return the tensors of a layer that have a dim of the rank: the name, the dim and the tensor."""
    parameters = dict(layer.named_parameters())
    return [(name, dim, parameters[name]) for name, dim in _RANK_DIMS.items() if name in parameters]


@torch.no_grad()
def fill(layer: Any, source: Any, where: str) -> None:
    """Give ``layer``, which is as in a template, the rank, scale and dropout of peft's layer ``source``.

    Raises:
        FusionError: ``source`` does not fit, for example as its rank is larger.
    """
    size, p = rank(source), dropout(source)
    for _, dim, room in _rooms(layer):
        largest_rank = room.shape[dim]
        if size > largest_rank:
            raise FusionError(
                f"{where}: an adapter of rank {size} does not fit an array whose largest rank is {largest_rank} there; "
                f"make the array with room for it, hf.lora(..., max_rank={size})"
            )
        if size < largest_rank and getattr(layer.get_base_layer(), "groups", 1) > 1:
            raise FusionError(
                f"{where} is a convolution in groups, in each of which the rank is split: ranks {size} and "
                f"{largest_rank} cannot be padded to one; give all members one rank there (rank_pattern)"
            )
    layer.rank.fill_(size)
    layer.alpha.fill_(source.lora_alpha[NAME])
    layer.scaling[NAME].fill_(source.scaling[NAME])
    if isinstance(layer.lora_dropout[NAME], nn.Dropout):
        layer.lora_dropout[NAME].p = p
    elif p:
        raise FusionError(
            f"{where}: lora_dropout={p}, and the array was made without any; make it with a member that has dropout"
        )


def dropout(layer: Any) -> float:
    return float(getattr(layer.lora_dropout[NAME], "p", 0.0))


def lora_names(paths: Iterable[str]) -> frozenset[str]:
    """Return the names of the adapters' tensors in these layers, with the buffers that a template has."""
    names = (*_RANK_DIMS, "rank", "alpha", f"scaling.{NAME}")
    return frozenset(f"{path}.{name}" for path in paths for name in names)


def cut(layer: Any) -> tuple[int, float]:
    """Turn a layer that is as in a template back into a peft layer of its own rank. Return its rank and alpha."""
    size, alpha = int(layer.rank), float(layer.alpha)
    for name, dim, room in _rooms(layer):
        path, _, key = name.rpartition(".")
        holder = layer.get_submodule(path)
        part = room.detach().narrow(dim, 0, size).clone(memory_format=torch.contiguous_format)
        setattr(holder, key, nn.Parameter(part, requires_grad=room.requires_grad))
        # The rank is the output size of A (dim 0), and the input size of B (dim 1).
        for attribute in _SIZES[dim]:
            if hasattr(holder, attribute):
                setattr(holder, attribute, size)
    scale = float(layer.scaling[NAME])
    del layer.rank, layer.alpha, layer.scaling
    alpha = int(alpha) if alpha == int(alpha) else alpha
    layer.r, layer.lora_alpha, layer.scaling = {NAME: size}, {NAME: alpha}, {NAME: scale}
    if not dropout(layer):
        layer.lora_dropout[NAME] = nn.Identity()
    return size, alpha
