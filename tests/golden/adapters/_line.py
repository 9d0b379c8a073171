"""Positions of a causal sequence, and a bias under a causal mask."""

import vispe


def line(length):
    """Return the positions of a sequence."""
    return vispe.Grid((length,)).positions()


def planes(length):
    """Return the same tokens as the row, the column and the depth of grids of several axes."""
    shapes = [(1, length), (length, 1), (1, length, 1)]
    return {f"{len(shape)}D {shape}": vispe.Grid(shape).positions() for shape in shapes}


def positions(length):
    """Return the positions of a sequence of `length` tokens by every route: on a line, in the plane, in space."""
    free = vispe.Positions(line(length).coords.clone())
    return {"1D": line(length), "free coordinates": free, **planes(length)}
