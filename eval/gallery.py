"""Draw one figure per registered encoding: its effect on one token.

python eval/gallery.py [NAME ...]

A bias is drawn as the values added to the logits, a rotary encoding as the score of equal queries and keys, an additive
one as the cosine similarity of the added vectors, mixing as its response to a single token, a sampler as its random
coordinate maps.
"""

from __future__ import annotations

import io
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (finds vispe)
import numpy as np
import torch
from matplotlib.axes import Axes
from matplotlib.colors import LinearSegmentedColormap
from matplotlib.figure import Figure
from PIL import Image
from torch import Tensor

import vispe
from vispe.attention import Expand
from vispe.attention.transform.abstract_transform import Transform
from vispe.attention.transform.blocks import BlockTransform
from vispe.attention.transform.pairs import PairRotation
from vispe.encodings.base import Additive, Biased, Encoding, Mixing, Rotary
from vispe.encodings.multi_softmax import calls_of, weights_of
from vispe.encodings.parts.positions.sampler import Sampler
from vispe.errors import UnsupportedCombination
from vispe.utils.report.figure_style import GREY, INK

OUT = Path(__file__).parents[1] / "docs" / "gallery"
HEADS, WIDTH, DEPTH = 8, 48, 12
GRIDS = {1: (25,), 2: (17, 17), 3: (3, 13, 13)}
SMALL = (7, 7)  # for encodings that only reach the neighbours
SIGNED = LinearSegmentedColormap.from_list("signed", ["#08519C", "#6BAED6", "#F7F7F5", "#F4A15D", "#B23A00"])
LINES = LinearSegmentedColormap.from_list("heads", ["#0B3C6F", "#0072B2", "#4FB3BF", "#E2A33B", "#D55E00"])


@dataclass
class View:
    """Contents of the three panels: values (h, n, n) per head, query and key; or an image for the right panel."""

    values: Tensor
    what: str
    right: Tensor | None = None  # (rows, n): drawn in place of the profiles
    right_title: str = ""
    tiles: bool = False  # the rows of `right` are maps of the grid
    weights: str = ""


def main() -> None:
    OUT.mkdir(parents=True, exist_ok=True)
    for name in sys.argv[1:] or vispe.list_encodings():
        (OUT / f"{name}.png").write_bytes(figure_png(name))
        print(name, (OUT / f"{name}.png").stat().st_size)


def figure_png(name: str) -> bytes:
    """Return the figure of an encoding as PNG."""
    if "positions" in vispe.encoding_info(name).kinds:
        return sampler_figure(name)
    axes = 2 if 2 in (ndim := vispe.encoding_info(name).ndim) else max(ndim)
    shape = SMALL if "mixing" in vispe.encoding_info(name).kinds else GRIDS[axes]
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(3)
        facts: dict[str, Any] = {"dim": HEADS * WIDTH, "num_heads": HEADS, "depth": DEPTH, "grid": shape}
        try:
            encoding = vispe.create_encoding(name, **facts).eval()
        except UnsupportedCombination:  # the encoding requires a causal mask
            encoding = vispe.create_encoding(name, **facts, causal=True).eval()
        view = view_of(encoding, shape)
        if encoding.name != "none" and _blank(view.values):
            fill(encoding)
            view = view_of(encoding, shape)
            view.weights = "random weights"
        elif list(encoding.parameters()):
            view.weights = "weights before training"
    return draw(name, view, shape)


def fill(encoding: Encoding) -> None:
    """Randomise parameters that are initialised to a constant (mostly 0), so that their effect is visible."""
    generator = torch.Generator().manual_seed(1)
    for parameter in encoding.parameters():
        if parameter.numel() == 1 or parameter.unique().numel() == 1:
            parameter.add_(torch.randn(parameter.shape, generator=generator).to(parameter))


def _blank(values: Tensor) -> bool:
    off = values - torch.diag_embed(values.diagonal(dim1=-2, dim2=-1))
    return bool(off.std() < 1e-6)


def view_of(encoding: Encoding, shape: tuple[int, ...]) -> View:
    pos = encoding.prepare(vispe.Grid(shape).positions())
    n = pos.tokens
    generator = torch.Generator().manual_seed(5)
    x = torch.randn(1, 1, HEADS * WIDTH, generator=generator).expand(1, n, -1).contiguous()
    if encoding.multi_softmax:
        q = torch.ones(1, HEADS, n, WIDTH)
        weights = weights_of(calls_of(q, q, q, [encoding], pos, 0, x))
        return View(weights[0], "attention weights between equal tokens")
    if isinstance(encoding, Biased):
        layer = next(i for i in range(DEPTH) if encoding.active(i))
        q = torch.randn(1, HEADS, 1, WIDTH, generator=generator).expand(-1, -1, n, -1)
        bias = encoding.bias(pos, layer, x)
        if bias is not None:
            return View(bias.dense(q=q, k=q, scale=WIDTH**-0.5)[0], "added to the logits")
    if isinstance(encoding, Rotary):
        transform = encoding.transform(pos, 0, x)
        ones = torch.ones(1, HEADS, n, WIDTH)
        noise = torch.randn(1, 1, 1, WIDTH, generator=generator).expand_as(ones)
        for token in (ones, noise):  # some rotations leave the vector of ones unchanged
            rotated = transform.query(token), transform.key(token)
            q, k = (torch.nn.functional.normalize(t, dim=-1)[0] for t in rotated)
            if (q @ k.mT).std() > 1e-5:
                break
        line = diagonal(shape)
        return View(
            q @ k.mT,
            "cosine of equal q and k after rotation",
            contributions(transform, q[0], k[0])[line].T,
            f"channels, along the {'diagonal' if len(shape) > 1 else 'line'}",
        )
    if isinstance(encoding, Additive):
        if encoding.reads_tokens:  # smooth random tokens
            few = torch.randn(1, HEADS * WIDTH, *(min(s, 4) for s in shape), generator=generator)
            x = torch.nn.functional.interpolate(few, shape, mode="bicubic", align_corners=True).flatten(2).mT
            table = (encoding.embed(x, pos) - x)[0]
        else:
            table = encoding.table(pos, torch.rand(1, 3, *(8 * s for s in shape), generator=generator))[0]
        unit = torch.nn.functional.normalize(table, dim=-1)
        chosen = torch.linspace(0, table.shape[1] - 1, 9 if len(shape) > 1 else 48).round().long()
        return View(
            (unit @ unit.T)[None],
            f"cosine similarity of the added vectors{' (smooth random tokens)' * encoding.reads_tokens}",
            table[:, chosen].T,
            "9 channels" if len(shape) > 1 else "channels",
            tiles=len(shape) > 1,
        )
    if isinstance(encoding, Mixing):
        layer = next(i for i in range(DEPTH) if encoding.active(i))
        tokens = torch.zeros(n, n, HEADS * WIDTH)
        tokens[torch.arange(n), torch.arange(n)] = 1
        response = encoding.mix(tokens, pos, layer) - encoding.mix(
            torch.zeros(1, n, HEADS * WIDTH), pos, layer
        )
        centre = response[_centre(shape)]
        return View(
            response.norm(dim=-1)[None],
            "norm of the response to one token",
            centre[:, :9].T,
            "9 channels",
            True,
        )
    return View(torch.zeros(1, n, n), "nothing")


def contributions(transform: Transform, q: Tensor, k: Tensor) -> Tensor:
    """Return the contribution of each pair, block or channel of head 1 to the score with the centre, (n, parts)."""
    centre = q.shape[0] // 2
    if isinstance(transform, PairRotation | Expand):  # the cosine of the rotation
        cos, sin = transform.cos[0, 0], transform.sin[0, 0]
        return cos * cos[centre] + sin * sin[centre]
    parts = q * k[centre] * WIDTH
    if isinstance(transform, BlockTransform) and transform.q is not None:
        size = transform.q.shape[-1]
        used = transform.q.shape[-3] * size
        return parts[:, :used].unflatten(1, (-1, size)).mean(-1)
    return parts


def diagonal(shape: tuple[int, ...]) -> Tensor:
    """Return the tokens from corner to corner of the middle slice."""
    side = shape[-1]
    start = (shape[0] // 2) * side * side if len(shape) == 3 else 0
    return start + torch.arange(side) * (side + 1 if len(shape) > 1 else 1)


def _centre(shape: tuple[int, ...]) -> int:
    index = 0
    for s in shape:
        index = index * s + s // 2
    return index


def _corner(shape: tuple[int, ...]) -> int:
    """Return a token near the first corner of the middle slice."""
    index = 0
    for i, s in enumerate(shape):
        index = index * s + (s // 2 if len(shape) == 3 and i == 0 else s // 8)
    return index


def sampler_figure(name: str) -> bytes:
    """Return the figure of a sampler: maps of one axis, tokens of a grid, and distances of neighbours."""
    sampler = vispe.create_encoding(name)
    assert isinstance(sampler, Sampler)
    generator, cells, device = torch.Generator().manual_seed(3), 14, torch.device("cpu")
    draws = [sampler.draw(cells, generator, device) for _ in range(200)]
    cells_index = torch.arange(cells, dtype=torch.float64)
    fixed = sampler.fixed(cells, device)
    figure = titled(name, "")
    figure.text(0.018, 0.035, "each axis of a 14 x 14 grid is drawn separately", size=8.5, color=GREY)
    left, middle, right = (figure.add_axes((x, 0.16, 0.235, 0.57)) for x in (0.05, 0.39, 0.735))
    for i, line in enumerate(draws[:7]):
        left.plot(cells_index, line, color=LINES(i / 6), lw=1.2, marker="o", markersize=2)
    left.plot(cells_index, cells_index if fixed is None else fixed, color=INK, lw=1.8, ls=(0, (2, 2)))
    _plain(left, "coordinates, 7 draws; dashed: evaluation", ticks=True)
    coords = sampler.prepare(vispe.Grid((cells, cells)).positions(), generator).coords[0]
    middle.scatter(coords[:, 1], coords[:, 0], s=7, c=np.arange(cells * cells) // cells, cmap=LINES)
    middle.invert_yaxis()
    middle.set_aspect("equal", adjustable="datalim")
    _plain(middle, "tokens of a grid, one draw", ticks=True)
    right.hist(torch.cat([line.diff() for line in draws]).numpy(), bins=40, color=LINES(0.2))
    _plain(right, "distances of neighbours, 200 draws", ticks=True)
    right.set_yticks([])
    return _png(figure)


def titled(name: str, weights: str) -> Figure:
    """Return an empty figure with the name, the kind and the summary of an encoding."""
    info = vispe.encoding_info(name)
    figure = Figure(figsize=(9.6, 3.5), dpi=100, facecolor="white")
    figure.text(0.018, 0.925, name, size=15, weight="bold", color=INK)
    kind = ", ".join(info.kinds) or "no position"
    words = f"{kind}, {weights}" if weights else kind
    figure.text(0.982, 0.93, words, size=10, color=GREY, ha="right")
    figure.text(0.018, 0.855, info.summary.replace("`", ""), size=9.5, color=INK)
    return figure


def draw(name: str, view: View, shape: tuple[int, ...]) -> bytes:
    figure = titled(name, view.weights)
    figure.text(0.018, 0.035, view.what, size=8.5, color=GREY)
    panels = [figure.add_axes((x, 0.13, 0.235, 0.60)) for x in (0.018, 0.345, 0.715)]
    values = view.values
    equal = values.shape[0] == 1 or bool((values - values[:1]).abs().max() < 1e-6)
    first = values[0].numpy()
    of = "" if equal else ", head 1"
    if len(shape) == 1:
        _map(panels[0], first, f"query by key{of}", None)
        last = values[-1].numpy()
        _map(panels[1], last, "the same, last head" if not equal else "all heads", None)
    else:
        flat = shape[-2:]
        slices = (
            first.reshape(len(first), *shape) if len(shape) == 3 else first.reshape(len(first), 1, *shape)
        )
        middle = slices.shape[1] // 2
        limits = _limits(np.stack([slices[t] for t in (_centre(shape), _corner(shape))]))
        centre, corner = (np.unravel_index(f(shape) % (flat[0] * flat[1]), flat) for f in (_centre, _corner))
        _map(panels[0], slices[_centre(shape), middle], f"from the centre{of}", centre, limits)
        if len(shape) == 3:
            _map(
                panels[1],
                slices[_centre(shape), middle + 1],
                f"one slice on{of}",
                centre,
                limits,
                hollow=True,
            )
        else:
            _map(panels[1], slices[_corner(shape), middle], f"from a corner{of}", corner, limits)
    if view.right is None:
        _profiles(panels[2], values, shape, equal)
    elif view.tiles:
        _tiles(figure, panels[2], view.right, shape, view.right_title)
    else:
        _stripes(panels[2], view.right.numpy(), view.right_title)
    return _png(figure)


def _limits(values: np.ndarray) -> dict[str, Any]:
    """Return colour map and limits: diverging around 0 if both signs occur."""
    finite = values[np.isfinite(values)]
    low, high = float(finite.min()), float(finite.max())
    if low < -1e-3 * max(high, 1e-9) and high > 1e-3 * -low:
        top = max(-low, high)
        return {"cmap": SIGNED, "vmin": -top, "vmax": top}
    if high - low < 1e-6:
        return {"cmap": SIGNED, "vmin": low - 1, "vmax": low + 1}
    return {"cmap": "viridis", "vmin": low, "vmax": high}


def _map(
    ax: Axes,
    values: np.ndarray,
    title: str,
    query: tuple[int, ...] | None,
    limits: dict[str, Any] | None = None,
    hollow: bool = False,
) -> None:
    image = ax.imshow(values, interpolation="nearest", **(limits or _limits(values)))
    if query is not None:
        ax.plot(
            query[1],
            query[0],
            marker="o",
            markersize=7,
            color="none" if hollow else "white",
            markeredgecolor=INK,
        )
    _plain(ax, title)
    ax.set_anchor("W")
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.046, pad=0.03)
    bar.outline.set_visible(False)
    bar.ax.tick_params(length=0, labelsize=8, colors=INK)
    bar.locator = _few()
    bar.update_ticks()


def _profiles(ax: Axes, values: Tensor, shape: tuple[int, ...], equal: bool) -> None:
    """Plot values along the last axis through the centre, one line per head."""
    centre, last = _centre(shape), shape[-1]
    start = centre // last * last
    lines = values[: 1 if equal else None, centre, start : start + last].numpy()
    offset = np.arange(last) - (centre - start)
    for i, line in enumerate(lines):
        ax.plot(offset, line, color=LINES(i / max(len(lines) - 1, 1)), lw=1.8, solid_capstyle="round")
    ax.axvline(0, color=GREY, lw=0.6, zorder=0)
    _plain(ax, "along a row, all heads equal" if equal else f"along a row, {len(lines)} heads", ticks=True)
    ax.set_xlabel("steps from the query", size=8.5, color=INK, labelpad=1)


def _stripes(ax: Axes, rows: np.ndarray, title: str) -> None:
    ax.imshow(rows, aspect="auto", interpolation="nearest", **_limits(rows))
    _plain(ax, title)
    ax.set_ylabel("channels", size=8.5, color=INK, labelpad=2)


def _tiles(figure: Figure, ax: Axes, rows: Tensor, shape: tuple[int, ...], title: str) -> None:
    """Draw 9 maps of the grid, with a shared colour scale."""
    maps = rows.reshape(9, *shape)
    maps = (maps[:, shape[0] // 2] if len(shape) == 3 else maps).numpy()
    box, limits = ax.get_position(), _limits(maps)
    ax.set_visible(False)
    ratio = figure.get_figheight() / figure.get_figwidth()
    gap = 0.018
    side = (box.height - 2 * gap) / 3
    for i, values in enumerate(maps):
        row, col = divmod(i, 3)
        corner = (box.x0 + col * (side + gap) * ratio, box.y0 + (2 - row) * (side + gap))
        small = figure.add_axes((*corner, side * ratio, side))
        small.imshow(values, interpolation="nearest", **limits)
        _plain(small, "" if i else title)


def _plain(ax: Axes, title: str, ticks: bool = False) -> None:
    ax.set_title(title, size=9.5, color=INK, loc="left", pad=5)
    ax.spines[:].set_visible(False)
    ax.tick_params(length=0, labelsize=8, colors=INK)
    if ticks:
        ax.xaxis.set_major_locator(_few(5))
        ax.yaxis.set_major_locator(_few())
    else:
        ax.set(xticks=[], yticks=[])


def _few(count: int = 4) -> Any:
    from matplotlib.ticker import MaxNLocator

    return MaxNLocator(count)


def _png(figure: Figure) -> bytes:
    """Return the figure as a PNG of 256 colours."""
    raw, small = io.BytesIO(), io.BytesIO()
    figure.savefig(raw, format="png", facecolor="white")
    image = Image.open(raw).convert("RGB").quantize(256, kmeans=1, dither=Image.Dither.NONE)
    image.save(small, format="png", optimize=True)
    return small.getvalue()


if __name__ == "__main__":
    main()
