import numpy as np
import pytest
from scipy.integrate import quad

from tests.cases import cases
from vispe.segment.materials.directions import ANGLES, STEPS, Directions


def test_sixteen_directions_are_sorted_by_angle():
    angles = Directions().angles
    assert len(STEPS) == 16
    assert (np.diff(angles) > 0).all()
    assert angles[[0, 4, 8, 12]].tolist() == [0, 45, 90, 135]
    np.testing.assert_allclose(angles[1:8], 90 - angles[7:0:-1])


def boundaries(actual, normal):
    """Return crossings for each step for parallel boundaries with this normal (degrees) and a density of 1."""
    radians = np.radians(normal)
    return np.abs(actual.vectors @ (np.sin(radians), np.cos(radians)))


@cases("pixel", [(1.0, 1.0), (0.3, 0.3), (1.0, 2.5)])
def test_measured_angles_are_exact_and_others_slightly_high(pixel):
    actual = Directions(pixel)
    np.testing.assert_allclose(actual.at(actual.angles), np.diag(1 / np.hypot(*actual.vectors.T)), atol=1e-9)
    # any distribution of boundaries is a sum of these
    for normal in np.arange(0, 180, 7):
        estimate = actual.at(np.array(ANGLES)) @ boundaries(actual, normal)
        exact = np.abs(np.cos(np.radians(np.array(ANGLES) - normal)))
        assert (estimate >= exact - 1e-9).all()
        assert estimate.max() <= 1.05
    isotropic = np.mean([boundaries(actual, a) for a in np.arange(0, 180, 0.5)], 0)
    estimate = actual.at(np.array(ANGLES)) @ isotropic * np.pi / 2
    assert (estimate > 0.999).all()
    if pixel[0] == pixel[1]:
        assert estimate.max() < 1.0131


@cases("pixel", [(1.0, 1.0), (2.0, 1.5)])
def test_mean_is_exact_for_isotropic_boundaries_and_close_for_parallel(pixel):
    actual = Directions(pixel)
    mean = quad(lambda a: abs(np.cos(a)), 0, np.pi)[0] / np.pi
    isotropic = np.mean([boundaries(actual, a) for a in np.arange(0, 180, 0.25)], 0)
    assert actual.mean @ isotropic == pytest.approx(mean, rel=1e-5)
    for normal in range(0, 180, 5):
        assert actual.mean @ boundaries(actual, normal) == pytest.approx(mean, rel=0.02)
