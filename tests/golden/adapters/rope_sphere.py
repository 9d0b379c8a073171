"""Golden cases of `rope_sphere`: rotation matrices, rotated queries and keys, unscaled scores, and gradients."""

import torch

import vispe
from tests.golden.adapters._rotated import rotated


def run(case):
    case.ignore("seed", "how the case was made")
    heads, width, grid = case.config("num_heads"), case.config("head_dim"), tuple(case.config("grid"))
    prefix = case.config("prefix_tokens", 0)
    encoding = vispe.create_encoding(
        "rope_sphere",
        dim=heads * width,
        num_heads=heads,
        axes=len(grid),
        order=case.config("order"),
    ).double()
    weights = {"freqs": case.param("freqs").double()}
    if "axes" in case.params:
        weights["directions"] = case.param("axes").double()
    encoding.load_state_dict(weights)
    if encoding.freqs.shape[1] != case.config("blocks", width // 3):
        raise ValueError("the number of blocks is not that of the case")
    pos = vispe.Grid(grid, prefix=prefix).positions()
    if case.input("q").shape != (case.config("batch", 1), heads, pos.tokens, width):
        raise ValueError("the tokens are not those of the configuration")
    routes = {"grid": pos}
    coordinates = vispe.Positions(pos.coords.double(), pos.spatial)
    routes["coordinates"] = coordinates
    for route, positions in routes.items():
        encoding.zero_grad()
        outputs = rotated(case, encoding.transform(positions, 0), torch.float64)
        outputs["rotation"] = encoding.rotations(positions)[0, :, prefix:]
        if "grad.q" in outputs:
            outputs["grad.freqs"] = encoding.freqs.grad
            if "axes" in case.params:
                outputs["grad.axes"] = encoding.directions.grad
        yield route, {name: value for name, value in outputs.items() if name in case.output_names}
