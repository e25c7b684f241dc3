"""The animation of Shim's Theorem 1: what its tokens do is what the theorem says, by matrices of NumPy and SciPy."""

import re
from xml.etree import ElementTree

import numpy as np
import pytest
from scipy.linalg import sqrtm
from scripts.theorem_1 import KEY_COVARIANCE, LAYERS, PICTURE, UNIT, animation, courses, populations

THEOREM, OTHER, SIZE = range(3)
ROUNDING = 1e-12


def covariance(points: np.ndarray) -> np.ndarray:
    return np.cov(points.T, bias=True)


def course(panel: int) -> np.ndarray:
    return courses(populations()[panel]).numpy()


def test_at_the_equilibrium_each_token_moves_and_returns():
    places = course(THEOREM)
    assert places.shape[0] == 2 * LAYERS + 1
    np.testing.assert_allclose(places[1], places[0] @ (np.eye(2) + 0.5 * KEY_COVARIANCE.numpy()), atol=ROUNDING)
    np.testing.assert_allclose(places[2::2], np.broadcast_to(places[0], places[2::2].shape), atol=ROUNDING)


def test_of_another_law_the_tokens_turn_about_an_angle_in_whitened_coordinates():
    places = course(OTHER)
    law = np.diag([0.12, 1.3])
    layer = np.eye(2) + KEY_COVARIANCE.numpy()
    grown = layer @ law @ layer.T
    one_layer = np.real(sqrtm(law)) @ np.linalg.inv(np.real(sqrtm(grown))) @ layer
    np.testing.assert_allclose(places[2], places[0] @ one_layer.T, atol=ROUNDING)
    root = np.real(sqrtm(law))
    turn = np.linalg.inv(root) @ np.linalg.matrix_power(one_layer, LAYERS) @ root
    np.testing.assert_allclose(turn @ turn.T, np.eye(2), atol=ROUNDING)
    np.testing.assert_allclose(places[-1], places[0] @ (root @ turn @ np.linalg.inv(root)).T, atol=ROUNDING)
    assert abs(np.arctan2(turn[1, 0], turn[0, 0])) > 0.5  # to be seen


def test_with_only_the_size_restored_the_tokens_end_on_a_line():
    places = course(SIZE)
    small, large = np.linalg.eigvalsh(covariance(places[-1]))
    assert small < 1e-3 * large
    # The law's trace stays, so that of these tokens, which are spread as it is, stays to their number's error.
    assert large == pytest.approx(np.trace(covariance(places[0])), rel=0.1)


def test_the_stored_picture_has_these_places():
    """To the hundredth that it prints, which a last bit may round to the other side."""
    tokens = ElementTree.fromstring(PICTURE.read_text(encoding="utf-8")).iter("{http://www.w3.org/2000/svg}circle")
    drawn = [
        [np.array(animate.get("values", "").split(";"), float) for animate in token if animate.tag.endswith("animate")]
        for token in tokens
    ]
    expected = np.concatenate([course(panel) for panel in range(3)], axis=1).transpose(1, 2, 0) * [[UNIT], [-UNIT]]
    np.testing.assert_allclose(np.array(drawn), expected, atol=0.0100001)


def test_the_picture_says_which_map_is_applied():
    visible = re.findall(r'calcMode="discrete" values="([01;]*)"', animation())
    assert visible == [";".join("10" * LAYERS), ";".join("01" * LAYERS)]
