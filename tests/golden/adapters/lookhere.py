"""Golden cases of LookHere: the biases of all layers, directly, as tables, and as attention masks."""

import torch

import vispe

DISTANCES = {"linear": "linear", "sqrt": "sqrt", "square": "square", "squared": "square"}


def run(case):
    if case.config("fill_with") not in ("inf", "-inf"):
        raise ValueError("keys out of sight have -inf here")
    depth, heads = case.config("depth"), case.config("heads")
    encoding = vispe.create_encoding(
        "lookhere",
        num_heads=heads,
        depth=depth,
        directions=case.config("head_directions"),
        distance=DISTANCES[case.config("distance")],
        layer_slopes=case.config("layer_slopes"),
        global_slope=case.config("global_slope"),
    )
    grid = vispe.Grid(case.config("grid"))
    pos = grid.positions()
    biases = [encoding.bias(pos, layer) for layer in range(depth)]
    yield "dense", {"bias": torch.cat([b.dense() for b in biases])}
    yield "table", {"bias": torch.cat([_by_cells(b.table(grid), pos)[None] for b in biases])}


def _by_cells(table, pos):
    """Read a table at the offset of each pair, y and x of the query minus those of the key."""
    y, x = (pos.coords[0, :, None] - pos.coords[0, None]).long().unbind(-1)
    return table[:, y + table.shape[1] // 2, x + table.shape[2] // 2]
