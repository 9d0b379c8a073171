"""Self-contained HTML reports: verdict, tables and embedded figures in one file.

>>> page = Page("vit_small_patch16_224", "Rotation report", "strong dependence (E = 0.41)", "bad")
>>> page.section("Features")
>>> page.table([["transform", "mean"], ["rot90", "0.41"]])
>>> page.html().startswith("<!doctype html>")
True

`page.figure(figure, caption)` embeds a matplotlib figure, `page.write("report.html")` writes the file.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Sequence
from html import escape
from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from vispe.errors import ShapeError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

Tone = Literal["good", "mild", "bad", "plain"]

_WIDE = 36  # characters above which a table cell is formatted as a sentence
_STYLE = """
:root { --ink: #22282e; --soft: #5d6771; --line: #dfe3e7; --paper: #ffffff; --shade: #f6f7f9; }
* { box-sizing: border-box; }
body { margin: 0; background: var(--shade); color: var(--ink); font: 16px/1.5 system-ui, sans-serif; }
main { max-width: 72rem; margin: 0 auto; padding: 2rem 1.5rem 4rem; background: var(--paper); min-height: 100vh; }
h1 { font-size: 1.05rem; font-weight: 500; color: var(--soft); margin: 0; }
h2 { font-size: 1.25rem; margin: 2.5rem 0 .5rem; padding-top: 1rem; border-top: 1px solid var(--line); }
.verdict { font-size: 1.6rem; line-height: 1.3; font-weight: 650; margin: .3rem 0 .6rem; }
.good { color: #0072b2; } .bad { color: #d55e00; } .mild { color: #8a6100; }
p { max-width: 50rem; margin: .5rem 0; } .soft { color: var(--soft); font-size: .9rem; }
.wide { overflow-x: auto; }
table { border-collapse: collapse; font-size: .9rem; font-variant-numeric: tabular-nums; margin: .75rem 0; }
th, td { padding: .3rem .75rem; border-bottom: 1px solid var(--line); text-align: right; white-space: nowrap; }
th { border-bottom: 2px solid var(--ink); font-weight: 600; } th.left, td.left { text-align: left; }
tr.quiet td { color: var(--soft); }
figure { margin: 1rem 0; } figure img { max-width: 100%; height: auto; }
figcaption { color: var(--soft); font-size: .9rem; }
td.words { white-space: normal; min-width: 9rem; max-width: 24rem; }
details > summary { cursor: pointer; margin: .75rem 0; color: var(--soft); }
@media (prefers-color-scheme: dark) {
  :root { color-scheme: dark; --ink: #e6e9ec; --soft: #9aa5af; --line: #343c44; --paper: #171b1f; --shade: #0f1215; }
  .good { color: #56b4e9; } .bad { color: #f28e4b; } .mild { color: #e0b44c; }
  figure img { background: white; padding: .5rem; border-radius: 6px; }
}
@page { size: A4; margin: 12mm; }
@media print {
  :root { --ink: #000; --soft: #444; --line: #bbb; --paper: #fff; --shade: #fff; font-size: 11px; }
  body { font-size: 11px; line-height: 1.35; } main { max-width: none; padding: 0; min-height: 0; }
  .verdict { font-size: 1.35rem; } h2 { margin: 1rem 0 .3rem; padding-top: .5rem; } figure { margin: .5rem 0; }
  p { max-width: none; margin: .25rem 0; } .wide { overflow: visible; } table { font-size: .85rem; margin: .4rem 0; }
  th, td { padding: .15rem .4rem; white-space: normal; } h2, figure, tr { break-inside: avoid; }
  h2 { break-after: avoid; } figure img { max-height: 90mm; width: auto; }
}
"""


class Page:
    """An HTML report that is filled from top to bottom.

    Args:
        subject: the measured subject, such as the name of a model.
        kind: kind of report.
        verdict: the conclusion in one sentence.
        tone: colour of the verdict.
    """

    def __init__(self, subject: str, kind: str, verdict: str, tone: Tone = "plain") -> None:
        self._title = f"{kind}: {subject}"
        self._parts = [f"<h1>{escape(self._title)}</h1>", f'<p class="verdict {tone}">{escape(verdict)}</p>']

    def section(self, title: str) -> None:
        """Start a section with a heading."""
        self._parts.append(f"<h2>{escape(title)}</h2>")

    def text(self, words: str, *, soft: bool = False) -> None:
        """Add a paragraph, in grey if `soft`. Empty text is ignored."""
        if words:
            self._parts.append(f"<p{' class=soft' * soft}>{escape(words)}</p>")

    def table(
        self,
        rows: Sequence[Sequence[str]],
        *,
        left: Sequence[int] = (0,),
        quiet: Sequence[int] = (),
        folded: str = "",
    ) -> None:
        """Add a table.

        Args:
            rows: cells as text; the first row is the header.
            left: left-aligned columns; the others are right-aligned numbers.
            quiet: rows in grey, such as controls, counted without the header.
            folded: label of a collapsed section that contains the table; '' for a visible table.

        Raises:
            ShapeError: the rows differ in length.
        """
        if len({len(row) for row in rows}) != 1:
            raise ShapeError(f"Page.table needs rows of equal length, got {[len(row) for row in rows]}.")

        def line(cells: Sequence[str], tag: str, kind: str = "") -> str:
            marked = (f"<{tag}{_classes(c, i in left)}>{escape(c)}</{tag}>" for i, c in enumerate(cells))
            return f"<tr{kind}>{''.join(marked)}</tr>"

        body = (line(r, "td", " class=quiet" * (i in quiet)) for i, r in enumerate(rows[1:]))
        table = f"<div class=wide><table>{line(rows[0], 'th')}{''.join(body)}</table></div>"
        if folded:
            table = f"<details><summary>{escape(folded)}</summary>{table}</details>"
        self._parts.append(table)

    def figure(self, figure: Figure, caption: str) -> None:
        """Embed a matplotlib figure as PNG, with a caption that is also its alternative text."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        self.image(buffer.getvalue(), caption)

    def image(self, data: bytes, caption: str) -> None:
        """Embed a PNG or JPEG, with a caption that is also its alternative text."""
        kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
        words, text = escape(caption, quote=True), base64.b64encode(data).decode()
        image = f'<img alt="{words}" src="data:image/{kind};base64,{text}">'
        self._parts.append(f"<figure>{image}<figcaption>{words}</figcaption></figure>")

    def panels(self, images: Sequence[tuple[str, bytes, tuple[int, int]]], caption: str) -> None:
        """Add a row of images at equal height.

        Args:
            images: title, PNG or JPEG, and size (width, height) of each.
            caption: caption of the row.
        """
        row_height, gap, title_height = 300, 12, 24
        left, parts = 0.0, []
        for title, data, (width, height) in images:
            kind, scaled_width = "png" if data.startswith(b"\x89PNG") else "jpeg", row_height * width / height
            text = base64.b64encode(data).decode()
            parts.append(
                f'<text x="{left:.0f}" y="16" font-size="14" fill="currentColor">{escape(title)}</text>'
            )
            parts.append(
                f'<image x="{left:.0f}" y="{title_height}" width="{scaled_width:.0f}" height="{row_height}" '
                f'href="data:image/{kind};base64,{text}"/>'
            )
            left += max(scaled_width, 8.0 * len(title)) + gap
        self._svg(f"0 0 {left - gap:.0f} {row_height + title_height}", parts, caption)

    def histogram(self, values: Sequence[float] | np.ndarray, bins: int, caption: str) -> None:
        """Add a histogram of finite numbers.

        Args:
            values: numbers, at least one.
            bins: number of bars.
            caption: description of the numbers, with their unit.
        """
        counts, edges = np.histogram(np.asarray(values, float), bins)
        width, height, foot = 480, 120, 18
        step, highest = width / bins, max(int(counts.max()), 1)
        parts = []
        for i, n in enumerate(counts.tolist()):
            bar, words = height * n / highest, f"{edges[i]:.3g} to {edges[i + 1]:.3g}: {n}"
            parts.append(
                f'<rect x="{i * step:.1f}" y="{height - bar:.1f}" width="{step - 1:.1f}" height="{bar:.1f}" '
                f'fill="#0072b2"><title>{words}</title></rect>'
            )
        for x, anchor, edge in ((0, "start", edges[0]), (width, "end", edges[-1])):
            parts.append(
                f'<text x="{x}" y="{height + foot - 4}" font-size="12" text-anchor="{anchor}" fill="currentColor">'
                f"{edge:.3g}</text>"
            )
        self._svg(f"0 0 {width} {height + foot}", parts, f"{caption}; highest bar: {highest}")

    def _svg(self, box: str, parts: Sequence[str], caption: str) -> None:
        """Add an SVG drawing, with a caption that is also its label."""
        words, width = escape(caption, quote=True), box.split()[2]
        head = f'<svg role="img" aria-label="{words}" viewBox="{box}" style="width:100%;max-width:{width}px">'
        self._parts.append(f"<figure>{head}{''.join(parts)}</svg><figcaption>{words}</figcaption></figure>")

    def html(self) -> str:
        """Return the page as HTML."""
        head = (
            '<meta charset="utf-8"><meta http-equiv="Content-Security-Policy" '
            "content=\"default-src 'none'; img-src data:; style-src 'unsafe-inline'; base-uri 'none'; "
            "form-action 'none'\">"
            '<meta name="viewport" content="width=device-width, initial-scale=1">'
            f"<title>{escape(self._title)}</title><style>{_STYLE}</style>"
        )
        body = "\n".join(self._parts)
        return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{body}\n</main></body></html>\n'

    def write(self, path: str | Path, force: bool = False) -> Path:
        """Write the page and return its path; an existing file is only replaced with `force`.

        Raises:
            InputError: the file exists and not `force`.
        """
        from vispe.utils.files import atomic_path

        with atomic_path(path, force) as temporary:
            temporary.write_text(self.html(), encoding="utf-8")
        return Path(path)


def _classes(cell: str, left: bool) -> str:
    """Return the CSS classes of a cell: sentences are wrapped, numbers are not."""
    if len(cell) > _WIDE:
        return ' class="left words"'
    return " class=left" if left else ""
