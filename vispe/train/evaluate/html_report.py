"""HTML report of a retrofit: before/after comparison with explanations of the numbers."""

from __future__ import annotations

import numpy as np

from vispe.errors import counted
from vispe.evaluate.rotation.report import HEADLINES
from vispe.evaluate.rotation.verdict import SCALE
from vispe.train.evaluate.figures import fingerprint_figure, masks_figure, position_figure, similarity_figure
from vispe.train.evaluate.mask_scores import finite_mean
from vispe.train.evaluate.result import RetrofitReport, scientific
from vispe.utils.report.html_page import Page
from vispe.utils.report.result import Drawing, Note, Rows, Section, report_page, settings_section
from vispe.utils.report.table import text_table

KINDS = {"noise": "noise", "textures": "textures", "images": "your images"}
"""Titles of the kinds of images."""

_INTRO = (
    "The teacher (before) is a pretrained model whose features encode the position of a patch. The student (after) "
    "has another positional encoding and was trained on the teacher's features without the most position-dependent "
    "channels. A successful retrofit removes position and preserves everything else."
)
_POSITION = (
    "A linear probe is fitted to predict row and column from the features of some patches of an image and scored on "
    "the others: held-out R² is 1 if the position of a patch can be decoded from its features, and 0 or less if not. "
    "Noise and homogeneous textures contain no positional cue, so decodable position comes from the model. Real images "
    "may contain cues themselves, such as uneven illumination or layers."
)
_BLANKED = (
    "Blanked: the ablated teacher, whose most position-dependent channels are 0, the target of the student. If "
    "position can be decoded from it but not from the student, the new encoding is the cause. Shuffled: patches in "
    "random order, a control that must be 0 or less."
)
_PATTERN = (
    "The mean map of many noise images. Noise averages out; the remainder is tied to the image frame. SNR compares it "
    "with the chance level: 1 means no pattern."
)
_ROTATED = (
    "The image was rotated by multiples of 90 degrees and mirrored; the features were transformed back and compared. "
    f"{SCALE} The encoding is one cause, the patch kernel another: a retrofit removes only the former, unless the "
    "patch kernel was made symmetric."
)
_FEATURES = (
    "Cosine: similarity of the student's and the teacher's features, patch by patch; the target is the ablated "
    "teacher. Effective rank: number of directions in which features vary over an image. It detects a student whose "
    "features are constant, from which position cannot be decoded either."
)
_MASKS = (
    "A linear classifier (balanced logistic regression) on each kind of features. Spread: scribbles across the image. "
    "Corner: loss of mIoU if all scribbles are in one corner, mean over corners. Content differs between corners, "
    "which affects filters too; a loss in excess of the filters is due to position. Other masks: trained on one half "
    "of the images, scored on the other."
)


def evaluation_page(report: RetrofitReport) -> Page:
    """Return the HTML page; `page.write(path)` writes the file.

    Args:
        report: the measurements; sections without measurements are omitted.
    """
    probes = [
        Rows(probe.table(), folded=f"All targets of the probe, {name}, {KINDS[kind]}")
        for name, side in report.sides.items()
        for kind, probe in side.probes.items()
    ]
    limits = "Decodable position: the larger of the medians over noise and over textures. The limits are our choice."
    words = " and mIoU" if report.segmentation is not None else ""
    ablated = f"Ablated channels: {', '.join(map(str, report.channels)) or 'none'} of {report.width}."
    sections = [
        Section("", _INTRO, Rows(report.table(), (0, 2, 3)), Note(limits)),
        *(section(report) for section in (_position, _pattern, _rotated, _features, _masks)),
        Section("Every image", Rows(_by_image(report), folded=f"Similarity{words} by image"), *probes),
        settings_section([*report.notes, ablated], report.settings),
    ]
    return report_page(report.subject, "Retrofit", f"{report.verdict}.", report.tone, sections)


def to_text(report: RetrofitReport) -> str:
    """Return the verdict and the table of criteria as plain text."""
    return f"{report.verdict}.\n\n{text_table(report.table(), left=range(4))}"


def _position(report: RetrofitReport) -> Section:
    title = "held-out R², median over images and selections of patches"
    rows = [[title, *report.sides, "shuffled, after"]]
    for kind, probe in report.after.probes.items():
        scores = [side.probes[kind].headline for side in report.sides.values()]
        shuffled = float(np.median(probe.rows[0].shuffled))
        rows.append(_row(f"{KINDS[kind]} ({probe.n_images})", *scores, shuffled))
    notes = {n for s in (report.before, report.after) for p in s.probes.values() for n in p.notes}
    caption = "Held-out R² of row and column: dots are images (medians over selections of patches), lines are medians."
    figure = Drawing(position_figure(report), caption)
    return Section(
        "Decodable position", _POSITION, figure, Rows(rows), *map(Note, [_BLANKED, *sorted(notes)])
    )


def _pattern(report: RetrofitReport) -> Section | None:
    first, second = report.before.fingerprint, report.after.fingerprint
    if first is None or second is None:
        return None
    caption = "First principal component of the mean map; both panels have the same scale, white is 0."
    rows = [
        ["", "before", "after"],
        _row("SNR of the pattern", first.snr, second.snr),
        ["noise images", str(first.n_images), str(second.n_images)],
        ["strongest channels", *(", ".join(map(str, p.top_channels(4))) for p in (first, second))],
    ]
    figure = Drawing(fingerprint_figure(first, second), caption)
    return Section("Fixed pattern of the image frame", _PATTERN, figure, Rows(rows))


def _rotated(report: RetrofitReport) -> Section | None:
    first, second = report.before.rotation, report.after.rotation
    if first is None or second is None:
        return None
    rows, quiet = [["transform", "metric", "before", "after"]], []
    for k, row in enumerate(first.headlines):
        key = (row.transform, row.metric, row.part)
        other = second.result.find(*key)
        after = "" if other is None else scientific(other.summary().mean)
        rows.append([*HEADLINES[key], scientific(row.summary().mean), after])
        quiet += [k] * row.control
    return Section("Rotations and reflections", _ROTATED, Rows(rows, (0, 1), quiet))


def _features(report: RetrofitReport) -> Section:
    rows = [
        ["", "mean cosine, median rank"],
        _row("cosine, student to teacher", np.mean(report.cosine)),
        _row("cosine, student to ablated teacher (its target)", np.mean(report.cosine_blanked)),
        *(_row(f"effective rank, {name}", np.median(side.rank)) for name, side in report.sides.items()),
        ["channels ablated", f"{len(report.channels)} of {report.width}"],
    ]
    figure = Drawing(similarity_figure(report), "Each dot is an image, lines are medians.")
    return Section("Similarity to the teacher", _FEATURES, figure, Rows(rows))


def _masks(report: RetrofitReport) -> Section | None:
    scores = report.segmentation
    if scores is None:
        return None
    names = ("before", "after", "filters")
    titles = {"own": "spread scribbles", "corner": "lost with corner scribbles", "others": "other masks"}
    rows = [["mIoU, mean over images", *names]]
    for key, title in titles.items():
        if values := getattr(scores, key):
            rows.append(_row(title, *(finite_mean(values[name]) for name in names)))
    if scores.pooled:
        rows.append(_row("other masks, all pixels pooled", *(scores.pooled[name] for name in names)))
    figure = Drawing(masks_figure(report), "Each dot is an image, lines are means over images.")
    budget = Note(
        f"{counted(scores.budget, 'labelled pixel')} per class; classes: {', '.join(report.classes)}."
    )
    return Section("Linear segmentation", _MASKS, figure, Rows(rows), budget)


def _by_image(report: RetrofitReport) -> list[list[str]]:
    columns_by_name = {
        "cosine": report.cosine,
        "cosine to target": report.cosine_blanked,
        "rank before": report.before.rank,
        "rank after": report.after.rank,
    }
    if report.segmentation is not None:
        for key, word in {"own": "spread", "corner": "lost in a corner", "others": "other masks"}.items():
            rows = getattr(report.segmentation, key)
            columns_by_name |= {f"{word}, {name}": values for name, values in rows.items()}
    values = zip(*columns_by_name.values(), strict=True)
    rows = [_row(name, *numbers) for name, numbers in zip(report.image_names, values, strict=True)]
    return [["image", *columns_by_name], *rows]


def _row(title: str, *values: float) -> list[str]:
    return [title, *map(scientific, values)]
