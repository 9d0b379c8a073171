"""Calls of `attention` that together launch every kernel of the Triton backend, forward and backward."""

from itertools import product
from typing import NamedTuple

import torch

from vispe import Grid
from vispe.attention import (
    CrossAttentionBias,
    DistanceBias,
    GatedBias,
    PairRotation,
    SumBias,
    TableBias,
    attention,
)
from vispe.attention.bias.decomposed import DecomposedBias

BATCH, HEADS = 2, 2
DTYPES = {
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
    "float32": torch.float32,
    "tf32x3": torch.float32,  # products of float32 on tensor cores
}
HEAD_DIMS = (16, 24, 32, 64, 72, 80, 96, 100, 128)  # 72: SigLIP So400m
# by length; 'rows': short, with the layout of strips for odd grids
GRIDS = {"short": Grid((14, 14), 1), "rows": Grid((9, 11), 5), "long": Grid((32, 32), 1)}
BIASES = {  # by family of kernels, each with keywords of `attention`
    # in the sample, small head_dims have the kernels that take longest to compile
    "grid": {
        "dropout": {"dropout_p": 0.1}, "table": {}, "hidden": {}, "padding": {"key_padding_mask": True},
        "grouped": {"enable_gqa": True}, "distance": {}, "slopes": {}, "none": {}, "causal": {"is_causal": True},
        "once": {"deterministic": False}, "fixed point": {"deterministic": True},
    },
    "coords": {
        "distance": {}, "slopes": {}, "table": {}, "slopes and table": {}, "packed": {"cu_seqlens": True},
        "padding": {"key_padding_mask": True}, "fixed point": {"deterministic": True}, "cross": {},
    },
    "decomposed": {
        "query": {}, "key": {}, "query and key": {}, "padded query": {"key_padding_mask": True},
    },
    "gated": {
        "distance": {}, "table": {}, "padding": {"key_padding_mask": True}, "fixed point": {"deterministic": True},
    },
    "rotary": {"half": {}, "interleaved": {}, "per head": {}, "values": {}, "learned": {}, "one input": {}},
}  # fmt: skip


class LaunchCase(NamedTuple):
    """One call: family of kernels, bias, dtype, head_dim, length and compute capability."""

    family: str
    bias: str
    dtype: str
    head_dim: int
    length: str
    arch: int

    def __str__(self):
        return "-".join(map(str, self)).replace(" ", "_")


def run(case, batch=BATCH, heads=HEADS, grid=None):
    """Run the forward and the backward pass of a case."""
    grid = grid or GRIDS[case.length]
    keywords = dict(BIASES[case.family][case.bias])
    key_heads = 1 if "enable_gqa" in keywords else heads
    q, k, v = (
        torch.randn(batch, grid.tokens, count, case.head_dim, dtype=DTYPES[case.dtype])
        .transpose(1, 2)
        .requires_grad_()
        for count in (heads, key_heads, key_heads)
    )
    if "key_padding_mask" in keywords:
        keywords["key_padding_mask"] = torch.ones(batch, grid.tokens, dtype=torch.bool)
    if "cu_seqlens" in keywords:
        keywords["cu_seqlens"] = torch.tensor([0, 50, grid.tokens], dtype=torch.int32)
        q, k, v = (x[:1].detach().requires_grad_() for x in (q, k, v))
    precision = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision("high" if case.dtype == "tf32x3" else "highest")
    try:
        if case.family == "rotary":
            _rotate(case, grid, q, k, v)
            return
        bias = BUILDERS[case.family](case.bias, grid, batch, heads)
        out = attention(q, k, v, bias=bias, backend="triton", **keywords)
        out.backward(torch.ones_like(out))
    finally:
        torch.set_float32_matmul_precision(precision)


def _leaf(*shape):
    # constant: the dtype of a strip may depend on the values
    return torch.full(shape, 0.5, requires_grad=True)


def _table(grid, pos, heads, **options):
    shape = [2 * n - 1 for n in grid.shape]
    return TableBias(_leaf(heads, *shape), pos, _leaf(heads, 3), **options)


def _grid_bias(name, grid, batch, heads):
    pos = grid.positions()
    if name == "none":
        return None
    if name == "distance":
        return DistanceBias((0.5,) * heads, pos)
    if name == "slopes":
        return DistanceBias(_leaf(heads), pos)
    if name == "hidden":
        table = torch.zeros(heads, *(2 * n - 1 for n in grid.shape))
        table[..., : grid.shape[-1] - 1] = float("-inf")
        return TableBias(table, pos, is_sparse=True)
    return _table(grid, pos, heads)


def _coords_bias(name, grid, batch, heads):
    if name == "packed":
        return None
    pos = grid.positions().gather(torch.arange(grid.tokens)[None].flip(1))
    if name == "distance":
        return DistanceBias((0.5,) * heads, pos)
    if name == "cross":
        return CrossAttentionBias(_table(grid, grid.positions(), heads), pos, grid.positions())
    terms = {
        "slopes": [DistanceBias(_leaf(heads), pos)],
        "slopes and table": [DistanceBias(_leaf(heads), pos), _table(grid, pos, heads)],
    }.get(name, [_table(grid, pos, heads)])
    return terms[0] if len(terms) == 1 else SumBias(terms)


def _decomposed_bias(name, grid, batch, heads):
    pos = grid.positions()
    terms = [
        DecomposedBias(*(_leaf(batch, heads, grid.tokens, n + 1) for n in grid.shape), side, pos)
        for side in ("query", "key")
        if side in name
    ]
    return terms[0] if len(terms) == 1 else SumBias(terms)


def _gated_bias(name, grid, batch, heads):
    pos = grid.positions()
    profile = DistanceBias((0.5,) * heads, pos) if name == "distance" else _table(grid, pos, heads)
    return GatedBias(_leaf(batch, heads, grid.tokens), _leaf(batch, heads, grid.tokens), profile)


BUILDERS = {"grid": _grid_bias, "coords": _coords_bias, "decomposed": _decomposed_bias, "gated": _gated_bias}


def _rotate(case, grid, q, k, v):
    """Rotate inputs as before attention; a quarter of the channels is not rotated if `case.bias` is 'one input'."""
    pairs = case.head_dim * 3 // 8 if case.bias == "one input" else case.head_dim // 2
    angles = torch.rand(1, q.shape[1] if case.bias == "per head" else 1, grid.tokens, pairs)
    cos, sin = (
        t.detach().requires_grad_(case.bias in ("learned", "values")) for t in (angles.cos(), angles.sin())
    )
    layout = "interleaved" if case.bias in ("interleaved", "values") else "half"
    rotation = PairRotation(cos, sin, layout, values=case.bias == "values")
    outputs = [rotation.query(q)] if case.bias == "one input" else rotation.inputs(q, k, v)
    torch.autograd.backward([out.sum() for out in outputs])


def all_cases(archs=(80, 90)):
    """Yield all cases; products of float32 on tensor cores do not concern rotations."""
    for family, dtype in product(BIASES, DTYPES):
        if (family, dtype) != ("rotary", "tf32x3"):
            for rest in product(BIASES[family], HEAD_DIMS, GRIDS, archs):
                bias, head_dim, length, arch = rest
                # a causal mask is fused with one prefix token at most
                if "is_causal" in BIASES[family][bias] and GRIDS[length].prefix > 1:
                    continue
                yield LaunchCase(family, bias, dtype, head_dim, length, arch)


def pairwise_cases(archs=(80, 90)):
    """Yield a sample with all pairs of family, dtype, head_dim, length and compute capability, and with each bias."""
    for index, (family, biases) in enumerate(BIASES.items()):
        for i in range(max(len(HEAD_DIMS), len(biases))):
            dtype = list(DTYPES)[(i + index) % len(DTYPES)]
            yield LaunchCase(
                family,
                list(biases)[i % len(biases)],
                "float32" if (family, dtype) == ("rotary", "tf32x3") else dtype,
                HEAD_DIMS[i % len(HEAD_DIMS)],
                list(GRIDS)[(index // 2 + i) % 3],
                archs[(index + i // 4) % 2],
            )
