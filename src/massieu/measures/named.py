"""Measures of the papers that are compositions of others."""

import torch
from jaxtyping import Float
from torch import Tensor

from massieu.foundation.arguments import check_range, real_tensor, whole_number
from massieu.foundation.doors import MEASURE, door
from massieu.foundation.transforms import all_true
from massieu.measures.atoms import Atoms
from massieu.measures.base import Measure
from massieu.measures.combine import affine
from massieu.measures.gaussian import Gaussian
from massieu.measures.mixture import Mixture, mixture


def boosting(
    labels: Float[Tensor, "*batch N"], logits: Float[Tensor, "*batch N"], learners: Float[Tensor, "*batch N d"]
) -> Atoms:
    """Boosting's example weights as a measure: atoms −t_n g(x_n) of weight exp(−t_n F(x_n)) (Shim §3.1; S17).

    Its log-partition at α is the logarithm of the exponential loss after F ← F + α·g, its mean the negative edges
    under the new weights, and ``tilt(α)`` the next round's measure. The totally corrective α is where the mean is 0.

    Args:
        labels: t, +1 or −1.
        logits: F, the ensemble so far; zeros in the first round.
        learners: g, the outputs of d weak learners on each example.

    Raises:
        ValueError: labels other than ±1, or shapes that do not fit.
        TypeError: `learners` are not floating-point.

    Example:
        >>> from massieu.measures import boosting
        >>> boosting([1.0, -1.0], [0.0, 0.0], [[1.0], [1.0]]).mean([0.0]).tolist()  # right once, wrong once
        [0.0]
    """
    learners = real_tensor("learners", learners)
    labels = real_tensor("labels", labels, learners)
    logits = real_tensor("logits", logits, learners)
    if labels.shape != logits.shape or learners.shape[:-1] != labels.shape:
        raise ValueError(
            f"boosting needs labels and logits of one shape (*batch, N) and learners of shape (*batch, N, d), got "
            f"{tuple(labels.shape)}, {tuple(logits.shape)} and {tuple(learners.shape)}"
        )
    if not all_true(labels.abs() == 1):
        raise ValueError("labels must be +1 or −1")
    return Atoms.create(-labels.unsqueeze(-1) * learners, -labels * logits)


@door
def hybrid(atoms: Atoms, background: Gaussian, concentration: Float[Tensor, "*batch"] | float) -> Mixture:
    """Attention with a Gaussian background of weight c: the measure Σ_n w_n δ_{x_n} + c·N(m, Σ) (S18).

    Its mean is the posterior mean of a Dirichlet process with base N(m, Σ) and concentration c, tilted by eta. Far from
    the origin the Gaussian wins, since a quadratic outgrows every linear function: bound its covariance, or eta.

    Raises:
        ValueError: a concentration that is not positive, or shapes that do not fit.

    Example:
        >>> from massieu.measures import Atoms, Gaussian, hybrid
        >>> law = hybrid(Atoms.create([[2.0]]), Gaussian.create([0.0], 1.0), 3.0)
        >>> round(law.mean([0.0]).item(), 6)  # the atom has one quarter of the weight
        0.5
    """
    weight = real_tensor("concentration", concentration, background.location).to(background.location)
    check_range("concentration", weight, above=0)
    return mixture(torch.stack([torch.zeros_like(weight), weight.log()], -1), [atoms, background])


@door(measure=MEASURE)
def divergence_kernel(measure: Measure, eta: Float[Tensor, "*batch N event"]) -> Atoms:
    """Atoms whose attention weighs parameter j by exp(−KL(p_{eta_j} ‖ p_query)), the KL divergence of a family (X8).

    Its atoms are the link-transformed keys ∇A(eta_j), with log-weight entropy(eta_j) = −A*(∇A(eta_j)): scores
    query·∇A(eta_j) + entropy(eta_j) differ from −KL by A(query), which the softmax does not see. For a Gaussian that is
    Mahalanobis distance.

    Args:
        measure: The family.
        eta: Its parameters, one query dimension of them.

    Raises:
        ValueError, DomainError: as ``measure.mean``, and for `eta` without exactly one query dimension.

    Example:
        >>> from massieu.measures import Gaussian, divergence_kernel
        >>> kernel = divergence_kernel(Gaussian.create([0.0], 1.0), [[1.0], [2.0]])
        >>> kernel.points.tolist(), kernel.log_weight.tolist()  # −½‖eta‖²
        ([[1.0], [2.0]], [-0.5, -2.0])
    """
    eta = real_tensor("eta", eta)
    if eta.ndim != len(measure.batch_shape) + 1 + len(measure.event_shape) or len(measure.event_shape) != 1:
        raise ValueError(
            f"divergence_kernel needs eta of shape {(*measure.batch_shape, 'N', *measure.event_shape)}, got "
            f"{tuple(eta.shape)}"
        )
    return Atoms(measure.mean(eta), measure.entropy(eta))


@door(measure=MEASURE)
def switched(measure: Measure, count: int) -> Mixture:
    """One of `count` copies of a measure on R^d is on, the others are 0; then which one, as a vector of one 1 and zeros.

    Points have count·d coordinates of the copies and `count` of the switch. As the hidden units of a machine it makes an
    implicit mixture of machines (Nair and Hinton 2008): p(v) = Σ_k Z_k p_k(v)/Σ Z_k, in which machine k has the weights of
    copy k, the column of switch k as its visible biases, and a share that its normaliser Z_k decides.

    Raises:
        TypeError: no measure, or a count that is not whole.
        ValueError: a count below 1; a measure with a batch, or whose points are not vectors.

    Example:
        >>> import torch
        >>> from massieu.measures import Bernoulli, switched
        >>> law = switched(Bernoulli.create([0.5, 0.5]), 2)
        >>> law.mean(torch.zeros(6)).tolist()  # either copy is on half of the time; a bit of it is 1 in half of that
        [0.25, 0.25, 0.25, 0.25, 0.5, 0.5]
    """
    whole_number("count", count, least=1)
    if measure.batch_shape or len(measure.event_shape) != 1:
        raise ValueError(
            f"switched needs one measure on vectors, got batch shape {tuple(measure.batch_shape)} and event shape "
            f"{tuple(measure.event_shape)}"
        )
    size = measure.event_shape[0]
    origin = measure.mean(real_tensor("origin", [0.0] * size, measure._some_leaf()))
    # Column i of the unit matrix puts coordinate i of a copy into its place.
    identity = torch.eye(count * size + count, dtype=origin.dtype, device=origin.device)
    copies = [
        affine(measure, identity[:, copy * size : (copy + 1) * size].contiguous(), identity[:, count * size + copy])
        for copy in range(count)
    ]
    return mixture(origin.new_zeros(count), copies)
