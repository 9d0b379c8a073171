"""Figures of results: the label map over the image with a legend and a scale bar, and uncertainty maps.

Everything is drawn pixel by pixel with Pillow, so the figure has the image's own resolution and no global
state is changed.  Text is set in DejaVu Sans, which ships with Matplotlib.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from importlib.util import find_spec
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from vispe.errors import InputError, ShapeError, counted
from vispe.segment.features.threads import in_order

Color = tuple[int, int, int]

PALETTE: tuple[Color, ...] = tuple(
    (code >> 16, code >> 8 & 255, code & 255)
    for code in (
        *(0x0072B2, 0xE69F00, 0x009E73, 0xD55E00, 0x56B4E9, 0xCC79A7, 0xF0E442),
        *(0x550022, 0x001199, 0x99FFEE, 0x115555, 0x554400, 0xEEBBAA, 0xAA4444),
        *(0x7777FF, 0x550055, 0x5500FF, 0xBBDDFF, 0x885577, 0xBBFFAA),
    )
)
"""Twenty colours for classes 1, 2, ...

The first seven are those of Okabe and Ito, sorted by contrast; the others were chosen one by one to maximise the
smallest CIEDE2000 distance to all earlier ones, for normal vision and the three types of colour blindness.
"""

SMALLEST = 480
"""Images with a longer side below this are enlarged by an integer factor, to match the size of the legend."""

_BAND = 1 << 19  # pixels per band

INK, PAPER, FAINT = (32, 32, 32), (255, 255, 255), (210, 210, 210)


@dataclass(frozen=True)
class _Page:
    """Sizes shared by the parts of a figure: text height, line width and gap in pixels; two fonts."""

    text: int
    line_width: int
    gap: int
    font: ImageFont.FreeTypeFont
    bold: ImageFont.FreeTypeFont


def overlay(
    image: np.ndarray,
    labels: np.ndarray,
    names: Sequence[str],
    colors: Sequence[Color] | None = None,
    alpha: float = 0.4,
    pixel_size: tuple[float, float] | None = None,
    title: str | None = None,
    step: int = 1,
    counts: np.ndarray | None = None,
    legend: Sequence[str] | None = None,
) -> np.ndarray:
    """Draw a label map over its image, with class boundaries, a legend with area fractions and a scale bar.

    Pixels are not resampled; only images with a longer side below `SMALLEST` are enlarged, by an integer factor.
    Legend and scale bar are drawn outside the image.  Area fractions are proportions of the pixels with data.

    Args:
        image: (h, w) or (h, w, c) float in [0, 1]; 1 or 2 channels are shown as the grey of the first, more
            than 3 as the grey of their mean.
        labels: (h, w) integers: 0 = no data (not tinted), 1..K.
        names: the K class names.
        colors: K colours (r, g, b) in 0..255; default `PALETTE`.
        alpha: weight of the class colour, 0 to 1.
        pixel_size: microns per pixel (y, x); without it the scale bar counts pixels.
        title: a line above the image.
        step: each pixel of the arrays represents step x step pixels of the image, as counted by the scale bar.
        counts: (K + 1,) pixels of each label in the full image, if the arrays are a subset; for the legend.
        legend: K texts after the names in the legend, instead of the area fractions.

    Returns:
        (H, W, 3) uint8, larger than the image by the legend and the scale bar.

    Raises:
        ShapeError: `labels` and `image` differ in size.
        InputError: labels beyond the names, too few colours, or `alpha` outside [0, 1].
    """
    colors = _checked(image, labels, names, colors, alpha)
    h, w = labels.shape
    factor = max(1, -(-SMALLEST // max(h, w)))
    bands = _blended(image, labels, colors, alpha, factor)
    page = _page(max(h, w) * factor)
    if counts is None:
        counts = np.bincount(labels.ravel(), minlength=len(names) + 1)
    if legend is None:
        rows = _legend_rows(names, colors, counts)
    else:
        rows = [(color, name, text) for color, name, text in zip(colors, names, legend, strict=False)]
    bar = _scale_bar(page, w * step, factor / step, pixel_size)
    return _compose(page, (w * factor, h * factor), bands, rows, bar, title)


def uncertainty_image(unc: np.ndarray) -> np.ndarray:
    """Convert uncertainty (h, w) in [0, 1] to uint8 grey, 255 = undecided; NaN (no data) becomes 0.

    The scale is linear and the same for all images, so values can be recovered: grey / 255.

    Raises:
        ShapeError: not two-dimensional.
        InputError: values outside [0, 1].
    """
    if unc.ndim != 2:
        raise ShapeError(f"an uncertainty map must have shape (h, w), got {unc.shape}.")
    known = np.isfinite(unc)
    values = np.where(known, unc, 0)
    if values.size and (values.min() < -1e-6 or values.max() > 1 + 1e-6):
        raise InputError(f"uncertainty must be in [0, 1], got {values.min():g} to {values.max():g}.")
    return np.rint(np.clip(values, 0, 1) * 255).astype(np.uint8)


def boundaries(labels: np.ndarray, width: int = 1) -> np.ndarray:
    """Return the mask (h, w) of pixels of the higher class within `width` pixels of a class boundary."""
    low = np.zeros(labels.shape, bool)
    for axis in (0, 1):
        values = labels.swapaxes(0, axis)
        mark = low.swapaxes(0, axis)
        both_classes = (values[1:] > 0) & (values[:-1] > 0)
        mark[1:] |= both_classes & (values[1:] > values[:-1])
        mark[:-1] |= both_classes & (values[:-1] > values[1:])
    if width > 1:
        # maximum over a square, separable: shifted maxima are faster than a SciPy filter
        spread = np.where(low, labels, 0)
        for axis in (0, 1):
            near = spread.swapaxes(0, axis).copy()
            far = spread.swapaxes(0, axis)
            for step in range(1, min(width, len(near))):
                np.maximum(far[step:], near[:-step], out=far[step:])
                np.maximum(far[:-step], near[step:], out=far[:-step])
        low = (spread == labels) & (labels > 0) & (spread > 0)
    return low


def _checked(
    image: np.ndarray, labels: np.ndarray, names: Sequence[str], colors: Sequence[Color] | None, alpha: float
) -> Sequence[Color]:
    if labels.ndim != 2 or image.ndim not in (2, 3) or image.shape[:2] != labels.shape:
        raise ShapeError(f"the image has shape {image.shape}, but the labels have {labels.shape}.")
    if labels.size == 0:
        raise ShapeError(f"the label map is empty, got shape {labels.shape}.")
    low, high = int(labels.min()), int(labels.max())
    if low < 0 or high > len(names):
        raise InputError(
            f"the labels contain {low if low < 0 else high}, but there are {len(names)} class names."
        )
    if not 0 <= alpha <= 1:
        raise InputError(f"alpha={alpha:g} must be between 0 and 1.")
    colors = [PALETTE[i % len(PALETTE)] for i in range(len(names))] if colors is None else list(colors)
    if len(colors) < len(names):
        raise InputError(
            f"got {counted(len(colors), 'colour')} for {counted(len(names), 'class')}. Pass one colour per class."
        )
    return colors


def to_rgb(image: np.ndarray, factor: int) -> np.ndarray:
    """Convert an image (h, w, c) in [0, 1] to RGB (factor * h, factor * w, 3) uint8, as in `overlay`."""
    return _grey_or_rgb(image).repeat(factor, 0).repeat(factor, 1)


def bold_font(longest: int) -> ImageFont.FreeTypeFont:
    """Return the bold font for a figure whose longer side is `longest` pixels."""
    return _page(longest).bold


def _grey_or_rgb(image: np.ndarray) -> np.ndarray:
    """Return an image (h, w) or (h, w, c) in [0, 1] as RGB (h, w, 3) uint8."""
    if image.ndim == 2:
        image = image[..., None]
    if image.shape[2] > 3:
        image = image.mean(2, keepdims=True)
    elif image.shape[2] == 2:
        image = image[..., :1]
    grey = np.rint(np.clip(np.nan_to_num(image), 0, 1) * 255).astype(np.uint8)
    return np.repeat(grey, 3, axis=2) if grey.shape[2] == 1 else grey


def _blended(
    image: np.ndarray, labels: np.ndarray, colors: Sequence[Color], alpha: float, factor: int
) -> Iterator[tuple[int, np.ndarray]]:
    """Tint an image by its classes and mark their borders; yield bands (rows, w, 3) with the first row of each."""
    height, width = labels.shape
    # border width grows with the figure: about 1 px per 1500 px
    pen = max(2 if factor > 2 else 1, round(factor * max(height, width) / 1500))
    # premultiplied colours: one table look-up and one multiplication per pixel and channel
    table = np.array([(0, 0, 0), *colors], np.uint16)
    # opacity in 1/256: first half for class areas, second half (opaque) for borders
    opacity = np.full(2 * len(table), 256, np.uint16)
    opacity[1 : len(table)] = round(alpha * 256)
    opacity[0] = 0
    added = np.concatenate([table, table]) * opacity[:, None] + 128
    rows, margin = max(_BAND // width, 1), -(-pen // factor)

    def band(number: int) -> np.ndarray:
        # a margin around the band, so that borders are as thick at its edges as elsewhere
        top = number * rows
        bottom, first = min(top + rows, height), max(top - margin, 0)
        padded = labels[first : bottom + margin].astype(np.uint16).repeat(factor, 0).repeat(factor, 1)
        inside = slice((top - first) * factor, (bottom - first) * factor)
        codes = padded[inside]
        # border pixels use the second, opaque half of the tables
        codes[boundaries(padded, pen)[inside]] += len(table)
        shown = _grey_or_rgb(image[top:bottom]).repeat(factor, 0).repeat(factor, 1)
        background, out = (256 - opacity)[codes], np.empty_like(shown)
        for channel in range(3):
            tinted = shown[..., channel] * background
            tinted += added[:, channel][codes]
            out[..., channel] = tinted >> 8
        return out

    # bands bound the memory of large images
    for number, drawn in enumerate(in_order(band, -(-height // rows), 2)):
        yield number * rows * factor, drawn


def _page(longest: int) -> _Page:
    text = int(np.clip(round(longest / 42), 14, 120))
    return _Page(text, max(1, round(text / 14)), round(text * 0.7), _font(text, False), _font(text, True))


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


Row = tuple[Color | None, str, str]


def _legend_rows(names: Sequence[str], colors: Sequence[Color], counts: np.ndarray) -> list[Row]:
    data = int(counts[1:].sum())
    rows: list[Row] = [
        (color, name, _percent(100 * count / data if data else 0.0))
        for color, name, count in zip(colors, names, counts[1:], strict=False)
    ]
    if counts[0]:
        rows.append((None, "no data (of image)", _percent(100 * counts[0] / counts.sum())))
    return rows


def _percent(value: float) -> str:
    if value == 0:
        return "0 %"
    if value < 0.01:
        return "<0.01 %"
    return f"{value:.2f} %" if value < 1 else f"{value:.1f} %"


def _scale_bar(page: _Page, w: int, factor: float, pixel_size: tuple[float, float] | None) -> tuple[int, str]:
    """Return the length in figure pixels and the text of a bar of round length, at most a quarter of the width."""
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


def _compose(
    page: _Page,
    size: tuple[int, int],
    bands: Iterable[tuple[int, np.ndarray]],
    rows: list[Row],
    bar: tuple[int, str],
    title: str | None,
) -> np.ndarray:
    """Compose title (top), image, legend (right; below wide images) and scale bar (bottom)."""
    w, h = size
    gap, line = page.gap, round(page.text * 1.6)
    limit = max(w - 2 * gap, 12 * page.text)
    rows = [(c, _shortened(page.font, n, limit // 2), p) for c, n, p in rows]
    head = line + gap // 2 if title else 0
    wide = w > 1.7 * h
    # number of legend columns that fit below a wide image
    per_column = max(1, (w + gap) // (_column_width(page, rows) + 2 * gap)) if wide else 1
    depth = -(-len(rows) // per_column) if wide else max(1, min(len(rows), (h + line) // line))
    columns = [rows[i : i + depth] for i in range(0, len(rows), depth)]
    widths = [_column_width(page, column) for column in columns]
    legend_w = sum(widths) + 2 * gap * (len(widths) - 1)
    foot = round(page.text * 1.9)
    if wide:
        size = (
            max(w, legend_w, _text_width(page.font, bar[1])) + 2 * gap,
            head + h + foot + depth * line + 3 * gap,
        )
        corner = (gap, gap + head + h + foot + gap)
    else:
        size = (w + legend_w + 4 * gap, head + max(h + foot, depth * line) + 2 * gap)
        corner = (w + 3 * gap, gap + head)
    if title:
        title = "".join(c if c.isprintable() else "?" for c in title)  # a file name may contain line breaks
        title = _shortened(page.bold, title, size[0] - 2 * gap)
    canvas = Image.new("RGB", size, PAPER)
    for top, band in bands:
        canvas.paste(Image.fromarray(band), (gap, gap + head + top))
    pen = ImageDraw.Draw(canvas)
    if title:
        pen.text((gap, gap + line // 2), title, fill=INK, font=page.bold, anchor="lm")
    _draw_bar(page, pen, gap, gap + head + h, bar)
    x = corner[0]
    for column, width in zip(columns, widths, strict=True):
        for i, row in enumerate(column):
            _draw_row(page, pen, x, corner[1] + i * line + line // 2, width, row)
        x += width + 2 * gap
    return np.asarray(canvas)


def _draw_row(page: _Page, pen: ImageDraw.ImageDraw, x: int, y: int, width: int, row: Row) -> None:
    color, name, percent = row
    half = page.text // 2
    box = (x, y - half, x + 2 * half, y + half)
    pen.rectangle(box, fill=color or PAPER, outline=INK if color else FAINT, width=page.line_width)
    if color is None:
        pen.line((box[0], box[3], box[2], box[1]), fill=FAINT, width=page.line_width)
    pen.text((x + round(1.6 * page.text), y), name, fill=INK, font=page.font, anchor="lm")
    pen.text((x + width, y), percent, fill=INK, font=page.font, anchor="rm")


def _draw_bar(page: _Page, pen: ImageDraw.ImageDraw, x: int, y: int, bar: tuple[int, str]) -> None:
    length, text = bar
    thick = max(3, page.text // 4)
    middle = y + page.gap + page.text // 2
    pen.rectangle((x, middle - thick // 2, x + length - 1, middle - thick // 2 + thick - 1), fill=INK)
    pen.text((x + length + page.gap, middle), text, fill=INK, font=page.font, anchor="lm")


def _column_width(page: _Page, rows: Sequence[Row]) -> int:
    name = max((_text_width(page.font, n) for _, n, _ in rows), default=0)
    percent = max((_text_width(page.font, p) for _, _, p in rows), default=0)
    return round(1.6 * page.text) + name + page.text + percent


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
