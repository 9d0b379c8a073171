"""Golden cases of hyperbolic HoPE: attention weights, attention and gradients."""

import torch

import vispe
from vispe.encodings.bias.decay.hope_hyperbolic import MARGIN


def run(case):
    shape = batch, heads, tokens, width = tuple(case.config(name) for name in ("B", "H", "N", "D"))
    if case.input("q").shape != shape or case.input("pos").shape != (batch, tokens):
        raise ValueError("the tokens are not those of the configuration")
    encoding = vispe.create_encoding(
        "hope_hyperbolic", dim=heads * width, num_heads=heads, axes=1, temperature=case.config("theta")
    ).double()
    above = case.param("theta_prime").double().reshape(1) - 1 - MARGIN
    encoding.load_state_dict({"raw": above + (-torch.expm1(-above)).log()})  # softplus, undone
    pos = vispe.Positions(case.input("pos").double()[..., None])
    for backend in ("reference", "sdpa"):
        encoding.zero_grad()
        q, k, v = (case.input(name).double().requires_grad_() for name in "qkv")
        bias = encoding.bias(pos, 0)
        y = vispe.attention(q, k, v, bias=bias, backend=backend)
        result = {"y": y, "log_weights": bias.dense(q=q, k=k).log_softmax(-1)}
        if case.backward(cotangent=y):
            result |= {f"grad.{name}": x.grad for name, x in zip("qkv", (q, k, v), strict=True)}
            # of the decay itself: softplus has the slope of a sigmoid
            slope = encoding.raw.detach().sigmoid()
            result["grad.theta_prime"] = (encoding.raw.grad / slope).reshape(case.param("theta_prime").shape)
        yield backend, {name: value for name, value in result.items() if name in case.output_names}
