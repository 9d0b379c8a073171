"""A report as one HTML file that needs nothing else: verdict, tables, and pictures inside.

>>> page = Page("vit_small_patch16_224", "Rotation report", "strong dependence (E = 0.41)", "bad")
>>> page.section("Features")
>>> page.table([["transform", "mean"], ["rot90", "0.41"]])
>>> page.html().startswith("<!doctype html>")
True

`page.figure(figure, caption)` puts a matplotlib figure inside, `page.write("report.html")` makes the file.
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

_WIDE = 36  # characters from which a cell of a table is a sentence
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
@media print {
  :root { --ink: #000; --soft: #444; --line: #bbb; --paper: #fff; --shade: #fff; }
  main { max-width: none; padding: 0; min-height: 0; } .wide { overflow: visible; } table { font-size: .68rem; }
  th, td { padding: .2rem .4rem; white-space: normal; } h2, figure, tr { break-inside: avoid; }
}
"""


class Page:
    """An HTML page that is filled from top to bottom.

    Args:
        subject: what was measured, such as the name of a model.
        kind: what kind of report it is.
        verdict: the sentence that a hurried reader takes away.
        tone: how the verdict is coloured.
    """

    def __init__(self, subject: str, kind: str, verdict: str, tone: Tone = "plain") -> None:
        self._title = f"{kind}: {subject}"
        self._parts = [f"<h1>{escape(self._title)}</h1>", f'<p class="verdict {tone}">{escape(verdict)}</p>']

    def section(self, title: str) -> None:
        """Start a part of the page under a heading."""
        self._parts.append(f"<h2>{escape(title)}</h2>")

    def text(self, words: str, *, soft: bool = False) -> None:
        """Add a paragraph; `soft` is for remarks. Empty words add nothing."""
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
            rows: cells as text, the heads of the columns first.
            left: columns that are set flush left; the others hold numbers.
            quiet: rows in grey, counted without the heads, such as controls.
            folded: words to click on before the table is seen.

        Raises:
            ShapeError: the rows differ in length.
        """
        if len({len(row) for row in rows}) != 1:
            raise ShapeError(f"A table has rows of one length, got {[len(row) for row in rows]}.")

        def line(cells: Sequence[str], tag: str, kind: str = "") -> str:
            marked = (f"<{tag}{_classes(c, i in left)}>{escape(c)}</{tag}>" for i, c in enumerate(cells))
            return f"<tr{kind}>{''.join(marked)}</tr>"

        body = (line(r, "td", " class=quiet" * (i in quiet)) for i, r in enumerate(rows[1:]))
        table = f"<div class=wide><table>{line(rows[0], 'th')}{''.join(body)}</table></div>"
        if folded:
            table = f"<details><summary>{escape(folded)}</summary>{table}</details>"
        self._parts.append(table)

    def figure(self, figure: Figure, caption: str) -> None:
        """Add a matplotlib figure as a PNG inside the page, with a caption that also describes it."""
        buffer = io.BytesIO()
        figure.savefig(buffer, format="png")
        self.picture(buffer.getvalue(), caption)

    def picture(self, data: bytes, caption: str) -> None:
        """Add a PNG or JPEG inside the page, with a caption that also describes it."""
        kind = "png" if data.startswith(b"\x89PNG") else "jpeg"
        words, text = escape(caption, quote=True), base64.b64encode(data).decode()
        image = f'<img alt="{words}" src="data:image/{kind};base64,{text}">'
        self._parts.append(f"<figure>{image}<figcaption>{words}</figcaption></figure>")

    def panels(self, pictures: Sequence[tuple[str, bytes, tuple[int, int]]], caption: str) -> None:
        """Add pictures of one scene alongside each other, at one height.

        Args:
            pictures: title, PNG or JPEG, and size (width, height) of each.
            caption: below all.
        """
        high, gap, head = 300, 12, 24
        left, parts = 0.0, []
        for title, data, (width, height) in pictures:
            kind, wide = "png" if data.startswith(b"\x89PNG") else "jpeg", high * width / height
            text = base64.b64encode(data).decode()
            parts.append(
                f'<text x="{left:.0f}" y="16" font-size="14" fill="currentColor">{escape(title)}</text>'
            )
            parts.append(
                f'<image x="{left:.0f}" y="{head}" width="{wide:.0f}" height="{high}" '
                f'href="data:image/{kind};base64,{text}"/>'
            )
            left += max(wide, 8.0 * len(title)) + gap
        self._drawing(f"0 0 {left - gap:.0f} {high + head}", parts, caption)

    def histogram(self, values: Sequence[float] | np.ndarray, bins: int, caption: str) -> None:
        """Add a histogram of finite numbers, drawn as bars.

        Args:
            values: at least one.
            bins: number of bars.
            caption: what the numbers are, with their unit.
        """
        counts, edges = np.histogram(np.asarray(values, float), bins)
        wide, high, foot = 480, 120, 18
        step, most = wide / bins, max(int(counts.max()), 1)
        parts = []
        for i, n in enumerate(counts.tolist()):
            tall, words = high * n / most, f"{edges[i]:.3g} to {edges[i + 1]:.3g}: {n}"
            parts.append(
                f'<rect x="{i * step:.1f}" y="{high - tall:.1f}" width="{step - 1:.1f}" height="{tall:.1f}" '
                f'fill="#0072b2"><title>{words}</title></rect>'
            )
        for x, anchor, edge in ((0, "start", edges[0]), (wide, "end", edges[-1])):
            parts.append(
                f'<text x="{x}" y="{high + foot - 4}" font-size="12" text-anchor="{anchor}" fill="currentColor">'
                f"{edge:.3g}</text>"
            )
        self._drawing(f"0 0 {wide} {high + foot}", parts, f"{caption}; highest bar: {most}")

    def _drawing(self, box: str, parts: Sequence[str], caption: str) -> None:
        """Add a drawing in SVG with a caption that also describes it."""
        words, width = escape(caption, quote=True), box.split()[2]
        head = f'<svg role="img" aria-label="{words}" viewBox="{box}" style="width:100%;max-width:{width}px">'
        self._parts.append(f"<figure>{head}{''.join(parts)}</svg><figcaption>{words}</figcaption></figure>")

    def html(self) -> str:
        """Return the page."""
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
        """Write the page; an existing file is replaced with `force` only.

        Raises:
            InputError: the file exists.
        """
        from vispe.files import atomic_path

        with atomic_path(path, force) as temporary:
            temporary.write_text(self.html(), encoding="utf-8")
        return Path(path)


def _classes(cell: str, left: bool) -> str:
    """Return the classes of a cell: sentences are broken, numbers are not."""
    if len(cell) > _WIDE:
        return ' class="left words"'
    return " class=left" if left else ""
