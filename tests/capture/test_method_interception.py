"""Methods that run as members' own code are found without running any other code of the class."""

from __future__ import annotations

import functools
from typing import Any

import pytest
from torch import Tensor, nn

import hfusion as hf
from tests.alone import assert_alone, normal


class Base(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 4).double()

    def points(self) -> Any:
        raise NotImplementedError

    def scaled(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.scaled(self.fc(x if x.sum() < 1e9 else -x))


class Property(Base):
    @property
    def points(self) -> Any:
        raise RuntimeError("the code of a property ran")


class Missing(Base):
    @property
    def points(self) -> Any:
        return self.no_such_attribute


class Cached(Base):
    @functools.cached_property
    def points(self) -> Any:
        raise RuntimeError("the code of a property ran")


class NoMethod(Base):
    points = None


class Static(Base):
    @staticmethod
    def scaled(x: Tensor) -> Tensor:
        return x * 2


class OfTheClass(Base):
    @classmethod
    def scaled(cls, x: Tensor) -> Tensor:
        return x * 3


class Shadowed(Base):
    def __init__(self) -> None:
        super().__init__()
        self.points = None


class Mixin:
    @property
    def points(self) -> Any:
        raise RuntimeError("the code of a property ran")


class Mixed(Mixin, Base):
    pass


class OfAProperty(Base):
    def computed(self, x: Tensor) -> Tensor:
        return self.fc(x if x.sum() < 1e9 else -x)

    @property
    def forward(self) -> Any:
        return self.computed


class Around(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.inner, self.out = kind(), nn.Linear(4, 4).double()

    def forward(self, x: Tensor) -> Tensor:
        return self.out(self.inner(x))


KINDS = [Property, Missing, Cached, NoMethod, Static, OfTheClass, Shadowed, Mixed]


@pytest.mark.parametrize("kind", KINDS)
def test_the_first_definition_decides(kind: type[nn.Module]) -> None:
    assert_alone([kind() for _ in range(2)], normal(3, 4))


def test_a_forward_that_is_a_property() -> None:
    assert_alone([Around(OfAProperty) for _ in range(2)], normal(3, 4))
    with pytest.raises(hf.FusionError, match="forward of OfAProperty is no plain method"):
        hf.fuse([OfAProperty() for _ in range(2)])(normal(3, 4))
