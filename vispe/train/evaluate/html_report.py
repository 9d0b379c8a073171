"""The report of a retrofit as one HTML page: before and after side by side, and how to read each number."""

from __future__ import annotations

import json

import numpy as np

from vispe.evaluate.rotation.report import HEADLINES
from vispe.evaluate.rotation.verdict import SCALE
from vispe.report.html_page import Page
from vispe.report.table import columns, number
from vispe.train.evaluate.criteria import tone
from vispe.train.evaluate.figures import fingerprint_figure, kept_figure, masks_figure, position_figure
from vispe.train.evaluate.mask_scores import mean_known
from vispe.train.evaluate.result import RetrofitReport

KINDS = {"noise": "noise", "textures": "textures", "images": "your images"}
"""Kinds of pictures in words."""

_INTRO = (
    "The teacher (before) is a pretrained model whose features tell where in the image a patch lies. The student "
    "(after) has another positional encoding and learnt the teacher's features without the channels that tell most. "
    "A good retrofit takes the position and leaves the rest."
)
_POSITION = (
    "A linear probe learns row and column from the features of some patches of an image and is scored on the others: "
    "held-out R² is 1 when the place of a patch can be read from its features alone, and 0 or less when it cannot. "
    "Noise and homogeneous textures show no place, so what is read there comes from the model. Images may show it "
    "themselves, by uneven light or layers."
)
_BLANKED = (
    "Blanked: the teacher with its most telling channels set to 0, which is what the student learnt. When it "
    "still reveals position and the student does not, the new encoding did the work. Shuffled: patches in random "
    "order, a control that must be 0 or less."
)
_PATTERN = (
    "The mean map of many noise images. Noise averages out, and what stays is tied to the frame. SNR compares it "
    "with what chance leaves: 1 means no pattern."
)
_TURNED = (
    "The image was turned by quarters and mirrored, the features were turned back and compared. "
    f"{SCALE} The encoding is one cause, the patch kernel another: a "
    "retrofit removes the first alone, unless its patch kernel was made symmetric."
)
_KEPT = (
    "Cosine: likeness of the student's features to the teacher's, patch by patch; the target is the blanked teacher. "
    "Effective rank: in how many directions features vary over an image. A student whose features have become "
    "alike everywhere reveals no position either, and shows here."
)
_MASKS = (
    "A linear classifier (balanced logistic regression) on each kind of features. Spread: scribbles all over the "
    "image. Corner: all scribbles in one corner, mean over corners; the loss is what that costs. Some is content, "
    "which differs between corners, and filters pay it too: what the model loses beyond the filters comes from "
    "position. Other masks: learnt on one half of the images, scored on the other."
)


def evaluation_page(report: RetrofitReport) -> Page:
    """Return the page; `page.write(path)` makes the file.

    Args:
        report: what was measured. A section appears only where its numbers exist.
    """
    page = Page(report.subject, "Retrofit", f"{report.verdict}.", tone(report.criteria))
    page.text(_INTRO)
    page.table(_criteria(report), left=(0, 2, 3))
    page.text(
        "Position readable: the larger of the medians over noise and over textures. The limits are our choice.",
        soft=True,
    )
    _position(page, report)
    _pattern(page, report)
    _turned(page, report)
    _kept(page, report)
    _masks(page, report)
    page.section("Every image")
    words = " and mIoU" if report.segmentation is not None else ""
    page.table(_by_image(report), folded=f"Likeness{words} by image")
    for name, side in report.sides.items():
        for kind, probe in side.probes.items():
            page.table(probe.table(), folded=f"All targets of the probe, {name}, {KINDS[kind]}")
    page.section("Settings and notes")
    for note in report.notes:
        page.text(note)
    page.text(f"Blanked channels: {', '.join(map(str, report.channels)) or 'none'} of {report.width}.")
    rows = [[k, v if isinstance(v, str) else json.dumps(v, default=str)] for k, v in report.settings.items()]
    page.table([["setting", "value"], *rows], left=(0, 1))
    return page


def to_text(report: RetrofitReport) -> str:
    """Return the verdict and the table of criteria as plain text."""
    return f"{report.verdict}.\n\n{columns(_criteria(report), left=range(4))}"


def _criteria(report: RetrofitReport) -> list[list[str]]:
    rows = [["", "found", "wanted", ""]]
    for one in report.criteria:
        met = "" if not np.isfinite(one.value) else "met" if one.met else "not met"
        rows.append([one.title, _number(one.value), one.asked, met])
    return rows


def _position(page: Page, report: RetrofitReport) -> None:
    page.section("Can the place of a patch be read?")
    page.text(_POSITION)
    page.figure(
        position_figure(report),
        "Held-out R² of row and column: dots are images (medians over choices of patches), lines medians over all.",
    )
    title = "held-out R², median over images and choices of patches"
    rows = [[title, *report.sides, "shuffled, after"]]
    for kind, probe in report.after.probes.items():
        scores = [side.probes[kind].headline for side in report.sides.values()]
        shuffled = float(np.median(probe.rows[0].shuffled))
        rows.append(_row(f"{KINDS[kind]} ({probe.n_images})", *scores, shuffled))
    page.table(rows)
    page.text(_BLANKED, soft=True)
    notes = {n for s in (report.before, report.after) for p in s.probes.values() for n in p.notes}
    for note in sorted(notes):
        page.text(note, soft=True)


def _pattern(page: Page, report: RetrofitReport) -> None:
    first, second = report.before.fingerprint, report.after.fingerprint
    if first is None or second is None:
        return
    page.section("A pattern that is tied to the frame?")
    page.text(_PATTERN)
    caption = "First principal component of the mean map; both pictures have one scale, white is 0."
    page.figure(fingerprint_figure(first, second), caption)
    page.table(
        [
            ["", "before", "after"],
            _row("SNR of the pattern", first.snr, second.snr),
            ["noise images", str(first.n_images), str(second.n_images)],
            ["channels that tell most", *(", ".join(map(str, p.top_channels(4))) for p in (first, second))],
        ]
    )


def _turned(page: Page, report: RetrofitReport) -> None:
    first, second = report.before.rotation, report.after.rotation
    if first is None or second is None:
        return
    page.section("Turned and mirrored")
    page.text(_TURNED)
    rows, quiet = [["what was done", "what is compared", "before", "after"]], []
    for k, row in enumerate(first.headlines):
        key = (row.transform, row.metric, row.part)
        other = second.result.find(*key)
        after = "" if other is None else _number(other.summary().mean)
        rows.append([*HEADLINES[key], _number(row.summary().mean), after])
        quiet += [k] * row.control
    page.table(rows, left=(0, 1), quiet=quiet)


def _kept(page: Page, report: RetrofitReport) -> None:
    page.section("What the features kept")
    page.text(_KEPT)
    page.figure(kept_figure(report), "Each dot is an image, lines are medians.")
    page.table(
        [
            ["", "mean cosine, median rank"],
            _row("cosine, student to teacher", np.mean(report.cosine)),
            _row("cosine, student to blanked teacher (its target)", np.mean(report.cosine_blanked)),
            *(_row(f"effective rank, {name}", np.median(side.rank)) for name, side in report.sides.items()),
            ["channels blanked", f"{len(report.channels)} of {report.width}"],
        ]
    )


def _masks(page: Page, report: RetrofitReport) -> None:
    scores = report.segmentation
    if scores is None:
        return
    page.section("Linear segmentation")
    page.text(_MASKS)
    page.figure(masks_figure(report), "Each dot is an image, lines are means over images.")
    names = ("before", "after", "filters")
    titles = {"own": "spread scribbles", "corner": "lost with corner scribbles", "others": "other masks"}
    rows = [["mIoU, mean over images", *names]]
    for key, title in titles.items():
        if values := getattr(scores, key):
            rows.append(_row(title, *(mean_known(values[name]) for name in names)))
    if scores.pooled:
        rows.append(_row("other masks, all pixels pooled", *(scores.pooled[name] for name in names)))
    page.table(rows)
    page.text(
        f"{scores.budget} pixels of each class were scribbled on; classes: {', '.join(report.classes)}.",
        soft=True,
    )


def _by_image(report: RetrofitReport) -> list[list[str]]:
    measured = {
        "cosine": report.cosine,
        "cosine to target": report.cosine_blanked,
        "rank before": report.before.rank,
        "rank after": report.after.rank,
    }
    if report.segmentation is not None:
        for key, word in {"own": "spread", "corner": "lost in a corner", "others": "other masks"}.items():
            rows = getattr(report.segmentation, key)
            measured |= {f"{word}, {name}": values for name, values in rows.items()}
    values = zip(*measured.values(), strict=True)
    rows = [_row(name, *numbers) for name, numbers in zip(report.image_names, values, strict=True)]
    return [["image", *measured], *rows]


def _row(title: str, *values: float) -> list[str]:
    return [title, *map(_number, values)]


def _number(value: float) -> str:
    return f"{value:.1e}" if 0 < abs(value) < 5e-4 else number(value)
