"""The algebra: tilt is a group action, affine is functorial, batches compose."""

import pytest
import torch
from torch import Tensor

from massieu.measures import Atoms, Gaussian, Measure, Spin, affine
from massieu.measures.combine import Tilted


def draw(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)


def measures() -> list[Measure]:
    root = draw(3, 3, seed=1)
    return [
        Atoms.create(draw(6, 3)),
        Gaussian.create(draw(3), root @ root.mT),
        Spin.create(draw(3)),
        affine(Spin.create(draw(4)), draw(3, 4), draw(3, seed=2)),
        Tilted(Spin.create(draw(3)), draw(3, seed=3)),
    ]


@pytest.mark.parametrize("measure", measures(), ids=lambda measure: type(measure).__name__)
class TestLaws:
    def test_tilt_is_a_group_action(self, measure):
        a = draw(3, seed=4)
        b = draw(3, seed=5)
        eta = draw(5, 3, seed=6)
        once = measure.tilt(a + b)
        twice = measure.tilt(a).tilt(b)
        back = measure.tilt(a).tilt(-a)
        for name in ("log_partition", "mean", "fisher", "entropy"):
            torch.testing.assert_close(getattr(twice, name)(eta), getattr(once, name)(eta), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(twice.kl(eta, 2 * eta), once.kl(eta, 2 * eta), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(back.mean(eta), measure.mean(eta), atol=1e-12, rtol=1e-12)
        torch.testing.assert_close(once.log_partition(torch.zeros_like(a)), torch.tensor(0.0, dtype=torch.float64))

    def test_tilted_divergences_are_the_measures_own(self, measure):
        a = draw(3, seed=4)
        p = draw(5, 3, seed=6)
        q = draw(5, 3, seed=7)
        torch.testing.assert_close(measure.tilt(a).kl(p, q), measure.kl(p + a, q + a), atol=1e-12, rtol=1e-12)

    def test_affine_is_functorial(self, measure):
        first = (draw(4, 3, seed=8), draw(4, seed=9))
        second = (draw(2, 4, seed=10), draw(2, seed=11))
        eta = draw(5, 2, seed=12)
        apart = affine(affine(measure, *first), *second)
        together = affine(measure, second[0] @ first[0], second[0] @ first[1] + second[1])
        for name in ("log_partition", "mean", "fisher", "entropy"):
            torch.testing.assert_close(getattr(apart, name)(eta), getattr(together, name)(eta), atol=1e-11, rtol=1e-11)
        identity = affine(measure, torch.eye(3, dtype=torch.float64))
        point = draw(5, 3, seed=13)
        torch.testing.assert_close(identity.log_partition(point), measure.log_partition(point))

    def test_tilting_commutes_with_affine(self, measure):
        weight = draw(4, 3, seed=8)
        bias = draw(4, seed=9)
        a = draw(4, seed=10)
        eta = draw(5, 4, seed=11)
        outside = affine(measure, weight, bias).tilt(a)
        inside = affine(measure.tilt(a @ weight), weight, bias)
        torch.testing.assert_close(outside.log_partition(eta), inside.log_partition(eta), atol=1e-12, rtol=1e-12)


def test_affine_of_atoms_moves_the_atoms_and_of_a_gaussian_its_moments():
    weight = draw(4, 3)
    bias = draw(4, seed=1)
    eta = draw(5, 4, seed=2)
    points = draw(6, 3, seed=3)
    moved = Atoms.create(points @ weight.mT + bias)
    pushed = affine(Atoms.create(points), weight, bias)
    torch.testing.assert_close(pushed.mean(eta), moved.mean(eta))
    torch.testing.assert_close(pushed.fisher(eta), moved.fisher(eta))
    root = draw(3, 3, seed=4)
    gaussian = affine(Gaussian.create(points[0], factor=root), weight, bias)
    expected = Gaussian.create(weight @ points[0] + bias, factor=weight @ root)
    torch.testing.assert_close(gaussian.log_partition(eta), expected.log_partition(eta))
    assert gaussian.sample(eta, (7,)).shape == (7, 5, 4)


def test_the_longest_batch_wins_and_the_others_are_its_prefixes():
    spins = Spin.create(draw(2, 3))
    weight = draw(2, 5, 4, 3, seed=1)
    bias = draw(4, seed=2)
    pushed = affine(spins, weight, bias)
    assert pushed.batch_shape == (2, 5)
    eta = draw(2, 5, 6, 4, seed=3)
    for name in ("log_partition", "mean", "fisher"):
        whole = getattr(pushed, name)(eta)
        for i in range(2):
            for j in range(5):
                part = affine(Spin.create(spins.field[i]), weight[i, j], bias)
                torch.testing.assert_close(whole[i, j], getattr(part, name)(eta[i, j]))
    tilted = pushed.tilt(draw(2, 5, 4, seed=4))
    assert tilted.batch_shape == (2, 5)
    assert tilted.mean(eta).shape == eta.shape
    with pytest.raises(ValueError, match=r"affine: batch shape \(3,\) is not a prefix of \(2, 5\)"):
        affine(spins, weight, draw(3, 4))


def test_a_masked_measure_stays_masked_through_compositions():
    masked = Atoms.create(draw(4, 3), torch.zeros(4, dtype=torch.bool))
    for measure in (affine(masked, draw(3, 3)).tilt(draw(3, seed=1)), masked.tilt(draw(3))):
        eta = draw(2, 3, seed=2)
        assert (measure.log_partition(eta) == -torch.inf).all()
        assert (measure.mean(eta) == 0).all()


def test_bad_compositions_are_refused():
    spins = Spin.create(dim=3)
    with pytest.raises(ValueError, match=r"weight of shape \('\*batch', 'e', 3\).*got \(4, 2\)"):
        affine(spins, torch.zeros(4, 2))
    with pytest.raises(ValueError, match=r"bias of shape \('\*batch', 4\).*got \(3,\)"):
        affine(spins, torch.zeros(4, 3), torch.zeros(3))
    with pytest.raises(ValueError, match=r"tilt needs eta of shape \(3,\) .*got \(1, 3\)"):
        spins.tilt(torch.zeros(1, 3))
