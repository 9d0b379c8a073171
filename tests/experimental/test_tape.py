"""TapeBlock against its definition, token by token, and its initial tables."""

import pytest
import torch
from torch.nn import functional as F

from tests.cases import cases
from vispe import Grid, create_encoding
from vispe.errors import OptionError, ShapeError
from vispe.experimental.tape import TapeBlock, tape_state


def build(**options):
    """Return a block without zero parameters."""
    block = TapeBlock(**{"dim": 12, "num_heads": 2, "hidden": 10, "position_size": 3, **options}).double()
    with torch.no_grad():
        for name, parameter in block.named_parameters():
            if name.startswith("state"):
                parameter.normal_()
    return block


def slow(block, x, state, causal=False, keep=None):
    """Return tokens and tables of one sample (n, d), (2, h, n, d_h), token by token."""
    n, d = x.shape
    heads, width = block.num_heads, d // block.num_heads

    def norm(layer, t):
        return t / (t.square().mean() + 1e-6).sqrt() * layer.weight

    def rotate(t, h, i):
        half = width // 2
        other = torch.cat([-t[half:], t[:half]])
        return t * state[0, h, i] + other * state[1, h, i]

    q, k, v = (
        (block.qkv.weight @ torch.stack([norm(block.norm1, t) for t in x]).T)
        .T.reshape(n, 3, heads, width)
        .unbind(1)
    )
    tokens, tables = [], state.clone()
    for i in range(n):
        mixed = []
        for h in range(heads):
            logits = torch.stack(
                [rotate(q[i, h], h, i) @ rotate(k[j, h], h, j) * width**-0.5 for j in range(n)]
            )
            for j in range(n):
                if (causal and j > i) or (keep is not None and not keep[j]):
                    logits[j] = -torch.inf
            attn = logits.softmax(0)
            mixed.append(attn @ v[:, h])
            tables[:, h, i] = state[:, h, i] + block.state_gain[h] * (attn @ state[:, h])
        tokens.append(x[i] + block.proj.weight @ torch.cat(mixed))
    out, final = [], tables.clone()
    for i in range(n):
        m = norm(block.norm2, tokens[i])
        m = block.mlp_down.weight @ (block.act(block.mlp_gate.weight @ m) * (block.mlp_up.weight @ m))
        gate = block.act(block.state_gate.weight @ m)
        for kind in range(2):
            inner = gate[:, None] * (block.state_up.weight @ tables[kind, :, i])
            final[kind, :, i] = tables[kind, :, i] + block.state_down.weight @ inner
        out.append(tokens[i] + m)
    return torch.stack(out), final


@cases(
    ("options", "backend"),
    [({}, "reference"), ({"causal": True}, "sdpa"), ({"act": "gelu", "eps": 1e-6}, "auto")],
)
def test_two_blocks(options, backend):
    blocks = [build(**options, backend=backend) for _ in range(2)]
    x = torch.randn(2, 7, 12, dtype=torch.float64)
    state = tape_state(Grid((2, 3), prefix=1), num_heads=2, head_dim=6).double()
    expected = [(t, state[:, 0]) for t in x]
    for block in blocks:
        expected = [slow(block, *w, causal=options.get("causal", False)) for w in expected]
        x, state = block(x, state)
    torch.testing.assert_close(x, torch.stack([w[0] for w in expected]))
    torch.testing.assert_close(state, torch.stack([w[1] for w in expected], 1))


def test_padding():
    block, x = build(), torch.randn(1, 4, 12, dtype=torch.float64)
    state, keep = tape_state((4,), num_heads=2, head_dim=6).double(), torch.tensor([True, False, True, True])
    expected = slow(block, x[0], state[:, 0], keep=keep)
    for masks in ({"key_padding_mask": keep[None]}, {"attn_mask": keep.expand(4, 4)}):
        actual = block(x, state, **masks)
        torch.testing.assert_close((actual[0][0], actual[1][:, 0]), expected)


@cases("shape", [(5,), (2, 3), (2, 1, 3)])
def test_new_blocks_have_the_rotation_of_axial_rope(shape):
    pos = Grid(shape, prefix=2).positions()
    state = tape_state(pos, num_heads=2, head_dim=12, temperature=100.0)
    rope = create_encoding("rope_axial", dim=24, num_heads=2, layout="half", indexing="ij").transform(pos, 0)
    for table, expected in zip(state, (rope.cos, rope.sin), strict=True):
        torch.testing.assert_close(table, expected.repeat(1, 2, 1, 2))
    block, x = TapeBlock(dim=24, num_heads=2), torch.randn(3, pos.tokens, 24)
    out, after = block(x, state)
    torch.testing.assert_close(after, state.expand(-1, 3, -1, -1, -1))
    q, k, v = block.qkv(block.norm1(x)).unflatten(-1, (3, 2, 12)).permute(2, 0, 3, 1, 4)
    attended = F.scaled_dot_product_attention(rope.query(q), rope.key(k), v)
    y = x + block.proj(attended.transpose(1, 2).flatten(2))
    h = block.norm2(y)
    torch.testing.assert_close(out, y + block.mlp_down(F.silu(block.mlp_gate(h)) * block.mlp_up(h)))


def test_initial_state():
    grid, full = {"num_heads": 2, "head_dim": 8}, tape_state((3, 4), num_heads=2, head_dim=8, shift=2.0)
    far = tape_state((5, 6), **grid).unflatten(3, (5, 6))[:, :, :, 2:, 2:].flatten(3, 4)
    torch.testing.assert_close(full, far)
    keep = torch.tensor([[0, 3, 8], [0, 12, 1]])
    pos = Grid((3, 4), 1).positions()
    every, subset = (tape_state(p, **grid) for p in (pos, pos.gather(keep)))
    for i in range(2):
        assert torch.equal(subset[:, i], every[:, 0][:, :, keep[i]])
    assert (every[0, 0, :, 0] == 1).all()
    assert (every[1, 0, :, 0] == 0).all()


def test_gradients():
    block = build(dim=8, hidden=4)
    names, x = [n for n, _ in block.named_parameters()], torch.randn(1, 3, 8, dtype=torch.float64)
    state = torch.randn(2, 1, 2, 3, 4, dtype=torch.float64)

    def out(x, state, *values):
        return torch.func.functional_call(block, dict(zip(names, values, strict=True)), (x, state))

    leaves = [x, state, *(p.detach().clone() for p in block.parameters())]
    assert torch.autograd.gradcheck(out, [t.requires_grad_() for t in leaves], fast_mode=True)


def test_parameters_with_initial_gradients():
    blocks = [TapeBlock(dim=8, num_heads=2) for _ in range(2)]
    x, state = torch.randn(2, 5, 8), tape_state((5,), num_heads=2, head_dim=4)
    for block in blocks:
        x, state = block(x, state)
    (x * torch.randn_like(x)).sum().backward()
    untrained = {n for n, p in blocks[0].named_parameters() if p.grad is None or not p.grad.any()}
    assert untrained == {"state_gate.weight", "state_down.weight"}  # they wait for W_up


@cases("dtype", [torch.bfloat16, torch.float16])
def test_tables_are_in_float32(dtype):
    exact, state = build(), tape_state((2, 3), num_heads=2, head_dim=6)
    x = torch.randn(2, 6, 12, dtype=torch.float64)
    expected = exact(x, state)
    actual = exact.to(dtype)(x.to(dtype), state)
    assert [t.dtype for t in actual] == [dtype, torch.float32]
    for mine, theirs in zip(actual, expected, strict=True):
        assert (mine.double() - theirs).norm() < 0.05 * theirs.norm()


def test_errors():
    with pytest.raises(OptionError, match="dim to be a multiple of twice num_heads, got dim=6, num_heads=2"):
        TapeBlock(dim=6, num_heads=2)
    with pytest.raises(OptionError, match="act must be one of silu, gelu, relu, got 'tanh'"):
        TapeBlock(dim=8, num_heads=2, act="tanh")
    with pytest.raises(OptionError, match="tape_state needs an even head_dim, got head_dim=5"):
        tape_state((4,), num_heads=2, head_dim=5)
    with pytest.raises(
        ShapeError, match="tape_state needs a pair of channels per axis, got 2 pairs for 3 axes"
    ):
        tape_state((2, 2, 2), num_heads=2, head_dim=4)
    state = tape_state((4,), num_heads=2, head_dim=4)
    for x in (torch.zeros(1, 5, 8), torch.zeros(1, 4, 16)):
        with pytest.raises(ShapeError, match=r"TapeBlock needs a state \(2, 1, 2, .*, got \(2, 1, 2, 4, 4\)"):
            TapeBlock(dim=x.shape[-1], num_heads=2)(x, state)
