"""The report of a positional probe as one HTML page: verdict, tables, curves, remedies, and how to read them."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from vispe.errors import OptionError
from vispe.evaluate.probe.baseline_table import BaselineTable
from vispe.evaluate.probe.figures.baseline_figures import baselines_figure
from vispe.evaluate.probe.figures.curves import plot_probe_channels, plot_probe_layers
from vispe.evaluate.probe.figures.summary_figure import capital, plot_probe
from vispe.evaluate.probe.layer_probe import LayerProbe
from vispe.evaluate.probe.positional import ProbeResult
from vispe.report.figure_style import new_figure
from vispe.report.html_page import Page, Tone

if TYPE_CHECKING:
    from matplotlib.figure import Figure

KINDS = {"noise": "noise image", "textures": "texture", "images": "image"}
"""What one picture of each source is called; a verdict leads with the first source that was probed."""

_TARGETS = (
    "Targets: lr is the column of a patch, ud its row, lr+ud both; diag runs along the diagonal, radial from the "
    "centre to the rim, raster in reading order. R² is 1 when the place of a patch can be read from its features "
    "alone, and 0 or less when it cannot. It is measured on patches that were not fitted (held-out)."
)
_CONTROLS = (
    "Controls: 'random' are numbers that have nothing to do with the place, and 'shuffled' is the target with its "
    "patches in random order. A sound probe reads neither, so both must be 0 or less."
)
_CONTENT = (
    "Noise and homogeneous textures look alike everywhere, so what is read there is due to the model. A photograph of "
    "a layered or unevenly lit sample shows its places itself: compare with what the pixels tell."
)
_REMEDIES = (
    "Effective rank: in how many directions the features vary; a remedy that lowers it takes more than position. "
    "Cosine: likeness to the untouched features. Passes: how often the model must run for one image. The published "
    "form of the average adds the maps of turned and mirrored images as they are, so each patch mixes four places; "
    "the other averages bring the maps back first. What all eight poses share, the distance to the centre, stays in "
    "them; only shifts remove it. Shifts roll the image around, which makes a seam in images that do not repeat."
)


@dataclass(frozen=True)
class SourceProbe:
    """All that was probed on one kind of pictures.

    Attributes:
        probe: the final features.
        layers: every block, or None.
        baselines: remedies, or None.
    """

    probe: ProbeResult
    layers: LayerProbe | None = None
    baselines: BaselineTable | None = None

    def parts(self) -> tuple[tuple[str, LayerProbe | BaselineTable], ...]:
        """Return what was asked beside the final features, each with words to announce it."""
        parts = (("after every block", self.layers), ("remedies", self.baselines))
        return tuple((words, part) for words, part in parts if part is not None)

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values: those of the probe, and under `layers` and `baselines` what was asked of them."""
        parts = {"layers": self.layers, "baselines": self.baselines}
        return self.probe.to_dict() | {key: part.to_dict() for key, part in parts.items() if part is not None}


def heading(source: str, result: ProbeResult) -> str:
    """Return how many pictures of which kind were probed, such as '4 noise images'."""
    return f"{result.n_images} {KINDS[source]}{'s' * (result.n_images > 1)}"


def tone(score: float) -> Tone:
    """Return the colour of a verdict on an R²."""
    if np.isnan(score):
        return "plain"
    return "bad" if score >= 0.5 else "mild" if score >= 0.1 else "good"


def probe_page(subject: str, results: Mapping[str, SourceProbe]) -> Page:
    """Return the page of a report.

    Args:
        subject: what was probed, such as the name of a model.
        results: by source, of `KINDS`; the verdict is that of noise, else of textures, else of images.

    Raises:
        OptionError: nothing was probed, or an unknown source.
    """
    if not results or set(results) - set(KINDS):
        raise OptionError(
            f"A report of a probe needs results for some of {list(KINDS)}, got {list(results)}."
        )
    lead = next(source for source in KINDS if source in results)
    first = results[lead].probe
    page = Page(
        subject,
        "Positional probe",
        f"{capital(first.verdict)} ({heading(lead, first)})",
        tone(first.headline),
    )
    for source, result in results.items():
        title = heading(source, result.probe)
        page.section(title)
        page.text(f"{capital(result.probe.verdict)}.")
        page.text(" ".join(result.probe.notes))
        page.table(result.probe.table(), quiet=(len(result.probe.rows) - 1,))
        page.figure(plot_probe(result.probe, f"{subject}, {title}"), f"Probe of the final features, {title}.")
        if result.layers is not None:
            _add_layers(page, result.layers, title)
        if result.baselines is not None:
            _add_baselines(page, result.baselines, title)
    page.section("How to read this")
    for words in (_TARGETS, _CONTROLS, _CONTENT):
        page.text(words, soft=True)
    if any(result.baselines is not None for result in results.values()):
        page.text(_REMEDIES, soft=True)
    return page


def layers_figure(result: LayerProbe) -> "Figure":
    """Return a sheet of the curve over blocks, and of the channels of the block where position is read best."""
    figure = new_figure(9.6, 7.6)
    top, bottom = figure.subplots(2, 1, height_ratios=(1.2, 1))
    figure.get_layout_engine().set(hspace=0.06)
    plot_probe_layers(result, top)
    plot_probe_channels(result, best_block(result), bottom)
    return figure


def best_block(result: LayerProbe) -> int:
    """Return the block after which the headline target is read best."""
    return int(np.nan_to_num(result.curve, nan=-np.inf).argmax())


def _add_layers(page: Page, result: LayerProbe, title: str) -> None:
    page.section(f"After every block: {title}")
    page.text(f"{capital(result.verdict)}.")
    page.text(" ".join(result.notes))
    caption = "Above: held-out R² after every block, before the final norm; median over images, band: the middle half. "
    caption += f"Below: every channel alone, after block {best_block(result)}, where position is read best."
    page.figure(layers_figure(result), caption)
    page.table(
        result.table(), left=(0, len(result.targets) + 2), folded="All blocks, with their telling channels"
    )


def _add_baselines(page: Page, table: BaselineTable, title: str) -> None:
    page.section(f"Remedies: {title}")
    page.text(f"{capital(table.verdict)}.")
    caption = (
        f"Each dot is one of {table.n_images} images, lines and numbers are medians, diamonds the shuffled "
    )
    page.figure(baselines_figure(table), f"{caption}control. Blanked channels: {table.chosen_on}.")
    page.table(table.table())
    for note in table.notes:
        page.text(note, soft=True)
