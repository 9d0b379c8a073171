import numpy as np
import pytest
from scipy.integrate import quad

from tests.cases import cases
from vispe.segment.materials.directions import ANGLES, STEPS, Directions


def test_there_are_sixteen_directions_by_angle():
    angles = Directions().angles
    assert len(STEPS) == 16
    assert (np.diff(angles) > 0).all()
    assert angles[[0, 4, 8, 12]].tolist() == [0, 45, 90, 135]
    np.testing.assert_allclose(angles[1:8], 90 - angles[7:0:-1])


def boundaries(found, normal):
    """Crossings for each step, where parallel boundaries have this normal (degrees) and a density of 1."""
    towards = np.radians(normal)
    return np.abs(found.vectors @ (np.sin(towards), np.cos(towards)))


@cases("pixel", [(1.0, 1.0), (0.3, 0.3), (1.0, 2.5)])
def test_measured_angles_are_kept_and_others_lie_little_above(pixel):
    found = Directions(pixel)
    np.testing.assert_allclose(found.at(found.angles), np.diag(1 / np.hypot(*found.vectors.T)), atol=1e-9)
    # any measure of boundaries is a sum of such ones
    for normal in np.arange(0, 180, 7):
        own = found.at(np.array(ANGLES)) @ boundaries(found, normal)
        true = np.abs(np.cos(np.radians(np.array(ANGLES) - normal)))
        assert (own >= true - 1e-9).all()
        assert own.max() <= 1.05
    isotropic = np.mean([boundaries(found, a) for a in np.arange(0, 180, 0.5)], 0)
    own = found.at(np.array(ANGLES)) @ isotropic * np.pi / 2
    assert (own > 0.999).all()
    if pixel[0] == pixel[1]:
        assert own.max() < 1.0131


@cases("pixel", [(1.0, 1.0), (2.0, 1.5)])
def test_the_mean_is_exact_for_isotropic_boundaries_and_near_for_parallel_ones(pixel):
    found = Directions(pixel)
    mean = quad(lambda a: abs(np.cos(a)), 0, np.pi)[0] / np.pi
    isotropic = np.mean([boundaries(found, a) for a in np.arange(0, 180, 0.25)], 0)
    assert found.mean @ isotropic == pytest.approx(mean, rel=1e-5)
    for normal in range(0, 180, 5):
        assert found.mean @ boundaries(found, normal) == pytest.approx(mean, rel=0.02)
