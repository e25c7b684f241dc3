"""What does it cost to draw attention's values in place of averaging them? (E5, S19)"""

import math

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
_LENGTH, _WIDTH, _DEPTH = 24, 32, 2


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
    drawn = torch.Generator().manual_seed(seed)
    task = Chain(4, 5, _LENGTH, drawn)
    heads: list[_DrawingHeads] = []

    def block(width: int, number: int) -> TransformerBlock:
        heads.append(_DrawingHeads(drawn))
        return TransformerBlock(width, number, lambda *_: Attention(width, number, batch_first=True, heads=heads[-1]))

    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = Transformer(task.vocabulary, _LENGTH, width=_WIDTH, depth=_DEPTH, block=block)
    train(model, task, drawn, steps=30 if quick else 600, contexts=64, step_size=5e-3)
    model.double().requires_grad_(False)
    tokens = task.sample(16 if quick else 128, drawn)
    study = _Study(model, heads, tokens[:, :-1], task.exact(tokens))
    predicted = study.predicted(heads, rounds=4 if quick else 40)
    second_half = study.predicted(heads[_DEPTH // 2 :], rounds=4 if quick else 40)
    excess = {draws: study.excess(draws, rounds=2 if quick else 40) for draws in DRAWS}
    scales = torch.tensor(DRAWS, dtype=torch.float64).log()
    levels = torch.tensor(list(excess.values()), dtype=torch.float64).clamp_min(1e-12).log()
    return {
        "slope": slope(scales, levels),
        "coefficient": DRAWS[-1] * excess[DRAWS[-1]] / predicted,
        "half_coefficient": DRAWS[-1] * excess[DRAWS[-1]] / second_half,
        "excess_risk": study.excess_risk,
        "predicted": predicted,
        **{f"excess_{draws}": value for draws, value in excess.items()},
    }


class _DrawingHeads(SoftmaxHeads):
    """Softmax heads that draw values in place of their mean, or add `along` times the errors of one draw."""

    def __init__(self, drawn: torch.Generator) -> None:
        super().__init__()
        self.drawn, self.draws = drawn, 0
        self.along: Float[Tensor, "B 1 1 1"] | None = None
        self.shift: Float[Tensor, "B H L E"] | None = None
        self.error: Float[Tensor, "B H L E"] | None = None

    def forward(self, query: Tensor, key: Tensor, value: Tensor, request: Request) -> HeadsResult:
        found = super().forward(query, key, value, request)
        if self.draws:
            self.error = self._mean_of_draws(self.draws, query, key, value) - found.output
            return found._replace(output=found.output + self.error)
        if self.along is not None:
            error = (self._mean_of_draws(1, query, key, value) - found.output).detach()
            return found._replace(output=found.output + self.along * error)
        if self.shift is not None:
            return found._replace(output=found.output + self.shift)
        return found

    def _mean_of_draws(self, draws: int, query: Tensor, key: Tensor, value: Tensor) -> Float[Tensor, "B H L E"]:
        drawing = ops.resample_attention(query, key, value, generator=self.drawn, draws=draws, is_causal=True)
        return drawing.sample.mean(-2)


class _Study:
    """A model, contexts, and the exact law that its loss is taken under."""

    def __init__(self, model: Transformer, heads: list[_DrawingHeads], tokens: Tensor, exact: Tensor) -> None:
        self.model, self.heads, self.tokens, self.exact = model, heads, tokens, exact
        self.shares = exact.exp()
        self.plain = float(self._loss().sum())
        self.slopes = self._slopes()

    def _loss(self) -> Float[Tensor, " B"]:
        """Of each context, the sum over its places of the exact law's expected surprise."""
        return -(self.shares * self.model(self.tokens).log_softmax(-1)).sum((1, 2))

    @property
    def excess_risk(self) -> float:
        """Above the exact law's own entropy, a token."""
        return (self.plain + float((self.shares * self.exact).sum())) / self.tokens.numel()

    def _slopes(self) -> list[Tensor]:
        """The loss's gradient in each layer's outputs."""
        size = self.model.embedding.embedding_dim
        shape = len(self.tokens), self.heads[0].num_heads, self.tokens.shape[1], size // self.heads[0].num_heads
        for head in self.heads:
            head.shift = torch.zeros(shape, dtype=torch.float64, requires_grad=True)
        found = torch.autograd.grad(self._loss().sum(), [head.shift for head in self.heads if head.shift is not None])
        for head in self.heads:
            head.shift = None
        return list(found)

    def predicted(self, heads: list[_DrawingHeads], rounds: int) -> float:
        """½ E[εᵀHε] a token, ε the errors of one draw at these heads."""
        total = 0.0
        for _ in range(rounds):
            along = torch.zeros(len(self.tokens), 1, 1, 1, dtype=torch.float64, requires_grad=True)
            for head in heads:
                head.along = along
            (first,) = torch.autograd.grad(self._loss().sum(), along, create_graph=True)
            (second,) = torch.autograd.grad(first.sum(), along)
            total += float(second.sum()) / 2
            for head in heads:
                head.along = None
        return total / rounds / self.tokens.numel()

    def excess(self, draws: int, rounds: int) -> float:
        """Loss with so many draws less that without, a token."""
        for head in self.heads:
            head.draws = draws
        total = 0.0
        with torch.no_grad():
            for _ in range(rounds):
                loss = float(self._loss().sum()) - self.plain
                errors = [head.error for head in self.heads]
                total += loss - math.fsum(
                    float((slope_in * error).sum())
                    for slope_in, error in zip(self.slopes, errors, strict=True)
                    if error is not None
                )
        for head in self.heads:
            head.draws = 0
        return total / rounds / self.tokens.numel()
