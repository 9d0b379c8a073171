"""Golden cases of Golden Gate RoPE: directions by the golden ratio, coordinates from -1 to 1 on each axis.

They run in float64, as the reference did: its fastest angles have a rounding in float32 that gradients show.
"""

import torch

import vispe
from tests.golden.adapters._rotated import rotated


def run(case):
    grid, heads, width = tuple(case.config("grid")), case.config("H"), case.config("D")
    options = {
        "min_freq": case.config("min_freq"),
        "max_freq": case.config("max_freq"),
        "unrotated": case.config("p_zero_freqs", 0.0),
    }
    if tuple(case.input("q").shape) != (case.config("B"), heads, grid[0] * grid[1], width):
        raise ValueError("the queries are not of the sizes of the case")
    encoding = vispe.create_encoding("rope_field.golden_gate", dim=width * heads, num_heads=heads, **options)
    free = torch.cartesian_prod(*(torch.arange(n).double() for n in grid))
    pos = vispe.Grid(grid).positions()
    pos = pos.replace(coords=pos.coords.double(), extent=pos.extent.double(), cell=pos.cell.double())
    routes = {"grid": pos, "coordinates": vispe.Positions(free)}
    for route, pos in routes.items():
        freqs = {"freqs": encoding.field(2).flip(-1)}  # x first, as in the reference
        yield route, freqs | rotated(case, encoding.transform(pos, 0), torch.float64)
    inputs = encoding.field(2).tolist()
    learned = vispe.create_encoding("rope_field", dim=width * heads, num_heads=heads, frequencies=inputs)
    yield "given", rotated(case, learned.transform(routes["coordinates"], 0), torch.float64)
