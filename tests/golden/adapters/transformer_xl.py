"""Golden cases of the relative attention of Transformer-XL and XLNet, for explicit queries, keys and values."""

import vispe
from vispe.encodings.attention_layer import attend
from vispe.encodings.multi_softmax import calls_of, weights_of


def run(case):
    tokens, clamp = case.config("N"), case.config("clamp_len")
    grid = vispe.Grid((tokens,)).positions()
    routes = [("grid, reference", grid, "reference"), ("grid, sdpa", grid, "sdpa")]
    if clamp <= 0:  # coordinates without a grid
        routes.append(("free coordinates", vispe.Positions(grid.coords), "reference"))
    for route, pos, backend in routes:
        yield route, _run(case, pos, backend, clamp)


def _run(case, pos, backend, clamp):
    heads, width, dim = case.config("heads"), case.config("head_dim"), case.config("dim")
    if not case.usual_scale(width):
        raise ValueError(f"unknown scale {case.config('scale')}")
    options = {"clamp_len": clamp} if clamp > 0 else {}
    encoding = vispe.create_encoding(
        "transformer_xl", dim=dim, num_heads=heads, head_dim=width, **options
    ).double()
    encoding.load_state_dict({name: case.param(name) for name in case.params})
    q, k, v = (case.input(name).double().requires_grad_() for name in "qkv")
    if q.shape != (case.config("B"), heads, pos.tokens, width):
        raise ValueError(f"queries of shape {tuple(q.shape)}")
    y = attend(q, k, v, encoding.parts(), pos, 0, backend=backend)
    result = {"y": y, "weights": weights_of(calls_of(q, k, v, encoding.parts(), pos, 0))}
    if case.backward(cotangent=y):
        result |= {"grad.q": q.grad, "grad.k": k.grad, "grad.v": v.grad}
        result |= {f"grad.{name}": getattr(encoding, name).grad for name in case.params}
    return {name: value for name, value in result.items() if name in case.output_names}
