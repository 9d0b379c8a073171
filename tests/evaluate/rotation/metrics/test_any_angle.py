import math

import numpy as np
import pytest
import torch

from tests.evaluate.rotation.cases import F64, field, noise, vit
from vispe.errors import OptionError, ShapeError
from vispe.evaluate.rotation import Canvas, VisionModel, angle_equivariance, raw_intensity, rotate
from vispe.images.symmetry.spectrum import match_spectrum
from vispe.images.symmetry.warp import sampling_grid


def row(rows, transform):
    (actual,) = [r for r in rows if r.transform == transform]
    return actual


@pytest.mark.parametrize("shape", [(8, 8), (9, 9), (6, 11), (7, 4)])
@pytest.mark.parametrize("turns", range(-1, 5))
@pytest.mark.parametrize("mode", ["bicubic", "bilinear", "nearest"])
def test_quarter_turns_equal_rot90_exactly(shape, turns, mode):
    x = noise(shape).float()[None]
    expected = torch.rot90(x, turns, (2, 3))
    size = tuple(expected.shape[2:])
    assert torch.equal(rotate(x, 90 * turns, size, mode=mode), expected)
    inner = tuple(n - 2 for n in size)
    assert torch.equal(rotate(x, 90.0 * turns, inner, mode=mode), expected[..., 1:-1, 1:-1])


@pytest.mark.parametrize("shape", [(8, 8), (9, 9), (6, 11)])
def test_the_sampling_itself_meets_rot90_too(shape):
    x = noise(shape)[None]
    for turns in range(4):
        expected = torch.rot90(x, turns, (2, 3))
        for nearly in (0, 1e-9):
            grid = sampling_grid(shape, 90 * turns + nearly, tuple(expected.shape[2:]), x)
            actual = torch.nn.functional.grid_sample(
                x, grid, mode="bicubic", padding_mode="reflection", align_corners=True
            )
            torch.testing.assert_close(actual, expected, rtol=0, atol=1e-8)


@pytest.mark.parametrize("degrees", [15, 45, 100.5, -30, 720 + 37])
@pytest.mark.parametrize("size", [(64, 64), (65, 71)])
def test_rotation_agrees_with_the_analytic_field_at_every_angle(degrees, size):
    x, expected = (field(size, degrees=d)[None] for d in (0, degrees))
    canvas = Canvas.fit(size, 4 if size[0] == 64 else 5, how="disc")
    assert canvas.source == size
    disc = canvas.pixels()
    actual = canvas.pose(x, degrees)
    exact = canvas.pose(expected, 0)
    error = (actual - exact)[..., disc].norm() / exact[..., disc].norm()
    assert error < 0.02
    off = (torch.roll(actual, 1, -1) - exact)[..., disc].norm() / exact[..., disc].norm()
    assert off > 0.2  # a centre wrong by one pixel would show


def test_canvas_shows_the_same_sample_and_no_invented_pixel():
    for shape, patch, how in [((64, 64), 4, "crop"), ((65, 90), 7, "crop"), ((63, 64), 5, "disc")]:
        canvas = Canvas.fit(shape, patch, how=how)
        assert canvas.side % patch == 0
        assert all((s - canvas.side) % 2 == 0 for s in canvas.source)
        x = noise(shape)[None]
        marked = torch.nn.functional.pad(x[..., 1:-1, 1:-1], (1, 1, 1, 1), value=math.nan)
        for degrees in (0, 17, 45, 90, 200):
            posed = canvas.pose(marked, degrees)
            if how == "crop":
                assert torch.isfinite(posed).all()
        assert canvas.invented == (how == "disc")
        radius = (canvas.side - 1) / 2 - patch
        n = canvas.grid
        for y in range(n):
            for u in range(n):
                inside = math.hypot(y - (n - 1) / 2, u - (n - 1) / 2) * patch <= radius
                assert bool(canvas.tokens()[y, u]) == inside
    assert Canvas.fit((64, 64), 4).side == 40
    assert Canvas.fit((63, 64), 5, how="disc") == Canvas((62, 64), 60, 5, True)


def test_windows_that_do_not_fit_are_refused():
    with pytest.raises(
        ShapeError, match=r"image of \(64, 64\) px is too small for a window of 60 px at every angle"
    ):
        Canvas.fit((64, 64), 4, 60)
    with pytest.raises(ShapeError, match="at least 3 patches per side"):
        Canvas.fit((20, 64), 7)
    with pytest.raises(ShapeError, match=r"multiple of patch_size=4 px .* got 30 px"):
        Canvas.fit((64, 64), 4, 30)
    with pytest.raises(OptionError, match="how must be 'crop' or 'disc', got how='fill'"):
        Canvas.fit((64, 64), 4, how="fill")
    with pytest.raises(ShapeError, match=r"was fitted to images of \(64, 64\) px, got \(70, 64\)"):
        Canvas.fit((64, 64), 4).pose(noise((70, 64))[None], 0)
    with pytest.raises(OptionError, match=r"mode must be one of .* got 'area'"):
        rotate(noise((4, 4))[None], 3, mode="area")
    with pytest.raises(ShapeError, match=r"at least 2 x 2 pixels, got \(3, 4, 4\)"):
        rotate(noise((4, 4)), 3)


def test_round_trip_is_exact_for_quarter_turns_and_small_else():
    x = field((60, 60))[None]
    canvas = Canvas.fit((60, 60), 4)
    identity = canvas.pose(x, 0)
    assert torch.equal(canvas.round_trip(x, 270), identity)
    error = canvas.round_trip(x, 33) - identity
    assert 1e-6 < error.norm() / identity.norm() < 0.03


def test_blur_takes_the_spectrum_of_the_other_image():
    x = noise((48, 48))[None]
    blurred = torch.nn.functional.avg_pool2d(torch.nn.functional.pad(x, (1, 1, 1, 1), "reflect"), 3, 1)
    actual = match_spectrum(x, blurred)
    assert actual.shape == x.shape
    np.testing.assert_allclose(actual.var(), blurred.var(), rtol=0.1)
    # phases are those of x, so it is x low-passed
    assert float((actual - blurred).norm() / (x - blurred).norm()) < 0.5
    torch.testing.assert_close(match_spectrum(x, x), x)
    torch.testing.assert_close(match_spectrum(x * 0 + 2, x * 0 + 2), x * 0 + 2)


def test_raw_intensity_is_equivariant_up_to_sampling_at_every_angle():
    rows = angle_equivariance(
        raw_intensity, [field((48, 48)), field((48, 48), 1), field((45, 52), 2)], patch_size=1
    )
    assert len(rows) == 25
    for actual in rows:
        if actual.transform in ("0°", "90°", "180°", "270°"):
            assert actual.values.tolist() == [0, 0, 0]
            assert actual.floor.tolist() == [0, 0, 0]
        else:
            assert (actual.values < 0.05).all()
            assert set(actual.floors) == {"round trip", "features", "blur"}
            assert actual.effect().mean < 0  # nothing above what resampling does
    mean = np.mean([r.values for r in rows[1:] if float(r.transform[:-1]) % 90], axis=0)
    np.testing.assert_allclose(row(rows, "all angles").values, mean)


@pytest.mark.parametrize("how", ["crop", "disc"])
def test_a_planted_bias_is_measured_with_its_size_at_every_angle(how):
    n, strength = 60, 0.1
    canvas = Canvas.fit((n, n), 1, how=how)
    u = torch.arange(canvas.side, dtype=F64) - (canvas.side - 1) / 2
    disc = canvas.tokens()

    def biased(images):
        return torch.ones_like(images) * strength * u  # nothing but a ramp along columns

    rows = angle_equivariance(biased, [noise((n, n))], angles=(0, 10, 90, 135, 180), patch_size=1, how=how)
    for degrees in (0, 10, 90, 135, 180):
        # the ramp rotated back is cos·u ± sin·v, and u and v have equal spread on a disc
        expected = math.sqrt(2 - 2 * math.cos(math.radians(degrees)))
        assert row(rows, f"{degrees}°").values[0] == pytest.approx(expected, abs=1e-9)
    assert disc.sum() > 100


def test_bias_and_content_add_up():
    n, strength, degrees = 64, 0.02, 60
    canvas = Canvas.fit((n, n), 1)
    u = torch.arange(canvas.side, dtype=F64) - (canvas.side - 1) / 2
    x = field((n, n))

    def biased(images):
        return images + strength * u

    (actual,) = angle_equivariance(biased, [x], angles=(degrees,), patch_size=1)[1:]
    disc = canvas.tokens()
    f = biased(canvas.pose(x[None], 0))[0][:, disc]
    power = (f - f.mean(1, keepdim=True)).square().sum()
    w = u.expand(len(u), len(u))
    ramp = (2 - 2 * math.cos(math.radians(degrees))) * 3 * strength**2 * w[disc].square().sum()
    assert actual.values[0] == pytest.approx(float((ramp / power).sqrt()), rel=0.02)
    assert actual.effect().mean > 0.5 * actual.values[0]


def test_a_position_code_shows_above_the_floor_and_an_isotropic_one_less():
    images = [field((80, 80), finest=0.05)]
    effects = {}
    for pos in ("none", "learn"):
        rows = angle_equivariance(VisionModel(vit(pos)), images, angles=(90, 45))
        assert (row(rows, "90°").values[0] < 1e-12) == (pos == "none")
        effects[pos] = row(rows, "45°").effect().mean
    assert effects["learn"] > effects["none"] + 0.1


def test_batches_and_sizes_do_not_change_numbers():
    images = [field((50, 50), k) for k in range(3)]
    single = angle_equivariance(raw_intensity, images, angles=(25, 180), patch_size=2 - 1)
    together = angle_equivariance(raw_intensity, images, angles=(25, 180), patch_size=1, batch_size=2)
    for a, b in zip(single, together, strict=True):
        np.testing.assert_allclose(a.values, b.values, rtol=1e-12, atol=0)
        np.testing.assert_allclose(a.floor, b.floor, rtol=1e-9, atol=0)
    with pytest.raises(
        ShapeError, match=r"gave a map of \(36, 36\) tokens, expected 18 a side for patch_size=2"
    ):
        angle_equivariance(raw_intensity, [noise((60, 60))], angles=(0,), patch_size=2, side=36)
