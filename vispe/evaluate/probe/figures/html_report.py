"""HTML report of a positional probe: verdict, tables, curves, debiasing methods, and explanations."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vispe.errors import OptionError, counted
from vispe.evaluate.features.position_across_images import ImageProbe
from vispe.evaluate.probe.baseline_table import BaselineTable
from vispe.evaluate.probe.figures.baseline_figures import baselines_figure
from vispe.evaluate.probe.figures.curves import plot_probe_channels, plot_probe_layers
from vispe.evaluate.probe.figures.summary_figure import plot_probe
from vispe.evaluate.probe.layer_probe import LayerProbe
from vispe.evaluate.probe.positional import GRADES, ProbeResult
from vispe.utils.report.figure_style import new_figure
from vispe.utils.report.html_page import Page
from vispe.utils.report.result import Drawing, Note, Rows, Section, report_page
from vispe.utils.report.table import capitalize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {"noise": "noise image", "textures": "texture", "images": "image"}
"""Singular name of an image of each source; the verdict is that of the first source that was probed."""

_TARGETS = (
    "Targets: lr is the column of a patch, ud its row, lr+ud both; diag is the diagonal, radial the distance to the "
    "centre, raster the reading order. R² is 1 if the position of a patch can be decoded from its features, and 0 or "
    "less if it cannot. It is measured on patches that were not used for training (held-out)."
)
_CONTROLS = (
    "Controls: 'random' is noise that is independent of the position, and 'shuffled' is the target with shuffled "
    "patches. Neither may be predictable, so both must be 0 or less."
)
_CONTENT = (
    "Noise and homogeneous textures are statistically equal everywhere, so position in their features is due to the "
    "model. Images of layered or unevenly lit samples reveal the position themselves: compare with the pixels."
)
_ACROSS = (
    "Regressors are fitted on half of the images and scored on the others, so that only position that images have in "
    "common counts. Nearest neighbours and the network also find position that is not linear in the features. "
    "'shuffled' is a fit with permuted positions, and must be 0 or less."
)
_REMEDIES = (
    "Effective rank: number of directions in which the features vary; a method that lowers it removes more than "
    "position. Cosine: similarity to the original features. Passes: forward passes per image. The published form of "
    "the average adds the maps of rotated and reflected images without undoing the transform, so each patch mixes four "
    "positions; the other averages undo it first. The distance to the centre is common to all eight poses and remains; "
    "only shifts remove it. Shifts roll the image, which adds a seam to images that are not periodic. RASA removes the "
    "directions of linear regressions of row and column, fitted on images that are not scored; its published form does "
    "not standardise the features and has no ridge penalty. kNN: R² of a non-linear probe of the first target, the "
    "mean position of the 5 training patches with the nearest features; a linear method may leave it unchanged."
)


@dataclass(frozen=True)
class SourceProbe:
    """Results of the probe for one source of images.

    Attributes:
        probe: result for the final features.
        layers: result for every block, or None.
        baselines: result for debiasing methods, or None.
        across: result of probes across images, or None.
    """

    probe: ProbeResult
    layers: LayerProbe | None = None
    baselines: BaselineTable | None = None
    across: ImageProbe | None = None

    def parts(self) -> tuple[tuple[str, LayerProbe | BaselineTable | ImageProbe], ...]:
        """Return the results other than that of the final features, each with a heading."""
        parts = (
            ("after every block", self.layers),
            ("across images", self.across),
            ("remedies", self.baselines),
        )
        return tuple((words, part) for words, part in parts if part is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: those of the probe, and `layers`, `across_images` and `baselines` if available."""
        parts = {"layers": self.layers, "across_images": self.across, "baselines": self.baselines}
        return self.probe.to_dict() | {key: part.to_dict() for key, part in parts.items() if part is not None}


def heading(source: str, result: ProbeResult) -> str:
    """Return the number and kind of images, such as '4 noise images'."""
    return f"{result.n_images} {KINDS[source]}{'s' * (result.n_images > 1)}"


def probe_page(subject: str, results: Mapping[str, SourceProbe]) -> Page:
    """Return the HTML report.

    Args:
        subject: such as the name of the model.
        results: by source, a key of `KINDS`; the verdict is that of noise, otherwise of textures, otherwise of images.

    Raises:
        OptionError: no results, or an unknown source.
    """
    if not results or set(results) - set(KINDS):
        raise OptionError(
            f"probe_page: results must have keys of {list(KINDS)}, got {list(results)}. Pass at least one source."
        )
    lead = next(source for source in KINDS if source in results)
    first = results[lead].probe
    sections: list[Section | None] = []
    for source, result in results.items():
        probe, title = result.probe, heading(source, result.probe)
        figure = Drawing(plot_probe(probe, f"{subject}, {title}"), f"Probe of the final features, {title}.")
        scores = Rows(probe.table(), quiet=(len(probe.rows) - 1,))
        sections += [Section(title, f"{capitalize(probe.verdict)}.", " ".join(probe.notes), scores, figure)]
        sections += [None if result.layers is None else _layers(result.layers, title)]
        if result.across is not None:
            title_across = f"Across images, {title}"
            text = f"{capitalize(result.across.verdict)}."
            sections += [Section(title_across, text, Rows(result.across.table()), Note(_ACROSS))]
        sections += [None if result.baselines is None else _baselines(result.baselines, title)]
    words = [_TARGETS, _CONTROLS, _CONTENT]
    words += [_REMEDIES] if any(result.baselines is not None for result in results.values()) else []
    sections.append(Section("Explanation", *map(Note, words)))
    verdict = f"{first.verdict} ({heading(lead, first)})"
    return report_page(subject, "Positional probe", verdict, GRADES.tone(first.headline), sections)


def layers_figure(result: LayerProbe) -> "Figure":
    """Return a figure of the curve over blocks, and of the channels of the best block."""
    figure = new_figure(9.6, 7.6)
    top, bottom = figure.subplots(2, 1, height_ratios=(1.2, 1))
    figure.get_layout_engine().set(hspace=0.06)
    plot_probe_layers(result, top)
    plot_probe_channels(result, best_block(result), bottom)
    return figure


def best_block(result: LayerProbe) -> int:
    """Return the block with the highest R² of the headline target."""
    return int(np.nan_to_num(result.curve, nan=-np.inf).argmax())


def _layers(result: LayerProbe, title: str) -> Section:
    caption = (
        "Top: held-out R² after every block, before the final norm; median over images, band: quartiles. "
        f"Bottom: single channels after block {best_block(result)}, where R² is highest."
    )
    return Section(
        f"After every block: {title}",
        f"{capitalize(result.verdict)}.",
        " ".join(result.notes),
        Drawing(layers_figure(result), caption),
        Rows(result.table(), result.left, folded="All blocks, with their positional channels"),
    )


def _baselines(table: BaselineTable, title: str) -> Section:
    caption = (
        f"Each dot is one of {counted(table.n_images, 'image')}; lines and numbers are medians, diamonds the "
        f"shuffled control. Blanked channels: {table.chosen_on}."
    )
    figure = Drawing(baselines_figure(table), caption)
    words = f"{capitalize(table.verdict)}."
    return Section(f"Debiasing: {title}", words, figure, Rows(table.table()), *map(Note, table.notes))
