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


def written_out(given: AttentionCall) -> tuple[Tensor, Tensor, Tensor]:
    """Scores with log-weights, keys and values of every query head, in float64."""
    key, value = (t.double().repeat_interleave(H // t.shape[1], 1) for t in (given.key, given.value))
    return logits_of(given, given.query.double(), key), key, value


def logits_of(given: AttentionCall, query: Tensor, key: Tensor, factor: float = 1.0) -> Tensor:
    scores = given.scale * query @ key.mT
    if given.softcap is not None:
        scores = given.softcap * torch.tanh(scores / given.softcap)
    scores = factor * scores
    if given.is_causal:
        scores = scores.masked_fill(torch.ones(scores.shape[-2:], dtype=torch.bool).triu(1), -torch.inf)
    if given.log_weight is not None and given.log_weight.dtype == torch.bool:
        scores = scores.masked_fill(~given.log_weight, -torch.inf)
    elif given.log_weight is not None:
        scores = scores + given.log_weight.double()
    return scores


def softmax(logits: Tensor, sink: Tensor | None) -> Tensor:
    """With a sink's share left out, and 0 where nothing is seen."""
    if sink is not None:
        logits = torch.cat([logits, sink.double()[None, :, None, None].expand(*logits.shape[:-1], 1)], -1)
    p = torch.softmax(logits, -1).nan_to_num()
    return p if sink is None else p[..., :-1]


def close(found: Tensor, expected: Tensor) -> None:
    torch.testing.assert_close(found.double(), expected.transpose(1, 2), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("kind", KINDS)
def test_rules_that_change_nothing(kind):
    """All keys, all of the window, the same temperature, one step: attention itself."""
    given = call(kind)
    logits, _, value = written_out(given)
    expected = softmax(logits, given.sink) @ value
    for text in ("top_k(99)", "window(99)", "scale(1)", "entmax(1)", "steps(1)", "received_at_least(0)"):
        if kind == "crossed" and text.startswith("window"):
            continue
        close(parse(text)(given), expected)
    assert parse("identity")(given) is given.output
    assert not parse("off")(given).any()


@pytest.mark.parametrize("kind", KINDS)
def test_fewer_keys(kind):
    given = call(kind)
    logits, _, value = written_out(given)
    keys = logits.shape[-1]
    kept = torch.zeros_like(logits, dtype=torch.bool).scatter_(-1, logits.argsort(-1, descending=True)[..., :2], True)
    close(parse("top_k(2)")(given), softmax(logits.masked_fill(~kept, -torch.inf), given.sink) @ value)
    if kind == "crossed":
        with pytest.raises(InputError, match="it is not known which of the 9 keys of site belong to its 7 queries"):
            parse("window(3)")(given)
        return
    distance = (torch.arange(keys - L, keys)[:, None] - torch.arange(keys)).abs()
    close(parse("window(3)")(given), softmax(logits.masked_fill(distance > 2, -torch.inf), given.sink) @ value)


@pytest.mark.parametrize("kind", KINDS)
def test_keys_that_receive_little(kind):
    given = call(kind)
    logits, _, value = written_out(given)
    keys = logits.shape[-1]
    p, visible = softmax(logits, given.sink), logits > -torch.inf
    real = (
        torch.ones(B, 1, L, 1) if kind == "crossed" else visible.any(2)[:, :, keys - L :, None]
    )  # padding is no query
    p, visible = p * real, visible & real.bool()
    uniform = (visible / visible.sum(-1, keepdim=True).clamp_min(1)).sum(2)
    keep = (p.sum(2) >= 0.9 * uniform)[:, :, None].expand_as(logits).clone()
    if kind != "crossed":
        keep |= torch.arange(keys - L, keys)[:, None] == torch.arange(keys)
    assert not keep.all()
    close(parse("received_at_least(0.9)")(given), softmax(logits.masked_fill(~keep, -torch.inf), given.sink) @ value)


@pytest.mark.parametrize("kind", KINDS)
def test_another_temperature(kind):
    given = call(kind)
    _, key, value = written_out(given)
    logits = logits_of(given, given.query.double(), key, factor=2.5)
    close(parse("scale(2.5)")(given), softmax(logits, given.sink) @ value)


@pytest.mark.parametrize("kind", KINDS)
def test_sparse_weights(kind):
    """At α = 2 they are the projection onto the simplex: here by bisection for its threshold."""
    given = call(kind)
    logits, _, value = written_out(given)
    if given.sink is not None:
        logits = torch.cat([logits, given.sink.double()[None, :, None, None].expand(*logits.shape[:-1], 1)], -1)
    top = logits.amax(-1, keepdim=True).nan_to_num(neginf=0.0)
    low, high = top - 1, top
    for _ in range(60):
        middle = (low + high) / 2
        above = (logits - middle).clamp_min(0).sum(-1, keepdim=True) >= 1
        low, high = torch.where(above, middle, low), torch.where(above, high, middle)
    weights = (logits - low).clamp_min(0)[..., : value.shape[2]]
    close(parse("entmax(2)")(given), weights @ value)


@pytest.mark.parametrize("kind", KINDS)
def test_one_softmax_over_all_heads(kind):
    given = call(kind)
    logits, _, value = written_out(given)
    logits = logits if given.sink is None else torch.cat(
        [logits, given.sink.double()[None, :, None, None].expand(*logits.shape[:-1], 1)], -1
    )  # fmt: skip
    joint = torch.softmax(logits.transpose(1, 2).flatten(2), -1).nan_to_num().unflatten(-1, (H, -1)).transpose(1, 2)
    close(parse("joint")(given), H * joint[..., : value.shape[2]] @ value)


@pytest.mark.parametrize("kind", KINDS)
def test_retrieval_before_the_values(kind):
    given = call(kind)
    logits, key, value = written_out(given)
    once = softmax(logits, given.sink) @ key
    twice = softmax(logits_of(given, once, key), given.sink) @ key
    close(parse("steps(3)")(given), softmax(logits_of(given, twice, key), given.sink) @ value)
    point, start = given.query.double(), given.query.double()
    for _ in range(60):
        point = 0.95 * start + 0.05 * softmax(logits_of(given, point, key), given.sink) @ key
    close(parse("implicit(0.05)")(given), softmax(logits_of(given, point, key), given.sink) @ value)


@pytest.mark.parametrize("kind", ["plain", "grouped", "causal", "padded", "biased", "cached", "crossed"])
def test_the_conditional_mean(kind):
    """Ridge regression in the space of the kernel, about the mean of the keys that a query sees: a system for each."""
    given = call(kind)
    logits, key, value = written_out(given)
    weight = torch.zeros(1) if kind != "biased" else given.log_weight
    assert weight is not None
    weight = weight.double().exp().expand_as(logits)
    expected = torch.zeros(B, H, L, V, dtype=torch.float64)
    for b, h, i in itertools.product(range(B), range(H), range(L)):
        seen = logits[b, h, i] > -torch.inf
        if not seen.any():
            continue
        near = key[b, h, seen] - key[b, h, seen].mean(0)
        system = torch.exp(given.scale * near @ near.T) + torch.diag(0.3 / weight[b, h, i, seen])
        toward = torch.exp(given.scale * near @ given.query[b, h, i].double())
        expected[b, h, i] = torch.linalg.solve(system, toward) @ value[b, h, seen]
    close(parse("conditional_mean(0.3)")(given), expected)


@pytest.mark.parametrize("text", ["top_k(2)", "scale(2)", "entmax(1.5)", "joint", "steps(2)", "conditional_mean"])
def test_what_is_hidden_changes_nothing(text):
    """Keys behind a query, and padding: their numbers, and how many they are."""
    for kind in ("causal", "padded"):
        given = call(kind)
        seen = 4  # queries whose keys end there, and in the second item the keys that are not padding
        other = replace(given, key=given.key.clone(), value=given.value.clone())
        other.key[1, :, seen:] *= -3
        other.value[1, :, seen:] += 5
        found = parse(text)(given)[1, :seen]
        torch.testing.assert_close(parse(text)(other)[1, :seen], found, rtol=1e-5, atol=1e-6)
        short = replace(
            given.rows(slice(1, 2)), **{name: getattr(given, name)[1:, :, :seen] for name in ("query", "key", "value")}
        )
        short = replace(short, log_weight=None, output=given.output[1:, :seen])
        torch.testing.assert_close(parse(text)(short)[0], found, rtol=1e-5, atol=1e-6)


def test_padding_receives_and_gives_no_attention():
    given = call("padded")
    parts = {name: getattr(given, name)[1:, :, :4] for name in ("query", "key", "value")}
    short = replace(given, **parts, log_weight=None, output=given.output[1:, :4])
    for share in (0.5, 0.9, 1.1):
        rule = rules.Received(share)
        torch.testing.assert_close(rule(given)[1, :4], rule(short)[0], rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("text", ["top_k(2)", "window(3)", "scale(2)", "entmax(1.5)", "joint", "steps(2)"])
def test_what_is_not_a_number_stays_so(text):
    given = call("biased")
    given.query[0, :, 1] = torch.nan
    found = parse(text)(given)
    assert found[0, 1].isnan().all() and not found[0, 3:].isnan().any()


def test_one_head_without_a_number_takes_it_to_all_that_share_one_softmax():
    given = call("plain")
    given.query[0, 1, 2] = torch.nan
    found = parse("joint")(given)
    assert found[0, 2].isnan().all() and found[0, :2].isfinite().all() and found[0, 3:].isfinite().all()


def copied(given: AttentionCall, copies: int) -> AttentionCall:
    """The same batch so many times in one."""
    parts = {name: getattr(given, name) for name in ("query", "key", "value", "log_weight", "output")}
    return replace(
        given, **{name: None if part is None else part.repeat(copies, 1, 1, 1) for name, part in parts.items()}
    )


@pytest.mark.parametrize("kind", ["grouped", "causal", "padded"])
def test_draws_have_attentions_mean_and_its_variance(kind):
    """Over many passes: the mean of n draws has mean attention, and variance Cov/n (S19)."""
    given, passes, copies, draws = call(kind), 8, 100, 3
    many = copied(given, copies)
    rule = parse(f"resample({draws})")
    logits, _, value = written_out(given)
    p = softmax(logits, None)
    mean = p @ value
    variance = (p @ value.square() - mean.square()).clamp_min(0) / draws
    found = torch.cat([rule(many).double().transpose(1, 2).unflatten(0, (copies, B)) for _ in range(passes)])
    error = (variance / len(found)).sqrt() + 1e-6
    assert ((found.mean(0) - mean).abs() <= 5.5 * error).all()
    assert (found.var(0) - variance).abs().sum() <= 0.2 * variance.sum()


@pytest.mark.parametrize(
    "text", ["top_k(2)", "window(3)", "scale(2)", "entmax(1.5)", "joint", "steps(2)", "implicit(0.05)"]
)
def test_rules_are_differentiable(text):
    given = call("causal")
    vars(given)["query"] = given.query.double()[:1, :, :4].requires_grad_()
    for name in ("key", "value"):
        vars(given)[name] = getattr(given, name).double()[:1, :, :4].requires_grad_()
    vars(given)["output"] = given.output.double()[:1, :4]

    def output(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        vars(given).update(query=query, key=key, value=value)
        return parse(text)(given)

    assert torch.autograd.gradcheck(output, (given.query, given.key, given.value), atol=1e-5, fast_mode=True)


def test_means_stand_in_for_outputs():
    given = call("plain")
    mean = torch.randn(H, V)
    assert torch.equal(rules.Off({"site": mean})(given), mean.expand(B, L, H, V))
    with pytest.raises(InputError, match="mean output of site was not measured"):
        rules.Off({})(given)


def test_what_a_rule_does_not_know_is_refused():
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
