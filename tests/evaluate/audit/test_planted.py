"""A planted effect changes the verdict of its rows only; without an effect no verdict changes, over many seeds."""

import pytest
import timm
import torch

import vispe
from vispe.backbones.vision_model import VisionModel
from vispe.evaluate.audit.measures import choose
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.measure import verdict
from vispe.evaluate.measure.audited_model import AuditedModel

PATCH, SIDE = 8, 12
MIX = torch.randn(32, 3 * PATCH**2, generator=torch.Generator().manual_seed(0)) / 14


def row_of(maps):
    return torch.linspace(-1, 1, maps.shape[-2])[:, None].expand(maps.shape[-2:])


def bag(images):
    """Every patch on its own, without its direction: grey values sorted, then mixed by fixed numbers."""
    patches = torch.nn.functional.pixel_unshuffle(images, PATCH).unflatten(1, (3, -1)).sort(2).values
    return torch.einsum("bphw,dp->bdhw", patches.flatten(1, 2), MIX)


def position_channels_of(images):
    maps = bag(images).clone()
    maps[:, 5] += 3 * maps.std() * row_of(maps)
    maps[:, 9] += 2 * maps.std() * row_of(maps.mT).mT
    return maps


def loud_rows(images):
    # mean colours, which are 0 over all patches
    maps = torch.einsum("bchw,dc->bdhw", torch.nn.functional.avg_pool2d(images, PATCH), MIX[:, :3])
    return maps * torch.where(row_of(maps) < -0.4, 5.0, 1.0)


@pytest.fixture
def few_draws(monkeypatch):
    """200 bootstrap draws per interval, not 1,000: they take a third of the time, and planted effects are large."""
    monkeypatch.setattr(verdict, "DRAWS", 200)


@pytest.fixture(scope="module")
def samples():
    g = torch.Generator().manual_seed(1)
    # patches of different grey and contrast, without any layout
    level, contrast = (torch.rand(12, 3, SIDE, SIDE, generator=g) for _ in range(2))
    level, contrast = (t.repeat_interleave(PATCH, 2).repeat_interleave(PATCH, 3) for t in (level, contrast))
    return 2 * level - 1 + contrast * torch.randn(12, 3, SIDE * PATCH, SIDE * PATCH, generator=g)


def yes(f, samples, only=None, **options):
    actual = audit(AuditedModel(f, "planted", patch_size=PATCH, **options), samples, choose(only))
    return {finding.name for finding in actual.findings if finding.verdict == "yes"}, actual


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
def test_a_bag_of_patches_has_no_effect(samples):
    rows, actual = yes(bag, samples)
    assert rows == set()
    assert {f.name for f in actual.findings} >= {
        "probe",
        "pattern",
        "channels",
        "neighbours",
        "shift",
        "turn",
        "strips",
    }


@pytest.mark.slow
@pytest.mark.usefixtures("few_draws")
def test_channels_of_row_and_column(samples):
    rows, actual = yes(position_channels_of, samples)
    assert rows == {"probe", "pattern", "channels", "neighbours", "shift", "turn"}
    channels = next(f for f in actual.findings if f.name == "channels").outcome.details["by_surface"]
    assert {(c["channel"], c["kind"]) for c in channels[:2]} == {(5, "row"), (9, "column")}


@pytest.mark.usefixtures("few_draws")
def test_a_descriptor_that_weighs_the_upper_rows(samples):
    rows, _ = yes(loud_rows, samples)
    # directions stay, so nothing is read and cosines after a shift are 1: the weight alone is found
    assert rows == {"strips", "turn"}


@pytest.mark.parametrize(
    ("prefers_first", "expected"), [(True, {"order"}), pytest.param(False, set(), marks=pytest.mark.slow)]
)
def test_an_answerer_that_prefers_the_first_image(samples, prefers_first, expected):
    def answers(images, question, words):
        image = images[0] if prefers_first else torch.stack(list(images)).mean(0)
        redness = 200 * float((image[0] - image[2]).mean())
        return torch.tensor([redness, 0.0])

    rows, _ = yes(bag, samples, only=["behaviour", "read_or_used"], answers=answers)
    assert rows == expected


@pytest.mark.slow
def test_random_weights_without_an_encoding_raise_no_alarm():
    verdicts = []
    for seed in range(20):
        torch.manual_seed(seed)
        model = vispe.convert(timm.create_model("test_vit", depth=3), "none").eval()
        g = torch.Generator().manual_seed(seed)
        smooth = torch.nn.functional.interpolate(
            torch.randn(6, 3, 20, 20, generator=g), size=(160, 160), mode="bicubic"
        )
        actual = audit(AuditedModel(VisionModel(model), "random"), smooth, seed=seed)
        verdicts += [f.verdict for f in actual.findings]
    assert len(verdicts) >= 20 * 10
    assert verdicts.count("yes") <= 0.05 * len(verdicts)
