import urllib.error

import numpy as np
import pytest
import timm
import torch

import vispe.backbones.hub as hub_module
from tests.cases import cases
from vispe.errors import InputError, OptionError, UnknownName
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.pixel_features import Features
from vispe.segment.features.token_basis import TokenBasis
from vispe.segment.features.token_features import TokenModel, token_maps

NAME = "test_vit"  # timm's tiny model for tests: patch 16, one class token


@pytest.fixture(scope="module")
def model():
    return TokenModel(NAME, weights="random", shifts=1)


def page(height, width, channels=1, seed=0):
    return np.random.default_rng(seed).random((height, width, channels), np.float32)


def test_random_weights_depend_on_the_seed_only(model):
    state = torch.get_rng_state()
    assert TokenModel(NAME, weights="random").fingerprint() == model.fingerprint()
    assert TokenModel(NAME, weights="random", seed=1).fingerprint() != model.fingerprint()
    assert torch.equal(state, torch.get_rng_state())


def test_tokens_are_the_normalised_patch_tokens_of_timm(model):
    grey = page(48, 80)
    with torch.random.fork_rng():
        torch.manual_seed(0)
        plain = timm.create_model(NAME, num_classes=0, dynamic_img_size=True).eval()
    mean, std = (torch.tensor(plain.pretrained_cfg[key]).view(1, 3, 1, 1) for key in ("mean", "std"))
    normalised = torch.from_numpy(grey).permute(2, 0, 1)[None].expand(1, 3, 48, 80)
    with torch.no_grad():
        expected = plain.forward_features((normalised - mean) / std)[:, plain.num_prefix_tokens :]
    actual = token_maps(model, grey, None)
    assert len(actual.maps) == 1
    np.testing.assert_allclose(actual.maps[0], expected.reshape(3, 5, -1).numpy(), atol=1e-5)


@cases("size", [(1, 1), (5, 40), (50, 37), (97, 130)])
@cases("tile", [None, 48])
def test_tiles_are_aligned_to_patches_and_cover_the_page(model, size, tile):
    actual = token_maps(model, page(*size), tile)
    coverage = np.zeros(size, int)
    actual.basis = basis = TokenBasis.fit(actual.maps, 8, 0)
    for number, region in enumerate(actual.regions):
        assert region.top % 16 == region.left % 16 == 0
        interior = actual.inside(number)
        assert actual.planes(number).shape == (len(basis.scale), *interior.shape)
        coverage[interior.slices] += 1
    assert (coverage > 0).all()
    assert bool(actual.notes) == (min(size) < 16)


def test_other_channel_counts_are_concatenated(model):
    two = page(32, 48, channels=2)
    actual = token_maps(model, two, None).maps[0]
    single = [token_maps(model, two[..., c : c + 1], None).maps[0] for c in range(2)]
    np.testing.assert_allclose(actual, np.concatenate(single, -1), atol=1e-5)
    width = single[0].shape[-1]
    assert token_maps(model, page(32, 48, channels=3), None).maps[0].shape == (2, 3, width)


def test_basis_is_standardised_with_fixed_signs(model):
    maps = token_maps(model, page(160, 240), None).maps
    basis = TokenBasis.fit(maps, 32, 0)
    actual = basis.project(maps[0]).reshape(-1, len(basis.scale))
    np.testing.assert_allclose(actual.mean(0), 0, atol=1e-3)
    np.testing.assert_allclose(actual.std(0, ddof=1), 1, atol=1e-2)
    largest = np.abs(basis.components).argmax(1)
    assert (basis.components[np.arange(len(largest)), largest] > 0).all()


def test_basis_is_fitted_to_a_sample_of_all_tokens(monkeypatch):
    monkeypatch.setattr("vispe.segment.features.token_basis._FIT_TOKENS", 30)
    rng = np.random.default_rng(0)
    maps = [rng.random((rows, 7, 5), np.float32) for rows in (6, 1, 9)]
    tokens = np.concatenate([m.reshape(-1, 5) for m in maps])
    indices = np.sort(np.random.default_rng(3).permutation(len(tokens))[:30])
    actual, expected = TokenBasis.fit(maps, 4, 3), TokenBasis.fit([tokens[indices][None]], 4, 3)
    for name, value in expected.tensors().items():
        np.testing.assert_array_equal(actual.tensors()[name], value)


@pytest.mark.slow
def test_labelled_pixels_have_the_features_of_the_best_piece():
    features = Features(FeatureConfig("both", model=NAME, weights="random", tile=48))
    grey, valid = page(70, 90), np.ones((70, 90), bool)
    valid[3, 4] = False
    features.fit([(grey, valid)])
    prepared = features.prepare(grey, valid)
    mask = np.random.default_rng(0).random((70, 90)) < 0.1
    actual = prepared.gather(mask)
    assert actual.shape == (mask.sum(), 26 + len(features.basis.scale))
    assert np.isfinite(actual).all()
    for y, x, row in list(zip(*np.nonzero(mask), actual, strict=True))[::50]:
        weights = {}
        for number, piece in enumerate(prepared.pieces):
            if piece.top <= y < piece.bottom and piece.left <= x < piece.right:
                weights[number] = prepared.weight(number)[y - piece.top, x - piece.left]
        best = max(weights, key=weights.get)
        piece = prepared.pieces[best]
        np.testing.assert_allclose(row, prepared.compute(best)[:, y - piece.top, x - piece.left], atol=1e-6)


def test_checkpoints_load_regardless_of_their_head(model, tmp_path):
    torch.manual_seed(3)
    source = timm.create_model(NAME, num_classes=10)
    torch.save(source.state_dict(), tmp_path / "own.pth")
    loaded = TokenModel(NAME, weights=str(tmp_path / "own.pth"))
    assert loaded.fingerprint() != model.fingerprint()
    grey = torch.rand(1, 3, 160, 160)
    with torch.no_grad():
        mean, std = (torch.tensor(source.pretrained_cfg[k]).view(1, 3, 1, 1) for k in ("mean", "std"))
        expected = source.eval().forward_features((grey - mean) / std)[:, source.num_prefix_tokens :]
    np.testing.assert_allclose(loaded(grey).reshape(expected.shape), expected, atol=1e-5)


def test_mismatched_checkpoints_raise(tmp_path):
    state = timm.create_model(NAME).state_dict()
    incomplete = {k: v for k, v in state.items() if k != "norm.bias"}
    torch.save(incomplete, tmp_path / "lost.pth")
    with pytest.raises(InputError, match=r"lost\.pth does not fit the model: it lacks weights norm\.bias"):
        TokenModel(NAME, weights=str(tmp_path / "lost.pth"))
    torch.save({**state, "strange.weight": torch.ones(1)}, tmp_path / "more.pth")
    with pytest.raises(InputError, match=r"has the unexpected weights strange\.weight"):
        TokenModel(NAME, weights=str(tmp_path / "more.pth"))
    (tmp_path / "text.pth").write_text("no checkpoint")
    with pytest.raises(InputError, match=r"text\.pth does not fit the model"):
        TokenModel(NAME, weights=str(tmp_path / "text.pth"))
    with pytest.raises(InputError, match=r"weights must be a checkpoint file.* got gone\.pth"):
        TokenModel(NAME, weights="gone.pth")


def test_unknown_models_raise_with_a_suggestion():
    with pytest.raises(UnknownName, match=r"timm has no model 'vit_smal_patch16_224'.*vit_small_patch16_224"):
        TokenModel("vit_smal_patch16_224")


def test_missing_weights_without_network_raise_immediately(monkeypatch):
    monkeypatch.setattr("vispe.backbones.timm.weights_on_disk", lambda name: None)

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)  # independent of the environment

    def unreachable(*_, timeout):
        assert timeout <= 5
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr(hub_module.urllib.request, "urlopen", unreachable)
    with pytest.raises(InputError, match=r"weights of vit_tiny_patch16_224 are not on this disk.*no route"):
        TokenModel("vit_tiny_patch16_224")


def test_convolutional_networks_give_tokens():
    actual = token_maps(TokenModel("test_resnet", weights="random"), page(70, 50), None)
    assert actual.regions[0].shape == (96, 64)
    assert actual.maps[0].shape[:2] == (3, 2)


def test_weights_changed_since_training_raise():
    config = FeatureConfig("tokens", model=NAME, weights="random", fingerprint="0" * 64)
    with pytest.raises(InputError, match="differ from those used in training"):
        Features(config)


def test_options_without_effect_raise():
    with pytest.raises(OptionError, match=r"model='vit_tiny_patch16_224' has no effect on features=filters"):
        FeatureConfig("filters", model="vit_tiny_patch16_224")
    with pytest.raises(OptionError, match="features='tokens' needs a model"):
        FeatureConfig("tokens")
    with pytest.raises(OptionError, match="kind must be one of filters, tokens, both, got 'filtres'"):
        FeatureConfig("filtres")
    with pytest.raises(OptionError, match="tile needs an integer of 16 or more, got tile=3"):
        FeatureConfig(tile=3)
    with pytest.raises(OptionError, match="device='warp' is not available"):
        Features(FeatureConfig(), device="warp")
