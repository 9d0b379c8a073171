"""HTML report and figures of an audit: verdict, table, caveats of each measure, and curves over layers."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from vispe.errors import counted
from vispe.evaluate.audit.findings import Audit, Comparison, Finding
from vispe.evaluate.measure.base import FAMILIES
from vispe.utils.report.figure_style import (
    BLUE,
    FAINT,
    GREY,
    INK,
    ORANGE,
    SOFT,
    annotate,
    clean_axes,
    figure_title,
    new_figure,
    scale,
)
from vispe.utils.report.html_page import Page
from vispe.utils.report.result import Drawing, Note, Part, Rows, Section, report_page
from vispe.utils.report.table import capitalize, number

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

COLOURS = {"yes": ORANGE, "no": BLUE, "not decided": GREY}
CURVES = 4  # panels per row
_REMEDIES = (
    (
        {"probe", "pattern", "neighbours", "channels"},
        "Features depend on position. The cheapest remedy is vispe debias MODEL --method poses, a mean over eight "
        "forward passes, which removes row and column; or --method rasa, with images to fit on, in one pass. The "
        "distance to the centre remains in both; vispe retrofit removes it too, with hours of training. Audit the "
        "result with --against.",
    ),
    (
        {"turn"},
        "Features change when the image is rotated. vispe debias MODEL --method poses makes them equivariant under "
        "the eight poses, at eight forward passes per image.",
    ),
    (
        {"heads"},
        "Heads collapse onto one token. If it is a patch on plain background (see vispe health), vispe debias MODEL "
        "--method registers moves it to an additional token.",
    ),
)
_COMMANDS = (
    "vispe probe decodes the position after every block and after remedies; vispe rotate measures rotations, shifts "
    "and segmentations; vispe health inspects every head; vispe threecell trains an encoding on a task of relative "
    "positions."
)
FAR = 30.0  # range of the axis, in units of the limit


def plot_audit(audit: Audit, title: str) -> Figure:
    """Plot the value of every measure against its controls, and curves over layers."""
    layered = [f for f in audit.findings if len(f.outcome.per_layer) > 1]
    rows, tall = -(-len(layered) // CURVES), 1.3 + 0.3 * len(audit.findings)
    figure = new_figure(11.5, tall + 2.1 * rows)
    above, *below = np.atleast_1d(
        figure.subfigures(1 + bool(rows), 1, height_ratios=[tall, 2.1 * rows][: 1 + bool(rows)])
    )
    _overview(above.subplots(), audit, title)
    for subfigure in below:
        panels = subfigure.subplots(rows, CURVES, squeeze=False).flatten()
        for ax, finding in zip(panels, layered, strict=False):
            _curve(ax, finding)
        for ax in panels[len(layered) :]:
            ax.set_axis_off()
    return figure


def audit_page(audit: Audit, figure: Figure, against: Comparison | None = None) -> Page:
    """Return the HTML report of an audit.

    Args:
        audit: the findings.
        figure: return value of `plot_audit`.
        against: comparison with another model, if available.
    """
    quiet = [k for k, row in enumerate(audit.table()[1:]) if row[-1] != "yes"]
    values = {f.question: f"{number(f.value)} ({f.number})" for f in audit.findings}
    rows = [[row[0], values.get(row[0], row[1]), *row[2:]] for row in audit.table()]
    overview = Section(
        "",
        *map(Note, audit.notes),
        f"{counted(audit.images, 'image')}. The verdict is yes if the 95 % interval of the number minus its largest "
        "control is above the limit, no if it is below, and not decided otherwise.",
        Rows(rows, (0, 1, 2, 3, 4), quiet),
        Drawing(
            figure,
            "Top: each number minus its largest control, in units of its limit, with 95 % intervals over images; above "
            "1 means yes. Bottom: the number after every layer (solid) and for the controls (dashed).",
        ),
    )
    findings = sorted(audit.findings, key=lambda f: FAMILIES.index(f.family))
    caveats = (
        f"{capitalize(f.name.replace('_', ' '))}: {f.misleads} {f.outcome.note}".strip() for f in findings
    )
    sections = [overview, None if against is None else _comparison(against)]
    sections += [Section("Caveats of each number", *caveats), Section("Next steps", *next_steps(audit))]
    return report_page(audit.title, "Audit of positions", audit.verdict, audit.tone, sections)


def next_steps(audit: Audit) -> list[str]:
    """Return the cheapest remedy of each effect that the audit found, and related commands."""
    effects = {f.name for f in audit.findings if f.verdict == "yes"}
    steps = [words for names, words in _REMEDIES if effects & names]
    return [*steps, _COMMANDS]


def _comparison(against: Comparison) -> Section:
    heads: Part = Note(f"Heads of the two models were not compared: {against.heads_reason}.")
    if against.heads is not None:
        heads = Drawing(
            plot_heads(against),
            "Divergence between the heads of two layers: minimum over pairs of heads of the Jensen-Shannon "
            "divergence of attention, averaged over images, from 0 (identical) to 0.69 nats (disjoint). A dark "
            "diagonal means that layers attend to the same tokens as before.",
        )
    words = "Both models on the same images; a difference is significant if its interval excludes 0."
    return Section(f"Comparison with {against.second.title}", words, Rows(against.table()), heads)


def plot_heads(against: Comparison) -> Figure:
    """Plot the divergence between the layers of two models."""
    assert against.heads is not None
    rows, columns = against.heads.shape
    figure = new_figure(1.9 + 0.3 * columns, 1.6 + 0.3 * rows)
    ax = figure.subplots()
    image = ax.imshow(against.heads.numpy(), cmap="viridis", vmin=0, interpolation="nearest")
    ax.set_xticks(range(0, columns, 2))
    ax.set_yticks(range(0, rows, 2))
    ax.set_xlabel(f"layer of {against.second.title}", size=8.5, color=SOFT)
    ax.set_ylabel(f"layer of {against.first.title}", size=8.5, color=SOFT)
    ax.tick_params(length=0, labelsize=8)
    ax.spines[:].set_visible(False)
    scale(image, [ax], "nats")
    return figure


def _overview(ax: Axes, audit: Audit, title: str) -> None:
    """Plot every number minus its largest control, in units of its limit."""
    ax.set_xscale("symlog", linthresh=1.0)
    ax.axvspan(1, FAR, color=FAINT, zorder=0)
    for k, f in enumerate(audit.findings):
        value = (f.value - f.largest) / f.limit
        color = COLOURS[f.verdict]
        if f.margin is not None:
            low, high = (np.clip(bound / f.limit, -FAR, FAR) for bound in f.margin)
            ax.hlines(k, low, high, color=color, linewidth=2.2)
        if np.isfinite(value):
            ax.plot(np.clip(value, -FAR, FAR), k, "o", color=color, markersize=6)
        annotate(
            ax, f"{number(f.value)}: {f.verdict}", (1.01, k), (0, -3), ("axes fraction", "data"), color=color
        )
    ax.set_yticks(range(len(audit.findings)), [f.question for f in audit.findings])
    ax.set_xlim(-FAR, FAR)
    ax.set_xticks([-10, -1, 0, 1, 10], ["-10", "-1", "0", "limit", "10"])
    ax.invert_yaxis()
    clean_axes(ax, "x")
    figure_title(ax, title, "number minus its largest control, in units of the limit")


def _curve(ax: Axes, finding: Finding) -> None:
    """Plot a number after every layer, for the model and its controls."""
    per_layer = finding.outcome.per_layer
    layers = np.arange(len(per_layer))
    for control, values in finding.control_layers.items():
        ax.plot(layers[: len(values)], values, color=SOFT, linewidth=1, linestyle="--")
        annotate(ax, control, (layers[-1], values[-1]), (3, -3), size=8)
    ax.plot(layers, per_layer, color=COLOURS[finding.verdict], linewidth=2)
    clean_axes(ax, "y")
    ax.set_title(finding.name.replace("_", " "), size=9.5, loc="left", color=INK)
    ax.set_xticks(layers[:: max(1, len(layers) // 6)])
    ax.set_xlabel("layer", size=8.5, color=SOFT)
