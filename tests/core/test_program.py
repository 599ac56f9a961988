"""The printed program and the report, word for word."""

from __future__ import annotations

import re

import pytest
import torch
from torch import nn

import hfusion as hf
from hfusion.core.layout import Layout
from hfusion.core.program import describe_value


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(4, 3)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.relu(self.fc(x.cos()))


PROGRAM = """\
program Small  B=2  eval
  fc.weight            f32[2,3,4]  stacked  input
  fc.bias              f32[2,3]    stacked  input
  x                    f32[N,4]    shared   input
  cos_default          f32[N,4]    shared   cos.default(x)                                   shared  # LINE
  linear_shared_input  f32[2,N,3]  stacked  linear.default(cos_default, fc.weight, fc.bias)  one GEMM, shared input  # LINE
  relu_default         f32[2,N,3]  stacked  relu.default(linear_shared_input)                stacked  # LINE
  return (relu_default)
  0 copies between layouts"""  # noqa: E501

REPORT = """\
Small  B=2  eval
     1 x cos.default     shared   shared
     1 x linear.default  stacked  one GEMM, shared input  ~49us
     1 x relu.default    stacked  stacked                 ~15us
  0 copies between layouts; self-check not run"""


def test_report_and_program_before_and_after_a_call() -> None:
    array = hf.fuse([Small().eval() for _ in range(2)])
    assert str(array.report()) == "nothing captured yet: capture happens at the first call"
    array(torch.randn(5, 4))
    (part,) = array.report().parts
    assert re.sub(r"test_program\.py:\d+", "LINE", str(part.program)) == PROGRAM
    assert str(array.report()) == REPORT


@pytest.mark.parametrize(
    ("shape", "dtype", "layout", "text"),
    [
        ((3, 4), torch.float32, Layout.SHARED, "f32[3,4]"),
        ((3, 4), torch.float64, Layout.STACKED, "f64[5,3,4]"),
        ((3, 4, 2), torch.bfloat16, Layout.PACKED, "bf16[3,5*4,2]"),
        ((), torch.int64, Layout.LISTED, "5 x i64[]"),
        ((2,), torch.bool, Layout.SHARED, "bool[2]"),
        ((2,), torch.uint8, Layout.SHARED, "u8[2]"),
    ],
)
def test_values_in_words(shape: tuple[int, ...], dtype: torch.dtype, layout: Layout, text: str) -> None:
    assert describe_value(torch.empty(shape, dtype=dtype), layout, 5) == text
