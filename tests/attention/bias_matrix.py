"""Comparison of each backend with float64 for each bias, or its refusal with a message."""

import copy
import re

import pytest
import torch

from tests.attention import oracle
from tests.attention.cases import HEADS, WIDTH, Case, doubles, leaf, tensors
from tests.encodings.test_conformance import DEPTH, DIM, NAMES, build, positions, shapes
from vispe import attention
from vispe.attention import DistanceBias
from vispe.attention.automatic_backend import BACKENDS
from vispe.attention.call import Call
from vispe.encodings.compose import bias_of, value_term_of
from vispe.encodings.metadata import encoding_info
from vispe.encodings.registry import encoding_class
from vispe.errors import BackendUnavailable

# relative errors of outputs and gradients
EXACT = {torch.float32: (2e-6, 1e-5), torch.float16: (6e-4, 2e-3), torch.bfloat16: (4e-3, 1.2e-2)}
# masks and extra columns have the dtype of q, and a bias of 8 is rounded by 2^-9 (float16) or 2^-6 (bfloat16)
ROUNDED = {torch.float32: (4e-6, 2e-5), torch.float16: (2e-3, 6e-3), torch.bfloat16: (1.6e-2, 4.8e-2)}
METRICS = ("euclidean", "manhattan", "chebyshev", "squared")
NORMS = ("none", "max", "reference")
# encodings with several softmaxes have not one bias; tests/encodings has theirs
BRANCHED = {name for name in NAMES if encoding_class(name.partition(".")[0]).multi_softmax}
DERIVED = [n for n in NAMES if encoding_info(n).kinds == ("bias",) and n not in BRANCHED]
DERIVED += [
    "irpe(mode=bias)",
    "seqpe(mode=attn_scalar)",
    "irpe(method=cross,on=qkv,prefix_buckets=3)",
    "alibi2d(metric=squared,wrap=false)",
]


def distance(pos, metric, wrap, normalize, learned=False):
    """Return the case of distances on a grid that was trained as 5 x 4."""
    slopes = leaf(HEADS) if learned else (0.5, 0.2, 0.0)
    matrix = oracle.distance_matrix(pos.grid, metric, wrap, normalize, (5, 4))

    def dense(params, q, k, scale):
        m = params[0] if params else torch.tensor(slopes, dtype=torch.float64)
        return -m[:, None, None] * matrix

    bias = DistanceBias(slopes, pos, metric=metric, wrap=wrap, normalize=normalize, reference=(5, 4))
    return Case(bias, [slopes] if learned else [], dense)


def derived(spec):
    """Return the encoding, the same in float64, its positions, the first block with a bias, and tokens."""
    encoding = build(spec).eval()
    pos = positions(encoding, shapes(encoding)[0])
    x = torch.randn(2, pos.tokens, DIM)
    layer = next(i for i in range(DEPTH) if bias_of(encoding.parts(), pos, i, x) is not None)
    return encoding, copy.deepcopy(encoding).double(), pos, layer, x


def terms(encoding, pos, layer, x):
    """Return what an encoding adds to attention, as arguments."""
    parts = encoding.parts()
    return {"bias": bias_of(parts, pos, layer, x), "value_term": value_term_of(parts, pos, layer)}


def relative(actual, expected):
    actual, expected = actual.detach().double(), expected.detach()
    assert actual.isfinite().all()
    return ((actual - expected).norm() / expected.norm().clamp(min=0.1)).item()


def unsupported(backend, q, k, v, **arguments):
    """Return why a backend refuses, after checking the message of `attention`, or None."""
    reason = BACKENDS[backend][0](Call(q, k, v, **arguments))
    if reason is not None:
        assert re.fullmatch(r"\S.{12,}[^\s.]", reason), reason
        sentence = f"backend={backend!r} does not support this call: {reason}. Use backend='auto'."
        with pytest.raises(BackendUnavailable, match=re.escape(sentence)):
            attention(q, k, v, backend=backend, **arguments)
    return reason


def agrees(actual, expected, leaves, exact, limits):
    """Compare an output and its gradients with those in float64."""
    forward, backward = limits[actual.dtype]
    assert relative(actual, expected) <= forward
    cotangent = torch.randn(actual.shape).to(actual.dtype)
    ours = torch.autograd.grad(actual, leaves, cotangent, allow_unused=True)
    theirs = torch.autograd.grad(expected, exact, cotangent.double(), allow_unused=True)
    for i, (mine, other, of) in enumerate(zip(ours, theirs, leaves, strict=True)):
        if mine is None or other is None:  # a parameter of another block
            assert mine is other, i
            continue
        assert mine.dtype == of.dtype
        assert relative(mine, other) <= backward, i


def agrees_or_refuses(case, backend, dtype, pos, b=2, limits=EXACT):
    """Return why the backend refused, or None after it agreed with the definition."""
    q, k, v = leaves = tensors(b, pos.tokens, dtype=dtype)
    reason = unsupported(backend, q, k, v, bias=case.bias)
    if reason is None:
        leaves = [*leaves, *case.params]
        exact = doubles(leaves)
        dense = case.dense(exact[3:], exact[0], exact[1], WIDTH**-0.5)
        result = attention(q, k, v, bias=case.bias, backend=backend)
        assert result.dtype == dtype
        agrees(result, oracle.attend(*exact[:3], bias=dense), leaves, exact, limits)
    return reason


def derived_agrees_or_refuses(spec, backends, limits):
    """Return why backends refused the terms of an encoding, after the others agreed with the reference in float64."""
    encoding, wide, pos, layer, x = derived(spec)
    leaves, refusals = tensors(2, pos.tokens), {}
    exact = [*doubles(leaves), *(p for p in wide.parameters() if p.requires_grad)]
    for backend in backends:
        arguments = terms(encoding, pos, layer, x)
        reason = unsupported(backend, *leaves, **arguments)
        if reason is not None:
            refusals[backend] = reason
            continue
        expected = attention(*exact[:3], **terms(wide, pos, layer, x.double()), backend="reference")
        actual = attention(*leaves, **arguments, backend=backend)
        learned = [p for p in encoding.parameters() if p.requires_grad]
        agrees(actual, expected, [*leaves, *learned], exact, limits.get(backend, ROUNDED))
    return refusals
