"""Pictures of what an encoding adds to attention.

matplotlib is imported when something is drawn.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vispe.encodings.base import Additive, Biased, Encoding, Rotary
from vispe.encodings.compose import bias_of, transform_of
from vispe.encodings.multi_softmax import calls_of, weights_of
from vispe.encodings.registry import create_encoding
from vispe.errors import OptionError, ShapeError, UnsupportedCombination, require
from vispe.grid import Grid
from vispe.report.figure_style import INK, new

if TYPE_CHECKING:
    from matplotlib.axes import Axes

_HEAD_DIM = 64


def plot_bias(
    spec: Any,
    grid: Grid | tuple[int, int],
    query: tuple[int, int] | None = None,
    ax: "Axes | None" = None,
    *,
    head: int | None = None,
    num_heads: int = 8,
    layer: int = 0,
) -> "Axes":
    """Draw how an encoding treats every patch as seen from one query patch.

    A bias is drawn as it is added to the logits; a rotary encoding as the score of equal queries and keys, 1
    at the query; an additive one as the cosine similarity of the vectors that it adds.

    Args:
        spec: an encoding by name or spec, such as `alibi2d(wrap=false)`; learned parameters are freshly initialised
            (seed 0).
        grid: patches (h, w), or a `Grid`.
        query: row and column of the query patch; the centre by default.
        ax: where to draw; a new figure by default.
        head: which head; the mean over heads by default.
        num_heads: heads of the imagined host, whose head width is 64.
        layer: block of the imagined host.

    Raises:
        ShapeError: a grid that is not 2-axis, or a query outside of it.
        OptionError: no such head.
        UnsupportedCombination: the encoding has nothing to draw in this block.

    >>> plot_bias("alibi2d", (4, 5)).get_title()
    'alibi2d'
    """
    require("matplotlib", "cli", "drawing an encoding")
    grid = grid if isinstance(grid, Grid) else Grid(tuple(grid))
    if grid.axes != 2:
        raise ShapeError(f"plot_bias draws grids (h, w), got {grid.shape}.")
    h, w = grid.shape
    row, col = query = (h // 2, w // 2) if query is None else (int(query[0]), int(query[1]))
    if not (0 <= row < h and 0 <= col < w):
        raise ShapeError(
            f"The query {query} is not in the {h}x{w} grid; rows are 0 to {h - 1}, columns 0 to {w - 1}."
        )
    if head is not None and not 0 <= head < num_heads:
        raise OptionError(f"There is no head {head} of {num_heads}; they are 0 to {num_heads - 1}.")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        width, depth = num_heads * _HEAD_DIM, max(12, layer + 1)
        encoding = create_encoding(spec, dim=width, num_heads=num_heads, depth=depth, grid=grid.shape).eval()
        values, words = _seen_from(encoding, grid, row * w + col, head, num_heads, layer)
    title = spec if isinstance(spec, str) else encoding.name
    return _draw_bias(values.reshape(h, w).numpy(), (row, col), words, title, ax)


def _seen_from(
    encoding: Encoding, grid: Grid, token: int, head: int | None, num_heads: int, layer: int
) -> tuple[torch.Tensor, str]:
    """Return one value per patch as seen from `token`, and what the values are."""
    pos = encoding.prepare(grid.positions())
    token += grid.prefix
    heads = slice(None) if head is None else slice(head, head + 1)
    of = "mean over heads" if head is None else f"head {head}"
    parts = encoding.parts()
    if any(part.branched for part in parts):
        # several softmaxes have no one bias: what they give together between equal tokens
        alike = torch.ones(1, num_heads, grid.tokens, _HEAD_DIM)
        x = torch.ones(1, grid.tokens, num_heads * _HEAD_DIM)
        weights = weights_of(calls_of(alike, alike, alike, parts, pos, layer, x))[:, heads]
        return weights[0, :, token, grid.prefix :].mean(0), f"attention weights between equal tokens, {of}"
    if (bias := bias_of(parts, pos, layer)) is not None:
        dense = bias.dense(pos, pos)
        dense = dense[:, heads] if dense.shape[1] > 1 else dense
        return dense[0, :, token, grid.prefix :].mean(0), f"added to the logits, {of}"
    if any(isinstance(part, Rotary) for part in parts):
        transform = transform_of(parts, pos, layer)
        ones = torch.ones(1, num_heads, grid.tokens, _HEAD_DIM)
        scores = transform.query(ones)[:, heads, token : token + 1] @ transform.key(ones)[:, heads].mT
        return scores[0, :, 0, grid.prefix :].mean(0) / _HEAD_DIM, f"score of equal query and key, {of}"
    added = [part for part in parts if isinstance(part, Additive) and not part.reads_tokens]
    tables = [part.table(pos)[0, grid.prefix :] for part in added]
    if tables:
        unit = torch.nn.functional.normalize(sum(tables[1:], tables[0]), dim=-1)
        return unit @ unit[token - grid.prefix], "cosine similarity of the added vectors"
    kind = "no bias in this block" if any(isinstance(part, Biased) for part in parts) else "nothing per patch"
    if any(isinstance(part, Additive) for part in parts):
        kind = "what it reads from the tokens"
    raise UnsupportedCombination(f"{encoding.name} adds {kind} (layer={layer}), so there is nothing to draw.")


def _draw_bias(
    values: np.ndarray, query: tuple[int, int], words: str, title: str, ax: "Axes | None"
) -> "Axes":
    ax = new(ax, (5.6, 5))
    image = ax.imshow(values, cmap="viridis", interpolation="nearest")
    ax.plot(query[1], query[0], marker="o", markersize=9, color="white", markeredgecolor=INK)
    ax.set_title(title, size=12, color=INK)
    ax.set_xlabel("patch column", color=INK)
    ax.set_ylabel("patch row", color=INK)
    bar = ax.figure.colorbar(image, ax=ax, fraction=0.046, pad=0.03)
    bar.set_label(words, color=INK)
    bar.outline.set_visible(False)
    ax.spines[:].set_visible(False)
    return ax
