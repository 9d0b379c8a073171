"""The table of remedies: readable position before and after each, and what it costs."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from vispe.errors import OptionError
from vispe.evaluate.probe.splits import cell
from vispe.report.table import aligned, json_entries, json_list

NAMES = {
    "none": "untouched",
    "blank": "channels blanked",
    "svd": "SVD debias",
    "published_average": "average, published form",
    "d4_average": "average, 8 poses",
    "shift_average": "average, {n} shifts",
    "d4_shift_average": "average, 8 poses x {n} shifts",
}
"""Remedies by key, in the order of the table; an average over n shifts of whole patches."""


@dataclass(frozen=True)
class BaselineRow:
    """What one remedy leaves.

    Attributes:
        key: of `NAMES`.
        name: in words.
        r2: held-out R², mean over masks, (targets, images); NaN where the remedy does not exist.
        shuffled: the same with the patches of the target in random order, the control.
        rank: effective rank of the features, (images,).
        cosine: to the untouched features, mean over patches, (images,).
        passes: forward passes for each image.
        detail: what was blanked or removed, or why there are no numbers.
    """

    key: str
    name: str
    r2: np.ndarray
    shuffled: np.ndarray
    rank: np.ndarray
    cosine: np.ndarray
    passes: int
    detail: str = ""

    @property
    def known(self) -> bool:
        """Whether there are numbers."""
        return not np.isnan(self.rank).all()


@dataclass(frozen=True)
class BaselineTable:
    """All remedies on the same images, with the same fitted patches.

    Attributes:
        targets: names, the headline first.
        rows: the untouched features first.
        n_images: number of images.
        chosen_on: where the blanked channels come from, in words.
        settings: what the numbers depend on.
    """

    targets: tuple[str, ...]
    rows: tuple[BaselineRow, ...]
    n_images: int
    chosen_on: str
    settings: dict[str, Any]

    def row(self, key: str) -> BaselineRow:
        """Return the row of a remedy by its key."""
        for row in self.rows:
            if row.key == key:
                return row
        raise OptionError(f"There is no remedy {key!r}; there are {', '.join(r.key for r in self.rows)}.")

    def left(self, row: BaselineRow) -> float:
        """Return what a remedy leaves: the median R² over images of the target that is read best."""
        return float(np.median(row.r2, axis=1).max())

    @property
    def verdict(self) -> str:
        """One sentence on the cheapest remedy that removes position, or on the strongest."""
        before = self.left(self.rows[0])
        if np.isnan(before):
            return "cannot be judged: a target is constant on this grid"
        if before < 0.1:
            return f"nothing to remedy: the untouched features have held-out R² {before:.2f} at most"
        others = [row for row in self.rows[1:] if row.known]
        enough = [row for row in others if self.left(row) < 0.1]
        best = min(enough, key=lambda row: (row.passes, -np.median(row.rank)), default=None)
        best = best or min(others, key=self.left)
        share = np.median(best.rank) / np.median(self.rows[0].rank)
        effect = f"held-out R² of the target that is read best from {before:.2f} to {self.left(best):.2f}"
        effect += f", effective rank x {share:.2f}"
        if best.passes:
            effect += f", {best.passes} forward pass{'es' * (best.passes != 1)} for each image"
        lead = "position is removed by" if enough else "no remedy removes position; the strongest is"
        return f"{lead} '{best.name}': {effect}"

    @property
    def notes(self) -> tuple[str, ...]:
        """What a reader must know of single rows, one sentence each."""
        notes = [f"{row.name[0].upper()}{row.name[1:]}: {row.detail}." for row in self.rows if row.detail]
        if max(np.nanmedian(row.shuffled[0]) for row in self.rows if row.known) > 0.1:
            notes.append("Shuffled positions were read too, so these scores mean nothing.")
        return tuple(notes)

    def table(self) -> list[list[str]]:
        """Return the table of medians over images as text, heads first."""
        rows = [["remedy", *self.targets, "shuffled", "effective rank", "cosine", "passes"]]
        for row in self.rows:
            values = [*np.median(row.r2, axis=1), np.median(row.shuffled[0])]
            cells = [*map(cell, values), f"{np.median(row.rank):.1f}", f"{np.median(row.cosine):.2f}"]
            rows.append([row.name, *(cells if row.known else ["-"] * len(cells)), str(row.passes)])
        return rows

    def to_markdown(self) -> str:
        """Return `table` as Markdown, its columns aligned."""
        return aligned(self.table())

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, every value by image; NaN becomes `None`."""
        facts = json_entries(self, "verdict", "notes", "targets", "n_images", "chosen_on", "settings")
        return facts | {
            "rows": [
                {
                    "key": row.key,
                    "name": row.name,
                    "r2_heldout": dict(zip(self.targets, json_list(row.r2), strict=True)),
                    "shuffled": dict(zip(self.targets, json_list(row.shuffled), strict=True)),
                    "effective_rank": json_list(row.rank),
                    "cosine": json_list(row.cosine),
                    "forward_passes": row.passes,
                    "detail": row.detail,
                }
                for row in self.rows
            ],
        }
