"""Golden cases of the additive sine-cosine baseline."""

import vispe


def run(case):
    grid = vispe.Grid((case.config("h"), case.config("w")))
    encoding = vispe.create_encoding(
        "sincos2d", dim=case.config("embed_dim"), temperature=case.config("base_wavelength", 10000)
    )
    yield "table", {"pos_embed": encoding.table(grid.positions())}
