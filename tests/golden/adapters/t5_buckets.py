"""Golden cases of T5: buckets of relative positions, and the bias read from a table."""

import torch

import vispe
from vispe.encodings.bias.offsets.t5 import relative_buckets


def run(case):
    rel, causal = case.input("rel"), not case.config("bidirectional")
    count, far = case.config("num_buckets"), case.config("max_distance")
    yield "buckets", {"bucket": relative_buckets(rel, count, far, causal)}
    if "table" in case.params:
        for axes in (1,) if causal else (1, 2, 3):
            yield f"{axes}D", _bias(case, rel, axes, causal, count, far)


def _bias(case, rel, axes, causal, count, far):
    queries, keys = -rel[:, 0], rel[0] - rel[0, 0]
    case.agree("the relative positions", keys[None] - queries[:, None], rel)
    heads = case.config("heads")
    encoding = vispe.create_encoding(
        "t5", num_heads=heads, axes=axes, num_buckets=count, max_distance=far, causal=causal
    ).double()
    with torch.no_grad():  # the last axis is the line; on others all tokens are level
        encoding.table.zero_()[-1] = case.param("table")
    positions = [torch.cat([torch.zeros(len(t), axes - 1), t[:, None].float()], 1) for t in (queries, keys)]
    requested, read = (vispe.Positions(p) for p in positions)
    dense = encoding.bias(requested, 0).dense(requested, read)[0]
    case.backward(cotangent=dense)
    result = {"bias": dense, "grad.table": None if encoding.table.grad is None else encoding.table.grad[-1]}
    return {name: value for name, value in result.items() if name in case.output_names}
