"""Claims of docstrings on shifts, rotations and new grids, on grids drawn by hypothesis."""

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from vispe import Grid, create_encoding, list_encodings
from vispe.encodings.base import Additive, Biased

settings.register_profile(
    "vispe", max_examples=25, deadline=None, derandomize=True, suppress_health_check=list(HealthCheck)
)
settings.load_profile("vispe")

sides = st.integers(1, 9)
prefixes = st.integers(0, 5)
spacings = st.floats(1 / 64, 128, width=32)
metrics = st.sampled_from(["euclidean", "manhattan", "chebyshev", "squared"])
rules = st.sampled_from(["max", "reference", "none"])
flags = st.booleans()


def alibi2d(metric, wrap, normalize, slopes="geometric"):
    reference = (6, 5) if normalize == "reference" else None
    return create_encoding(
        "alibi2d",
        num_heads=2,
        metric=metric,
        wrap=wrap,
        normalize=normalize,
        slopes=slopes,
        reference=reference,
    )


def matrix(encoding, grid):
    """Return the bias (h, n, n), divided by its largest value so that tolerances mean digits."""
    dense = encoding.bias(grid.positions(), 0).dense()[0]
    return dense / dense.abs().max().clamp(min=1e-30)


def tokens_of(order, prefix):
    """Return token numbers for an image of cell numbers, prefix tokens first."""
    return torch.cat([torch.arange(prefix), prefix + order.flatten()])


def same(a, b):
    torch.testing.assert_close(a, b, rtol=0, atol=2e-6)


@given(n=sides, prefix=prefixes, spacing=spacings, metric=metrics, wrap=flags, normalize=rules)
def test_alibi2d_has_the_symmetries_of_the_square(n, prefix, spacing, metric, wrap, normalize):
    grid = Grid((n, n), prefix, (spacing, spacing))
    dense = matrix(alibi2d(metric, wrap, normalize), grid)
    cells = torch.arange(n * n).reshape(n, n)
    for turns in range(4):
        for image in (cells.rot90(turns), cells.rot90(turns).flip(0)):
            order = tokens_of(image, prefix)
            same(dense[:, order][:, :, order], dense)


@given(
    h=sides, w=sides, prefix=prefixes, dy=spacings, dx=spacings, metric=metrics, wrap=flags, normalize=rules
)
def test_a_rotation_of_any_grid_exchanges_its_axes(h, w, prefix, dy, dx, metric, wrap, normalize):
    encoding = alibi2d(metric, wrap, "max" if normalize == "reference" else normalize)
    dense, rotated = (
        matrix(encoding, Grid((h, w), prefix, (dy, dx))),
        matrix(encoding, Grid((w, h), prefix, (dx, dy))),
    )
    order = tokens_of(torch.arange(h * w).reshape(h, w).rot90(), prefix)
    same(dense[:, order][:, :, order], rotated)


@given(
    h=sides, w=sides, prefix=prefixes, dy=spacings, dx=spacings, metric=metrics, normalize=rules,
    down=st.integers(0, 8), right=st.integers(0, 8),
)  # fmt: skip
def test_wrapped_alibi2d_is_invariant_to_cyclic_shifts(h, w, prefix, dy, dx, metric, normalize, down, right):
    dense = matrix(alibi2d(metric, True, normalize), Grid((h, w), prefix, (dy, dx)))
    order = tokens_of(torch.arange(h * w).reshape(h, w).roll((down, right), (0, 1)), prefix)
    same(dense[:, order][:, :, order], dense)


@given(h=sides, w=sides, dy=spacings, dx=spacings, metric=metrics, normalize=rules, data=st.data())
def test_alibi2d_without_wrap_depends_on_offsets_only(h, w, dy, dx, metric, normalize, data):
    dense = matrix(alibi2d(metric, False, normalize), Grid((h, w), 0, (dy, dx))).reshape(2, h, w, h, w)
    down, right = data.draw(st.integers(0, h - 1)), data.draw(st.integers(0, w - 1))
    shifted = dense[:, down:, right:, down:, right:]
    same(shifted, dense[:, : h - down, : w - right, : h - down, : w - right])


@given(
    h=sides, w=sides, prefix=prefixes, dy=spacings, dx=spacings, metric=metrics, wrap=flags, normalize=rules
)
def test_alibi2d_is_symmetric_with_a_zero_diagonal(h, w, prefix, dy, dx, metric, wrap, normalize):
    grid = Grid((h, w), prefix, (dy, dx))
    dense = alibi2d(metric, wrap, normalize, "constant").bias(grid.positions(), 0).dense()[0, 0]
    same(dense, dense.t())
    assert (dense.diagonal() == 0).all()
    assert (dense <= 0).all()
    assert dense.isfinite().all()
    assert (dense[:prefix] == 0).all()
    if normalize == "max":
        assert dense.min().item() == pytest.approx(-1.0 if h * w > 1 else 0.0, abs=1e-5)


@given(h=sides, w=sides, prefix=prefixes, more=st.integers(1, 5))
def test_local_alibi2d_is_equal_on_every_grid(h, w, prefix, more):
    encoding = create_encoding("alibi2d.local", num_heads=2)
    small = encoding.bias(Grid((h, w), prefix).positions(), 0).dense()
    large = encoding.bias(Grid((h + more, w + more), prefix).positions(), 0).dense()
    cells = torch.arange((h + more) * (w + more)).reshape(h + more, w + more)[:h, :w]
    order = tokens_of(cells, prefix)
    assert torch.equal(large[:, :, order][..., order], small)


@given(n=st.integers(1, 30), prefix=prefixes)
def test_alibi_is_unchanged_by_reversal_and_shift(n, prefix):
    dense = create_encoding("alibi", num_heads=3).bias(Grid((n,), prefix).positions(), 0).dense()[0]
    order = tokens_of(torch.arange(n).flip(0), prefix)
    assert torch.equal(dense[:, order][:, :, order], dense)
    patches = dense[:, prefix:, prefix:]
    assert torch.equal(patches[:, 1:, 1:], patches[:, :-1, :-1])


@given(h=sides, w=sides, prefix=prefixes, more=st.integers(1, 9), dy=spacings, dx=spacings)
def test_sincos2d_at_a_coordinate_does_not_depend_on_the_grid(h, w, prefix, more, dy, dx):
    encoding = create_encoding("sincos2d", dim=16)
    small = encoding.table(Grid((h, w), prefix, (dy, dx)).positions())[0, prefix:].reshape(h, w, 16)
    large = encoding.table(Grid((h + more, w + more), prefix, (dy, dx)).positions())[0, prefix:]
    torch.testing.assert_close(large.reshape(h + more, w + more, 16)[:h, :w], small, rtol=0, atol=1e-6)


@given(h=sides, w=sides, to_h=sides, to_w=sides, prefix=prefixes, level=st.floats(-2, 2, width=32))
def test_learned_resampling(h, w, to_h, to_w, prefix, level):
    encoding = create_encoding("learned", dim=4, grid=(h, w))
    table = encoding.table(Grid((h, w), prefix).positions())
    assert torch.equal(table[0, prefix:], encoding.weight[0])
    resampled = encoding.table(Grid((to_h, to_w), prefix).positions())
    assert (resampled[:, :prefix] == 0).all()
    image = encoding.weight.reshape(1, h, w, 4).permute(0, 3, 1, 2)
    expected = F.interpolate(image, size=(to_h, to_w), mode="bicubic", antialias=True, align_corners=False)
    torch.testing.assert_close(
        resampled[0, prefix:], expected[0].permute(1, 2, 0).flatten(0, 1), rtol=0, atol=1e-7
    )
    with torch.no_grad():
        encoding.weight.fill_(level)
    even = encoding.table(Grid((to_h, to_w)).positions())
    torch.testing.assert_close(even, torch.full_like(even, level), rtol=1e-5, atol=1e-5)


# these read or count the tokens, or what is left of them, or refuse; their own tests drop some
OF_TOKENS = [
    "grape_path",
    "pape",
    "fox",
    "cable",
    "xpos",
    "path",
    "bam_ssmax",
    "distance_bank",
    "cope",
    "tra",
    "gpsa",
    "dynamic",
]


@pytest.mark.parametrize("name", list_encodings(exclude=OF_TOKENS))
@settings(max_examples=4)  # of every encoding
@given(h=sides, w=sides, prefix=prefixes, dy=spacings, dx=spacings, data=st.data())
def test_dropped_tokens_read_rows_of_the_full_table(name, h, w, prefix, dy, dx, data):
    encoding = create_encoding(name, dim=16, num_heads=2, depth=2, grid=(3, 4))
    grid = {
        1: Grid((h * w,), prefix, (dy,)),
        2: Grid((h, w), prefix, (dy, dx)),
        3: Grid((h, w, 2), prefix, (dy, dx, dy)),
    }[2 if 2 in encoding.ndim else encoding.ndim[0]]
    pos = grid.positions()
    chosen = [data.draw(st.permutations(range(grid.patches))) for _ in range(2)]
    count = data.draw(st.integers(1, grid.patches))
    keep = torch.stack([tokens_of(torch.tensor(c[:count]), prefix) for c in chosen])
    subset = pos.gather(keep)
    image = torch.randn(1, 3, 4 * h, 4 * w)
    for i in range(2):
        if isinstance(encoding, Additive):
            torch.testing.assert_close(
                encoding.table(subset, image)[i], encoding.table(pos, image)[0, keep[i]], rtol=0, atol=1e-6
            )
        if isinstance(encoding, Biased) and encoding.bias(pos, 0) is not None:
            q, k = torch.randn(2, 1, 2, pos.tokens, 8, dtype=torch.float64)
            dense = encoding.bias(pos, 0).dense(q=q, k=k, scale=1.0)[0]
            q, k = (t[0][:, keep].transpose(0, 1) for t in (q, k))
            # with wide spacings biases reach 100, of which 2e-6 is less than one ulp of float32
            finite = dense[dense.isfinite()]
            digits = finite.abs().max().clamp(min=1)
            dropped = encoding.bias(subset, 0).dense(q=q, k=k, scale=1.0)[i]
            same(dropped / digits, dense[:, keep[i]][:, :, keep[i]] / digits)
