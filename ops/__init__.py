"""Batching rules: for every ATen operator, how to compute it for the whole array."""

from hfusion.ops import (
    attention,
    conv,
    index,
    linear,
    loss,
    norm,
    pointwise,
    random,
    reduce,
    resample,
    rnn,
    rnn_steps,
    shape,
)
from hfusion.ops.rule import RuleTable, merge

RULES: RuleTable = merge(
    attention.RULES,
    conv.RULES,
    index.RULES,
    linear.RULES,
    loss.RULES,
    norm.RULES,
    pointwise.RULES,
    random.RULES,
    reduce.RULES,
    resample.RULES,
    rnn.RULES,
    rnn_steps.RULES,
    shape.RULES,
)
