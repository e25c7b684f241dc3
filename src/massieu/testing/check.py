"""All laws, one after another."""

from collections.abc import Callable, Sequence

from jaxtyping import Float
from torch import Tensor

from massieu.measures.base import Measure
from massieu.testing import batching, derivatives, distribution, divergence, domain, edges, inverse, precision
from massieu.testing.checks import EXACT, agree
from massieu.testing.subject import SCALES, subject_of


def check_measure(
    measure: Measure,
    *,
    log_partition: Callable[[Tensor], Tensor] | None = None,
    kl: Callable[[Tensor, Tensor], Tensor] | None = None,
    log_prob: Callable[[Tensor, Tensor], Tensor] | None = None,
    eta: Float[Tensor, "*batch_query_event"] | None = None,
    scales: Sequence[float] = SCALES,
    samples: int = 20_000,
    compile_backend: str | None = None,
    seed: int = 0,
) -> tuple[str, ...]:
    """Check that `measure` obeys the laws of an exponential family's log-partition, and keeps its digits.

    The laws, of the measure in float64 unless said otherwise:

    * shapes; log-partition and KL against the oracles given;
    * domain: A is finite inside, `DomainError` names the bound outside;
    * mean, Fisher information and cumulants to order 6 against automatic and finite differences; second derivatives
      (`gradgradcheck`); convexity;
    * KL ≥ 0, the right way round and accurate to 1e-5 in float32 down to distance 1e-6; Fenchel–Young; tilting as a
      group action;
    * samples within five standard errors: mean, covariance, third moment, independence of draws and of queries;
    * log_prob against the oracle given, A, KL and the samples: how often each value is drawn (discrete laws), the mass
      of the density (continuous ones, unless they lie in a subspace);
    * the support function: above means and samples, sublinear, reached by the mean far out;
    * the inverse of the mean and the conjugate (`massieu.duality`), and an error for a mu beyond the support;
    * the conjugate where means saturate, and at a discrete law's own points;
    * batched = loop = `vmap`; compiled = eager; float32 against float64; half precision promoted;
    * draws in float32, and rounded to bfloat16, are possible; no query, an empty batch and the meta device give results
      of the right shape; lists and arrays are taken as tensors are.

    Args:
        measure: The measure; its tensors are converted to each precision that is tried.
        log_partition: Oracle, from eta (*batch, query, *event) in float64 to A(eta): quadrature, enumeration, SciPy.
        kl: Oracle, from eta_p and eta_q of that shape to KL(p_{eta_p} ‖ p_{eta_q}).
        log_prob: Oracle, from eta and points (sample, *batch, query, *event) to (sample, *batch, query); it is asked at
            the measure's own draws.
        eta: At least two points in the domain's interior, one query dimension. By default normal draws about the
            measure's interior point (the origin, where it names none), moved towards it until all are well inside; the
            origin is added where it is in the domain.
        scales: Distances from that interior point at which float32 is held against float64, along a drawn direction and
            its opposite; points outside the domain, or whose numbers float32 cannot hold, are left out.
        samples: Draws for each eta.
        compile_backend: Backend of `torch.compile` for compiled = eager, for instance "inductor" (takes a minute) or
            "aot_eager" (seconds); None leaves that law out.
        seed: Of the draws.

    Returns:
        The laws that were left out: "samples" for a measure without a sampler, "log_prob" for one without a density or
        a sampler, "support" and "domain" for one that does not name them, "compiled" without a backend.

    Raises:
        AssertionError: a law is broken; the message names the law, the point and the two numbers.
        ValueError: no eta was given, and none was found inside the domain.
    """
    subject = subject_of(measure, eta, scales, seed)
    batching.check_shapes(subject)
    known = {"domain": domain.check_domain(subject)}
    if log_partition is not None:
        for points in (subject.eta, subject.far):
            values = subject.measure.log_partition(points)
            agree("log-partition = oracle", points, values, log_partition(points), EXACT * (1 + values.abs()))
    derivatives.check_mean(subject)
    derivatives.check_fisher(subject)
    derivatives.check_second_derivatives(subject)
    derivatives.check_convexity(subject)
    derivatives.check_cumulants(subject)
    divergence.check_kl(subject, kl)
    divergence.check_kl_of_close_parameters(subject)
    divergence.check_fenchel_young(subject)
    divergence.check_tilt(subject)
    draws = distribution.draws_of(subject, samples)
    known["samples"] = draws is not None
    known["log_prob"] = draws is not None and distribution.has_density(subject)
    if draws is not None:
        distribution.check_samples(subject, draws)
    if draws is not None and known["log_prob"]:
        distribution.check_log_prob(subject, draws, log_prob)
    known["support"] = distribution.check_support(subject, draws)
    batching.check_batching(subject)
    known["compiled"] = compile_backend is not None
    if compile_backend is not None:
        batching.check_compiled(subject, compile_backend)
    precision.check_precision(subject)
    inverse.check_natural(subject)
    edges.check_boundary(subject, draws)
    edges.check_draws_in_other_precisions(subject)
    edges.check_empty(subject)
    edges.check_meta(subject)
    edges.check_numbers(subject)
    return tuple(name for name, checked in known.items() if not checked)
