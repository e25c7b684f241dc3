"""Doors check arguments by their names, compiled code is not checked, and first guesses are told what is meant."""

import copy
import inspect
import math
import pickle

import numpy as np
import pytest
import torch
from tests.support.rows import every_row

import massieu
from massieu import ops
from massieu.energy import BoltzmannMachine, HopfieldEnergy, KineticSpins
from massieu.energy.activations import MeasureActivation
from massieu.errors import InputError
from massieu.foundation.doors import MOST, count, door, input_door
from massieu.inference import anneal, contrastive_divergence, gibbs_init, resample
from massieu.measures import Atoms, Bernoulli, Gaussian
from massieu.nn import (
    Attention,
    ConditionalMeanHeads,
    DualLinkHeads,
    Hopfield,
    HopfieldPooling,
    ReLUHeads,
    RestrictedBoltzmannMachine,
    SoftmaxHeads,
)
from massieu.papers.theory import cumulant_growth, transfer
from massieu.population import Flow
from massieu.regression import GaussianKernel
from massieu.solve import ConjugateGradients, fixed_point, linear_solve, spectral_radius


@door(width=count)
def example(width: int, *, throw: bool = False, generator: torch.Generator | None = None) -> int:
    return width + throw


@every_row(
    "call, message",
    [
        (lambda: example("x"), "width must be a whole number, got 'x'"),
        (lambda: example(width=True), "width must be a whole number, got True"),
        (lambda: example(10**30), "width must be a whole number, at most"),
        (lambda: example(1, throw=float("nan")), "throw must be True or False, got nan"),
        (lambda: example(1, generator="x"), r"generator must be a torch.Generator, got 'x'"),
    ],
)
def test_an_argument_of_a_wrong_kind_is_one_sentence(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


def test_right_arguments_pass_and_defaults_may_be_none():
    assert example(MOST) == MOST
    assert example(2, throw=True, generator=None) == 3
    assert example(2, generator=torch.Generator()) == 2


def test_an_input_door_raises_input_errors():
    with pytest.raises(InputError, match="number must be a whole number, got 'x'"):
        input_door(number=count)(lambda number: number)("x")


def test_a_class_has_its_methods_checked():
    @door
    class Example:
        @classmethod
        def create(cls, dim: int) -> int:
            return dim

        def draw(self, generator: torch.Generator | None = None) -> None: ...

    for call in (lambda: Example.create(1.5), lambda: Example().draw(3)):  # type: ignore[arg-type]
        with pytest.raises(TypeError, match=r"(dim|generator) must be"):
            call()


_POINTS = torch.zeros(3, 2)
_TWO = torch.zeros(2)
_PAIR = torch.zeros(1, 1, 2, 3)


@every_row(
    "call, message",
    [
        (lambda: Attention("64", 8), "embed_dim must be a whole number, got '64'"),
        (lambda: Attention(64, 1e30), "num_heads must be a whole number"),
        (lambda: Attention(64, 8, device=object()), "device must be a torch.device or the name of one"),
        (lambda: Attention(64, 8, dtype="x"), "dtype must be torch.float16, bfloat16, float32 or float64, got 'x'"),
        (lambda: Attention(64, 8, batch_first=object()), "batch_first must be True or False, got object"),
        (lambda: ReLUHeads(scale="x"), "scale must be a number, got 'x'"),
        (lambda: Atoms.create(_POINTS).sample(torch.zeros(2), generator="x"), r"generator must be a torch.Generator"),
        (lambda: Gaussian.create(0.0, 1.0, dim=2).cumulants(_TWO, _TWO, "x"), "order must be a whole number"),
        (lambda: GaussianKernel.create(1.0)(_PAIR, _PAIR.double()), "left and right must have one dtype"),
        (lambda: GaussianKernel.create(1.0)(None, _PAIR), "left must be a floating-point tensor, got None"),
        (lambda: fixed_point(torch.cos, torch.zeros(1), throw=2), "throw must be True or False, got 2"),
        (lambda: fixed_point(torch.cos, torch.zeros(1), max_steps=10**30), "max_steps must be a whole number"),
    ],
)
def test_what_ended_in_internal_text_is_one_sentence(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


_BITS = Bernoulli.create(torch.full((2,), 0.5))
_SPINS = KineticSpins.create(torch.zeros(2, 4), torch.zeros(2, 2))
_DOCUMENTS = ops.Documents([0, 2], [0, 2])


@every_row(
    "call, message",
    [
        (lambda: SoftmaxHeads(window=1e30), "window must be a whole number or a pair of them, got 1e"),
        (lambda: SoftmaxHeads(window=(3, -1)), "window must not be negative"),
        (lambda: DualLinkHeads(window=object()), "window must be a whole number or a pair of them, got object"),
        (lambda: SoftmaxHeads(sink=0.0, sink_value=torch.float32), "sink_value must be a floating-point tensor"),
        (lambda: ConditionalMeanHeads(method=object()), "method must be Cholesky"),
        (lambda: Attention(8, 2, bias=torch.ones(())), "bias must be True or False"),
        (lambda: Hopfield(8, stored=()), r"stored must be a torch.nn.Module, got \(\)"),
        (lambda: Hopfield(8, output_size=-1), "output_size must be a whole number, at least 0, got -1"),
        (lambda: HopfieldPooling(8, quantity=-1), "quantity must be a whole number, at least 0, got -1"),
        (lambda: Hopfield(8)(torch.zeros(3)), r"input must have shape \(batch, length, 8\), got \(3,\)"),
        (
            lambda: RestrictedBoltzmannMachine(_BITS, _BITS).score_samples(_POINTS, _TWO),
            r"log_partition must have shape \(\)",
        ),
        (lambda: _SPINS.field(torch.zeros(2, 3)), r"state must have the drive's shape \(2, 4\), got \(2, 3\)"),
        (lambda: MeasureActivation.of(-1, Gaussian.create(0.0, 1.0, dim=2)), "name must be a string, got -1"),
        (lambda: Flow(lambda cloud: cloud, depth=1, group=10**30), "group must be a ProcessGroup or a DeviceMesh"),
        (lambda: resample(torch.zeros(3), object()), "generator must be a torch.Generator, got object"),
        (
            lambda: gibbs_init(_TWO, lambda *_: None),
            r"sample_hidden\(units, generator\) must be a floating-point tensor",
        ),
        (lambda: contrastive_divergence(lambda _: None, _POINTS, _POINTS), r"energy\(units\) must be a floating-point"),
        (
            lambda: anneal(_TWO, lambda x, t: -t * x, lambda *_: None, schedule=1),
            r"move\(position, t, generator\) must be a floating-point tensor, got None",
        ),
        (
            lambda: anneal(_TWO, lambda x, t: x, lambda *_: None, schedule=2**63),
            "schedule must be a whole number, at most",
        ),
        (lambda: spectral_radius(lambda _: 1, torch.zeros(1)), "function must return a tensor"),
        (lambda: cumulant_growth(3, torch.ones(2), torch.ones(3)), "shapes must fit each other, got step"),
        (lambda: transfer(_POINTS, torch.ones(2, 3)), "self_supervised and downstream must have one number of latents"),
        (lambda: ops.attention_moments(_PAIR, _PAIR, moments=torch.zeros(0)), "moments must be a collection of names"),
        (
            lambda: ops.log_partition(_PAIR, _PAIR, documents=_DOCUMENTS, backend=np.zeros((2, 3))),
            "backend must be 'auto'",
        ),
        (lambda: ops.AtomStore.open("nowhere"), "path must be that of a store of atoms, and there is none at nowhere"),
        (lambda: massieu.probe(run=print), "run must be a folder or a massieu.Run"),
        (lambda: massieu.Run(print), "folder must be a path"),  # pyright: ignore[reportArgumentType]
        (lambda: massieu.probe(statistics=0), "statistics must be a list"),
        (lambda: massieu.Text(strings=1e30), "strings must be a list or another iterable, got 1e"),
        (lambda: massieu.probe(data=1e30), "batches must be an iterable of batches, got 1e"),
        (lambda: massieu.Text(column=10**30), "column must be a string"),
        (lambda: massieu.probe(1e30), "model must be a name, a path, a torch.nn.Module or a massieu.Checkpoint"),
        (lambda: massieu.probe(torch.nn.Linear(2, 2), replace=torch.zeros(())), "replace must be a rule or a list"),
    ],
)
def test_what_was_taken_or_failed_inside_is_one_sentence(call, message):
    with pytest.raises((TypeError, ValueError), match=message):
        call()


@pytest.mark.medium
def test_what_a_forward_says_of_the_first_batch_is_one_sentence():
    class Ranked(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.attention = torch.nn.MultiheadAttention(4, 2, batch_first=True)

        def forward(self, tokens):
            batch, length, _ = tokens.shape  # of two dimensions there are too few
            return self.attention(tokens, tokens, tokens)[0]

    model = Ranked().eval()
    for call in (massieu.describe, lambda model, batch: massieu.Monitor(model, batch, every=1)):
        with pytest.raises(InputError, match=r"the forward of Ranked fails at the batch with tokens of shape \(3, 4\)"):
            call(model, torch.zeros(3, 4))
    with pytest.raises(InputError, match="inputs must have values, got a tensor on the meta device"):
        massieu.describe(model, torch.zeros(1, 3, 4, device="meta"))


@every_row(
    "call, message",
    [
        (
            lambda: HopfieldEnergy(_POINTS),
            r"HopfieldEnergy is made by HopfieldEnergy.create\(memory, reference, scale\)",
        ),  # type: ignore[call-arg]
        (
            lambda: Gaussian(0.0, 1.0),
            r"Gaussian is made by Gaussian.create\(location, .*\), not by Gaussian\(0.0, 1.0\)",
        ),  # type: ignore[call-arg,arg-type]
        (
            lambda: BoltzmannMachine(64, 32),
            r"BoltzmannMachine is made by BoltzmannMachine.create\(visible, hidden, weight\)",
        ),  # type: ignore[call-arg,arg-type]
        (lambda: HopfieldEnergy.create(_POINTS, beta=8), "`beta` is `scale` here: the inverse temperature"),  # type: ignore[call-arg]
        (
            lambda: ops.attention(_PAIR, _PAIR, _PAIR, attn_mask=None),
            "`attn_mask` is `log_weight` here: numbers are added",
        ),  # type: ignore[call-arg]
        (
            lambda: ops.attention(_PAIR, _PAIR, _PAIR, dropout=0.1),
            r"`dropout` is not an argument here, .*: `massieu.nn.Attention\(dropout=…\)` drops them",
        ),  # type: ignore[call-arg]
    ],
)
def test_first_guesses_are_told_what_is_meant(call, message):
    with pytest.raises(TypeError, match=message):
        call()


@pytest.mark.slow
def test_compiled_code_makes_and_calls_what_is_behind_doors():
    """In one graph, and once for all calls of one shape."""

    def solved(matrix: torch.Tensor, right: torch.Tensor) -> torch.Tensor:
        kernel = GaussianKernel.create(1.0)(matrix[None, None], matrix[None, None])
        return (
            linear_solve(lambda x, a: a @ x, right, (matrix,), solver=ConjugateGradients(max_steps=3)).value
            + kernel.sum()
        )

    graphs = []

    def count_graphs(graph, _):
        graphs.append(graph)
        return graph

    torch._dynamo.reset()
    compiled = torch.compile(solved, fullgraph=True, backend=count_graphs)
    for scale in (2.0, 4.0):
        matrix = scale * torch.eye(3)
        right = torch.ones(3)
        # Of the nine pairs of points scale·e_i, three are at distance 0 and six at the distance √2·scale.
        expected = 1 / scale + 3 + 6 * math.exp(-(scale**2))
        torch.testing.assert_close(compiled(matrix, right), torch.full((3,), expected))
    assert len(graphs) == 1


def test_what_is_behind_a_door_keeps_its_signature_and_is_copied():
    assert list(inspect.signature(example).parameters) == ["width", "throw", "generator"]
    assert list(inspect.signature(Attention).parameters)[:2] == ["embed_dim", "num_heads"]
    assert list(inspect.signature(GaussianKernel.create).parameters) == ["lengthscale"]
    attention = Attention(4, 2, batch_first=True)
    tokens = torch.ones(1, 3, 4)
    for other in (copy.deepcopy(attention), pickle.loads(pickle.dumps(attention))):
        assert torch.equal(other(tokens)[0], attention(tokens)[0])
    assert pickle.loads(pickle.dumps(fixed_point)) is fixed_point
