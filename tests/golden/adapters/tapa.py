"""Golden cases of TAPA: logits, attention and gradients."""

import math

import vispe


def run(case):
    heads, width, shape = case.config("H"), case.config("D"), tuple(case.config("grid"))
    if case.input("q").shape != (case.config("B"), heads, math.prod(shape), width):
        raise ValueError("the tokens are not those of the configuration")
    encoding = vispe.create_encoding(
        "tapa", dim=heads * width, num_heads=heads, theta=case.config("theta"), alpha=case.config("alpha")
    )
    shapes = (
        {"": shape}
        if len(shape) > 1
        else {"": shape, " in a plane": (1, *shape), " in space": (1, *shape, 1)}
    )
    for backend in ("reference", "sdpa"):
        for suffix, grid in shapes.items():
            pos = vispe.Grid(grid).positions()
            yield backend + suffix, _run(case, encoding.bias(pos, 0), backend)


def _run(case, bias, backend):
    q, k, v = (case.input(name).double().requires_grad_() for name in "qkv")
    causal = case.config("causal")
    y = vispe.attention(q, k, v, bias=bias, is_causal=causal, backend=backend)
    result = {"y": y, "logits": bias.dense(q=q, k=k)}
    if case.backward(cotangent=y):
        result |= {f"grad.{name}": x.grad for name, x in zip("qkv", (q, k, v), strict=True)}
    return {name: value for name, value in result.items() if name in case.output_names}
