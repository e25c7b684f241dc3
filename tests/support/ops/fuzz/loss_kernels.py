"""Cases of the kernels that are losses, or about a vocabulary."""

import math
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from tests.support.ops.fuzz.arithmetic import Rounding
from tests.support.ops.fuzz.attention_kernels import learned, order_of
from tests.support.ops.fuzz.attention_law import normalised
from tests.support.ops.fuzz.case import Case, Tensors
from tests.support.ops.fuzz.draws import DTYPES, Draws
from torch import Tensor

from massieu import ops

IGNORED = -100


def _case(
    draws: Draws,
    dtype: torch.dtype,
    kernel: Callable[[Tensors], Tensors],
    explicit: Callable,
    *names: str,
    **others: Any,
) -> Case:
    chosen = learned(draws, *names)
    draws.say(learned=",".join(chosen))
    return Case(draws.leaves, draws.views, kernel, explicit, chosen, order_of(draws, dtype), **others)


def _draw_head(
    draws: Draws, dtype: torch.dtype, lead: tuple[int, ...], words: int, prefix: str = "", hidden: bool = True
) -> None:
    """Hidden states, a vocabulary's weight, and a bias that hides some words, but never the first."""
    size, spread = draws.choice([1, 2, 5, 16]), draws.choice([0.1, 1.0, 2.0])
    draws.add_numbers(f"{prefix}hidden", (*lead, size), dtype, spread)
    draws.add_numbers(f"{prefix}weight", (words, size), dtype, spread)
    if draws.chance(0.6):
        share = draws.choice([0.0, 0.3]) if hidden else 0.0

        def make(*of_leaf: int) -> Tensor:
            gone = (draws.normal(*of_leaf).abs() < share) & (torch.arange(*of_leaf[-1:]) > of_leaf[-1] // 2)
            return draws.normal(*of_leaf).masked_fill(gone, -math.inf).to(dtype)

        draws.add(f"{prefix}bias", (words,), make, plain=True)


def _lead(draws: Draws) -> tuple[int, ...]:
    return draws.choice([(), (1,), (3,), (5,), (2, 3), (2, 1, 2), (0,), (17,), (140,)])


def _words(draws: Draws) -> int:
    return draws.choice([1, 2, 3, 5, 11, 50, 300])


def _draw_targets(draws: Draws, lead: tuple[int, ...], words: int) -> None:
    """Words that no bias hides, some of them ignored."""
    ignored = draws.choice([0.0, 0.0, 0.4])

    def make(*of_leaf: int) -> Tensor:
        target = draws.whole_numbers(0, words // 2 + 1, *of_leaf).clamp_max(words - 1)
        return target.masked_fill(draws.normal(*of_leaf).abs() < ignored, IGNORED)

    draws.add("target", lead, make)


def _logits(
    views: Tensors, softcap: float | None, temperature: Any, rounding: Rounding, prefix: str = ""
) -> tuple[Tensor, Tensor]:
    """Finite logits (*lead, V), and which words are visible."""
    hidden, weight = rounding(views[f"{prefix}hidden"]), rounding(views[f"{prefix}weight"])
    logits = rounding(hidden @ weight.mT)
    visible = torch.ones_like(logits, dtype=torch.bool)
    if f"{prefix}bias" in views:
        bias = views[f"{prefix}bias"]
        visible = (bias > -math.inf).expand(logits.shape)
        logits = rounding(logits + bias.where(bias > -math.inf, 0.0))
    if softcap is not None:
        logits = rounding.bent(logits, softcap)
    return rounding(logits / temperature), visible


def token_statistics(draws: Draws) -> Case:
    dtype, lead, words = draws.choice(DTYPES), _lead(draws), _words(draws)
    _draw_head(draws, dtype, lead, words)
    _draw_targets(draws, lead, words)
    softcap, number = draws.choice([None, None, 1.0, 30.0]), draws.choice([1.0, 1.0, 0.5, 3])
    if softcap is None and draws.chance(0.4):
        shape, of_dtype = draws.choice([(), (1,)]), draws.choice([dtype, torch.float32])
        draws.add("temperature", shape, lambda *size: (0.5 + draws.normal(*size).abs()).to(of_dtype), plain=True)
    draws.say(softcap=softcap, temperature=number)

    def kernel(views: Tensors) -> Tensors:
        options = {"bias": views.get("bias"), "temperature": views.get("temperature", number), "softcap": softcap}
        return ops.token_statistics(views["hidden"], views["weight"], views["target"], **options)._asdict()

    def explicit(views: Tensors, rounding: Rounding) -> Tensors:
        temperature = views["temperature"].reshape(()) if "temperature" in views else number
        logits, visible = _logits(views, softcap, temperature, rounding)
        p, log_p, level = normalised(logits, visible, rounding)
        counted = views["target"] != IGNORED
        numbers = {
            "log_probability": log_p.gather(-1, views["target"].where(counted, 0).unsqueeze(-1)).squeeze(-1),
            "entropy": -rounding(p * log_p).sum(-1),
            "log_partition": level,
            "largest_probability": p.amax(-1).detach(),
        }
        return {name: part.where(counted, 0.0) for name, part in numbers.items()}

    def check(views: Tensors, results: Tensors) -> list[str]:
        return _wrong_ranks(views, results["rank"], dtype)

    names = "hidden", "weight", "bias", "temperature"
    return _case(draws, dtype, kernel, explicit, *names, check=check, unchecked=("rank",))


def _wrong_ranks(views: Tensors, rank: Tensor, dtype: torch.dtype) -> list[str]:
    """The words above the target, up to those that rounding may put on either side."""
    logits, visible = _logits(views, None, 1.0, Rounding())
    counted = views["target"] != IGNORED
    own = logits.gather(-1, views["target"].where(counted, 0).unsqueeze(-1))
    size = (
        torch.linalg.vector_norm(views["hidden"], dim=-1, keepdim=True)
        * torch.linalg.vector_norm(views["weight"], dim=-1).amax()
    )
    room = 8 * torch.finfo(torch.promote_types(dtype, torch.float32)).eps * (1 + size + logits.abs())
    most, least = (((logits > own + sign * room) & visible).sum(-1) for sign in (-1, 1))
    # The target itself is within its own room.
    right = torch.where(counted, (least <= rank) & (rank <= most - 1), rank == -1)
    return [] if bool(right.all()) else [f"rank: {int((~right).sum())} of {right.numel()} wrong"]


def token_divergence(draws: Draws) -> Case:
    dtype, lead, words = draws.choice(DTYPES), _lead(draws), _words(draws)
    other_dtype = dtype
    for prefix, of_dtype in (("", dtype), ("other_", other_dtype)):
        _draw_head(draws, of_dtype, lead, words, prefix, hidden=False)
    softcap, other_softcap = (draws.choice([None, None, 2.0]) for _ in range(2))
    temperature = draws.choice([1.0, 1.0, 0.7])
    has_target = draws.chance(0.4)
    if has_target:
        _draw_targets(draws, lead, words)
    hides = draws.chance(0.4) and words > 1
    draws.say(softcap=softcap, other_softcap=other_softcap, temperature=temperature, hides=hides)

    def biases(views: Tensors) -> Tensors:
        """Words that both models hide."""
        if not hides:
            return {name: views[name] for name in ("bias", "other_bias") if name in views}
        gone = torch.arange(words, device=views["hidden"].device) >= (words + 1) // 2
        like = views["hidden"].new_zeros(words)
        return {name: views.get(name, like).masked_fill(gone, -math.inf) for name in ("bias", "other_bias")}

    def kernel(views: Tensors) -> Tensors:
        tensors = [views[name] for name in ("hidden", "weight", "other_hidden", "other_weight")]
        options = {"softcap": softcap, "other_softcap": other_softcap, "temperature": temperature}
        return ops.token_divergence(*tensors, **options, **biases(views), target=views.get("target"))._asdict()

    def explicit(views: Tensors, rounding: Rounding) -> Tensors:
        views = views | biases(views)
        logits, visible = _logits(views, softcap, temperature, rounding)
        others, _ = _logits(views, other_softcap, temperature, rounding, "other_")
        p, log_p, _ = normalised(logits, visible, rounding)
        q, log_q, _ = normalised(others, visible, rounding)
        c = log_p - log_q
        kept = views["target"] != IGNORED if has_target else torch.ones(lead, dtype=torch.bool)
        # Terms that are all at least 0, as p − q sums to 0.
        forward = rounding(p * (torch.expm1(-c) + c)).sum(-1)
        backward = rounding(q * (torch.expm1(c) - c)).sum(-1)
        # The slopes in the logits are differences of the two laws, each of which was rounded: p − q may be smaller than that.
        forward = forward + rounding.slopes(others, p + q)
        backward = backward + rounding.slopes(logits, p + q)
        return {"divergence": forward.where(kept, 0.0), "reverse_divergence": backward.where(kept, 0.0)}

    names = "hidden", "weight", "bias", "other_hidden", "other_weight", "other_bias"
    return _case(draws, dtype, kernel, explicit, *names)


def linear_cross_entropy(draws: Draws) -> Case:
    dtype, lead, words = draws.choice(DTYPES), _lead(draws), _words(draws)
    smoothing, z_loss = draws.choice([0.0, 0.0, 0.1, 1.0]), draws.choice([0.0, 0.0, 0.01, 1.0])
    softcap, reduction = draws.choice([None, None, 1.0, 30.0]), draws.choice(["none", "sum", "mean"])
    probabilities = draws.chance(0.3)
    _draw_head(draws, dtype, lead, words, hidden=smoothing == 0 and not probabilities)
    if probabilities:
        draws.add("target", (*lead, words), lambda *size: draws.normal(*size).mul(2).softmax(-1).to(dtype))
    else:
        _draw_targets(draws, lead, words)
    if draws.chance(0.4):
        draws.add("class_weight", (words,), lambda *size: draws.normal(*size).abs().to(dtype), plain=True)
    lengths = draws.parts(lead[-1], draws.whole(1, 3)) if lead and reduction != "none" and draws.chance(0.3) else None
    options = {"label_smoothing": smoothing, "z_loss": z_loss, "softcap": softcap, "reduction": reduction}
    draws.say(**options, documents=lengths)

    def kernel(views: Tensors) -> Tensors:
        tensors = views["hidden"], views["weight"], views["target"]
        documents = None if lengths is None else ops.Documents.of_lengths(lengths)
        given = {"bias": views.get("bias"), "class_weight": views.get("class_weight"), "documents": documents}
        return ops.linear_cross_entropy(*tensors, **given, **options, return_log_partition=True)._asdict()

    def explicit(views: Tensors, rounding: Rounding) -> Tensors:
        logits, visible = _logits(views, softcap, 1.0, rounding)
        _, log_p, level = normalised(logits, visible, rounding)
        factor = views["class_weight"] if "class_weight" in views else torch.ones(words, dtype=torch.float64)
        counted = torch.ones(lead, dtype=torch.bool) if probabilities else views["target"] != IGNORED
        place = None if probabilities else views["target"].where(counted, 0)
        share = views["target"] if place is None else F.one_hot(place, words).double()
        part = torch.ones(lead, dtype=torch.float64) if place is None else factor[place]
        target = rounding((1 - smoothing) * share + smoothing / words) * factor
        log_p = log_p + rounding.of_one(log_p)
        loss = rounding(-target * log_p).sum(-1) + z_loss * part * rounding(level.square())
        loss, part = (numbers.where(counted, 0.0) for numbers in (rounding(loss), part))
        return {"loss": _reduced(loss, part, reduction, lengths, rounding), "log_partition": level}

    names = "hidden", "weight", "bias", "class_weight", *(("target",) if probabilities else ())
    return _case(draws, dtype, kernel, explicit, *names)


def _reduced(loss: Tensor, part: Tensor, reduction: str, lengths: list[int] | None, rounding: Rounding) -> Tensor:
    if reduction == "none":
        return loss
    if lengths is None:
        sums, parts = loss.sum(), part.sum()
    else:
        sums, parts = (torch.stack([one.sum(-1) for one in given.split(lengths, -1)], -1) for given in (loss, part))
    if reduction == "sum":
        return rounding(sums)
    return rounding(sums / rounding(parts).where(parts != 0, math.nan))


def info_nce(draws: Draws) -> Case:
    dtype, queries = draws.choice(DTYPES), draws.choice([1, 2, 3, 5, 9, 40])
    symmetric, size = draws.chance(0.4), draws.choice([1, 3, 8])
    has_positive = not symmetric and draws.chance(0.4)
    keys = draws.choice([1, 2, 5, 9]) if has_positive else queries
    spread = draws.choice([0.1, 1.0, 1.5])
    draws.add_numbers("query", (queries, size), dtype, spread)
    draws.add_numbers("key", (keys, size), dtype, spread)
    if has_positive:
        draws.add("positive", (queries,), lambda *shape: draws.whole_numbers(0, keys, *shape))
    extra = draws.choice([0, 0, 1, 4])
    if extra:
        draws.add_numbers("negatives", (extra, size), dtype, spread)
    kind = draws.choice(["none", "keys", "pairs", "ids"])
    if kind in ("keys", "pairs"):
        count = keys + extra
        draws.add_log_weight("log_weight", (count,) if kind == "keys" else (queries, count), dtype)
    if kind == "ids":
        draws.add("query_ids", (queries,), lambda *shape: draws.whole_numbers(0, 4, *shape))
        draws.add("key_ids", (keys + extra,), lambda *shape: draws.whole_numbers(0, 4, *shape))
    number = draws.choice([1.0, 0.5, 2])
    if draws.chance(0.5):
        of_dtype = draws.choice([dtype, torch.float32])
        draws.add(
            "temperature", draws.choice([(), (1,)]), lambda *s: (0.3 + draws.normal(*s).abs()).to(of_dtype), plain=True
        )
    draws.say(symmetric=symmetric, temperature=number)

    def kernel(views: Tensors) -> Tensors:
        log_weight = views.get("log_weight")
        if kind == "ids":
            log_weight = ops.FalseNegatives(views["query_ids"], views["key_ids"])
        given = {name: views.get(name) for name in ("positive", "negatives")}
        options = {"temperature": views.get("temperature", number), "symmetric": symmetric}
        found = ops.info_nce(
            views["query"], views["key"], log_weight=log_weight, **given, **options, return_log_partition=True
        )
        return found._asdict()

    def explicit(views: Tensors, rounding: Rounding) -> Tensors:
        temperature = views["temperature"].reshape(()) if "temperature" in views else number
        columns = torch.cat([views["key"], views["negatives"]]) if extra else views["key"]
        scores = rounding(rounding(rounding(views["query"]) @ rounding(columns).mT) / temperature)
        positive = views["positive"] if has_positive else torch.arange(queries)
        pairs, of_keys, visible = _pair_weights(views, scores, positive, kind)
        directions = [_excess(scores, pairs + of_keys, visible, positive, rounding)]
        if symmetric:
            seen = _of_pairs(visible, views, kind)[:, :keys].mT
            directions.append(_excess(scores[:, :keys].mT, pairs[:, :keys].mT, seen, positive, rounding))
        losses, levels = zip(*directions, strict=True)
        loss = torch.stack(losses).mean(-1).mean()
        return {"loss": rounding(loss), "log_partition": torch.stack(levels) if symmetric else levels[0]}

    names = "query", "key", "negatives", "log_weight", "temperature"
    return _case(draws, dtype, kernel, explicit, *names)


def _pair_weights(views: Tensors, scores: Tensor, positive: Tensor, kind: str) -> tuple[Tensor, Tensor, Tensor]:
    """Finite log-weights of pairs and of keys, and which pairs are visible."""
    none, visible = torch.zeros_like(scores), torch.ones_like(scores, dtype=torch.bool)
    if kind == "ids":
        equal = views["query_ids"].unsqueeze(1) == views["key_ids"]
        return none, none, ~equal | (positive.unsqueeze(1) == torch.arange(scores.shape[1]))
    if kind == "none":
        return none, none, visible
    given = views["log_weight"].expand(scores.shape)
    visible = given if given.dtype == torch.bool else given > -math.inf
    weight = none if given.dtype == torch.bool else given.where(visible, 0.0)
    return (weight, none, visible) if kind == "pairs" else (none, weight, visible)


def _of_pairs(visible: Tensor, views: Tensors, kind: str) -> Tensor:
    """What is visible in the other direction, in which weights of single keys have no part."""
    return torch.ones_like(visible) if kind == "keys" else visible


def _excess(
    scores: Tensor, weight: Tensor, visible: Tensor, positive: Tensor, rounding: Rounding
) -> tuple[Tensor, Tensor]:
    """log Z − the positive's score, 0 where nothing is visible, and log Z."""
    tilted = rounding(scores + weight)
    # A hidden positive attracts all the same, and has no log-weight.
    place = positive.unsqueeze(1)
    own, weight_of_own, seen = (part.gather(1, place).squeeze(1) for part in (scores, weight, visible))
    _, log_p, level = normalised(tilted, visible, rounding)
    excess = torch.where(seen, weight_of_own - log_p.gather(1, place).squeeze(1), level - own)
    empty = ~visible.any(-1)
    excess = rounding(excess) + rounding.of_one(excess)
    return excess.where(~empty, 0.0), level.masked_fill(empty, -math.inf)


def n_pairs(draws: Draws) -> Case:
    dtype, count, size = draws.choice(DTYPES), draws.choice([1, 2, 5, 9]), draws.choice([1, 3, 8])
    for name in ("query", "key"):
        draws.add_numbers(name, (count, size), dtype, draws.choice([0.1, 1.0]))
    if draws.chance(0.5):
        draws.add_log_weight("log_weight", (count,), dtype)
    norm_weight = draws.choice([0.0, 0.3])
    lengths = draws.parts(count, 2) if draws.chance(0.3) else None
    draws.say(norm_weight=norm_weight, documents=lengths)

    def kernel(views: Tensors) -> Tensors:
        documents = None if lengths is None else ops.Documents.of_lengths(lengths)
        options = {"log_weight": views.get("log_weight"), "documents": documents, "norm_weight": norm_weight}
        return {"loss": ops.n_pairs(views["query"], views["key"], **options)}

    def explicit(views: Tensors, rounding: Rounding) -> Tensors:
        losses, first = [], 0
        for length in lengths or [count]:
            part = slice(first, first + length)
            first += length
            query, key = rounding(views["query"][part]), rounding(views["key"][part])
            scores = rounding(query @ key.mT)
            given = {"log_weight": views["log_weight"][part]} if "log_weight" in views else {}
            pairs, of_keys, visible = _pair_weights(given, scores, torch.arange(length), "keys" if given else "none")
            loss, _ = _excess(scores, pairs + of_keys, visible, torch.arange(length), rounding)
            norms = norm_weight * (query.square().sum(-1) + key.square().sum(-1))
            losses.append(rounding((loss + rounding(norms)).mean()))
        return {"loss": torch.stack(losses) if lengths else losses[0]}

    return _case(draws, dtype, kernel, explicit, "query", "key", "log_weight")


def nca(draws: Draws) -> Case:
    dtype, count, size = draws.choice(DTYPES), draws.choice([2, 3, 6, 15]), draws.choice([1, 3, 8])
    draws.add_numbers("embedding", (count, size), dtype, draws.choice([0.1, 0.5, 1.0]))
    draws.add("labels", (count,), lambda *shape: draws.whole_numbers(0, 3, *shape), plain=True)

    def kernel(views: Tensors) -> Tensors:
        return ops.nca(views["embedding"], views["labels"], return_log_partition=True)._asdict()

    def explicit(views: Tensors, rounding: Rounding) -> Tensors:
        point = rounding(views["embedding"] - rounding(views["embedding"].mean(0).detach()))
        norm = rounding(point.square().sum(-1))
        scores = rounding(rounding(2 * point @ rounding(point).mT) - norm) - norm.unsqueeze(1)
        other = ~torch.eye(count, dtype=torch.bool)
        alike = other & (views["labels"].unsqueeze(1) == views["labels"])
        *_, everyone = normalised(scores, other, rounding)
        *_, peers = normalised(scores, alike, rounding)
        counted = alike.any(1)
        loss = rounding(everyone - peers).where(counted, 0.0).sum() / counted.sum()
        return {"loss": rounding(loss), "log_partition": everyone}

    return _case(draws, dtype, kernel, explicit, "embedding")


def binary_nce(draws: Draws) -> Case:
    dtype = draws.choice(DTYPES)
    shapes = draws.choice([((3,), (3, 2)), ((1,), (5,)), ((2, 2), (3,)), ((), (4,))])
    for name, shape in zip(("data", "noise"), shapes, strict=True):
        draws.add_numbers(f"{name}_log_density", shape, dtype)
        draws.add_numbers(f"{name}_log_noise", shape, dtype)
    gone = draws.choice([0.0, 0.4])
    if gone:
        for name in ("noise_log_density", "data_log_noise"):
            leaf = draws.leaves[name]
            draws.leaves[name] = leaf.masked_fill(draws.normal(*leaf.shape).abs() < gone, -math.inf)
    number = draws.choice([0.0, 1.5])
    if draws.chance(0.6):
        of_dtype = draws.choice([dtype, torch.float32])
        draws.add("log_partition", draws.choice([(), (1,)]), lambda *size: draws.normal(*size).to(of_dtype), plain=True)
    draws.say(log_partition=number, gone=gone)

    def kernel(views: Tensors) -> Tensors:
        names = "data_log_density", "data_log_noise", "noise_log_density", "noise_log_noise"
        level = views.get("log_partition", number)
        return {"loss": ops.binary_nce(*(views[name] for name in names), log_partition=level)}

    def explicit(views: Tensors, rounding: Rounding) -> Tensors:
        level = views["log_partition"].reshape(()) if "log_partition" in views else number
        ratio = views["noise_log_noise"].numel() / views["data_log_noise"].numel()

        def surprise(name: str, sign: int) -> Tensor:
            """−log σ(sign·logit), 0 where the logit is infinite."""
            density, noise = views[f"{name}_log_density"], views[f"{name}_log_noise"]
            sure = (density == -math.inf) | (noise == -math.inf)
            logit = density.where(~sure, 0.0) - level - noise.where(~sure, 0.0) - math.log(ratio)
            logit = rounding(sign * rounding(logit))
            both = torch.stack([torch.zeros_like(logit), -logit], -1)
            _, log_p, _ = normalised(both, torch.ones_like(both, dtype=torch.bool), rounding)
            return rounding(-log_p[..., 0]).where(~sure, 0.0).sum()

        loss = surprise("data", 1) / views["data_log_noise"].numel()
        return {"loss": rounding(loss + surprise("noise", -1) / views["data_log_noise"].numel())}

    names = "data_log_density", "data_log_noise", "noise_log_density", "noise_log_noise", "log_partition"
    return _case(draws, dtype, kernel, explicit, *names)
