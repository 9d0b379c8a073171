"""Option origin of grids: every encoding either follows it or raises."""

import pytest
import torch

from tests.cases import cases
from tests.encodings.test_conformance import DIM, NAMES, SUMS, build, forward
from vispe import Grid, Positions, create_encoding
from vispe.errors import ShapeError

# what does not read where tokens are
PLACELESS = {"none", "dynamic", "psc", "ssmax"}


@cases("spec", [*NAMES, *SUMS])
@cases("origin", ["end", "centre"])
def test_encodings_follow_the_origin_or_raise(spec, origin):
    encoding = build(spec).eval()
    axes = max(set.intersection(*(set(e.ndim) for e in encoding.parts())))
    shape = {1: (5,), 2: (3, 4), 3: (2, 3, 2)}[min(axes, 2) if axes == 3 and encoding.parts()[1:] else axes]
    start = Grid(shape, reference=shape).positions()
    pos = Grid(shape, reference=shape, origin=origin).positions()
    x = torch.randn(2, pos.tokens, DIM, generator=torch.Generator().manual_seed(0))
    with torch.no_grad():
        try:
            actual = forward(encoding, encoding.prepare(pos), x)
        except ShapeError as error:
            assert f"which origin={origin!r} does not change" in str(error)  # noqa: PT017
            return
        if encoding.parts()[0].name in PLACELESS:
            return
        # the same coordinates without a grid; its size says no more than the extent
        free = Positions(pos.coords, pos.spatial, start.extent, cell=start.cell)
        try:
            expected = forward(encoding, encoding.prepare(free), x)
        except ShapeError:
            expected = forward(encoding, encoding.prepare(start.replace(coords=pos.coords)), x)
            same = forward(encoding, encoding.prepare(start), x)
            invariant = {"translation", "reflection"} <= set(encoding.parts()[0].invariant)
            assert invariant or not torch.equal(expected, same), (
                "it does not read coordinates, and must refuse"
            )
    torch.testing.assert_close(actual, expected, rtol=1e-4, atol=1e-5)


def test_encodings_that_raise():
    """Tables of cells, fractions of the field, orders and samplers raise; coordinates and distances do not."""
    pos = Grid((3, 4), origin="end").positions()
    facts = {"dim": DIM, "num_heads": 3, "depth": 4, "grid": (3, 4)}
    for name in ("learned", "legendre", "fourier", "border", "countdown", "ranked", "seqpe_input", "jitter"):
        encoding = create_encoding(name, **facts)
        with pytest.raises(
            ShapeError, match=rf"{name} .* which origin='end' does not change.* Use origin='start'"
        ):
            encoding.embed(torch.zeros(1, 12, DIM), pos) if name != "jitter" else encoding.prepare(pos)
    for name in ("sincos2d", "fourier(normalize=none)", "spder(normalize=false)"):
        encoding = create_encoding(name, **facts)
        result = encoding.table(pos)
        torch.testing.assert_close(result, encoding.table(Grid((3, 4)).positions()).flip(1))


def test_rows_of_mirrored_positions():
    """From the centre, mirrored positions differ by the sign of a coordinate: sines change sign, cosines are equal."""
    encoding = create_encoding("sincos2d", dim=8)
    table = encoding.table(Grid((3, 5), origin="centre").positions())[0].unflatten(0, (3, 5))
    sign = torch.tensor([-1.0, -1, 1, 1, 1, 1, 1, 1])
    torch.testing.assert_close(table.flip(0), table * sign)
    square = encoding.table(Grid((4, 4), origin="centre").positions())[0].unflatten(0, (4, 4))
    rotated = square.transpose(0, 1)
    torch.testing.assert_close(rotated, square[..., [4, 5, 6, 7, 0, 1, 2, 3]])
