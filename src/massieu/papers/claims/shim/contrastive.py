"""S23: contrastive losses as Fenchel–Young losses of the log-partition."""

from collections.abc import Iterator

import torch
import torch.nn.functional as F
from torch import Tensor

from massieu.measures import Atoms, Sphere
from massieu.ops.attention import attention
from massieu.ops.contrastive import info_nce, n_pairs, nca
from massieu.ops.vocabulary import linear_cross_entropy
from massieu.papers.claims.claim import (
    GRADIENT_BY_DIFFERENCES,
    SHIM,
    Check,
    at_least,
    at_most,
    close,
    near_in_standard_errors,
)
from massieu.papers.claims.inputs import Normal, check_at_least, normal_draws
from massieu.papers.claims.oracles import differences
from massieu.papers.claims.registry import claim


@claim(
    "S23",
    title="Contrastive probability",
    statement="InfoNCE, the N-pair loss and word2vec's softmax are ℓ(q) = A(q) − q·k₊, the Fenchel–Young loss of "
    "the log-partition A at the vertex k₊. ∇ℓ = k̄ − k₊ and ∇²ℓ = Cov_p(K). Without weights ℓ > 0, and 0 is its "
    "limit.",
    source=f"{SHIM}, §2.1, §2.2, eq. (3); the formulas are derived",
    status="quoted",
)
def contrastive_losses(atoms: int = 12, dimensions: int = 4, samples: int = 200_000, seed: int = 0) -> Iterator[Check]:
    check_at_least(2, atoms=atoms, dimensions=dimensions, samples=samples)
    normal = normal_draws(seed)
    yield from _derivatives(normal(dimensions), normal(atoms, dimensions), normal(atoms))
    yield from _fenchel_young(normal(dimensions), F.normalize(normal(atoms, dimensions), dim=-1), normal(atoms))
    yield from _kinds(normal(atoms, dimensions), normal(atoms, dimensions))
    yield from _on_a_sphere(normal, atoms, dimensions, samples)
    yield from _neighbours(normal(atoms, dimensions))


def _loss(query: Tensor, key: Tensor, log_weight: Tensor | None = None) -> Tensor:
    """The library's loss of one query, with the first key as positive."""
    first = torch.zeros(1, dtype=torch.int64)
    loss = info_nce(query[None], key, positive=first, log_weight=log_weight, temperature=1.0)
    assert isinstance(loss, Tensor)
    return loss


def _derivatives(query: Tensor, key: Tensor, log_weight: Tensor) -> Iterator[Check]:
    """ℓ, ∇ℓ and ∇²ℓ of the library, by the softmax written out, and by differences."""
    scores = key @ query + log_weight
    weights = torch.softmax(scores, -1)
    mean = weights @ key
    covariance = (weights.unsqueeze(-1) * (key - mean)).mT @ (key - mean)

    def loss(query: Tensor) -> Tensor:
        return _loss(query, key, log_weight)

    gradient = torch.func.grad(loss)
    yield close("ℓ and lse(Kq + log w) − q·k₊", loss(query), scores.logsumexp(-1) - key[0] @ query)
    yield close("∇ℓ and k̄ − k₊", gradient(query), mean - key[0])
    yield close("differences of ℓ and k̄ − k₊", differences(loss, query), mean - key[0], GRADIENT_BY_DIFFERENCES)
    yield close("∇²ℓ and Cov_p(K)", torch.func.hessian(loss)(query), covariance)
    by_differences = differences(gradient, query)
    yield close("differences of ∇ℓ and Cov_p(K)", by_differences, covariance, GRADIENT_BY_DIFFERENCES)
    measure = Atoms.create(key, log_weight)
    yield close("∇ℓ and the measure's mean less k₊", gradient(query), measure.mean(query) - key[0])
    yield close("∇²ℓ and the measure's Fisher information", torch.func.hessian(loss)(query), measure.fisher(query))


def _fenchel_young(query: Tensor, key: Tensor, log_weight: Tensor) -> Iterator[Check]:
    """ℓ + A*(k₊) = −log p₊; on a sphere every key is a vertex, and has the largest score for a query along itself."""
    # A*(k₊) = sup q·k₊ − A(q); at q = t·k₊ only log(1 + Σ_{j≠+} w_j/w₊ e^{−t(1 − k_j·k₊)}) is missing of it.
    positive = key[0]
    gap = 1 - (key[1:] @ positive).max()
    far = 40 / gap * positive
    measure = Atoms.create(key, log_weight)
    yield close("A*(k₊) and −log w₊", far @ positive - measure.log_partition(far), -log_weight[0])
    weights = torch.softmax(key @ query + log_weight, -1)
    yield close("ℓ(q) + A*(k₊) and −log p₊", _loss(query, key, log_weight) - log_weight[0], -weights[0].log())

    # Bounds by the nearest key alone, and by N − 1 keys as near: e^{−t·gap} goes from 1 to 1e-13, and 1 + 1e-13 still
    # differs from 1.
    ratio = torch.linspace(0, -30, 7, dtype=key.dtype).exp()
    losses = torch.stack([_loss(-r.log() / gap * positive, key) for r in ratio])
    yield at_least("ℓ(t·k₊) without weights, t·gap from 0 to 30", losses, 0.5 * ratio[-1].item())
    yield at_least("ℓ(t·k₊) less log(1 + e^{−t·gap})", losses - ratio.log1p(), -1e-12)
    yield at_most("ℓ(t·k₊) less log(1 + (N − 1)e^{−t·gap})", losses - ((len(key) - 1) * ratio).log1p(), 1e-12)
    equal_weights = torch.full_like(log_weight, -1.0)
    yield close("with all weights e⁻¹: ℓ(t·k₊) for large t and −1", _loss(far, key, equal_weights), -1.0)


def _kinds(query: Tensor, key: Tensor) -> Iterator[Check]:
    """The N-pair loss and a vocabulary's softmax are the same loss."""
    scores = query @ key.T
    expected = (scores.logsumexp(-1) - scores.diagonal()).mean()
    score_differences = scores - scores.diagonal().unsqueeze(-1)
    negatives = score_differences.exp().sum(-1) - 1
    yield close("N-pair loss and mean log(1 + Σ exp(q·k_j − q·k₊))", n_pairs(query, key), negatives.log1p().mean())
    yield close("N-pair loss and mean ℓ", n_pairs(query, key), expected)
    target = torch.arange(len(query))

    def word_loss(hidden_state: Tensor) -> Tensor:
        loss = linear_cross_entropy(hidden_state, key, target, reduction="sum")
        assert isinstance(loss, Tensor)
        return loss

    yield close("softmax over words and mean ℓ", word_loss(query) / len(query), expected)
    gradient = torch.func.grad(word_loss)(query)
    yield close("its gradient in the hidden state and k̄ − k₊", gradient, torch.softmax(scores, -1) @ key - key)


def _on_a_sphere(normal: Normal, atoms: int, dimensions: int, samples: int) -> Iterator[Check]:
    """Cosine scores over a temperature: keys on a sphere, seen at κ = 1/temperature."""
    temperature = 0.5
    query = F.normalize(normal(atoms, dimensions), dim=-1)
    key = F.normalize(normal(atoms, dimensions), dim=-1)
    loss = info_nce(query, key, temperature=temperature)
    eta = query / temperature
    expected = (Atoms.create(key).log_partition(eta) - (eta * key).sum(-1)).mean()
    assert isinstance(loss, Tensor)
    yield close("InfoNCE of cosines and A − κ q·k₊, κ = 1/temperature", loss, expected)

    # Z/N over keys drawn from the sphere is unbiased for the sphere's Z. A key's e^{k·η} has the second moment Z(2η).
    uniform_keys = F.normalize(normal(samples, dimensions), dim=-1)
    sphere = Sphere.create(torch.ones((), dtype=uniform_keys.dtype), dim=dimensions)
    estimate = Atoms.create(uniform_keys).log_partition(eta[0]).exp() / samples
    partition = sphere.log_partition(eta[0]).exp()
    second_moment = sphere.log_partition(2 * eta[0]).exp()
    error = ((second_moment - partition * partition) / samples).sqrt()
    name = "Z/N of keys drawn from the sphere and the sphere's Z at κ"
    yield near_in_standard_errors(name, estimate, partition, error)


def _neighbours(point: Tensor) -> Iterator[Check]:
    """Neighbourhood components analysis: e^{−‖x_i − x_j‖²} is dot-product attention with log w_j = −‖x_j‖² and β = 2."""
    count = len(point)
    squared_distance = (point[:, None] - point).square().sum(-1)
    is_self = torch.eye(count, dtype=torch.bool)
    expected = torch.softmax(-squared_distance.masked_fill(is_self, torch.inf), -1)
    squared_norm = point.square().sum(-1)
    log_weight = (-squared_norm).expand(count, count).masked_fill(is_self, -torch.inf)
    # With the identity as values, the output is the weights.
    identity = torch.eye(count, dtype=point.dtype)[None, None]
    heads = point[None, None]
    weights = attention(heads, heads, identity, log_weight=log_weight, scale=2.0).output[0, 0]
    # Theory's 1e-12, in units of the largest exponent's rounding.
    tolerance = 1e-12 * (1 + squared_norm.max().item())
    yield close("softmax of −‖x_i − x_j‖² and attention with w, β = 2", weights, expected, tolerance)
    labels = torch.arange(count) % max(1, count // 2)
    is_neighbour = (labels[:, None] == labels) & ~is_self
    loss = nca(point, labels)
    assert isinstance(loss, Tensor)
    yield close("NCA's loss and −mean log Σ p over a label", loss, -(expected * is_neighbour).sum(-1).log().mean())
