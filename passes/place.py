"""Let a graph that was captured on one device run on another: the devices that its calls name are replaced."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_aggregate


def place(module: fx.GraphModule, device: torch.device) -> fx.GraphModule:
    """``module`` with every device in the arguments of a call replaced by ``device``; itself if none differs."""
    if all(found == device for sub in _graphs(module) for node in sub.graph.nodes for found in _devices(node)):
        return module
    moved = copy.deepcopy(module)
    for sub in _graphs(moved):
        for node in sub.graph.nodes:
            node.args, node.kwargs = (map_aggregate(value, _swap(device)) for value in (node.args, node.kwargs))
        sub.recompile()
    return moved


def _graphs(module: fx.GraphModule) -> list[fx.GraphModule]:
    """The module itself and the bodies of its loops."""
    return [sub for sub in module.modules() if isinstance(sub, fx.GraphModule)]


def _devices(node: fx.Node) -> list[torch.device]:
    found: list[torch.device] = []

    def look(value: Any) -> Any:
        if isinstance(value, torch.device):
            found.append(value)
        return value

    map_aggregate((node.args, node.kwargs), look)
    return found


def _swap(device: torch.device) -> Any:
    return lambda value: device if isinstance(value, torch.device) else value
