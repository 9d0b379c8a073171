"""Page to explore encodings: values on two grids, computed here and drawn by playground.js."""

from __future__ import annotations

import base64
import json
from typing import Any

import numpy as np
import torch

import vispe
from vispe.encodings.base import Biased

HEADS, HEAD_DIM = 4, 64
SIDES = (8, 16)
HIDDEN = 65535
VARIANTS = {
    "alibi2d": ("", ".geometric", ".local", "(metric=manhattan)", "(metric=chebyshev)", "(wrap=false)"),
    "gaussian2d": ("",),
    "kerple": ("",),
    "lookhere": ("", ".halves"),
    "sandwich": ("",),
    "rope_axial": ("", "(temperature=10)", "(temperature=10000)"),
    "rope_mixed": ("",),
    "rope_dinov3": ("",),
}

TEXT = """---
hide: [navigation, toc]
---

# Playground

Choose an encoding, then drag the query (the square) over a grid, or move it with the arrow keys. Each square
image is a head, and each patch shows its value for this query (dark grey: hidden): a bias as added to the
logits, and a rotation as the similarity of equal queries and keys with random channels.

<div id="playground-view" markdown="0"><noscript>This page needs JavaScript. <code>vispe plot alibi2d -o
bias.png</code> draws the same values.</noscript></div>

- **image rotated by 90°** rotates the image with the query, and rotates the result back. If the encoding is
  invariant to quarter turns, nothing changes; **difference** shows what does.
- **16 x 16** has twice the patches along each axis. The query keeps its relative position.
- White is 0, or the bound next to it; blue is negative, orange positive. Learned parameters have their
  initial values (seed 0).
- A rotation belongs to the axes of the image, so the similarity changes with the image; a bias of distance does not.

The same as a figure: `vispe plot 'alibi2d(metric=manhattan)' -o bias.png`, or in a notebook
`vispe.plot_bias('alibi2d', (8, 8), query=(2, 5), head=0)`. [All encodings](encodings/index.md) have a page
with their formula and options; [attention biases](explanation/attention-bias.md) and
[rotations](explanation/rotations.md) explain what you see.

"""


def playground_page() -> str:
    """Return the page in Markdown and HTML, with the values of all variants."""
    data = {
        name: {options or "default": variant(name + options) for options in variants}
        for name, variants in VARIANTS.items()
    }
    text = json.dumps(data, separators=(",", ":"))
    return (
        f'{TEXT}<script type="application/json" id="playground-data">{text}</script>\n'
        '<script src="../site/playground.js"></script>\n'
    )


def variant(spec: str) -> dict[str, Any]:
    """Return the kind of an encoding and its encoded values on each grid."""
    kind, grids = "", {}
    for side in SIDES:
        kind, found = values(spec, side)
        grids[str(side)] = encoded(found, side)
    return {"kind": kind, "grids": grids}


def values(spec: str, side: int) -> tuple[str, np.ndarray]:
    """Return the meaning of the values, and the values (heads, query patches, key patches)."""
    with torch.random.fork_rng(devices=[]), torch.no_grad():
        torch.manual_seed(0)
        encoding = vispe.create_encoding(
            spec, dim=HEADS * HEAD_DIM, num_heads=HEADS, depth=12, grid=(SIDES[0], SIDES[0])
        ).eval()
        pos = encoding.prepare(vispe.Grid((side, side)).positions())
        if isinstance(encoding, Biased):
            return "added to the logits", encoding.bias(pos, layer=0).dense(pos, pos)[0].double().numpy()
        # equal channels would hide that a rotation belongs to an axis
        content = torch.randn(1, HEADS, 1, HEAD_DIM).expand(-1, -1, side * side, -1)
        transform = encoding.transform(pos, layer=0)
        scores = transform.query(content).double() @ transform.key(content).double().mT
        norm = content.double().square().sum(-1, keepdim=True)
        return "similarities of equal queries and keys", (scores / norm)[0].numpy()


def encoded(dense: np.ndarray, side: int) -> dict[str, Any]:
    """Return values as 16-bit integers between their bounds: one per offset if only the offset matters, else all.

    Equal heads are stored once. Offsets are key minus query, from -(side - 1) along rows and columns.
    """
    if all(np.array_equal(head, dense[0]) for head in dense):
        dense = dense[:1]
    cells = np.arange(side * side)
    rows, columns = (cell[None] - cell[:, None] + side - 1 for cell in np.divmod(cells, side))
    table = np.zeros((len(dense), 2 * side - 1, 2 * side - 1))
    table[:, rows, columns] = dense
    finite = np.isfinite(dense)
    by_offset = np.allclose(
        np.where(finite, table[:, rows, columns], 0), np.where(finite, dense, 0), atol=1e-6
    ) and np.array_equal(np.isfinite(table[:, rows, columns]), finite)
    stored = table if by_offset else dense
    low, high = float(dense[finite].min()), float(dense[finite].max())
    steps = np.full(stored.shape, HIDDEN)
    inside = np.isfinite(stored)
    steps[inside] = np.rint((stored[inside] - low) / max(high - low, 1e-12) * (HIDDEN - 1))
    text = base64.b64encode(steps.astype("<u2").tobytes()).decode()
    return {"heads": len(dense), "offsets": bool(by_offset), "low": low, "high": high, "values": text}
