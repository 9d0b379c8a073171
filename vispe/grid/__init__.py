"""Token grids, token positions, token orders and rotary frequencies."""

from vispe.grid.packed_grids import packed_positions, pool_windows
from vispe.grid.per_token import PerToken
from vispe.grid.positions import Positions
from vispe.grid.token_grid import Grid
from vispe.grid.token_positions import as_positions
from vispe.grid.validation import as_spacing

__all__ = ["Grid", "PerToken", "Positions", "as_positions", "as_spacing", "packed_positions", "pool_windows"]
