"""Golden cases of GRAPE-A with gates of queries and keys: the causal bias."""

import torch

import vispe
from tests.golden.adapters._line import line


def run(case):
    case.ignore("omega_init", "omega is given")
    samples, length, heads, width = (case.config(name) for name in "BTHD")
    free = vispe.Positions(line(length).coords.clone())
    for route, pos in (("1D", line(length)), ("free coordinates", free)):
        encoding = vispe.create_encoding(
            "grape_alibi",
            dim=heads * width,
            num_heads=heads,
            gates="query_key",
            causal=True,
            l2_norm=case.config("l2_norm"),
        )
        case.agree("the slopes", torch.tensor(encoding.head_slopes()), case.param("slopes").flatten().float())
        encoding.load_state_dict({name: case.param(name) for name in ("omega", "u", "v")})
        encoding.double()
        q, k = (case.input(name).double().requires_grad_() for name in ("q", "k"))
        if tuple(q.shape) != (samples, length, heads, width):
            raise ValueError(f"the queries have shape {tuple(q.shape)}")
        dense = encoding.bias(pos, 0).dense(q=q.transpose(1, 2), k=k.transpose(1, 2))
        case.backward(cotangent=dense)
        result = {"bias": dense, "grad.q": q.grad, "grad.k": k.grad}
        result |= {f"grad.{name}": encoding.get_parameter(name).grad for name in ("omega", "u", "v")}
        yield route, {name: value for name, value in result.items() if name in case.output_names}
