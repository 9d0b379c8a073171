"""Synthetic textures: every pose against pointwise formulas, exact class fractions, and statistics."""

import pickle
import tracemalloc
from dataclasses import FrozenInstanceError

import numpy as np
import pytest
import torch

from tests.cases import cases
from tests.products import partly
from vispe.errors import OptionError, ShapeError
from vispe.images.textures import disc_packing, layered, random_field, voronoi
from vispe.images.textures.waves import plane_quantiles, ring_waves

pytest.importorskip("scipy", reason="vispe[cli] is not installed")

TEXTURES = {
    "field": random_field(0, waves=16, detail=0.05),
    "phases": random_field(1, wavelength=(20.0, 9.0), waves=16, fractions=(0.5, 0.2, 0.3), period=(40, 48)),
    "stretched": random_field(2, waves=16, stretch=3.0, direction=25.0),
    "discs": disc_packing(0, radius=5.0, period=(60, 64)),
    "equal": disc_packing(1, radius=4.0, spread=0.0, edge=0.0, detail=0.0, period=(40, 48), coverage=0.45),
    "ellipses": disc_packing(2, radius=4.0, period=64, stretch=2.0, direction=110.0),
    "grains": voronoi(0, grain=10.0, labels="grains", period=(40, 48)),
    "boundaries": voronoi(1, grain=12.0, labels="boundaries", regularity=0.0, period=64),
    "polycrystal": voronoi(2, grain=9.0, fractions=(0.2, 0.3, 0.5), period=64, stretch=1.5),
    "layers": layered(0, interfaces=(-9.0, 4.0, 11.0)),
    "steps": layered(1, interfaces=(0.5,), levels=(0.8, 0.1), waviness=0.0, edge=0.0, detail=0.0),
}
PERIODIC = ("phases", "equal", "grains")
POSES = [
    (7.0, False),
    (123.4, True),
    (-200.0, False),
    (45.0, True),
    (-45.0, False),
    (90.0, True),
    (0.0, False),
]

every_texture = cases("name", TEXTURES)


def position(texture, size, pixel, angle, mirror, shift, scale):
    """Return the position of pixel (y, x) in the unstretched texture as a complex number x + i y, y upwards."""
    y, x = pixel[0] - (size[0] - 1) / 2, pixel[1] - (size[1] - 1) / 2
    z = complex(x, -y) * np.exp(-1j * np.deg2rad(angle))
    z = complex(-z.real, z.imag) if mirror else z
    z = (z - complex(shift[1], -shift[0])) / scale
    along = np.exp(1j * np.deg2rad(texture.direction))
    z /= along
    return complex(z.real / texture.stretch, z.imag) * along


def cosines(waves, z):
    return (
        np.cos(-waves.vectors[:, 0] * z.imag + waves.vectors[:, 1] * z.real + waves.phases) * waves.amplitudes
    ).sum()


def copies(points, period):
    """Return complex positions (9, n) of points and their copies in the neighbouring periods."""
    steps = [complex(i * period[1], j * period[0]) for j in (-1, 0, 1) for i in (-1, 0, 1)]
    return np.array([points[:, 1] - 1j * points[:, 0] + s for s in steps])


def step(t):
    t = np.clip(t, 0, 1)
    return 3 * t**2 - 2 * t**3


def reference_pixel(texture, z):
    """Return the grey level and the class at a complex position by brute force."""
    grey = 0.0 if texture.detail is None else cosines(texture.detail, z)
    kind = type(texture).__name__
    if kind == "RandomField":
        value = cosines(texture.waves, z)
        return grey + 0.5 + texture.contrast * value, int((value > texture.thresholds).sum())
    if kind == "Layered":
        depth = -z.imag - (0 if texture.waves is None else cosines(texture.waves, z))
        fraction = [
            step((depth - y) / texture.edge + 0.5) if texture.edge else depth >= y for y in texture.interfaces
        ]
        steps = np.diff(texture.levels)
        return grey + texture.levels[0] + (steps * fraction).sum(), int((depth >= texture.interfaces).sum())
    h, w = texture.period
    z = complex(z.real % w, -(-z.imag % h))
    if kind == "DiscPacking":
        inside = (texture.radii - abs(copies(texture.centres, texture.period) - z)).max()
        fraction = step(inside / texture.edge + 0.5) if texture.edge else inside >= 0
        low, high = texture.levels
        return grey + low + (high - low) * fraction, int(inside >= 0)
    seeds = copies(texture.seeds, texture.period)
    distance = abs(seeds - z)
    nearest = np.unravel_index(distance.argmin(), distance.shape)
    span = abs(seeds - seeds[nearest])
    span[nearest] = np.inf
    bisector = (distance**2 - distance[nearest] ** 2) / (2 * span)
    bisector[nearest] = np.inf
    level = texture.levels[nearest[1]]
    level = 0.1 + (level - 0.1) * step(bisector.min() / texture.width)
    label = {
        "grains": nearest[1],
        "phases": texture.phases[nearest[1]],
        "boundaries": bisector.min() < texture.width / 2,
    }
    return grey + level, int(label[texture.labels])


@every_texture
@cases(("angle", "mirror"), POSES)
def test_render_equals_the_pointwise_formulas_in_every_pose(name, angle, mirror):
    texture, size, shift, scale = TEXTURES[name], (22, 31), (3.25, -17.5), 1.3
    image, label = texture.render(size, angle=angle, mirror=mirror, shift=shift, scale=scale)
    assert image.shape == (3, *size)
    assert image.dtype == torch.float32
    assert label.shape == size
    assert label.dtype == torch.int64
    assert all(torch.equal(image[0], channel) for channel in image)
    rng = np.random.default_rng(0)
    for pixel in zip(rng.integers(0, 22, 12), rng.integers(0, 31, 12), strict=True):
        z = position(texture, size, pixel, angle, mirror, shift, scale)
        grey, expected = reference_pixel(texture, z)
        assert float(image[0][pixel]) == pytest.approx(grey, abs=1e-6)
        assert int(label[pixel]) == expected


@partly(1)
@every_texture
@cases("size", [(24, 24), (25, 25), (24, 33), (31, 16)])
def test_rotations_by_90_degrees_and_mirrors_are_exact(name, size):
    texture = TEXTURES[name]
    for angle, shift, scale in ((0.0, (0.0, 0.0), 1.0), (17.3, (2.5, -1.0), 0.8)):
        image, label = texture.render(size, angle=angle, shift=shift, scale=scale)
        for turns in (-3, 1, 2, 3, 4):
            rotated_size = size[::-1] if turns % 2 else size
            rotated = texture.render(rotated_size, angle=angle + 90.0 * turns, shift=shift, scale=scale)
            assert torch.equal(rotated[0], torch.rot90(image, turns, (1, 2)))
            assert torch.equal(rotated[1], torch.rot90(label, turns, (0, 1)))
            mirrored = texture.render(
                rotated_size, angle=90.0 * turns - angle, mirror=True, shift=shift, scale=scale
            )
            assert torch.equal(mirrored[0], torch.rot90(image.flip(2), turns, (1, 2)))
            assert torch.equal(mirrored[1], torch.rot90(label.flip(1), turns, (0, 1)))


@cases("name", PERIODIC)
@cases("shift", [(1, 0), (0, -7), (-13, 55), (40, 48)])
def test_integer_shifts_of_periodic_textures_equal_roll(name, shift):
    texture = TEXTURES[name]
    image, label = texture.render(texture.period)
    shifted = texture.render(texture.period, shift=shift)
    assert torch.equal(shifted[0], torch.roll(image, shift, (1, 2)))
    assert torch.equal(shifted[1], torch.roll(label, shift, (0, 1)))
    tiled, _ = texture.render((80, 144))
    assert torch.equal(tiled[:, :40], tiled[:, 40:])
    assert torch.equal(tiled[:, :, :48], tiled[:, :, 96:])


@pytest.mark.slow
@every_texture
def test_the_centre_of_a_large_image_equals_the_small_image(name):
    texture = TEXTURES[name]
    for angle in (0.0, 33.0):
        large, labels = texture.render((270, 301), angle=angle)
        small, label = texture.render((120, 95), angle=angle)
        assert torch.equal(large[:, 75:195, 103:198], small)
        assert torch.equal(labels[75:195, 103:198], label)


@every_texture
def test_at_equals_the_pointwise_formulas(name):
    texture = TEXTURES[name]
    points = np.random.default_rng(3).uniform(-90, 90, (8200, 2))
    grey, label = texture.at(points)
    assert grey.shape == label.shape == (8200,)
    for i in range(0, 8200, 1639):
        z = position(texture, (1, 1), points[i], 0.0, False, (0, 0), 1.0)
        expected, number = reference_pixel(texture, z)
        assert grey[i] == pytest.approx(expected, abs=1e-9)
        assert label[i] == number
    assert texture.at(points[:0])[0].shape == (0,)


@pytest.mark.slow
@pytest.mark.parametrize("make", [random_field, disc_packing, voronoi, layered])
def test_memory_is_bounded_and_seeds_are_reproducible(make):
    options = {} if make in (random_field, layered) else {"period": 128}
    texture = make(5, **options)
    tracemalloc.start()
    image, label = texture.render((260, 300), angle=20.0)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 20 * 260 * 300 + 32 * 2**20
    repeated = make(np.random.default_rng(5), **options).render((260, 300), angle=20.0)
    assert torch.equal(repeated[0], image)
    assert torch.equal(repeated[1], label)
    rng = np.random.default_rng(5)
    assert not torch.equal(*(make(rng, **options).render(40)[0] for _ in range(2)))
    unpickled = pickle.loads(pickle.dumps(texture))
    assert torch.equal(unpickled.render((260, 300), angle=20.0)[0], image)


def test_textures_are_immutable():
    with pytest.raises(FrozenInstanceError):
        TEXTURES["field"].spacing = 2.0
    for name, array in (
        ("field", "thresholds"),
        ("discs", "radii"),
        ("grains", "seeds"),
        ("layers", "levels"),
    ):
        with pytest.raises(ValueError, match="read-only"):
            getattr(TEXTURES[name], array)[0] = 0
    assert random_field(0, spacing=0.5).pixel(scale=4.0) == 0.125


@cases("fractions", [(0.5, 0.5), (0.83, 0.17), (0.1, 0.25, 0.65)])
def test_class_fractions_are_exact_with_period_or_exact_over(fractions):
    for options, size in (
        ({"period": (45, 64)}, (45, 64)),
        ({"exact_over": (33, 50), "stretch": 2.0}, (33, 50)),
    ):
        texture = random_field(4, wavelength=12.0, waves=32, fractions=fractions, **options)
        counts = torch.bincount(texture.render(size)[1].flatten(), minlength=len(fractions))
        cuts = np.rint(np.cumsum(fractions) * (size[0] * size[1]))
        np.testing.assert_array_equal(np.cumsum(counts.numpy()), cuts)


def test_class_fractions_hold_on_the_infinite_plane():
    fractions = (0.1, 0.25, 0.65)
    texture = random_field(6, wavelength=8.0, waves=12, fractions=fractions)
    points = np.random.default_rng(0).uniform(-1e6, 1e6, (100_000, 2))
    actual = np.bincount(texture.at(points)[1]) / len(points)
    np.testing.assert_allclose(actual, fractions, atol=0.005)
    quantiles = plane_quantiles(np.sqrt(2 / 512), 512, np.array([0.1, 0.5, 0.975]))
    np.testing.assert_allclose(quantiles, [-1.28155, 0.0, 1.95996], atol=5e-3)
    samples = np.sort(np.cos(np.random.default_rng(1).uniform(0, 2 * np.pi, (400_000, 8))).sum(1) / 2)
    np.testing.assert_allclose(
        plane_quantiles(0.5, 8, np.array([0.03, 0.6])), samples[[12_000, 240_000]], atol=0.01
    )


def structure_tensor(texture, size=400):
    """Return the structure tensor (2, 2): mean products of the image gradients along (y, x)."""
    grey = texture.render(size)[0][0].double().numpy()
    steps = np.gradient(grey)
    return np.array([[(a * b).mean() for b in steps] for a in steps])


def test_isotropic_spectra_and_known_anisotropy():
    k = ring_waves(np.random.default_rng(0), (16.0, 9.0), 24, 0.3).vectors
    np.testing.assert_allclose(k.T @ k, np.eye(2) * (k**2).sum() / 2, atol=1e-12)
    radii = np.hypot(*k.T).reshape(2, -1) / (2 * np.pi) * [[16.0], [9.0]]
    assert (abs(radii - 1) <= 0.3).all()
    assert (radii.std(1) > 0.1).all()
    isotropic = structure_tensor(random_field(1, wavelength=16.0, bandwidth=0.3))
    np.testing.assert_allclose(isotropic / isotropic.trace(), np.eye(2) / 2, atol=0.02)
    power = (
        abs(np.fft.fft2(random_field(1, wavelength=16.0, bandwidth=0.2, period=256).render(256)[0][0] - 0.5))
        ** 2
    )
    rate = np.hypot(*np.meshgrid(np.fft.fftfreq(256), np.fft.fftfreq(256)))
    assert power[abs(rate * 16 - 1) > 0.25].sum() < 1e-9 * power.sum()
    elongated = structure_tensor(random_field(1, wavelength=16.0, bandwidth=0.3, stretch=3.0, direction=30.0))
    value, vector = np.linalg.eigh(elongated)
    assert value[1] / value[0] == pytest.approx(9.0, rel=0.15)
    expected = np.array([-np.sin(np.pi / 6), np.cos(np.pi / 6)])  # smallest gradient along the elongation
    assert abs(vector[:, 0] @ expected) > 0.998


def test_discs_are_separate_and_cover_the_requested_fraction():
    texture = disc_packing(3, radius=5.0, spread=0.3, coverage=0.45, period=(200, 240), edge=1.5)
    assert texture.coverage == pytest.approx(0.45, abs=1e-12)
    assert texture.radii.std() / texture.radii.mean() == pytest.approx(0.3, rel=0.15)
    assert texture.radii.mean() == pytest.approx(5.0, rel=0.05)
    centres = copies(texture.centres, texture.period)
    distances = abs(centres[:, :, None] - centres[4][None, None])
    distances[4][np.eye(len(texture.radii), dtype=bool)] = np.inf
    assert (distances - texture.radii[:, None] - texture.radii).min() >= 1.5
    image, label = texture.render((200, 240))
    assert float(label.double().mean()) == pytest.approx(0.45, abs=2e-3)
    assert float(texture.render((200, 240), angle=33.0)[1].double().mean()) == pytest.approx(0.45, abs=0.03)
    assert image[0][label == 1].mean() > 0.6 > 0.4 > image[0][label == 0].mean()


def test_grain_seeds_keep_a_minimum_distance_and_phase_fractions():
    texture = voronoi(3, grain=10.0, regularity=0.7, fractions=(0.25, 0.75), period=100)
    seeds = copies(texture.seeds, texture.period)
    distances = abs(seeds[:, :, None] - seeds[4][None, None])
    assert np.sort(distances.ravel())[len(texture.seeds)] >= 7.0
    np.testing.assert_array_equal(np.bincount(texture.phases), [25, 75])
    one = voronoi(3, grain=10.0, labels="grains", period=100)
    assert len(one.classes) == 100
    assert torch.equal(one.render(100)[1].unique(), torch.arange(100))


def test_layers_are_ordered_from_top_to_bottom():
    texture = TEXTURES["layers"]
    label = texture.render((60, 200))[1]
    assert texture.classes == ("layer 0", "layer 1", "layer 2", "layer 3")
    assert (label.diff(dim=0) >= 0).all()
    fraction = torch.bincount(label.flatten()) / label.numel()
    np.testing.assert_allclose(fraction, [21 / 60, 13 / 60, 7 / 60, 19 / 60], atol=0.03)
    flat = TEXTURES["steps"].render((6, 2))
    assert flat[1][:, 0].tolist() == [0, 0, 0, 1, 1, 1]
    np.testing.assert_allclose(flat[0][0, :, 1], [0.8] * 3 + [0.1] * 3, atol=1e-7)


@cases(
    ("call", "error", "text"),
    [
        (
            lambda: random_field(0, waves=9),
            OptionError,
            "waves needs an integer of 8 or more and divisible by 2, got waves=9",
        ),
        (lambda: random_field(0, fractions=(0.5, 0.6)), OptionError, "sum to 1, got"),
        (
            lambda: random_field(0, fractions=(1.2, -0.2)),
            OptionError,
            r"fractions needs a list of 2 or more numbers above 0, got fractions=\(1.2, -0.2\)",
        ),
        (
            lambda: random_field(0, wavelength=300.0, period=64),
            OptionError,
            "wavelength must not exceed the period",
        ),
        (
            lambda: random_field(0, bandwidth=1.0),
            OptionError,
            "bandwidth needs a number of 0 or more and below 1, got bandwidth=1.0",
        ),
        (
            lambda: random_field(0, wavelength=-3.0),
            OptionError,
            "wavelength needs a number above 0, or a list of 1 or more numbers above 0, got wavelength=-3.0",
        ),
        (
            lambda: random_field(0, period=12.5),
            OptionError,
            "period needs an integer above 0, or a list of 2 integers above 0, got period=12.5",
        ),
        (
            lambda: random_field(0, detail=-0.1),
            OptionError,
            "detail needs a number of 0 or more, got detail=-0.1",
        ),
        (lambda: random_field(0, stretch=0), OptionError, "stretch needs a number above 0, got stretch=0"),
        (
            lambda: disc_packing(0, coverage=0.7, radius=4.0, period=64),
            OptionError,
            "the discs do not fit",
        ),
        (
            lambda: disc_packing(0, coverage=1.0),
            OptionError,
            "coverage needs a number above 0 and below 1, got coverage=1.0",
        ),
        (
            lambda: disc_packing(0, radius=40.0, period=64),
            OptionError,
            "got 0 with period=",
        ),
        (lambda: disc_packing(0, radius=4.0, period=(9, 2000)), OptionError, "the period must exceed a disc"),
        (
            lambda: disc_packing(0, levels=(0.1,)),
            OptionError,
            r"levels needs a list of 2 finite numbers, got levels=\(0.1,\)",
        ),
        (
            lambda: voronoi(0, labels="phase"),
            OptionError,
            "labels must be one of phases, grains, boundaries, got 'phase'",
        ),
        (lambda: voronoi(0, labels="boundaries", width=0.0), OptionError, "width must be above 0"),
        (lambda: voronoi(0, grain=32.0, period=100), OptionError, "period must be at least 4 grains"),
        (
            lambda: voronoi(0, regularity=0.8),
            OptionError,
            "regularity needs a number from 0 to 0.75, got regularity=0.8",
        ),
        (lambda: layered(0, interfaces=(3.0, 1.0)), OptionError, "interfaces must be ascending"),
        (
            lambda: layered(0, levels=(0.1, 0.2)),
            OptionError,
            "levels must have 3 entries for 2 interfaces, got 2",
        ),
        (
            lambda: TEXTURES["field"].render((0, 4)),
            OptionError,
            r"size needs an integer above 0, or a list of 2 integers above 0, got size=\(0, 4\)",
        ),
        (
            lambda: TEXTURES["field"].render((4, 5, 6)),
            OptionError,
            r"size needs an integer above 0, or a list of 2 integers above 0, got size=\(4, 5, 6\)",
        ),
        (
            lambda: TEXTURES["field"].render(8, angle=float("nan")),
            OptionError,
            "angle needs a finite number, got angle=nan",
        ),
        (
            lambda: TEXTURES["field"].render(8, scale=0.0),
            OptionError,
            "scale needs a number above 0, got scale=0.0",
        ),
        (
            lambda: TEXTURES["field"].render(8, shift=(1.0, "a")),
            OptionError,
            r"shift needs a list of 2 finite numbers, got shift=\(1.0, 'a'\)",
        ),
        (lambda: TEXTURES["field"].at([[1.0, 2.0, 3.0]]), ShapeError, r"points must have the shape \(n, 2\)"),
    ],
)
def test_invalid_arguments_raise(call, error, text):
    with pytest.raises(error, match=text):
        call()
