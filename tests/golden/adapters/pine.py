"""Golden cases of PINE: ids of segments that end together, and the output of one layer."""

import torch
from torch.nn import functional as F

from vispe.attention import attention
from vispe.encodings.parts.rotary.pairwise.pine import PineScores
from vispe.grid.frequencies import inverse_frequencies
from vispe.multimodal import Parallel, Stream, Text, create_scheme


def run(case):
    heads, kv_heads, width = (case.config(key) for key in ("heads", "kv_heads", "head_dim"))
    stream = stream_of(case)
    actual = create_scheme("rope1d").coordinates(stream)
    rates = inverse_frequencies(width, case.config("base"), torch.float64)[None, None]
    x = case.input("x")
    q, k, v = (
        F.linear(x, case.param(name)).unflatten(-1, (count, width)).transpose(1, 2)
        for name, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads))
    )
    out, mask = case.param("o_proj"), stream.attention_mask()
    at, member = actual.ids.movedim(0, -1), stream.scatter(stream.blocks.parallel[stream.block].T, -1)[:2]
    ends = (actual.extent, None, case.config("layout"))
    for backend in ("reference", "sdpa"):
        bias = PineScores(at, at, rates, member, member, *ends)
        y = attention(q, k, v, bias=bias, attn_mask=mask, enable_gqa=heads != kv_heads, backend=backend)
        yield (
            backend,
            {"positions": actual.ids[0, 0].long(), "y": F.linear(y.transpose(1, 2).flatten(2), out)},
        )
    last = case.config("suffix")
    if last:  # the suffix after a cache
        bias = PineScores(at[:, -last:], at, rates, member[..., -last:], member, *ends)
        y = attention(
            q[:, :, -last:], k, v, bias=bias, attn_mask=mask[:, :, -last:], enable_gqa=heads != kv_heads
        )
        y = F.linear(y.transpose(1, 2).flatten(2), out)
        expected = torch.from_numpy(case.outputs["y"])[:, -last:]
        case.agree("decoded outputs", y, expected)


def stream_of(case):
    prefix, suffix = case.config("prefix"), case.config("suffix")
    segments = Parallel([Text(n) for n in case.config("segments")], see="all", align="end")
    return Stream.of([[*([Text(prefix)] if prefix else []), segments, *([Text(suffix)] if suffix else [])]])
