"""Functions of offsets: signs, the table of a grid, other positions, the torus, and gradients."""

import pytest
import torch

from tests.attention import oracle
from tests.cases import cases
from tests.encodings.bias import offsets
from vispe import Grid, Positions, attention
from vispe.attention import OffsetBias, RadialBias
from vispe.attention.bias.lower_to_table import table_unsupported_reason
from vispe.errors import ShapeError

GRIDS = [Grid((7,), 2), Grid((3, 4), 1), Grid((1, 5)), Grid((2, 3, 4), 1, (5.0, 0.7, 0.5))]


def lean(step):
    """Different in every direction, not 0 at 0."""
    along = step @ torch.arange(1.0, step.shape[1] + 1).to(step)
    return torch.stack([along, torch.cos(along) + step[:, 0] ** 2])


class Lean:
    def bias(self, pos, layer):
        return OffsetBias(lean, pos)


def test_table_and_dense_are_the_function():
    offsets.check_values(Lean(), lambda d: lean(torch.tensor([d], dtype=torch.float64))[:, 0].tolist(), GRIDS)


@cases("shape", [(4,), (3, 4), (5, 2)])
def test_the_torus(shape):
    pos = Grid(shape, 1).positions()
    result = OffsetBias(lean, pos, wrap=True)
    patches = result.dense()[0, :, 1:, 1:].reshape(2, *shape, *shape)
    axes = tuple(range(1, 1 + 2 * len(shape)))
    torch.testing.assert_close(patches.roll((1,) * len(axes), axes), patches)
    moved = pos.replace(coords=pos.coords.double() + 1.0)
    torch.testing.assert_close(OffsetBias(lean, moved, wrap=True).dense().float(), result.dense())
    length = RadialBias(lambda d: d[None], pos, wrap=True)
    torch.testing.assert_close(
        OffsetBias(lambda step: step.norm(dim=-1)[None], pos, wrap=True).dense(), length.dense()
    )


def test_spacing_heads_and_queries_of_other_positions():
    pos = Grid((3, 4), 1).positions()
    spaced, other = OffsetBias(lean, pos, spacing=(2.0, 0.5)), Grid((3, 4), 1, (2.0, 0.5))
    torch.testing.assert_close(spaced.dense(), OffsetBias(lean, other.positions()).dense())
    torch.testing.assert_close(spaced.table(pos.grid), OffsetBias(lean).table(other))
    torch.testing.assert_close(spaced.dense(heads=slice(1, 2)), spaced.dense()[:, 1:])
    some, keys = pos.gather(torch.tensor([[0, 5]])), Positions(torch.rand(1, 3, 2))
    result = OffsetBias(lean).dense(some, keys)
    assert not result[:, :, 0].any()
    torch.testing.assert_close(result[0, :, 1], lean(keys.coords[0] - some.coords[0, 1]))


def test_backends_and_gradients():
    pos, rate = Grid((4, 5), 1).positions(), torch.rand(2, 1, requires_grad=True)
    q, k, v, cotangent = torch.randn(4, 2, 2, 21, 8)
    result = []
    for backend in ("reference", "sdpa", "auto"):
        out = attention(q, k, v, bias=OffsetBias(lambda s: lean(s) * rate, pos), backend=backend)
        result.append((out, torch.autograd.grad(out, rate, cotangent)[0]))
    for other in result[1:]:
        torch.testing.assert_close(other, result[0], rtol=1e-4, atol=1e-5)
    assert table_unsupported_reason(OffsetBias(lean, pos)) is None
    assert oracle.table_matrix(OffsetBias(lean, pos).table(pos.grid).double(), pos.grid).isfinite().all()


def test_masks_of_fixed_functions_are_cached():
    pos, calls = Grid((3, 4)).positions(), []

    def function(step):
        calls.append(len(step))
        return step.T[:1]

    q = torch.randn(1, 2, 12, 8)
    for _ in range(3):
        attention(q, q, q, bias=OffsetBias(function, pos, key="first"))
    assert calls == [5 * 7]
    assert OffsetBias(function, pos).key is None
    assert OffsetBias(function, pos, key="first").key != OffsetBias(function, pos, key="first", wrap=True).key


def test_a_function_without_heads_is_refused():
    with pytest.raises(
        ShapeError, match=r"must return \(heads or 1, 15\) .* got \(15,\)\. Add a leading axis"
    ):
        OffsetBias(lambda step: step[:, 0], Grid((2, 3)).positions()).dense()
