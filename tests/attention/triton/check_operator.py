"""The fused operator inside torch: compile, export, checkpoints, ranks, autocast. `test_interpreter` runs this."""

import subprocess
import sys
from pathlib import Path

import pytest
import torch
from torch._dynamo.backends.registry import lookup_backend
from torch.utils.checkpoint import checkpoint

from tests.attention.triton import ranks
from vispe import Grid, attention
from vispe.attention import DistanceBias, TableBias
from vispe.attention.backends.triton.grid.op import table_attention
from vispe.attention.bias.strip.layout import layout_of
from vispe.attention.bias.strip.packed import pack
from vispe.attention.bias.strip.runs import build

HEADS, WIDTH = 2, 16
GRID = Grid((4, 5), 1)


def inputs(grid=GRID, dtype=torch.float32):
    return [torch.randn(2, HEADS, grid.tokens, WIDTH, dtype=dtype, requires_grad=True) for _ in range(3)]


def slopes():
    return torch.tensor([0.2, 0.9], requires_grad=True)


def gradients(function, leaves):
    out = function()
    torch.manual_seed(5)
    return [out, *torch.autograd.grad(out, leaves, torch.randn(out.shape))]


def same(ours, theirs, **tolerance):
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine, other, **tolerance)


@pytest.mark.filterwarnings("ignore:The .grad attribute:UserWarning")  # opcheck reads it of its own copies
def test_opcheck():
    layout = layout_of(GRID.shape, GRID.prefix)
    table = torch.randn(HEADS, 7, 9), torch.randn(HEADS, 3)
    runs, ends = build(*table, layout)
    packed, edge = pack(*table, layout, 0.25, torch.float32)
    address, base = layout.patches_first()
    runs.requires_grad_(), ends.requires_grad_()
    keep = torch.ones(2, GRID.tokens, dtype=torch.bool)
    bias = packed, address, edge, base, keep, runs, ends
    torch.library.opcheck(
        table_attention, (*inputs(), *bias, layout.selected, 0.25, 4, False), rtol=1e-4, atol=1e-5
    )
    visible = torch.tensor([[-19, 0], [-4, 4]], dtype=torch.int32)
    torch.library.opcheck(
        table_attention, (*inputs(), *bias, layout.selected, 0.25, 4, False, visible), rtol=1e-4, atol=1e-5
    )
    torch.library.opcheck(
        table_attention, (*inputs(), *[None] * 7, 0, 0.25, 1, False),
        test_utils=("test_schema", "test_autograd_registration", "test_faketensor"), rtol=1e-4, atol=1e-5,
    )  # fmt: skip


def attend_image(x, slopes):
    """Attention of an image of tokens (b, gh, gw, channels), as in models for any size."""
    q, k, v = x.flatten(1, 2).unflatten(-1, (3, HEADS, WIDTH)).permute(2, 0, 3, 1, 4)
    return attention(
        q, k, v, bias=DistanceBias(slopes, Grid(x.shape[1:3]).positions()), backend="triton"
    )  # fmt: skip


def test_compiled_in_one_graph_for_all_grids():
    torch._dynamo.reset()
    graphs = []

    def counted(graph, example):
        graphs.append(graph)
        return lookup_backend("aot_eager")(graph, example)

    fast = torch.compile(attend_image, fullgraph=True, backend=counted)
    for shape in ((5, 7), (3, 9), (7, 5)):
        x = torch.randn(1, *shape, 3 * HEADS * WIDTH, requires_grad=True)
        torch._dynamo.mark_dynamic(x, (1, 2))
        leaves = [x, slopes()]
        same(
            gradients(lambda leaves=leaves: fast(*leaves), leaves),
            gradients(lambda leaves=leaves: attend_image(*leaves), leaves),
            rtol=1e-5, atol=1e-6,
        )  # fmt: skip
    assert len(graphs) <= 2


@pytest.mark.parametrize("learned", [False, True])
def test_exported_for_any_grid_and_batch(learned):
    class Module(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.slopes = torch.nn.Parameter(slopes().detach()) if learned else (0.2, 0.9)

        def forward(self, x):
            return attend_image(x, self.slopes)

    dims = {i: torch.export.Dim(name, min=2, max=64) for i, name in enumerate(("batch", "height", "width"))}
    width = 3 * HEADS * WIDTH
    with torch.no_grad():
        program = torch.export.export(Module(), (torch.randn(3, 4, 5, width),), dynamic_shapes=[dims])
        for shape in ((2, 6, 8), (4, 2, 3)):
            x = torch.randn(*shape, width)
            same([program.module()(x)], [Module()(x)])
    kernels = [str(n.target) for n in program.graph.nodes if "table_attention" in str(n.target)]
    assert kernels == ["vispe.table_attention.default"]


def test_two_processes_have_the_gradients_of_one(tmp_path):
    if not torch.distributed.is_available() or not torch.distributed.is_gloo_available():
        pytest.skip("torch is built without gloo")
    command = [sys.executable, "-m", "tests.attention.triton.ranks", str(tmp_path)]
    root = Path(__file__).resolve().parents[3]
    done = subprocess.run(command, cwd=root, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    expected = ranks.gradients(ranks.layer(), ranks.tokens())
    assert expected["pos_enc.relative_position_bias_table"].abs().sum() > 0
    for rank in (0, 1):
        actual = torch.load(tmp_path / f"{rank}.pt")
        assert set(actual) == set(expected)
        same([actual[name] for name in expected], expected.values(), rtol=1e-4, atol=1e-6)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointed(reentrant):
    pos, leaves = GRID.positions(), [*inputs(), slopes()]

    def attend(q, k, v, slope):
        return attention(q, k, v, bias=DistanceBias(slope, pos), backend="triton")

    same(
        backward(lambda: checkpoint(attend, *leaves, use_reentrant=reentrant), leaves),
        gradients(lambda: attend(*leaves), leaves),
    )


def backward(function, leaves):
    """Like `gradients`, for functions that only support `backward`."""
    out = function()
    torch.manual_seed(5)
    out.backward(torch.randn(out.shape))
    return [out, *(leaf.grad for leaf in leaves)]


def test_autocast_rounds_inputs_and_not_the_bias():
    pos, leaves = GRID.positions(), [*inputs(), slopes()]
    bias = TableBias(torch.randn(HEADS, 7, 9), pos)
    with torch.autocast(torch.get_default_device().type, torch.float16):
        out = attention(*leaves[:3], bias=bias, backend="triton")
    half = [t.half() for t in leaves[:3]]
    assert out.dtype == torch.float16
    same([out], [attention(*half, bias=bias, backend="triton")], rtol=0, atol=0)


def test_twice_in_one_graph():
    pos, leaves = GRID.positions(), [*inputs(), slopes()]
    wide = [t.detach().double().requires_grad_() for t in leaves]

    def twice(q, k, v, slope, backend):
        bias = DistanceBias(slope, pos)
        return attention(attention(q, k, v, bias=bias, backend=backend), k, v, bias=bias, backend=backend)

    ours = gradients(lambda: twice(*leaves, "triton"), leaves)
    torch.manual_seed(5)
    out = twice(*wide, "reference")
    theirs = [out, *torch.autograd.grad(out, wide, torch.randn(out.shape).double())]
    same(ours, [t.float() for t in theirs], rtol=1e-4, atol=1e-5)
