"""Parameters, buffers, attributes; and code that cannot be captured in a graph."""

from __future__ import annotations

from tests.fuzz.table import piece

_BUFFER = 'self.register_buffer("{s}", torch.{f}(6))'
_COUNT = 'self.register_buffer("{s}", torch.tensor(0))'

STATE = (
    piece("parameter", "vec->vec", "{o} = {0} * {s}", init="self.{s} = nn.Parameter(torch.randn(6))"),
    piece("parameter matrix", "vec->vec", "{o} = {0} @ {s}", init="self.{s} = nn.Parameter(torch.randn(6, 6) / 3)"),
    piece("number parameter", "vec->vec", "{o} = {0} + {s}.tanh()", init="self.{s} = nn.Parameter(torch.randn(()))"),
    piece(
        "frozen parameter",
        "vec->vec",
        "{o} = {0} + {s}",
        init="self.{s} = nn.Parameter(torch.randn(6), requires_grad=False)",
    ),
    piece("channel scale", "img->img", "{o} = {0} * {s}", init="self.{s} = nn.Parameter(torch.randn(4, 1, 1))"),
    piece(
        "position table",
        "seq->seq",
        "{o} = {0} + {s}[: {0}.shape[1]]",
        init="self.{s} = nn.Parameter(torch.randn(20, 6) * 0.1)",
    ),
    piece(
        "class token",
        "seq->seq",
        "{o} = torch.cat([{s}.expand({0}.shape[0], -1, -1), {0}], 1)[:, : {0}.shape[1]]",
        init="self.{s} = nn.Parameter(torch.randn(1, 1, 6))",
    ),
    piece(
        "parameter list",
        "vec->vec",
        "{o} = {0}\nfor w in {s}:\n    {o} = {o} * w",
        init="self.{s} = nn.ParameterList([torch.randn(6) for _ in range(2)])",
    ),
    piece(
        "parameter dict",
        "vec->vec",
        '{o} = {0} + {s}["a"] * {s}["b"]',
        init='self.{s} = nn.ParameterDict({{"a": torch.randn(6), "b": torch.randn(6)}})',
    ),
    piece("constant buffer", "vec->vec", "{o} = {0} + {s}", init=_BUFFER, f="randn|arange"),
    piece(
        "buffer not saved",
        "vec->vec",
        "{o} = {0} * {s}",
        init='self.register_buffer("{s}", torch.randn(6), persistent=False)',
    ),
    piece(
        "plain tensor attribute",
        "vec->vec",
        "{o} = {0} * {s}",
        init="self.{s} = torch.tensor([1.0, 2.0, 0.5, -1.0, 0.2, 0.3]){v}",
        v="| * (b + 1)",
    ),
    piece(
        "running mean",
        "vec->vec",
        "with torch.no_grad():\n    {s}.mul_(0.9).add_({0}.mean(0), alpha=0.1)\n{o} = {0} - {s}",
        init=_BUFFER,
        f="zeros",
    ),
    piece(
        "running mean in training",
        "vec->vec",
        "if self.training:\n    {s}.lerp_({0}.detach().mean(0), 0.2)\n{o} = {0} - {s}",
        init=_BUFFER,
        f="zeros",
    ),
    piece("buffer copied into", "vec->vec", "{o} = {0} + {s}\n{s}.copy_({0}.detach()[0])", init=_BUFFER, f="zeros"),
    piece(
        "buffer in part",
        "vec->vec",
        "{s}[:3] = {0}.detach()[0, 3:]\n{o} = {0} * {s}.clone()\n{s}[4].add_(1.0)",
        init=_BUFFER,
        f="zeros",
    ),
    piece("counter", "vec->vec", "{s} += 1\n{o} = {0} / ({s} + 1)", init=_COUNT),
    piece("counter added", "vec->vec", "{s}.add_(1)\n{o} = {0} * {s}.double().mul(0.1).cos()", init=_COUNT),
    piece(
        "buffer assigned",
        "vec->vec",
        "{s} = {s} * 0.5 + {0}.detach().mean(0)\n{o} = {0} - {s}",
        init=_BUFFER,
        f="zeros",
    ),
    piece(
        "buffer assigned after use", "vec->vec", "{o} = {0} + {s}\n{s} = {0}.detach().mean(0)", init=_BUFFER, f="zeros"
    ),
    piece(
        "buffer viewed and written",
        "vec->vec",
        "part = {s}[1:4]\n{o} = {0} + {s}\npart.add_({0}.detach()[0, :3])\n{o} = {o} * {s}",
        init=_BUFFER,
        f="ones",
    ),
    piece(
        "queue",
        "vec->vec",
        "{s}.copy_(torch.cat([{0}.detach()[:1], {s}[:-1]]))\n{o} = {0} + {s}.mean(0)",
        init='self.register_buffer("{s}", torch.zeros(4, 6))',
    ),
    piece(
        "ring",
        "vec->vec",
        "{s} = {s}.roll(1, 0)\n{s}[0] = {0}.detach()[0]\n{o} = {0} * {s}.mean(0)",
        init='self.register_buffer("{s}", torch.zeros(4, 6))',
    ),
    piece(
        "codebook",
        "vec->vec",
        "{o} = {s}[torch.cdist({0}, {s}).argmin(1)]\n{o} = {0} + ({o} - {0}).detach()",
        init='self.register_buffer("{s}", torch.randn(5, 6))',
    ),
    piece(
        "causal mask",
        "seq->seq",
        "{o} = ({0} @ {0}.mT).masked_fill({s}[: {0}.shape[1], : {0}.shape[1]], -1e9).softmax(-1) @ {0}",
        init='self.register_buffer("{s}", torch.ones(20, 20, dtype=torch.bool).triu(1))',
    ),
    piece("own number", "vec->vec", "{o} = {0} * {s}", init="self.{s} = {each_a}", each_a="0.5|1.0|2.0"),
    piece("own power", "vec->vec", "{o} = ({0}.abs() + 0.5) ** {s}", init="self.{s} = {each_a}", each_a="0.5|1.5"),
    piece(
        "own number added",
        "seq->seq",
        "{o} = torch.add({0}, {0}.sin(), alpha={s})",
        init="self.{s} = {each_a}",
        each_a="0.5|1.0",
    ),
    piece("own limit", "vec->vec", "{o} = {0}.clamp(max={s})", init="self.{s} = {each_a}", each_a="0.5|0.7"),
    piece(
        "own mask value",
        "vec,mask->vec",
        "{o} = {0}.masked_fill({1}, {s})",
        init="self.{s} = {each_a}",
        each_a="0.5|-1.0",
    ),
    piece("own place", "vec->row", "{o} = {0}[:, {s}]", init="self.{s} = {each_a}", each_a="1|2"),
    piece("own shift", "vec->vec", "{o} = {0}.roll({s}, 1)", init="self.{s} = {each_a}", each_a="1|2"),
    piece("own start", "vec->half", "{o} = {0}[:, {s} : {s} + 3]", init="self.{s} = {each_a}", each_a="1|2"),
    piece("own list", "vec->vec", "{o} = {0} * {s}[0] + {s}[1]", init="self.{s} = [{each_a}, 0.5]", each_a="1.0|2.0"),
    piece(
        "own function",
        "vec->vec",
        "{o} = {s}({0})",
        init="self.{s} = {f}",
        f="torch.sin|F.relu|(lambda z: z * 2)|torch.tanh",
    ),
    piece(
        "tied matrix", "vec->vec", "{o} = F.linear({0}, {s}.weight.t()) + {s}({0})", init="self.{s} = nn.Linear(6, 6)"
    ),
    piece(
        "weight scaled",
        "vec->vec",
        "{o} = F.linear({0}, {s}.weight / {s}.weight.norm(dim=1, keepdim=True), {s}.bias)",
        init="self.{s} = nn.Linear(6, 6)",
    ),
)

ISLANDS = (
    piece(
        "branch on a sum", "vec->vec", "if {0}.sum() > 0:\n    {o} = {0} * 2\nelse:\n    {o} = {0}.sin()", island=True
    ),
    piece(
        "branch in a list", "vec->vec", "{o} = {0}.cos() if bool(({0}.mean(0) > 0.1)[0]) else {0} * 1.5", island=True
    ),
    piece("number of a value", "vec->vec", "{o} = {0} * float({0}.detach().abs().mean())", island=True),
    piece("item", "vec->vec", "{o} = {0} + {0}.detach().max().item() * 0.1", island=True),
    piece("chosen rows", "vec->vec", "{o} = {0} + {0}[{0}[:, 0] > 0].sum(0)", island=True),
    piece("nonzero", "vec->num", "{o} = {0}.flatten()[({0} > 0).flatten().nonzero()[:, 0]].sum()", island=True),
    piece(
        "masked write of own",
        "vec->vec",
        "{o} = {0} * 1.0\nif {o}[0, 0] > 0:\n    {o}[:, 1] = 0.3\n{o}[{o} > 0.5] *= 0.9",
        island=True,
    ),
    piece("counted branch", "vec->vec", "{s} += 1\n{o} = {0} * 2 if {s} > 1 else {0} + 1", init=_COUNT, island=True),
    piece(
        "counted by value", "vec->vec", "if {0}.sum() > 0:\n    {s}.add_(1)\n{o} = {0} + {s}", init=_COUNT, island=True
    ),
    piece(
        "buffer by value",
        "vec->vec",
        "if {0}.mean() > 0:\n    {s}.copy_({0}.detach().mean(0))\nelse:\n    {s} = {s} + 0.5\n{o} = {0} - {s}",
        init=_BUFFER,
        f="zeros",
        island=True,
    ),
    piece(
        "parameter by value",
        "vec->vec",
        "{o} = {0} * {s} if {0}.sum() > 0 else {0} - 0.5 * {s}",
        init="self.{s} = nn.Parameter(torch.randn(6))",
        island=True,
    ),
    piece(
        "loop by value",
        "vec->vec",
        "{o} = {0}\nfor _ in range(1 + int({0}[0, 0] > 0)):\n    {o} = {o} * 0.7",
        island=True,
    ),
    piece(
        "write by value",
        "vec->",
        "if {0}.sum() > 0:\n    {0}.mul_(0.5)\nelse:\n    {0}[:, 0] = 0.1",
        island=True,
        writes=True,
    ),
    piece("branch of seq", "seq->seq", "{o} = {0} * 2 if {0}.sum() > 0 else {0}.flip(1)", island=True),
    piece("branch of img", "img->img", "{o} = {0} * 2 if {0}.mean() > 0 else {0} + 0.2", island=True),
)
