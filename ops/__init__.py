"""Batching rules: for every ATen operator, how to compute it for the whole array."""

from hfusion.ops import (
    attention,
    conv,
    distance,
    embedding,
    index,
    join,
    linear,
    loss,
    norm,
    pointwise,
    pool,
    random,
    reduce,
    resample,
    rnn,
    rnn_steps,
    shape,
    write,
)
from hfusion.ops.rule import RuleTable, merge

RULES: RuleTable = merge(
    attention.RULES,
    conv.RULES,
    distance.RULES,
    embedding.RULES,
    index.RULES,
    join.RULES,
    linear.RULES,
    loss.RULES,
    norm.RULES,
    pointwise.RULES,
    pool.RULES,
    random.RULES,
    reduce.RULES,
    resample.RULES,
    rnn.RULES,
    rnn_steps.RULES,
    shape.RULES,
    write.RULES,
)
