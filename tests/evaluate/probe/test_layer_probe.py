import copy
import dataclasses
import json

import numpy as np
import pytest
import timm
import torch

import vispe
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, ShapeError
from vispe.evaluate.probe.feature_sources import black_image, feature_function, patch_pixels
from vispe.evaluate.probe.fit import channel_r2, channels_r2, fit_probe
from vispe.evaluate.probe.layer_probe import probe_layers
from vispe.evaluate.probe.positional import positional_probe
from vispe.evaluate.probe.regression_data import Fit
from vispe.evaluate.probe.splits import POSITIONS, Trials, follower, mixed
from vispe.evaluate.probe.targets import ramp


def rng(seed=0):
    return np.random.default_rng(seed)


def planted(blocks=4, block=2, channel=7, shape=(14, 11), width=24, target="lr", seed=0):
    """Noise after every block; one channel of one block holds a position."""
    generator = rng(seed)
    maps = [generator.standard_normal((*shape, width)) for _ in range(blocks)]
    maps[block][..., channel] += 12 * ramp(target, shape)[..., 0]
    return maps


@pytest.fixture(scope="module")
def learned():
    """A model of a non-square grid whose table of positions is large."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model("test_vit", img_size=(128, 176), num_classes=0).eval()
        position = torch.from_numpy(ramp("lr+ud", (8, 11))).float().flatten(0, 1) - 0.5
        with torch.no_grad():
            model.pos_embed.zero_()
            model.pos_embed[0, -88:] = 4 * position @ torch.randn(2, model.embed_dim)
    return model


def noise(n, h, w, seed=0):
    return torch.from_numpy(rng(seed).random((n, 3, h, w), dtype=np.float32)) - 0.5


@pytest.mark.slow
@pytest.mark.parametrize("target", ["lr", "ud", "diag", "radial"])
def test_a_planted_channel_is_detected_in_its_block_and_nowhere_else(target):
    actual = probe_layers([planted(target=target, seed=s) for s in range(3)], step=2)
    k = actual.targets.index(target)
    medians = np.median(actual.r2[:, k], axis=1)
    assert medians[2] > 0.4
    assert np.delete(medians, 2).max() < 0
    curves = np.array([curve[k] for curve in actual.channel_r2])
    assert actual.top_channels(2, target)[0] == 7
    assert curves[2, 7] > 0.75
    curves[2, 7] = -1
    assert curves.max() < 0.1
    assert np.median(actual.shuffled, axis=-1).max() < 0.05
    assert actual.grids == ((14, 11),) * 4
    assert actual.pixels is None


def test_layer_scores_are_those_of_the_probe_on_the_same_patches():
    maps = planted(shape=(9, 13))
    actual = probe_layers([maps], targets=("ud", "radial"), step=3, masks_per_image=2, generator=5)
    trials = Trials(("ud", "radial"), 3, 2).draw((9, 13), rng(5))
    assert len(trials) == 2  # without a cutoff both targets sample the whole grid
    for k, feats in enumerate(maps):
        for j, name in enumerate(("ud", "radial")):
            fits = [fit_probe(feats, t.mask, {"t": ramp(name, (9, 13)), "s": t.mixed[name]}) for t in trials]
            assert actual.r2[k, j, 0] == pytest.approx(np.mean([f["t"].r2_heldout for f in fits]))
            assert actual.shuffled[k, j, 0] == pytest.approx(np.mean([f["s"].r2_heldout for f in fits]))
            curves = [channel_r2(feats, t.mask, ramp(name, (9, 13)), held_out=True) for t in trials]
            np.testing.assert_allclose(actual.channel_r2[k][j], np.mean(curves, axis=0))


@pytest.mark.parametrize("held_out", [False, True])
@pytest.mark.parametrize("regressor", ["ridge", "linear"])
def test_one_channel_at_a_time_equals_fits_of_one_channel(regressor, held_out):
    feats = planted(blocks=3, shape=(8, 9), width=5, channel=3)[2]
    feats[..., 1] = 2.5  # constant
    mask = rng(1).random((8, 9)) < 0.3
    targets = {name: ramp(name, (8, 9)) for name in ("lr+ud", "radial")}
    curves = channels_r2(feats, mask, targets, Fit(regressor), held_out=held_out)
    for name, values in targets.items():
        for c in range(5):
            fit = fit_probe(feats[..., c : c + 1], mask, {"t": values}, Fit(regressor))["t"]
            assert curves[name][c] == pytest.approx(fit.r2_heldout if held_out else fit.r2, abs=1e-10)
    constant = channels_r2(feats[:1], np.arange(9)[None] % 2, {"ud": ramp("ud", (1, 9))}, held_out=held_out)
    assert np.isnan(constant["ud"]).all()


def test_blocks_may_have_grids_and_widths_of_their_own_but_all_images_the_same():
    maps = [planted(shape=(12, 10))[2], planted(shape=(6, 5), width=30)[2]]
    actual = probe_layers([maps, maps], targets=("lr",), step=2)
    assert actual.grids == ((12, 10), (6, 5))
    assert [c.shape for c in actual.channel_r2] == [(1, 24), (1, 30)]
    assert [actual.top_channels(k, n=1) for k in (0, 1)] == [[7], [7]]
    with pytest.raises(ShapeError, match=r"got \[24\] for image 1 after \[24, 30\]"):
        probe_layers([maps, maps[:1]], step=2)


def test_shuffling_moves_all_targets_equally_and_a_generator_aside_takes_nothing():
    ramps = {name: ramp(name, (5, 7)) for name in ("lr+ud", "lr", "raster")}
    shuffled = mixed(ramps, rng(3))
    order = np.rint(shuffled["raster"].ravel() * 35).astype(int)
    assert sorted(order) == list(range(35))
    assert not np.array_equal(order, np.arange(35))
    np.testing.assert_array_equal(shuffled["lr+ud"].reshape(35, 2), ramps["lr+ud"].reshape(35, 2)[order])
    np.testing.assert_array_equal(shuffled["lr"][..., 0], shuffled["lr+ud"][..., 0])
    one = rng(4)
    first = follower(one).random(3)
    np.testing.assert_array_equal(first, follower(rng(4)).random(3))
    np.testing.assert_array_equal(one.random(3), rng(4).random(3))


def test_the_shuffled_control_reads_nothing_where_position_is_plain():
    feats = [planted(shape=(20, 21), seed=s)[2] for s in range(4)]
    actual = positional_probe(feats, targets=("lr", "ud"), step=3)
    assert actual.headline > 0.4
    for row in actual.rows:
        assert row.shuffled.shape == (4, 6)
        assert np.median(row.shuffled) < 0.05
    stored = json.loads(json.dumps(actual.to_dict(), allow_nan=False))["rows"][0]
    np.testing.assert_allclose(stored["shuffled"]["per_image"], actual.rows[0].shuffled)
    np.testing.assert_allclose(stored["r2_heldout"]["per_image"], actual.rows[0].r2_heldout)
    leaky = dataclasses.replace(actual.rows[0], shuffled=np.full((4, 6), 0.4))
    unsound = dataclasses.replace(actual, rows=(leaky, *actual.rows[1:]))
    assert unsound.notes == ("Shuffled positions can be read too, so the scores are invalid.",)


def test_a_model_is_probed_block_by_block_on_a_non_square_grid(learned):
    images = noise(2, 128, 176)
    actual = probe_layers(learned, images, step=2)
    assert actual.r2.shape == actual.shuffled.shape == (6, 6, 2)
    assert actual.grids == ((8, 11),) * 6
    assert actual.curve.min() > 0.9
    assert actual.verdict.startswith(
        f"position can be read from block 0 on (held-out R² {actual.curve[0]:.2f})"
    )
    assert np.median(actual.pixels, axis=1).max() < 0.05
    assert np.median(actual.shuffled, axis=-1).max() < 0.05
    maps = [[m[0].permute(1, 2, 0) for m in VisionModel(learned).layers(i[None])] for i in images]
    single = probe_layers(maps, step=2)
    np.testing.assert_allclose(actual.r2, single.r2, atol=1e-6)
    np.testing.assert_allclose(actual.channel_r2, single.channel_r2, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("spec", ["none", "alibi2d"])
def test_a_table_of_positions_is_read_and_is_gone_after_conversion(learned, spec):
    images = noise(3, 128, 176)
    assert positional_probe(learned, images, step=2).headline > 0.8  # the final norm bends the ramps
    converted = vispe.convert(copy.deepcopy(learned), spec).eval()
    actual = probe_layers(converted, images, step=2)
    assert np.median(actual.r2, axis=-1).max() < 0.1
    assert actual.verdict.startswith("no linear position after any of 6 blocks: held-out R²")
    assert positional_probe(converted, images, step=2).headline < 0.1


def test_pixels_that_tell_the_position_are_said_to(learned):
    images = noise(2, 128, 176) + torch.linspace(0, 5, 176)
    actual = probe_layers(learned, images, targets=("lr",), step=2)
    assert np.median(actual.pixels[0]) > 0.5
    assert "The pixels alone reveal the position" in actual.notes[0]
    assert actual.table()[1][:2] == ["pixels", f"{np.median(actual.pixels[0]):.2f}"]


def test_patch_pixels_hold_every_pixel_of_the_patch():
    image = torch.arange(3 * 6 * 4.0).reshape(3, 6, 4)
    actual = patch_pixels(image, 2)
    assert actual.shape == (3, 2, 12)
    for row in range(3):
        for col in range(2):
            patch = image[:, 2 * row : 2 * row + 2, 2 * col : 2 * col + 2]
            assert torch.equal(actual[row, col], patch.flatten())


def test_functions_and_towers_of_open_clip_are_probed_as_models_are(learned):
    images = noise(2, 128, 176)
    one = positional_probe(learned, images, step=2)
    for source in (VisionModel(learned), lambda x: VisionModel(learned)(x)):
        two = positional_probe(source, images, step=2)
        np.testing.assert_allclose(one.rows[0].r2_heldout, two.rows[0].r2_heldout, atol=1e-5)
    pytest.importorskip("open_clip")
    from tests.hosts.open_clip.common import tiny_clip

    clip = tiny_clip().eval()
    h, w = clip.visual.image_size
    f = feature_function(clip)
    assert isinstance(f, VisionModel)
    actual = probe_layers(clip, noise(2, h, w), targets=("lr",), step=2)
    assert actual.r2.shape == (f.depth, 1, 2)
    assert actual.grids == ((h // f.patch_size, w // f.patch_size),) * f.depth
    for source in (clip, clip.visual):
        assert positional_probe(source, noise(1, h, w), step=2).grid == actual.grids[0]


def test_black_is_what_the_model_gets_for_black(learned):
    config = timm.data.resolve_model_data_config(learned)
    expected = -torch.tensor(config["mean"]) / torch.tensor(config["std"])
    torch.testing.assert_close(black_image(learned).flatten(), expected)
    torch.testing.assert_close(black_image(VisionModel(learned)).flatten(), expected)
    model = VisionModel(learned, mean=torch.full((3, 1, 1), 0.2), std=torch.full((3, 1, 1), 0.4))
    torch.testing.assert_close(black_image(model), torch.full((3, 1, 1), -0.5))
    assert black_image(lambda x: x) is None


def test_layers_as_json_and_markdown_hold_every_value(learned):
    actual = probe_layers(learned, noise(2, 128, 176), step=2)
    stored = json.loads(json.dumps(actual.to_dict(), allow_nan=False))
    for k in range(6):
        np.testing.assert_allclose(
            [stored["blocks"][k]["r2_heldout"][name] for name in POSITIONS], actual.r2[k], atol=1e-12
        )
        assert [len(stored["blocks"][k]["channel_r2"][name]) for name in POSITIONS] == [64] * 6
    assert list(stored["pixels"]) == list(POSITIONS)
    lines = actual.to_markdown().splitlines()
    assert len(lines) == 2 + 1 + 6
    assert len({len(line) for line in lines}) == 1


def test_verdicts_name_the_block(learned):
    maps = planted(blocks=5, block=3, channel=2, shape=(16, 16), width=8)
    actual = probe_layers([maps], targets=("lr",), step=2)
    assert actual.verdict.startswith(
        f"position can be read from block 3 on (held-out R² {actual.curve[3]:.2f})"
    )
    assert actual.verdict.endswith(f"{actual.curve[4]:.2f} after the last, block 4")
    flat = probe_layers([[np.ones((1, 30, 2))]], targets=("ud",), step=2)
    assert flat.verdict == "cannot be judged: ud is constant on a grid (1, 30)"


def test_errors(learned):
    with pytest.raises(ShapeError, match="no images, got an empty sequence"):
        probe_layers([])
    with pytest.raises(OptionError, match="got features and images"):
        probe_layers([planted()], noise(1, 32, 32))
    with pytest.raises(OptionError, match="needs images"):
        probe_layers(learned)
    with pytest.raises(OptionError, match="Did you mean 'radial'"):
        probe_layers([planted()], targets=("radia",))
    with pytest.raises(OptionError, match=r"targets must be positional, got \['lr', 'random'\]"):
        probe_layers([planted()], targets=("lr", "random"))
    with pytest.raises(OptionError, match="masks_per_image needs an integer above 0, got masks_per_image=0"):
        probe_layers([planted()], masks_per_image=0)
    with pytest.raises(ShapeError, match=r"step must be at most 4 for a 8x9 grid, got 9"):
        probe_layers([planted(shape=(8, 9))], step=9)
