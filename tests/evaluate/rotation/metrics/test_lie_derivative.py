import math
import warnings

import numpy as np
import pytest
import torch

from tests.evaluate.rotation.cases import F64, field, noise, vit
from vispe.errors import OptionError, ShapeError, UnsupportedCombination
from vispe.evaluate.rotation import (
    VisionModel,
    lie_derivative,
    lie_derivatives,
    raw_intensity,
)
from vispe.evaluate.rotation.metrics.lie_derivative import MOTIONS, along, moved
from vispe.experimental.measures.score_invariance import argmax_consistency, score_changes
from vispe.images.symmetry.warp import rotate

METHODS = ("forward", "double backward", "difference")


@pytest.mark.parametrize("shape", [(9, 9), (8, 13)])
@pytest.mark.parametrize("motion", MOTIONS)
def test_the_derivative_along_a_motion_is_the_mean_of_both_sides(shape, motion):
    x = noise(shape)[None]
    for stride in ((1.0, 1.0), (3.0, 3.0)):
        sides = [moved(x, motion, t, stride) for t in (1e-7, -1e-7)]
        torch.testing.assert_close(along(x, motion, stride), (sides[0] - sides[1]) / 2e-7, atol=1e-5, rtol=0)
        assert torch.allclose(moved(x, motion, 0.0, stride), x, atol=1e-12)


def test_motions_go_where_their_names_say():
    x = noise((7, 9))[None]
    torch.testing.assert_close(moved(x, "down", 2.0)[..., 2:, :], x[..., :-2, :])
    torch.testing.assert_close(moved(x, "right", 1.0)[..., 1:], x[..., :-1])
    torch.testing.assert_close(
        moved(x, "rotation", math.radians(20)), rotate(x, 20, mode="bilinear"), atol=1e-12, rtol=0
    )


@pytest.mark.parametrize("method", METHODS)
def test_pointwise_functions_have_none_to_first_order(method):
    x = field((20, 25), finest=0.05)[None]
    for motion in MOTIONS:
        value, derivative = lie_derivative(raw_intensity, x, motion, method=method)
        torch.testing.assert_close(value, x)
        assert float(derivative.abs().max()) < (1e-3 if method == "difference" else 1e-12)


@pytest.mark.parametrize("method", METHODS)
@pytest.mark.parametrize("motion", MOTIONS)
def test_a_planted_bias_is_measured_with_its_size(method, motion):
    h, w, strength = 20, 24, 0.3
    u = torch.arange(w, dtype=F64) * math.pi / (w - 1)
    v = torch.arange(h, dtype=F64)[:, None] - (h - 1) / 2
    pattern = u.cos().expand(h, w)
    slope = -u.sin() * math.sin(math.pi / (w - 1))  # central difference, 0 at the frame
    expected = {"rotation": strength * v * slope, "down": 0 * v * slope, "right": strength * slope + 0 * v}[
        motion
    ]
    x = field((h, w), finest=0.05, channels=1)[None]
    _, derivative = lie_derivative(lambda t: t + strength * pattern, x, motion, method=method)
    limit = 1e-3 if method == "difference" else 1e-12
    assert float((derivative[0, 0] - expected).abs().max()) < limit
    _, bias_derivative = lie_derivative(lambda t: t * 0 + strength * pattern, x, motion, method=method)
    assert float((bias_derivative[0, 0] - expected).abs().max()) < (1e-3 if method == "difference" else 1e-12)


@pytest.mark.slow
@pytest.mark.parametrize("pos", ["none", "learn", "alibi2d", "rope_axial"])
def test_all_ways_agree_for_a_transformer(pos):
    f = VisionModel(vit(pos, False, depth=2, size=28))
    images = [field((28, 28)), field((28, 28), 1)]
    rows = {m: lie_derivatives(f, images, method=m, batch_size=2) for m in METHODS}
    for k in range(3):
        values = [rows[m][k].values for m in METHODS]
        assert rows["forward"][k].transform == f"Lie {MOTIONS[k]}"
        np.testing.assert_allclose(values[0], values[1], rtol=1e-9)
        np.testing.assert_allclose(values[0], values[2], rtol=1e-3)
        assert (values[0] > 1e-3).all()


def test_what_has_no_derivative_is_refused_or_said():
    x = noise((8, 8))
    assert np.isnan(lie_derivatives(lambda t: t * 0 + 1, [x], motions=["down"])[0].values)
    with pytest.raises(OptionError, match=r"motion must be one of .* got 'up'"):
        lie_derivative(raw_intensity, x[None], "up")
    with pytest.raises(
        OptionError, match=r"method='difference' is dominated by rounding errors, got torch\.float32"
    ):
        lie_derivative(raw_intensity, x[None].float(), "down", method="difference")
    with pytest.raises(ShapeError, match=r"maps need 2 cells per axis, got \(1, 8\)"):
        lie_derivative(raw_intensity, noise((1, 8))[None], "down")

    class Rounded(torch.autograd.Function):
        @staticmethod
        def forward(ctx, t):
            return t.round()

        @staticmethod
        def backward(ctx, g):
            return g

    with pytest.raises(
        UnsupportedCombination,
        match=r"no derivative by method='forward' .*\. Use method='difference' in float64",
    ):
        lie_derivative(Rounded.apply, x[None], "down")


def test_scores_that_do_not_move_do_not_change():
    images = [noise((12, 16)), noise((12, 16), 1)]

    def brightness(x):
        return torch.stack([x.mean((1, 2, 3)), x.square().mean((1, 2, 3))], 1)

    def corner(x):
        return torch.stack([x[:, 0, 0, 0] * 5, x[:, 0, -1, -1] * 5], 1)

    assert argmax_consistency(brightness, images, batch_size=2)[0].values.tolist() == [1, 1]
    (actual,) = argmax_consistency(corner, images, rolls=range(3))
    for k, x in enumerate(images):
        constant = bool(x[0, 0, 0] >= x[0, -1, -1])
        same = [
            bool(y[0, 0, 0] >= y[0, -1, -1]) == constant
            for a in range(3)
            for b in range(3)
            if a or b
            for y in [torch.roll(x, (a, b), (1, 2))]
        ]
        assert actual.values[k] == pytest.approx(np.mean(same))
    first, fraction, rotation_rate = score_changes(brightness, images, batch_size=2, seed=3)
    assert first.transform == "shift by whole pixels"
    assert first.values.max() < 1e-28
    assert fraction.values.max() < 1e-3
    assert rotation_rate.values.max() < 1e-2
    for actual in score_changes(corner, images):
        assert actual.values.min() > 1e-4
    second = score_changes(corner, images, seed=5)
    assert [r.values.tolist() for r in second] == [
        r.values.tolist() for r in score_changes(corner, images, seed=5)
    ]
    with pytest.raises(OptionError, match="share needs a number above 0 and below 1, got share=2"):
        score_changes(corner, images, share=2)
    with pytest.raises(ShapeError, match=r"logits must be \(b, k\) for 1 image,"):
        argmax_consistency(raw_intensity, images)
    with pytest.raises(OptionError, match="rolls must have a value other than 0"):
        argmax_consistency(corner, images, rolls=[0])


def test_a_warning_of_torch_about_itself_is_not_shown(monkeypatch):
    jvp = torch.func.jvp

    def first_of_a_process(*args):
        warnings.warn("`torch.jit.script` is deprecated.", FutureWarning, stacklevel=1)
        return jvp(*args)

    monkeypatch.setattr(torch.func, "jvp", first_of_a_process)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        lie_derivative(lambda x: x**2, torch.rand(1, 1, 8, 8), "right")
