"""Figure of the effect of an encoding on attention.

matplotlib is imported on first use.
"""

from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from vispe.encodings.base import Additive, Biased, Encoding, Rotary
from vispe.encodings.compose import bias_of, transform_of
from vispe.encodings.creation import create_encoding
from vispe.encodings.multi_softmax import calls_of, weights_of
from vispe.errors import OptionError, ShapeError, UnsupportedCombination, require
from vispe.grid import Grid
from vispe.utils.report.figure_style import INK, new_axes

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
    """Plot the effect of an encoding on all patches for one query patch.

    A bias is shown as added to the logits; a rotary encoding as the score of equal queries and keys, 1 at the query; an
    additive encoding as the cosine similarity of the added vectors.

    Args:
        spec: an encoding by name or spec, such as `alibi2d(wrap=false)`; learned parameters are initialised with seed
            0.
        grid: patches (h, w), or a `Grid`.
        query: row and column of the query patch; the centre by default.
        ax: axes; a new figure by default.
        head: index of the head; the mean over heads by default.
        num_heads: number of heads, with head_dim 64.
        layer: index of the block.

    Raises:
        ShapeError: the grid does not have two axes, or the query is outside of it.
        OptionError: the head does not exist, or the layer is negative.
        UnsupportedCombination: the encoding has no effect to plot in this block.
        UnknownEncoding: the encoding or preset does not exist.
        InputError: `ax` has polar axes.
        MissingExtra: matplotlib is not installed.

    Example:
        >>> plot_bias("alibi2d", (4, 5)).get_title()
        'alibi2d'
    """
    require("matplotlib", "cli", "drawing an encoding")
    grid = grid if isinstance(grid, Grid) else Grid(tuple(grid))
    if grid.axes != 2:
        raise ShapeError(f"plot_bias: grid must be (h, w), got {grid.shape}. Use a grid with two axes.")
    h, w = grid.shape
    row, col = query = (h // 2, w // 2) if query is None else (int(query[0]), int(query[1]))
    if not (0 <= row < h and 0 <= col < w):
        raise ShapeError(
            f"plot_bias: query must be in rows 0 to {h - 1} and columns 0 to {w - 1}, got {query}. Use another query."
        )
    if head is not None and not 0 <= head < num_heads:
        raise OptionError(f"plot_bias: head must be in 0 to {num_heads - 1}, got {head}. Use a valid head.")
    if layer < 0:
        raise OptionError(f"plot_bias: layer must be 0 or more, got {layer}. Count layers from 0.")
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        width, depth = num_heads * _HEAD_DIM, max(12, layer + 1)
        encoding = create_encoding(spec, dim=width, num_heads=num_heads, depth=depth, grid=grid.shape).eval()
        values, words = _values_for(encoding, grid, row * w + col, head, num_heads, layer)
    title = spec if isinstance(spec, str) else encoding.name
    return _draw_bias(values.reshape(h, w).numpy(), (row, col), words, title, ax)


def _values_for(
    encoding: Encoding, grid: Grid, token: int, head: int | None, num_heads: int, layer: int
) -> tuple[torch.Tensor, str]:
    """Return one value per patch for the query `token`, and a label for the values."""
    pos = encoding.prepare(grid.positions())
    token += grid.prefix
    heads = slice(None) if head is None else slice(head, head + 1)
    suffix = "mean over heads" if head is None else f"head {head}"
    parts = encoding.parts()
    if any(part.multi_softmax for part in parts):
        # several softmaxes have no single bias, so show attention weights between equal tokens
        equal_tokens = torch.ones(1, num_heads, grid.tokens, _HEAD_DIM)
        x = torch.ones(1, grid.tokens, num_heads * _HEAD_DIM)
        weights = weights_of(calls_of(equal_tokens, equal_tokens, equal_tokens, parts, pos, layer, x))[
            :, heads
        ]
        return weights[0, :, token, grid.prefix :].mean(
            0
        ), f"attention weights between equal tokens, {suffix}"
    if (bias := bias_of(parts, pos, layer)) is not None:
        dense = bias.dense(pos, pos)
        dense = dense[:, heads] if dense.shape[1] > 1 else dense
        return dense[0, :, token, grid.prefix :].mean(0), f"added to the logits, {suffix}"
    if any(isinstance(part, Rotary) for part in parts):
        transform = transform_of(parts, pos, layer)
        ones = torch.ones(1, num_heads, grid.tokens, _HEAD_DIM)
        scores = transform.query(ones)[:, heads, token : token + 1] @ transform.key(ones)[:, heads].mT
        return scores[0, :, 0, grid.prefix :].mean(0) / _HEAD_DIM, f"score of equal query and key, {suffix}"
    added = [part for part in parts if isinstance(part, Additive) and not part.reads_tokens]
    tables = [part.table(pos)[0, grid.prefix :] for part in added]
    if tables:
        unit = torch.nn.functional.normalize(sum(tables[1:], tables[0]), dim=-1)
        return unit @ unit[token - grid.prefix], "cosine similarity of the added vectors"
    kind = "no bias in this block" if any(isinstance(part, Biased) for part in parts) else "nothing per patch"
    if any(isinstance(part, Additive) for part in parts):
        kind = "values that depend on the tokens"
    raise UnsupportedCombination(
        f"plot_bias: {encoding.name} adds {kind}, got layer={layer}. Use another layer or encoding."
    )


def _draw_bias(
    values: np.ndarray, query: tuple[int, int], words: str, title: str, ax: "Axes | None"
) -> "Axes":
    ax = new_axes(ax, (5.6, 5))
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
