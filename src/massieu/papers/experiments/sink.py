"""Does a trained sink learn the weight of the prior, and does log Z restore the count of tokens? (E22, Z3, X4)"""

import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float64, Int
from torch import Tensor

from massieu import ops
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.training import minimise

SIZE = 8
LONGEST = 128
_CONTEXTS = 256


@experiment(
    "sink",
    question="Does a trained sink learn the prior's weight, and does log Z restore the count that softmax forgets?",
    claims="E22, Z3, X4",
    minutes=8,
    criteria=[
        Criterion("weight_error", "|e^(sink − token's logit at the prior mean) − κ₀|/κ₀", most=0.05),
        Criterion("value_error", "‖sink's value − prior mean‖/‖prior mean‖", most=0.05),
        Criterion("log_z_weight_error", "|κ − κ₀|/κ₀ of a gate σ(a·log Z − log κ) in place of the sink", most=0.05),
        Criterion("log_z_slope", "a of the gate σ(a·log Z − log κ)", least=0.95, most=1.05),
        Criterion(
            "excess_risk",
            "squared distance of the sink's output from the posterior mean",
            most=1e-3,
            role="optimisation",
        ),
        Criterion(
            "log_z_excess_risk",
            "squared distance of the gate's output from the posterior mean",
            most=1e-3,
            role="optimisation",
        ),
        Criterion(
            "shuffled_weight_error",
            "weight error of a sink trained on means of other contexts",
            most=0.05,
            role="control",
        ),
        Criterion(
            "plain_excess_risk",
            "squared distance without sink and log Z: one factor for all lengths",
            most=1e-3,
            role="control",
        ),
    ],
)
def sink(seed: int, quick: bool) -> Numbers:
    """A latent mean in 8 dimensions has the prior N(m₀, I/κ₀), with κ₀ between 2 and 20. A context has 1 to 128 tokens N(mean,
    I); its length is log-uniform. The posterior mean is attention with a sink of value m₀ and weight κ₀ (Z3). One softmax
    layer learns to predict the mean: its logit is linear in the token, and the logit and value of its sink are trained. κ₀
    is read off the effective logit, since a constant added to all logits changes nothing. A second layer has a gate
    computed from its log Z in place of the sink, and a third one has neither.
    """
    generator = torch.Generator().manual_seed(seed)
    task = _Task(generator)
    steps = 100 if quick else 3000
    sink_layer = task.train(_with_sink, steps)
    gate_layer = task.train(_with_gate, steps)
    constant_layer = task.train(_with_constant_gate, steps)
    shuffled = task.train(_with_sink, steps, shuffled=True)
    test = [task.batch(_CONTEXTS) for _ in range(40)]
    return {
        "prior_weight": task.weight,
        "weight_error": abs(task.sink_weight(sink_layer) / task.weight - 1),
        "value_error": float((sink_layer.value - task.mean).norm() / task.mean.norm()),
        "log_z_weight_error": abs(math.exp(-float(gate_layer.logit)) / task.weight - 1),
        "log_z_slope": float(gate_layer.slope),
        "excess_risk": task.excess_risk(_with_sink, sink_layer, test),
        "log_z_excess_risk": task.excess_risk(_with_gate, gate_layer, test),
        "plain_excess_risk": task.excess_risk(_with_constant_gate, constant_layer, test),
        "shuffled_weight_error": abs(task.sink_weight(shuffled) / task.weight - 1),
    }


@dataclass(frozen=True)
class _Layer:
    """The trained numbers of a softmax layer of one head; not every form uses all of them.

    Attributes:
        direction: A token's score is its product with this vector.
        logit: The sink's score, or the offset of the gate.
        value: The value of the sink, or of what the gate lets through besides attention.
        slope: What log Z is multiplied by in the gate.
    """

    direction: Float64[Tensor, " d"]
    logit: Float64[Tensor, ""]
    value: Float64[Tensor, " d"]
    slope: Float64[Tensor, ""]


@dataclass(frozen=True)
class _Batch:
    """Padded contexts, and the latent mean of each.

    Attributes:
        tokens: The tokens, with padding at the end.
        real: True where a token is no padding.
        lengths: The number of real tokens.
        means: The latent means.
    """

    tokens: Float64[Tensor, "B L d"]
    real: Bool[Tensor, "B L"]
    lengths: Int[Tensor, " B"]
    means: Float64[Tensor, "B d"]

    def attend(
        self, layer: _Layer, sink: Tensor | None = None, sink_value: Tensor | None = None
    ) -> tuple[Float64[Tensor, "B d"], Float64[Tensor, " B"]]:
        """Output and log Z of one query, whose scores are `direction`·token."""
        tokens = self.tokens.unsqueeze(1)  # of one head
        query = layer.direction.expand(len(self.tokens), 1, 1, SIZE)
        log_weight = self.real[:, None, None]
        result = ops.attention(
            query, tokens, tokens, log_weight=log_weight, scale=1.0, sink=sink, sink_value=sink_value
        )
        return result.output[:, 0, 0], result.log_partition[:, 0, 0]


def _with_sink(layer: _Layer, batch: _Batch) -> Float64[Tensor, "B d"]:
    output, _ = batch.attend(layer, sink=layer.logit.reshape(1), sink_value=layer.value.reshape(1, SIZE))
    return output


def _with_gate(layer: _Layer, batch: _Batch) -> Float64[Tensor, "B d"]:
    output, log_partition = batch.attend(layer)
    gate = torch.sigmoid(layer.slope * log_partition + layer.logit).unsqueeze(-1)
    return gate * output + (1 - gate) * layer.value


def _with_constant_gate(layer: _Layer, batch: _Batch) -> Float64[Tensor, "B d"]:
    output, _ = batch.attend(layer)
    gate = torch.sigmoid(layer.logit)
    return gate * output + (1 - gate) * layer.value


_Form = Callable[[_Layer, _Batch], Tensor]
"""From a layer and contexts to predictions of their means."""


class _Task:
    """A prior of the latent mean, and contexts drawn from it.

    Attributes:
        weight, mean: κ₀ and m₀.
    """

    def __init__(self, generator: torch.Generator) -> None:
        self.generator = generator
        # log κ₀ is uniform, κ₀ between 2 and 20.
        self.weight = 2 * 10 ** float(torch.rand((), generator=generator, dtype=torch.float64))
        self.mean = torch.randn(SIZE, generator=generator, dtype=torch.float64)

    def batch(self, contexts: int) -> _Batch:
        options = {"generator": self.generator, "dtype": torch.float64}
        lengths = (torch.rand(contexts, **options) * math.log(LONGEST + 1)).exp().long().clamp(1, LONGEST)
        means = self.mean + torch.randn(contexts, SIZE, **options) / math.sqrt(self.weight)
        tokens = means.unsqueeze(1) + torch.randn(contexts, LONGEST, SIZE, **options)
        real = torch.arange(LONGEST) < lengths.unsqueeze(1)
        return _Batch(tokens, real, lengths, means)

    def posterior_mean(self, batch: _Batch) -> Float64[Tensor, "B d"]:
        """(κ₀m₀ + Σx)/(κ₀ + L)."""
        total = (batch.tokens * batch.real.unsqueeze(-1)).sum(1)
        return (self.weight * self.mean + total) / (self.weight + batch.lengths.double().unsqueeze(-1))

    def excess_risk(self, form: _Form, layer: _Layer, batches: list[_Batch]) -> float:
        """Mean squared distance of the layer's predictions from the posterior means, per coordinate."""
        distances = [(form(layer, batch) - self.posterior_mean(batch)).square().mean() for batch in batches]
        return float(torch.stack(distances).mean())

    def sink_weight(self, layer: _Layer) -> float:
        """The exponential of the sink's logit minus that of a token at the prior mean."""
        return math.exp(float(layer.logit - layer.direction @ self.mean))

    def train(self, form: _Form, steps: int, *, shuffled: bool = False) -> _Layer:
        """Train a layer from 0; with `shuffled`, on the means of other contexts."""

        def zeros(*shape: int) -> Tensor:
            return torch.zeros(shape, dtype=torch.float64, requires_grad=True)

        layer = _Layer(direction=zeros(SIZE), logit=zeros(), value=zeros(SIZE), slope=zeros())

        def loss() -> Tensor:
            batch = self.batch(_CONTEXTS)
            means = batch.means.roll(1, 0) if shuffled else batch.means
            return (form(layer, batch) - means).square().mean()

        parameters = [layer.direction, layer.logit, layer.value]
        if form is _with_gate:
            parameters.append(layer.slope)
        minimise(loss, parameters, steps=steps, step_size=0.05, averaged_share=0.25)
        return _Layer(layer.direction.detach(), layer.logit.detach(), layer.value.detach(), layer.slope.detach())
