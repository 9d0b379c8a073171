"""Golden cases of the rotation of Meissonic and Flux: axes have consecutive channels, text is in the corner."""

import torch

import vispe
from tests.golden.adapters._rotated import rotated


def run(case):
    case.ignore("theta", "the reference reads it nowhere: its base is 10000")
    time, *sides = case.config("axes_dim")
    grid, text = tuple(case.config("grid")), case.config("text_tokens")
    heads, width = case.config("H"), time + sum(sides)
    if tuple(case.input("q").shape) != (case.config("B"), heads, text + grid[0] * grid[1], width):
        raise ValueError("the queries are not of the sizes of the case")

    def build(**options):
        return vispe.create_encoding("rope_axial.flux", dim=width * heads, num_heads=heads, **options)

    image = vispe.Grid(grid, prefix=text).positions()
    ids = torch.cat([torch.zeros(text, 2), torch.cartesian_prod(*map(torch.arange, grid))])
    ids = torch.cat([torch.zeros(len(ids), 1), ids], -1)
    case.agree("the ids", case.input("ids"), ids.to(case.input("ids")))
    flat = build(unrotated=time / width, split=[n // 2 for n in sides])
    video = build(unrotated=0.0, split=[n // 2 for n in (time, *sides)]) if time else flat
    yield "picture", _outputs(case, flat.transform(image, 0))
    if time:
        yield "ids", _outputs(case, video.transform(vispe.Positions(case.input("ids").float()), 0))


def _outputs(case, transform):
    tables = {name: getattr(transform, name)[0, 0].repeat_interleave(2, -1) for name in ("cos", "sin")}
    return tables | rotated(case, transform)
