"""The fused operator inside torch: compile, export, checkpointing, autocast, opcheck. `test_interpreter` runs this."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from vispe import Grid, attention
from vispe.attention import DistanceBias, TableBias
from vispe.attention.triton.op import table_attention
from vispe.attention.triton.strip import build, layout_of, pack

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
    runs, ends = build(torch.randn(HEADS, 7, 9), torch.randn(HEADS, 3), layout)
    packed, edge = pack(runs, ends, layout, 0.25, torch.float32)
    runs.requires_grad_(), ends.requires_grad_()
    keep = torch.ones(2, GRID.tokens, dtype=torch.bool)
    for bias in ((packed, layout.address(), edge, layout.base(), keep, runs, ends), (None,) * 7):
        torch.library.opcheck(
            table_attention, (*inputs(), *bias, layout.selected, 0.25, 4, False), rtol=1e-4, atol=1e-5
        )


def test_compiled_in_one_graph_for_two_grids():
    torch._dynamo.reset()

    def attend(q, k, v, slope, pos):
        return attention(q, k, v, bias=DistanceBias(slope, pos), backend="triton")

    fast = torch.compile(attend, fullgraph=True, backend="aot_eager")
    for grid in (GRID, Grid((3, 7), 2)):
        leaves = [*inputs(grid), slopes()]
        pos = grid.positions()
        same(
            gradients(lambda leaves=leaves, pos=pos: fast(*leaves, pos), leaves),
            gradients(lambda leaves=leaves, pos=pos: attend(*leaves, pos), leaves),
        )


def test_exported():
    class Module(torch.nn.Module):
        def forward(self, q, k, v):
            return attention(q, k, v, bias=DistanceBias((0.2, 0.9), GRID.positions()), backend="triton")

    tensors = [t.detach() for t in inputs()]
    batch = torch.export.Dim("batch", min=2)
    program = torch.export.export(Module(), tuple(tensors), dynamic_shapes=[{0: batch}] * 3)
    more = [torch.cat([t, t[:1]]) for t in tensors]
    same([program.module()(*more)], [Module()(*more)])


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
    """As `gradients`, for what only supports `backward`."""
    out = function()
    torch.manual_seed(5)
    out.backward(torch.randn(out.shape))
    return [out, *(leaf.grad for leaf in leaves)]


def test_autocast_rounds_inputs_and_not_the_bias():
    pos, leaves = GRID.positions(), [*inputs(), slopes()]
    bias = TableBias(torch.randn(HEADS, 7, 9), pos)
    with torch.autocast("cpu", torch.float16):
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
