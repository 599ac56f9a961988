"""Let a graph that was captured on one device run on another: the devices that its calls name are replaced."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate

from hfusion.core.tree import leaves


def retarget_device(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """``module`` with every device in the arguments of a call replaced by ``device``; itself if none differs."""
    nodes = [node for sub in _graphs(module) for node in sub.graph.nodes]
    if all(node_device == device for node in nodes for node_device in leaves((node.args, node.kwargs), torch.device)):
        return module

    def swapped(value: Any) -> Any:
        return device if isinstance(value, torch.device) else value

    moved = copy.deepcopy(module)
    for sub in _graphs(moved):
        for node in sub.graph.nodes:
            node.args, node.kwargs = (map_aggregate(value, swapped) for value in (node.args, node.kwargs))
        sub.recompile()
    return moved


def _graphs(module: fx.GraphModule) -> list[fx.GraphModule]:
    """The module itself and the bodies of its loops."""
    return [sub for sub in module.modules() if isinstance(sub, fx.GraphModule)]
