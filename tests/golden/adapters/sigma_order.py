"""Golden cases of orders: random ones from keys, and breadth-first bisection after a prompt."""

import torch

import vispe
from vispe.grid.token_orders import (
    TARGET_CELL,
    fractal,
    inputs_and_targets,
    raster,
    reorder_positions,
    shuffled,
)


def run(case):
    x, order = case.input("x"), _order(case)
    order = order.expand(x.shape)
    inputs, targets = inputs_and_targets(x, order)
    yield "tokens", {"order": order, "inputs": inputs, "targets": targets}
    # the same by positions: each entry has its own position and that of the next
    pos = reorder_positions(vispe.Grid((x.shape[1],)).positions(), order)
    current, after = pos.index, pos.attrs[TARGET_CELL].values
    inputs, targets = (x.gather(1, cells[:, :-1].expand(len(x), -1)) for cells in (current, after))
    yield "positions", {"order": current.expand(x.shape), "inputs": inputs, "targets": targets}


def _order(case):
    length, prompt = case.input("x").shape[1], case.config("prompt", 0)
    kind = case.config("order")
    if kind == "random":
        return shuffled(case.input("keys"), prompt)
    if kind == "fractal":
        return fractal(length, prompt)
    if kind not in ("raster", "left_to_right", "left-to-right", "none"):
        raise ValueError(f"an order {kind!r} is not known")
    return torch.as_tensor(raster(length))
