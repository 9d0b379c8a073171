"""Masks of shifted windows, computed token by token from a rolled map that is divided into windows."""

import itertools

import torch

from vispe.attention import WindowMask


def shifted(windows, shape, shift):
    """Return the mask (w, n, n) of a map, given its number of windows along each axis, rolled by `shift` tokens."""
    rows = []
    for window in itertools.product(*map(range, windows)):
        cells = list(itertools.product(*map(range, shape)))
        # where a token came from: behind the end of an axis, a token is the first one again
        positions = [
            [
                w * n + c + s >= count * n
                for w, n, c, s, count in zip(window, shape, cell, shift, windows, strict=True)
            ]
            for cell in cells
        ]
        rows.append([[0.0 if a == b else -100.0 for b in positions] for a in positions])
    return torch.tensor(rows)


def mask_of(pos, windows, shift, images):
    """Return the description of such windows."""
    mask = shifted(windows, pos.grid.shape, shift)
    return WindowMask(mask, pos, images * len(mask))
