"""`massieu.nn.Attention` against PyTorch's own module and explicit float64 matrices."""

import itertools
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.support.derivatives import check_derivatives
from tests.support.rows import every_row, one_in
from torch import nn

from massieu import measures
from massieu.nn import Attention, MeasureHeads, SoftmaxHeads

TORCH = {
    "plain": {},
    "no bias": {"bias": False},
    "other sizes": {"kdim": 6, "vdim": 10},
    "extra keys": {"add_bias_kv": True, "add_zero_attn": True},
    "one extra key": {"add_bias_kv": True, "kdim": 6, "vdim": 10},
    "zero key": {"add_zero_attn": True},
}
LENGTH, KEYS, BATCH, WIDTH, HEADS = 5, 7, 3, 8, 2


def pair(batch_first=True, **options):
    """PyTorch's module and ours with its state."""
    torch.manual_seed(0)
    theirs = nn.MultiheadAttention(WIDTH, HEADS, batch_first=batch_first, dtype=torch.float64, **options)
    for parameter in theirs.parameters():
        nn.init.normal_(parameter, std=0.5)
    ours = Attention(WIDTH, HEADS, batch_first=batch_first, dtype=torch.float64, **options)
    ours.load_state_dict(theirs.state_dict())
    return theirs, ours


def inputs(module, length=LENGTH, keys=KEYS, batch=BATCH, dtype=torch.float64):
    torch.manual_seed(1)
    shapes = ((length, module.embed_dim), (keys, module.kdim), (keys, module.vdim))
    return [torch.randn(batch, *shape, dtype=dtype, requires_grad=True) for shape in shapes]


def masks(kind, batch=BATCH):
    """Padding and attention masks; no query is without a key."""
    torch.manual_seed(2)
    padding = torch.rand(batch, KEYS) < 0.3
    padding[:, 0] = False
    attention = torch.rand(LENGTH, KEYS) < 0.3
    attention[:, 0] = False
    if kind == "boolean":
        return {"key_padding_mask": padding, "attn_mask": attention}
    if kind == "float":
        return {"key_padding_mask": torch.randn(batch, KEYS).double(), "attn_mask": torch.randn(LENGTH, KEYS).double()}
    if kind == "a head each":
        return {"attn_mask": torch.randn(batch * HEADS, LENGTH, KEYS).double()}
    return {}


@pytest.mark.medium
@one_in(
    3, {"options": TORCH.values(), "kind": ["none", "boolean", "float", "a head each"], "need_weights": [True, False]}
)
def test_equals_pytorchs_module_in_outputs_weights_and_gradients(options, kind, need_weights):
    theirs, ours = pair(**options)
    arguments = inputs(theirs)
    found = []
    for module in (theirs, ours):
        output, weights = module(*arguments, need_weights=need_weights, average_attn_weights=False, **masks(kind))
        gradients = torch.autograd.grad(output.square().sum(), [*arguments, *module.parameters()])
        found.append((output, *gradients) if weights is None else (output, weights, *gradients))
    assert len(found[0]) == len(found[1])
    for wanted, got in zip(*found, strict=True):
        torch.testing.assert_close(got, wanted, rtol=1e-10, atol=1e-12)


@every_row("options", TORCH.values(), ids=TORCH)
@every_row("need_weights", [True, False])
def test_causality_is_the_causal_mask(options, need_weights):
    theirs, ours = pair(**options)
    arguments = inputs(theirs, keys=LENGTH)
    mask = torch.ones(LENGTH, LENGTH, dtype=torch.bool).triu(1)
    wanted = theirs(*arguments, attn_mask=mask, need_weights=need_weights)
    for keywords in ({"is_causal": True}, {"is_causal": True, "attn_mask": mask}, {"attn_mask": mask}):
        got = ours(*arguments, need_weights=need_weights, **keywords)
        torch.testing.assert_close(got[0], wanted[0], rtol=1e-10, atol=1e-12)
        if need_weights:
            torch.testing.assert_close(got[1], wanted[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("batch_first", [True, False])
def test_layouts(batch_first):
    theirs, ours = pair(batch_first=batch_first)
    query, key, value = inputs(theirs)
    arguments = (query, key, value) if batch_first else [tensor.transpose(0, 1) for tensor in (query, key, value)]
    wanted, got = theirs(*arguments), ours(*arguments, need_log_partition=True)
    torch.testing.assert_close(got[:2], wanted, rtol=1e-10, atol=1e-12)
    assert got[2].shape == (BATCH, HEADS, LENGTH)
    padding = masks("boolean")["key_padding_mask"][0]
    wanted = theirs(query[0], key[0], value[0], key_padding_mask=padding, average_attn_weights=False)
    got = ours(
        query[0], key[0], value[0], key_padding_mask=padding, average_attn_weights=False, need_log_partition=True
    )
    torch.testing.assert_close(got[:2], wanted, rtol=1e-10, atol=1e-12)
    assert got[2].shape == (HEADS, LENGTH)


def test_more_keys_are_seen_by_all_whatever_hides_the_others():
    theirs, ours = pair(add_bias_kv=True, add_zero_attn=True)
    for kind in ("boolean", "float"):
        arguments, given = inputs(theirs), masks(kind)
        torch.testing.assert_close(ours(*arguments, **given), theirs(*arguments, **given), rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("norm_first", [True, False])
def test_takes_its_place_in_a_transformer_also_when_that_has_a_fast_path(norm_first):
    torch.manual_seed(0)
    layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, norm_first=norm_first, dtype=torch.float64).eval()
    tokens = torch.randn(2, 5, 8, dtype=torch.float64)
    with torch.no_grad():
        wanted = layer(tokens)
        replaced = Attention(8, 2, batch_first=True, dtype=torch.float64)
        replaced.load_state_dict(layer.self_attn.state_dict())
        layer.self_attn = replaced.eval()
        torch.testing.assert_close(layer(tokens), wanted)
        layer.self_attn.heads.scale = 2.0
        assert (layer(tokens) - wanted).abs().max() > 1e-3
        torch.testing.assert_close(nn.TransformerEncoder(layer, 1, enable_nested_tensor=False)(tokens), layer(tokens))


def explicit(module, query, key, value, scale, log_weight, sink=None, softcap=None):
    """Outputs, weights and log Z by head, in float64, from the module's parameters."""
    weights, biases = module.in_proj_weight.chunk(3), module.in_proj_bias.chunk(3)
    q, k, v = (
        (tensor @ weight.T + bias).unflatten(-1, (HEADS, -1)).transpose(1, 2)
        for tensor, weight, bias in zip((query, key, value), weights, biases, strict=True)
    )
    scores = torch.einsum("bhld,bhnd->bhln", q, k) * scale
    if softcap is not None:
        scores = softcap * torch.tanh(scores / softcap)
    total = (scores + log_weight).exp()
    null = 0 if sink is None else torch.as_tensor(sink).exp()
    z = total.sum(-1) + null
    p = total / z.unsqueeze(-1)
    return module.out_proj((p @ v).transpose(1, 2).flatten(2)), p, z.log()


@pytest.mark.parametrize("need_weights", [True, False])
def test_scale_sink_window_and_cap(need_weights):
    _, ours = pair()
    arguments = inputs(ours)
    behind = torch.arange(LENGTH)[:, None] - torch.arange(KEYS)
    banded = torch.zeros(LENGTH, KEYS).masked_fill((behind > 2) | (behind < -1), -torch.inf)
    scale, sink = torch.tensor([0.3, 1.7]).double(), torch.tensor([-1.0, 2.0]).double()
    cases = [
        ({"scale": 2}, {"scale": 2.0}),
        ({"scale": scale}, {"scale": scale[:, None, None]}),
        ({"sink": 0.7}, {"sink": torch.tensor(0.7, dtype=torch.float64)}),
        ({"sink": sink}, {"sink": sink[:, None]}),
        ({"window": (2, 1)}, {"log_weight": banded}),
        ({"softcap": 0.5}, {"softcap": 0.5}),
        ({"softcap": 0.5, "sink": sink, "window": (2, 1), "scale": scale}, None),
    ]
    for options, form in cases:
        if form is None:
            form = {"scale": scale[:, None, None], "sink": sink[:, None], "log_weight": banded, "softcap": 0.5}
        module = Attention(WIDTH, HEADS, batch_first=True, dtype=torch.float64, heads=SoftmaxHeads(**options))
        module.load_state_dict(ours.state_dict(), strict=False)
        wanted = explicit(module, *arguments, **({"scale": (WIDTH // HEADS) ** -0.5, "log_weight": 0.0} | form))
        keywords = {"need_weights": need_weights, "average_attn_weights": False, "need_log_partition": True}
        output, weights, log_partition = module(*arguments, **keywords)
        torch.testing.assert_close(output, wanted[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(log_partition, wanted[2], rtol=1e-10, atol=1e-12)
        if need_weights:
            torch.testing.assert_close(weights, wanted[1], rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("need_weights", [True, False])
def test_the_value_of_a_sink(need_weights):
    """Its share of Z, times the value, is added to a head's output; a value of zero is none."""
    _, ours = pair()
    arguments = inputs(ours)
    sink, width = torch.tensor([-1.0, 2.0]).double(), WIDTH // HEADS
    value = torch.linspace(-1, 1, WIDTH).double().view(HEADS, width)
    for own in (value, nn.Parameter(value[0])):
        module = Attention(
            WIDTH, HEADS, batch_first=True, dtype=torch.float64, heads=SoftmaxHeads(sink=sink, sink_value=own)
        )
        module.load_state_dict(ours.state_dict(), strict=False)
        output, _, level = module(*arguments, need_weights=need_weights, need_log_partition=True)
        share = (sink[:, None] - level).exp().unsqueeze(-1)
        part = (share * own.expand(HEADS, width).unsqueeze(-2)).transpose(1, 2).flatten(2)
        plain = Attention(WIDTH, HEADS, batch_first=True, dtype=torch.float64, heads=SoftmaxHeads(sink=sink))
        plain.load_state_dict(ours.state_dict(), strict=False)
        wanted = plain(*arguments, need_weights=need_weights)[0] + part @ module.out_proj.weight.mT
        torch.testing.assert_close(output, wanted, rtol=1e-10, atol=1e-12)
    assert "heads.sink_value" in dict(module.named_parameters())
    with pytest.raises(ValueError, match="give its log-weight as sink"):
        SoftmaxHeads(sink_value=value)
    with pytest.raises(ValueError, match="sink_value must have shape"):
        Attention(WIDTH, HEADS, heads=SoftmaxHeads(sink=sink, sink_value=value[:, :1]))


@pytest.mark.parametrize(("shape", "need_weights"), [((), True), ((HEADS,), True), ((HEADS,), False)])
def test_parameters_train(shape, need_weights):
    """Gradients of scale and sink by finite differences."""
    torch.manual_seed(0)
    scale = nn.Parameter(torch.full(shape, 0.7).double())
    sink = nn.Parameter(torch.full(shape, 0.2).double())
    module = Attention(WIDTH, HEADS, batch_first=True, dtype=torch.float64, heads=SoftmaxHeads(scale=scale, sink=sink))
    assert {"heads.scale", "heads.sink"} <= set(dict(module.named_parameters()))
    arguments = [tensor.detach() for tensor in inputs(module)]

    def function(scale, sink):
        parameters = {"heads.scale": scale, "heads.sink": sink}
        keywords = {"need_weights": need_weights, "need_log_partition": True}
        output, _, log_partition = torch.func.functional_call(module, parameters, tuple(arguments), keywords)
        return output, log_partition

    check_derivatives(function, (scale, sink))


def test_numbers_that_are_tensors_are_buffers_and_move():
    module = Attention(8, 2, heads=SoftmaxHeads(scale=torch.tensor([0.1, 0.2])))
    assert "heads.scale" in module.state_dict()
    assert module.double().heads.scale.dtype == torch.float64


def test_the_log_partition_generates_the_output():
    """∂log Z/∂(scale·query) is the mean key: with values = keys and identity maps, the output (S3)."""
    module = Attention(6, 1, bias=False, batch_first=True, dtype=torch.float64, heads=SoftmaxHeads(scale=1.3))
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.eye(6).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(6))
    torch.manual_seed(0)
    query, key = torch.randn(2, 4, 6, dtype=torch.float64, requires_grad=True), torch.randn(2, 5, 6).double()
    output, _, log_partition = module(query, key, key, need_weights=False, need_log_partition=True)
    (gradient,) = torch.autograd.grad(log_partition.sum(), query)
    torch.testing.assert_close(gradient / 1.3, output, rtol=1e-12, atol=1e-12)


def test_a_measure_of_atoms_is_the_default():
    _, ours = pair()
    arguments, padding = inputs(ours), masks("boolean")["key_padding_mask"]
    other = Attention(WIDTH, HEADS, batch_first=True, dtype=torch.float64, heads=MeasureHeads(measures.Atoms.create))
    other.load_state_dict(ours.state_dict())
    for mask in (None, padding, torch.randn(BATCH, KEYS).double()):
        wanted = ours(*arguments, key_padding_mask=mask, need_weights=False, need_log_partition=True)
        got = other(*arguments, key_padding_mask=mask, need_log_partition=True)
        assert got[1] is None
        torch.testing.assert_close(got[0], wanted[0], rtol=1e-10, atol=1e-12)
        torch.testing.assert_close(got[2], wanted[2], rtol=1e-10, atol=1e-12)


def fitted_gaussian(points, log_weight):
    share = torch.softmax(log_weight, -1).unsqueeze(-1)
    location = (share * points).sum(-2)
    centred = points - location.unsqueeze(-2)
    return measures.Gaussian.create(location, (share * centred).mT @ centred)


def test_a_gaussian_of_pairs_is_linear_attention():
    """Its mean at (scale·query, 0) is mean value + Cov(value, key)·scale·query (X1)."""
    module = Attention(
        6, 1, bias=False, batch_first=True, dtype=torch.float64, heads=MeasureHeads(fitted_gaussian, scale=0.5)
    )
    with torch.no_grad():
        module.in_proj_weight.copy_(torch.eye(6).repeat(3, 1))
        module.out_proj.weight.copy_(torch.eye(6))
    torch.manual_seed(0)
    query, key, value = torch.randn(2, 4, 6).double(), torch.randn(2, 30, 6).double(), torch.randn(2, 30, 6).double()
    centred_key, centred_value = key - key.mean(1, keepdim=True), value - value.mean(1, keepdim=True)
    covariance = centred_value.mT @ centred_key / 30
    wanted = value.mean(1, keepdim=True) + 0.5 * query @ covariance.mT
    torch.testing.assert_close(module(query, key, value)[0], wanted, rtol=1e-10, atol=1e-12)


@every_row("need_weights", [True, False])
@every_row("sink", [None, 0.3])
def test_a_query_that_sees_no_key(need_weights, sink):
    module = Attention(WIDTH, HEADS, batch_first=True, dtype=torch.float64, heads=SoftmaxHeads(sink=sink))
    nn.init.normal_(module.out_proj.bias)
    arguments = inputs(module)
    padding = torch.zeros(BATCH, KEYS, dtype=torch.bool)
    padding[1] = True
    keywords = {"key_padding_mask": padding, "need_weights": need_weights, "need_log_partition": True}
    output, weights, log_partition = module(*arguments, **keywords)
    assert torch.equal(output[1], module.out_proj.bias.expand(LENGTH, -1))
    assert bool((log_partition[1] == (-torch.inf if sink is None else sink)).all())
    if need_weights:
        assert not weights[1].any()
    for gradient in torch.autograd.grad(output.sum(), [*arguments, *module.parameters()]):
        assert bool(gradient.isfinite().all())


def test_items_do_not_depend_on_their_batch_mates():
    module = Attention(WIDTH, HEADS, batch_first=True, heads=SoftmaxHeads(sink=0.1))
    arguments = inputs(module, dtype=torch.float32)
    padding = masks("boolean")["key_padding_mask"]
    together = module(*arguments, key_padding_mask=padding, need_weights=False)[0]
    for item in range(BATCH):
        alone = module(*(x[item : item + 1] for x in arguments), key_padding_mask=padding[item : item + 1])[0]
        torch.testing.assert_close(together[item : item + 1], alone, rtol=1e-5, atol=1e-6)


def test_evaluation_has_the_gradient_of_training_and_dropout_is_of_weights():
    module = Attention(WIDTH, HEADS, batch_first=True)
    arguments = inputs(module, dtype=torch.float32)
    gradients = [torch.autograd.grad(module.train(mode)(*arguments)[0].sum(), arguments) for mode in (True, False)]
    for train, evaluation in zip(*gradients, strict=True):
        assert torch.equal(train, evaluation)
    module = Attention(1, 1, dropout=0.25, bias=False, batch_first=True)
    nn.init.ones_(module.in_proj_weight)
    nn.init.ones_(module.out_proj.weight)
    torch.manual_seed(0)
    ones = torch.ones(1, 20_000, 1)
    output = module(ones, ones[:, :1], ones[:, :1])[0].flatten()
    # One key of weight 1: kept with probability 3/4 and then divided by it.
    assert sorted(set(output.tolist())) == pytest.approx([0, 4 / 3])
    assert abs(output.mean().item() - 1) < 5 * math.sqrt(0.25 / 0.75 / 20_000)
    assert torch.equal(module.eval()(ones, ones[:, :1], ones[:, :1])[0], ones)


@every_row("dtype", [torch.bfloat16, torch.float16])
@every_row("need_weights", [True, False])
@every_row("autocast", [True, False])
def test_half_precision(dtype, need_weights, autocast):
    module = Attention(WIDTH, HEADS, batch_first=True, heads=SoftmaxHeads(sink=nn.Parameter(torch.zeros(HEADS))))
    arguments = inputs(module, dtype=torch.float32)
    keywords = {"need_weights": need_weights, "need_log_partition": True, "is_causal": True}
    wanted, _, wanted_log = module.double()(*(x.double() for x in arguments), **keywords)
    module.to(torch.float32 if autocast else dtype)
    with torch.autocast("cpu", dtype=dtype, enabled=autocast):
        given = arguments if autocast else [x.to(dtype) for x in arguments]
        output, _, log_partition = module(*given, **keywords)
    assert output.dtype == dtype
    assert log_partition.dtype == torch.float32
    accuracy = 8 * torch.finfo(dtype).eps
    torch.testing.assert_close(output.double(), wanted, rtol=accuracy, atol=accuracy)
    torch.testing.assert_close(log_partition.double(), wanted_log, rtol=accuracy, atol=accuracy)
    output.float().sum().backward()
    assert all(bool(p.grad.isfinite().all()) for p in module.parameters())


@pytest.mark.slow
@pytest.mark.parametrize("need_weights", [False, True])
def test_compiled(need_weights):
    heads = SoftmaxHeads(sink=0.1, scale=nn.Parameter(torch.tensor([0.2, 0.4])))
    module = Attention(WIDTH, HEADS, batch_first=True, heads=heads)
    arguments = inputs(module, dtype=torch.float32)
    padding = masks("boolean")["key_padding_mask"]
    keywords = {"key_padding_mask": padding, "need_weights": need_weights, "need_log_partition": True}
    compiled = torch.compile(module, fullgraph=True, backend="aot_eager")
    outputs = [module(*arguments, **keywords) for module in (module, compiled)]
    gradients = [
        torch.autograd.grad(output.square().sum() + log_partition.sum(), [*arguments, module.heads.scale])
        for output, _, log_partition in outputs
    ]
    for eager, got in zip((*outputs[0], *gradients[0]), (*outputs[1], *gradients[1]), strict=True):
        if eager is not None:
            torch.testing.assert_close(got, eager, rtol=1e-4, atol=1e-5)


def test_vmap_is_a_loop():
    module = Attention(WIDTH, HEADS, batch_first=True)
    arguments = [x.detach() for x in inputs(module, dtype=torch.float32)]
    call = lambda query, key, value: module(query, key, value, need_weights=False)[0]  # noqa: E731
    torch.testing.assert_close(torch.func.vmap(call)(*arguments), call(*arguments), rtol=1e-5, atol=1e-6)


BAD = {
    "embed_dim": (lambda: Attention(7, 2), "multiple of num_heads, got 7 and 2"),
    "dropout": (lambda: Attention(8, 2, dropout=1.0), "dropout must be finite, at least 0 and below 1, got 1.0"),
    "scale shape": (lambda: Attention(8, 2, heads=SoftmaxHeads(scale=torch.ones(3))), r"2 heads, got shape \(3,\)"),
    "scale kind": (lambda: Attention(8, 2, heads=SoftmaxHeads(scale="1")), "scale must be a number, got '1'"),
    "sink": (lambda: Attention(8, 2, heads=SoftmaxHeads(sink=math.inf)), "sink must be finite, got inf"),
    "window": (
        lambda: Attention(8, 2, add_zero_attn=True, heads=SoftmaxHeads(window=3)),
        "SoftmaxHeads does not support add_zero_attn: a window needs positions",
    ),
    "measure": (
        lambda: Attention(8, 2, 0.1, heads=MeasureHeads(fitted_gaussian)),
        "MeasureHeads does not support dropout",
    ),
    "no strategy": (lambda: Attention(8, 2, heads="softmax"), "heads must be a strategy, .* got 'softmax'"),
    "scale 0": (lambda: Attention(8, 2, heads=SoftmaxHeads(scale=0)), "scale must be positive and finite, got 0"),
    "scale below 0": (
        lambda: Attention(8, 2, heads=SoftmaxHeads(scale=torch.tensor([1.0, -1.0]))),
        "scale must be positive and finite, got -1",
    ),
    "unknown": (lambda: Attention(8, 2, beta=3), "unexpected keyword argument 'beta'"),
}


@every_row(("make", "message"), BAD.values(), ids=BAD)
def test_what_cannot_be_made(make, message):
    with pytest.raises((ValueError, TypeError), match=message):
        make()


def test_wrong_calls_name_what_is_wrong():
    module = Attention(WIDTH, HEADS, batch_first=True)
    query, key, value = inputs(module, dtype=torch.float32)
    calls = [
        ((query, key, value[:, 1:]), {}, "one length and batch"),
        ((query[:2], key, value), {}, "one batch size"),
        ((query, key[..., 1:], value), {}, r"key must have shape \(batch, length, 8\), got \(3, 7, 7\)"),
        ((query, key[0], value), {}, "key must have shape"),
        ((query, key.long(), value), {}, "key must be a floating-point tensor, got a tensor of torch.int64"),
        ((query, key, value), {"attn_mask": torch.zeros(7, 5)}, r"attn_mask must have shape \(5, 7\) or \(6, 5, 7\)"),
        ((query, key, value), {"key_padding_mask": torch.zeros(3, 5)}, r"key_padding_mask must have shape \(3, 7\)"),
        ((query, key, value), {"attn_mask": torch.zeros(5, 7).long()}, "True hides"),
    ]
    for arguments, keywords, message in calls:
        with pytest.raises((ValueError, TypeError), match=message):
            module(*arguments, **keywords)
    with pytest.raises(ValueError, match="the same for all queries"):
        Attention(8, 2, batch_first=True, heads=MeasureHeads(fitted_gaussian))(query, key, value, is_causal=True)


def test_every_combination_of_options_differs():
    """What an option advertises changes the output."""
    torch.manual_seed(0)
    query = torch.randn(1, LENGTH, WIDTH)
    outputs = []
    options = ({}, {"scale": 3.0}, {"sink": 0.0}, {"window": 1}, {"softcap": 0.1})
    for heads in (*(SoftmaxHeads(**option) for option in options), MeasureHeads(fitted_gaussian)):
        torch.manual_seed(1)
        outputs.append(Attention(WIDTH, HEADS, batch_first=True, heads=heads)(query)[0])
    for one, other in itertools.combinations(outputs, 2):
        assert (one - other).abs().max() > 1e-4


@pytest.mark.medium
@given(
    heads=st.integers(1, 3),
    size=st.integers(1, 4),
    length=st.integers(1, 5),
    keys=st.integers(1, 5),
    scale=st.sampled_from([1e-6, 1.0, 300.0]),
    seed=st.integers(0, 1000),
    causal=st.booleans(),
    data=st.data(),
)
def test_any_shape_scale_and_mask(heads, size, length, keys, scale, seed, causal, data):
    """Against float64 matrices; rows without a key, repeated keys and huge scores among them."""
    torch.manual_seed(seed)
    hidden = torch.tensor(data.draw(st.lists(st.booleans(), min_size=keys, max_size=keys)))
    module = Attention(heads * size, heads, batch_first=True, dtype=torch.float64, heads=SoftmaxHeads(scale=scale))
    query, key, value = (torch.randn(1, count, heads * size).double() for count in (length, keys, keys))
    if data.draw(st.booleans()):
        key = key[:, :1].expand(key.shape)
    seen = torch.ones(length, keys).tril().bool() if causal else torch.ones(length, keys).bool()
    seen = seen & ~hidden
    q, k, v = (
        (tensor @ weight.T).unflatten(-1, (heads, size)).transpose(1, 2)
        for tensor, weight in zip((query, key, value), module.in_proj_weight.chunk(3), strict=True)
    )
    scores = (q @ k.mT * scale).masked_fill(~seen, -torch.inf)
    wanted_log = torch.logsumexp(scores, -1)
    weights = torch.where(seen.any(-1, keepdim=True), scores.softmax(-1), 0.0)
    wanted = (weights @ v).transpose(1, 2).flatten(2) @ module.out_proj.weight.T
    for need_weights in (True, False):
        keywords = {"need_weights": need_weights, "is_causal": causal, "need_log_partition": True}
        output, got, log_partition = module(query, key, value, hidden[None], average_attn_weights=False, **keywords)
        torch.testing.assert_close(output, wanted, rtol=1e-9, atol=1e-11)
        torch.testing.assert_close(log_partition, wanted_log, rtol=1e-10, atol=1e-10)
        if need_weights:
            torch.testing.assert_close(got, weights, rtol=1e-9, atol=1e-11)
