"""Double positions: every token also encodes the position that it predicts next (sigma-GPT, arXiv 2404.09562)."""

from __future__ import annotations

from typing import Any, ClassVar, cast

import torch
from torch import Tensor

from vispe.encodings.base import HOST_FACTS, Additive, Encoding
from vispe.encodings.creation import create_encoding
from vispe.encodings.metadata import encoding_info
from vispe.encodings.registry import parse_spec, register
from vispe.encodings.spec import spec_to_text
from vispe.errors import OptionError, ShapeError
from vispe.grid import Positions
from vispe.grid.token_orders import TARGET, TARGET_CELL, TARGET_SAMPLED
from vispe.utils.options import PositiveInt, Shape


@register
class TargetPosition(Additive):
    """Adds the table entry of the next position to every token, for models that generate in any order.

    table(k) = of(position of token k + 1); in addition to the table of its current position, as in
    ``sincos2d+target``, it is the sum of both. Positions are ordered by `vispe.grid.token_orders.reorder_positions`;
    the default order is that of the grid, or of the sequence without a grid. The causal mask follows the order of the
    tokens.

    Args:
        dim: width of the tokens, d.
        grid: shape of the token grid, if `of` has a table of it.
        of: the table: any spec of kind additive, such as sincos2d or learned. It is built again, so a learned one is a
            second table; give the same numbers to both for one.

    Shapes: pos of n tokens -> what `of` returns, (1 or b, n, d) float32; 0 for the last token, and for those before one
        without a position. Prefix tokens get 0, except the last one before an order, which marks its beginning.
    New resolution: as for `of`.   Cost: that of `of`.
    Invariant to: nothing; permuting the order permutes the rows of the table.
    Raises: OptionError where `of` is not additive; ShapeError as `of`, where a sampler moved tokens after they were put
        in order, where some of those without a grid were dropped before they were, and for samples of several grids
        with the index of one.
    Differs from the reference: tables are those of `of`, on grids of 1 to 3 axes; the paper has text, and any order of
        positions for the next token.

    Example:
        >>> from vispe import Grid, create_encoding
        >>> from vispe.grid.token_orders import fractal, reorder_positions
        >>> encoding = create_encoding("sincos2d+target(of=sincos2d)", dim=16)
        >>> encoding.table(reorder_positions(Grid((2, 3)).positions(), fractal(6))).shape
        torch.Size([1, 6, 16])
    """

    name = "target"
    paper = "sigma-GPTs: A New Approach to Autoregressive Models, https://arxiv.org/abs/2404.09562"
    year = 2024
    tested_options = ("of=fourier_learned", "of=sincos2d(temperature=100)+spder")
    ndim = (1, 2, 3)
    encodes: ClassVar[tuple[str, ...]] = ("position",)

    dim: PositiveInt
    grid: Shape | None = None
    of: Any = "sincos2d"

    def __post_init__(self) -> None:
        if isinstance(self.of, Encoding):
            raise OptionError(f"target: of needs a spec, got a finished {self.of.name}. Pass its config.")
        terms = parse_spec(self.of)
        others = [t["name"] for t in terms if encoding_info(t["name"]).kinds != ("additive",)]
        if others:
            raise OptionError(
                f"target: of needs encodings of kind additive alone, got {' + '.join(others)}. Use of=sincos2d."
            )
        self.of = spec_to_text(terms)
        facts = {name: getattr(self, name) for name in HOST_FACTS if hasattr(self, name)}
        encoding = create_encoding(self.of, **facts)
        parts = encoding.parts()
        self.following = cast("Additive", encoding)
        self._accept(*(a for a in (1, 2, 3) if all(a in e.ndim for e in parts)))
        vars(self)["extrapolates"] = all(e.extrapolates for e in parts)

    def reset_parameters(self) -> None:
        """Initialise the table."""
        self.following.reset_parameters()

    def table(self, pos: Positions, image: Tensor | None = None) -> Tensor:
        """Return the table of the next positions, (1 or b, n, d), 0 for tokens without one."""
        self._need_axes(pos)
        after = _after(pos)
        return self.following.table(after, image) * after.spatial[..., None]


def _after(pos: Positions) -> Positions:
    """Return the position that follows each token's own; tokens without a successor have no position."""
    moved = sorted(pos.attrs.get("sampled", ()))
    if moved != pos.attrs.get(TARGET_SAMPLED, moved):
        raise ShapeError(
            "target needs positions that are ordered after a sampler has moved them. Call reorder_positions() with the "
            "positions that its prepare() returns."
        )
    if TARGET in pos.attrs:
        coords, cell = pos.attrs[TARGET].values, pos.attrs[TARGET_CELL].values
        has_next = cell >= 0
    elif pos.index is not None:
        if pos.grid is None:
            raise ShapeError(
                "target does not know what follows free tokens of which some are dropped. Use the table first, or "
                "drop tokens of positions that reorder_positions() has ordered."
            )
        sides = (pos.extent / pos.cell).round()
        if len(sides) > 1 and bool((sides != sides[:1]).any()):
            raise ShapeError(
                f"target computes next positions for one grid at a time, but the batch has samples of several sizes, "
                f"got {sorted({tuple(map(int, row)) for row in sides.tolist()})}. Pack samples of equal grids."
            )
        # tokens are missing: the next cell of the whole grid, whether its token is there or not
        full, cell = pos.grid.positions(pos.coords.device), pos.index + 1
        has_next = pos.spatial & (cell < pos.grid.patches)
        # patches come after the prefix tokens
        token = (cell + pos.grid.prefix).clamp(0, pos.grid.tokens - 1)
        # in units of the current spacing, which may differ from that of the grid
        coords = full.coords[0, token] * (pos.cell / full.cell)[:, None]
    else:
        # the sequence as it stands, moved on by one
        coords, cell = pos.coords.roll(-1, 1), pos.numbers() + 1
        # roll wraps the last token around to the first
        before_last = torch.arange(pos.tokens, device=coords.device) < pos.tokens - 1
        has_next = pos.spatial & pos.spatial.roll(-1, 1) & before_last
    attrs = {k: v for k, v in pos.attrs.items() if k not in (TARGET, TARGET_CELL, TARGET_SAMPLED)}
    # cell 0 instead of a missing next cell, masked by `has_next`
    index = None if pos.grid is None else torch.where(has_next, cell, 0).expand(coords.shape[0], -1)
    after = Positions(
        coords * has_next[..., None],
        has_next,
        pos.extent,
        cell=pos.cell,
        index=index,
        grid=pos.grid,
        attrs=attrs,
    )
    after.on_grid = pos.on_grid
    return after
