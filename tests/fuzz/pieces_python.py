"""Python code beside tensors: metadata that forward reads, conditions on numbers, state in attributes."""

from __future__ import annotations

from tests.fuzz.table import piece

_PARAMETER = "self.{s} = nn.Parameter(torch.randn(6))"
_NUMBER = "number = {0}.detach().{f}.item()\n"

METADATA = (
    piece("contiguous", "seq->seq", "{o} = {0} * 2 if {0}.is_contiguous() else {0}.sin()"),
    piece("contiguous view", "seq->seq", "{o} = {0} * 2 if {0}.transpose(1, 2).is_contiguous() else {0}.sin()"),
    piece("stride", "vec->vec", "{o} = {0} * 2 if {0}.stride() == (6, 1) else {0}.cos()"),
    piece("strides of what was computed", "img->img", "y = {0} * 2\n{o} = y if y.stride(1) > 1 else y.sin()"),
    piece(
        "memory format", "img->img", "{o} = {0} if {0}.is_contiguous(memory_format=torch.channels_last) else {0} * 2"
    ),
    piece("storage offset", "vec->vec", "{o} = {0} * (1 + {0}[:, 1:].storage_offset() % 2)"),
    piece("leaf", "vec->vec", "{o} = {0} * 2 if {0}.is_leaf else {0}.sin()"),
    piece("needs a gradient", "vec->vec", "{o} = {0} * 2 if {0}.requires_grad else {0}.sin()"),
    piece("gradient of a parameter", "vec->vec", "{o} = {0} * {s} if {s}.grad is None else {0} - {s}", init=_PARAMETER),
    piece("trained parameter", "vec->vec", "{o} = {0} * {s} if {s}.requires_grad else {0} - {s}", init=_PARAMETER),
    piece("attribute of a tensor", "vec->vec", "{0}.mark = 2.0\n{o} = {0} * {0}.mark"),
    piece("attribute that is missing", "vec->vec", 'y = {0} + 1\n{o} = y * getattr(y, "mark", 0.5)'),
    piece("threads", "vec->vec", "{o} = {0} * (1 + torch.get_num_threads() % 2)"),
    piece("deterministic", "vec->vec", "{o} = {0} * (2 if torch.are_deterministic_algorithms_enabled() else 3)"),
    piece("inference mode", "vec->vec", "{o} = {0} * (2 if torch.is_inference_mode_enabled() else 3)"),
    piece("gradients are on", "vec->vec", "{o} = {0} * (2 if torch.is_grad_enabled() else 3)"),
)

CONDITIONS = (
    piece("not a number", "vec->vec", _NUMBER + "{o} = {0}.sin() if number != number else {0} * 2", f="mean()|sum()"),
    piece("a number", "vec->vec", _NUMBER + "{o} = {0} * 2 if number == number else {0} * 0", f="log().mean()|sum()"),
    piece(
        "infinite", "vec->vec", _NUMBER + "{o} = {0} * 2 if number - number == 0 else {0}.cos()", f="log().sum()|sum()"
    ),
    piece("times nothing", "vec->vec", _NUMBER + "{o} = {0} + number * 0", f="mean()|max()"),
    piece("remainder", "vec->vec", _NUMBER + "{o} = {0} * 2 if number % 1 > 0.5 else {0}.cos()", f="sum()|max()"),
    piece("sign by text", "vec->vec", _NUMBER + '{o} = -{0} if str(number)[0] == "-" else {0}', f="sum()|mean()"),
    piece("list of numbers", "vec->vec", "a, b, *_ = {0}.detach()[0].tolist()\n{o} = {0} * 2 if a > b else {0}.sin()"),
    piece("rounded", "vec->vec", _NUMBER + "{o} = {0} * (2 if round(number) % 2 else 3)", f="sum()|max()"),
    piece("check that raises", "vec->vec", 'if {0}.isnan().any():\n    raise ValueError("nan")\n{o} = {0} * 2'),
    piece("assertion", "vec->vec", "assert bool(torch.isfinite({0}).all())\n{o} = {0} * 2"),
    piece(
        "validated distribution",
        "vec->vec",
        "{o} = torch.distributions.Normal({0}, {0}.sigmoid() + 0.1).log_prob({0}.sin())",
    ),
)

ATTRIBUTES = (
    piece(
        "attribute like a global", "vec->vec", "{o} = {0} * self.tick", init="self.tick = {each_a}", each_a="0.5|2.0"
    ),
    piece(
        "parameter like a global", "vec->vec", "{o} = {0} * self.tock", init="self.tock = nn.Parameter(torch.randn(6))"
    ),
    piece("global", "vec->vec", "{o} = {0} * (1 + tick)"),
    piece("global in a condition", "vec->vec", "{o} = {0} * 2 if tock else {0}.sin()"),
    piece("cleared state", "vec->vec", "{s}.state = None\n{o} = {s}({0})", module="Cell()"),
    piece("cleared history", "vec->vec", "{s}.state = None\n{o} = {s}({0})\n{o} = {s}({o})", module="Cell(True)"),
    piece("lasting state", "vec->vec", "{o} = {s}({0})", module="Cell()"),
    piece("state set by value", "vec->vec", "{s}.state = {0}.detach().mean(0)\n{o} = {s}({0})", module="Cell()"),
    piece("reset neuron", "vec->vec", "{s}.reset()\n{o} = {s}({0}) + {s}({0} * 0.5)", module="Spiking()"),
    piece("neuron", "vec->vec", "{o} = {s}({0})", module="Spiking()"),
    piece(
        "list of a caller", "vec->vec", "cache = []\n{o} = {s}({0}, cache)\n{o} = {s}({o}, cache)", module="Appending()"
    ),
    piece("properties", "vec->vec", "{o} = {s}({0}) + {s}.points", module="Properties({each_a})", each_a="0.5|2.0"),
    piece("property set", "vec->vec", "{s}.gain = 0.5\n{o} = {s}({0}) * {s}.gain", module="Properties(2.0)"),
    piece("own optimizer", "vec->vec", "{o} = {s}({0})", module="Learner()"),
)
