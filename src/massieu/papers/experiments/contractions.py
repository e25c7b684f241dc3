"""Other maps than a norm after each sum: losses, and how alike the embeddings are. (E4, S13, B16)"""

import math

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from massieu.papers.experiments.arms import Arms
from massieu.papers.experiments.descriptions import described
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.text import ReferenceText
from massieu.papers.experiments.transformer import Transformer, TransformerBlock

_LENGTH, _WIDTH, _STEPS = 48, 48, 300


class DynamicTanh(nn.Module):
    """gain ⊙ tanh(a·x) + bias, for each coordinate alone (N27)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.slope, self.affine = nn.Parameter(torch.tensor(0.5)), _Affine(width)

    def forward(self, tokens: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        return self.affine(torch.tanh(self.slope * tokens))


class SpinMap(nn.Module):
    """The mean of a spin of radius R in the field x: 2x/(1 + √(1 + 4‖x‖²/R²)), R² = d/2 − 1, for large d (B16, β = 2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.square, self.affine = width / 2 - 1, _Affine(width)

    def forward(self, tokens: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        size = (1 + 4 * tokens.square().sum(-1, keepdim=True) / self.square).sqrt()
        return self.affine(2 * tokens / (1 + size))


class Shrinkage(nn.Module):
    """x/(1 + γ), γ > 0 trained: the contraction of S13, the same for every token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.log_step, self.affine = nn.Parameter(torch.zeros(())), _Affine(width)

    def forward(self, tokens: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        return self.affine(tokens / (1 + self.log_step.exp()))


class BatchWhitening(nn.Module):
    """Tokens of mean 0 and covariance 1: of the batch in training, of what training saw on average afterwards."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.affine = _Affine(width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("covariance", torch.eye(width))

    def forward(self, tokens: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        mean, covariance = self.mean, self.covariance
        if torch.is_grad_enabled():
            cloud = tokens.flatten(0, -2)
            mean, covariance = cloud.mean(0), torch.cov(cloud.mT)
            self.mean = 0.95 * self.mean + 0.05 * mean.detach()
            self.covariance = 0.95 * self.covariance + 0.05 * covariance.detach()
        root = torch.linalg.cholesky(covariance + 1e-3 * torch.eye(len(mean)))
        return self.affine(torch.linalg.solve_triangular(root, (tokens - mean).mT, upper=False).mT)


class _Affine(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain, self.bias = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))

    def forward(self, tokens: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        return self.gain * tokens + self.bias


_NORMS = {
    "layer": ("LayerNorm", nn.LayerNorm),
    "root_mean_square": ("RMSNorm", nn.RMSNorm),
    "shrinkage": ("x/(1 + γ)", Shrinkage),
    "whitening": ("whitening", BatchWhitening),
    "tanh": ("dynamic tanh", DynamicTanh),
    "spin": ("the spin map", SpinMap),
}


def alignment(x: Float[Tensor, "n d"], y: Float[Tensor, "n e"]) -> float:
    """Linear centred kernel alignment: 1 where one is a turned and scaled copy of the other, near 0 for independent ones."""
    x, y = (points.double() - points.double().mean(0) for points in (x, y))
    return float((x.mT @ y).square().sum() / math.sqrt((x.mT @ x).square().sum() * (y.mT @ y).square().sum()))


@experiment(
    "contractions",
    question="Do maps other than LayerNorm learn as well, and do they lead to other embeddings?",
    claims="E4, S13, B16",
    minutes=5,
    criteria=[
        *described({f"{name}_loss": f"loss with {title}, nats" for name, (title, _) in _NORMS.items()}),
        *described(
            {
                f"{name}_alignment": f"alignment of embeddings with LayerNorm's: {title}"
                for name, (title, _) in _NORMS.items()
                if name != "layer"
            }
        ),
        *described({"seed_alignment": "alignment of embeddings between two seeds of LayerNorm"}),
    ],
)
def contractions(seed: int, quick: bool) -> Numbers:
    """A causal transformer of two layers and width 48 predicts the next character of the reference text that ships with
    Python, from windows of 48, after 300 steps of 32 windows of step size 0.006. Arms differ in the map before each
    sublayer and the readout. Embeddings are what the readout sees on held-out windows. Their similarity is measured by
    linear centred kernel alignment, and compared with that of two seeds with LayerNorm. Whitening uses the batch's
    moments in training, and so sees later tokens there; afterwards it uses their running mean.
    """
    text = ReferenceText(_LENGTH)
    models = {
        name: lambda norm=norm: Transformer(
            text.vocabulary,
            _LENGTH,
            width=_WIDTH,
            block=lambda width, heads: TransformerBlock(width, heads, norm=norm),
            norm=norm,
        )
        for name, (_, norm) in _NORMS.items()
    }
    arms = Arms(text, models, dict.fromkeys(models, 6e-3), steps=_STEPS)
    trained = arms.losses(seed, quick)
    other = Arms(text, {"layer": models["layer"]}, arms.step_sizes, steps=_STEPS).losses(seed + 1000, quick)
    tokens = text.test(seed)[:128, :-1]
    clouds = {name: _embeddings(model, tokens) for name, (_, model) in trained.items()}
    repeated = _embeddings(other["layer"][1], tokens)
    return {
        **{f"{name}_loss": loss for name, (loss, _) in trained.items()},
        **{f"{name}_alignment": alignment(cloud, clouds["layer"]) for name, cloud in clouds.items() if name != "layer"},
        "seed_alignment": alignment(repeated, clouds["layer"]),
    }


def _embeddings(model: nn.Module, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "n d"]:
    assert isinstance(model, Transformer)
    with torch.no_grad():
        return model.hidden(tokens).flatten(0, 1)
