"""`measure_checks` must be able to fail: each deliberately wrong measure is caught, by the check that has the law's name."""

import math
from collections.abc import Collection

import pytest
import torch
from tests.support.rows import every_row
from tests.support.suites import SHARED_LAWS
from torch import Tensor

from massieu.measures import DomainError, Gaussian, Measure, Spin
from massieu.testing import MeasureCase, measure_checks
from massieu.testing.checks import Law, checks_of
from massieu.testing.measures import LAWS


class Coordinates(Measure):
    """What the measures below share: one rate per coordinate."""

    rate: Tensor


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


class DetachedMean(Coordinates):
    """Right at every eta; no gradient of the mean reaches the rate."""

    def _log_partition(self, eta):
        return (self._align(self.rate, eta) * torch.expm1(eta)).sum(-1)

    def _mean(self, eta):
        return self._align(self.rate.detach(), eta) * eta.exp()


class DetachedRate(Coordinates):
    def _log_partition(self, eta):
        return (self._align(self.rate.detach(), eta) * torch.expm1(eta)).sum(-1)


class ClosedDomain(Coordinates):
    """A is infinite at eta = rate, which is said to be inside."""

    _log_partition = Exponential._log_partition
    _domain = Exponential._domain

    def _in_domain(self, eta):
        return (eta <= self._align(self.rate, eta)).all(-1)


class OneQueryAlways(Coordinates):
    """Of batch (), but what it returns for a single eta has a dimension of its own."""

    def _log_partition(self, eta):
        return (self._align(self.rate, eta) * torch.expm1(eta)).sum(-1) * torch.ones(1, dtype=eta.dtype)


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
    (WrongMean, "mean", "mean = gradient of the log-partition"),
    (UncentredFisher, "fisher", "Fisher = second derivative"),
    (WrongFisherProduct, "fisher", "fisher_vp = Fisher times vector"),
    (LogCoshOfMagnitude, "fisher", "finite difference of the mean: broken at \\[0.0, 0.0\\].*got -?0, expected 1"),
    (LogCoshByLogaddexp, "single precision", "float32 = float64: broken at .*got nan"),
    (LogOfCosh, "single precision", "float32 = float64"),
    (TextbookKL, "kl of close parameters", "KL to 1e-5 relative in float32"),
    (SwappedKL, "kl", "KL\\(p‖q\\) = A\\(q\\)"),
    (WrongEntropy, "entropy", "Fenchel–Young"),
    (NotConvex, "convexity", "midpoint convexity"),
    (NotConvex, "fisher", "positive semi-definite"),
    (TiltedTheOtherWay, "tilt", "tilt\\(a\\)"),
    (WrongSampler, "samples", "covariance of samples"),
    (MixesQueries, "batching", "one by one|vmap"),
    (WrongShape, "shapes", "shape of log_partition"),
    (OneQueryAlways, "shapes", r"shape of log_partition: got \(1,\), expected \(\)"),
    (DetachedMean, "parameters", "parameters: the derivative of mean in what the measure holds"),
    (DetachedRate, "parameters", "parameters: the derivative of log_partition in what the measure holds"),
    (ClosedDomain, "domain", "A is infinite at eta = .* a boundary where it is infinite is no part of the domain"),
    (CancellingLogPartition, "single precision", "float32 = float64"),
    (NoSecondDerivative, "fisher", "Fisher = second derivative"),
    (NoSecondDerivative, "second derivatives", "gradgradcheck of the log-partition"),
]


def run(measure: Measure, name: str, **options) -> None:
    measure_checks(MeasureCase(measure, **options))[name]()


def run_all(measure: Measure, but: Collection[str] = (), **options) -> set[str]:
    """The names that were left out."""
    checks = measure_checks(MeasureCase(measure, **options))
    for law, check in checks:
        if law not in but:
            check()
    return set(checks.left_out)


@pytest.mark.medium
@pytest.mark.parametrize(("cls", "name", "law"), BROKEN, ids=[f"{cls.__name__}: {name}" for cls, name, _ in BROKEN])
def test_a_wrong_measure_is_caught_by_name(cls, name, law):
    with pytest.raises(AssertionError, match=law):
        run(cls(RATE), name)


NO_ORACLES = {"log_partition", "kl oracle", "log_prob oracle"}
DRAWN = {"draws", "samples", "independence", "support of samples"}
DENSITY = {"possible draws", "log_prob", "frequencies", "normalisation", "atoms as means", "NaN in log_prob"}


@pytest.mark.slow
def test_a_correct_measure_passes_with_one_hook():
    rate = RATE.double()
    left_out = run_all(
        Poisson(RATE),
        log_partition=lambda eta: (rate * torch.expm1(eta)).sum(-1),
        kl=lambda p, q: (rate * (p.exp() * (p - q) - p.exp() + q.exp())).sum(-1),
        compile_backend="aot_eager",
    )
    assert left_out == {"domain", "support", "outside the support", "log_prob oracle", *DRAWN, *DENSITY}
    run_all(Poisson(torch.rand(2, 3) + 0.5))


def test_the_least_variance_is_as_wrong_as_the_largest_is_rounded():
    """A Gaussian on a line: variances across it are 0 to the rounding of a variance of 10¹⁴."""
    line = 1e7 * torch.tensor([[0.6], [-1.1], [0.9]], dtype=torch.float64)
    eta = 1e-7 * torch.tensor([[0.3, -0.2, 0.5], [0.1, 0.2, 0.0]], dtype=torch.float64)
    law = Gaussian.create(torch.zeros(3, dtype=torch.float64), factor=line)
    measure_checks(MeasureCase(law, eta=eta, scales=(0.0,)))["fisher"]()


def test_what_is_left_out_says_why():
    left_out = measure_checks(MeasureCase(Poisson(RATE))).left_out
    assert left_out["samples"] == left_out["log_prob"] == "Poisson has no sampler"
    assert left_out["domain"] == "Poisson names no domain"
    assert left_out["kl oracle"] == "the case has no kl"
    assert left_out["compiled"] == "the case has no compile_backend"
    spins = measure_checks(MeasureCase(Spin.create(dim=2))).left_out
    assert spins["normalisation"] == "the density is with respect to a counting measure"
    assert set(spins) == {"domain", "compiled", "normalisation", *NO_ORACLES}


def test_checks_are_made_without_the_subject_and_share_it():
    built = []

    def subject_of(case: str) -> list[str]:
        built.append(case)
        return [case]

    def holds(subject: list[str]) -> None:
        assert subject == ["right"], subject[0]

    laws = [Law("first", holds), Law("second", holds), Law("third", holds, lambda case: f"not for {case}")]
    checks = checks_of("right", subject_of, laws)
    assert [name for name, _ in checks] == ["first", "second"] and len(checks) == 2
    assert "first" in checks and "third" not in checks
    assert checks.left_out == {"third": "not for right"} and built == []
    for _, check in checks:
        check()
    assert built == ["right"]
    with pytest.raises(AssertionError, match="wrong"):
        checks_of("wrong", subject_of, laws)["second"]()


@pytest.mark.parametrize(("name", "check"), [*measure_checks(MeasureCase(Spin.create(dim=2), scales=(0.0, 1.0)))][:2])
def test_pytest_names_each_check(name, check, request):
    assert request.node.name == f"test_pytest_names_each_check[{name}-check]"
    check()


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


def numbers_for_nan(self, eta):
    return Counts._log_partition(self, eta.nan_to_num())


SUBTLY_WRONG = {
    "cumulant 1": ({"_cumulants": cumulants_times({1: 1.001})}, "cumulants", "cumulant 1 = mean"),
    "cumulant 2": ({"_cumulants": cumulants_times({2: 1.001})}, "cumulants", "cumulant 2 = direction·Fisher"),
    "cumulant 4": ({"_cumulants": cumulants_times({4: -1})}, "cumulants", "cumulant 4 = derivative of cumulant 3"),
    "cumulant 6": (
        {"_cumulants": cumulants_times({6: 1 + 1e-6})},
        "cumulants",
        "cumulant 6 = derivative of cumulant 5",
    ),
    "third moment": ({"_sample": matching_normal}, "samples", "third moment of samples"),
    "queries share noise": ({"_sample": same_for_all_queries}, "independence", "independence of queries"),
    "draws repeat": ({"_sample": each_draw_twice}, "independence", "independence of draws"),
    "too few draws": (
        {"_sample": lambda self, eta, shape, generator: torch.poisson(rate_of(self, eta), generator)},
        "draws",
        "samples: got shape",
    ),
    "a seed without effect": (
        {"_sample": lambda self, eta, shape, generator: torch.poisson(rate_of(self, eta).expand(*shape, *eta.shape))},
        "draws",
        "one seed, one set of draws",
    ),
    "one draw": ({"_sample": one_draw_for_all}, "samples", "of samples"),
    "three right moments": (
        {"_sample": another_law},
        "frequencies",
        "frequency of a drawn value|probabilities of what is drawn",
    ),
    "no normaliser": (
        {"_log_density": lambda self, x: Counts._log_density(self, x) + 0.01},
        "frequencies",
        "frequency of a drawn value|probabilities of what is drawn",
    ),
    "impossible draws": (
        {"_log_density": lambda self, x: Counts._log_density(self, x).masked_fill(x[..., 0] > 3, -torch.inf)},
        "possible draws",
        "what is drawn is possible",
    ),
    "infinitely probable draws": (
        {"_log_density": lambda self, x: Counts._log_density(self, x).masked_fill(x[..., 0] > 3, torch.inf)},
        "possible draws",
        "what is drawn is possible",
    ),
    "impossible draws in float32": (
        {
            "_log_density": lambda self, x: Counts._log_density(self, x).masked_fill(
                (x[..., 0] == 1) & (x.dtype == torch.float32), -torch.inf
            )
        },
        "possible draws",
        "possible, rounded to float32",
    ),
    "a score of 0": (
        {"_log_prob": lambda self, eta, x: Coordinates._log_prob(self, eta.detach(), x)},
        "log_prob",
        "gradient of log_prob in eta",
    ),
    "no value for no query": (
        {"_log_partition": lambda self, eta: Counts._log_partition(self, eta) + 0 * eta.amax()},
        "empty",
        "no query: log_partition raised",
    ),
    "values read on meta": ({"_log_partition": not_on_meta}, "meta", "meta device: log_partition raised"),
    "infinite on a boundary of mass": (
        {**RIGHT_NATURAL, "_conjugate": infinite_at_zero},
        "atoms as means",
        r"conjugate\(x\) ≤ −log h\(\{x\}\) at a drawn x",
    ),
    "a conjugate of the wrong sign": (
        {**RIGHT_NATURAL, "_conjugate": lambda self, mu: -infinite_at_zero(self, mu)},
        "saturated means",
        "conjugate of a saturated mean",
    ),
    "natural without the rate": ({"_natural": lambda self, mu: mu.log()}, "natural", "mean\\(natural\\(mu\\)\\) = mu"),
    "natural of no mean": (
        {"_natural": lambda self, mu: (mu.abs() / self._align(self.rate, mu)).log()},
        "outside the support",
        "outside the support did not raise",
    ),
    "support too small": ({"_support": lambda self, v: -(v.abs().sum(-1))}, "support", "mean·v ≤ support\\(v\\)"),
    "support too small for samples": (
        {"_support": lambda self, v: -(v.abs().sum(-1))},
        "support of samples",
        "samples·v ≤ support\\(v\\)",
    ),
    "support too large": (
        {"_support": lambda self, v: torch.where(v > 0, torch.inf, v.abs()).sum(-1)},
        "support",
        "support\\(v\\) = mean·v far out",
    ),
    "support not homogeneous": (
        {"_support": lambda self, v: torch.where(v > 0, torch.inf, 0.0).sum(-1) + 1},
        "support",
        "support\\(2v\\) = 2 support",
    ),
    "domain too large": (
        {
            "_log_partition": lambda self, eta: -torch.log1p(-eta).sum(-1),
            "_in_domain": lambda self, eta: eta[..., 0] < 9,
        },
        "domain",
        "domain: A is not finite",
    ),
    "a number for NaN": (
        {"_log_partition": numbers_for_nan},
        "NaN",
        "NaN in eta: log_partition in torch.float64 is a number",
    ),
    "a number for NaN in float32": (
        {
            "_log_partition": lambda self, eta: (
                numbers_for_nan if eta.dtype == torch.float32 else Counts._log_partition
            )(self, eta)
        },
        "NaN",
        "NaN in eta: log_partition in torch.float32 is a number",
    ),
    "NaN in the others": (
        {"_log_partition": lambda self, eta: Counts._log_partition(self, eta) + 0 * eta.sum()},
        "NaN",
        "NaN in one eta leaves log_partition of the others",
    ),
    "lists are rounded": (
        {
            "_admit": lambda self, eta, **others: Coordinates._admit(
                self, eta if isinstance(eta, Tensor) else torch.tensor(eta).round(), **others
            )
        },
        "lists and arrays",
        "log_partition of a list = of a tensor",
    ),
    "a number for what is no point": (
        {"log_prob": lambda self, eta, x: Coordinates.log_prob(self, eta, x.nan_to_num())},
        "NaN in log_prob",
        "log_prob of NaN is a number",
    ),
    "half precision kept": (
        {"_promoted": lambda self, *tensors: (self, *tensors)},
        "half precision",
        "half precision is promoted|in, torch.bfloat16 out",
    ),
}


@pytest.mark.slow
@every_row("name", SUBTLY_WRONG)
def test_one_wrong_hook_is_caught_by_name(name):
    hooks, check, law = SUBTLY_WRONG[name]
    with pytest.raises(AssertionError, match=law):
        run(counts(**hooks), check)


def test_every_law_has_caught_something():
    """What needs an oracle, a density with respect to lengths, or compilation is caught in the tests below."""
    below = {"log_partition", "kl oracle", "log_prob oracle", "normalisation", "compiled"}
    caught = {name for _, name, _ in BROKEN} | {name for _, name, _ in SUBTLY_WRONG.values()} | below
    assert {law.name for law in LAWS} - caught == set()


@pytest.mark.medium
def test_the_right_hooks_pass():
    expected = {"domain", "compiled", "normalisation", *NO_ORACLES}
    assert run_all(Counts(RATE), but=SHARED_LAWS, samples=2000) == expected
    checks = measure_checks(MeasureCase(counts(**RIGHT_NATURAL), samples=2000))
    assert set(checks.left_out) == expected
    for law in ("natural", "outside the support", "saturated means", "atoms as means"):
        checks[law]()


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
        run(Waiting(2 * RATE), "normalisation")


def test_a_wrong_oracle_is_reported_with_both_numbers():
    with pytest.raises(AssertionError, match=r"log-partition = oracle.*got .*, expected .*, tolerance"):
        run(
            Spin.create(dim=2),
            "log_partition",
            log_partition=lambda eta: torch.zeros(eta.shape[:-1], dtype=eta.dtype),
        )
    with pytest.raises(AssertionError, match="KL = oracle"):
        run(Spin.create(dim=2), "kl oracle", kl=lambda p, q: torch.zeros(p.shape[:-1], dtype=p.dtype))
    with pytest.raises(AssertionError, match=r"log_prob = oracle: broken at .* expected 0"):
        run(Spin.create(dim=2), "log_prob oracle", log_prob=lambda eta, point: point.new_zeros(point.shape[:-1]))


class LongNatural(Coordinates):
    """Categories with weights `rate`: eta is known up to a constant, and not the shortest one is given."""

    def _log_partition(self, eta):
        return torch.logsumexp(eta + self._align(self.rate, eta).log(), -1)

    def _natural(self, mu):
        return (mu / self._align(self.rate, mu)).log() + 20


def test_a_natural_parameter_of_more_than_the_least_norm_is_caught():
    with pytest.raises(AssertionError, match="no longer than eta"):
        run(LongNatural(RATE), "natural")


def test_points_are_found_inside_a_small_domain_or_asked_for():
    run(Exponential(torch.tensor([1e-3, 3.0])), "domain")

    class FarAway(Coordinates):
        def _log_partition(self, eta):
            return -torch.log(eta - 1e3).sum(-1)

        def _in_domain(self, eta):
            return (eta > 1e3).all(-1)

        def _domain(self):
            return "eta > 1000"

    with pytest.raises(ValueError, match="no eta was found inside the domain of FarAway, eta > 1000"):
        run(FarAway(RATE), "domain")


@pytest.mark.medium
def test_a_measure_with_a_domain_passes_inside_it_and_raises_outside():
    measure = Exponential(torch.tensor([1.0, 3.0]))
    eta = torch.tensor([[0.5, 1.0], [-2.0, 2.0], [-0.1, -4.0]], dtype=torch.float64)
    run_all(measure, but=SHARED_LAWS, eta=eta, kl=exponential_kl, samples=2000)
    tilted = measure_checks(MeasureCase(measure.tilt(torch.tensor([0.5, -1.0])), eta=eta - 1, samples=2000))
    for law in ("domain", "mean", "kl", "samples", "natural", "single precision"):
        tilted[law]()
    with pytest.raises(DomainError, match="Exponential: eta is outside the domain, eta < rate"):
        measure.log_partition(torch.tensor([1.0, 0.0]))
    with pytest.raises(DomainError, match="eta < rate"):
        measure.kl(torch.zeros(2), torch.tensor([2.0, 0.0]))
    with pytest.raises(DomainError, match="after adding the tilt"):
        measure.tilt(torch.tensor([0.5, 0.0])).mean(torch.tensor([0.6, 0.0]))


def exponential_kl(eta_p: Tensor, eta_q: Tensor) -> Tensor:
    rate = torch.tensor([1.0, 3.0], dtype=torch.float64)
    p = rate - eta_p
    q = rate - eta_q
    return (torch.log(p / q) + q / p - 1).sum(-1)


@pytest.mark.slow
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

    run_all(PoissonThroughFunction(RATE), scales=(0.0, 1.0))
    with pytest.raises(AssertionError, match="compiled = eager"):
        run(PoissonThroughFunction(RATE), "compiled", compile_backend="aot_eager")
