"""Token grids, token positions, token orders and rotary frequencies."""

from vispe.grid.coordinates import Grid, PerToken, Positions, as_positions, as_spacing
from vispe.grid.packed_grids import packed_positions, pool_windows

__all__ = ["Grid", "PerToken", "Positions", "as_positions", "as_spacing", "packed_positions", "pool_windows"]
