"""Golden cases of 1D ALiBi: the original slopes, and the two-sided bias of free positions."""

import torch

import vispe


def run(case):
    if "pos_q" in case.inputs:
        yield "bias", {"bias": _bias(case)}
        return
    counts = case.input("num_heads").tolist()
    if sorted(counts) != sorted(case.config("num_heads")):
        raise ValueError("the head counts of input and config differ")
    slopes = {}
    for heads in counts:
        encoding = vispe.create_encoding("alibi", num_heads=heads)
        slopes[f"slopes_h{heads}"] = torch.tensor(encoding.head_slopes())
    yield "slopes", slopes


def _bias(case):
    active, total = case.config("heads"), case.config("total_heads")
    encoding = vispe.create_encoding("alibi", num_heads=total, slopes="learned", biased_heads=active)
    slopes = case.param("slopes").flatten()
    encoding.load_state_dict({"slope": slopes[:active]})
    if slopes[active:].any():
        raise ValueError("heads without a bias have slopes")
    queries, keys = (vispe.Positions(case.input(name)[:, None]) for name in ("pos_q", "pos_k"))
    return encoding.bias(queries, layer=0).dense(queries, keys)[0]
