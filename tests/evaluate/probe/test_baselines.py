import json

import numpy as np
import pytest
import timm
import torch
from torch.nn import functional

from vispe.backbones.batching import PerImage
from vispe.errors import InputError, OptionError, ShapeError
from vispe.evaluate.probe.baselines import probe_baselines
from vispe.evaluate.probe.group_averages import (
    effective_rank,
    forward_passes,
    mean_cosine,
    shift_lattice,
    transform_averages,
)
from vispe.evaluate.probe.linear_debiasing import blank_channels, svd_debias
from vispe.evaluate.probe.rasa.fit import Rasa
from vispe.evaluate.probe.remedies import ALPHA
from vispe.evaluate.probe.splits import Trials, cell
from vispe.evaluate.probe.targets import ramp
from vispe.images.symmetry.d4 import D4

PATCH, WIDTH = 4, 12


def rng(seed=0):
    return np.random.default_rng(seed)


def noise(n, h, w, seed=0):
    return torch.from_numpy(rng(seed).standard_normal((n, 3, h, w)))


class Table:
    """Features = what a patch shows (the same in all poses) + a table of positions: the ideal learned encoding."""

    patch_size = PATCH

    def __init__(self, strength=6.0, targets=("lr+ud", "radial"), turns=True):
        self.strength, self.targets, self.turns, self.seen = strength, targets, turns, 0
        self.mix = torch.from_numpy(rng(7).standard_normal((WIDTH, 3)))
        self.ways = torch.from_numpy(rng(8).standard_normal((3, WIDTH)))

    def content(self, images):
        return torch.einsum("kc,bchw->bkhw", self.mix, functional.avg_pool2d(images, PATCH) * PATCH)

    def table(self, shape):
        positions = np.concatenate([ramp(t, shape) for t in self.targets], axis=2) - 0.5
        return self.strength * (torch.from_numpy(positions) @ self.ways[: positions.shape[2]]).permute(
            2, 0, 1
        )

    def __call__(self, images):
        if not self.turns and images.shape[-2] > images.shape[-1]:
            raise InputError("The model refuses an image that stands.")
        self.seen += len(images)
        content = self.content(images)
        return content + self.table(tuple(content.shape[-2:]))


@pytest.mark.parametrize("size", [(20, 20), (12, 20)])
@pytest.mark.parametrize("shifts", [1, 2, 9])
def test_averages_bring_features_back_exactly(size, shifts):
    f, image = Table(), noise(1, *size)[0]
    grid = (size[0] // PATCH, size[1] // PATCH)
    actual = transform_averages(f, image, PATCH, shifts)
    lattice = shift_lattice(grid, shifts)
    assert f.seen == 8 * len(lattice)
    content, table = f.content(image[None])[0], f.table(grid)
    orbit = sum(g.undo(f.table(tuple(g.apply(table).shape[-2:]))) for g in D4) / 8
    torch.testing.assert_close(actual["d4_average"], content + orbit)
    assert len(actual) == 2 + 2 * (shifts > 1)
    if shifts > 1:
        rolled = sum(torch.roll(table, (-y, -x), (-2, -1)) for y, x in lattice) / len(lattice)
        both = sum(torch.roll(orbit, (-y, -x), (-2, -1)) for y, x in lattice) / len(lattice)
        torch.testing.assert_close(actual["shift_average"], content + rolled)
        torch.testing.assert_close(actual["d4_shift_average"], content + both)
    if shifts == 9:  # every shift: nothing of the position is left
        everywhere = table.mean((1, 2), keepdim=True).expand_as(content)
        torch.testing.assert_close(actual["shift_average"], content + everywhere)


def test_the_published_form_mixes_the_features_of_four_positions():
    f, image = Table(), noise(1, 20, 20)[0]
    actual = transform_averages(f, image, PATCH, 1)["published_average"]
    transformed = (image, image.flip(-1), image.flip(-2), torch.rot90(image, 1, (-2, -1)))
    torch.testing.assert_close(actual, sum(f(image_pose[None])[0] for image_pose in transformed) / 4)
    content = f.content(image[None])[0]
    mixed = (content + content.flip(-1) + content.flip(-2) + torch.rot90(content, 1, (-2, -1))) / 4
    torch.testing.assert_close(actual, mixed + f.table((5, 5)))  # the table stays as it is


def test_averages_errors():
    actual = transform_averages(Table(), noise(1, 12, 20)[0], PATCH, 2)
    assert (
        actual["published_average"]
        == "does not exist on a 3x5 grid, whose rotation by 90 degrees has another shape"
    )
    refusing = transform_averages(Table(turns=False), noise(1, 12, 20)[0], PATCH, 2)
    for name in ("d4_average", "d4_shift_average"):
        assert refusing[name].startswith(
            "needs the image rotated by 90 degrees, which the model rejects: The model"
        )
    torch.testing.assert_close(refusing["shift_average"], actual["shift_average"])
    with pytest.raises(ShapeError, match=r"multiples of patch_size=4, got \(12, 18\) px"):
        transform_averages(Table(), noise(1, 12, 18)[0], PATCH)
    with pytest.raises(ShapeError, match=r"expected a map of \(10, 10\) patches, got \(5, 5\)"):
        transform_averages(Table(), noise(1, 20, 20)[0], 2)
    with pytest.raises(OptionError, match="shifts needs an integer above 0, got shifts=0"):
        shift_lattice((4, 4), 0)


def test_shifts_lie_evenly_and_their_passes_are_counted():
    assert shift_lattice((4, 6), 2) == [(0, 0), (0, 3), (2, 0), (2, 3)]
    assert shift_lattice((2, 3), 5) == [(r, c) for r in range(2) for c in range(3)]
    assert shift_lattice((7, 7), 1) == [(0, 0)]
    assert forward_passes((2, 9), 4) == {
        "published_average": 4, "d4_average": 8, "shift_average": 8, "d4_shift_average": 64,
    }  # fmt: skip
    assert set(forward_passes((9, 9), 1)) == {"published_average", "d4_average"}


def test_effective_rank_counts_directions():
    basis = torch.linalg.qr(torch.from_numpy(rng().standard_normal((30, 30))))[0]
    assert effective_rank(basis[:5].reshape(5, 5, 6)) == pytest.approx(5)
    one = basis[0][:, None, None] * torch.rand(1, 4, 7)
    assert effective_rank(one) == pytest.approx(1, abs=1e-5)
    assert np.isnan(effective_rank(torch.zeros(3, 2, 2)))
    x = torch.from_numpy(rng(1).standard_normal((9, 4, 5)))
    share = np.linalg.svd(x.reshape(9, 20).numpy(), compute_uv=False)
    share = share / share.sum()
    assert effective_rank(x) == pytest.approx(np.exp(-(share * np.log(share)).sum()))
    assert effective_rank(7 * x) == pytest.approx(effective_rank(x))
    assert mean_cosine(x, -3 * x) == pytest.approx(-1)


def test_remedies_of_a_table_correct_averages_remove_and_the_published_one_does_not():
    f = Table()
    table = probe_baselines(f, noise(4, 48, 48), step=2, black=torch.zeros(3, 1, 1), directions=3, rounds=2)
    r2 = {row.key: dict(zip(table.targets, np.median(row.r2, axis=1), strict=True)) for row in table.rows}
    assert min(r2["none"].values()) > 0.8
    # position stays, content is mixed away
    assert r2["published_average"]["lr+ud"] > r2["none"]["lr+ud"] - 0.05
    assert r2["d4_average"]["lr"] < 0.05
    assert r2["d4_average"]["ud"] < 0.05
    assert r2["d4_average"]["radial"] > 0.7  # what all poses have in common
    assert max(r2["d4_shift_average"].values()) < 0.3
    assert max(r2["shift_average"].values()) < 0.3
    assert max(r2["svd"].values()) < 0.1  # a black image shows nothing but the table
    for row in table.rows:
        assert np.median(row.shuffled, axis=1).max() < 0.1
    assert [row.passes for row in table.rows] == [1, 1, 1, 4, 8, 16, 128, 1, 1, 8]
    assert f.seen == 4 * (1 + 8 + 1 + 128) + 1  # chosen and fitted on, itself, averages; black once
    assert max(r2["rasa"]["lr"], r2["rasa"]["ud"], r2["d4_rasa"]["lr+ud"]) < 0.1
    assert table.verdict.startswith("position is removed by 'SVD debias': held-out R² of the best target")
    assert "1 forward pass per image" in table.verdict


@pytest.mark.slow
def test_all_shifts_leave_nothing_of_a_table():
    images, black = noise(2, 24, 32), torch.zeros(3, 1, 1)
    options = {"step": 2, "blank": [0], "black": black, "masks_per_image": 2}
    table = probe_baselines(Table(), images, shifts=99, **options)
    single = probe_baselines(Table(strength=0), images, **options)
    np.testing.assert_allclose(table.row("shift_average").r2, single.row("none").r2, atol=1e-6)
    assert table.row("shift_average").passes == 48
    assert not table.row("published_average").known
    assert np.isnan(table.row("published_average").r2).all()
    assert "Average, published form: does not exist on a 6x8 grid" in " ".join(table.notes)
    assert table.table()[4][1:] == ["-"] * 10 + ["4"]


def slow_knn(x, mask, values, neighbours=5):
    """R² of the mean of the nearest sampled patches, patch by patch."""
    x = (x - x[mask].mean(0)) / np.where(np.ptp(x[mask], axis=0) == 0, 1, x[mask].std(0))
    error, true = [], values[~mask]
    for token, value in zip(x[~mask], true, strict=True):
        nearest = np.argsort([((token - other) ** 2).sum() for other in x[mask]])[:neighbours]
        error.append((value - values[mask][nearest].mean(0)) ** 2)
    return (1 - np.sum(error, axis=0) / ((true - true.mean(0)) ** 2).sum(0)).mean()


def test_rows_are_scored_on_the_same_patches_and_equal_the_remedies_by_hand():
    feats = [rng(s).standard_normal((9, 7, 10)) + 3 * ramp("lr", (9, 7)) for s in range(3)]
    black = rng(9).standard_normal((9, 7, 10))
    table = probe_baselines(feats, blank=[2, 5], black=black, directions=4, step=2, generator=11)
    assert [row.key for row in table.rows] == ["none", "blank", "svd", "rasa_published", "rasa"]
    assert [row.passes for row in table.rows] == [0] * 5
    assert table.chosen_on == "given"
    trials, generator = Trials(table.targets, 2), rng(11)
    noise_map = torch.from_numpy(black).permute(2, 0, 1)[None]
    for i, one in enumerate(feats):
        draws = trials.draw((9, 7), generator)
        features = torch.from_numpy(one).permute(2, 0, 1)
        corrected = [
            features,
            blank_channels(features, [2, 5], axis=0),
            svd_debias(features[None], noise_map, k=4)[0],
        ]
        # fitted on the images of the other half; 10 channels have 4 planes, of which 1 is the default
        fit = Rasa(1, standardize=True, alpha=ALPHA), Rasa(4)
        for rasa in fit[::-1]:
            corrected.append(rasa.fit(feats[1 - i % 2 :: 2]).transform(features[None])[0])
        for row, value in zip(table.rows, corrected, strict=True):
            r2, control = trials.scores(value.permute(1, 2, 0), draws)
            np.testing.assert_allclose(row.r2[:, i], r2)
            np.testing.assert_allclose(row.shuffled[:, i], control)
            knn = [
                slow_knn(value.permute(1, 2, 0).numpy(), t.mask, t.ramps["lr+ud"])
                for t in draws
                if "lr+ud" in t.ramps
            ]
            assert row.knn[i] == pytest.approx(np.mean(knn))
            assert row.rank[i] == pytest.approx(effective_rank(value))
            assert row.cosine[i] == pytest.approx(mean_cosine(features, value))
    untouched = probe_baselines(feats, blank=[], black=black, step=2)
    np.testing.assert_array_equal(untouched.rows[0].r2, untouched.rows[1].r2)


def test_channels_are_chosen_on_other_images_than_those_scored():
    def leaking(channel, seed):
        features = rng(seed).standard_normal((14, 14, 20))
        features[..., channel] += 12 * ramp("ud", (14, 14))[..., 0]
        return features

    feats = [leaking(3 if i % 2 == 0 else 8, i) for i in range(6)]
    table = probe_baselines(feats, blank=1, step=2, masks_per_image=2)
    detail = "channels 8 were set to 0 in one half of the images and 3 in the other"
    assert table.row("blank").detail == detail
    assert table.row("blank").r2[table.targets.index("ud")].min() > 0.5  # its own channel is never blanked
    assert table.chosen_on == "chosen on the other half of the images"
    other = probe_baselines(feats[::2], blank=1, choose_on=feats[1::2], step=2, masks_per_image=2)
    assert other.row("blank").detail == "channels 8 were set to 0"
    assert other.chosen_on == "chosen on 3 other images"
    same = probe_baselines([leaking(5, i) for i in range(4)], blank=1, step=2, masks_per_image=2)
    assert same.row("blank").detail == "channels 5 were set to 0"
    assert np.median(same.row("blank").r2) < 0.05
    assert np.median(same.row("none").r2[same.targets.index("ud")]) > 0.5
    assert same.verdict.startswith("position is removed by 'channels blanked'")
    assert "needs a black image" in same.row("svd").detail


def test_patch_size_and_blank_image_of_a_model_of_timm():
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = timm.create_model("test_vit", img_size=(64, 96), num_classes=0, dynamic_img_size=False)
    model.eval()
    images = noise(2, 64, 96).float()
    table = probe_baselines(model, images, step=2, shifts=2, masks_per_image=2, targets=("lr", "radial"))
    rows = {row.key: row for row in table.rows}
    assert rows["svd"].known
    assert rows["shift_average"].known
    assert "does not exist on a 4x6 grid" in rows["published_average"].detail
    assert "which the model rejects" in rows["d4_average"].detail
    stored = json.loads(json.dumps(table.to_dict(), allow_nan=False))
    assert stored["rows"][0]["effective_rank"] == list(rows["none"].rank)
    assert stored["rows"][3]["r2_heldout"] == {"lr": [None, None], "radial": [None, None]}
    assert len({len(line) for line in table.to_markdown().splitlines()}) == 1
    repeated = probe_baselines(model, images, step=2, shifts=2, masks_per_image=2, targets=("lr", "radial"))
    assert repeated.to_dict() == table.to_dict()


def test_scores_far_below_nothing_are_shortened_in_tables_only():
    assert [cell(v) for v in (-2e7, -10, -0.004, 1.0)] == ["< -10", "-10.00", "-0.00", "1.00"]
    feats = [
        np.where(rng(s).random((12, 12, 6)) < 0.02, 1e6, 0.0) + rng(s).random((12, 12, 6)) for s in (0, 1)
    ]
    table = probe_baselines(feats, blank=[], step=4)
    assert np.median(table.rows[0].r2[0]) < -10
    assert table.table()[1][1] == "< -10"
    assert table.to_dict()["rows"][0]["r2_heldout"]["lr+ud"] == list(table.rows[0].r2[0])


def test_images_may_differ_in_size():
    sizes = [(24, 32), (24, 32), (20, 28), (24, 32)]
    images = [noise(1, *size, seed=k)[0] for k, size in enumerate(sizes)]
    f, options = (
        Table(),
        {"blank": [2], "black": torch.zeros(3, 1, 1), "shifts": 1, "step": 2, "masks_per_image": 2},
    )
    table = probe_baselines(f, images, **options)
    assert f.seen == 4 * (1 + 8 + 1 + 8) + 3  # black whenever the size changes
    single = probe_baselines(Table(), images[:2], **options)
    for row, other in zip(table.rows, single.rows, strict=True):
        if "rasa" not in row.key:  # RASA is fitted on other images
            np.testing.assert_array_equal(row.r2[:, :2], other.r2)
    # of its own size again
    last = svd_debias(f(images[3][None]), f(torch.zeros_like(images[3])[None]), k=12)[0]
    assert table.row("svd").rank[3] == pytest.approx(effective_rank(last))


def test_verdicts_of_remedies():
    weak = probe_baselines([rng(s).standard_normal((12, 12, 6)) for s in range(2)], blank=2, step=2)
    assert weak.verdict.startswith(
        "no position to remove: the original features have held-out R² of at most -"
    )
    options = {"blank": [1], "step": 2, "masks_per_image": 2}
    strong = [rng(s).standard_normal((12, 12, 6)) + 20 * ramp("lr", (12, 12)) for s in range(2)]
    verdict = probe_baselines(strong, rounds=0, **options).verdict
    assert verdict.startswith("no method removes position; the strongest is 'RASA, published form'")
    assert probe_baselines(strong, **options).verdict.startswith("position is removed by 'RASA': ")
    flat = probe_baselines([np.ones((1, 30, 3))] * 2, blank=1, step=2, masks_per_image=2)
    assert flat.verdict == "cannot be judged: a target is constant on this grid"


def test_errors():
    feats = [rng(s).standard_normal((8, 8, 6)) for s in range(2)]
    with pytest.raises(OptionError, match=r"needs at least 2 images, got 1"):
        probe_baselines(feats[:1], step=2)
    with pytest.raises(OptionError, match=r"can be read only once.*two passes. Pass a list or tensor"):
        probe_baselines(iter(feats), step=2)
    assert probe_baselines(iter(feats), step=2, blank=[1]).n_images == 2
    with pytest.raises(OptionError, match=r"channels must be in 0 to 5, got \[6\]"):
        probe_baselines(feats, blank=[6], step=2)
    with pytest.raises(OptionError, match="at least 0, got -1"):
        probe_baselines(feats, blank=-1, step=2)
    with pytest.raises(OptionError, match="got features and images"):
        probe_baselines(feats, noise(1, 8, 8))
    with pytest.raises(OptionError, match="needs images"):
        probe_baselines(Table())
    with pytest.raises(
        ShapeError, match=r"probe_baselines: no images, got an empty sequence\. Pass at least one"
    ):
        probe_baselines([], blank=[1])
    with pytest.raises(ShapeError, match="choose_on has no images, got an empty sequence"):
        probe_baselines(feats, choose_on=[], step=2)
    with pytest.raises(OptionError, match=r"row: unknown method, got 'dvt'\. Use one of none, blank, svd"):
        probe_baselines(feats, blank=[1], step=2).row("dvt")


def test_a_function_without_a_patch_has_no_averages_and_one_may_be_given():
    f = PerImage(lambda image: Table()(image[None])[0])
    images = noise(2, 24, 24)
    assert [r.key for r in probe_baselines(f, images, blank=[1], step=2).rows] == [
        "none", "blank", "svd", "rasa_published", "rasa",
    ]  # fmt: skip
    rows = probe_baselines(f, images, blank=[1], step=2, patch_size=PATCH, shifts=1).rows
    keys = ["none", "blank", "svd", "published_average", "d4_average", "rasa_published", "rasa", "d4_rasa"]
    assert [r.key for r in rows] == keys
