"""Maps other than LayerNorm: losses, and the similarity of embeddings. (E4, S13, B16)"""

import math
from functools import partial

import torch
from jaxtyping import Float, Int
from torch import Tensor, nn

from massieu.papers.experiments.arms import Arms
from massieu.papers.experiments.descriptions import described
from massieu.papers.experiments.study import Numbers, experiment
from massieu.papers.experiments.text import ReferenceText
from massieu.papers.experiments.transformer import Transformer, TransformerBlock

_LENGTH = 48
_WIDTH = 48
_STEPS = 300
_RATE = 0.05
"""The weight of a batch in the running moments of `BatchWhitening`."""
_SECOND_SEED = 1000
"""The seed of the second LayerNorm model is that of the first and this number."""


class DynamicTanh(nn.Module):
    """gain ⊙ tanh(a·x) + bias, for each coordinate alone (N27)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.tensor(0.5))
        self.affine = _Affine(width)

    def forward(self, tokens: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        return self.affine(torch.tanh(self.slope * tokens))


class SpinMap(nn.Module):
    """The mean of a spin of radius R in the field x: 2x/(1 + √(1 + 4‖x‖²/R²)), R² = d/2 − 1, for large d (B16, β = 2)."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.squared_radius = width / 2 - 1
        self.affine = _Affine(width)

    def forward(self, tokens: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        root = (1 + 4 * tokens.square().sum(-1, keepdim=True) / self.squared_radius).sqrt()
        return self.affine(2 * tokens / (1 + root))


class Shrinkage(nn.Module):
    """x/(1 + γ), γ > 0 trained: the contraction of S13, the same for every token."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.log_step = nn.Parameter(torch.zeros(()))  # log γ
        self.affine = _Affine(width)

    def forward(self, tokens: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        return self.affine(tokens / (1 + self.log_step.exp()))


class BatchWhitening(nn.Module):
    """Tokens shifted and scaled to mean 0 and covariance 1: by the batch's moments in training, then by their running mean."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.affine = _Affine(width)
        self.register_buffer("mean", torch.zeros(width))
        self.register_buffer("covariance", torch.eye(width))

    def forward(self, tokens: Float[Tensor, "*batch d"]) -> Float[Tensor, "*batch d"]:
        if torch.is_grad_enabled():
            cloud = tokens.flatten(0, -2)
            mean = cloud.mean(0)
            covariance = torch.cov(cloud.mT)
            self.mean = (1 - _RATE) * self.mean + _RATE * mean.detach()
            self.covariance = (1 - _RATE) * self.covariance + _RATE * covariance.detach()
        else:
            mean = self.mean
            covariance = self.covariance
        root = torch.linalg.cholesky(covariance + 1e-3 * torch.eye(len(mean)))
        return self.affine(torch.linalg.solve_triangular(root, (tokens - mean).mT, upper=False).mT)


class _Affine(nn.Module):
    """gain ⊙ x + bias, which every map ends with."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.gain = nn.Parameter(torch.ones(width))
        self.bias = nn.Parameter(torch.zeros(width))

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
    """Linear centred kernel alignment of two clouds: 1 for a rotated and scaled copy, near 0 for independent clouds."""
    x = x.double() - x.double().mean(0)
    y = y.double() - y.double().mean(0)
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
        name: partial(
            Transformer,
            text.vocabulary,
            _LENGTH,
            width=_WIDTH,
            block=partial(TransformerBlock, norm=norm),
            norm=norm,
        )
        for name, (_, norm) in _NORMS.items()
    }
    step_sizes = dict.fromkeys(models, 6e-3)
    arms = Arms(text, models, step_sizes, steps=_STEPS).train(seed, quick)
    layer_alone = Arms(text, {"layer": models["layer"]}, step_sizes, steps=_STEPS)
    second_layer = layer_alone.train(seed + _SECOND_SEED, quick)["layer"]
    tokens = text.test(seed)[:128, :-1]
    embeddings = {name: _embeddings(arm.model, tokens) for name, arm in arms.items()}
    reference = embeddings["layer"]
    return {
        **{f"{name}_loss": arm.loss for name, arm in arms.items()},
        **{f"{name}_alignment": alignment(cloud, reference) for name, cloud in embeddings.items() if name != "layer"},
        "seed_alignment": alignment(_embeddings(second_layer.model, tokens), reference),
    }


def _embeddings(model: nn.Module, tokens: Int[Tensor, "B L"]) -> Float[Tensor, "n d"]:
    assert isinstance(model, Transformer)
    with torch.no_grad():
        return model.hidden(tokens).flatten(0, 1)
