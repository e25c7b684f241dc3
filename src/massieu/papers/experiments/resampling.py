"""What does it cost to draw attention's values in place of averaging them? (E5, S19)"""

import math
from functools import partial

import torch
from jaxtyping import Float
from torch import Tensor

from massieu import ops
from massieu.nn import Attention, SoftmaxHeads
from massieu.nn.strategy import HeadsResult, Request
from massieu.papers.experiments.criterion import Criterion
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.tasks import Chain, train
from massieu.papers.experiments.training import slope
from massieu.papers.experiments.transformer import Transformer, TransformerBlock

DRAWS = (8, 16, 32, 64, 128)
_LENGTH = 24
_WIDTH = 32
_DEPTH = 2


@experiment(
    "resampling",
    question="Does drawing attention's values cost a loss of ½ E[εᵀHε]/S for S draws, as sequential Monte Carlo says?",
    claims="E5, S19",
    minutes=5,
    criteria=[
        Criterion("slope", "slope of log excess loss on log S, S from 8 to 128", least=-1.05, most=-0.95),
        Criterion("coefficient", "S × excess loss at 128 draws / ½ E[εᵀHε]", least=0.85, most=1.15),
        Criterion(
            "excess_risk",
            "KL(exact ‖ model), nats: how near the loss is to the best",
            most=0.02,
            role="optimisation",
        ),
        Criterion(
            "half_coefficient",
            "S × excess loss at 128 draws / ½ E[εᵀHε] of the second half of the layers",
            least=0.85,
            most=1.15,
            role="control",
        ),
    ],
)
def resampling(seed: int, quick: bool) -> Numbers:
    """A transformer of two layers, 4 heads and width 32 is trained on a hidden Markov chain of 4 states and 5 symbols, 24
    tokens long. Then every head, in all layers at once, returns the mean of S values that are drawn by its weights. The
    excess loss is the loss with draws minus the loss without, both under the exact law, so that no target is drawn. Terms
    of first order in the errors of the draws have mean 0 and are subtracted. The prediction is ½ E[εᵀHε], where ε are the
    errors of one draw at all layers and H is the Hessian of the loss with respect to them.
    """
    generator = torch.Generator().manual_seed(seed)
    task = Chain(4, 5, _LENGTH, generator)
    layers: list[_DrawingHeads] = []

    def block(width: int, num_heads: int) -> TransformerBlock:
        layer_heads = _DrawingHeads(generator)
        layers.append(layer_heads)
        attention = partial(Attention, batch_first=True, heads=layer_heads)
        return TransformerBlock(width, num_heads, attention)

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Transformer(task.vocabulary, _LENGTH, width=_WIDTH, depth=_DEPTH, block=block)
    train(model, task, generator, steps=30 if quick else 600, contexts=64, step_size=5e-3)
    model.double().requires_grad_(False)
    tokens = task.sample(16 if quick else 128, generator)
    losses = _Losses(model, layers, tokens[:, :-1], task.exact(tokens))
    prediction = losses.predicted_excess(layers, rounds=4 if quick else 40)
    prediction_of_half = losses.predicted_excess(layers[_DEPTH // 2 :], rounds=4 if quick else 40)
    excess = {draws: losses.excess(draws, rounds=2 if quick else 40) for draws in DRAWS}
    log_draws = torch.tensor(DRAWS, dtype=torch.float64).log()
    log_excess = torch.tensor(list(excess.values()), dtype=torch.float64).clamp_min(1e-12).log()
    most_draws = DRAWS[-1]
    return {
        "slope": slope(log_draws, log_excess),
        "coefficient": most_draws * excess[most_draws] / prediction,
        "half_coefficient": most_draws * excess[most_draws] / prediction_of_half,
        "excess_risk": losses.excess_risk,
        "predicted": prediction,
        **{f"excess_{draws}": value for draws, value in excess.items()},
    }


class _DrawingHeads(SoftmaxHeads):
    """Softmax heads whose output can be changed in one of three ways.

    Attributes:
        draws: If positive, the output is the mean of this number of drawn values.
        error_scale: If given, this number times the error of one draw is added to the output.
        shift: If given, it is added to the output.
        error: The drawn mean minus the exact one, of the last call with `draws`.
    """

    def __init__(self, generator: torch.Generator) -> None:
        super().__init__()
        self.generator = generator
        self.draws = 0
        self.error_scale: Float[Tensor, "B 1 1 1"] | None = None
        self.shift: Float[Tensor, "B H L E"] | None = None
        self.error: Float[Tensor, "B H L E"] | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        exact = super().forward(query, key, value, request)
        if self.draws:
            self.error = self._mean_of_draws(self.draws, query, key, value) - exact.output
            return exact._replace(output=exact.output + self.error)
        if self.error_scale is not None:
            error = (self._mean_of_draws(1, query, key, value) - exact.output).detach()
            return exact._replace(output=exact.output + self.error_scale * error)
        if self.shift is not None:
            return exact._replace(output=exact.output + self.shift)
        return exact

    def _mean_of_draws(self, draws: int, query: Tensor, key: Tensor, value: Tensor) -> Float[Tensor, "B H L E"]:
        result = ops.resample_attention(query, key, value, generator=self.generator, draws=draws, is_causal=True)
        return result.sample.mean(-2)


class _Losses:
    """A model's loss under the exact law, with and without draws, on the same contexts.

    Attributes:
        layers: The heads of each layer.
        exact_loss: The loss without draws, summed over tokens.
        gradients: The gradient of that loss in the output of each layer's heads.
    """

    def __init__(self, model: Transformer, layers: list[_DrawingHeads], tokens: Tensor, log_law: Tensor) -> None:
        self.model = model
        self.layers = layers
        self.tokens = tokens
        self.log_law = log_law
        self.law = log_law.exp()
        self.exact_loss = float(self._loss().sum())
        self.gradients = self._gradients()

    def _loss(self) -> Float[Tensor, " B"]:
        """The exact law's expected surprise, summed over the positions of each context."""
        return -(self.law * self.model(self.tokens).log_softmax(-1)).sum((1, 2))

    @property
    def excess_risk(self) -> float:
        """The loss minus the entropy of the exact law, per token."""
        return (self.exact_loss + float((self.law * self.log_law).sum())) / self.tokens.numel()

    def _gradients(self) -> list[Float[Tensor, "B H L E"]]:
        num_heads = self.layers[0].num_heads
        head_size = self.model.embedding.embedding_dim // num_heads
        batch, length = self.tokens.shape
        shifts = []
        for layer in self.layers:
            layer.shift = torch.zeros(batch, num_heads, length, head_size, dtype=torch.float64, requires_grad=True)
            shifts.append(layer.shift)
        gradients = torch.autograd.grad(self._loss().sum(), shifts)
        for layer in self.layers:
            layer.shift = None
        return list(gradients)

    def predicted_excess(self, layers: list[_DrawingHeads], rounds: int) -> float:
        """½ E[εᵀHε] per token, ε the errors of one draw in these layers; a mean over `rounds` draws."""
        total = 0.0
        for _ in range(rounds):
            # εᵀHε is the second derivative of the loss in the scale of ε, at 0; one scale for each context.
            error_scale = torch.zeros(len(self.tokens), 1, 1, 1, dtype=torch.float64, requires_grad=True)
            for layer in layers:
                layer.error_scale = error_scale
            (first,) = torch.autograd.grad(self._loss().sum(), error_scale, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), error_scale)
            total += float(second.sum()) / 2
            for layer in layers:
                layer.error_scale = None
        return total / rounds / self.tokens.numel()

    def excess(self, draws: int, rounds: int) -> float:
        """The loss with this number of draws minus that without, per token; a mean over `rounds`."""
        for layer in self.layers:
            layer.draws = draws
        total = 0.0
        with torch.no_grad():
            for _ in range(rounds):
                excess = float(self._loss().sum()) - self.exact_loss
                # The terms of first order have mean 0: without them the mean is the same, and its variance less.
                total += excess - self._first_order()
        for layer in self.layers:
            layer.draws = 0
        return total / rounds / self.tokens.numel()

    def _first_order(self) -> float:
        """The loss's change to first order in the errors of the last call."""
        return math.fsum(
            float((gradient * layer.error).sum())
            for gradient, layer in zip(self.gradients, self.layers, strict=True)
            if layer.error is not None
        )
