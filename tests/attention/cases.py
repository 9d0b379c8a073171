"""Biases with their dense form in float64, and the comparison of results with it."""

from dataclasses import dataclass, field

import torch

from tests.attention import oracle
from vispe import attention
from vispe.attention import (
    ContextBias,
    DenseBias,
    DistanceBias,
    GatedBias,
    LowRankBias,
    OffsetBias,
    ProfileBias,
    RadialBias,
    SumBias,
    TableBias,
)

BACKENDS = ("reference", "sdpa", "lowrank")
HEADS, WIDTH = 3, 8


@dataclass
class Case:
    """A bias, its parameters, and its dense form in float64 from parameters, q, k and scale."""

    bias: object
    params: list = field(default_factory=list)
    dense: object = None


def leaf(*shape, scale=1.0):
    return (torch.randn(*shape) * scale).requires_grad_()


def _distance(pos, slopes, metric="euclidean", wrap=False, normalize="none"):
    matrix = oracle.distance_matrix(pos.grid, metric, wrap, normalize)

    def dense(p, q, k, scale):
        m = p[0] if p else torch.tensor(slopes, dtype=torch.float64)
        return -m[:, None, None] * matrix

    bias = DistanceBias(slopes, pos, metric=metric, wrap=wrap, normalize=normalize)
    return Case(bias, [slopes] if isinstance(slopes, torch.Tensor) else [], dense)


def _table(pos, heads=HEADS, prefix=None):
    values = leaf(heads, *(2 * n - 1 for n in pos.grid.shape))
    params = [values] if prefix is None else [values, prefix]
    return Case(
        TableBias(values, pos, prefix), params, lambda p, q, k, s: oracle.table_matrix(p[0], pos.grid, *p[1:])
    )


def _profile(pos):
    slopes, values = leaf(HEADS), leaf(1, *(2 * n - 1 for n in pos.grid.shape))
    return Case(
        ProfileBias(slopes, values, pos),
        [slopes, values],
        lambda p, q, k, s: p[0][:, None, None] * oracle.table_matrix(p[1], pos.grid),
    )


def _lowrank(pos, heads=HEADS, b=1):
    row, col = leaf(b, heads, pos.tokens, 4), leaf(1, 1, pos.tokens, 4)
    return Case(
        LowRankBias(row, col, pos), [row, col], lambda p, q, k, s: torch.einsum("bhir,bgjr->bhij", *p)
    )


def _dense(pos, heads=HEADS, b=1):
    values = leaf(b, heads, pos.tokens, pos.tokens)
    return Case(DenseBias(values, pos), [values], lambda p, q, k, s: p[0])


def _gated(pos, row, col, b):
    gates = [leaf(b, HEADS, pos.tokens) for used in (row, col) if used]
    inner = _distance(pos, (0.5, 0.2, 0.1))

    def dense(p, q, k, s):
        total = torch.zeros((), dtype=torch.float64)
        if row:
            total = total + p[0][..., :, None]
        if col:
            total = total + p[-1][..., None, :]
        return total * inner.dense([], q, k, s)

    bias = GatedBias(gates[0] if row else None, gates[-1] if col else None, inner.bias)
    return Case(bias, gates, dense)


def _context(pos, dot, scaled, heads=HEADS, own=None):
    """`own` is the content that reads the table in place of queries or keys."""
    weights, n = leaf(heads, 5, WIDTH if own is None else own.shape[-1]), pos.tokens
    buckets = torch.randint(0, 5, (n, n))

    def dense(p, q, k, scale):
        factor = scale if scaled else 1.0
        read = p[0][:, buckets]  # (h, n, n, d)
        content = (q if dot == "query" else k) if own is None else p[1]
        content = content[:, :, :, None] if dot == "query" else content[:, :, None]
        return factor * (content * read).sum(-1)

    params = [weights] if own is None else [weights, own]
    return Case(ContextBias(weights, buckets, dot, scaled, pos, own), params, dense)


def _radial(pos, learned=True, **rule):
    """A sum of four functions of distance, weighed by each head."""
    params = [leaf(HEADS, 4)] if learned else []
    fixed = torch.linspace(-1, 1, 4 * HEADS).reshape(HEADS, 4)

    def function(p, d):
        parts = torch.stack([torch.log1p(d), torch.exp(-d), torch.cos(2 * d), d / 4])
        return ((p[0] if p else fixed)[..., None] * parts).sum(1)

    matrix = oracle.distance_matrix(
        pos.grid, **{"metric": "euclidean", "wrap": False, "normalize": "none", **rule}
    )
    positioned = torch.tensor([c is not None for c in oracle.cells_of(pos.grid.shape, pos.grid.prefix)])

    def dense(p, q, k, s):
        return function(p, matrix.flatten()).unflatten(1, matrix.shape) * (positioned[:, None] & positioned)

    bias = RadialBias(lambda d: function(params, d), pos, key=None if learned else "four", **rule)
    return Case(bias, params, dense)


def _offset(pos):
    """Waves along another direction for each head."""
    waves = leaf(HEADS, pos.axes)

    def function(p, steps):
        along = steps @ p[0].T  # (m, h)
        return (along.sin() + along.square() / 9).T

    cells = oracle.cells_of(pos.grid.shape, pos.grid.prefix)
    positioned = torch.tensor([c is not None for c in cells])
    at = torch.tensor([c or (0,) * pos.axes for c in cells], dtype=torch.float64)
    at = at * torch.tensor(pos.grid.spacing or (1.0,) * pos.axes, dtype=torch.float64)
    steps = at[None] - at[:, None]

    def dense(p, q, k, s):
        values = function(p, steps.flatten(0, 1)).unflatten(1, steps.shape[:2])
        return values * (positioned[:, None] & positioned)

    return Case(OffsetBias(lambda steps: function([waves], steps), pos), [waves], dense)


def _whole(case):
    """The same without the product of queries and keys."""

    def dense(p, q, k, s):
        return case.dense(p, q, k, s) - s * q @ k.transpose(-1, -2)

    return Case(case.bias.as_logits(), case.params, dense)


def _sum(*cases):
    def dense(p, q, k, s):
        total, rest = 0, list(p)
        for case in cases:
            mine, rest = rest[: len(case.params)], rest[len(case.params) :]
            total = total + case.dense(mine, q, k, s)
        return total

    return Case(SumBias([c.bias for c in cases]), [p for c in cases for p in c.params], dense)


CASES = {
    "none": lambda pos, b: Case(None, [], lambda p, q, k, s: None),
    "distance constant": lambda pos, b: _distance(pos, (1.0,) * HEADS, wrap=True, normalize="max"),
    "distance fixed": lambda pos, b: _distance(pos, (0.5, 0.2, 0.0), "manhattan"),
    "distance learned": lambda pos, b: _distance(pos, leaf(HEADS), "chebyshev", wrap=True),
    "squared fixed": lambda pos, b: _distance(pos, (0.5, 0.2, 0.1), "squared"),
    "squared learned": lambda pos, b: _distance(pos, leaf(HEADS), "squared", normalize="max"),
    "table": lambda pos, b: _table(pos),
    "table shared": lambda pos, b: _table(pos, heads=1),
    "table with prefix": lambda pos, b: _table(pos, prefix=leaf(HEADS, 3)),
    "table shared, prefix per head": lambda pos, b: _table(pos, heads=1, prefix=leaf(HEADS, 3)),
    "profile": lambda pos, b: _profile(pos),
    "lowrank": lambda pos, b: _lowrank(pos),
    "lowrank per sample": lambda pos, b: _lowrank(pos, b=b),
    "dense": lambda pos, b: _dense(pos),
    "dense shared": lambda pos, b: _dense(pos, heads=1),
    "dense per sample": lambda pos, b: _dense(pos, b=b),
    "gated": lambda pos, b: _gated(pos, True, True, b),
    "gated rows": lambda pos, b: _gated(pos, True, False, b),
    "gated columns": lambda pos, b: _gated(pos, False, True, b),
    "context of query": lambda pos, b: _context(pos, "query", True),
    "context of key": lambda pos, b: _context(pos, "key", False, heads=1),
    "context of content": lambda pos, b: _context(pos, "query", False, own=leaf(b, HEADS, pos.tokens, 4)),
    "radial": lambda pos, b: _radial(pos),
    "radial fixed": lambda pos, b: _radial(pos, learned=False, metric="squared", normalize="max"),
    "offset": lambda pos, b: _offset(pos),
    "radial wrapped": lambda pos, b: _radial(pos, metric="manhattan", wrap=True),
    "whole table": lambda pos, b: _whole(_table(pos)),
    "whole lowrank": lambda pos, b: _whole(_lowrank(pos)),
    "whole distance": lambda pos, b: _whole(_distance(pos, (0.5, 0.2, 0.0))),
    "whole in a sum": lambda pos, b: _sum(
        _distance(pos, (0.5, 0.2, 0.0)), _whole(_context(pos, "key", True))
    ),
    "sum": lambda pos, b: _sum(_distance(pos, (0.5, 0.2, 0.0)), _table(pos), _context(pos, "key", True)),
}


def is_supported(case, backend):
    if backend != "lowrank":
        return True
    squared = isinstance(case.bias, DistanceBias) and case.bias.metric == "squared"
    return squared or isinstance(case.bias, LowRankBias)


def tensors(b, n, m=None, heads=HEADS, kv_heads=None, d_v=WIDTH, dtype=torch.float32):
    m, kv_heads = m or n, kv_heads or heads
    q, k = torch.randn(b, heads, n, WIDTH), torch.randn(b, kv_heads, m, WIDTH)
    return [t.to(dtype).requires_grad_() for t in (q, k, torch.randn(b, kv_heads, m, d_v))]


def doubles(ts):
    return [t.detach().double().requires_grad_() for t in ts]


def close(actual, expected, tol, what=""):
    actual, expected = actual.double(), expected.double()
    assert actual.shape == expected.shape, what
    assert actual.isfinite().all(), what
    error = (actual - expected).norm() / expected.norm().clamp(min=0.1)
    assert error < tol, f"{what}: relative error {error:.2e}"


def compare(case, backend, q, k, v, tol=2e-5, oracle_args=None, **arguments):
    """Compare forward and every gradient with the oracle."""
    inputs = [q, k, v, *case.params]
    exact = doubles(inputs)
    groups = q.shape[1] // k.shape[1]
    scale = arguments.get("scale") or WIDTH**-0.5
    wide_k = exact[1].repeat_interleave(groups, 1)
    dense = case.dense(exact[3:], exact[0], wide_k, scale)
    expected = oracle.attend(*exact[:3], bias=dense, scale=scale, groups=groups, **(oracle_args or {}))
    actual = attention(q, k, v, bias=case.bias, backend=backend, **arguments)
    assert actual.dtype == q.dtype
    close(actual, expected, tol, "forward")
    cotangent = torch.randn_like(expected)
    wanted_grads = torch.autograd.grad(expected, exact, cotangent, allow_unused=True)
    found_grads = torch.autograd.grad(actual, inputs, cotangent.to(actual.dtype), allow_unused=True)
    for i, (a, w) in enumerate(zip(found_grads, wanted_grads, strict=True)):
        close(a, torch.zeros_like(exact[i]) if w is None else w, 4 * tol, f"gradient of input {i}")


def masked(kind, b, n, m):
    padding = torch.ones(b, m, dtype=torch.bool)
    padding[-1, m // 2 :] = False
    table = torch.rand(n, m) > 0.4
    table[:, 0] = True
    if kind == "padding":
        return {"key_padding_mask": padding}, {"keep": padding[:, None, None]}
    if kind == "bool":
        return {"attn_mask": table}, {"keep": table[None, None]}
    if kind == "bool per head":
        each = torch.rand(1, HEADS, n, m) > 0.4
        each[..., 0] = True
        return {"attn_mask": each}, {"keep": each}
    if kind == "float":
        added = torch.randn(b, 1, n, m)
        return {"attn_mask": added}, {"added": added.double()}
    if kind == "float with -inf":
        added = torch.randn(n, m).masked_fill(~table, float("-inf"))
        return {"attn_mask": added}, {"added": added.double()[None, None]}
    if kind == "closed rows":
        table = table.clone()
        table[1] = False
        added = torch.randn(b, HEADS, n, m)
        added[:, 1, 0] = float("-inf")
        return {"attn_mask": added, "key_padding_mask": padding}, {
            "added": added.double(), "keep": padding[:, None, None],
        }  # fmt: skip
    if kind == "closed sample":
        padding = padding.clone()
        padding[0] = False
        return {"key_padding_mask": padding, "attn_mask": table}, {"keep": padding[:, None, None] & table}
    if kind == "causal":
        return {"is_causal": True}, {"keep": torch.ones(n, m).tril().bool()[None, None]}
    causal = torch.ones(n, m).tril().bool()
    return {"is_causal": True, "key_padding_mask": padding}, {"keep": causal & padding[:, None, None]}
