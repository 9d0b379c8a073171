"""Similarity maps of pages: tiles, channels, interpolation to pixels, and out-of-memory handling."""

import numpy as np
import pytest
import torch
from torch.nn import functional as F

from tests.cases import cases
from tests.segment.text.common import TIMM, VISION, planted, save, stock, with_trunk, write_folder
from tests.segment.text.test_readouts import small_vit
from vispe.errors import InputError
from vispe.segment.features.blend import window
from vispe.segment.features.tiles import tiles
from vispe.segment.model.prediction import predict_page, within_memory
from vispe.segment.text.config import TextClassifier, TextConfig
from vispe.segment.text.features import OVERLAP, TextFeatures, TextPage
from vispe.segment.types import PostProcessing

VECTORS = F.normalize(torch.randn(3, 16, generator=torch.Generator().manual_seed(5)), dim=1)
CLASSES = TextClassifier(VECTORS.numpy(), 9.0)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("tower"), {**VISION, "image_size": 32})
    save(stock(folder), folder)
    return folder


@pytest.fixture(scope="module")
def shallow(tmp_path_factory):
    folder = write_folder(tmp_path_factory.mktemp("shallow"), {**VISION, "image_size": 32, "layers": 1})
    save(stock(folder), folder)
    return folder


def features(folder, classes=CLASSES, **config):
    return TextFeatures(TextConfig(f"local-dir:{folder}", **config), classes, device="cpu")


def page(height, width, channels=1, seed=0):
    return np.random.default_rng(seed).random((height, width, channels), np.float32)


def prepare_page(text_features, grey):
    return text_features.prepare(grey, np.ones(grey.shape[:2], bool))


def predict(text_features, grey, valid=None):
    valid = np.ones(grey.shape[:2], bool) if valid is None else valid
    return predict_page(
        grey, valid, text_features, text_features.classifier, PostProcessing(), lambda share: None
    )


@pytest.mark.slow
@pytest.mark.parametrize("size", [(32, 32), (50, 69), (97, 40), (5, 33)])
def test_tiling_has_no_effect_without_attention_between_patches(shallow, size):
    """One block, unweighted values, no position encoding: embeddings depend on their own patch only."""
    text_features = {
        tile: features(shallow, readout="maskclip", pos_embed="none", tile=tile)
        for tile in (None, 16, 24, 512)
    }
    grey = page(*size)
    expected = predict(text_features[512], grey)
    for tile in (None, 16, 24):
        actual = predict(text_features[tile], grey)
        np.testing.assert_allclose(
            prepare_page(text_features[tile], grey).grid,
            prepare_page(text_features[512], grey).grid,
            rtol=0,
            atol=1e-6,
        )
        np.testing.assert_allclose(actual.prob, expected.prob, rtol=0, atol=1e-5)
        np.testing.assert_array_equal(actual.labels, expected.labels)
        assert actual.overlap == 0
    assert bool(expected.notes) == (min(size) < 8)


def test_tiles_are_blended_per_patch_with_a_window(folder):
    text_features, grey = features(folder), page(64, 48)
    regions = tiles(64, 48, (32, 32), 8, OVERLAP)
    assert len(regions) == 3 * 2
    total, weights = np.zeros((3, 8, 6)), np.zeros((8, 6))
    predictions = []
    for region in regions:
        tile = torch.from_numpy(grey[region.slices]).permute(2, 0, 1).expand(1, 3, -1, -1)
        mean, std = (torch.tensor(v).view(3, 1, 1) for v in ((0.4, 0.5, 0.6), (0.2, 0.3, 0.25)))
        tokens = F.normalize(text_features._tower((tile - mean) / std)[0].double(), dim=-1).numpy()
        similarities = np.moveaxis(tokens @ CLASSES.vectors.T.astype(np.float64), -1, 0)
        patches = tuple(slice(s.start // 8, s.stop // 8) for s in region.slices)
        total[(slice(None), *patches)] += similarities * window(4, 4)
        weights[patches] += window(4, 4)
        predictions.append((patches, similarities.argmax(0)))
    actual = prepare_page(text_features, grey)
    np.testing.assert_allclose(actual.grid, total / weights, atol=1e-5)
    first, compared, different = np.full((8, 6), -1), 0, 0
    for patches, best in predictions:
        is_covered = first[patches] >= 0
        compared, different = (
            compared + is_covered.sum(),
            different + (is_covered & (first[patches] != best)).sum(),
        )
        first[patches] = np.where(is_covered, first[patches], best)
    assert different > 0
    assert actual.notes == (
        f"overlapping tiles predict different classes for {100 * different / compared:.1f} % of their common patches.",
    )


@cases(("step", "size"), [(8, (50, 69)), (16, (600, 530)), (14, (9, 40))])
def test_patches_are_interpolated_bilinearly_to_pixels(step, size):
    rows, columns = (-(-side // step) for side in size)
    offset = ((rows * step - size[0]) // 2, (columns * step - size[1]) // 2)
    grid = np.random.default_rng(0).normal(size=(3, rows, columns)).astype(np.float32)
    text_page = TextPage(grid, step, offset, size)
    expected = F.interpolate(
        torch.from_numpy(grid)[None], size=(rows * step, columns * step), mode="bilinear"
    )
    expected = expected[0, :, offset[0] : offset[0] + size[0], offset[1] : offset[1] + size[1]].numpy()
    coverage = np.zeros(size, int)
    for number, piece in enumerate(text_page.pieces):
        actual = text_page.compute(number)
        assert actual.dtype == np.float32
        np.testing.assert_allclose(actual, expected[(slice(None), *piece.slices)], atol=1e-5)
        coverage[piece.slices] += 1
    assert (coverage == 1).all()
    assert not text_page.overlapping
    assert text_page.weight(0) is None


def test_channels_are_input_as_grey_as_colour_or_separately(folder):
    text_features, grey = features(folder), page(40, 32)
    colour = np.repeat(grey, 3, axis=2)
    np.testing.assert_allclose(
        prepare_page(text_features, colour).grid, prepare_page(text_features, grey).grid, atol=1e-6
    )
    colour = page(40, 32, 3, seed=1)
    assert (
        np.abs(
            prepare_page(text_features, colour).grid - prepare_page(text_features, colour[..., :1]).grid
        ).max()
        > 1e-3
    )
    four = page(40, 32, 4, seed=2)
    channels = [prepare_page(text_features, four[..., c : c + 1]).grid for c in range(4)]
    np.testing.assert_allclose(prepare_page(text_features, four).grid, np.mean(channels, axis=0), atol=1e-5)


def test_invalid_pixels_are_black_and_unlabelled(folder):
    text_features, grey = features(folder), page(40, 40)
    valid = np.ones((40, 40), bool)
    valid[:9, 3:7] = False
    with_nan = grey.copy()
    with_nan[~valid] = np.nan
    actual = predict(text_features, with_nan, valid)
    grey[~valid] = 0
    expected = predict(text_features, grey)
    np.testing.assert_array_equal(actual.labels, np.where(valid, expected.labels, 0))
    assert (actual.prob[:, ~valid] == 0).all()
    np.testing.assert_allclose(actual.prob[:, valid].sum(0), 1, atol=1e-5)


@cases("readout", ["naclip", "sclip"])
def test_tiled_maps_are_d4_equivariant(tmp_path, readout):
    model = stock(write_folder(tmp_path, {**VISION, "image_size": 32}))
    kernel = model.visual.conv1.weight
    model.visual.conv1.weight.copy_(
        sum(torch.rot90(t, k, (2, 3)) for t in (kernel, kernel.flip(3)) for k in range(4)) / 8
    )
    save(model, tmp_path)
    text_features, grey = features(tmp_path, readout=readout, pos_embed="alibi2d"), page(64, 64)
    unrotated = prepare_page(text_features, grey).grid
    for k in range(1, 4):
        rotated = prepare_page(text_features, np.ascontiguousarray(np.rot90(grey, k))).grid
        np.testing.assert_allclose(rotated, np.rot90(unrotated, k, (1, 2)), atol=1e-5)
    mirrored = prepare_page(text_features, np.ascontiguousarray(grey[:, ::-1])).grid
    np.testing.assert_allclose(mirrored, unrotated[..., ::-1], atol=1e-5)


def test_timm_towers_use_their_native_tile_size(tmp_path):
    model = with_trunk(tmp_path, small_vit())
    save(model, tmp_path)
    text_features = TextFeatures.__new__(TextFeatures)  # the trunk is not one that a configuration can name
    vars(text_features).update(device="cpu", tile=None, _half=False, config=TextConfig(), classifier=CLASSES)
    from vispe.segment.text.readouts import parse_readout
    from vispe.segment.text.towers import prepare, read_tower

    prepare(model, None, parse_readout("naclip"))
    text_features._tower = read_tower(model, parse_readout("naclip"))
    text_features._vectors, text_features._mean, text_features._std = (
        torch.from_numpy(CLASSES.vectors),
        torch.zeros(3, 1, 1),
        torch.ones(3, 1, 1),
    )
    assert text_features._tower.size == (48, 64)
    assert prepare_page(text_features, page(100, 130)).grid.shape == (3, 7, 9)
    assert predict(text_features, page(100, 130)).labels.shape == (100, 130)


def test_out_of_memory_halves_the_tile(folder, monkeypatch):
    text_features, messages = features(folder, tile=512), []

    def small(images):
        if images.shape[-1] > 130:
            raise torch.OutOfMemoryError("out of memory")
        return torch.ones(len(images), images.shape[2] // 8, images.shape[3] // 8, 16)

    text_features._tower.__class__ = type(
        "Small", (type(text_features._tower),), {"__call__": lambda self, images: small(images)}
    )
    actual = within_memory(text_features, lambda: predict(text_features, page(300, 300)), messages.append)
    assert actual.labels.shape == (300, 300)
    assert text_features.tile == 128
    assert messages == [f"out of memory: the tile was halved to {n} px." for n in (256, 128)]
    monkeypatch.setattr(
        text_features._tower.__class__, "__call__", lambda self, images: small(torch.ones(1, 3, 200, 200))
    )
    with pytest.raises(InputError, match="out of memory even with tiles of 64 px on cpu"):
        within_memory(text_features, lambda: predict(text_features, page(300, 300)), messages.append)


def test_weights_other_than_those_of_the_model_raise(folder, shallow):
    text_features = features(folder)
    assert text_features.config.weights is None
    reloaded = TextFeatures(text_features.config, CLASSES, device="cpu")
    np.testing.assert_array_equal(
        prepare_page(reloaded, page(40, 40)).grid, prepare_page(text_features, page(40, 40)).grid
    )
    with pytest.raises(InputError, match=r"differ from those of the stored model \(sha256"):
        features(shallow, fingerprint=text_features.config.fingerprint)
    with pytest.raises(InputError, match="differ from those of the stored model"):
        features(folder, fingerprint=text_features.config.fingerprint, weights="random")


def test_non_finite_outputs_raise(folder):
    text_features = features(folder)
    text_features._tower.visual.conv1.weight.fill_(float("nan"))
    with pytest.raises(InputError, match=r"returns non-finite values\. Check its weights"):
        prepare_page(text_features, page(40, 40))


def test_random_weights_depend_on_the_seed(folder):
    first, same_seed, other_seed = (
        TextFeatures(TextConfig(f"local-dir:{folder}", "random"), CLASSES, seed=seed, device="cpu")
        for seed in (0, 0, 1)
    )
    assert first.config.fingerprint == same_seed.config.fingerprint != other_seed.config.fingerprint


def test_planted_weights_give_the_expected_text_vectors(tmp_path):
    from vispe.segment.text.prompts import Prompts

    prompts = Prompts.read(["bright", "dark/mute"])
    actual = features(planted(tmp_path), prompts).classifier
    expected = np.zeros((2, 16))
    expected[:, 0] = 1, -1
    np.testing.assert_allclose(actual.vectors, expected, atol=1e-6)
    with pytest.raises(InputError, match="at least two text vectors of length 1"):
        features(tmp_path, Prompts.read(["bright", "mute"]))


def test_timm_names_of_open_clip_are_supported(tmp_path):
    folder = write_folder(tmp_path, TIMM)
    text_features = features(folder, weights="random", tile=64)
    assert prepare_page(text_features, page(70, 130)).grid.shape == (3, 5, 9)
