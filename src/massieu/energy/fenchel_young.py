"""Sparse memories: attention by α-entmax, its potential, its margin and its losses.

Hopfield–Fenchel–Young networks (Santos, Niculae, McNamee and Martins, arXiv 2411.08590; N2): with Ω* in place of log Σ exp the
energy descends as before, and from a margin on one step retrieves a pattern *exactly*.
"""

from typing import Self

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from massieu.energy.entmax import Alpha, checked, entmax, entmax_conjugate, tsallis_entropy
from massieu.energy.patterns import PatternPotential
from massieu.foundation.arguments import check_one_device, check_shape, expanded, floating
from massieu.foundation.values import align, promoted_dtype, static_field
from massieu.measures import Atoms


class SparseAtoms(PatternPotential):
    """Atoms under α-entmax in place of softmax, with weights that can be exactly 0; α = 1 is the measure `Atoms`.

    A(eta) = Ω*(Xeta + log w) and ∇A(eta) = Xᵀ α-entmax(Xeta + log w). No measure has this log-partition for α > 1, but
    it is convex, and a memory: the energy of ``HopfieldEnergy.create(SparseAtoms.create(X))``, ½‖x‖² − Ω*(βXx)/β +
    constants, falls with each step by at least ½‖x⁺ − x‖² (N2).

    Attributes:
        atoms: Points and log-weights.
        order: α, shape (*batch).
        constant: α if it is one number for the whole batch, with which the solver is quickest; else None.

    Example:
        >>> import torch
        >>> from massieu.energy import SparseAtoms
        >>> atoms = SparseAtoms.create(torch.tensor([[1.0, 0.0], [0.0, 1.0]]), alpha=2.0)
        >>> atoms.mean(torch.tensor([3.0, 0.0])).tolist()  # exactly the first
        [1.0, 0.0]
    """

    atoms: Atoms
    order: Float[Tensor, "*batch"]
    constant: float | None = static_field()

    @classmethod
    def create(
        cls,
        points: Float[Tensor, "*batch N d"],
        alpha: Alpha = 1.5,
        log_weight: Float[Tensor, "*batch N"] | Bool[Tensor, "*batch N"] | None = None,
    ) -> Self:
        """Patterns to be retrieved by α-entmax.

        Args:
            points: Finite points, at least one.
            alpha: At least 1: a number, or a tensor that broadcasts to the batch, as one for each head does, and learns.
            log_weight: Added to the scores, or booleans of which True keeps a point.

        Raises:
            ValueError: shapes that do not fit, no point, a NaN, an infinite point or weight, α < 1.
            TypeError: `points` or `alpha` are not floating-point.
        """
        if log_weight is not None:
            floating("log_weight", log_weight, or_boolean=True)
        atoms = Atoms.create(floating("points", points), log_weight)
        scores = atoms.points[..., 0]
        if not isinstance(alpha, Tensor):
            checked(scores, alpha, -1)
            order = atoms.points.new_full(atoms.batch_shape, alpha)
            return cls(atoms, order, float(alpha))
        order = expanded("alpha", floating("alpha", alpha), atoms.batch_shape)
        checked(scores, order.unsqueeze(-1), -1)
        return cls(atoms, order, None)

    @property
    def alpha(self) -> float | Float[Tensor, "*batch"]:
        """α: a number, or the tensor that `create` was called with."""
        if self.constant is None:
            return self.order
        return self.constant

    @property
    def margin(self) -> float | Float[Tensor, "*batch"]:
        """1/(α − 1): how far a score must lead for its weight to be exactly 1; infinite at α = 1."""
        if self.constant == 1:
            return torch.inf
        return 1 / (self.alpha - 1)

    def lead(self, eta: Float[Tensor, "*batch_query d"]) -> Float[Tensor, "*batch_query"]:
        """The largest score less the second largest, log-weights included; +inf where no second point is left."""
        potential, eta = self._admit(eta)
        scores = potential._weighted(potential._scores(eta))
        if scores.shape[-1] == 1:
            return torch.full_like(scores[..., 0], torch.inf)
        first, second = scores.topk(2, -1).values.unbind(-1)
        return torch.where(second == -torch.inf, torch.inf, first - second)

    def retrieves_exactly(self, eta: Float[Tensor, "*batch_query d"]) -> Bool[Tensor, "*batch_query"]:
        """Whether `mean` is one of the points exactly: the lead is at least the margin (N2).

        With the identity as reference the Hopfield step from x is then that point, eta = scale·x.
        """
        lead = self.lead(eta)
        margin = self.margin
        if isinstance(margin, Tensor):
            margin = align(margin, lead.ndim).to(lead.dtype)
        return lead >= margin

    def loss(
        self, eta: Float[Tensor, "*batch_query d"], target: Float[Tensor, "*batch_query N"]
    ) -> Float[Tensor, "*batch_query"]:
        """The Fenchel–Young loss of the scores at `target`, weights of the points: see `fenchel_young_loss`.

        Its gradient in eta is ∇A(eta) − Σ target_n x_n.

        Raises:
            ValueError: `target` has another shape than the weights.
        """
        potential, eta = self._admit(eta)
        scores = potential._weighted(potential._scores(eta))
        return fenchel_young_loss(scores, target, potential._order_of(scores))

    def _order_of(self, scores: Tensor) -> Alpha:
        """α as a number, or as a tensor (*batch, 1, …, 1) that broadcasts to the scores."""
        alpha = self.alpha
        if isinstance(alpha, Tensor):
            return self._align(alpha.unsqueeze(-1), scores)
        return alpha

    def _weighted(self, scores: Tensor) -> Tensor:
        return scores + self._align(self.log_weight, scores)

    def _of_scores(self, scores: Tensor) -> Tensor:
        return entmax_conjugate(self._weighted(scores), self._order_of(scores))

    def _weights_of_scores(self, scores: Tensor) -> Tensor:
        return entmax(self._weighted(scores), self._order_of(scores))


def fenchel_young_loss(
    scores: Float[Tensor, "*lead N"], target: Float[Tensor, "*lead N"], alpha: Alpha = 1.5
) -> Float[Tensor, "*lead"]:
    """Fenchel–Young loss Ω*(z) + Ω(y) − y·z ≥ 0 of α-entmax: zero exactly where y = entmax(z) (Blondel et al. 2020).

    The gradient in z is entmax(z) − y. Cross-entropy at α = 1. For a one-hot target and α > 1 it is zero from the
    margin 1/(α − 1) on. It is taken from scores that are centred on the target, so that a small loss keeps its digits.
    +inf where the target is at a score of −inf.

    Args:
        scores: z; −inf leaves an entry out.
        target: y, weights that sum to one.
        alpha: As for `entmax`.

    Raises:
        ValueError: shapes differ, or α < 1.
        TypeError: something is not floating-point.

    Example:
        >>> import torch
        >>> from massieu.energy import fenchel_young_loss
        >>> fenchel_young_loss(torch.tensor([3.0, 0.0]), torch.tensor([1.0, 0.0]), alpha=2.0).item()
        0.0
    """
    floating("scores", scores)
    check_shape("target", floating("target", target), scores.shape)
    check_one_device(scores=scores, target=target)
    dtype = promoted_dtype(scores, target)
    scores = scores.to(dtype)
    target = target.to(dtype)
    # y·z, where a target of 0 at a score of −inf counts for 0.
    target_score = torch.where(target == 0, 0.0, target * scores).sum(-1)
    # Ω*(z + c) = Ω*(z) + c: centred at y·z both terms are small where the loss is, so that their difference keeps its digits.
    centre = torch.where(target_score.isfinite(), target_score, 0.0).detach()
    potential = entmax_conjugate(scores - centre.unsqueeze(-1), alpha)
    return potential - (target_score - centre) - tsallis_entropy(target, alpha)
