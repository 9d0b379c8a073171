"""Layout of a figure: image, title, legend with area fractions, and scale bar, drawn pixel by pixel with Pillow.

The figure has the image's own resolution, and no global state is changed. Text is set in DejaVu Sans, which ships
with Matplotlib.
"""

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vispe.segment.overlays.tint import Color

Row = tuple[Color | None, str, str]
"""A row of the legend: colour (None for no data), name, and text at the right."""

INK, PAPER, FAINT = (32, 32, 32), (255, 255, 255), (210, 210, 210)


@dataclass(frozen=True)
class TextStyle:
    """Sizes shared by the parts of a figure: text height, line width and gap in pixels; two fonts."""

    text: int
    line_width: int
    gap: int
    font: ImageFont.FreeTypeFont
    bold: ImageFont.FreeTypeFont


def text_style(longest: int) -> TextStyle:
    """Return the sizes and fonts for a figure whose longer side is `longest` pixels."""
    text = int(np.clip(round(longest / 42), 14, 120))
    return TextStyle(text, max(1, round(text / 14)), round(text * 0.7), _font(text, False), _font(text, True))


@lru_cache(maxsize=16)
def _font(size: int, bold: bool) -> ImageFont.FreeTypeFont:
    """Return DejaVu Sans as shipped with matplotlib, located without importing matplotlib (0.2 s)."""
    name = "DejaVuSans-Bold.ttf" if bold else "DejaVuSans.ttf"
    spec = find_spec("matplotlib")
    data = Path(spec.origin).parent / "mpl-data" if spec and spec.origin else None
    if data is None or not data.is_dir():  # some distributions store it elsewhere
        import matplotlib

        data = Path(matplotlib.get_data_path())
    return ImageFont.truetype(str(data / "fonts" / "ttf" / name), size)


def legend_rows(names: Sequence[str], colors: Sequence[Color], counts: np.ndarray) -> list[Row]:
    """Return the legend: colour, name and area fraction of each class, and the pixels without data, if any."""
    data = int(counts[1:].sum())
    rows: list[Row] = [
        (color, name, percent_text(100 * count / data if data else 0.0))
        for color, name, count in zip(colors, names, counts[1:], strict=True)
    ]
    if counts[0]:
        rows.append((None, "no data (of image)", percent_text(100 * counts[0] / counts.sum())))
    return rows


def percent_text(value: float) -> str:
    """Return a percentage as text, with more digits for small ones."""
    if value == 0:
        return "0 %"
    if value < 0.01:
        return "<0.01 %"
    return f"{value:.2f} %" if value < 1 else f"{value:.1f} %"


def scale_bar(w: int, factor: float, pixel_size: tuple[float, float] | None) -> tuple[int, str]:
    """Return the length in figure pixels and the text of a bar of round length, at most a quarter of the width.

    Args:
        w: width of the image in pixels.
        factor: figure pixels per image pixel.
        pixel_size: microns per pixel (y, x); None counts pixels.
    """
    unit = pixel_size[1] if pixel_size is not None else 1.0
    limit = max(w * unit / 4, unit)
    # largest of 1, 2 and 5 times a power of ten within the limit
    power = 10.0 ** np.floor(np.log10(limit) + 1e-9)
    length = next(m * power for m in (5, 2, 1) if m * power <= limit * (1 + 1e-9))
    pixels = max(1, round(length / unit * factor))
    if pixel_size is None:
        return pixels, f"{length:g} px"
    for scale, name in ((1e3, "mm"), (1.0, "µm"), (1e-3, "nm")):
        if length >= scale * (1 - 1e-9):
            return pixels, f"{length / scale:g} {name}"
    return pixels, f"{length * 1e3:g} nm"


def compose(
    style: TextStyle,
    size: tuple[int, int],
    bands: Iterable[tuple[int, np.ndarray]],
    rows: list[Row],
    bar: tuple[int, str],
    title: str | None,
) -> np.ndarray:
    """Compose title (top), image, legend (right; below wide images) and scale bar (bottom)."""
    w, h = size
    gap, line = style.gap, round(style.text * 1.6)
    limit = max(w - 2 * gap, 12 * style.text)
    rows = [(c, _shortened(style.font, n, limit // 2), p) for c, n, p in rows]
    head = line + gap // 2 if title else 0
    wide = w > 1.7 * h
    # number of legend columns that fit below a wide image
    per_column = max(1, (w + gap) // (_column_width(style, rows) + 2 * gap)) if wide else 1
    depth = -(-len(rows) // per_column) if wide else max(1, min(len(rows), (h + line) // line))
    columns = [rows[i : i + depth] for i in range(0, len(rows), depth)]
    widths = [_column_width(style, column) for column in columns]
    legend_w = sum(widths) + 2 * gap * (len(widths) - 1)
    foot = round(style.text * 1.9)
    if wide:
        size = (
            max(w, legend_w, _text_width(style.font, bar[1])) + 2 * gap,
            head + h + foot + depth * line + 3 * gap,
        )
        corner = (gap, gap + head + h + foot + gap)
    else:
        size = (w + legend_w + 4 * gap, head + max(h + foot, depth * line) + 2 * gap)
        corner = (w + 3 * gap, gap + head)
    if title:
        title = "".join(c if c.isprintable() else "?" for c in title)  # a file name may contain line breaks
        title = _shortened(style.bold, title, size[0] - 2 * gap)
    canvas = Image.new("RGB", size, PAPER)
    for top, band in bands:
        canvas.paste(Image.fromarray(band), (gap, gap + head + top))
    pen = ImageDraw.Draw(canvas)
    if title:
        pen.text((gap, gap + line // 2), title, fill=INK, font=style.bold, anchor="lm")
    _draw_bar(style, pen, gap, gap + head + h, bar)
    x = corner[0]
    for column, width in zip(columns, widths, strict=True):
        for i, row in enumerate(column):
            _draw_row(style, pen, x, corner[1] + i * line + line // 2, width, row)
        x += width + 2 * gap
    return np.asarray(canvas)


def _draw_row(style: TextStyle, pen: ImageDraw.ImageDraw, x: int, y: int, width: int, row: Row) -> None:
    color, name, percent = row
    half = style.text // 2
    box = (x, y - half, x + 2 * half, y + half)
    pen.rectangle(box, fill=color or PAPER, outline=INK if color else FAINT, width=style.line_width)
    if color is None:
        pen.line((box[0], box[3], box[2], box[1]), fill=FAINT, width=style.line_width)
    pen.text((x + round(1.6 * style.text), y), name, fill=INK, font=style.font, anchor="lm")
    pen.text((x + width, y), percent, fill=INK, font=style.font, anchor="rm")


def _draw_bar(style: TextStyle, pen: ImageDraw.ImageDraw, x: int, y: int, bar: tuple[int, str]) -> None:
    length, text = bar
    thick = max(3, style.text // 4)
    middle = y + style.gap + style.text // 2
    pen.rectangle((x, middle - thick // 2, x + length - 1, middle - thick // 2 + thick - 1), fill=INK)
    pen.text((x + length + style.gap, middle), text, fill=INK, font=style.font, anchor="lm")


def _column_width(style: TextStyle, rows: Sequence[Row]) -> int:
    name = max((_text_width(style.font, n) for _, n, _ in rows), default=0)
    percent = max((_text_width(style.font, p) for _, _, p in rows), default=0)
    return round(1.6 * style.text) + name + style.text + percent


def _text_width(font: ImageFont.FreeTypeFont, text: str) -> int:
    return int(np.ceil(font.getlength(text)))


def _shortened(font: ImageFont.FreeTypeFont, text: str, limit: int) -> str:
    """Replace the middle of a text wider than `limit` pixels by an ellipsis; names often differ only in their ends."""
    for length in range(len(text), 1, -1):
        tail = length // 3
        parts = text[: length - tail].rstrip(), text[len(text) - tail :].lstrip()
        short = text if length == len(text) else "…".join(parts)
        if _text_width(font, short) <= limit:
            return short
    return "…"
