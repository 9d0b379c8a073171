"""The description of shifted windows compared with the masks of Swin's authors and of libraries."""

import pytest
import torch

from tests.attention.windows import mask_of, shifted
from tests.cases import cases
from vispe import Grid
from vispe.attention import SumBias, TableBias, WindowMask, attention, explain, use_backend
from vispe.attention.backends.triton.coords.operands import coords_unsupported_reason
from vispe.errors import ShapeError
from vispe.hosts.windows.torchvision import window_shift_mask

MAPS = [
    ((2, 3), (4, 3), (2, 1)),
    ((1, 2), (3, 5), (0, 2)),
    ((2, 2, 2), (2, 3, 2), (1, 1, 1)),
    ((2, 2), (7, 7), (3, 3)),
]


def read(mask, table):
    """Return the values that pairs of tokens read from the widened table, (b, h, n, n)."""
    cells = mask.cell_numbers().long()
    return mask.widened(table).flatten(1)[:, cells[:, 0, :, None] - cells[:, 1, None]].transpose(0, 1)


@cases(("windows", "shape", "shift"), MAPS)
def test_pairs_read_the_mask(windows, shape, shift):
    pos = Grid(shape).positions()
    mask = mask_of(pos, windows, shift, 2)
    expected = shifted(windows, shape, shift).repeat(2, 1, 1)[:, None]
    assert torch.equal(mask.dense(), expected)
    assert torch.equal(mask.added(), expected)
    assert torch.equal(read(mask, None), expected)


@cases(("windows", "shape", "shift"), MAPS)
def test_pairs_read_a_bias_with_it(windows, shape, shift):
    pos = Grid(shape).positions()
    mask = mask_of(pos, windows, shift, 1)
    table = torch.randn(3, *(2 * n - 1 for n in shape), generator=torch.Generator().manual_seed(0))
    bias = TableBias(table, pos)
    assert torch.equal(read(mask, table), SumBias([bias, mask]).dense())


@cases(("size", "window", "shift"), [((9, 8), (4, 4), (2, 2)), ((5, 14), (5, 7), (2, 3))])
def test_masks_of_torchvision(size, window, shift):
    arguments = window_shift_mask(torch.zeros(2, *size, 8), window, shift)
    mask = WindowMask(arguments, Grid(window).positions(), 2 * len(arguments))
    assert torch.equal(read(mask, None), mask.dense())
    assert (arguments != 0).any()


def test_masks_of_timm():
    timm = pytest.importorskip("timm")
    model = timm.create_model("swin_tiny_patch4_window7_224", img_size=56, depths=(2, 2), num_classes=0)
    block = model.layers[0].blocks[1]
    mask = WindowMask(block.attn_mask, Grid(block.window_size).positions(), len(block.attn_mask))
    assert torch.equal(read(mask, None), mask.dense())
    assert (block.attn_mask != 0).any()


def test_masks_of_monai():
    swin = pytest.importorskip("monai.networks.nets.swin_unetr", reason="MONAI is not installed")
    arguments = swin.compute_mask([6, 8, 4], (3, 4, 2), (1, 2, 1), torch.device("cpu"))
    mask = WindowMask(arguments, Grid((3, 4, 2)).positions(), len(arguments))
    assert torch.equal(read(mask, None), mask.dense())


def test_a_mask_of_another_window_is_refused():
    pos = Grid((2, 3)).positions()
    with pytest.raises(ShapeError, match=r"windows of \(2, 3\) tokens, with samples=3"):
        WindowMask(torch.zeros(2, 6, 6), pos, 3)
    with pytest.raises(ShapeError, match="a full grid in raster order"):
        WindowMask(torch.zeros(2, 7, 7), Grid((2, 3), prefix=1).positions(), 2)


def test_backends_without_kernels_use_the_mask():
    pos = Grid((4, 3)).positions()
    mask = mask_of(pos, (2, 3), (2, 1), 2)
    q, k, v = torch.randn(3, 12, 2, 12, 8, generator=torch.Generator().manual_seed(0)).unbind(0)
    table = TableBias(torch.randn(2, 7, 5, generator=torch.Generator().manual_seed(1)), pos)
    for bias in (None, table):
        expected = attention(q, k, v, bias=bias, attn_mask=mask.added())
        assert torch.equal(attention(q, k, v, bias=bias, attn_mask=mask), expected)
        with use_backend("reference"):
            torch.testing.assert_close(attention(q, k, v, bias=bias, attn_mask=mask), expected)
        assert explain(q, k, v, bias=bias, attn_mask=mask).backend == "sdpa"
    assert coords_unsupported_reason(SumBias([table, mask])) is None
    assert "several masks" in coords_unsupported_reason(SumBias([mask, mask]))
