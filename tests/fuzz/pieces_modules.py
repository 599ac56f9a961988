"""Pieces with state: submodules of torch.nn, parameters, buffers, attributes, and code that no graph holds."""

from __future__ import annotations

from tests.fuzz.pieces_code import piece

# Submodules of torch.nn.
P = "0.0|1.0"

LAYERS = (
    *(
        piece(name, kinds, module=module)
        for name, kinds, module in (
            ("linear", "vec->vec", "nn.Linear(6, 6)"),
            ("linear no bias", "vec->vec", "nn.Linear(6, 6, bias=False)"),
            ("linear over seq", "seq->seq", "nn.Linear(6, 6)"),
            ("linear of half", "half->half", "nn.Linear(3, 3)"),
            ("linear down", "vec->half", "nn.Linear(6, 3)"),
            ("linear up", "half->vec", "nn.Linear(3, 6)"),
            ("conv1d", "sig->sig", "nn.Conv1d(4, 4, 3, padding=1)"),
            ("conv1d pointwise", "sig->sig", "nn.Conv1d(4, 4, 1)"),
            ("conv1d same", "sig->sig", 'nn.Conv1d(4, 4, 4, padding="same")'),
            ("conv1d reflect", "sig->sig", 'nn.Conv1d(4, 4, 3, padding=1, padding_mode="reflect")'),
            ("conv1d dilated", "sig->sig", "nn.Conv1d(4, 4, 3, padding=2, dilation=2, groups=2)"),
            ("conv2d", "img->img", "nn.Conv2d(4, 4, 3, padding=1)"),
            ("conv2d no bias", "img->img", "nn.Conv2d(4, 4, 3, padding=1, bias=False)"),
            ("conv2d pointwise", "img->img", "nn.Conv2d(4, 4, 1)"),
            ("conv2d depthwise", "img->img", "nn.Conv2d(4, 4, 3, padding=1, groups=4)"),
            ("conv2d circular", "img->img", 'nn.Conv2d(4, 4, 3, padding=1, padding_mode="circular")'),
            ("conv2d oblong", "img->img", "nn.Conv2d(4, 4, (1, 3), padding=(0, 1))"),
            ("conv3d", "vol->vol", "nn.Conv3d(2, 2, 3, padding=1)"),
            ("conv3d grouped", "vol->vol", "nn.Conv3d(2, 2, 1, groups=2)"),
            ("transposed conv1d", "sig->sig", "nn.ConvTranspose1d(4, 4, 3, padding=1)"),
            ("transposed conv2d", "img->img", "nn.ConvTranspose2d(4, 4, 3, padding=1, groups=2)"),
            ("transposed conv3d", "vol->vol", "nn.ConvTranspose3d(2, 2, 3, padding=1)"),
            ("batch norm of vec", "vec->vec", "nn.BatchNorm1d(6)"),
            ("batch norm of sig", "sig->sig", "nn.BatchNorm1d(4)"),
            ("batch norm of img", "img->img", "nn.BatchNorm2d(4)"),
            ("batch norm of vol", "vol->vol", "nn.BatchNorm3d(2)"),
            ("batch norm bare", "img->img", "nn.BatchNorm2d(4, affine=False, track_running_stats=False)"),
            ("batch norm averaged", "vec->vec", "nn.BatchNorm1d(6, momentum=None)"),
            ("instance norm of sig", "sig->sig", "nn.InstanceNorm1d(4, affine=True)"),
            ("instance norm of img", "img->img", "nn.InstanceNorm2d(4, track_running_stats=True)"),
            ("layer norm of seq", "seq->seq", "nn.LayerNorm(6)"),
            ("layer norm of img", "img->img", "nn.LayerNorm([4, 6, 6], elementwise_affine=False)"),
            ("group norm", "img->img", "nn.GroupNorm(2, 4)"),
            ("group norm of sig", "sig->sig", "nn.GroupNorm(1, 4)"),
            ("local response norm", "img->img", "nn.LocalResponseNorm(3)"),
            ("max pool 1d", "sig->sig", "nn.MaxPool1d(3, stride=1, padding=1)"),
            ("max pool 2d", "img->img", "nn.MaxPool2d(3, stride=1, padding=1)"),
            ("max pool 3d", "vol->vol", "nn.MaxPool3d(3, stride=1, padding=1)"),
            ("avg pool 1d", "sig->sig", "nn.AvgPool1d(3, stride=1, padding=1)"),
            ("avg pool 2d", "img->img", "nn.AvgPool2d(3, stride=1, padding=1, count_include_pad=False)"),
            ("avg pool 3d", "vol->vol", "nn.AvgPool3d(3, stride=1, padding=1)"),
            (
                "lp pool",
                "sig->sig",
                "nn.Sequential(nn.Softplus(), nn.LPPool1d(2, 3, stride=1), nn.ReplicationPad1d(1))",
            ),
            ("adaptive pool 1d", "sig->sig", "nn.Sequential(nn.AdaptiveAvgPool1d(4), nn.Upsample(scale_factor=2))"),
            ("adaptive pool 2d", "img->img", "nn.Sequential(nn.AdaptiveMaxPool2d(3), nn.Upsample(scale_factor=2.0))"),
            (
                "stride and up",
                "img->img",
                "nn.Sequential(nn.Conv2d(4, 8, 3, 2, 1), nn.PixelShuffle(2), nn.Conv2d(2, 4, 1))",
            ),
            ("unshuffle", "img->img", "nn.Sequential(nn.PixelUnshuffle(2), nn.ConvTranspose2d(16, 4, 2, stride=2))"),
            ("pads 2d", "img->img", "nn.Sequential(nn.ReflectionPad2d(1), nn.Conv2d(4, 4, 3))"),
            ("pads zero", "img->img", "nn.Sequential(nn.ZeroPad2d((1, 1, 0, 0)), nn.Conv2d(4, 4, (1, 3)))"),
            ("pads constant", "sig->sig", "nn.Sequential(nn.ConstantPad1d((2, 0), 0.3), nn.Conv1d(4, 4, 3))"),
            ("fold of unfold", "img->img", "nn.Sequential(nn.Unfold(2, stride=2), nn.Fold((6, 6), 2, stride=2))"),
            ("upsample bilinear", "img->img", 'nn.Sequential(nn.AvgPool2d(2), nn.Upsample((6, 6), mode="bilinear"))'),
            ("channel shuffle", "img->img", "nn.ChannelShuffle(2)"),
            ("weight norm", "vec->vec", "torch.nn.utils.parametrizations.weight_norm(nn.Linear(6, 6))"),
            ("orthogonal", "vec->vec", "torch.nn.utils.parametrizations.orthogonal(nn.Linear(6, 6))"),
            ("identity", "vec->vec", "nn.Identity()"),
            ("flattened head", "img->vec", "nn.Sequential(nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(4, 6))"),
            ("flat linear", "sig->vec", "nn.Sequential(nn.Flatten(), nn.Linear(32, 6))"),
            ("flat vol", "vol->vec", "nn.Sequential(nn.Flatten(), nn.Linear(128, 6))"),
            ("unflatten img", "vec->img", "nn.Sequential(nn.Linear(6, 144), nn.Unflatten(1, (4, 6, 6)))"),
            ("unflatten sig", "vec->sig", "nn.Sequential(nn.Linear(6, 32), nn.Unflatten(1, (4, 8)))"),
            ("unflatten vol", "vec->vol", "nn.Sequential(nn.Linear(6, 128), nn.Unflatten(-1, (2, 4, 4, 4)))"),
            ("embedding", "ids->seq", "nn.Embedding(5, 6)"),
            ("embedding with padding", "ids->seq", "nn.Embedding(5, 6, padding_idx=1)"),
            ("embedding by frequency", "ids->seq", "nn.Embedding(5, 6, scale_grad_by_freq=True)"),
            ("embedding of max norm", "ids->seq", "nn.Embedding(5, 6, max_norm=1.0)"),
            ("embedding of labels", "lab->vec", "nn.Embedding(6, 6)"),
        )
    ),
    piece("embedding bag", "ids->vec", module='nn.EmbeddingBag(5, 6, mode="{mode}")', mode="sum|mean|max"),
    piece("spectral norm", "vec->vec", module="torch.nn.utils.parametrizations.spectral_norm(nn.Linear(6, 6))"),
    piece("batch norm own eps", "vec->vec", module="nn.BatchNorm1d(6, eps={each_e})", each_e="1e-5|1e-3|0.1"),
    piece("batch norm momentum", "img->img", module="nn.BatchNorm2d(4, momentum={each_m})", each_m="0.1|0.3|0.9"),
    piece("layer norm own eps", "vec->vec", module="nn.LayerNorm(6, eps={each_e})", each_e="1e-5|1e-3|0.1"),
    piece("rms norm", "seq->seq", module="nn.RMSNorm(6, eps={each_e})", each_e="1e-5|1e-3"),
    piece("group norm own eps", "img->img", module="nn.GroupNorm(4, 4, eps={each_e})", each_e="1e-5|1e-2"),
    piece("dropout", "vec->vec", module="nn.Dropout({p})", p=P),
    piece("dropout of own p", "seq->seq", module="nn.Dropout({each_p})", each_p=P),
    piece("dropout in place", "seq->seq", module="nn.Dropout({p}, inplace=True)", p=P),
    piece("dropout 1d", "sig->sig", module="nn.Dropout1d({p})", p=P),
    piece("dropout 2d", "img->img", module="nn.Dropout2d({p})", p=P),
    piece("dropout 3d", "vol->vol", module="nn.Dropout3d({p})", p=P),
    piece("alpha dropout", "vec->vec", module="nn.AlphaDropout({p})", p="0.0"),
    piece("feature alpha dropout", "img->img", module="nn.FeatureAlphaDropout({p})", p="0.0"),
    piece("bilinear", "vec,vec->vec", "{o} = {s}({0}, {1})", module="nn.Bilinear(6, 6, 6)"),
    piece("cosine similarity", "vec,vec->row", "{o} = {s}({0}, {1})", module="nn.CosineSimilarity(dim={d})", d="1|-1"),
    piece(
        "pairwise distance", "vec,vec->row", "{o} = {s}({0}, {1} + 2.0)", module="nn.PairwiseDistance({p})", p="2.0|3.0"
    ),
    piece(
        "rnn",
        "seq->seq",
        "{o}, _ = {s}({0})",
        module='nn.RNN(6, 6, batch_first=True, nonlinearity="{k}")',
        k="tanh|relu",
    ),
    piece("lstm", "seq->seq", "{o}, _ = {s}({0})", module="nn.LSTM(6, 6, batch_first=True)"),
    piece(
        "lstm last",
        "seq->vec",
        "_, ({o}, _) = {s}({0})\n{o} = {o}[-1]",
        module="nn.LSTM(6, 6, {k}, batch_first=True)",
        k="1|2",
    ),
    piece(
        "lstm both ways", "seq->seq", "{o}, _ = {s}({0})", module="nn.LSTM(6, 3, batch_first=True, bidirectional=True)"
    ),
    piece("lstm projected", "seq->seq", "{o}, _ = {s}({0})", module="nn.LSTM(6, 8, proj_size=6, batch_first=True)"),
    piece(
        "lstm of state",
        "seq,vec->seq",
        "{o}, _ = {s}({0}, ({1}[None], {1}.sin()[None]))",
        module="nn.LSTM(6, 6, batch_first=True)",
    ),
    piece("gru", "seq->seq", "{o}, _ = {s}({0})", module="nn.GRU(6, 6, batch_first=True)"),
    piece("gru over samples", "seq->seq", "{o}, _ = {s}({0})", module="nn.GRU(6, 6, bias=False)"),
    piece(
        "gru both ways",
        "seq->seq,vec",
        "{o}, {o1} = {s}({0})\n{o1} = {o1}.transpose(0, 1).reshape(-1, 6)",
        module="nn.GRU(6, 3, batch_first=True, bidirectional=True)",
    ),
    piece("lstm cell", "vec,vec->vec,vec", "{o}, {o1} = {s}({0}, ({1}, {1}))", module="nn.LSTMCell(6, 6)"),
    piece("gru cell", "vec,vec->vec", "{o} = {s}({0}, {1})", module="nn.GRUCell(6, 6)"),
    piece("rnn cell", "vec->vec", module="nn.RNNCell(6, 6)"),
    piece(
        "attention",
        "seq->seq",
        "{o}, _ = {s}({0}, {0}, {0}, need_weights={w})",
        module="nn.MultiheadAttention(6, {h}, batch_first=True)",
        h="2|3",
        w="True|False",
    ),
    piece(
        "attention across",
        "seq,seq->seq",
        "{o}, _ = {s}({0}, {1}, {1})",
        module="nn.MultiheadAttention(6, 2, batch_first=True, add_bias_kv=True)",
    ),
    piece(
        "attention masked",
        "seq->seq",
        "{o}, _ = {s}({0}, {0}, {0}, attn_mask=torch.ones({0}.shape[1], {0}.shape[1], dtype=torch.bool).triu(1))",
        module="nn.MultiheadAttention(6, 2, batch_first=True)",
    ),
    piece(
        "encoder layer",
        "seq->seq",
        module='nn.TransformerEncoderLayer(6, 2, 8, 0.0, activation="{a}", batch_first=True, norm_first={f})',
        a="relu|gelu",
        f="True|False",
    ),
    piece(
        "decoder layer",
        "seq,seq->seq",
        "{o} = {s}({0}, {1})",
        module="nn.TransformerDecoderLayer(6, 2, 8, 0.0, batch_first=True)",
    ),
)

# Without Hardsigmoid: its eager gradient takes a sixth rounded to float32 in float64, too, and a compiled one does not.
ACTIVATIONS = (
    *(
        piece(name, f"{kind}->{kind}", module=f"nn.{name}()")
        for kind, names in {
            "vec": "ReLU Tanh Sigmoid GELU SiLU ELU SELU CELU Mish Softplus Softsign Hardswish PReLU LogSigmoid",
            "img": "ReLU ReLU6 Hardtanh Hardswish LeakyReLU PReLU Softshrink Tanhshrink Mish RReLU",
            "seq": "GELU ELU SiLU Hardshrink Tanh Softplus",
            "sig": "ReLU LeakyReLU CELU Sigmoid",
            "vol": "ReLU SELU",
        }.items()
        for name in names.split()
        if name != "RReLU"
    ),
    piece("relu in place", "vec->vec", module="nn.ReLU(inplace=True)", writes=True, view=True),
    piece("relu in place of img", "img->img", module="nn.ReLU(inplace=True)", writes=True, view=True),
    piece("silu in place", "vec->vec", module="nn.SiLU(inplace=True)", writes=True, view=True),
    piece("hardswish in place", "img->img", module="nn.Hardswish(inplace=True)", writes=True, view=True),
    piece("leaky relu of own slope", "vec->vec", module="nn.LeakyReLU({each_a})", each_a="0.01|0.2|0.5"),
    piece(
        "leaky relu in place",
        "img->img",
        module="nn.LeakyReLU({each_a}, inplace=True)",
        each_a="0.01|0.2",
        writes=True,
        view=True,
    ),
    piece("elu of own alpha", "vec->vec", module="nn.ELU({each_a})", each_a="1.0|0.5|2.0"),
    piece("celu of own alpha", "seq->seq", module="nn.CELU({each_a})", each_a="1.0|0.5"),
    piece("threshold", "vec->vec", module="nn.Threshold({each_a}, 0.3)", each_a="0.1|0.2"),
    piece("softplus of own beta", "vec->vec", module="nn.Softplus({each_a})", each_a="1.0|2.0"),
    piece("hardtanh of own limits", "vec->vec", module="nn.Hardtanh(-0.5, {each_a})", each_a="0.5|1.0"),
    piece("softshrink of own lambda", "vec->vec", module="nn.Softshrink({each_a})", each_a="0.5|0.1"),
    piece("prelu of channels", "img->img", module="nn.PReLU(4, init={each_a})", each_a="0.25|0.1"),
    piece("gelu tanh", "vec->vec", module='nn.GELU("tanh")'),
    piece("glu", "vec->half", module="nn.GLU()"),
    piece("softmax", "seq->seq", module="nn.Softmax({d})", d="-1|1"),
    piece("softmax 2d", "img->img", module="nn.Softmax2d()"),
    piece("log softmax", "vec->vec", module="nn.LogSoftmax(1)"),
    piece("softmin", "vec->vec", module="nn.Softmin(-1)"),
    piece("rrelu", "vec->vec", module="nn.RReLU(0.2, 0.2)"),
)


# Parameters, buffers, attributes; and code that cannot be captured in a graph.
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
