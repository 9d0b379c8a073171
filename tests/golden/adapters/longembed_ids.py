"""Golden cases of LongEmbed: ids of longer inputs; near and grouped rotations of SelfExtend, and their scores."""

import torch

import vispe
from tests.golden.adapters._longer import longer
from vispe.attention.transform.pairs import PairRotation
from vispe.encodings.parts.rotary.pairwise.self_extend import SelfExtendScores, self_extend
from vispe.grid.frequencies import inverse_frequencies


def run(case):
    if case.config("mode") != "self_extend":
        yield "places", longer(case)
        return
    case.ignore("combined_by_us", "the rule is that of SelfExtendScores")
    q, k = case.input("q"), case.input("k")
    group, window, layout = case.config("group"), case.config("window"), case.config("layout")
    rates = inverse_frequencies(q.shape[-1], case.config("base"), torch.float64)
    at = torch.arange(q.shape[2])

    def rotate(ids):
        angle = (ids[:, None] * rates)[None, None]
        return PairRotation(angle.cos(), angle.sin(), layout)

    row, column = self_extend(at, group, window)
    result = {"q_near": rotate(at).query(q), "k_near": rotate(at).key(k)}
    result |= {"q_group": rotate(row).query(q), "k_group": rotate(column).key(k)}
    coords = at[None, :, None].double()
    both = SelfExtendScores(coords, coords, rates[None, None], group, window, layout).dense(
        q=q, k=k, scale=1.0
    )
    yield "scores", {**result, "scores": both.tril()}
    heads, tokens, width = q.shape[1:]
    facts = {"dim": heads * width, "num_heads": heads, "temperature": case.config("base"), "layout": layout}
    encoding = vispe.create_encoding("self_extend", group=group, window=window, **facts)
    bias = encoding.bias(vispe.Grid((tokens,)).positions(), 0)
    yield "self_extend", {"scores": bias.dense(q=q, k=k, scale=1.0).tril()}
