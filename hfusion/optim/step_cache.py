"""Fast path of a step: check cheaply that nothing but the gradients has changed since the last step.

For small models, inspecting everything in Python takes longer than the step itself, all the more because a training
step evicts it from the processor's caches. So the results of a full preparation are compared as a whole: the same
objects, the same addresses, the same numbers in memory.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from operator import attrgetter, itemgetter
from typing import TypeAlias

from torch import Tensor

from hfusion.optim.group import Group, Groups, State, same_objects
from hfusion.optim.native_kernels import MemoryPairs
from hfusion.optim.settings import ParamGroup, Settings
from hfusion.torch_private.dispatch_modes import DisableTorchFunctionSubclass
from hfusion.torch_private.dynamo_state import tensor_guards

_GRAD = attrgetter("grad")

Work: TypeAlias = list[tuple[Settings, Group, list[Tensor]]]
"""The groups of a step, each with the settings of its param group and its gradients."""


class StepCache:
    """The state of all param groups at a step in which every parameter had a gradient.

    ``keys``: those of hyper-parameters and options in a param group. ``prepared_groups``: for each param group its
    settings and groups.
    """

    def __init__(
        self,
        groups: Sequence[ParamGroup],
        state: Mapping[Tensor, State],
        keys: Sequence[str],
        prepared_groups: Sequence[tuple[Settings, Groups]],
    ) -> None:
        # The first key is passed twice, so that itemgetter returns a tuple even for a single key.
        self._values = itemgetter(keys[0], *keys)
        self._prepared_groups = list(prepared_groups)
        self._objects = self._dependencies(groups, state)
        params = [param for group in groups for param in group["params"]]
        vectors = [vector for settings, _ in prepared_groups for vector in settings.vectors]
        self._params = params
        self._tensors = [*vectors, *(tensor for _, parts in prepared_groups for tensor in parts.tensors)]
        with DisableTorchFunctionSubclass():
            self._addresses = self._current_addresses()
            self._unique_tensors = list({id(tensor): tensor for tensor in self._tensors}.values())
            self._kinds = tensor_guards(self._unique_tensors)
            self._gradients = tensor_guards(list(map(_GRAD, params)))
            rows = [
                pair for settings, _ in prepared_groups for pair in zip(settings.vectors, settings.table, strict=True)
            ]
            self._memory = MemoryPairs(rows)

    def work(self, groups: Sequence[ParamGroup], state: Mapping[Tensor, State]) -> Work | None:
        """Return the groups of this step with their gradients, or None if anything else has changed."""
        if not same_objects(self._dependencies(groups, state), self._objects):
            return None
        grads = list(map(_GRAD, self._params))
        # The check also fails if a gradient is None.
        if not self._gradients.check(*grads):
            return None
        with DisableTorchFunctionSubclass():
            if (
                self._current_addresses() != self._addresses
                or not self._kinds.check(*self._unique_tensors)
                or not self._memory.all_equal()
            ):
                return None
        if len(self._prepared_groups) == 1:
            settings, parts = self._prepared_groups[0]
            return [(settings, group, part) for group, part in parts.with_gradients(grads)]
        fresh = iter(grads)
        return [
            (settings, group, part)
            for settings, parts in self._prepared_groups
            for group, part in parts.with_gradients([next(fresh) for _ in range(parts.count)])
        ]

    def _dependencies(self, groups: Sequence[ParamGroup], state: Mapping[Tensor, State]) -> list[object]:
        """Return every object that a step depends on. A pair of hyper-parameters is one: it can only be replaced."""
        objects: list[object] = [*state, *state.values(), *groups]
        for entry in state.values():
            objects += entry.values()
        for group in groups:
            objects += group["params"]
            objects += self._values(group)
        return objects

    def _current_addresses(self) -> list[int]:
        """Return the current addresses of all tensors."""
        return list(map(Tensor.data_ptr, self._tensors))
