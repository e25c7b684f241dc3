"""Each rule against its formula, written out in float64, on calls with everything that attention may have."""

import itertools
from dataclasses import replace

import pytest
import torch
from torch import Tensor, nn

from massieu.errors import InputError
from massieu.probing.capture.attention_call import AttentionCall, AttentionSite
from massieu.probing.replaced import rules
from massieu.probing.replaced.rules import parse

B, H, HK, L, D, V = 2, 4, 2, 7, 6, 5


def call(kind: str) -> AttentionCall:
    generator = torch.Generator().manual_seed(len(kind))

    def draw(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator)

    keys = 9 if kind in ("cached", "crossed") else L
    heads = H if kind == "plain" else HK
    weight = None
    if kind in ("padded", "sink"):
        weight = torch.ones(B, 1, 1, keys, dtype=torch.bool)
        weight[1, :, :, 4:] = False
    elif kind == "cached":
        weight = torch.ones(L, keys, dtype=torch.bool).tril(keys - L)[None, None]
    elif kind == "biased":
        weight = draw(B, H, L, keys).masked_fill(torch.ones(L, keys, dtype=torch.bool).triu(1), -torch.inf)
        weight[0, :, 2] = -torch.inf  # a query that sees no key
    return AttentionCall(
        AttentionSite("site"),
        nn.Identity(),
        2 * draw(B, H, L, D),
        draw(B, heads, keys, D),
        draw(B, heads, keys, V),
        weight,
        kind == "causal",
        0.7,
        1.5 if kind == "capped" else None,
        draw(H) if kind == "sink" else None,
        torch.zeros(B, L, H, V),
    )


KINDS = ["plain", "grouped", "causal", "padded", "biased", "capped", "sink", "cached", "crossed"]


def written_out(attention_call: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Scores with log-weights, keys and values of every query head, in float64."""
    key, value = (t.double().repeat_interleave(H // t.shape[1], 1) for t in (attention_call.key, attention_call.value))
    return logits_of(attention_call, attention_call.query.double(), key), key, value


def logits_of(attention_call: AttentionCall, query: Tensor, key: Tensor, factor: float = 1.0) -> Tensor:
    scores = attention_call.scale * query @ key.mT
    if attention_call.softcap is not None:
        scores = attention_call.softcap * torch.tanh(scores / attention_call.softcap)
    scores = factor * scores
    if attention_call.is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if attention_call.log_weight is not None and attention_call.log_weight.dtype == torch.bool:
        scores = scores.masked_fill(~attention_call.log_weight, -torch.inf)
    elif attention_call.log_weight is not None:
        scores = scores + attention_call.log_weight.double()
    return scores


def softmax(logits: Tensor, sink: Tensor | None) -> Tensor:
    """With a sink's share left out, and 0 where nothing is seen."""
    if sink is not None:
        logits = torch.cat([logits, sink.double()[None, :, None, None].expand(*logits.shape[:-1], 1)], -1)
    p = torch.softmax(logits, -1).nan_to_num()
    return p if sink is None else p[..., :-1]


def close(output: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(output.double(), expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rules_that_change_nothing(kind):
    """All keys, all of the window, the same temperature, one step: attention itself."""
    attention_call = call(kind)
    logits, _, value = written_out(attention_call)
    expected = softmax(logits, attention_call.sink) @ value
    for text in ("top_k(99)", "window(99)", "scale(1)", "entmax(1)", "steps(1)", "received_at_least(0)"):
        if kind == "crossed" and text.startswith("window"):
            continue
        close(parse(text)(attention_call), expected)
    assert parse("identity")(attention_call) is attention_call.output
    assert not parse("off")(attention_call).any()


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_keys(kind):
    attention_call = call(kind)
    logits, _, value = written_out(attention_call)
    keys = logits.shape[-1]
    largest = torch.zeros_like(logits, dtype=torch.bool).scatter_(
        -1, logits.argsort(-1, descending=True)[..., :2], True
    )
    close(
        parse("top_k(2)")(attention_call),
        softmax(logits.masked_fill(~largest, -torch.inf), attention_call.sink) @ value,
    )
    if kind == "crossed":
        with pytest.raises(InputError, match="it is not known which of the 9 keys of site belong to its 7 queries"):
            parse("window(3)")(attention_call)
        return
    distance = (torch.arange(keys - L, keys)[:, None] - torch.arange(keys)).abs()
    close(
        parse("window(3)")(attention_call),
        softmax(logits.masked_fill(distance > 2, -torch.inf), attention_call.sink) @ value,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_receive_little(kind):
    attention_call = call(kind)
    logits, _, value = written_out(attention_call)
    keys = logits.shape[-1]
    p, visible = softmax(logits, attention_call.sink), logits > -torch.inf
    real = (
        torch.ones(B, 1, L, 1) if kind == "crossed" else visible.any(2)[:, :, keys - L :, None]
    )  # padding is no query
    p, visible = p * real, visible & real.bool()
    uniform = (visible / visible.sum(-1, keepdim=True).clamp_min(1)).sum(2)
    keep = (p.sum(2) >= 0.9 * uniform)[:, :, None].expand_as(logits).clone()
    if kind != "crossed":
        keep |= torch.arange(keys - L, keys)[:, None] == torch.arange(keys)
    assert not keep.all()
    close(
        parse("received_at_least(0.9)")(attention_call),
        softmax(logits.masked_fill(~keep, -torch.inf), attention_call.sink) @ value,
    )


@pytest.mark.parametrize("kind", KINDS)
def test_another_temperature(kind):
    attention_call = call(kind)
    _, key, value = written_out(attention_call)
    logits = logits_of(attention_call, attention_call.query.double(), key, factor=2.5)
    close(parse("scale(2.5)")(attention_call), softmax(logits, attention_call.sink) @ value)


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_weights(kind):
    """At α = 2 they are the projection onto the simplex: here by bisection for its threshold."""
    attention_call = call(kind)
    logits, _, value = written_out(attention_call)
    if attention_call.sink is not None:
        logits = torch.cat(
            [logits, attention_call.sink.double()[None, :, None, None].expand(*logits.shape[:-1], 1)], -1
        )
    top = logits.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    low, high = top - 1, top
    for _ in range(60):
        middle = (low + high) / 2
        above = (logits - middle).clamp_min(0).sum(-1, keepdim=True) >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    weights = (logits - low).clamp_min(0)[..., : value.shape[2]]
    close(parse("entmax(2)")(attention_call), weights @ value)


@pytest.mark.parametrize("kind", KINDS)
def test_one_softmax_over_all_heads(kind):
    attention_call = call(kind)
    logits, _, value = written_out(attention_call)
    logits = logits if attention_call.sink is None else torch.cat(
        [logits, attention_call.sink.double()[None, :, None, None].expand(*logits.shape[:-1], 1)], -1
    )  # fmt: skip
    joint = torch.softmax(logits.transpose(1, 2).flatten(2), -1).nan_to_num().unflatten(-1, (H, -1)).transpose(1, 2)
    close(parse("joint")(attention_call), H * joint[..., : value.shape[2]] @ value)


@pytest.mark.parametrize("kind", KINDS)
def test_retrieval_before_the_values(kind):
    attention_call = call(kind)
    logits, key, value = written_out(attention_call)
    once = softmax(logits, attention_call.sink) @ key
    twice = softmax(logits_of(attention_call, once, key), attention_call.sink) @ key
    close(
        parse("steps(3)")(attention_call), softmax(logits_of(attention_call, twice, key), attention_call.sink) @ value
    )
    point, start = attention_call.query.double(), attention_call.query.double()
    for _ in range(60):
        point = 0.95 * start + 0.05 * softmax(logits_of(attention_call, point, key), attention_call.sink) @ key
    close(
        parse("implicit(0.05)")(attention_call),
        softmax(logits_of(attention_call, point, key), attention_call.sink) @ value,
    )


@pytest.mark.parametrize("kind", ["plain", "grouped", "causal", "padded", "biased", "cached", "crossed"])
def test_the_conditional_mean(kind):
    """Ridge regression in the space of the kernel, about the mean of the keys that a query sees: a system for each."""
    attention_call = call(kind)
    logits, key, value = written_out(attention_call)
    weight = torch.zeros(1) if kind != "biased" else attention_call.log_weight
    assert weight is not None
    weight = weight.double().exp().expand_as(logits)
    expected = torch.zeros(B, H, L, V, dtype=torch.float64)
    for b, h, i in itertools.product(range(B), range(H), range(L)):
        seen = logits[b, h, i] > -torch.inf
        if not seen.any():
            continue
        near = key[b, h, seen] - key[b, h, seen].mean(0)
        system = torch.exp(attention_call.scale * near @ near.T) + torch.diag(0.3 / weight[b, h, i, seen])
        toward = torch.exp(attention_call.scale * near @ attention_call.query[b, h, i].double())
        expected[b, h, i] = torch.linalg.solve(system, toward) @ value[b, h, seen]
    close(parse("conditional_mean(0.3)")(attention_call), expected)


@pytest.mark.parametrize("text", ["top_k(2)", "scale(2)", "entmax(1.5)", "joint", "steps(2)", "conditional_mean"])
def test_hidden_keys_change_nothing(text):
    """Keys behind a query, and padding: their numbers, and how many they are."""
    for kind in ("causal", "padded"):
        attention_call = call(kind)
        seen = 4  # queries whose keys end there, and in the second item the keys that are not padding
        other = replace(attention_call, key=attention_call.key.clone(), value=attention_call.value.clone())
        other.key[1, :, seen:] *= -3
        other.value[1, :, seen:] += 5
        output = parse(text)(attention_call)[1, :seen]
        torch.testing.assert_close(parse(text)(other)[1, :seen], output, rtol=1e-5, atol=1e-6)
        short = replace(
            attention_call.rows(slice(1, 2)),
            **{name: getattr(attention_call, name)[1:, :, :seen] for name in ("query", "key", "value")},
        )
        short = replace(short, log_weight=None, output=attention_call.output[1:, :seen])
        torch.testing.assert_close(parse(text)(short)[0], output, rtol=1e-5, atol=1e-6)


def test_padding_receives_and_gives_no_attention():
    attention_call = call("padded")
    parts = {name: getattr(attention_call, name)[1:, :, :4] for name in ("query", "key", "value")}
    short = replace(attention_call, **parts, log_weight=None, output=attention_call.output[1:, :4])
    for share in (0.5, 0.9, 1.1):
        rule = rules.Received(share)
        torch.testing.assert_close(rule(attention_call)[1, :4], rule(short)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("text", ["top_k(2)", "window(3)", "scale(2)", "entmax(1.5)", "joint", "steps(2)"])
def test_nan_stays_nan(text):
    attention_call = call("biased")
    attention_call.query[0, :, 1] = torch.nan
    output = parse(text)(attention_call)
    assert output[0, 1].isnan().all() and not output[0, 3:].isnan().any()


def test_one_head_without_a_number_takes_it_to_all_that_share_one_softmax():
    attention_call = call("plain")
    attention_call.query[0, 1, 2] = torch.nan
    output = parse("joint")(attention_call)
    assert output[0, 2].isnan().all() and output[0, :2].isfinite().all() and output[0, 3:].isfinite().all()


def copied(attention_call: AttentionCall, copies: int) -> AttentionCall:
    """The same batch so many times in one."""
    parts = {name: getattr(attention_call, name) for name in ("query", "key", "value", "log_weight", "output")}
    return replace(
        attention_call, **{name: None if part is None else part.repeat(copies, 1, 1, 1) for name, part in parts.items()}
    )


@pytest.mark.parametrize("kind", ["grouped", "causal", "padded"])
def test_draws_have_attentions_mean_and_its_variance(kind):
    """Over many passes: the mean of n draws has mean attention, and variance Cov/n (S19)."""
    attention_call, passes, copies, draws = call(kind), 8, 100, 3
    many = copied(attention_call, copies)
    rule = parse(f"resample({draws})")
    logits, _, value = written_out(attention_call)
    p = softmax(logits, None)
    mean = p @ value
    variance = (p @ value.square() - mean.square()).clamp_min(0) / draws
    output = torch.cat([rule(many).double().transpose(1, 2).unflatten(0, (copies, B)) for _ in range(passes)])
    error = (variance / len(output)).sqrt() + 1e-6
    assert ((output.mean(0) - mean).abs() <= 5.5 * error).all()
    assert (output.var(0) - variance).abs().sum() <= 0.2 * variance.sum()


@pytest.mark.parametrize(
    "text", ["top_k(2)", "window(3)", "scale(2)", "entmax(1.5)", "joint", "steps(2)", "implicit(0.05)"]
)
def test_rules_are_differentiable(text):
    attention_call = call("causal")
    vars(attention_call)["query"] = attention_call.query.double()[:1, :, :4].requires_grad_()
    for name in ("key", "value"):
        vars(attention_call)[name] = getattr(attention_call, name).double()[:1, :, :4].requires_grad_()
    vars(attention_call)["output"] = attention_call.output.double()[:1, :4]

    def output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        vars(attention_call).update(query=query, key=key, value=value)
        return parse(text)(attention_call)

    assert torch.autograd.gradcheck(
        output, (attention_call.query, attention_call.key, attention_call.value), atol=1e-5, fast_mode=True
    )


def test_means_stand_in_for_outputs():
    attention_call = call("plain")
    mean = torch.randn(H, V)
    assert torch.equal(rules.Off({"site": mean})(attention_call), mean.expand(B, L, H, V))
    with pytest.raises(InputError, match="mean output of site was not measured"):
        rules.Off({})(attention_call)


def test_calls_that_a_rule_does_not_support_are_refused():
    for text, kind, match in (
        ("conditional_mean", "capped", "does not support soft-capped scores or sinks"),
        ("conditional_mean", "sink", "does not support soft-capped scores or sinks"),
        ("resample(2)", "capped", "resample does not support soft-capped scores or sinks, and site has one"),
    ):
        with pytest.raises(InputError, match=match):
            parse(text)(call(kind))
    scores = call("plain")
    vars(scores)["grade"] = "scores"
    for text in ("steps(2)", "implicit", "conditional_mean"):
        with pytest.raises(InputError, match="of site, of which only the scores are known"):
            parse(text)(scores)
    moving = call("plain")
    vars(moving)["moving"] = True
    for text in ("steps(2)", "implicit", "conditional_mean"):
        with pytest.raises(InputError, match="those of site have further terms computed from them"):
            parse(text)(moving)
    empty = call("plain")
    vars(empty)["value"] = empty.value[..., :0]
    for text in ("scale(2)", "top_k(2)", "resample(2)", "joint"):
        with pytest.raises(
            InputError, match="the attention of site cannot be replaced: the layout of its values is not known"
        ):
            parse(text)(empty)


def test_bad_rules():
    for text, match in (
        ("softmax", "unknown rule 'softmax'; known are identity, off, joint"),
        ("top_k", "top_k needs a number of keys, at least 1, got nothing"),
        ("top_k(0)", "top_k needs a number of keys, at least 1, got 0"),
        ("top_k(2.5)", "top_k needs a number of keys, at least 1, got 2.5"),
        ("top_k(2", "unknown rule"),
        ("off(3)", "unknown rule"),
        ("entmax(0.5)", "entmax needs an exponent, at least 1, got 0.5"),
        ("scale(inf)", "scale needs a factor, at least 0, got inf"),
        ("implicit(1)", "implicit needs a pull, at least 0 and below 1, got 1"),
        ("received_at_least(nan)", "received_at_least needs a share, at least 0, got nan"),
    ):
        with pytest.raises(InputError, match=match.replace("(", r"\(").replace(")", r"\)")):
            parse(text)
    assert (parse(" implicit "), parse("entmax(1.5)")) == (rules.AtRest(0.5), rules.Entmax(1.5))
