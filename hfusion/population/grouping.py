"""Grouping of members into arrays: by modules and shapes at first, by their operators after a forward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from torch import Tensor, nn

from hfusion.capture.compare_models import check_alone, check_models, check_pair, compare
from hfusion.capture.registered_tensors import tensors
from hfusion.core.errors import FusionError

# Maximum length of a reason: the messages of a capture name all attributes in which members differ.
_LONGEST = 300


@dataclass(frozen=True)
class PopulationGroup:
    """Members of a population that are computed together.

    Attributes:
        rows: their rows, in order.
        kind: "array", batched operators for all of them; "plain", one member that runs as plain torch.
        why: why it is a group of its own.
    """

    rows: tuple[int, ...]
    kind: Literal["array", "plain"]
    why: str

    def __str__(self) -> str:
        rows = ", ".join(map(str, self.rows))
        return f"{self.kind} of row{'s' if len(self.rows) > 1 else ''} {rows}: {self.why}"


@dataclass(frozen=True)
class Candidates:
    """Indices of models that may share an array unless their forwards differ, or of one model."""

    models: tuple[int, ...]
    why: str


UNIQUE = "no other member has its modules and shapes"
TWINS = "members of the same modules and shapes"


def signature(model: nn.Module) -> Any:
    """Return a key that members of an array share: classes, modes, shapes, dtypes, devices."""
    modules = tuple((path, type(m).__name__, m.training) for path, m in model.named_modules(remove_duplicate=False))
    return modules, tuple((name, t.shape, t.dtype, t.device, t.requires_grad) for name, t in tensors(model))


def shortened(reason: str) -> str:
    """Return a reason as one line, cut to the maximum length."""
    text = " ".join(reason.split())
    return text if len(text) <= _LONGEST else text[: _LONGEST - 3] + "..."


def grouped(models: Sequence[nn.Module]) -> list[Candidates]:
    """Divide models into those that may share an array.

    Raises:
        FusionError: no or invalid models, or models in different groups that train one tensor together.
    """
    if len(models) == 0:
        raise FusionError("a population got an empty list; give it at least one model")
    check_models(models)
    buckets: dict[Any, list[int]] = {}
    for index, model in enumerate(models):
        buckets.setdefault(signature(model), []).append(index)
    groups = [group for bucket in buckets.values() for group in _of_bucket(models, bucket)]
    _check_trained(models, groups)
    return sorted(groups, key=lambda group: group.models[0])


def _of_bucket(models: Sequence[nn.Module], bucket: Sequence[int]) -> list[Candidates]:
    """Divide models of one signature into groups that can each be an array."""
    if len(bucket) == 1:
        return [Candidates((bucket[0],), _why_alone(models[bucket[0]]) or UNIQUE)]
    groups: list[Candidates] = []
    classes: list[list[int]] = []
    for index in bucket:
        if reason := _why_alone(models[index]):
            groups.append(Candidates((index,), reason))
            continue
        for alike in classes:
            if not _why_apart(models[alike[0]], models[index]):
                alike.append(index)
                break
        else:
            classes.append([index])
    for alike in classes:
        try:
            compare([models[index] for index in alike])
            groups.append(Candidates(tuple(alike), TWINS if len(alike) > 1 else UNIQUE))
        except FusionError as error:
            groups += [Candidates((index,), shortened(str(error))) for index in alike]
    return groups


def _why_alone(model: nn.Module) -> str:
    """Return why a model cannot be part of any array; empty if it can."""
    try:
        check_alone(0, model)
    except FusionError as error:
        return shortened(str(error).replace("model 0", "the model"))
    return ""


def _why_apart(model: nn.Module, other: nn.Module) -> str:
    """Return why two models cannot share an array; empty if their structure allows it."""
    try:
        check_pair(model, 1, other)
    except FusionError as error:
        return shortened(str(error))
    return ""


def may_share(model: nn.Module, other: nn.Module) -> bool:
    """Return whether the structure of two models allows them to share an array."""
    return signature(model) == signature(other) and not (_why_alone(other) or _why_apart(model, other))


def _check_trained(models: Sequence[nn.Module], groups: Sequence[Candidates]) -> None:
    """Raise a FusionError where a tensor that is trained is in models of several groups."""
    owners: dict[Any, tuple[int, int, str]] = {}
    for number, group in enumerate(groups):
        for index in group.models:
            for name, address in trained_memory(models[index]).items():
                other = owners.setdefault(address, (number, index, name))
                if other[0] != number:
                    raise FusionError(
                        f"{other[2]} of model {other[1]} and {name} of model {index} are one tensor that is trained, "
                        "and the models cannot share an array: give each model its own by copy.deepcopy, or freeze it"
                    )


def trained_memory(model: nn.Module) -> Mapping[str, Any]:
    """Return the device and address of each trained parameter of a model, by name."""
    trained = ((name, p) for name, p in model.named_parameters() if p.requires_grad and p.numel())
    return {name: (parameter.device, _address(parameter)) for name, parameter in trained}


def _address(tensor: Tensor) -> int:
    return id(tensor) if tensor.is_meta else tensor.data_ptr()


def shared_frozen(models: Sequence[nn.Module], others: Sequence[nn.Module] = ()) -> frozenset[int]:
    """Return the ids of frozen parameters of ``models`` whose memory another model, also of ``others``, shares."""
    owners: dict[Any, set[int]] = {}
    for number, model in enumerate([*models, *others]):
        for parameter in model.parameters():
            if not parameter.requires_grad and parameter.numel():
                owners.setdefault((parameter.device, _address(parameter)), set()).add(number)
    shared_addresses = {address for address, numbers in owners.items() if len(numbers) > 1}
    frozen = (p for model in models for p in model.parameters() if not p.requires_grad and p.numel())
    return frozenset(id(p) for p in frozen if (p.device, _address(p)) in shared_addresses)
