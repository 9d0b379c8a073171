"""Pictures of encodings: what one query sees of every other token."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from vispe.attention import SumBias
from vispe.base import Additive, Biased
from vispe.errors import OptionError, UnsupportedCombination, require
from vispe.grid import Grid
from vispe.registry import Spec, create_encoding

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def plot_bias(
    spec: Spec,
    grid: Grid | Sequence[int],
    query: Sequence[int] | None = None,
    ax: Axes | None = None,
    *,
    head: int = 0,
    num_heads: int = 8,
    dim: int = 384,
) -> Axes:
    """Draw what an encoding gives the pairs of one query with every token of a 2-axis grid.

    For an encoding with a bias that is what it adds to the logits of `head`; for an additive one it is the
    cosine similarity of the vectors that it adds.

    Args:
        spec: the encoding.
        grid: the token grid, or its shape (h, w).
        query: row and column of the query; the centre by default.
        ax: where to draw; a new figure by default.
        head: which head.
        num_heads: heads of the model, for encodings whose heads differ.
        dim: width of the model, for additive encodings.

    Returns:
        the axes.

    Raises:
        UnsupportedCombination: the encoding neither adds to the logits nor to the tokens.
    """
    require("matplotlib", "cli", "Drawing an encoding")
    grid = grid if isinstance(grid, Grid) else Grid(tuple(grid))
    if grid.axes != 2:
        raise OptionError(f"plot_bias draws grids with 2 axes, got shape={grid.shape}.")
    query = tuple(query) if query is not None else (grid.shape[0] // 2, grid.shape[1] // 2)
    if len(query) != 2 or any(not 0 <= i < n for i, n in zip(query, grid.shape, strict=True)):
        raise OptionError(f"query must be a row and column of the grid {grid.shape}, got {query}.")
    if not 0 <= head < num_heads:
        raise OptionError(f"head must be below num_heads={num_heads}, got head={head}.")
    encoding = create_encoding(spec, num_heads=num_heads, dim=dim, grid=grid.shape)
    token = grid.prefix + query[0] * grid.shape[1] + query[1]
    values, label = _values(encoding.parts(), grid, token, head)
    if ax is None:
        from matplotlib import pyplot as plt

        ax = plt.subplots(figsize=(4.2, 3.6), layout="constrained")[1]
    image = ax.imshow(values, cmap="viridis", interpolation="nearest")
    ax.plot(query[1], query[0], marker="o", ms=6, mfc="none", mec="white", mew=1.6)
    ax.set(title=str(spec), xticks=[], yticks=[], xlabel=f"query at row {query[0]}, column {query[1]}")
    ax.figure.colorbar(image, ax=ax, label=label, shrink=0.85)
    return ax


@torch.no_grad()
def _values(encodings: Sequence[object], grid: Grid, token: int, head: int) -> tuple[Tensor, str]:
    pos = grid.positions()
    biases = [b for e in encodings if isinstance(e, Biased) and (b := e.bias(pos, layer=0)) is not None]
    if biases:
        bias = SumBias(biases).dense()
        one = bias[0, min(head, bias.shape[1] - 1)]  # a bias shared by all heads has one map
        return one[token, grid.prefix :].reshape(grid.shape), f"added to the logits (head {head})"
    tables = [e.table(pos) for e in encodings if isinstance(e, Additive)]
    if tables:
        table = torch.nn.functional.normalize(sum(tables[1:], tables[0])[0], dim=-1)
        return (table[grid.prefix :] @ table[token]).reshape(grid.shape), "cosine similarity"
    names = " + ".join(getattr(e, "name", "?") for e in encodings)
    raise UnsupportedCombination(
        f"{names} gives pairs of tokens neither a bias nor a vector, so there is no map to draw."
    )
