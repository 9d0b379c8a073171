"""Golden cases of Extended Mind: memories that join the softmax of a rotary layer, and their bias under ALiBi."""

import torch
from torch.nn import functional as F

from vispe.attention.call import Call
from vispe.attention.transform.pairs import PairRotation
from vispe.encodings.parts.bias.slopes import fixed_slopes
from vispe.experimental.extended_mind import ExternalMemory, attend_with_external_memory, external_memory_bias
from vispe.grid.frequencies import inverse_frequencies


def run(case):
    if case.config("host") == "alibi":
        yield from _alibi(case)
        return
    heads, kv_heads, width = (case.config(key) for key in ("heads", "kv_heads", "head_dim"))
    x = case.input("x")
    q, k, v = (
        F.linear(x, case.param(name)).unflatten(-1, (count, width)).transpose(1, 2)
        for name, count in (("q_proj", heads), ("k_proj", kv_heads), ("v_proj", kv_heads))
    )
    rates = inverse_frequencies(width, case.config("base"), torch.float64)
    angle = (torch.arange(x.shape[1])[:, None] * rates)[None, None]
    rotary = PairRotation(angle.cos(), angle.sin(), case.config("layout"))
    call = Call(q, k, v, transform=rotary, is_causal=True, enable_gqa=heads != kv_heads)
    memories = ExternalMemory(case.input("memory_k"), case.input("memory_v"))
    y = attend_with_external_memory(
        call, memories, topk=case.config("topk"), threshold=case.config("threshold"), mode="reference"
    )
    yield "reference", {"y": F.linear(y.transpose(1, 2).flatten(2), case.param("o_proj"))}


def _alibi(case):
    heads, result = case.config("heads"), case.config("queries") * case.config("topk")
    bias = external_memory_bias(torch.tensor(fixed_slopes("alibi", heads)), case.config("length"))
    yield "bias", {"bias": bias.expand(heads, 1, result)}
