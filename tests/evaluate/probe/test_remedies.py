import numpy as np
import pytest
import timm
import torch

from vispe.backbones.vision_model import VisionModel
from vispe.errors import OptionError
from vispe.evaluate.probe.baselines import probe_baselines
from vispe.evaluate.probe.rasa.fit import Rasa
from vispe.evaluate.probe.remedies import ALPHA, RasaFeatures, default_rounds, remedied
from vispe.evaluate.probe.targets import ramp
from vispe.images.symmetry.symmetrization import D4Features

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
    remedy = remedied(model, "rasa", fit, rounds=3)
    assert isinstance(remedy, RasaFeatures)
    assert remedy.patch_size == 16
    f = VisionModel(model)
    with torch.no_grad():
        rasa = Rasa(3, standardize=True, alpha=ALPHA).fit(f(fit).double())
        want = rasa.transform(f(images))
        got = remedy(images)
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert got.dtype == torch.float32


def test_both_remedies_together_average_first(model):
    f = VisionModel(model)
    images, fit = noise(1), noise(5, seed=1)
    with torch.no_grad():
        average = remedied(f, "d4_average")(images)
        torch.testing.assert_close(average, D4Features(f)(images))
        rasa = Rasa(2, standardize=True, alpha=ALPHA).fit(D4Features(f)(fit).double())
        got = remedied(f, "d4_rasa", fit, rounds=2)(images)
    torch.testing.assert_close(got, rasa.transform(average), atol=1e-4, rtol=1e-4)
    # rounding makes 16 tokens of an average differ, equivariance holds
    with torch.no_grad():
        flipped = remedied(f, "d4_rasa", fit, rounds=2)(images.flip(-1))
    torch.testing.assert_close(flipped.flip(-1), got, atol=1e-3, rtol=1e-3)


def test_by_default_at_most_a_quarter_of_the_directions_is_removed(model):
    assert [default_rounds(c) for c in (3, 15, 64, 256, 384, 1024)] == [1, 1, 8, 32, 32, 32]
    assert remedied(model, "rasa", noise(5, seed=1)).projection.rounds == 8


def test_gradients_pass_through_a_remedy(model):
    images = noise(1).requires_grad_()
    remedied(model, "rasa", noise(5, seed=1), rounds=2)(images).sum().backward()
    assert images.grad.abs().max() > 0


def test_the_row_of_the_table_is_the_remedy_of_python():
    f, images, fit = Positional(), noise(2, 32), noise(4, 32, seed=1)
    options = {"step": 2, "blank": [], "shifts": 1, "masks_per_image": 2, "targets": R2}
    table = probe_baselines(f, images, choose_on=fit, mixed=noise(3, 32, seed=2), rounds=2, **options)
    for key in ("rasa", "d4_rasa"):
        alone = probe_baselines(remedied(f, key, fit, rounds=2), images, **options).row("none")
        np.testing.assert_allclose(table.row(key).r2, alone.r2, atol=1e-6)
        np.testing.assert_allclose(table.row(key).knn, alone.knn, atol=1e-6)
        np.testing.assert_allclose(table.row(key).rank, alone.rank, rtol=1e-6)
    mixed = probe_baselines(remedied(f, "rasa", noise(3, 32, seed=2), rounds=2), images, **options)
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
    few = probe_baselines([f[..., :2] for f in feats], step=2, blank=[1])
    assert "vary in 3 directions, got 2 directions" in few.row("rasa").detail
    # 16 tokens of 20 channels: only the penalised fit is defined
    small = [np.random.default_rng(s).standard_normal((4, 4, 20)) for s in range(2)]
    table = probe_baselines(small, step=2, blank=[1])
    assert "more tokens than channels" in table.row("rasa_published").detail
    assert table.row("rasa").known


def test_unknown_remedies_and_superfluous_or_missing_images_are_errors(model):
    with pytest.raises(OptionError, match="remedy must be one of rasa, d4_average, d4_rasa, got 'poses'"):
        remedied(model, "poses")
    with pytest.raises(OptionError, match="must be passed for RASA only, got remedy='rasa' and images=None"):
        remedied(model, "rasa")
    with pytest.raises(OptionError, match="got remedy='d4_average' and images=Tensor"):
        remedied(model, "d4_average", noise(1))
