"""The added table of Kimi's vision towers: by the cubic kernel, and against transformers."""

import math

import pytest
import torch

from tests.cases import cases
from vispe import Grid, create_encoding
from vispe.errors import OptionError, ShapeError


def kernel(x):
    """Return the cubic convolution kernel with a = -0.75."""
    a, x = -0.75, abs(x)
    if x <= 1:
        return ((a + 2) * x - (a + 3)) * x * x + 1
    return ((a * x - 5 * a) * x + 8 * a) * x - 4 * a if x < 2 else 0.0


def weights(old, new):
    """Return the matrix (new, old) of resampling one axis without antialiasing."""
    out = torch.zeros(new, old, dtype=torch.float64)
    for i in range(new):
        at = (i + 0.5) * old / new - 0.5
        for tap in range(math.floor(at) - 1, math.floor(at) + 3):
            out[i, min(max(tap, 0), old - 1)] += kernel(at - tap)
    return out


def expected(table, t, h, w, temperature):
    """Return the table (t * h * w, d) by definition."""
    rows, columns = weights(table.shape[0], h), weights(table.shape[1], w)
    cells = torch.einsum("yi,xj,ijc->yxc", rows, columns, table)
    d = table.shape[2]
    out = []
    for f in range(t):
        rate = [temperature ** (-2 * i / d) for i in range(d // 2)]
        time = [math.sin(f * r) for r in rate] + [math.cos(f * r) for r in rate]
        out.append(cells if t == 1 else cells + torch.tensor(time, dtype=torch.float64))
    return torch.stack(out).flatten(0, 2)


@cases("size", [(1, 3, 5), (1, 6, 2), (4, 2, 9), (3, 3, 5), (2, 1, 1)])
@cases("temperature", [10000.0, 7.0])
def test_table_is_that_of_the_formula(size, temperature):
    encoding = create_encoding(
        "learned_video.moonvit", dim=6, grid=(3, 5), temperature=temperature, std=1.0
    ).double()
    table = encoding.weight.detach().reshape(3, 5, 6)
    actual = encoding.table(Grid(size).positions())
    torch.testing.assert_close(actual[0], expected(table, *size, temperature), rtol=1e-6, atol=1e-6)
    if size[0] == 1:
        assert torch.equal(encoding.table(Grid(size[1:]).positions()), actual)


def test_gradient_is_that_of_the_resampling():
    encoding = create_encoding("learned_video", dim=4, grid=(3, 2), std=1.0).double()
    cotangent = torch.randn(24, 4, dtype=torch.float64)
    encoding.table(Grid((2, 4, 3)).positions())[0].backward(cotangent)
    per_frame = cotangent.reshape(2, 4, 3, 4).sum(0)
    target = torch.einsum("yi,xj,yxc->ijc", weights(3, 4), weights(2, 3), per_frame)
    torch.testing.assert_close(encoding.weight.grad.reshape(3, 2, 4), target)


def test_dropped_tokens_and_prefixes():
    encoding = create_encoding("learned_video", dim=6, grid=(3, 5), std=1.0)
    grid = Grid((2, 2, 3), prefix=1)
    full = encoding.table(grid.positions())
    assert (full[0, 0] == 0).all()
    keep = torch.tensor([[0, 8, 3]])
    assert torch.equal(encoding.table(grid.positions().gather(keep)), full[:, keep[0]])


def test_grids_that_do_not_fit():
    encoding = create_encoding("learned_video.moonvit", dim=6, grid=(3, 5))
    with pytest.raises(ShapeError, match="at most 4 frames, got 5"):
        encoding.table(Grid((5, 2, 2)).positions())
    with pytest.raises(OptionError, match="dim needs"):
        create_encoding("learned_video", dim=5, grid=(3, 5))
    with pytest.raises(OptionError, match="grid needs"):
        create_encoding("learned_video", dim=6, grid=(3,))
    assert create_encoding("learned_video", dim=6, grid=(2, 3, 5)).weight.shape == (1, 15, 6)


def test_tables_of_other_grids_are_resampled_when_loaded():
    small, large = (create_encoding("learned_video", dim=6, grid=g, std=1.0) for g in ((3, 5), (4, 4)))
    state = dict(small.state_dict())
    large.resample_checkpoint(state, "", (3, 5))
    target = small.table(Grid((4, 4)).positions())
    torch.testing.assert_close(state["weight"], target.detach())


@cases("grids", [[[1, 4, 2], [3, 2, 2]], [[4, 6, 4]]])
def test_equal_to_transformers(grids):
    module = pytest.importorskip("transformers.models.kimi_k25.modeling_kimi_k25")
    config = module.Kimi_K25VisionConfig(hidden_size=12, pos_emb_height=5, pos_emb_width=5, pos_emb_time=4)
    theirs = module.Kimi_K25VisionPositionEmbeddings(config)
    table = torch.randn(5, 5, 12)
    theirs.position_embeddings.data.copy_(table)
    grids = torch.tensor(grids)
    hidden = torch.randn(int(grids.prod(1).sum()), 12)
    encoding = create_encoding("learned_video.moonvit", dim=12, grid=(5, 5))
    encoding.load_state_dict({"weight": table.flatten(0, 1)[None]})
    ours = torch.cat([encoding.table(Grid(size).positions())[0] for size in grids.tolist()])
    torch.testing.assert_close(hidden + ours, theirs(hidden, grids), rtol=1e-5, atol=1e-5)
