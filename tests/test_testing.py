"""`check_measure` must be able to fail: each deliberately wrong measure is caught, by the law it breaks."""

import math

import pytest
import torch
from tests.rows import every_row
from torch import Tensor

from massieu.measures import DomainError, Measure, Spin
from massieu.testing import check_measure


class Coordinates(Measure):
    """What the measures below share: one rate per coordinate."""

    rate: Tensor

    @property
    def batch_shape(self):
        return self.rate.shape[:-1]

    @property
    def event_shape(self):
        return self.rate.shape[-1:]


class Poisson(Coordinates):
    """A correct one: the single hook an author writes."""

    def _log_partition(self, eta):
        return (self._align(self.rate, eta) * torch.expm1(eta)).sum(-1)


class Exponential(Coordinates):
    """A correct one with a domain: eta < rate."""

    def _log_partition(self, eta):
        return -torch.log1p(-eta / self._align(self.rate, eta)).sum(-1)

    def _in_domain(self, eta):
        return (eta < self._align(self.rate, eta)).all(-1)

    def _domain(self):
        return "eta < rate in every coordinate"

    def _sample(self, eta, shape, generator):
        rate = (self._align(self.rate, eta) - eta).expand(*shape, *eta.shape)
        return torch.empty_like(rate).exponential_(generator=generator) / rate


class WrongMean(Coordinates):
    def _log_partition(self, eta):
        return (self._align(self.rate, eta) * torch.expm1(eta)).sum(-1)

    def _mean(self, eta):
        return 1.001 * self._align(self.rate, eta) * eta.exp()


class UncentredFisher(Coordinates):
    def _log_partition(self, eta):
        return (self._align(self.rate, eta) * torch.expm1(eta)).sum(-1)

    def _fisher(self, eta):
        mean = self._mean(eta)
        return torch.diag_embed(mean) + mean.unsqueeze(-1) * mean.unsqueeze(-2)


class WrongFisherProduct(Coordinates):
    def _log_partition(self, eta):
        return (self._align(self.rate, eta) * torch.expm1(eta)).sum(-1)

    def _fisher(self, eta):
        return torch.diag_embed(self._mean(eta))

    def _fisher_vp(self, eta, vector):
        return self._mean(eta) * vector.abs() * (1 + 1e-6)


class LogCoshByLogaddexp(Coordinates):
    """Right in float64; its second derivative is NaN far out in float32."""

    def _log_partition(self, eta):
        return (torch.logaddexp(eta, -eta) - math.log(2)).sum(-1)


class LogCoshOfMagnitude(Coordinates):
    """Fisher information 0 at the origin instead of 1."""

    def _log_partition(self, eta):
        size = eta.abs()
        return (size + torch.log1p(torch.exp(-2 * size)) - math.log(2)).sum(-1)


class LogOfCosh(Coordinates):
    """Right in float64; overflows in float32 from 89 on."""

    def _log_partition(self, eta):
        return (torch.log(torch.cosh(eta))).sum(-1)


class TextbookKL(Coordinates):
    def _log_partition(self, eta):
        return (self._align(self.rate, eta) * torch.expm1(eta)).sum(-1)

    def _kl(self, eta, delta):
        slope = self._dot(self._mean(eta), delta)
        return self._log_partition(eta + delta) - self._log_partition(eta) - slope


class SwappedKL(Coordinates):
    def _log_partition(self, eta):
        return (self._align(self.rate, eta) * torch.expm1(eta)).sum(-1)

    def _kl(self, eta, delta):
        return super()._kl(eta + delta, -delta)


class WrongEntropy(Coordinates):
    def _log_partition(self, eta):
        return (self._align(self.rate, eta) * torch.expm1(eta)).sum(-1)

    def _entropy(self, eta):
        return -super()._entropy(eta)


class NotConvex(Coordinates):
    def _log_partition(self, eta):
        return torch.sin(eta).sum(-1)


class TiltedTheOtherWay(Coordinates):
    def _log_partition(self, eta):
        return (self._align(self.rate, eta) * torch.expm1(eta)).sum(-1)

    def _tilt(self, eta):
        return TiltedTheOtherWay(self.rate * torch.exp(-eta))


class WrongSampler(Coordinates):
    def _log_partition(self, eta):
        return (self._align(self.rate, eta) * torch.expm1(eta)).sum(-1)

    def _sample(self, eta, shape, generator):
        rate = (self._align(self.rate, eta) * eta.exp()).expand(*shape, *eta.shape)
        return rate + rate.sqrt() * torch.randn(rate.shape, dtype=rate.dtype, generator=generator) * 1.2


class MixesQueries(Coordinates):
    def _log_partition(self, eta):
        own = (self._align(self.rate, eta) * torch.expm1(eta)).sum(-1)
        return own + 1e-9 * eta.detach().square().mean()


class WrongShape(Coordinates):
    def _log_partition(self, eta):
        return self._align(self.rate, eta) * torch.expm1(eta)


class CancellingLogPartition(Coordinates):
    """Right in float64; loses its digits in float32 through a constant added and subtracted."""

    def _log_partition(self, eta):
        return ((self._align(self.rate, eta) * torch.expm1(eta)).sum(-1) + 1e4) - 1e4


class ExpWithoutSecondDerivative(torch.autograd.Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(value):
        return value.exp()

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx, *grad_outputs):
        (output,) = ctx.saved_tensors
        return grad_outputs[0] * output.detach()


class NoSecondDerivative(Coordinates):
    def _log_partition(self, eta):
        return (self._align(self.rate, eta) * (ExpWithoutSecondDerivative.apply(eta) - 1)).sum(-1)

    def _mean(self, eta):
        return self._align(self.rate, eta) * eta.exp()

    def _fisher(self, eta):
        return torch.diag_embed(self._mean(eta))


RATE = torch.tensor([0.5, 2.0])

BROKEN = [
    (WrongMean, "mean = gradient of the log-partition"),
    (UncentredFisher, "Fisher = second derivative"),
    (WrongFisherProduct, "fisher_vp = Fisher times vector"),
    (LogCoshOfMagnitude, "Fisher = finite difference of the mean: broken at \\[0.0, 0.0\\].*got -?0, expected 1"),
    (LogCoshByLogaddexp, "float32 = float64: broken at .*got nan"),
    (LogOfCosh, "float32 = float64"),
    (TextbookKL, "KL to 1e-5 relative in float32"),
    (SwappedKL, "KL\\(p‖q\\) = A\\(q\\)"),
    (WrongEntropy, "Fenchel–Young"),
    (NotConvex, "positive semi-definite|midpoint convexity"),
    (TiltedTheOtherWay, "tilt\\(a\\)"),
    (WrongSampler, "covariance of samples"),
    (MixesQueries, "one by one|vmap"),
    (WrongShape, "shape of log_partition"),
    (CancellingLogPartition, "float32 = float64"),
    (NoSecondDerivative, "Fisher = second derivative"),
]


@pytest.mark.medium
@every_row(("cls", "law"), BROKEN, ids=[cls.__name__ for cls, _ in BROKEN])
def test_a_wrong_measure_is_caught(cls, law):
    with pytest.raises(AssertionError, match=law):
        check_measure(cls(RATE))


@pytest.mark.medium
def test_a_correct_measure_passes_with_one_hook():
    rate = RATE.double()
    check_measure(
        Poisson(RATE),
        log_partition=lambda eta: (rate * torch.expm1(eta)).sum(-1),
        kl=lambda p, q: (rate * (p.exp() * (p - q) - p.exp() + q.exp())).sum(-1),
        compile_backend="aot_eager",
    )
    check_measure(Poisson(torch.rand(2, 3) + 0.5))


class Counts(Coordinates):
    """Poisson with a right sampler and density; the classes below each get one thing wrong."""

    def _log_partition(self, eta):
        return (self._align(self.rate, eta) * torch.expm1(eta)).sum(-1)

    def _sample(self, eta, shape, generator):
        rate = self._align(self.rate, eta) * eta.exp()
        return torch.poisson(rate.expand(*shape, *eta.shape), generator=generator)

    @property
    def _reference(self):
        return "counting"

    def _log_density(self, point):
        rate = self._align(self.rate, point)
        return (torch.xlogy(point, rate) - rate - torch.lgamma(point + 1)).sum(-1)

    def _support(self, direction):
        return torch.where(direction > 0, torch.inf, 0.0).sum(-1)


def counts(**hooks) -> Measure:
    """`Counts` with other hooks: a class cannot derive from a concrete measure."""
    own = {name: value for name, value in vars(Counts).items() if name.startswith("_") and not name.startswith("__")}
    return type("Wrong", (Coordinates,), {"__module__": __name__, **own, **hooks})(RATE)


def rate_of(measure, eta):
    return measure._align(measure.rate, eta) * eta.exp()


def matching_normal(measure, eta, shape, generator):
    rate = rate_of(measure, eta).expand(*shape, *eta.shape)
    return rate + rate.sqrt() * torch.randn(rate.shape, dtype=rate.dtype, generator=generator)


def same_for_all_queries(measure, eta, shape, generator):
    rate = rate_of(measure, eta)
    share = torch.rand(*shape, *[1] * (eta.ndim - 1), eta.shape[-1], dtype=eta.dtype, generator=generator)
    count = torch.arange(200, dtype=eta.dtype)
    below = torch.special.gammaincc(count + 1, rate.unsqueeze(-1))
    return (share.unsqueeze(-1) > below).sum(-1).to(eta.dtype)


def each_draw_twice(measure, eta, shape, generator):
    rate = rate_of(measure, eta)
    drawn = torch.poisson(rate.expand(*shape, *eta.shape), generator=generator)
    return drawn.index_select(0, torch.arange(len(drawn)) // 2 * 2) if shape else drawn


def one_draw_for_all(measure, eta, shape, generator):
    return torch.poisson(rate_of(measure, eta), generator=generator).expand(*shape, *eta.shape)


def another_law(measure, eta, shape, generator):
    """Mean, variance and third central moment of a Poisson law: two values and their probabilities."""
    rate = rate_of(measure, eta).expand(*shape, *eta.shape)
    half = 0.5 * (1 + torch.sqrt(1 + 4 * rate))
    # Values rate + half and rate + half − root have products −rate and sum 1.
    other = 1 - half
    chance = -other / (half - other)
    return rate + torch.where(torch.rand(rate.shape, dtype=rate.dtype, generator=generator) < chance, half, other)


def cumulants_times(factors):
    def _cumulants(self, eta, direction, order):
        rate = rate_of(self, eta)
        return torch.stack([factors.get(n, 1) * (direction**n * rate).sum(-1) for n in range(1, order + 1)], -1)

    return _cumulants


def not_on_meta(self, eta):
    if eta.is_meta:
        raise RuntimeError("Tensor.item() cannot be called on meta tensors")
    return Counts._log_partition(self, eta)


def infinite_at_zero(self, mu):
    rate = self._align(self.rate, mu)
    value = (mu * (mu / rate).log() - mu + rate).sum(-1)
    return torch.where((mu < 0).any(-1), torch.inf, value.nan_to_num(nan=torch.inf))


RIGHT_NATURAL = {"_natural": lambda self, mu: (mu / self._align(self.rate, mu)).log()}

SUBTLY_WRONG = {
    "cumulant 1": ({"_cumulants": cumulants_times({1: 1.001})}, "cumulant 1 = mean"),
    "cumulant 2": ({"_cumulants": cumulants_times({2: 1.001})}, "cumulant 2 = direction·Fisher"),
    "cumulant 4": ({"_cumulants": cumulants_times({4: -1})}, "cumulant 4 = derivative of cumulant 3"),
    "cumulant 6": ({"_cumulants": cumulants_times({6: 1 + 1e-6})}, "cumulant 6 = derivative of cumulant 5"),
    "third moment": ({"_sample": matching_normal}, "third moment of samples"),
    "queries share noise": ({"_sample": same_for_all_queries}, "independence of queries"),
    "draws repeat": ({"_sample": each_draw_twice}, "independence of draws"),
    "one draw": ({"_sample": one_draw_for_all}, "of samples"),
    "three right moments": ({"_sample": another_law}, "frequency of a drawn value|probabilities of what is drawn"),
    "no normaliser": (
        {"_log_density": lambda self, x: Counts._log_density(self, x) + 0.01},
        "frequency of a drawn value|probabilities of what is drawn",
    ),
    "impossible draws": (
        {"_log_density": lambda self, x: Counts._log_density(self, x).masked_fill(x[..., 0] > 3, -torch.inf)},
        "what is drawn is possible",
    ),
    "impossible draws in float32": (
        {
            "_log_density": lambda self, x: Counts._log_density(self, x).masked_fill(
                (x[..., 0] == 1) & (x.dtype == torch.float32), -torch.inf
            )
        },
        "possible, rounded to float32",
    ),
    "a score of 0": (
        {"_log_prob": lambda self, eta, x: Coordinates._log_prob(self, eta.detach(), x)},
        "gradient of log_prob in eta",
    ),
    "no value for no query": (
        {"_log_partition": lambda self, eta: Counts._log_partition(self, eta) + 0 * eta.amax()},
        "no query: log_partition raised",
    ),
    "values read on meta": ({"_log_partition": not_on_meta}, "meta device: log_partition raised"),
    "infinite on a boundary of mass": (
        {**RIGHT_NATURAL, "_conjugate": infinite_at_zero},
        r"conjugate of a saturated mean|conjugate\(x\) ≤ −log h\(\{x\}\) at a drawn x",
    ),
    "natural without the rate": ({"_natural": lambda self, mu: mu.log()}, "mean\\(natural\\(mu\\)\\) = mu"),
    "natural of no mean": (
        {"_natural": lambda self, mu: (mu.abs() / self._align(self.rate, mu)).log()},
        "outside the support did not raise",
    ),
    "support too small": ({"_support": lambda self, v: -(v.abs().sum(-1))}, "mean·v ≤ support\\(v\\)"),
    "support too large": (
        {"_support": lambda self, v: torch.where(v > 0, torch.inf, v.abs()).sum(-1)},
        "support\\(v\\) = mean·v far out",
    ),
    "support not homogeneous": (
        {"_support": lambda self, v: torch.where(v > 0, torch.inf, 0.0).sum(-1) + 1},
        "support\\(2v\\) = 2 support",
    ),
    "domain too large": (
        {
            "_log_partition": lambda self, eta: -torch.log1p(-eta).sum(-1),
            "_in_domain": lambda self, eta: eta[..., 0] < 9,
        },
        "domain: A is not finite",
    ),
}


@pytest.mark.medium
@pytest.mark.parametrize("name", SUBTLY_WRONG)
def test_one_wrong_hook_is_caught(name):
    hooks, law = SUBTLY_WRONG[name]
    with pytest.raises(AssertionError, match=law):
        check_measure(counts(**hooks))


@pytest.mark.medium
def test_the_right_hooks_pass():
    assert check_measure(Counts(RATE)) == ("domain", "compiled")
    assert check_measure(counts(**RIGHT_NATURAL)) == ("domain", "compiled")


class Waiting(Coordinates):
    """An exponential law whose density lacks its rate."""

    def _log_partition(self, eta):
        return -torch.log1p(-eta / self._align(self.rate, eta)).sum(-1)

    def _in_domain(self, eta):
        return (eta < self._align(self.rate, eta)).all(-1)

    def _sample(self, eta, shape, generator):
        rate = (self._align(self.rate, eta) - eta).expand(*shape, *eta.shape)
        return torch.empty_like(rate).exponential_(generator=generator) / rate

    def _log_density(self, point):
        density = -(self._align(self.rate, point) * point).sum(-1)
        return density.masked_fill((point < 0).any(-1), -torch.inf)


def test_a_density_that_is_not_normalised_is_caught():
    with pytest.raises(AssertionError, match="log_prob is the normalised density of the samples"):
        check_measure(Waiting(2 * RATE))


def test_a_wrong_oracle_for_log_prob_is_reported():
    with pytest.raises(AssertionError, match=r"log_prob = oracle: broken at .* expected 0"):
        check_measure(Spin.create(dim=2), log_prob=lambda eta, point: point.new_zeros(point.shape[:-1]))


class LongNatural(Coordinates):
    """Categories with weights `rate`: eta is known up to a constant, and not the shortest one is given."""

    def _log_partition(self, eta):
        return torch.logsumexp(eta + self._align(self.rate, eta).log(), -1)

    def _natural(self, mu):
        return (mu / self._align(self.rate, mu)).log() + 20


def test_a_natural_parameter_of_more_than_the_least_norm_is_caught():
    with pytest.raises(AssertionError, match="no longer than eta"):
        check_measure(LongNatural(RATE))


@pytest.mark.medium
def test_laws_left_out_are_returned():
    assert check_measure(Poisson(RATE)) == ("domain", "samples", "log_prob", "support", "compiled")
    assert check_measure(Spin.create(dim=2)) == ("domain", "compiled")


def test_points_are_found_inside_a_small_domain_or_asked_for():
    assert "domain" not in check_measure(Exponential(torch.tensor([1e-3, 3.0])))

    class FarAway(Coordinates):
        def _log_partition(self, eta):
            return -torch.log(eta - 1e3).sum(-1)

        def _in_domain(self, eta):
            return (eta > 1e3).all(-1)

        def _domain(self):
            return "eta > 1000"

    with pytest.raises(ValueError, match="no eta inside the domain of FarAway, eta > 1000"):
        check_measure(FarAway(RATE))


@pytest.mark.medium
def test_a_measure_with_a_domain_passes_inside_it_and_raises_outside():
    measure = Exponential(torch.tensor([1.0, 3.0]))
    eta = torch.tensor([[0.5, 1.0], [-2.0, 2.0], [-0.1, -4.0]], dtype=torch.float64)
    check_measure(measure, eta=eta, kl=exponential_kl)
    check_measure(measure.tilt(torch.tensor([0.5, -1.0])), eta=eta - 1)
    with pytest.raises(DomainError, match="Exponential: eta is outside the domain, eta < rate"):
        measure.log_partition(torch.tensor([1.0, 0.0]))
    with pytest.raises(DomainError, match="eta < rate"):
        measure.kl(torch.zeros(2), torch.tensor([2.0, 0.0]))
    with pytest.raises(DomainError, match="after adding the tilt"):
        measure.tilt(torch.tensor([0.5, 0.0])).mean(torch.tensor([0.6, 0.0]))


def exponential_kl(eta_p: Tensor, eta_q: Tensor) -> Tensor:
    rate = torch.tensor([1.0, 3.0], dtype=torch.float64)
    p, q = rate - eta_p, rate - eta_q
    return (torch.log(p / q) + q / p - 1).sum(-1)


def test_a_wrong_oracle_is_reported_with_both_numbers():
    with pytest.raises(AssertionError, match=r"log-partition = oracle.*got .*, expected .*, tolerance"):
        check_measure(Spin.create(dim=2), log_partition=lambda eta: torch.zeros(eta.shape[:-1], dtype=eta.dtype))
    with pytest.raises(AssertionError, match="KL = oracle"):
        check_measure(Spin.create(dim=2), kl=lambda p, q: torch.zeros(p.shape[:-1], dtype=p.dtype))


@pytest.mark.medium
def test_a_gradient_lost_by_compilation_is_caught():
    """torch.compile differentiates the forward of an autograd.Function inside torch.func and skips its backward."""

    class Detached(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(value):
            return value.detach().expm1()

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(inputs[0])

        @staticmethod
        def backward(ctx, *grad_outputs):
            return grad_outputs[0] * ctx.saved_tensors[0].exp()

    class PoissonThroughFunction(Coordinates):
        def _log_partition(self, eta):
            return (self._align(self.rate, eta) * Detached.apply(eta)).sum(-1)

    check_measure(PoissonThroughFunction(RATE), scales=(0.0, 1.0))
    with pytest.raises(AssertionError, match="compiled = eager"):
        check_measure(PoissonThroughFunction(RATE), scales=(0.0, 1.0), compile_backend="aot_eager")
