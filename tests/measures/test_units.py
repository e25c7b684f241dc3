"""Units: groups of coordinates that are independent. Their log-partitions and log-probabilities add up to the whole's."""

import pytest
import torch

from massieu.measures import Bernoulli, Categorical, Gaussian, Measure, Poisson, Spin, convolve, product

F64 = torch.float64


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values, dtype=F64)


SHORT = Gaussian.create(numbers(0.3, -1.0), torch.tensor([[2.0, 0.5], [0.5, 1.0]], dtype=F64))
CASES = [
    (Bernoulli.create(numbers(0.2, 0.7)), [1, 1], [1.0, 0.0]),
    (Spin.create(numbers(0.2, -0.7)).tilt(numbers(1.0, 2.0)), [1, 1], [1.0, -1.0]),
    (Gaussian.create(numbers(0.3, -1.0), numbers(2.0, 0.5)), [1, 1], [0.4, 5.0]),
    (Gaussian.create(numbers(0.3, -1.0), torch.tensor(2.0, dtype=F64)), [1, 1], [0.4, 5.0]),
    (SHORT, [2], [0.4, 5.0]),
    (Categorical.create(numbers(0.2, 0.3, 0.5)), [3], [0.0, 1.0, 0.0]),
    (
        product(Poisson.create(numbers(2.0)), SHORT, Categorical.create(numbers(0.4, 0.6))),
        [1, 2, 2],
        [3.0, 1.0, 2.0, 0.0, 1.0],
    ),
    (product(Poisson.create(numbers(2.0)), SHORT).tilt(numbers(0.3, 0.1, -0.2)), [1, 2], [3.0, 1.0, 2.0]),
]


@pytest.mark.parametrize(("measure", "sizes", "point"), CASES, ids=lambda value: type(value).__name__)
def test_units_add_up_to_the_whole(measure: Measure, sizes: list[int], point: list[float]):
    eta = torch.linspace(-0.7, 0.4, 3 * len(point), dtype=F64).reshape(3, -1)
    points = torch.tensor(point, dtype=F64).expand(3, -1)
    assert measure._unit_sizes() == sizes
    levels = measure._log_partition_of_units(eta)
    logs = measure._log_prob_of_units(eta, points)
    assert levels.shape == logs.shape == (3, len(sizes))
    assert torch.allclose(levels.sum(-1), measure.log_partition(eta), rtol=1e-13)
    assert torch.allclose(logs.sum(-1), measure.log_prob(eta, points), rtol=1e-13)
    # Units do not see each other: at another eta of the last one, the others' numbers stay.
    moved = eta.clone()
    moved[:, -sizes[-1] :] += 0.1
    assert torch.equal(measure._log_partition_of_units(moved)[:, :-1], levels[:, :-1])


def test_a_measure_of_unknown_make_is_one_unit():
    sums = convolve(Poisson.create(numbers(2.0, 1.0)), Bernoulli.create(numbers(0.5, 0.5)))
    eta = numbers(0.1, 0.2)
    assert sums._unit_sizes() == [2]
    assert torch.allclose(sums._log_partition_of_units(eta)[..., 0], sums.log_partition(eta))
