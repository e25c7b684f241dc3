"""Cases of the kernels that are attention, or about its weights."""

import math
import tempfile
from collections.abc import Callable

import torch
import torch.nn.functional as F
from tests.support.ops.fuzz.arithmetic import Rounding
from tests.support.ops.fuzz.attention_law import (
    AttentionDraw,
    AttentionShape,
    Law,
    draw_attention,
    draw_log_weight,
    draw_positions,
    draw_scale,
    draw_sink,
    normalised,
    per_query,
)
from tests.support.ops.fuzz.case import Case, Tensors
from tests.support.ops.fuzz.draws import DTYPES, Draws

from massieu import ops

REFUSED = "cannot be used here"
"""What the error of a backend says that refuses a problem: then the call takes the one that it prefers."""


def attempt(call: Callable[..., Tensors], backend: str) -> Tensors:
    """The results of this backend, or of "auto" where it refuses."""
    try:
        return call(backend)
    except ValueError as error:
        if REFUSED not in str(error):
            raise
    return call("auto")


def learned(draws: Draws, *names: str) -> tuple[str, ...]:
    """Which leaves have a gradient: none, all, or some."""
    if draws.chance(0.25):
        return ()
    share = draws.choice([1.0, 1.0, 0.5])
    present = [name for name in names if name in draws.leaves and draws.leaves[name].is_floating_point()]
    return tuple(name for name in present if draws.chance(share))


def order_of(draws: Draws, dtype: torch.dtype) -> int:
    """Of the derivatives: the second only where their rounding leaves digits."""
    order = 2 if dtype == torch.float64 and draws.chance(0.3) else 1
    draws.say(order=order if order > 1 else None)
    return order


ATTENTION_TENSORS = ("query", "key", "value", "log_weight", "scale", "sink", "sink_value")


def _draw_call(draws: Draws, value: bool = True, softcap: bool = True) -> tuple[AttentionDraw, torch.dtype]:
    dtype = draws.choice(DTYPES)
    drawn = draw_attention(draws, dtype, value)
    draw_positions(draws, drawn)
    if draws.chance(0.6):
        draw_log_weight(draws, drawn, dtype)
    draw_scale(draws, drawn, dtype)
    draw_sink(draws, drawn, dtype, value)
    if softcap:
        drawn.softcap = draws.choice([None, None, 0.5, 2.0, 30])
        draws.say(softcap=drawn.softcap)
    return drawn, dtype


def _case(
    draws: Draws,
    drawn: AttentionDraw,
    dtype: torch.dtype,
    kernel: Callable[[Tensors], Tensors],
    explicit: Callable[[Tensors, Rounding], Tensors],
    **others,
) -> Case:
    names = learned(draws, *ATTENTION_TENSORS, "vector")
    draws.say(learned=",".join(names))
    order = order_of(draws, dtype)
    coarse = "scale" in draws.leaves or (drawn.scale is not None and drawn.scale <= 0)
    return Case(draws.leaves, draws.views, kernel, explicit, names, order, coarse=coarse, **others)


BACKENDS = ("auto", "auto", "fused", "blocks", "reference", "cudnn", "flash", "efficient")


def attention(draws: Draws) -> Case:
    drawn, dtype = _draw_call(draws)
    backend = draws.choice(BACKENDS)
    draws.say(backend=backend)

    def kernel(views: Tensors) -> Tensors:
        tensors = views["query"], views["key"], views["value"]
        return attempt(lambda name: ops.attention(*tensors, **drawn.options(views), backend=name)._asdict(), backend)

    def explicit(views: Tensors, rounding: Rounding) -> Tensors:
        law = drawn.law(views, rounding)
        return {"output": _output(drawn, law, views, rounding), "log_partition": _level(drawn, law)}

    return _case(draws, drawn, dtype, kernel, explicit)


def _output(drawn: AttentionDraw, law: Law, views: Tensors, rounding: Rounding) -> torch.Tensor:
    keys, sink = law.attention.probability.split([drawn.shape.keys, 1], -1)
    output = rounding(rounding(keys) @ rounding(views["value"]).unsqueeze(-3))
    if "sink_value" in views:
        output = output + sink * per_query(drawn.shape, views["sink_value"], drawn.shape.value_size)
    return rounding(output).reshape(*drawn.shape.lead, drawn.shape.value_size)


def _level(drawn: AttentionDraw, law: Law) -> torch.Tensor:
    return law.hide(law.attention.log_partition).reshape(drawn.shape.lead)


def log_partition(draws: Draws) -> Case:
    drawn, dtype = _draw_call(draws, value=False)
    backend = draws.choice(BACKENDS)
    draws.say(backend=backend)

    def kernel(views: Tensors) -> Tensors:
        def call(name: str) -> Tensors:
            level = ops.log_partition(views["query"], views["key"], **drawn.options(views), backend=name)
            return {"log_partition": level}

        return attempt(call, backend)

    def explicit(views: Tensors, rounding: Rounding) -> Tensors:
        return {"log_partition": _level(drawn, drawn.law(views, rounding))}

    return _case(draws, drawn, dtype, kernel, explicit)


def attention_moments(draws: Draws) -> Case:
    has_value = draws.chance(0.5)
    drawn, dtype = _draw_call(draws, value=has_value)
    backend = draws.choice(["auto", "auto", "blocks", "reference"])
    names = set(MOMENTS) if draws.chance(0.6) else {draws.choice(MOMENTS) for _ in range(3)}
    draws.say(backend=backend, moments=",".join(sorted(names)) if len(names) < len(MOMENTS) else None)

    def kernel(views: Tensors) -> Tensors:
        tensors = views["query"], views["key"], views.get("value")

        def call(name: str) -> Tensors:
            found = ops.attention_moments(*tensors, **drawn.options(views), moments=names, backend=name)
            return {name: part for name, part in found._asdict().items() if part is not None}

        return attempt(call, backend)

    def explicit(views: Tensors, rounding: Rounding) -> Tensors:
        law = drawn.law(views, rounding)
        moments = {name: part.reshape(drawn.shape.lead) for name, part in _moments(law, rounding).items()}
        results = {name: moments[name] for name in MOMENTS if name in names and name != "max_position"}
        return results | ({"output": _output(drawn, law, views, rounding)} if has_value else {})

    def check(views: Tensors, results: Tensors) -> list[str]:
        if "max_position" not in names:
            return []
        return _wrong_positions(drawn, drawn.law(views, Rounding()), results["max_position"], dtype)

    # A largest weight has no derivative where two are equal, which repeated or zero tensors make.
    constant = ("max_weight", "max_score")
    return _case(draws, drawn, dtype, kernel, explicit, check=check, unchecked=("max_position",), constant=constant)


MOMENTS = (
    "log_partition",
    "entropy",
    "mean_score",
    "score_variance",
    "max_weight",
    "collision",
    "prior_log_partition",
    "prior_mean_score",
    "prior_score_variance",
    "max_score",
    "max_position",
)


def _moments(law: Law, rounding: Rounding) -> Tensors:
    p, prior, scores = law.attention.probability, law.prior.probability, law.scores
    top = scores.detach().masked_fill(~law.visible, -math.inf).amax(-1, keepdim=True)
    relative = rounding(scores - top.masked_fill(law.empty.unsqueeze(-1), 0.0)).where(law.visible, 0.0)
    # An entropy is the difference of log Z and a mean, each as large as the scores' spread.
    spread = 1 + relative.detach().abs().amax(-1)
    return {
        "log_partition": law.hide(law.attention.log_partition),
        "entropy": -(p * law.attention.log_probability).sum(-1) + (rounding(spread) - spread),
        "mean_score": (p * scores).sum(-1),
        "score_variance": _variance(p, relative, rounding),
        "max_weight": p.amax(-1),
        "collision": p.square().sum(-1),
        "prior_log_partition": law.hide(law.prior.log_partition),
        "prior_mean_score": (prior * scores).sum(-1),
        "prior_score_variance": _variance(prior, rounding(relative), rounding),
        "max_score": scores.masked_fill(~law.visible, -math.inf).amax(-1),
    }


def _variance(p: torch.Tensor, scores: torch.Tensor, rounding: Rounding) -> torch.Tensor:
    return rounding((p * scores.square()).sum(-1)) - rounding((p * scores).sum(-1).square())


def _wrong_positions(drawn: AttentionDraw, law: Law, position: torch.Tensor, dtype: torch.dtype) -> list[str]:
    keys = drawn.shape.keys
    scores = law.scores.masked_fill(~law.visible, -math.inf)[..., :keys]
    scores = F.pad(scores, (1, 0), value=-math.inf).reshape(*drawn.shape.lead, keys + 1)
    largest = scores.amax(-1)
    at_place = scores.gather(-1, position.unsqueeze(-1) + 1).squeeze(-1)
    room = (
        64
        * torch.finfo(torch.promote_types(dtype, torch.float32)).eps
        * (1 + scores.where(scores > -math.inf, 0.0).abs().amax(-1))
        * drawn.shape.size
    )
    right = (at_place >= largest - room) | ((largest == -math.inf) & (position == -1))
    return [] if bool(right.all()) else [f"max_position: {int((~right).sum())} of {right.numel()} wrong"]


def attention_received(draws: Draws) -> Case:
    drawn, dtype = _draw_call(draws, value=False)
    backend = draws.choice(BACKENDS)
    draws.say(backend=backend)

    def kernel(views: Tensors) -> Tensors:
        tensors = views["query"], views["key"]
        return attempt(
            lambda name: ops.attention_received(*tensors, **drawn.options(views), backend=name)._asdict(), backend
        )

    def explicit(views: Tensors, rounding: Rounding) -> Tensors:
        law = drawn.law(views, rounding)
        total = rounding(law.attention.probability[..., :-1].sum(-2))
        lengths = (drawn.positions.documents or ([], [drawn.shape.keys]))[1]
        wholes = [rounding(part.sum(-1, keepdim=True)) for part in total.split(lengths, -1)]
        parts = [
            part / whole.where(whole != 0, 1.0) for part, whole in zip(total.split(lengths, -1), wholes, strict=True)
        ]
        form = (*drawn.shape.lead[:-1], drawn.shape.keys)
        return {"total": total.reshape(form), "share": torch.cat(parts, -1).reshape(form)}

    return _case(draws, drawn, dtype, kernel, explicit)


def fisher_vp(draws: Draws) -> Case:
    drawn, dtype = _draw_call(draws, value=False, softcap=False)
    draws.add_numbers("vector", draws.views["query"](draws.leaves["query"]).shape, dtype)
    backend = draws.choice(["auto", "auto", "blocks", "reference"])
    draws.say(backend=backend)

    def kernel(views: Tensors) -> Tensors:
        tensors = views["query"], views["key"], views["vector"]

        def call(name: str) -> Tensors:
            options = {key: part for key, part in drawn.options(views).items() if key not in ("softcap", "sink_value")}
            return {"product": ops.fisher_vp(*tensors, **options, backend=name)}

        return attempt(call, backend)

    def explicit(views: Tensors, rounding: Rounding) -> Tensors:
        law = drawn.law(views, rounding)
        # Rounded as numbers about the mean of those that may be seen: the covariance knows no other origin.
        key = F.pad(views["key"], (0, 0, 0, 1)).unsqueeze(-3)
        p = law.attention.probability
        deviation = rounding(key.unsqueeze(-3) - (p @ key).unsqueeze(-2))
        vector = drawn.shape.apart(rounding(views["vector"]))
        change = rounding(torch.einsum("...lnd,...ld->...ln", deviation, vector))
        product = torch.einsum("...ln,...ln,...lnd->...ld", rounding(p), change, rounding(deviation))
        return {"product": rounding(product).reshape(*drawn.shape.lead, drawn.shape.size)}

    return _case(draws, drawn, dtype, kernel, explicit)


def resample_attention(draws: Draws) -> Case:
    dtype = draws.choice(DTYPES)
    drawn = draw_attention(draws, dtype)
    draw_scale(draws, drawn, dtype)
    if draws.chance(0.6):
        draw_log_weight(draws, drawn, dtype)
    is_causal, count, seed = draws.chance(0.4), draws.whole(1, 3), draws.seed()
    method = draws.choice(["multinomial", "systematic"])
    drawn.positions = type(drawn.positions)(is_causal=is_causal)
    draws.say(is_causal=is_causal, draws=count, method=method)

    def kernel(views: Tensors) -> Tensors:
        options = drawn.options(views)
        options = {name: options[name] for name in ("log_weight", "scale", "is_causal") if name in options}
        generator = torch.Generator().manual_seed(seed)
        tensors = views["query"], views["key"], views["value"]
        return ops.resample_attention(*tensors, generator=generator, draws=count, method=method, **options)._asdict()

    def explicit(views: Tensors, rounding: Rounding) -> Tensors:
        law = drawn.law(views, rounding)
        size = rounding(1 / law.attention.probability.square().sum(-1).where(~law.empty, 1.0)).where(~law.empty, 0.0)
        offspring = rounding(law.attention.probability[..., :-1].sum(-2))
        return {
            "effective_size": size.reshape(drawn.shape.lead),
            "offspring": offspring.reshape(*drawn.shape.lead[:-1], drawn.shape.keys),
        }

    def check(views: Tensors, results: Tensors) -> list[str]:
        return _wrong_draws(drawn, drawn.law(views, Rounding()), views, results)

    return Case(draws.leaves, draws.views, kernel, explicit, check=check, unchecked=("sample", "indices"))


def _wrong_draws(drawn: AttentionDraw, law: Law, views: Tensors, results: Tensors) -> list[str]:
    """A draw is a key that may be seen, −1 if there is none, and its sample the value of that key."""
    shape, index = drawn.shape, results["indices"]
    law_of_keys = law.attention.probability[..., :-1].reshape(*shape.lead, shape.keys)
    none = law.empty.reshape(shape.lead).unsqueeze(-1)
    padded = F.pad(law_of_keys, (1, 0))
    chance = padded.gather(-1, index + 1)
    right = torch.where(none, index == -1, (index >= 0) & (chance > 0))
    wrong = [] if bool(right.all()) else [f"indices: {int((~right).sum())} of {right.numel()} cannot be drawn"]
    value = F.pad(views["value"].unsqueeze(-3), (0, 0, 1, 0)).expand(*shape.batch, shape.key_heads, shape.group, -1, -1)
    flat = shape.apart(index).flatten(-2) + 1
    wanted = value.gather(-2, flat.unsqueeze(-1).expand(*flat.shape, shape.value_size))
    same = wanted.reshape(results["sample"].shape) == results["sample"].double()
    return wrong if bool(same.all()) else [*wrong, f"sample: {int((~same).sum())} of {same.numel()} are not the values"]


def random_feature_log_partition(draws: Draws) -> Case:
    dtype, seed, features = draws.choice(DTYPES), draws.seed(), draws.choice([1, 3, 8])
    drawn = draw_attention(draws, dtype, value=False, long=False)
    shape = drawn.shape
    drawn.scale = draws.choice([None, 0.3, -0.4])
    if draws.chance(0.6):
        heads = (draws.choice([1, shape.key_heads]), 1) if shape.grouped else (1,)
        full = (*draws.broadcasting(shape.batch), *heads, 1, shape.keys)
        draws.add_log_weight("log_weight", draws.choice([(shape.keys,), (1, shape.keys), full, (1,), ()]), dtype)
    draws.say(scale=drawn.scale, features=features, seed=seed)

    def kernel(views: Tensors) -> Tensors:
        options = {"scale": drawn.scale} | {name: views[name] for name in ("log_weight",) if name in views}
        generator = torch.Generator().manual_seed(seed)
        found = ops.random_feature_log_partition(
            views["query"], views["key"], generator=generator, features=features, **options
        )
        assert found.standard_error is not None
        return {"log_partition": found.log_partition, "standard_error": found.standard_error}

    def explicit(views: Tensors, rounding: Rounding) -> Tensors:
        return _features(shape, drawn.scale, features, seed, dtype, views, rounding)

    names = learned(draws, "query", "key", "log_weight")
    draws.say(learned=",".join(names))
    return Case(
        draws.leaves, draws.views, kernel, explicit, names, order_of(draws, dtype), constant=("standard_error",)
    )


def _features(
    shape: AttentionShape,
    scale: float | None,
    features: int,
    seed: int,
    dtype: torch.dtype,
    views: Tensors,
    rounding: Rounding,
) -> Tensors:
    """log Ẑ, and (Var Ẑ)^½/Z from both keys of every pair."""
    scale = float(shape.size**-0.5 if scale is None else scale)
    query = shape.apart(rounding(views["query"])) * math.copysign(abs(scale) ** 0.5, scale)
    key = rounding(views["key"]).unsqueeze(-3) * abs(scale) ** 0.5
    working = torch.promote_types(dtype, torch.float32)
    omega = torch.randn(features, shape.size, generator=torch.Generator().manual_seed(seed), dtype=working).double()
    weight = torch.zeros(*shape.lead, shape.keys, dtype=torch.float64)
    visible = torch.ones_like(weight, dtype=torch.bool)
    if "log_weight" in views:
        given = views["log_weight"].expand(visible.shape)
        visible = given if given.dtype == torch.bool else given > -math.inf
        weight = weight if given.dtype == torch.bool else given.where(visible, 0.0)
    weight, visible = shape.apart(weight), shape.apart(visible)
    # (…, G, L, m, N): the features of query and key together.
    of_query = rounding(query @ omega.mT) - rounding(query.square().sum(-1, keepdim=True) / 2)
    of_key = rounding(omega @ key.mT) - rounding(key.square().sum(-1) / 2).unsqueeze(-2)
    tilted = rounding(of_query.unsqueeze(-1) + rounding(of_key.unsqueeze(-3) + weight.unsqueeze(-2)))
    seen = visible.unsqueeze(-2).expand(tilted.shape).flatten(-2)
    flat, seen = F.pad(tilted.flatten(-2), (0, 1)), F.pad(seen, (0, 1))
    empty = ~seen.any(-1)
    level = normalised(flat, seen, rounding).log_partition - math.log(features)
    return {
        "log_partition": level.masked_fill(empty, -math.inf).reshape(shape.lead),
        "standard_error": _standard_error(query, key, weight, visible, features, rounding).reshape(shape.lead),
    }


def _standard_error(query, key, weight, visible, features: int, rounding: Rounding) -> torch.Tensor:
    """(E[exp((q + k)·(q + k′)) − 1]/m)^½ over two keys drawn by the attention weights."""
    tilted = rounding(rounding(query @ key.mT) + weight)
    visible = visible.expand(tilted.shape)
    both = query.unsqueeze(-2) + key.unsqueeze(-3)
    pairs = rounding(both @ both.mT) + tilted.unsqueeze(-1) + tilted.unsqueeze(-2)
    seen = (visible.unsqueeze(-1) & visible.unsqueeze(-2)).flatten(-2)
    *_, level = normalised(F.pad(tilted, (0, 1)), F.pad(visible, (0, 1)), rounding)
    *_, level_of_pairs = normalised(F.pad(rounding(pairs.flatten(-2)), (0, 1)), F.pad(seen, (0, 1)), rounding)
    excess = torch.expm1(rounding(level_of_pairs) - 2 * rounding(level))
    return (rounding(excess).clamp_min(0) / features).sqrt().where(visible.any(-1), 0.0)


def streaming(draws: Draws) -> Case:
    dtype = draws.choice(DTYPES[:-2])
    drawn = draw_attention(draws, dtype, value=draws.chance(0.6), four=True)
    shape = drawn.shape
    draws.add_numbers("points", (shape.key_heads, shape.keys, shape.size), dtype)
    for name in ("key", "value"):
        draws.leaves.pop(name, None)
    has_values = draws.chance(0.6)
    if has_values:
        draws.add_numbers("values", (shape.key_heads, shape.keys, shape.value_size), dtype)
    if draws.chance(0.5):
        draws.add(
            "weight",
            (shape.key_heads, shape.keys),
            lambda *size: draws.normal(*size).masked_fill(draws.normal(*size) > 1, -math.inf).to(dtype),
        )
    draw_scale(draws, drawn, dtype)
    block_size = draws.choice([1, 2, 5, 100])
    draws.say(block_size=block_size)
    # The backward pass reads the store again, so it lives as long as the case.
    folder = tempfile.TemporaryDirectory()

    def kernel(views: Tensors) -> Tensors:
        points, *others = (
            views[name].detach().cpu() if name in views else None for name in ("points", "values", "weight")
        )
        assert points is not None
        store = ops.AtomStore.write(f"{folder.name}/atoms", [ops.AtomBlock(points, *others)])
        options = {"scale": views.get("scale", drawn.scale), "block_size": block_size}
        found = ops.streaming.attention(views["query"], store, **options)
        level = ops.streaming.log_partition(views["query"], store, **options)
        return {"output": found.output, "log_partition": found.log_partition, "level": level}

    def explicit(views: Tensors, rounding: Rounding) -> Tensors:
        points = views["points"].expand(*shape.batch, *views["points"].shape)
        given = {"query": views["query"], "key": points} | {k: v for k, v in views.items() if k == "scale"}
        if "weight" in views:
            weight = views["weight"].unsqueeze(-2)
            if not shape.grouped:
                weight = weight.repeat_interleave(shape.group, 0)
            else:
                weight = weight.unsqueeze(-3)
            given["log_weight"] = weight
        law = drawn.law(given, rounding)
        value = views["values"].expand(*shape.batch, *views["values"].shape) if has_values else points
        output = rounding(rounding(law.attention.probability[..., :-1]) @ rounding(value).unsqueeze(-3))
        level = _level(drawn, law)
        output = output.reshape(*shape.lead, value.shape[-1])
        return {"output": output, "log_partition": level, "level": level}

    names, steps = learned(draws, "query", "scale"), max(1, -(-shape.keys // block_size))
    draws.say(learned=",".join(names))
    return Case(draws.leaves, draws.views, kernel, explicit, names, steps=steps)


def partial(draws: Draws) -> Case:
    dtype, parts, dim = draws.choice(DTYPES[:4]), draws.whole(1, 4), draws.whole(0, 1)
    shape = (draws.whole(1, 3), draws.whole(1, 3))
    level_shape = (*shape[:dim], parts, *shape[dim:])
    size = draws.choice([1, 3])
    hidden = draws.choice([0.0, 0.3, 0.7])
    draws.add(
        "level",
        level_shape,
        lambda *s: (2 * draws.normal(*s)).masked_fill(draws.normal(*s).abs() < hidden, -math.inf).to(dtype),
    )
    draws.add_numbers("mean", (*level_shape, size), dtype)
    by_merge = draws.chance(0.5)
    draws.say(by_merge=by_merge, dim=dim)

    def kernel(views: Tensors) -> Tensors:
        whole = ops.Partial(views["level"], views["mean"])
        if not by_merge:
            return whole.reduce(dim)._asdict()
        pairs = zip(views["level"].unbind(dim), views["mean"].unbind(dim), strict=True)
        first, *others = (ops.Partial(*pair) for pair in pairs)
        return first.merge(*others)._asdict()

    def explicit(views: Tensors, rounding: Rounding) -> Tensors:
        level = F.pad(views["level"].movedim(dim, -1), (0, 1))
        visible = (level > -math.inf) & (torch.arange(parts + 1) < parts)
        p, _, total = normalised(rounding(level.where(visible, 0.0)), visible, rounding)
        mean = (p[..., :-1].unsqueeze(-1) * rounding(views["mean"]).movedim(dim, -2)).sum(-2)
        return {"log_partition": total.masked_fill(~visible.any(-1), -math.inf), "mean": rounding(mean)}

    names = learned(draws, "level", "mean")
    draws.say(learned=",".join(names))
    return Case(draws.leaves, draws.views, kernel, explicit, names, order_of(draws, dtype))
