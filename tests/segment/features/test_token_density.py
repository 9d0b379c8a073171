"""Denser tokens than adjacent patches: overlapping patches, shifted passes, and concatenated blocks."""

import numpy as np
import pytest
import timm
import torch

from tests.cases import cases
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, UnsupportedCombination, UnsupportedHost
from vispe.segment.features import token_features
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.pixel_features import Features
from vispe.segment.features.token_basis import TokenBasis
from vispe.segment.features.token_features import TokenModel, token_maps

NAME = "test_vit"  # timm's tiny model for tests: patch 16, 6 blocks, one class token
BIASED = "alibi2d.local(slopes=geometric)"


def page(height, width, channels=1, seed=0):
    return np.random.default_rng(seed).random((height, width, channels), np.float32)


def without_attention(model):
    """Disable attention: tokens depend only on their patch and position."""
    for block in model._model.blocks:
        torch.nn.init.zeros_(block.attn.proj.weight)
    return model


def test_stride_of_one_patch_equals_the_default():
    image = torch.rand(1, 3, 48, 80)
    plain = TokenModel(NAME, weights="random", shifts=1)
    explicit = TokenModel(NAME, weights="random", stride=16, shifts=1, layers=(-1,))
    assert plain.fingerprint() == explicit.fingerprint()
    assert torch.equal(plain(image), explicit(image))
    grey = page(50, 70)
    for tile in (None, 48):
        first, second = (token_maps(model, grey, tile) for model in (plain, explicit))
        assert first.regions == second.regions
        assert first.offset == second.offset
        for a, b in zip(first.maps, second.maps, strict=True):
            np.testing.assert_array_equal(a, b)


def test_default_is_two_shifts_per_axis():
    """Default of synthetic tasks; one pass for tokens at an odd distance in pixels, and for convolutional models."""
    default, explicit = (TokenModel(NAME, weights="random", shifts=shifts) for shifts in (None, 2))
    for a, b in zip(
        *(token_maps(model, page(50, 70), None).maps for model in (default, explicit)), strict=True
    ):
        np.testing.assert_array_equal(a, b)
    assert (default.shifts, default.pitch) == (2, 8)
    assert TokenModel(NAME, weights="random", stride=1).shifts == 1
    assert TokenModel("test_resnet", weights="random").shifts == 1
    assert Features(FeatureConfig("tokens", model=NAME, weights="random")).config.token_shifts == 2
    assert Features(FeatureConfig("tokens", model="vispe_micro")).config.token_shifts is None


@pytest.mark.slow
@pytest.mark.parametrize("pos_embed", [None, "none", BIASED, "rope_axial"])
@pytest.mark.parametrize("stride", [8, 4])
def test_tokens_without_attention_are_independent_of_the_stride(pos_embed, stride):
    plain, dense = (
        without_attention(TokenModel(NAME, weights="random", pos_embed=pos_embed, stride=s))
        for s in (None, stride)
    )
    # the grid of the model, a larger and a smaller one
    for side in ((160, 160), (192, 160), (64, 96)):
        image = torch.rand(1, 3, *side)
        actual, expected = dense(image), plain(image)
        step = 16 // stride
        assert actual.shape[1:3] == tuple((s - 16) // stride + 1 for s in side)
        torch.testing.assert_close(actual[:, ::step, ::step], expected, atol=2e-5, rtol=1e-5)


def test_constant_pages_have_constant_tokens_on_the_torus():
    dense = TokenModel(NAME, weights="random", pos_embed="alibi2d", stride=8)
    actual = dense(torch.full((1, 3, 80, 96), 0.3))
    assert actual.std(dim=(1, 2)).max() < 1e-5


@cases(("stride", "shifts"), [(16, 2), (8, 1), (8, 2), (16, 4)])
def test_tokens_are_at_the_centres_of_their_patches(stride, shifts):
    """On a linear ramp, the mean of a patch is the position of its centre."""
    model = TokenModel(NAME, weights="random", pos_embed="none", stride=stride, shifts=shifts)
    mean, std = model._features.mean, model._features.std

    def capture(image):
        normalised = (image - mean) / std
        return torch.nn.functional.avg_pool2d(normalised * std + mean, 16, stride).permute(0, 2, 3, 1)

    model._features = type("Middle", (), {"mean": mean, "std": std, "__call__": None})()
    model.__class__ = type("Stub", (TokenModel,), {"__call__": lambda self, image: capture(image)})
    y, x = np.meshgrid(np.arange(70), np.arange(90), indexing="ij")
    grey = np.stack([y, x, y], -1).astype(np.float32) / 100
    for tile in (None, 48):
        maps = token_maps(model, grey, tile)
        maps.basis = TokenBasis(*(np.array(a, np.float32) for a in ([0, 0, 0], np.eye(3), [1, 1, 1])))
        pitch = stride // shifts
        for number, region in enumerate(maps.regions):
            assert maps.maps[number].shape[:2] == tuple((s - 16) // pitch + 1 for s in region.shape)
            interior = maps.inside(number)
            actual = maps.planes(number)
            # without the border of the page, where reflection bends the ramp
            top, left = (
                max(16 - a, 16 - maps.crop(number)[i].start)
                for i, a in enumerate((interior.top, interior.left))
            )
            top, left = max(top, 0), max(left, 0)
            rows, columns = interior.shape
            down = rows - max(16 - (70 - interior.bottom), 16 - (region.shape[0] - maps.crop(number)[0].stop))
            right = columns - max(
                16 - (90 - interior.right), 16 - (region.shape[1] - maps.crop(number)[1].stop)
            )
            inner = actual[:, top : min(down, rows), left : min(right, columns)]
            expected = grey[interior.slices].transpose(2, 0, 1)[
                :, top : min(down, rows), left : min(right, columns)
            ]
            assert inner.size
            np.testing.assert_allclose(inner, expected, atol=1e-5)
            at_y, at_x = (a.ravel() for a in np.mgrid[top : min(down, rows), left : min(right, columns)])
            selected = maps.at(number, at_y, at_x)
            np.testing.assert_allclose(selected, actual[:, at_y, at_x].T, atol=1e-6)


def test_shifted_passes_interleave_maps_of_shifted_pages():
    model = TokenModel(NAME, weights="random", shifts=2)
    padded = torch.rand(1, 3, 48 + 8, 64 + 8)
    actual = model.shifted_passes(padded)
    assert actual.shape[1:3] == (6, 8)
    for row in range(2):
        for column in range(2):
            crop = padded[..., 8 * row : 8 * row + 48, 8 * column : 8 * column + 64]
            assert torch.equal(actual[:, row::2, column::2], model(crop))


@cases(("name", "size"), [(NAME, (5, 40)), (NAME, (1, 1)), ("test_resnet", (70, 50))])
def test_shifted_passes_support_small_pages_and_resnets(name, size):
    model = TokenModel(name, weights="random", shifts=2)
    maps = token_maps(model, page(*size), None)
    maps.basis = TokenBasis.fit(maps.maps, 4, 0)
    coverage = np.zeros(size, int)
    for number in range(len(maps.regions)):
        interior = maps.inside(number)
        assert maps.planes(number).shape == (len(maps.basis.scale), *interior.shape)
        coverage[interior.slices] += 1
    assert (coverage > 0).all()


def test_shifted_passes_support_models_of_fixed_size():
    kwargs = {"weights": "random", "shifts": 2}
    model = TokenModel(NAME, **kwargs)
    model.flexible, model.size = False, (32, 32)
    maps = token_maps(model, page(50, 70), None)
    assert {region.shape for region in maps.regions} == {(40, 40)}
    assert {m.shape[:2] for m in maps.maps} == {(4, 4)}


def test_blocks_are_concatenated_after_the_final_norm():
    image = torch.rand(1, 3, 48, 64)
    concatenated = TokenModel(NAME, weights="random", layers=(1, -1))
    (first, last) = (TokenModel(NAME, weights="random", layers=(i,)) for i in (1, 5))
    assert torch.equal(concatenated(image), torch.cat([first(image), last(image)], -1))
    assert torch.equal(last(image), TokenModel(NAME, weights="random")(image))
    with torch.no_grad():
        normalised = (image - concatenated._features.mean) / concatenated._features.std
        x = first._model.patch_embed(normalised)
        x = first._model._pos_embed(x)
        for block in first._model.blocks[:2]:
            x = block(x)
        expected = first._model.norm(x)[:, 1:].unflatten(1, (3, 4))
    torch.testing.assert_close(first(image), expected, atol=1e-6, rtol=1e-5)


def test_pages_are_tiled_by_their_number_of_tokens(monkeypatch):
    monkeypatch.setattr(token_features, "MAX_TOKENS", 36)
    plain, dense = (TokenModel(NAME, weights="random", stride=s, shifts=1) for s in (None, 4))
    grey = page(96, 96)
    assert [r.shape for r in token_maps(plain, grey, None).regions] == [(96, 96)]
    actual = token_maps(dense, grey, None)
    assert len(actual.regions) > 1
    assert all(m.shape[0] * m.shape[1] <= 36 for m in actual.maps)
    # out of memory halves this tile
    features = Features(FeatureConfig("tokens", model=NAME, weights="random", token_stride=8))
    assert features._model.tile == 48


def test_invalid_options_raise():
    with pytest.raises(OptionError, match=r"token_stride=7 has no effect on features=filters. Use"):
        FeatureConfig(token_stride=7)
    with pytest.raises(OptionError, match=r"token_shifts=2 has no effect on vispe_micro, .*a timm model"):
        FeatureConfig("both", model="vispe_micro", token_shifts=2)
    with pytest.raises(OptionError, match=r"layers=\(3,\) has no effect on vispe_micro"):
        FeatureConfig("tokens", model="vispe_micro", layers=(3,))
    for invalid in ({"token_stride": 0}, {"token_shifts": 0}, {"token_shifts": 1.5}, {"token_stride": True}):
        with pytest.raises(OptionError, match="needs an integer above 0"):
            FeatureConfig("tokens", model=NAME, **invalid)
    for layers in ((), (3, 3)):
        with pytest.raises(OptionError, match="must be a non-empty list of distinct blocks"):
            FeatureConfig("tokens", model=NAME, layers=layers)
    kwargs = {"weights": "random"}
    with pytest.raises(OptionError, match="token_stride must divide the patch size of 16 x 16 px, got 7 px"):
        TokenModel(NAME, **kwargs, stride=7)
    with pytest.raises(OptionError, match=r"token_shifts=3 does not divide the token stride of 16 px"):
        TokenModel(NAME, **kwargs, shifts=3)
    with pytest.raises(OptionError, match="layer must be one of the 6 blocks of the model, got 6"):
        TokenModel(NAME, **kwargs, layers=(6,))
    with pytest.raises(OptionError, match=r"each of 6 blocks at most once, got 5, -1"):
        TokenModel(NAME, **kwargs, layers=(5, -1))
    with pytest.raises(UnsupportedCombination, match="depends on the spacing of tokens, got rpb"):
        TokenModel(NAME, **kwargs, pos_embed="rpb", stride=8)
    with pytest.raises(UnsupportedHost, match="patch embedding by one convolution, got ResNet"):
        TokenModel("test_resnet", **kwargs, stride=8)
    with pytest.raises(UnsupportedHost, match="maps of all blocks must have one size"):
        TokenModel("test_resnet", **kwargs, layers=(1,))
    with pytest.raises(OptionError, match=r"token_stride=8 needs a model for images of any size"):
        VisionModel(timm.create_model(NAME, dynamic_img_size=False).eval(), stride=8)
