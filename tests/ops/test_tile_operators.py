"""The losses compiled: one operator a pass, whose results are what the tiles give, and whose graph holds no scores."""

import itertools

import pytest
import torch
import torch.nn.functional as F
from tests.support.rows import some_slow
from torch.fx import GraphModule

from massieu.ops import score_tiles
from massieu.ops.contrastive import FalseNegatives, info_nce, nca
from massieu.ops.score_tiles import TENSORS, ScorePlan
from massieu.ops.vocabulary import linear_cross_entropy


def draw(*shape, seed=0, dtype=torch.float64):
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).to(dtype)


PROBLEMS = {
    "words": {"bias_in_score": True},
    "words, softly capped": {"bias_in_score": True, "softcap": 1.5},
    "statistics": {"bias_in_score": True, "softcap": 1.5, "above": draw(5, seed=5)},
    "shares": {"bias_in_score": True, "share": draw(5, 7, seed=6).softmax(-1)},
    "pairs": {"rule": "no equals", "both": True, "row_ids": torch.arange(5) % 3, "column_ids": torch.arange(7) % 3},
    "more rows than columns": {"both": True},
    "weights": {"log_weight": draw(5, 7, seed=4)},
}


def arguments(name, dtype=torch.float64):
    rows, columns = (9, 4) if name == "more rows than columns" else (5, 7)
    target = torch.arange(rows)
    target[target >= columns] = -1
    bias = None if "both" in PROBLEMS[name] else draw(columns, seed=3, dtype=dtype)
    row = draw(4, rows, seed=1).mT  # of another layout than its gradient
    return ScorePlan(row, draw(columns, 4, seed=2, dtype=dtype), bias, target, **PROBLEMS[name])


@pytest.mark.medium
@some_slow(("name", "dtype"), zip(PROBLEMS, itertools.cycle([torch.float64, torch.bfloat16]), strict=False), 2, ids=str)
def test_operators_are_well_formed(name, dtype):
    """PyTorch's own checks: shapes, strides and dtypes without values and for unknown sizes; nothing is overwritten."""
    given = arguments(name, dtype)
    checks = ("test_schema", "test_faketensor", "test_aot_dispatch_dynamic")
    found = score_tiles.forward(*given)
    # The last check takes NaN, the excess of a row whose target is elsewhere, for a difference.
    without_nan = checks[:2] if found[0].isnan().any() else checks
    torch.library.opcheck(score_tiles.forward_operator, given, test_utils=without_nan)
    cotangents = [draw(len(part), seed=10 + index) for index, part in enumerate(found)]
    cotangents = [part.masked_fill(result.isnan(), 0.0) for part, result in zip(cotangents, found, strict=True)]
    given = (*given[:TENSORS], list(found), cotangents, *given[TENSORS:])
    torch.library.opcheck(
        score_tiles.backward_operator, (*given, [True, True, given[2] is not None]), test_utils=checks
    )
    torch.library.opcheck(score_tiles.backward_operator, (*given, [False, True, False]), test_utils=checks[:2])


def test_more_rows_than_columns():
    """Both directions' results and gradients against the scores written out, where other rows have no target here."""
    row, column, *rest = arguments("more rows than columns")
    results = excess, level, column_excess, column_level = score_tiles.forward(row, column, *rest)
    scores = (row @ column.mT).requires_grad_()
    right = scores.logsumexp(1), scores.logsumexp(0)
    own = scores.diagonal()
    torch.testing.assert_close(level, right[0])
    torch.testing.assert_close(column_level, right[1])
    torch.testing.assert_close(excess[:4], right[0][:4] - own)
    torch.testing.assert_close(column_excess, right[1] - own)
    assert excess[4:].isnan().all()
    given = [draw(9, seed=5), draw(9, seed=6), draw(4, seed=7), draw(4, seed=8)]
    given[0][4:] = 0.0
    objective = (given[0][:4] * (right[0][:4] - own)).sum() + (given[1] * right[0]).sum()
    objective = objective + (given[2] * (right[1] - own)).sum() + (given[3] * right[1]).sum()
    (slope,) = torch.autograd.grad(objective, scores)
    found = score_tiles.backward(ScorePlan(row, column, *rest), results, given, (True, True, False))
    torch.testing.assert_close(found[0], slope @ column)
    torch.testing.assert_close(found[1], slope.mT @ row)


def largest(graphs):
    """The most numbers that a tensor of these graphs has."""
    nodes = (node for graph in graphs for node in graph.graph.nodes)
    values = (node.meta.get("val") for node in nodes)
    parts = (part for value in values for part in (value if isinstance(value, list | tuple) else [value]))
    return max(int(part.numel()) for part in parts if isinstance(part, torch.Tensor))


def compiled_with_graphs(function):
    """The compiled function, and the graphs of its forward and backward passes as the compiler gets them."""
    from torch._dynamo.backends.common import aot_autograd
    from torch._functorch.aot_autograd import make_boxed_func

    graphs: list[GraphModule] = []

    def keep(graph, inputs):
        graphs.append(graph)
        return make_boxed_func(graph)

    return torch.compile(function, backend=aot_autograd(fw_compiler=keep), fullgraph=True), graphs


def words(tokens):
    hidden, weight = draw(tokens, 8, seed=1).requires_grad_(), draw(600, 8, seed=2).requires_grad_()
    target = torch.arange(tokens) * 7 % 600
    return (lambda h, w: linear_cross_entropy(h, w, target)), (hidden, weight)


def pairs(count):
    query, key = (F.normalize(draw(count, 8, seed=seed), dim=-1).requires_grad_() for seed in (1, 2))
    same = FalseNegatives(torch.arange(count) % 50)
    return (lambda q, k: info_nce(q, k, temperature=0.1, symmetric=True, log_weight=same)), (query, key)


@pytest.mark.slow
@pytest.mark.parametrize("problem", [words, pairs])
def test_no_graph_holds_the_scores(problem):
    torch._dynamo.reset()
    function, tensors = problem(300)
    compiled, graphs = compiled_with_graphs(function)
    found = compiled(*tensors)
    gradients = torch.autograd.grad(found, tensors)
    assert len(graphs) == 2
    assert largest(graphs) <= 600 * 8  # the weight
    wanted = function(*tensors)
    torch.testing.assert_close(found, wanted)
    for actual, right in zip(gradients, torch.autograd.grad(wanted, tensors), strict=True):
        torch.testing.assert_close(actual, right)


@pytest.mark.slow
def test_one_graph_for_any_number_of_tokens():
    from torch._dynamo.testing import CompileCounterWithBackend

    torch._dynamo.reset()
    counter = CompileCounterWithBackend("aot_eager")
    compiled = torch.compile(linear_cross_entropy, backend=counter, fullgraph=True, dynamic=True)
    weight = draw(20, 8, seed=2).requires_grad_()
    programs = set()
    for tokens in (2, 5, 17, 40):
        hidden, target = draw(tokens, 8, seed=1).requires_grad_(), torch.arange(tokens) % 20
        found = compiled(hidden, weight, target)
        assert isinstance(found, torch.Tensor)
        torch.testing.assert_close(found, F.cross_entropy(hidden @ weight.mT, target))
        torch.autograd.grad(found, (hidden, weight))
        programs.add(counter.frame_count)
    assert len(programs) == 1


@pytest.mark.slow
def test_one_tensor_given_twice():
    """Ids of queries that are those of keys, and labels, reach the tiles as one tensor."""
    torch._dynamo.reset()
    embedding, labels = draw(10, 4).requires_grad_(), torch.arange(10) % 3
    compiled = torch.compile(nca, backend="aot_eager", fullgraph=True)
    found, wanted = compiled(embedding, labels), nca(embedding, labels)
    torch.testing.assert_close(found, wanted)
    torch.testing.assert_close(*(torch.autograd.grad(loss, embedding)[0] for loss in (found, wanted)))


@pytest.mark.needs("compiler")
@pytest.mark.slow
def test_inductor():
    torch._dynamo.reset()
    function, tensors = words(40)
    compiled = torch.compile(function, fullgraph=True)
    for actual, right in zip(
        (compiled(*tensors), *torch.autograd.grad(compiled(*tensors), tensors)),
        (function(*tensors), *torch.autograd.grad(function(*tensors), tensors)),
        strict=True,
    ):
        torch.testing.assert_close(actual, right)
