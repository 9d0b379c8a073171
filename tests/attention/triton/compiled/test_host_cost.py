"""Small kernels that a training step launches in addition to those of vispe, counted with a stand-in for the driver.

A GPU waits for the host if there are many. The counts are those of a CPU, which has a few more copies between dtypes.
"""

import pytest
import torch

pytest.importorskip("triton", reason="Triton is not installed")
from tests.attention.triton.compiled.stand_in_driver import stand_in_gpu
from vispe import Grid, attention
from vispe.attention import DistanceBias, TableBias
from vispe.attention.bias.decomposed import DecomposedBias

HEADS, WIDTH = 2, 16
# allocations and views, which launch nothing
FREE = {
    "as_strided", "detach", "empty", "empty_like", "empty_strided", "expand", "flatten", "movedim", "narrow",
    "new_empty", "permute", "promote_types", "reshape", "select", "slice", "to", "unbind", "unflatten",
    "unsqueeze", "view",
}  # fmt: skip


def operations(step):
    """Return the number of operations of torch in a step, and the names of those that launch a kernel."""
    for _ in range(2):
        step()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    launched = []

    def visit(event):
        # of nested operations, the innermost one launches
        inner = sum([visit(child) for child in event.cpu_children])
        name = event.name.removeprefix("aten::")
        launches = name != event.name and name not in FREE and not inner
        launched.extend([name] * launches)
        return inner + launches

    events = profile.events()
    for event in events:
        if event.cpu_parent is None:
            visit(event)
    return sum(event.name.startswith("aten::") for event in events), launched


@pytest.mark.parametrize(
    ("kind", "shape", "prefix", "most", "total"),
    [
        ("table", (32, 32), 1, 26, 130),
        ("table with prefix values", (32, 32), 1, 32, 165),
        ("table", (5, 7), 0, 28, 140),
        ("fixed", (32, 32), 1, 2, 30),
        ("decomposed", (32, 32), 1, 8, 95),
    ],
)
def test_kernels_of_torch_in_a_training_step(kind, shape, prefix, most, total):
    grid = Grid(shape, prefix)
    pos = grid.positions()
    q, k, v, cotangent = (
        torch.randn(1, grid.tokens, HEADS, WIDTH, dtype=torch.bfloat16).transpose(1, 2) for _ in range(4)
    )
    leaves = [x.requires_grad_() for x in (q, k, v)]
    table = torch.randn(HEADS, *(2 * n - 1 for n in shape), requires_grad=True)
    edge = torch.randn(HEADS, 3, requires_grad=True)
    rows, cols = (torch.randn(1, HEADS, grid.tokens, n + 1, requires_grad=True) for n in shape)
    make, parameters = {
        "fixed": (lambda: DistanceBias((0.5, 1.0), pos), []),
        "table": (lambda: TableBias(table, pos), [table]),
        "table with prefix values": (lambda: TableBias(table, pos, edge), [table, edge]),
        "decomposed": (lambda: DecomposedBias(rows, cols, "query", pos), [rows, cols]),
    }[kind]

    def step():
        out = attention(q, k, v, bias=make(), backend="triton")
        torch.autograd.grad(out, [*leaves, *parameters], cotangent)

    with stand_in_gpu(90, compiles=False):
        count, launched = operations(step)
    assert len(launched) <= most, launched
    assert count <= total
