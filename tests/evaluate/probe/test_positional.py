import dataclasses
import json
import urllib.error
import warnings

import numpy as np
import pytest
import torch
from sklearn.linear_model import LinearRegression, Ridge
from sklearn.metrics import r2_score as sklearn_r2
from sklearn.preprocessing import StandardScaler

from vispe.backbones.timm import load_backbone, patch_features
from vispe.errors import InputError, OptionError, ShapeError, UnknownName, UnsupportedHost
from vispe.evaluate.probe.fit import channel_r2, fit_probe, r2_score
from vispe.evaluate.probe.positional import positional_probe
from vispe.evaluate.probe.regression_data import Fit
from vispe.evaluate.probe.targets import TARGETS, n_random_samples, ramp, sample_mask, sample_region

SMALL = {"weights": "random", "img_size": 64}


def rng(seed=0):
    return np.random.default_rng(seed)


def features(h, w, c, strength=1.0, seed=0):
    """Noise plus a few channels that hold the position."""
    generator = rng(seed)
    position = ramp("lr+ud", (h, w)) @ generator.standard_normal((2, c))
    return strength * position + generator.standard_normal((h, w, c))


def test_ramps_on_a_small_grid_are_what_the_docstring_says():
    assert ramp("lr", (2, 3))[..., 0].tolist() == [[0, 0.5, 1], [0, 0.5, 1]]
    assert ramp("ud", (3, 2))[..., 0].tolist() == [[0, 0], [0.5, 0.5], [1, 1]]
    assert ramp("diag", (2, 3))[..., 0].tolist() == [[0, 0.25, 0.5], [0.25, 0.5, 0.75]]
    assert ramp("raster", (2, 3))[..., 0].tolist() == [[0, 1 / 6, 2 / 6], [3 / 6, 4 / 6, 5 / 6]]
    np.testing.assert_allclose(ramp("radial", (2, 2))[..., 0], [[0, 1 - 0.5**0.5], [1 - 0.5**0.5, 1]])
    assert ramp("lr+ud", (4, 5)).shape == (4, 5, 2)


@pytest.mark.parametrize("shape", [(1, 1), (1, 5), (7, 1), (6, 11)])
@pytest.mark.parametrize("target", TARGETS)
def test_every_ramp_is_finite_and_within_0_and_1_on_every_grid(target, shape):
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        values = ramp(target, shape, rng())
    assert values.shape == (*shape, 2 if target == "lr+ud" else 1)
    assert ((values >= 0) & (values <= 1)).all()


def test_random_target_needs_and_uses_the_generator():
    with pytest.raises(OptionError, match="'random' needs a generator, got None"):
        ramp("random", (3, 3))
    np.testing.assert_array_equal(ramp("random", (3, 4), rng(5)), ramp("random", (3, 4), rng(5)))
    assert not np.array_equal(ramp("random", (3, 4), rng(5)), ramp("random", (3, 4), rng(6)))


def test_unknown_target_suggests_the_right_one():
    with pytest.raises(OptionError, match=r"unknown target, got 'radail'. Did you mean 'radial'"):
        ramp("radail", (3, 3))


def test_empty_grid_is_refused():
    with pytest.raises(ShapeError, match=r"at least 1x1 patches, got \(0, 3\)"):
        ramp("lr", (0, 3))


def test_regions_and_grid_masks():
    assert sample_region("lr", (10, 12), 0.7) == (0, 7, 0, 8)
    assert sample_region("radial", (10, 12), 0.7) == (2, 8, 2, 10)
    mask = sample_mask("lr", (10, 12), step=3, cutoff=0.7, random=False)
    assert np.argwhere(mask).tolist() == [[y, x] for y in (0, 3, 6) for x in (0, 3, 6)]
    mask = sample_mask("radial", (10, 12), step=3, cutoff=0.7, random=False)
    assert np.argwhere(mask).tolist() == [[y, x] for y in (2, 5) for x in (2, 5, 8)]
    with pytest.raises(OptionError, match=r"got cutoff=1.5"):
        sample_region("lr", (4, 4), 1.5)
    with pytest.raises(OptionError, match="step needs an integer above 0, got step=0"):
        sample_mask("lr", (4, 4), step=0, random=False)


@pytest.mark.parametrize("target", ["lr", "radial"])
def test_random_mask_takes_as_many_patches_as_stated_inside_the_region(target):
    region = y0, y1, x0, x1 = sample_region(target, (13, 17), 0.8)
    mask = sample_mask(target, (13, 17), step=3, cutoff=0.8, generator=rng())
    assert mask.sum() == n_random_samples(region, 3) == (y1 - y0) * (x1 - x0) // 9
    assert mask[y0:y1, x0:x1].sum() == mask.sum()
    second = sample_mask(target, (13, 17), step=3, cutoff=0.8, generator=rng())
    np.testing.assert_array_equal(mask, second)
    with pytest.raises(OptionError, match="random mask needs a generator"):
        sample_mask(target, (13, 17))


def by_sklearn(feats, mask, target, regressor, alpha, standardize, fit_intercept):
    x, y = feats.reshape(-1, feats.shape[-1]), target.reshape(-1, target.shape[-1])
    chosen = mask.reshape(-1)
    if standardize:
        x = StandardScaler().fit(x[chosen]).transform(x)
    model = Ridge(alpha, fit_intercept=fit_intercept)
    if regressor == "linear":
        model = LinearRegression(fit_intercept=fit_intercept)
    prediction = model.fit(x[chosen], y[chosen]).predict(x).reshape(len(x), -1)
    return prediction, y, chosen


@pytest.mark.slow
@pytest.mark.parametrize("channels", [3, 60])
@pytest.mark.parametrize("regressor", ["ridge", "linear"])
@pytest.mark.parametrize("standardize", [True, False])
@pytest.mark.parametrize("fit_intercept", [True, False])
def test_fit_equals_scikit_learn(channels, regressor, standardize, fit_intercept):
    feats = features(9, 12, channels) + 0.5
    mask = sample_mask("lr", (9, 12), step=2, generator=rng(1))
    options = {
        "regressor": regressor,
        "standardize": standardize,
        "fit_intercept": fit_intercept,
        "alpha": 0.7,
    }
    targets = {name: ramp(name, (9, 12), rng(2)) for name in TARGETS}
    fits = fit_probe(feats, mask, targets, Fit(**options))
    for name, target in targets.items():
        prediction, y, chosen = by_sklearn(feats, mask, target, **options)
        np.testing.assert_allclose(fits[name].prediction.reshape(prediction.shape), prediction, atol=1e-7)
        assert fits[name].r2 == pytest.approx(sklearn_r2(y, prediction), rel=1e-6)
        assert fits[name].r2_heldout == pytest.approx(sklearn_r2(y[~chosen], prediction[~chosen]), rel=1e-6)
        single = channel_r2(feats, mask, target, Fit(**options))
        heldout = channel_r2(feats, mask, target, Fit(**options), held_out=True)
        for c in (0, channels - 1):
            one, y, chosen = by_sklearn(feats[..., c : c + 1], mask, target, **options)
            assert single[c] == pytest.approx(sklearn_r2(y, one), abs=1e-9)
            assert heldout[c] == pytest.approx(sklearn_r2(y[~chosen], one[~chosen]), abs=1e-9)


def test_targets_share_one_factorisation_and_do_not_change_each_other():
    feats, mask = features(8, 9, 30), sample_mask("lr", (8, 9), step=2, generator=rng(3))
    together = fit_probe(feats, mask, {n: ramp(n, (8, 9)) for n in ("lr", "ud", "radial")})
    for name, fit in together.items():
        single = fit_probe(feats, mask, {name: ramp(name, (8, 9))})[name]
        np.testing.assert_allclose(single.prediction, fit.prediction, atol=1e-12)


def test_scaler_sees_sampled_patches_only():
    feats, mask = features(8, 8, 4), sample_mask("lr", (8, 8), step=2, generator=rng(0))
    other = feats.copy()
    other[~mask] *= 50  # patches that the fit must not know
    targets = {"lr": ramp("lr", (8, 8))}
    first, second = (fit_probe(f, mask, targets)["lr"].prediction for f in (feats, other))
    np.testing.assert_allclose(first[mask], second[mask], atol=1e-12)


def test_channels_that_are_constant_where_sampled_are_not_blown_up():
    feats = features(8, 8, 4).astype(np.float32)
    mask = sample_mask("lr", (8, 8), step=2, generator=rng(0))
    feats[..., 2] = np.where(mask, np.float32(0.1), np.float32(0.3))
    fit = fit_probe(feats, mask, {"lr": ramp("lr", (8, 8))})["lr"]
    without = fit_probe(np.delete(feats, 2, 2), mask, {"lr": ramp("lr", (8, 8))})["lr"]
    np.testing.assert_allclose(fit.prediction, without.prediction, atol=1e-10)
    assert np.isfinite(channel_r2(feats, mask, ramp("lr", (8, 8)), Fit("linear"))).all()


def test_nan_counts_as_zero_and_is_reported_or_refused():
    feats, mask = features(6, 7, 5), sample_mask("lr", (6, 7), step=2, generator=rng(0))
    feats[1, 2, 3] = feats[4, 4, 0] = np.nan
    zeros, targets = np.nan_to_num(feats), {"ud": ramp("ud", (6, 7))}
    fit = fit_probe(feats, mask, targets)["ud"]
    assert fit.n_nan == 2
    np.testing.assert_array_equal(fit.prediction, fit_probe(zeros, mask, targets)["ud"].prediction)
    with pytest.raises(InputError, match="got 2 NaN"):
        fit_probe(feats, mask, targets, Fit(nan_to_zero=False))
    feats[0, 0, 0] = np.inf
    with pytest.raises(InputError, match="1 infinite value"):
        fit_probe(feats, mask, targets)


def test_wrong_shapes_and_options_are_named():
    feats, mask, target = features(6, 7, 5), np.ones((6, 7)), {"ud": ramp("ud", (6, 7))}
    with pytest.raises(ShapeError, match=r"got \(6, 7, 5\) and \(7, 6\)"):
        fit_probe(feats, mask.T, target)
    with pytest.raises(ShapeError, match="samples no patch, got a 6x7 grid"):
        fit_probe(feats, 0 * mask, target)
    with pytest.raises(ShapeError, match=r"'ud' must have shape \(6, 7, 'n'\)"):
        fit_probe(feats, mask, {"ud": ramp("ud", (7, 6))})
    with pytest.raises(OptionError, match="regressor must be one of ridge, linear, got 'mlp'"):
        fit_probe(feats, mask, target, Fit("mlp"))
    with pytest.raises(OptionError, match="alpha needs a number of 0 or more, got alpha=-1"):
        channel_r2(feats, mask, target["ud"], Fit(alpha=-1))


def test_r2_is_not_clipped_and_nan_for_constant_targets():
    y = np.arange(4.0)[:, None]
    assert r2_score(y, y) == 1
    assert r2_score(y, 100 - y) < -1000
    assert np.isnan(r2_score(np.ones((4, 1)), y))
    assert np.isnan(r2_score(y[:0], y[:0]))


@pytest.mark.parametrize("shape", [(1, 1), (1, 6), (6, 1)])
def test_degenerate_grids_give_numbers_or_nan_without_warnings(shape):
    feats, mask = features(*shape, 4), np.ones(shape)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        fits = fit_probe(feats, mask, {n: ramp(n, shape, rng()) for n in TARGETS})
        curve = channel_r2(feats, mask, ramp("lr+ud", shape))
    assert np.isnan(fits["lr+ud"].r2)
    assert np.isnan(curve).all()
    assert all(np.isnan(fit.r2_heldout) for fit in fits.values())  # every patch was sampled
    assert all(np.isfinite(fit.prediction).all() for fit in fits.values())


def test_float_types_and_tensors_agree():
    feats, mask = features(7, 6, 8).astype(np.float32), sample_mask("lr", (7, 6), step=2, generator=rng(0))
    target = {"lr": ramp("lr", (7, 6))}
    one = fit_probe(feats, mask, target)["lr"].prediction
    two = fit_probe(torch.tensor(feats, requires_grad=True), torch.tensor(mask), target)["lr"].prediction
    np.testing.assert_array_equal(one, two)
    half = fit_probe(torch.tensor(feats).bfloat16(), mask, target)["lr"].prediction
    assert np.isfinite(half).all()


def test_probe_tells_features_with_position_from_noise():
    strong = positional_probe([features(20, 21, 64, strength=4, seed=s) for s in range(3)])
    noise = positional_probe([features(20, 21, 64, strength=0, seed=s) for s in range(3)])
    assert strong.headline > 0.8
    assert strong.verdict == f"position can be read: held-out R² {strong.headline:.2f}"
    assert noise.headline < 0.05
    assert noise.verdict.startswith("no linear position: held-out R²")
    for result in (strong, noise):
        assert [row.target for row in result.rows] == list(TARGETS)
        assert result.rows[-1].target == "random"
        assert np.median(result.rows[-1].r2_heldout) < 0.05
        assert result.rows[0].r2.shape == (3, 6)
        assert result.n_samples == 20 * 21 // 36
    assert (strong.rows[0].r2 != strong.rows[0].r2_heldout).all()


def test_probe_is_reproducible_and_leaves_global_random_states_alone():
    feats = features(12, 13, 16)[None]
    np.random.seed(1)  # noqa: NPY002  the global state is what is tested
    torch.manual_seed(1)
    before = np.random.get_state()[1].copy(), torch.get_rng_state()  # noqa: NPY002
    one, two, other = (positional_probe(feats, step=3, generator=g) for g in (7, rng(7), 8))
    np.testing.assert_array_equal(before[0], np.random.get_state()[1])  # noqa: NPY002
    assert torch.equal(before[1], torch.get_rng_state())
    assert one.to_dict() == two.to_dict()
    assert one.to_dict() != other.to_dict()


def test_top_channels_are_the_ones_that_hold_position():
    feats = features(20, 20, 40, strength=0)
    feats[..., 31] += 9 * ramp("lr", (20, 20))[..., 0]
    feats[..., 4] += 6 * ramp("lr", (20, 20))[..., 0]
    result = positional_probe(feats[None], targets=["lr"])
    assert result.top_channels(2) == [31, 4]
    assert result.channel_r2.shape == (40,)


def test_report_is_json_and_markdown():
    feats = features(14, 12, 10, strength=3)[None]
    feats[0, 3, 3, 3] = np.nan
    result = positional_probe(feats, targets=("ud", "random"), step=3)
    report = json.loads(json.dumps(result.to_dict(), allow_nan=False))
    assert report["n_nan"] == 1
    assert report["settings"]["step"] == 3
    assert report["rows"][0]["r2_heldout"]["median"] == pytest.approx(result.headline)
    assert [row["target"] for row in report["rows"]] == ["ud", "random"]
    lines = result.to_markdown().splitlines()
    assert len({len(line) for line in lines}) == 1
    assert lines[2].split("|")[1].strip() == "ud"
    assert f"{result.rows[0].r2_heldout.mean():.3f}" in lines[2]
    assert "1 NaN feature values were replaced by 0." in result.notes


def test_constant_target_has_no_verdict():
    result = positional_probe(features(1, 40, 3)[None], targets=["ud", "lr"], step=2)
    assert result.verdict == "cannot be judged: ud is constant on a 1x40 grid"
    assert json.loads(json.dumps(result.to_dict(), allow_nan=False))["rows"][0]["r2"]["mean"] is None


def test_few_samples_are_noted_and_none_refused():
    assert "Only 2 training patches" in positional_probe(features(9, 9, 3)[None]).notes[0]
    with pytest.raises(ShapeError, match=r"step must be at most 2 for a 4x5 grid, got 6"):
        positional_probe(features(4, 5, 3)[None])
    with pytest.raises(ShapeError, match=r"step must be at most 2 for a 4x4 grid, got 3"):
        positional_probe(features(4, 4, 3)[None], step=3)
    assert positional_probe(features(4, 5, 3)[None], step=2).n_samples == 5


def test_a_probe_that_reads_noise_is_called_unsound():
    result = positional_probe(features(14, 14, 3)[None], step=3)
    assert result.notes == ()
    random = dataclasses.replace(result.rows[-1], r2_heldout=np.full((1, 6), 0.4))
    unsound = dataclasses.replace(result, rows=(*result.rows[:-1], random))
    assert unsound.notes == ("Random noise can be predicted too, so the scores are invalid.",)


def test_grid_mask_with_cutoff_groups_targets_by_region():
    feats = features(15, 15, 6, strength=3)[None]
    options = {"step": 3, "cutoff": 0.6, "random_mask": False}
    result = positional_probe(feats, targets=("lr", "radial"), **options)
    assert result.rows[0].r2.shape == (1, 1)
    for row in result.rows[:2]:
        mask = sample_mask(row.target, (15, 15), step=3, cutoff=0.6, random=False)
        fit = fit_probe(feats[0], mask, {"t": ramp(row.target, (15, 15))})["t"]
        assert row.r2[0, 0] == pytest.approx(fit.r2)
        assert row.r2_heldout[0, 0] == pytest.approx(fit.r2_heldout)


def test_errors():
    with pytest.raises(ShapeError, match="no images, got an empty sequence"):
        positional_probe([])
    with pytest.raises(OptionError, match="got features and images"):
        positional_probe(features(9, 9, 3)[None], torch.zeros(1, 3, 8, 8))
    with pytest.raises(OptionError, match="masks_per_image needs an integer above 0, got masks_per_image=0"):
        positional_probe(features(9, 9, 3)[None], masks_per_image=0)
    with pytest.raises(OptionError, match="Did you mean 'raster'"):
        positional_probe(features(9, 9, 3)[None], targets=["rastr"])
    with pytest.raises(ShapeError, match="must have equal channels"):
        positional_probe([features(9, 9, 3), features(9, 9, 4)])


def test_images_may_have_different_grids():
    result = positional_probe([features(9, 12, 3), features(13, 8, 3)], step=3)
    assert result.n_images == 2
    assert result.grid == (9, 12)


@pytest.fixture(scope="module")
def model():
    return load_backbone("test_vit", **SMALL)


def test_patch_features_of_a_model_leave_out_the_class_token(model):
    images = torch.from_numpy(rng().random((2, 3, 64, 64), np.float32))
    maps = patch_features(model, images)
    assert maps.shape == (2, 4, 4, 64)
    tokens = model.forward_features(images)[:, 1:].detach()
    torch.testing.assert_close(maps.flatten(1, 2), tokens)


def test_probe_of_a_model_equals_probe_of_its_features(model):
    images = torch.from_numpy(rng().random((2, 3, 64, 64), np.float32))
    one = positional_probe(model, images, step=2)
    two = positional_probe(patch_features(model, images), step=2)
    for a, b in zip(one.rows, two.rows, strict=True):
        np.testing.assert_allclose(a.r2_heldout, b.r2_heldout, atol=1e-3)
    with pytest.raises(OptionError, match="needs images"):
        positional_probe(model)


def test_models_that_cannot_be_used_are_named(model):
    with pytest.raises(UnsupportedHost, match="must have forward_intermediates, got Linear"):
        patch_features(torch.nn.Linear(2, 2), torch.zeros(1, 3, 64, 64))
    model.train()
    with pytest.raises(OptionError, match="training mode"):
        patch_features(model, torch.zeros(1, 3, 64, 64))
    model.eval()


def test_random_weights_follow_the_seed_and_not_the_global_state():
    torch.manual_seed(3)
    before = torch.get_rng_state()
    one, two, other = (load_backbone("test_vit", **SMALL, seed=s) for s in (0, 0, 1))
    assert torch.equal(before, torch.get_rng_state())
    assert torch.equal(one.patch_embed.proj.weight, two.patch_embed.proj.weight)
    assert not torch.equal(one.patch_embed.proj.weight, other.patch_embed.proj.weight)


def test_checkpoint_files_load_strictly_without_their_classifier(model, tmp_path):
    import timm

    full = timm.create_model("test_vit", img_size=64, num_classes=7)
    torch.save(full.state_dict(), tmp_path / "full.pth")
    loaded = load_backbone("test_vit", weights=str(tmp_path / "full.pth"), img_size=64)
    torch.testing.assert_close(
        loaded.state_dict(), {k: v for k, v in full.state_dict().items() if "head" not in k}
    )
    state = full.state_dict()
    state.pop("pos_embed")
    torch.save(state, tmp_path / "part.pth")
    with pytest.raises(
        InputError, match=r"part.pth does not fit the model: it lacks weights pos_embed.* test_vit"
    ):
        load_backbone("test_vit", weights=str(tmp_path / "part.pth"), img_size=64)


def test_wrong_model_names_and_weights_are_explained(tmp_path):
    with pytest.raises(
        UnknownName, match=r"no model 'vit_tiny_patch61_224'.*Did you mean 'vit_tiny_patch16_224'"
    ):
        load_backbone("vit_tiny_patch61_224")
    with pytest.raises(UnknownName, match=r"no weights 'augreg' for vit_tiny_patch16_224.*augreg_in21k"):
        load_backbone("vit_tiny_patch16_224.augreg", weights="random")
    with pytest.raises(InputError, match=r"weights must be a checkpoint file.* got nope.pth"):
        load_backbone("vit_tiny_patch16_224", weights="nope.pth")
    with pytest.raises(OptionError, match="resnet18 cannot be built with img_size=64"):
        load_backbone("resnet18", **SMALL)


def test_missing_weights_without_network_end_quickly(monkeypatch, tmp_path):
    def offline(*args, timeout):
        assert timeout <= 5
        raise urllib.error.URLError("no route to host")

    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", False)
    monkeypatch.setattr("huggingface_hub.try_to_load_from_cache", lambda *args: None)
    monkeypatch.setattr("torch.hub.get_dir", lambda: str(tmp_path))
    monkeypatch.setattr("urllib.request.urlopen", offline)
    with pytest.raises(
        InputError, match=r"not on this disk and .* cannot be reached .no route to host.; .*weights=random"
    ):
        load_backbone("vit_tiny_patch16_224")


def test_figure_of_a_probe_holds_the_verdict_and_every_score(tmp_path):
    from vispe.evaluate.probe.figures.summary_figure import plot_probe

    for targets, panels in ((("lr+ud", "lr"), 6 + 2), (("radial",), 4 + 1)):
        result = positional_probe(features(12, 9, 10, strength=3)[None], targets=targets, step=3)
        figure = plot_probe(result, "a model")
        assert len(figure.axes) == panels
        words = " ".join(text.get_text() for text in figure.findobj(lambda a: hasattr(a, "get_text")))
        assert "Positional probe: a model" in words
        assert result.verdict[1:] in words
        assert all(f"{np.median(row.r2_heldout):.2f}" in words for row in result.rows)
    figure.savefig(tmp_path / "probe.png")
    assert (tmp_path / "probe.png").stat().st_size > 10_000


def test_plot_bias_draws_the_bias_as_seen_from_the_query():
    import vispe
    from vispe.errors import UnsupportedCombination
    from vispe.evaluate.plots.encoding import plot_bias

    axes = plot_bias("alibi2d.local", (5, 7), (1, 2), num_heads=2)
    values = axes.images[0].get_array()
    rows, cols = np.mgrid[:5, :7]
    np.testing.assert_allclose(values, -np.hypot(rows - 1, cols - 2), rtol=1e-5)
    values = (
        plot_bias("alibi2d.geometric", vispe.Grid((5, 7), prefix=3), head=1, num_heads=2)
        .images[0]
        .get_array()
    )
    other = plot_bias("alibi2d.geometric", (5, 7), head=1, num_heads=2).images[0].get_array()
    np.testing.assert_array_equal(values, other)
    values = plot_bias("sincos2d", (4, 4), (0, 3)).images[0].get_array()
    assert values.argmax() == 3
    assert values.max() == pytest.approx(1)
    with pytest.raises(ShapeError, match="rows 0 to 4 and columns 0 to 6"):
        plot_bias("alibi2d", (5, 7), (5, 0))
    with pytest.raises(OptionError, match="head must be in 0 to 1, got 2"):
        plot_bias("alibi2d", (5, 7), head=2, num_heads=2)
    with pytest.raises(UnsupportedCombination, match="no bias in this block"):
        plot_bias("alibi2d(layers=[3])", (5, 7))
