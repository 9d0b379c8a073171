"""Features of vispe_micro in `vispe segment`: the default, tiling, caching and rotation equivariance."""

import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from tests.cases import cases
from tests.products import partly
from vispe.backbones.micro import PATCH, WEIGHTS, load_micro
from vispe.errors import InputError, OptionError
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.micro_features import DenseMaps, DenseModel
from vispe.segment.features.pixel_features import Features
from vispe.segment.pipeline import DEFAULT


@pytest.fixture(scope="module")
def model():
    return DenseModel()


def page(height, width, channels=1, seed=0):
    return np.random.default_rng(seed).random((height, width, channels), np.float32)


@partly(2)
@cases("size", [(1, 1), (5, 40), (50, 37), (97, 130)])
@cases("tile", [None, 48])
@cases("channels", [1, 2, 3])
def test_tiles_cover_the_page(model, size, tile, channels):
    actual = DenseMaps(model, page(*size, channels), tile)
    coverage = np.zeros(size, int)
    for number, region in enumerate(actual.regions):
        assert region.top % PATCH == region.left % PATCH == 0
        interior = actual.inside(number)
        planes = actual.planes(number)
        assert planes.shape == (actual.width, *interior.shape)
        assert planes.dtype == np.float32
        coverage[interior.slices] += 1
    assert coverage.min() >= 1
    assert actual.width == model.dim * {1: 1, 2: 2, 3: 1}[channels]
    assert bool(actual.notes) == (min(size) < PATCH)


@cases("size", [(64, 96), (50, 37)])
def test_untiled_features_equal_the_model_on_the_padded_page(model, size):
    image = page(*size)
    actual = DenseMaps(model, image, None)
    assert len(actual.regions) == 1
    height, width = (-(-n // PATCH) * PATCH for n in size)
    top, left = ((height - size[0]) // 2, (width - size[1]) // 2)
    padding = ((top, height - size[0] - top), (left, width - size[1] - left), (0, 0))
    padded = torch.from_numpy(np.pad(image, padding, mode="symmetric")).permute(2, 0, 1).expand(3, -1, -1)
    expected = load_micro()(padded[None])
    upsampled = torch.nn.functional.interpolate(
        expected, scale_factor=2, mode="bilinear", align_corners=False
    )
    cropped = upsampled[0, :, top : top + size[0], left : left + size[1]]
    np.testing.assert_allclose(actual.planes(0), cropped.numpy(), atol=1e-4)


@cases("turns", [1, 2, 3])
@cases("mirror", [False, True])
def test_features_are_d4_equivariant(model, turns, mirror):
    image = page(64, 96)
    pose = lambda a: np.rot90(a[:, ::-1] if mirror else a, turns)  # noqa: E731
    base = np.moveaxis(DenseMaps(model, image, None).planes(0), 0, -1)
    rotated = np.moveaxis(DenseMaps(model, np.ascontiguousarray(pose(image)), None).planes(0), 0, -1)
    norm = np.linalg.norm(base - base.mean((0, 1)))
    assert np.linalg.norm(rotated - pose(base)) / norm < 1e-5


def test_tiled_features_approximate_untiled_features(model):
    smooth = torch.nn.functional.avg_pool2d(torch.from_numpy(page(320, 320)[None, ..., 0]), 7, 1, 3)[
        0
    ].numpy()
    image = (smooth[..., None] - smooth.min()) / np.ptp(smooth)
    expected = DenseMaps(model, image, None).planes(0)
    tiled = DenseMaps(model, image, 256)
    assert len(tiled.regions) == 4
    interior = tiled.inside(0)
    tile_features = tiled.planes(0)[:, :160, :160]
    std = expected.std((1, 2))
    assert (interior.top, interior.left) == (0, 0)
    assert np.sqrt(np.mean(((tile_features - expected[:, :160, :160]) / std[:, None, None]) ** 2)) < 0.1


def test_vispe_micro_is_the_default_and_needs_no_basis():
    assert FeatureConfig("both", model="vispe_micro") == DEFAULT
    features = Features(DEFAULT)
    image, valid = page(40, 56), np.ones((40, 56), bool)
    features.fit([(image, valid)])
    assert features.basis is None
    prepared = features.prepare(image, valid)
    assert prepared.compute(0).shape == (26 + 32, 40, 56)
    mask = np.random.default_rng(0).random((40, 56)) < 0.1
    np.testing.assert_allclose(prepared.gather(mask), prepared.compute(0)[:, mask].T, atol=3e-6)
    assert features.config.fingerprint == DenseModel().fingerprint()


def test_cache_distinguishes_equal_bytes_of_other_shape(model):
    flat = torch.full((1, 32, 48), 0.5)
    actual = [model(one.contiguous(), again=True) for one in (flat, flat.mT, flat.view(1, 16, 96))]
    assert [tuple(f.shape[1:]) for f in actual] == [(16, 24), (24, 16), (8, 48)]
    colour = torch.rand(3, 16, 16)
    cached = model(colour, again=True)
    assert model(colour.reshape(1, 16, 48)).shape[1:] == (8, 24)
    assert torch.equal(model(colour), cached)


def test_features_of_training_are_cached_for_one_reuse(monkeypatch):
    features = Features(DEFAULT)
    image, valid = page(80, 96), np.ones((80, 96), bool)
    mask = np.random.default_rng(0).random((80, 96)) < 0.1
    runs = []
    forward = features._model._model.forward
    monkeypatch.setattr(features._model._model, "forward", lambda x: runs.append(x.shape) or forward(x))
    first = features.prepare(image, valid).gather(mask)
    second = features.prepare(image.copy(), valid).compute(0)
    assert len(runs) == 1
    np.testing.assert_allclose(first, second[:, mask].T, atol=3e-6)
    third = features.prepare(image, valid).compute(0)
    assert len(runs) == 2  # the cached output is used once
    np.testing.assert_array_equal(third, second)
    features.prepare(image, valid).gather(mask)
    modified = image.copy()
    modified[0, 0] += 1e-3
    assert not np.array_equal(features.prepare(modified, valid).compute(0), second)
    cache = features._model._cache
    monkeypatch.setattr(cache, "_limits", (100, 1 << 20))  # spilled to the file
    small = page(64, 64, seed=1), valid[:64, :64]
    features.prepare(*small).gather(mask[:64, :64])
    n_runs = len(runs)
    cached = features.prepare(*small).compute(0)
    assert len(runs) == n_runs
    np.testing.assert_array_equal(features.prepare(*small).compute(0), cached)
    monkeypatch.setattr(cache, "_limits", (100, 100))
    features.prepare(*small).gather(mask[:64, :64])
    n_runs = len(runs)
    features.prepare(*small).compute(0)
    assert len(runs) == n_runs + 1  # above both limits


def test_invalid_pixels_are_black_in_the_model_input():
    image = page(48, 48)
    valid = np.ones((48, 48), bool)
    valid[10:20, 5:9] = False
    with_holes = image.copy()
    with_holes[~valid] = np.nan
    features = Features(FeatureConfig("tokens", model="vispe_micro"))
    black = np.where(valid[..., None], image, np.float32(0))
    np.testing.assert_array_equal(
        features.prepare(with_holes, valid).compute(0),
        features.prepare(black, np.ones_like(valid)).compute(0),
    )


def test_custom_weights_have_their_own_fingerprint(tmp_path):
    weights = tmp_path / "other.safetensors"
    save_file({name: value + 0.01 for name, value in load_micro().state_dict().items()}, weights)
    model = DenseModel(weights)
    assert model.fingerprint() != DenseModel().fingerprint()
    config = FeatureConfig("both", model="vispe_micro", weights=str(weights), fingerprint=model.fingerprint())
    assert Features(config).config == config
    with pytest.raises(InputError, match="differ from those used in training"):
        Features(FeatureConfig("both", model="vispe_micro", fingerprint=model.fingerprint()))
    assert WEIGHTS.is_file()


def test_unsupported_options_raise():
    with pytest.raises(OptionError, match="pos_embed='rope_axial' is not supported by vispe_micro"):
        FeatureConfig("both", model="vispe_micro", pos_embed="rope_axial")
    with pytest.raises(InputError, match="must be a file with weights of vispe_micro, got random"):
        Features(FeatureConfig("tokens", model="vispe_micro", weights="random"))
