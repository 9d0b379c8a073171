"""Strips: what replaces a part, PSI against loops, a descriptor that favours the top, one without positions."""

import numpy as np
import pytest
import timm
import torch

from vispe import convert
from vispe.backbones.vision_model import VisionModel
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.behaviour.occlusion import FILLINGS, Occlusion, excess, mirrored, occlude
from vispe.evaluate.behaviour.rolls import K
from vispe.evaluate.behaviour.translation import TranslationChange
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Accumulator
from vispe.evaluate.measure.perturbed_runs import PerturbedRuns
from vispe.evaluate.measure.verdict import judge


def actual(f, images, patch_size=1, **options):
    return audit(
        AuditedModel(f, "model", patch_size=patch_size), images, [Occlusion()], controls=(), **options
    ).findings[0]


def flat(images):
    """Each pixel by itself: positions have no part in the mean."""
    return torch.cat([images, images.square(), torch.ones(len(images), 1, *images.shape[-2:])], 1)


def top(images):
    """The same, rows weighted from 2 at the top to 0 at the bottom."""
    return flat(images) * torch.linspace(2, 0, images.shape[-2])[:, None]


def textures(n, side=16):
    return torch.rand(n, 3, side, side, generator=torch.Generator().manual_seed(1))


def test_mirrored_rows_are_those_beyond_the_nearer_end():
    for n, a, b in ((9, 2, 6), (8, 0, 3), (7, 5, 7), (6, 1, 2)):
        rows = mirrored(n, (a, b)).tolist()
        for r in range(n):
            # steps to the last row before, and to the first one after
            up, down = r - a + 1, b - r
            expected = r if not a <= r < b else a - up if up <= down else b - 1 + down
            assert rows[r] == expected % n


@pytest.mark.parametrize("filling", FILLINGS)
@pytest.mark.parametrize("part", [((4, 8), (0, 24)), ((0, 16), (18, 24)), ((4, 12), (6, 18))])
def test_the_part_alone_is_changed_and_nothing_of_it_stays(filling, part):
    image = torch.arange(3.0 * 16 * 24).reshape(3, 16, 24)
    noise = torch.randn(image.shape, generator=torch.Generator().manual_seed(0))
    changed = occlude(image, part, filling, noise)
    hidden = torch.zeros(16, 24, dtype=torch.bool)
    hidden[slice(*part[0]), slice(*part[1])] = True
    assert torch.equal(changed[:, ~hidden], image[:, ~hidden])
    inside = changed[0][hidden]
    if filling == "mirror":
        assert set(inside.tolist()) <= set(image[0][~hidden].tolist())
    if filling == "mean":
        assert torch.equal(inside, image[0].mean().expand_as(inside))
    if filling == "noise":
        assert torch.allclose(inside, image[0].mean() + image[0].std() * noise[0][hidden])


def test_excess_is_the_formula_in_a_loop():
    rng = np.random.default_rng(0)
    shares, changes = rng.random((5, 2, K)) + 0.5, rng.random((7, 5, 2, K)) + 0.5
    picks = np.array([0, 0, 3, 4, 4])

    def larger(rows):
        mean = np.mean([rows[k] for k in picks], 0)
        return max(1 - min(one) / max(one) for one in mean)

    expected = larger(shares) - np.mean([larger(one) for one in changes])
    assert excess(shares, changes, picks) == pytest.approx(expected)


def test_a_descriptor_that_favours_the_top_is_detected():
    finding = actual(top, textures(12))
    assert finding.verdict == "yes"
    details = finding.outcome.details
    rows = details["importance of rows"]
    assert rows == sorted(rows, reverse=True)
    down, right = details["slope down and right, per side"]
    assert down < -1
    assert abs(right) < abs(down) / 4
    assert {f"filled with {word}" for word in FILLINGS} <= set(details)


def test_a_middle_that_counts_more_than_corners_is_detected():
    bump = torch.hann_window(18, periodic=False)[1:-1]

    def f(images):
        return flat(images) * (bump[:, None] * bump)

    name = "centre minus corners, over their sum"
    assert actual(f, textures(6)).outcome.details[name] > 0.3
    assert actual(flat, textures(6)).outcome.details[name] == pytest.approx(0, abs=1e-4)


def test_objects_in_the_middle_are_no_effect_of_positions():
    images = textures(8) / 4
    images[:, :, 6:10, 6:10] += 3
    finding = actual(flat, images)
    assert finding.value == pytest.approx(0, abs=1e-4)
    assert finding.verdict == "no"


@pytest.mark.slow
@pytest.mark.parametrize("pool", ["token", "avg"])
def test_a_model_without_encoding_weighs_all_positions_equally(pool):
    torch.manual_seed(0)
    options = {"class_token": False} if pool == "avg" else {}
    model = timm.create_model("test_vit", img_size=80, num_classes=0, global_pool=pool, **options)
    f = VisionModel(convert(model, "none").eval())
    outcome = actual(f, torch.randn(3, 3, 80, 80), patch_size=None).outcome
    assert outcome.value == pytest.approx(0, abs=1e-3)
    rows = outcome.details["importance of rows"]
    assert min(rows) > 1e-6
    assert max(rows) - min(rows) < 1e-3 * max(rows)


@pytest.mark.slow
def test_noise_has_no_effect():
    # importance at random: PSI itself is far from 0
    numbers = []
    for seed in range(40):
        acc, rng = Accumulator(), np.random.default_rng(seed)
        for number in range(8):
            acc.begin(number)
            words = ("rows", "columns", "patches_rows", "patches_columns")
            acc.note(**{word: rng.exponential(size=K) for word in words})
            acc.note(centre=rng.exponential(size=2), filling=number % 3)
        outcome = Occlusion().summarize(acc, AuditedModel(top, "noise"))
        numbers.append(judge(Occlusion.limit, outcome, {}).verdict)
    assert numbers.count("yes") <= 2


def test_an_image_makes_ten_passes_alongside_those_of_shift_and_a_short_record():
    for side in (8, 32):
        calls, acc = [], Accumulator()
        acc.begin(1)
        audited = AuditedModel(lambda x: (calls.append(1), x)[1], "pixels", patch_size=2)  # noqa: B023
        runs = PerturbedRuns(audited, torch.rand(3, side, side), 1)
        TranslationChange().rerun(acc, runs)
        assert len(calls) == 4
        Occlusion().rerun(acc, runs)
        assert len(calls) == 14
        assert not acc.sums
        assert sum(np.size(v) for v in acc.records[0].values()) < 40


def test_less_than_four_patches_a_side_are_refused_in_a_sentence():
    result = audit(
        AuditedModel(lambda x: x, "pixels", patch_size=4), torch.rand(1, 3, 8, 16), [Occlusion()], controls=()
    )
    assert "needs at least 4 patches per side" in result.refused["strips"][1]
