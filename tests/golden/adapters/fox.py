"""Golden cases of FoX: the bias of forget gates along a sequence, causal and to both sides."""

import torch

import vispe


def run(case):
    heads, dim, causal = case.config("heads"), case.config("dim"), case.config("causal")
    names = {"gate.weight": "w", "gate.bias": "b"}
    encoding = vispe.create_encoding(
        "fox",
        dim=dim,
        num_heads=heads,
        causal=causal,
        shared=causal,
        gate_bias=case.config("bias_init"),
        scale=case.config("post_log_scale"),
    )
    x = case.input("x")
    if tuple(x.shape[:2]) != (case.config("B"), case.config("N")):
        raise ValueError("the tokens are not as many as the case says")
    for dtype in (torch.float32, torch.float64):
        encoding.load_state_dict({mine: case.param(theirs) for mine, theirs in names.items()})
        encoding.to(dtype).zero_grad()
        x = case.input("x").to(dtype).requires_grad_()
        bias = encoding.bias(vispe.Grid((x.shape[1],)).positions(), 0, x).dense()
        case.backward(cotangent=bias)
        result = {"bias": bias, "grad.x": x.grad}
        result |= {f"grad.{theirs}": encoding.get_parameter(mine).grad for mine, theirs in names.items()}
        yield str(dtype), {name: value for name, value in result.items() if name in case.output_names}
