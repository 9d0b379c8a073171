"""Results of measurements: verdict, notes, table and JSON values, and HTML reports made of sections.

A measurement derives its result from `Result`, which needs `verdict`, `table` and `to_dict`. Its HTML report is a list
of sections, which `report_page` renders.

>>> page = report_page("vit", "Audit", "no effect", "good", [Section("Rows", "Two.", Rows([["name"], ["a"]]))])
>>> page.html().count("<h2>"), "No effect" in page.html()
(1, True)
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from vispe.utils.files import write_json
from vispe.utils.report.html_page import Page, Tone
from vispe.utils.report.table import Table, capitalize, markdown_table

if TYPE_CHECKING:
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Grades:
    """Words for a number of which low values are good, and the tone of a verdict on it.

    >>> grades = Grades(0.05, 0.3, ("invariant", "mild dependence", "strong dependence"))
    >>> grades.word(0.1), grades.tone(0.1), grades.tone(float("nan"))
    ('mild dependence', 'mild', 'plain')

    Attributes:
        mild: values below are good.
        bad: values below are mild, others bad.
        words: for good, mild and bad values.
    """

    mild: float
    bad: float
    words: tuple[str, str, str]

    def word(self, value: float) -> str:
        """Return the word for a number that is not NaN."""
        return self.words[int(value >= self.mild) + int(value >= self.bad)]

    def tone(self, value: float) -> Tone:
        """Return the tone of a number; 'plain' for NaN."""
        tones: tuple[Tone, ...] = ("good", "mild", "bad")
        return "plain" if np.isnan(value) else tones[int(value >= self.mild) + int(value >= self.bad)]


class Result:
    """Base of the result of a measurement.

    Subclasses define `verdict`, one sentence; `table`, text with the header first; and `to_dict`, JSON values.

    Attributes:
        left: left-aligned columns of the table; None for all.
    """

    left: Sequence[int] | None = (0,)

    @property
    def verdict(self) -> str:
        """Verdict in one sentence."""
        raise NotImplementedError

    def table(self, **options: Any) -> Table:
        """Return the table as text, header first."""
        raise NotImplementedError

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values."""
        raise NotImplementedError

    def to_markdown(self, **options: Any) -> str:
        """Return the table as aligned Markdown; the options are those of `table`."""
        table = self.table(**options)
        return markdown_table(table, range(len(table[0])) if self.left is None else self.left)

    def write_json(self, path: str | Path, force: bool = False) -> Path:
        """Write `to_dict` to a JSON file; an existing file is only overwritten with `force`.

        Raises:
            InputError: the file exists.
        """
        write_json(path, self.to_dict(), force)
        return Path(path)


@dataclass(frozen=True)
class Note:
    """A paragraph in grey."""

    text: str


@dataclass(frozen=True)
class Rows:
    """A table; the arguments are those of `Page.table`."""

    rows: Table
    left: Sequence[int] = (0,)
    quiet: Sequence[int] = ()
    folded: str = ""


@dataclass(frozen=True)
class Drawing:
    """A matplotlib figure with a caption."""

    figure: Figure
    caption: str


Part = str | Note | Rows | Drawing
"""A part of a section; a string is a paragraph. Empty text is skipped."""


class Section:
    """A section of a report: a heading, '' for none, and parts in order; parts that are None are skipped."""

    def __init__(self, title: str, *parts: Part | None) -> None:
        self.title, self.parts = title, [part for part in parts if part is not None]


def report_page(
    subject: str, kind: str, verdict: str, tone: Tone, sections: Iterable[Section | None]
) -> Page:
    """Return an HTML report; `page.write(path)` writes the file.

    Args:
        subject: such as the name of the model.
        kind: kind of report.
        verdict: one sentence, capitalised here.
        tone: colour of the verdict.
        sections: in order; None is skipped.
    """
    page = Page(subject, kind, capitalize(verdict), tone)
    for section in sections:
        if section is None:
            continue
        if section.title:
            page.section(section.title)
        for part in section.parts:
            if isinstance(part, Rows):
                page.table(part.rows, left=part.left, quiet=part.quiet, folded=part.folded)
            elif isinstance(part, Drawing):
                page.figure(part.figure, part.caption)
            else:
                page.text(part.text if isinstance(part, Note) else part, soft=isinstance(part, Note))
    return page


def settings_section(notes: Iterable[str], settings: Mapping[str, Any], *more: Part) -> Section:
    """Return the last section of a report: notes, a table of settings, and `more` parts."""

    def text(value: Any) -> str:
        return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False, default=str)

    rows = [["setting", "value"], *([name, text(value)] for name, value in settings.items())]
    return Section("Settings and notes", *notes, Rows(rows, (0, 1)) if settings else None, *more)
