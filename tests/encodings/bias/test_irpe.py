"""irpe against a slow oracle of the definitions, and the claims of its docstring."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from timm.models import VisionTransformer

import vispe
from tests.attention import oracle
from tests.cases import cases, pairwise
from tests.products import partly
from vispe import Grid, Positions, attention, create_encoding
from vispe.encodings.parts.bias.buckets import piecewise_index
from vispe.encodings.parts.bias.irpe_tables import bucket_ids, num_buckets
from vispe.errors import OptionError, ShapeError

DIM, HEADS, WIDTH = 12, 3, 4
METHODS = ["euclidean", "quantization", "product", "cross"]
GRIDS = [Grid((3, 5), 1), Grid((4, 2), 3), Grid((1, 1), 1), Grid((1, 6)), Grid((7, 1), 2)]
sides = st.integers(1, 6)
property_settings = settings(max_examples=25, deadline=None, derandomize=True)


def g(x, ratio):
    """Return the bucket of one offset."""
    if abs(x) <= ratio:
        return round(x)
    size = round(ratio + math.log(abs(x) / ratio) / math.log(8) * ratio)
    return int(math.copysign(int(min(2 * ratio, size)), x))


def bucket(p, q, method, ratio, prefix_buckets):
    """Return the bucket of one pair of cells, None for prefix tokens; (rows, columns) with 'cross'."""
    beta, count = int(2 * ratio), num_buckets(method, ratio, 0)
    if p is None or q is None:
        kind = 2 if p is q is None else 0 if p is None else 1
        entry = count + (kind if prefix_buckets == 3 else 0)
        return (entry, entry) if method == "cross" else entry
    dy, dx = p[0] - q[0], p[1] - q[1]
    return {
        "euclidean": lambda: g(round(math.hypot(dy, dx)), ratio) + beta,
        "quantization": lambda: g(dy * dy + dx * dx, ratio) + beta,
        "product": lambda: (g(dy, ratio) + beta) * (2 * beta + 1) + g(dx, ratio) + beta,
        "cross": lambda: (g(dy, ratio) + beta, g(dx, ratio) + beta),
    }[method]()


def buckets(grid, method, ratio, prefix_buckets):
    """Return the matrices of buckets, one or two."""
    cells = oracle.cells_of(grid.shape, grid.prefix)
    ids = torch.tensor([[bucket(p, q, method, ratio, prefix_buckets) for q in cells] for p in cells])
    return ids.unbind(-1) if method == "cross" else (ids,)


def build(seed=0, **options):
    """Return an encoding with random tables, in float64."""
    encoding = create_encoding("irpe", dim=DIM, num_heads=HEADS, **options).double()
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in encoding.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    return encoding


def tables(encoding, letter):
    """Return the tables of one letter as (heads, buckets, width or 1), with zeros for absent prefix buckets."""
    result = []
    for parameter in encoding.get_submodule(f"rpe_{letter}").parameters():
        table = parameter[..., None] if encoding.mode == "bias" else parameter
        table = table if letter == "v" or encoding.mode == "bias" else table.transpose(1, 2)
        table = torch.cat([table, torch.zeros_like(table[:, :1])], 1)
        result.append(table.expand(HEADS, -1, -1))
    return result


def slow(encoding, grid, q, k, v):
    """Return attention with explicit terms of shape n x n x d."""
    ids = buckets(grid, encoding.method, encoding.ratio, encoding.prefix_buckets)
    scale = q.shape[-1] ** -0.5
    logits = scale * q @ k.transpose(-1, -2)
    for letter in set("qk") & set(encoding.on):
        for table, index in zip(tables(encoding, letter), ids, strict=True):
            if encoding.mode == "bias":
                term = table[:, index, 0][None]
            else:
                term = torch.einsum("bhid,hijd->bhij", scale * (q if letter == "k" else k), table[:, index])
            logits = logits + (term if letter == "k" else term.transpose(-1, -2))
    attn = logits.softmax(-1)
    out = attn @ v
    if "v" in encoding.on:
        for table, index in zip(tables(encoding, "v"), ids, strict=True):
            out = out + torch.einsum("bhij,hijd->bhid", attn, table[:, index])
    return out


def fast(encoding, pos, q, k, v, backend="auto"):
    return attention(
        q, k, v, bias=encoding.bias(pos, 0), value_term=encoding.value_term(pos, 0), backend=backend
    )


def content(grid, b=2, seed=1):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(b, HEADS, grid.tokens, WIDTH, generator=generator).double() for _ in range(3)]


@property_settings
@given(x=st.integers(-400, 400), ratio=st.sampled_from([0.3, 0.5, 1.9, 2.0, 3.25, 20.0, 33.0]))
def test_piecewise_index(x, ratio):
    rule = (ratio, 2 * ratio, 8 * ratio)
    assert piecewise_index(torch.tensor([x]), *rule).item() == g(x, ratio)
    assert piecewise_index(torch.tensor([float(x)]), *rule).item() == g(x, ratio)
    assert piecewise_index(torch.tensor(-x), *rule) == -piecewise_index(torch.tensor(x), *rule)


def test_piecewise_index_of_real_offsets():
    result = piecewise_index(torch.tensor([0.5, 1.5, -1.5, 1.9, 2.5, 1e9, -1e9, 0.0]), 1.9, 3.8, 15.2)
    assert result.tolist() == [0, 2, -2, 2, 2, 3, -3, 0]
    assert result.dtype == torch.int64


@partly(1)
@cases("prefix_buckets", [0, 1, 3])
@cases("method", METHODS)
def test_bucket_ids(method, prefix_buckets):
    for grid in GRIDS:
        for ratio in (1.9, 20):
            actual = bucket_ids(grid, method, ratio, prefix_buckets)
            expected = buckets(grid, method, ratio, prefix_buckets)
            assert len(actual) == len(expected)
            for f, w in zip(actual, expected, strict=True):
                assert torch.equal(f[0], w)
                assert f.max() < num_buckets(method, ratio, max(prefix_buckets, 1))
    assert torch.equal(bucket_ids((2, 3), "product", 1.9)[0], bucket_ids(Grid((2, 3)), "product", 1.9)[0])


def test_counts_of_the_published_models():
    assert num_buckets("product", 1.9) == 50
    assert num_buckets("product", 2.0) == 82
    grid, used = Grid((14, 14), 1), {}
    for method, ratio in (("euclidean", 20), ("quantization", 33), ("cross", 20), ("product", 1.9)):
        used[method] = len(bucket_ids(grid, method, ratio)[0].unique()), num_buckets(method, ratio)
    assert used == {"euclidean": (20, 82), "quantization": (51, 134), "cross": (28, 82), "product": (50, 50)}


@partly(2)
@cases("method", METHODS)
@cases(
    ("mode", "on", "prefix_buckets", "shared"),
    [
        ("contextual", "k", 1, True),
        ("contextual", "q", 3, False),
        ("contextual", "qkv", 1, False),
        ("contextual", "v", 0, True),
        ("contextual", "vq", 3, True),
        ("bias", "k", 1, False),
        ("bias", "q", 3, True),
        ("bias", "kq", 3, False),
        ("bias", "qk", 0, False),
    ],
)
def test_attention_and_all_gradients(method, mode, on, prefix_buckets, shared):
    encoding = build(method=method, mode=mode, on=on, prefix_buckets=prefix_buckets, shared=shared, ratio=1.9)
    for grid in GRIDS[:2]:  # the second grid after the first
        leaves = [t.requires_grad_() for t in content(grid)]
        every = [*leaves, *encoding.parameters()]
        expected = slow(encoding, grid, *leaves)
        cotangent = torch.randn_like(expected)
        wanted_grads = torch.autograd.grad(expected, every, cotangent)
        for backend in ("reference",) if "v" in on else ("reference", "sdpa"):
            actual = fast(encoding, grid.positions(), *leaves, backend=backend)
            torch.testing.assert_close(actual, expected, rtol=1e-10, atol=1e-12)
            for f, w in zip(torch.autograd.grad(actual, every, cotangent), wanted_grads, strict=True):
                torch.testing.assert_close(f, w, rtol=1e-8, atol=1e-10)


@pairwise
@cases("method", METHODS)
@cases("prefix_buckets", [0, 1, 3])
def test_dropped_tokens_equal_rows_of_the_full_computation(method, prefix_buckets):
    encoding = build(method=method, on="qkv", prefix_buckets=prefix_buckets)
    grid = Grid((3, 4), 2)
    pos = grid.positions()
    keep = torch.tensor([[0, 1, 3, 4, 9, 13], [0, 1, 12, 2, 7, 3]])
    subset_pos = pos.gather(keep)
    q, k, _ = content(grid)
    subset_q, subset_k = (t.gather(2, keep[:, None, :, None].expand(-1, HEADS, -1, WIDTH)) for t in (q, k))
    for heads in (slice(None), slice(1, 3)):
        full = encoding.bias(pos, 0).dense(q=q, k=k, scale=0.5, heads=heads)
        subset = encoding.bias(subset_pos, 0).dense(q=subset_q, k=subset_k, scale=0.5, heads=heads)
        attn = torch.randn_like(subset)
        scattered = torch.zeros_like(full)
        for b in range(2):
            torch.testing.assert_close(subset[b], full[b][:, keep[b]][:, :, keep[b]])
            for row, token in enumerate(keep[b]):
                scattered[b, :, token, keep[b]] = attn[b, :, row]
        values = encoding.value_term(subset_pos, 0).apply(attn)
        expected = encoding.value_term(pos, 0).apply(scattered)
        for b in range(2):
            torch.testing.assert_close(values[b], expected[b][:, keep[b]])


def test_cross_allocates_no_n_by_n_buckets():
    encoding = build(method="cross", on="kv")
    pos = Grid((9, 11), 1).positions()
    encoding.bias(pos, 0), encoding.value_term(pos, 0)
    largest = max(t.numel() for key, t in vars_of(pos) if "irpe" in str(key))
    assert largest == 100 * 12  # tokens x (columns + 1)


def vars_of(pos):
    for key, value in pos.memo.items():
        for item in value if isinstance(value, tuple) else ():
            yield from (
                (key, t) for t in (item if isinstance(item, tuple) else (item,)) if torch.is_tensor(t)
            )


def test_tables_start_at_zero_and_shapes():
    encoding = create_encoding("irpe.ctx_product_50_shared_qkv", dim=DIM, num_heads=HEADS)
    shapes = {name: tuple(p.shape) for name, p in encoding.named_parameters()}
    assert shapes == {
        "rpe_q.lookup_table_weight": (1, 4, 50),
        "rpe_k.lookup_table_weight": (1, 4, 50),
        "rpe_v.lookup_table_weight": (1, 50, 4),
    }
    assert all((p == 0).all() for p in encoding.parameters())
    assert encoding.per_layer
    assert encoding.bias(Grid((2, 2)).positions(), 0) is not None
    assert create_encoding("irpe(on=v)", dim=DIM, num_heads=HEADS).bias(Grid((2, 2)).positions(), 0) is None
    cross = create_encoding("irpe(method=cross,mode=bias,shared=false)", dim=DIM, num_heads=HEADS)
    assert {n: tuple(p.shape) for n, p in cross.named_parameters()} == {
        "rpe_k.rp_rows.lookup_table_bias": (3, 82),
        "rpe_k.rp_cols.lookup_table_bias": (3, 82),
    }
    build().reset_parameters()


@cases("preset", ["ctx_product_50_shared_qkv", "ctx_cross_56_shared_k"])
def test_released_checkpoints_load(preset):
    torch.manual_seed(0)
    model = VisionTransformer(
        img_size=32, patch_size=8, embed_dim=DIM, depth=2, num_heads=HEADS, num_classes=2, mlp_ratio=1.0
    ).eval()
    x = torch.randn(1, 3, 32, 32)
    before, stock = model(x), model.state_dict()
    vispe.convert(model, f"irpe.{preset}", keep_abs=True)
    torch.testing.assert_close(model(x), before)  # zero tables change nothing
    entries = {k: torch.randn_like(v) for k, v in model.state_dict().items() if "pos_enc" in k}
    released = {k.replace("pos_enc.", ""): v for k, v in entries.items()}
    model.load_state_dict({**stock, **released})
    state = model.state_dict()
    assert all(torch.equal(state[k], v) for k, v in entries.items())
    assert not torch.equal(model(x), before)
    assert model(torch.randn(1, 3, 32, 32)).isfinite().all()


@pytest.mark.parametrize("mode", ["contextual", "bias"])
@property_settings
@given(h=sides, w=sides, data=st.data(), method=st.sampled_from(METHODS))
def test_invariant_to_translation(mode, h, w, data, method):
    down, right = data.draw(st.integers(0, h - 1)), data.draw(st.integers(0, w - 1))
    encoding, grid = build(method=method, mode=mode, on="qk", ratio=1.9), Grid((h, w))
    q, k, _ = (t[:1, :, :1].expand(-1, -1, grid.tokens, -1) for t in content(grid))
    dense = (
        encoding.bias(grid.positions(), 0)
        .dense(q=q, k=k, scale=1.0)
        .unflatten(-1, (h, w))
        .unflatten(-3, (h, w))
    )
    torch.testing.assert_close(
        dense[..., down:, right:, down:, right:], dense[..., : h - down, : w - right, : h - down, : w - right]
    )


@property_settings
@given(
    n=sides,
    method=st.sampled_from(["euclidean", "quantization"]),
    turns=st.integers(0, 3),
    flip=st.booleans(),
)
def test_distances_are_invariant_to_rotations_of_a_square(n, method, turns, flip):
    encoding, grid = build(method=method, on="k", ratio=1.9), Grid((n, n))
    q, k, _ = (t[:1, :, :1].expand(-1, -1, grid.tokens, -1) for t in content(grid))
    dense = encoding.bias(grid.positions(), 0).dense(q=q, k=k, scale=1.0)
    cells = torch.arange(n * n).reshape(n, n).rot90(turns)
    order = (cells.flip(0) if flip else cells).flatten()
    torch.testing.assert_close(dense[..., order, :][..., order], dense)


@cases(
    ("options", "message"),
    [
        ("method=prod", "method must be one of euclidean, quantization, product, cross, got 'prod'"),
        ("mode=ctx", "mode must be one of bias, contextual, got 'ctx'"),
        ("on=kk", "letters q, k, v, each once, got on='kk'"),
        ("on=x", "got on='x'"),
        ("on=1", "got on=1"),
        ("mode=bias,on=kv", "mode='bias' cannot be on v, got on='kv': omit v or use mode=contextual"),
        ("shared=1", "shared is true or false, got shared=1"),
        ("ratio=0", "ratio needs a number above 0, got ratio=0"),
        ("ratio=big", "got ratio='big'"),
        ("prefix_buckets=2", "prefix_buckets must be one of 0, 1, 3, got 2"),
        ("prefix_buckets=true", "prefix_buckets must be one of 0, 1, 3, got True"),
    ],
)
def test_option_errors(options, message):
    with pytest.raises(OptionError, match=message):
        create_encoding(f"irpe({options})", dim=DIM, num_heads=HEADS)


def test_other_errors():
    with pytest.raises(OptionError, match="dim to be a multiple of num_heads, got dim=10, num_heads=3"):
        create_encoding("irpe", dim=10, num_heads=3)
    with pytest.raises(OptionError, match=r"method must be one of .* got 'euc'"):
        num_buckets("euc", 2.0)
    for options in ("on=v", "on=k", "on=k,mode=bias", "on=k,method=cross"):
        encoding = create_encoding(f"irpe({options})", dim=DIM, num_heads=HEADS)
        for pos in (Grid((4,)).positions(), Positions(torch.zeros(1, 4, 2))):
            with pytest.raises(ShapeError, match=r"irpe needs the tokens of a 2-axis grid, got [12] ax[ei]s"):
                encoding.bias(pos, 0)
            if encoding.on == "v":
                with pytest.raises(ShapeError, match="irpe needs the tokens of a 2-axis grid"):
                    encoding.value_term(pos, 0)
    for method in ("product", "cross"):
        bias = build(method=method).bias(Grid((2, 2)).positions(), 0)
        with pytest.raises(ShapeError, match=r"query.*q, k and scale"):
            bias.dense()
