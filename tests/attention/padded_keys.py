"""Outputs and gradients do not depend on padded keys and values."""

import torch

from tests.attention.cases import CASES, HEADS, WIDTH, tensors
from vispe import Grid, attention
from vispe.attention import PairRotation

GRID = Grid((3, 4), 1)
KEEP = torch.ones(2, GRID.tokens, dtype=torch.bool)
KEEP[0, 9:], KEEP[1, 2:5] = False, False
NAMES = (
    "none",
    "distance learned",
    "squared fixed",
    "table with prefix",
    "gated",
    "context of key",
    "sum",
    "lowrank",
)


def same_whatever_padding_holds(name, backend, junk, rotated=False, compiler=None, form="padding"):
    """Compare outputs and all gradients with those of other values in the padding; return the number compared."""
    case = CASES[name](GRID.positions(), 2)
    angles = torch.randn(1, 1, GRID.tokens, WIDTH // 2, requires_grad=True)
    clean = tensors(2, GRID.tokens)
    dirty = [clean[0]]
    for x in clean[1:]:
        dirty.append(x.detach().masked_fill(~KEEP[:, None, :, None], junk).requires_grad_())
    mask = {"key_padding_mask": KEEP} if form == "padding" else {"attn_mask": KEEP[:, None, None]}
    cotangent = torch.randn(2, HEADS, GRID.tokens, WIDTH)

    def run(q, k, v):
        transform = PairRotation(angles.cos(), angles.sin(), "half") if rotated else None
        return attention(q, k, v, bias=case.bias, transform=transform, backend=backend, **mask)

    result = []
    called = run
    if compiler:
        torch._dynamo.reset()
        called = torch.compile(run, backend=compiler)
    for q, k, v in (clean, dirty):
        out = called(q, k, v)
        leaves = [q, k, v, *case.params, *([angles] if rotated else [])]
        result.append([out, *torch.autograd.grad(out, leaves, cotangent)])
    for mine, other in zip(*result, strict=True):
        torch.testing.assert_close(other, mine, rtol=0, atol=0)
    for grad in result[1][2:4]:
        assert (grad.transpose(1, 2)[~KEEP] == 0).all()
    return len(result[0])
