"""Derivatives of first and second order, both modes, of every function, mask, scale and spelling, in float64.

By finite differences (gradcheck and gradgradcheck), and beyond those against the same derivatives of formulas that form
all weights.
"""

import math

import pytest
import torch
from tests.support.derivatives import check_derivatives
from tests.support.ops import explicit
from tests.support.ops.explicit import draw, finite
from tests.support.rows import some_slow
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

from massieu import ops
from massieu.ops import FalseNegatives, Partial, reference, score_tiles

HEADS, KEY_HEADS, LENGTH, KEYS, SIZE, VALUE = 4, 2, 3, 5, 3, 2
PAIRS = (1, HEADS, LENGTH, KEYS)
HIDDEN = torch.zeros(PAIRS, dtype=torch.bool)
HIDDEN[..., 1] = True
HIDDEN[:, 1, 2] = True  # one query of one head sees nothing
HIDDEN[:, 3, 0, 2:] = True


def leaf(*shape, seed=0):
    return draw(*shape, seed=seed).requires_grad_()


def arguments():
    shapes = {
        "query": (1, HEADS, LENGTH, SIZE),
        "key": (1, KEY_HEADS, KEYS, SIZE),
        "value": (1, KEY_HEADS, KEYS, VALUE),
        "vector": (1, HEADS, LENGTH, SIZE),
    }
    return {name: leaf(*shape, seed=seed) for seed, (name, shape) in enumerate(shapes.items())}


# What each kind adds: constants, and shapes of further leaves.
KINDS = {
    "plain": ({}, {}),
    "causal": ({"is_causal": True}, {}),
    "negative scale": ({"scale": -0.8}, {}),
    "booleans of keys": ({"log_weight": ~HIDDEN[0, 0, :1]}, {}),
    "booleans of pairs": ({"log_weight": ~HIDDEN}, {}),
    "booleans, causal": ({"log_weight": ~HIDDEN, "is_causal": True}, {}),
    "weights of keys": ({}, {"log_weight": (KEYS,)}),
    "weights of heads and keys": ({}, {"log_weight": (1, HEADS, 1, KEYS)}),
    "weights of queries": ({}, {"log_weight": (1, HEADS, LENGTH, 1)}),
    "weights of pairs": ({}, {"log_weight": PAIRS}),
    "weights, some −inf, causal": ({"hidden": HIDDEN, "is_causal": True}, {"log_weight": PAIRS}),
    "weights of keys, some −inf": ({"hidden": HIDDEN[:, :1, :1]}, {"log_weight": (1, 1, 1, KEYS)}),
    "one scale": ({}, {"scale": ()}),
    "scale of heads, causal": ({"is_causal": True}, {"scale": (HEADS,)}),
    "scale of queries": ({"log_weight": ~HIDDEN}, {"scale": (1, HEADS, LENGTH, 1)}),
    "window": ({"window": (1, 2)}, {}),
    "window, causal, weights": ({"window": 1, "is_causal": True}, {"log_weight": (KEYS,)}),
    "soft-capped": ({"softcap": 1.5}, {}),
    "soft-capped, booleans, weights": ({"softcap": 0.7, "hidden": HIDDEN}, {"log_weight": PAIRS}),
    "sink of heads": ({"log_weight": ~HIDDEN}, {"sink": (HEADS,)}),
    "one sink, window, scale": ({"window": (0, 1), "log_weight": ~HIDDEN}, {"scale": (HEADS,), "sink": (1,)}),
}
FUNCTIONS = {
    "attention": (ops.attention, ("query", "key", "value"), {}),
    "attention, reference": (ops.attention, ("query", "key", "value"), {"backend": "reference"}),
    "log_partition": (ops.log_partition, ("query", "key"), {}),
    "log_partition, reference": (ops.log_partition, ("query", "key"), {"backend": "reference"}),
    "attention_moments": (ops.attention_moments, ("query", "key", "value"), {}),
    "fisher_vp": (ops.fisher_vp, ("query", "key", "vector"), {}),
}


def five(named):
    """The same problem with the query heads of a key head spelt out."""
    named = dict(named)
    for name in ("query", "vector", "log_weight", "scale", "sink"):
        tensor = named.get(name)
        if isinstance(tensor, torch.Tensor) and tensor.ndim == 4:
            named[name] = tensor.unsqueeze(1) if tensor.shape[1] == 1 else tensor.unflatten(1, (KEY_HEADS, -1))
    return named


def case(name, kind, spelling="four"):
    """A function of leaves, and the leaves."""
    function, positional, options = FUNCTIONS[name]
    constants, further = KINDS[kind]
    tensors = {name: tensor for name, tensor in arguments().items() if name in positional}
    tensors |= {name: leaf(*shape, seed=9) for name, shape in further.items()}

    def call(*leaves):
        named = constants | dict(zip(tensors, leaves, strict=True))
        hidden = named.pop("hidden", None)
        if hidden is not None:
            named["log_weight"] = named["log_weight"].masked_fill(hidden, -math.inf)
        named = five(named) if spelling == "five" else named
        found = function(*[named.pop(name) for name in positional], **named, **options)
        return tuple(finite(result) for result in ((found,) if isinstance(found, torch.Tensor) else found))

    return call, tuple(tensors.values())


def check(function, leaves):
    """First and second derivatives, both modes, of a sum of all results with unlike factors and curvatures."""

    def total(*leaves):
        found = function(*leaves)
        found = (found,) if isinstance(found, torch.Tensor) else found
        return sum(
            (draw(*result.shape, seed=80 + place) * finite(result).sin()).sum() for place, result in enumerate(found)
        )

    check_derivatives(total, leaves, forward=True)


def slowly(cases, shown):
    """Cases, of which only those that are shown belong to the default suite."""
    return [pytest.param(*one, marks=() if shown(one) else pytest.mark.slow, id=": ".join(one)) for one in cases]


PAIRED = [
    (name, kind)
    for name in FUNCTIONS
    for kind, (constants, _) in KINDS.items()
    if not (name == "fisher_vp" and "softcap" in constants)
]
ALL = [(*one, spelling) for one in PAIRED for spelling in ("four", "five")]
DIFFERENCES = {case: place for place, case in enumerate(ALL[::5])}
"""Every fifth by finite differences, the others' formulas below; for the default suite one or two of each function."""


@pytest.mark.medium
@pytest.mark.parametrize(("name", "kind", "spelling"), slowly(DIFFERENCES, lambda one: DIFFERENCES[one] % 8 == 0))
def test_every_kind_by_finite_differences(name, kind, spelling):
    check(*case(name, kind, spelling))


@pytest.mark.medium
@some_slow("name", ["attention, reference", "log_partition, reference", "attention_moments", "fisher_vp"], 1)
def test_blocks_of_queries(name, monkeypatch):
    """Two blocks, which are computed again in the backward pass."""
    monkeypatch.setattr(reference, "BLOCK_PAIRS", 2 * HEADS * KEYS)
    check(*case(name, "weights, some −inf, causal"))


@pytest.mark.medium
@some_slow("name", FUNCTIONS, 1)
def test_views(name):
    """Of leaves in other layouts of memory, one of which is expanded."""
    function, leaves = case(name, "booleans of pairs")
    views = [leaf.detach().mT.contiguous().requires_grad_() for leaf in leaves]

    def of_views(one, *others):
        return function(one.mT.sum(1, keepdim=True).expand(-1, HEADS, -1, -1), *(tensor.mT for tensor in others))

    check(of_views, tuple(views))


# --- beyond finite differences: the same derivatives of explicit formulas ---------------------------------------------


def explicit_case(name, kind):
    """`case` by the formulas of `explicit`."""
    _, positional, _ = FUNCTIONS[name]
    constants, further = KINDS[kind]
    order = [*positional, *further]

    def call(*leaves):
        named = constants | dict(zip(order, leaves, strict=True))
        hidden = named.pop("hidden", None)
        if hidden is not None:
            named["log_weight"] = named["log_weight"].masked_fill(hidden, -math.inf)
        if "fisher" in name:
            return (explicit.fisher_vp(*[named.pop(n) for n in positional], **named),)
        if "log_partition" in name:
            value = named["key"]
            return (finite(explicit.attention(*[named.pop(n) for n in positional], value, **named)[1]),)
        if "moments" in name:
            found = explicit.moments(*[named.pop(n) for n in positional], **named).values()
            return tuple(finite(result) for result in found)
        return tuple(finite(result) for result in explicit.attention(*[named.pop(n) for n in positional], **named))

    return call


TRANSFORMED = ["plain", "booleans, causal", "weights of heads and keys", "one sink, window, scale"]
EVERY_TRANSFORM = pytest.mark.parametrize(
    ("name", "kind"),
    slowly(
        [one for one in PAIRED if one[1] in TRANSFORMED],
        lambda one: one[1] == "booleans, causal" and one[0] in ("attention", "log_partition", "fisher_vp"),
    ),
)


def close(found, wanted, bound=1e-10):
    for one, other in zip(found, wanted, strict=True):
        torch.testing.assert_close(one, other, rtol=0, atol=bound)


SPELT = [(*pair, ("four", "five")[place % 2]) for place, pair in enumerate(PAIRED)]
A_FIFTH = [one for place, one in enumerate(SPELT) if (place + place // len(KINDS)) % 5 == 0]
"""In which each function and each kind occurs."""


@pytest.mark.medium
@pytest.mark.parametrize(("name", "kind", "spelling"), slowly(SPELT, lambda one: one in A_FIFTH))
def test_kinds_by_formulas(name, kind, spelling):
    """Gradients, forward derivatives, and second ones: backwards, and forwards over backwards."""
    function, leaves = case(name, kind, spelling)
    wanted_function = explicit_case(name, kind)
    lines = tuple(draw(*tensor.shape, seed=40 + place) for place, tensor in enumerate(leaves))
    start = tuple(tensor.detach() for tensor in leaves)

    def derivatives(call):
        def total(*tensors):
            return sum((draw(*r.shape, seed=80 + n) * finite(r).sin()).sum() for n, r in enumerate(call(*tensors)))

        first = torch.autograd.grad(total(*leaves), leaves, create_graph=True)
        along = sum((one * line).sum() for one, line in zip(first, lines, strict=True))
        second = torch.autograd.grad(along, leaves)
        value, slope = jvp(total, start, lines)[:2]
        forwards = jvp(grad(total, tuple(range(len(start)))), start, lines)[1]
        return [*first, *second, value, slope, *forwards]

    close(derivatives(function), derivatives(wanted_function))


@pytest.mark.medium
@EVERY_TRANSFORM
def test_forward_mode_nested_twice_and_thrice(name, kind):
    """Second and third derivatives along a line in all arguments at once."""
    function, leaves = case(name, kind)
    start = [tensor.detach() for tensor in leaves]
    lines = [draw(*tensor.shape, seed=40 + place) for place, tensor in enumerate(start)]

    def derivatives(call):
        def at(step):
            return call(*(tensor + step * line for tensor, line in zip(start, lines, strict=True)))

        def along(inner):
            return lambda step: jvp(inner, (step,), (torch.ones_like(step),))[1]

        zero = torch.zeros((), dtype=torch.float64)
        second = along(along(at))
        return *second(zero), *along(second)(zero)

    close(derivatives(function), derivatives(explicit_case(name, kind)), 1e-9)


@EVERY_TRANSFORM
def test_maps_of_functions_and_their_derivatives(name, kind):
    """vmap over one argument after the other, of the function, its gradient, its forward derivative and their product."""
    function, leaves = case(name, kind)
    start = [tensor.detach() for tensor in leaves]
    wanted_function = explicit_case(name, kind)

    def total(call):
        return lambda *tensors: sum((1 + place) * result.sin().sum() for place, result in enumerate(call(*tensors)))

    every = tuple(range(len(start)))
    for mapped in every:
        many = [torch.stack([tensor, -tensor, 2 * tensor]) if n == mapped else tensor for n, tensor in enumerate(start)]
        dims = tuple(0 if n == mapped else None for n in every)

        def each(call, many=many, mapped=mapped):
            rows = [
                call(*(tensor[item] if n == mapped else tensor for n, tensor in enumerate(many))) for item in range(3)
            ]
            return [torch.stack(parts) for parts in zip(*rows, strict=True)]

        close(vmap(function, dims)(*many), each(wanted_function))
        close(vmap(grad(total(function), every), dims)(*many), each(grad(total(wanted_function), every)))

        def forwards(call):
            return lambda *tensors: jvp(call, tensors, tuple(tensor.cos() for tensor in tensors))[1]

        close(vmap(forwards(function), dims)(*many), each(forwards(wanted_function)))


@EVERY_TRANSFORM
def test_jacobians(name, kind):
    """Whole Jacobians by rows and by columns, and Hessians forwards over backwards and backwards over backwards."""
    function, leaves = case(name, kind)
    start = [tensor.detach() for tensor in leaves]
    wanted_function = explicit_case(name, kind)

    def joined(call):
        return lambda query: torch.cat([result.flatten() for result in call(query, *start[1:])])

    rows, columns = jacrev(joined(function))(start[0]), jacfwd(joined(function))(start[0])
    wanted = jacrev(joined(wanted_function))(start[0])
    close([rows, columns], [wanted, wanted])

    def total(call):
        return lambda query: joined(call)(query).sin().sum()

    wanted = hessian(total(wanted_function))(start[0])
    close([hessian(total(function))(start[0]), jacrev(jacrev(total(function)))(start[0])], [wanted, wanted])
    pulled = vjp(joined(function), start[0])[1](draw(len(rows), seed=70))[0]
    close([pulled], [torch.tensordot(draw(len(rows), seed=70), rows, 1)])


# --- losses, parts, estimates ----------------------------------------------------------------------------------------


@pytest.fixture
def small_tiles(monkeypatch):
    monkeypatch.setattr(score_tiles, "TILE_PAIRS", 15)
    monkeypatch.setattr(score_tiles, "TILE_ROWS", 3)
    monkeypatch.setattr(reference, "BLOCK_PAIRS", 21)


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
def test_linear_cross_entropy():
    """Of tokens in rows, with one that is ignored and one word that is hidden."""
    target = torch.tensor([[2, 6, -100], [3, 3, 1]])

    def function(hidden, weight, bias):
        bias = bias.masked_fill(torch.arange(7) == 0, -math.inf)
        return ops.linear_cross_entropy(hidden, weight, target, reduction="sum", bias=bias, z_loss=0.1)

    check(function, (leaf(2, 3, 4), leaf(7, 4, seed=1), leaf(7, seed=2)))


CONTRASTS = {
    "positive": ({"positive": torch.tensor([4, 0, 0, 2, 1])}, None),
    "weights of keys, symmetric": ({"symmetric": True}, (7,)),
    "weights of pairs, symmetric": ({"symmetric": True}, (5, 7)),
}


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
@pytest.mark.parametrize("kind", CONTRASTS)
def test_info_nce(kind):
    options, shape = CONTRASTS[kind]
    leaves = [
        leaf(5, 3),
        leaf(5, 3, seed=1),
        leaf(2, 3, seed=2),
        torch.tensor(0.7, dtype=torch.float64).requires_grad_(),
    ]

    def function(query, key, negatives, temperature, *weight):
        given = dict(options)
        if weight:
            given["log_weight"] = weight[0].masked_fill(torch.arange(7) == 3, -math.inf)
        return tuple(
            ops.info_nce(query, key, negatives=negatives, temperature=temperature, return_log_partition=True, **given)
        )

    check(function, (*leaves, *([] if shape is None else [leaf(*shape, seed=3)])))


@pytest.mark.slow
@pytest.mark.usefixtures("small_tiles")
def test_n_pairs():
    ids = FalseNegatives(torch.tensor([0, 1, 0, 2, 3]))
    check(lambda q, k: ops.n_pairs(q, k, log_weight=ids, norm_weight=0.1), (leaf(5, 3), leaf(5, 3, seed=1)))


def test_merged_parts():
    """One query sees no key of the first part, one no key at all."""
    hidden = torch.tensor([[True, False, True], [False, False, True]])

    def function(levels, means):
        parts = Partial(levels.masked_fill(hidden, -math.inf), means)
        found = (parts.reduce(0), Partial(*(t[0] for t in parts)).merge(Partial(*(t[1] for t in parts))))
        return tuple(result for part in found for result in part)

    check(function, (leaf(2, 3), leaf(2, 3, 2, seed=1)))


@pytest.mark.medium
def test_random_features():
    def function(query, key, weight):
        weight = weight.masked_fill(HIDDEN[0, 0, 0], -math.inf)
        return ops.random_feature_log_partition(
            query, key, generator=torch.Generator().manual_seed(0), features=6, standard_error=False, log_weight=weight
        ).log_partition

    check(function, (leaf(1, HEADS, LENGTH, SIZE), leaf(1, KEY_HEADS, KEYS, SIZE, seed=1), leaf(KEYS, seed=2)))


@pytest.mark.parametrize("method", ["multinomial", "systematic"])
def test_resampled_values(method):
    """A draw is a value: linear in the values, and constant in all else."""
    query, key, value, _ = arguments().values()

    def function(value):
        generator = torch.Generator().manual_seed(0)
        return ops.resample_attention(query.detach(), key.detach(), value, generator=generator, method=method).sample

    check(function, (value,))
    found = ops.resample_attention(query, key, value, generator=torch.Generator(), method=method)
    assert not any(result.requires_grad for result in found[1:])
