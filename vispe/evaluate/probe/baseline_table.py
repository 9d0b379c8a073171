"""Table of debiasing methods: remaining position, and cost."""

from dataclasses import dataclass
from typing import Any

import numpy as np

from vispe.errors import OptionError
from vispe.evaluate.probe.splits import cell
from vispe.utils.report.result import Result
from vispe.utils.report.table import json_entries, json_list

NAMES = {
    "none": "untouched",
    "blank": "channels blanked",
    "svd": "SVD debias",
    "published_average": "average, published form",
    "d4_average": "average, 8 poses",
    "shift_average": "average, {n} shifts",
    "d4_shift_average": "average, 8 poses x {n} shifts",
    "rasa_published": "RASA, published form",
    "rasa": "RASA",
    "rasa_mixed": "RASA, fitted on mixed images",
    "d4_rasa": "average, 8 poses, then RASA",
}
"""Debiasing methods by key, in the order of the table; averages are over n shifts by whole patches."""


@dataclass(frozen=True)
class BaselineRow:
    """Result of one debiasing method.

    Attributes:
        key: key of the method in `NAMES`.
        name: human-readable name.
        r2: held-out R², mean over masks, (targets, images); NaN if the method is not available.
        shuffled: held-out R² for targets with shuffled patches, the control.
        knn: held-out R² of a non-linear probe of the headline, nearest neighbours, (images,).
        rank: effective rank of the features, (images,).
        cosine: cosine similarity to the original features, mean over patches, (images,).
        passes: forward passes per image.
        detail: the blanked channels, or the reason for missing numbers.
    """

    key: str
    name: str
    r2: np.ndarray
    shuffled: np.ndarray
    knn: np.ndarray
    rank: np.ndarray
    cosine: np.ndarray
    passes: int
    detail: str = ""

    @property
    def known(self) -> bool:
        """Whether the method is available."""
        return not np.isnan(self.rank).all()


@dataclass(frozen=True)
class BaselineTable(Result):
    """All debiasing methods on the same images and training patches.

    Attributes:
        targets: names, the headline first.
        rows: the original features first.
        n_images: number of images.
        chosen_on: how the blanked channels were selected.
        settings: options that affect the numbers.
    """

    targets: tuple[str, ...]
    rows: tuple[BaselineRow, ...]
    n_images: int
    chosen_on: str
    settings: dict[str, Any]

    def row(self, key: str) -> BaselineRow:
        """Return the row of a method by its key.

        Raises:
            OptionError: an unknown key.
        """
        for row in self.rows:
            if row.key == key:
                return row
        raise OptionError(
            f"row: unknown method, got {key!r}. Use one of {', '.join(r.key for r in self.rows)}."
        )

    def remaining_r2(self, row: BaselineRow) -> float:
        """Return the remaining position: the median R² over images of the best target."""
        return float(np.median(row.r2, axis=1).max())

    @property
    def verdict(self) -> str:
        """Verdict in one sentence: the cheapest method that removes position, otherwise the most effective method."""
        before = self.remaining_r2(self.rows[0])
        if np.isnan(before):
            return "cannot be judged: a target is constant on this grid"
        if before < 0.1:
            return f"no position to remove: the original features have held-out R² of at most {before:.2f}"
        others = [row for row in self.rows[1:] if row.known]
        enough = [row for row in others if self.remaining_r2(row) < 0.1]
        best = min(enough, key=lambda row: (row.passes, -np.median(row.rank)), default=None)
        best = best or min(others, key=self.remaining_r2)
        ratio = np.median(best.rank) / np.median(self.rows[0].rank)
        effect = f"held-out R² of the best target from {before:.2f} to {self.remaining_r2(best):.2f}"
        effect += f", effective rank x {ratio:.2f}"
        if best.passes:
            effect += f", {best.passes} forward pass{'es' * (best.passes != 1)} per image"
        lead = "position is removed by" if enough else "no method removes position; the strongest is"
        return f"{lead} '{best.name}': {effect}"

    @property
    def notes(self) -> tuple[str, ...]:
        """Remarks on single rows, one sentence each."""
        notes = [f"{row.name[0].upper()}{row.name[1:]}: {row.detail}." for row in self.rows if row.detail]
        if max(np.nanmedian(row.shuffled[0]) for row in self.rows if row.known) > 0.1:
            notes.append("Shuffled positions can be read too, so the scores are invalid.")
        return tuple(notes)

    def table(self) -> list[list[str]]:
        """Return the table of medians over images as text, header first."""
        rows = [["remedy", *self.targets, "kNN", "shuffled", "effective rank", "cosine", "passes"]]
        for row in self.rows:
            values = [*np.median(row.r2, axis=1), np.median(row.knn), np.median(row.shuffled[0])]
            cells = [*map(cell, values), f"{np.median(row.rank):.1f}", f"{np.median(row.cosine):.2f}"]
            rows.append([row.name, *(cells if row.known else ["-"] * len(cells)), str(row.passes)])
        return rows

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values, all values by image; NaN becomes `None`."""
        facts = json_entries(self, "verdict", "notes", "targets", "n_images", "chosen_on", "settings")
        return facts | {
            "rows": [
                {
                    "key": row.key,
                    "name": row.name,
                    "r2_heldout": dict(zip(self.targets, json_list(row.r2), strict=True)),
                    "shuffled": dict(zip(self.targets, json_list(row.shuffled), strict=True)),
                    "knn": json_list(row.knn),
                    "effective_rank": json_list(row.rank),
                    "cosine": json_list(row.cosine),
                    "forward_passes": row.passes,
                    "detail": row.detail,
                }
                for row in self.rows
            ],
        }
