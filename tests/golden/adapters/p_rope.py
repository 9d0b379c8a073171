"""Golden cases of p-RoPE: a fraction of the pairs is rotated, on one axis, with halves of the channels as pairs."""

import torch

import vispe
from tests.golden.adapters._rotated import rotated
from vispe.attention import PairRotation


def run(case):
    width, heads = case.config("D"), case.config("H")
    options = {"split": [width // 2], "rotary_ratio": case.config("p"), "temperature": case.config("theta")}
    encoding = vispe.create_encoding("rope_axial.p_rope", dim=width * heads, num_heads=heads, **options)
    # the positions of a case are said to start at `shift`; it is not included where they start elsewhere
    positions, shift = case.input("pos").float(), case.config("shift", 0)
    positions = positions if float(positions[0]) == shift else positions + shift
    if tuple(case.input("q").shape) != (case.config("B"), heads, case.config("N"), width):
        raise ValueError("the queries are not of the sizes of the case")
    line = vispe.Positions(positions[:, None])
    routes = {"1D": line}
    if torch.equal(positions, torch.arange(len(positions)).to(positions)):
        routes["grid"] = vispe.Grid((len(positions),)).positions()
    for route, pos in routes.items():
        yield route, {"inv_freq": encoding.frequencies(pos)[0][0]} | rotated(case, encoding.transform(pos, 0))
    # a row of an image: the channels of the other axis would come after
    column = torch.stack([torch.zeros_like(positions), positions], -1)
    options["split"] = None
    wide = vispe.create_encoding("rope_axial.p_rope", dim=2 * width * heads, num_heads=heads, **options)
    transform = wide.transform(vispe.Positions(column), 0)
    pairs = width // 2
    transform = PairRotation(transform.cos[..., :pairs], transform.sin[..., :pairs], "half")
    yield "2D", rotated(case, transform)
