import numpy as np
import pytest
import timm
import torch

from tests.cases import cases
from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError, UnknownName, UnsupportedHost
from vispe.evaluate.probe.baselines import probe_baselines
from vispe.evaluate.probe.linear_debiasing import blank_channels, svd_debias
from vispe.evaluate.probe.rasa.fit import Rasa
from vispe.evaluate.probe.rasa.table_rows import ALPHA, default_rounds
from vispe.evaluate.probe.remedies import _informative, debias, parse_method
from vispe.evaluate.probe.targets import ramp
from vispe.images.symmetry import D4, D4Features

R2 = ("lr+ud", "radial")


def noise(n, side=64, seed=0):
    return torch.from_numpy(np.random.default_rng([79, seed]).standard_normal((n, 3, side, side))).float()


@pytest.fixture(scope="module")
def model():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model("test_vit", img_size=64, num_classes=0, depth=1).eval()
        with torch.no_grad():
            model.pos_embed.normal_(std=3)
    return model


@pytest.fixture(scope="module")
def flexible(model):
    copied = timm.create_model("test_vit", img_size=64, num_classes=0, depth=1, dynamic_img_size=True).eval()
    copied.load_state_dict(model.state_dict())
    return copied


class Positional:
    """Features: the pixels of a patch, mixed into 12 channels, plus a table of positions."""

    patch_size = 4

    def __init__(self, targets=("lr+ud",)):
        self.targets, r = targets, np.random.default_rng(80)
        self.mix, self.table = (torch.from_numpy(r.standard_normal((12, n))) for n in (48, 3))

    def __call__(self, images):
        content = torch.nn.functional.pixel_unshuffle(images.double(), 4) / 7
        position = np.concatenate([ramp(t, tuple(content.shape[-2:])) for t in self.targets], axis=2) - 0.5
        position = torch.from_numpy(position) @ self.table[:, : position.shape[2]].mT
        return torch.einsum("kc,bchw->bkhw", self.mix, content) + 4 * position.permute(2, 0, 1)


def test_rasa_features_are_those_of_the_fit_by_hand(model):
    images, fit = noise(2), noise(5, seed=1)
    remedy = debias(model, "rasa", fit, rounds=3)
    assert isinstance(remedy, VisionModel)
    assert remedy.patch_size == 16
    f = VisionModel(model)
    with torch.no_grad():
        rasa = Rasa(3, standardize=True, alpha=ALPHA).fit(f(fit).double())
        expected = rasa.transform(f(images))
        actual = remedy(images)
    torch.testing.assert_close(actual, expected, atol=1e-4, rtol=1e-4)
    assert actual.dtype == torch.float32


def test_both_remedies_together_average_first(model):
    f = VisionModel(model)
    images, fit = noise(1), noise(5, seed=1)
    with torch.no_grad():
        average = debias(f, "poses")(images)
        torch.testing.assert_close(average, D4Features(f)(images))
        rasa = Rasa(2, standardize=True, alpha=ALPHA).fit(D4Features(f)(fit).double())
        actual = debias(f, "poses+rasa", fit, rounds=2)(images)
    torch.testing.assert_close(actual, rasa.transform(average), atol=1e-4, rtol=1e-4)
    # rounding makes 16 tokens of an average differ, equivariance holds
    with torch.no_grad():
        flipped = debias(f, "poses+rasa", fit, rounds=2)(images.flip(-1))
    torch.testing.assert_close(flipped.flip(-1), actual, atol=1e-3, rtol=1e-3)


def test_by_default_at_most_a_quarter_of_the_directions_is_removed(model):
    assert [default_rounds(c) for c in (3, 15, 64, 256, 384, 1024)] == [1, 1, 8, 32, 32, 32]
    assert debias(model, "rasa", noise(5, seed=1)).model.debiasing.details == {"images": 5, "rounds": 8}


def test_gradients_pass_through_a_remedy(model):
    images = noise(1).requires_grad_()
    debias(model, "rasa", noise(5, seed=1), rounds=2)(images).sum().backward()
    assert images.grad.abs().max() > 0


def test_the_row_of_the_table_is_the_remedy_of_python():
    f, images, fit = Positional(), noise(2, 32), noise(4, 32, seed=1)
    options = {"step": 2, "blank": [], "shifts": 1, "masks_per_image": 2, "targets": R2}
    table = probe_baselines(f, images, choose_on=fit, mixed=noise(3, 32, seed=2), rounds=2, **options)
    for key, method in (("rasa", "rasa"), ("d4_rasa", "poses+rasa")):
        single = probe_baselines(debias(f, method, fit, rounds=2), images, **options).row("none")
        np.testing.assert_allclose(table.row(key).r2, single.r2, atol=1e-6)
        np.testing.assert_allclose(table.row(key).knn, single.knn, atol=1e-6)
        np.testing.assert_allclose(table.row(key).rank, single.rank, rtol=1e-6)
    mixed = probe_baselines(debias(f, "rasa", noise(3, 32, seed=2), rounds=2), images, **options)
    np.testing.assert_allclose(table.row("rasa_mixed").r2, mixed.row("none").r2, atol=1e-6)
    before, after = (np.median(table.row(key).r2[0]) for key in ("none", "rasa"))
    assert before > 0.6
    assert after < 0.1
    assert table.row("rasa").detail == "2 rounds, fitted on 4 other images"
    assert table.row("rasa_mixed").detail == "2 rounds, fitted on images of several kinds"


def test_averages_leave_the_distance_to_the_centre_and_rasa_of_rows_and_columns_too():
    f, images = Positional(("lr+ud", "radial")), noise(4, 48)
    table = probe_baselines(f, images, step=2, blank=[], shifts=1, masks_per_image=2, rounds=2, targets=R2)
    r2 = {row.key: np.median(row.r2, axis=1) for row in table.rows}
    assert r2["none"].min() > 0.5
    assert r2["d4_average"][0] < 0.1
    assert r2["d4_average"][1] > 0.5
    assert r2["rasa"][0] < 0.1


def test_rows_that_cannot_be_fitted_state_the_reason():
    feats = [np.random.default_rng(s).standard_normal((8, 8, 6)) for s in range(2)]
    table = probe_baselines(iter(feats), step=2, blank=[1])
    for row in table.rows[3:]:
        assert not row.known
        assert "pass choose_on, or at least 2 images" in row.detail
    assert not probe_baselines(feats[:1], step=2, blank=[1]).row("rasa").known
    result = probe_baselines([f[..., :2] for f in feats], step=2, blank=[1])
    assert "vary in 3 directions, got 2 directions" in result.row("rasa").detail
    # 16 tokens of 20 channels: only the penalised fit is defined
    small = [np.random.default_rng(s).standard_normal((4, 4, 20)) for s in range(2)]
    table = probe_baselines(small, step=2, blank=[1])
    assert "more tokens than channels" in table.row("rasa_published").detail
    assert table.row("rasa").known


def test_methods_are_ordered_and_checked():
    assert parse_method("rasa+positions+poses+registers") == ["registers", "poses", "positions", "rasa"]
    with pytest.raises(UnknownName, match=r"got 'pose'\. Did you mean 'poses'"):
        parse_method("pose")
    for method in ("poses+poses", "rasa+svd", "blank+rasa"):
        with pytest.raises(OptionError, match="each name once, and one of rasa, blank, svd"):
            parse_method(method)


@pytest.mark.parametrize(
    ("method", "options", "message"),
    [
        ("rasa", {}, "method='rasa' and images=None"),
        ("poses", {"images": noise(1)}, "method='poses' and images=Tensor"),
        ("blank", {"images": noise(1), "channels": [0]}, "method='blank' and images=Tensor"),
        ("poses", {"channels": 3}, "channels=3 has no effect"),
        ("poses", {"directions": 2}, "directions=2 has no effect"),
        ("poses", {"neurons": 2}, "neurons=2 has no effect"),
        ("poses", {"rounds": 2}, "rounds=2 has no effect on method='poses'"),
        ("rasa", {"positions": 2, "images": noise(1)}, "positions=2 has no effect"),
        ("blank", {"channels": [64]}, r"channels must be in 0 to 63, got \[64\]"),
        ("svd", {"directions": 0}, "directions needs an integer above 0"),
    ],
)
def test_options_without_effect_and_missing_images_are_errors(model, method, options, message):
    with pytest.raises(OptionError, match=message):
        debias(model, method, **options)


def test_functions_need_a_patch_size_for_averages():
    with pytest.raises(UnsupportedHost, match="poses needs features with an attribute patch_size"):
        debias(torch.nn.AvgPool2d(4), "poses")
    for method in ("svd", "blank"):
        with pytest.raises(UnsupportedHost, match=f"debias: {method} needs"):
            debias(torch.nn.AvgPool2d(4), method, **({"channels": [0]} if method == "blank" else {}))


@pytest.mark.parametrize("side", [(64, 64), (48, 96)])
def test_the_mean_over_poses_and_positions_is_that_of_the_views_by_hand(flexible, side):
    images = torch.randn(2, 3, *side, generator=torch.Generator().manual_seed(5))
    f, result = VisionModel(flexible), debias(flexible, "poses+positions", positions=2, seed=3)
    views = result.model.debiasing.views(images, 16)
    assert len(views) == 16
    assert {view.pose for view in views} == set(D4)
    with torch.no_grad():
        expected = torch.stack([view.undo(f(view.apply(images))) for view in views]).mean(0)
        torch.testing.assert_close(result(images), expected, atol=1e-5, rtol=1e-5)
    # the views depend on the size only, so batches do not matter
    with torch.no_grad():
        torch.testing.assert_close(result(images[1:]), expected[1:], atol=1e-5, rtol=1e-5)


def test_poses_make_features_equivariant_and_blank_and_svd_are_those_of_the_functions(flexible):
    f, images = VisionModel(flexible), noise(1)
    with torch.no_grad():
        average, blank = debias(flexible, "poses"), debias(flexible, "poses+blank", channels=[5, 2])
        for pose in D4:
            actual = pose.undo(average(pose.apply(images)))
            torch.testing.assert_close(actual, average(images), atol=2e-5, rtol=1e-5)
        assert torch.equal(blank(images), blank_channels(average(images), [5, 2]))
        black = (-f.mean / f.std).expand(-1, 64, 64)[None]
        expected = svd_debias(f(images), f(black), k=4)
        torch.testing.assert_close(debias(flexible, "svd", directions=4)(images), expected, atol=1e-5, rtol=0)
        chosen = debias(flexible, "blank", noise(3, seed=2), channels=3).model.debiasing.details
    assert chosen["images"] == 3
    assert len(set(chosen["channels"])) == 3


@cases("side", [3, 4, 5, 8, 12])
def test_blank_selects_the_channels_of_position_on_small_grids(side):
    line = 9 * torch.arange(float(side))
    maps = [noise(1, side, k)[0].repeat(8, 1, 1) for k in range(6)]
    for one in maps:
        one[17] += line
        one[20] += line[:, None]
    assert sorted(_informative(maps, 2, 0)) == [17, 20]
