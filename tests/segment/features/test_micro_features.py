"""Features of vispe_micro in `vispe segment`: the default, tile by tile, and turning with the page."""

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
    covered = np.zeros(size, int)
    for number, region in enumerate(actual.regions):
        assert region.top % PATCH == region.left % PATCH == 0
        part = actual.inside(number)
        planes = actual.planes(number)
        assert planes.shape == (actual.width, *part.shape)
        assert planes.dtype == np.float32
        covered[part.slices] += 1
    assert covered.min() >= 1
    assert actual.width == model.dim * {1: 1, 2: 2, 3: 1}[channels]
    assert bool(actual.notes) == (min(size) < PATCH)


@cases("size", [(64, 96), (50, 37)])
def test_a_page_without_tiles_is_the_model_of_the_reflected_page(model, size):
    one = page(*size)
    actual = DenseMaps(model, one, None)
    assert len(actual.regions) == 1
    height, width = (-(-n // PATCH) * PATCH for n in size)
    top, left = ((height - size[0]) // 2, (width - size[1]) // 2)
    rim = ((top, height - size[0] - top), (left, width - size[1] - left), (0, 0))
    untiled = torch.from_numpy(np.pad(one, rim, mode="symmetric")).permute(2, 0, 1).expand(3, -1, -1)
    expected = load_micro()(untiled[None])
    full = torch.nn.functional.interpolate(expected, scale_factor=2, mode="bilinear", align_corners=False)
    cut = full[0, :, top : top + size[0], left : left + size[1]]
    np.testing.assert_allclose(actual.planes(0), cut.numpy(), atol=1e-4)


@cases("turns", [1, 2, 3])
@cases("mirror", [False, True])
def test_features_turn_with_the_page(model, turns, mirror):
    one = page(64, 96)
    pose = lambda a: np.rot90(a[:, ::-1] if mirror else a, turns)  # noqa: E731
    base = np.moveaxis(DenseMaps(model, one, None).planes(0), 0, -1)
    rotated = np.moveaxis(DenseMaps(model, np.ascontiguousarray(pose(one)), None).planes(0), 0, -1)
    centred = np.linalg.norm(base - base.mean((0, 1)))
    assert np.linalg.norm(rotated - pose(base)) / centred < 1e-5


def test_features_in_tiles_are_nearly_those_of_the_whole(model):
    smooth = torch.nn.functional.avg_pool2d(torch.from_numpy(page(320, 320)[None, ..., 0]), 7, 1, 3)[
        0
    ].numpy()
    one = (smooth[..., None] - smooth.min()) / np.ptp(smooth)
    expected = DenseMaps(model, one, None).planes(0)
    tiled = DenseMaps(model, one, 256)
    assert len(tiled.regions) == 4
    middle = tiled.inside(0)
    part = tiled.planes(0)[:, :160, :160]
    std = expected.std((1, 2))
    assert (middle.top, middle.left) == (0, 0)
    assert np.sqrt(np.mean(((part - expected[:, :160, :160]) / std[:, None, None]) ** 2)) < 0.1


def test_it_is_the_default_and_needs_no_basis():
    assert FeatureConfig("both", model="vispe_micro") == DEFAULT
    features = Features(DEFAULT)
    one, valid = page(40, 56), np.ones((40, 56), bool)
    features.fit([(one, valid)])
    assert features.basis is None
    prepared = features.prepare(one, valid)
    assert prepared.compute(0).shape == (26 + 32, 40, 56)
    mask = np.random.default_rng(0).random((40, 56)) < 0.1
    np.testing.assert_allclose(prepared.gather(mask), prepared.compute(0)[:, mask].T, atol=3e-6)
    assert features.config.fingerprint == DenseModel().fingerprint()


def test_images_of_equal_bytes_and_another_shape_are_distinguished(model):
    flat = torch.full((1, 32, 48), 0.5)
    actual = [model(one.contiguous(), again=True) for one in (flat, flat.mT, flat.view(1, 16, 96))]
    assert [tuple(f.shape[1:]) for f in actual] == [(16, 24), (24, 16), (8, 48)]
    colour = torch.rand(3, 16, 16)
    stored = model(colour, again=True)
    assert model(colour.reshape(1, 16, 48)).shape[1:] == (8, 24)
    assert torch.equal(model(colour), stored)


def test_what_training_computed_is_used_once_more(monkeypatch):
    features = Features(DEFAULT)
    one, valid = page(80, 96), np.ones((80, 96), bool)
    mask = np.random.default_rng(0).random((80, 96)) < 0.1
    runs = []
    forward = features._model._model.forward
    monkeypatch.setattr(features._model._model, "forward", lambda x: runs.append(x.shape) or forward(x))
    first = features.prepare(one, valid).gather(mask)
    second = features.prepare(one.copy(), valid).compute(0)
    assert len(runs) == 1
    np.testing.assert_allclose(first, second[:, mask].T, atol=3e-6)
    third = features.prepare(one, valid).compute(0)
    assert len(runs) == 2  # used once
    np.testing.assert_array_equal(third, second)
    features.prepare(one, valid).gather(mask)
    other = one.copy()
    other[0, 0] += 1e-3
    assert not np.array_equal(features.prepare(other, valid).compute(0), second)
    cache = features._model._cache
    monkeypatch.setattr(cache, "_limits", (100, 1 << 20))  # the file is used
    small = page(64, 64, seed=1), valid[:64, :64]
    features.prepare(*small).gather(mask[:64, :64])
    before = len(runs)
    stored = features.prepare(*small).compute(0)
    assert len(runs) == before
    np.testing.assert_array_equal(features.prepare(*small).compute(0), stored)
    monkeypatch.setattr(cache, "_limits", (100, 100))
    features.prepare(*small).gather(mask[:64, :64])
    before = len(runs)
    features.prepare(*small).compute(0)
    assert len(runs) == before + 1  # no room


def test_holes_are_black_to_the_model():
    one = page(48, 48)
    valid = np.ones((48, 48), bool)
    valid[10:20, 5:9] = False
    holes = one.copy()
    holes[~valid] = np.nan
    features = Features(FeatureConfig("tokens", model="vispe_micro"))
    black = np.where(valid[..., None], one, np.float32(0))
    np.testing.assert_array_equal(
        features.prepare(holes, valid).compute(0), features.prepare(black, np.ones_like(valid)).compute(0)
    )


def test_other_weights(tmp_path):
    weights = tmp_path / "other.safetensors"
    save_file({name: value + 0.01 for name, value in load_micro().state_dict().items()}, weights)
    other = DenseModel(weights)
    assert other.fingerprint() != DenseModel().fingerprint()
    config = FeatureConfig("both", model="vispe_micro", weights=str(weights), fingerprint=other.fingerprint())
    assert Features(config).config == config
    with pytest.raises(InputError, match="differ from those used in training"):
        Features(FeatureConfig("both", model="vispe_micro", fingerprint=other.fingerprint()))
    assert WEIGHTS.is_file()


def test_what_does_not_fit_is_refused():
    with pytest.raises(OptionError, match="pos_embed='rope_axial' is not supported by vispe_micro"):
        FeatureConfig("both", model="vispe_micro", pos_embed="rope_axial")
    with pytest.raises(InputError, match="must be a file with weights of vispe_micro, got random"):
        Features(FeatureConfig("tokens", model="vispe_micro", weights="random"))
