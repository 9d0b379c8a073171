"""Golden cases of PaTH: attention and gradients for explicit steps, strengths and gates."""

import vispe
from vispe.encodings.bias.content.path import PathScores


def run(case):
    batch, tokens, width = (case.config(name) for name in ("B", "N", "D"))
    heads, kv_heads = case.config("heads"), case.config("kv_heads")
    if case.input("q").shape != (batch, tokens, heads, width) or case.input("k").shape[2] != kv_heads:
        raise ValueError("the tokens are not those of the configuration")
    names = ["q", "k", "v", "w", "beta"]
    if case.config("gate") != ("g" in case.inputs):
        raise ValueError("the gates are not those of the configuration")
    names += ["g"] * case.config("gate")
    for backend in ("reference", "sdpa"):
        leaves = {name: case.input(name).double().requires_grad_() for name in names}
        q, k, v, w, beta, *g = (x.transpose(1, 2) for x in leaves.values())
        bias = PathScores(vispe.Grid((tokens,)).positions(), w, beta, *g)
        y = vispe.attention(
            q, k, v, bias=bias, scale=case.config("scale"), enable_gqa=True, is_causal=True, backend=backend
        ).transpose(1, 2)
        result = {"y": y}
        if case.backward(cotangent=y):
            result |= {f"grad.{name}": x.grad for name, x in leaves.items()}
        yield backend, {name: value for name, value in result.items() if name in case.output_names}
