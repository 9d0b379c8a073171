"""Token grids, token positions, token orders and rotary frequencies."""

from vispe.grid.coordinates import Grid, PerToken, Positions, as_positions, as_spacing

__all__ = ["Grid", "PerToken", "Positions", "as_positions", "as_spacing"]
