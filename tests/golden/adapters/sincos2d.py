"""Golden cases of the additive sine-cosine baseline.

The authors' tables of these cases are float64, rounded at the end; so are ours, from positions in float64. From 17
patches on, float32 angles are off by more than the tolerance, so smaller grids only are compared in float32 too.
"""

import vispe


def run(case):
    shape = (case.config("h"), case.config("w"))
    encoding = vispe.create_encoding(
        "sincos2d", dim=case.config("embed_dim"), temperature=case.config("base_wavelength", 10000)
    )
    pos = vispe.Grid(shape).positions()
    if max(shape) <= 16:
        yield "table", {"pos_embed": encoding.table(pos)}
    yield "table, float64", {"pos_embed": encoding.table(pos.replace(coords=pos.coords.double()))}
