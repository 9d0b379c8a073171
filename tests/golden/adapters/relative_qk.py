"""Golden cases of Shaw's vectors of offsets and of Huang's method 4, with the projections of attention around them."""

import torch

import vispe
from vispe.encodings.multi_softmax import calls_of, weights_of

KINDS = {"relative_key": "key", "relative_key_query": "key_query", "relative_key_clamped": "key"}
NAMES = {"query": "q_proj", "key": "k_proj", "value": "v_proj"}
NAMES |= {"linear_q": "q_proj", "linear_k": "k_proj", "linear_v": "v_proj", "linear_out": "proj"}
TABLE = "distance_embedding.weight"


def run(case):
    for backend in ("reference", "sdpa"):
        yield backend, _run(case, backend, None)
    for axis in (0, 1):
        yield f"line of a grid, axis {axis}", _run(case, "reference", axis)


def _spec(case):
    spec = {"name": "shaw", "method": KINDS[case.config("kind")]}
    if case.config("kind") == "relative_key_clamped":
        return spec | {"clip": (case.config("left"), case.config("right")), "index": "key_query"}
    length = case.config("max_position_embeddings")
    return spec | {"clip": (length - 1, length - 1)}


def _run(case, backend, axis):
    heads, tokens = case.config("heads"), case.config("N")
    if not case.usual_scale(case.config("head_dim")):
        raise ValueError(f"unknown scale {case.config('scale')}")
    dim = case.input("x").shape[-1]
    if case.config("dim", dim) != dim:
        raise ValueError(f"tokens of {dim} channels")
    spec = _spec(case) | {"axes": 1 if axis is None else 2}
    shape = (tokens,) if axis is None else (tokens, 1) if axis == 0 else (1, tokens)
    output = any(name.startswith("linear_out") for name in case.params)
    biased = any(_own(name).endswith("q_proj.bias") for name in case.params)
    layer = vispe.Attention(
        dim,
        heads,
        spec,
        fused_qkv=False,
        qkv_bias=biased,
        proj=output,
        head_dim=case.config("head_dim"),
        backend=backend,
    ).double()
    mine = {name: _own(name) for name in case.params}
    table = layer.pos_enc.distance_embedding.weight
    rows = sum(spec["clip"]) + 1
    # on two axes the line through offset 0 of the other one has the rows
    line = slice(None) if axis is None else (torch.arange(rows), spec["clip"][0])[:: 1 - 2 * axis]
    sides = (rows,) if axis is None else (rows, rows)
    with torch.no_grad():
        for name, parameter in mine.items():
            if name == TABLE:
                table.reshape(*sides, -1)[line] = case.param(name).double()
            else:
                layer.get_parameter(parameter).copy_(case.param(name))
    x = case.input("x").double().requires_grad_()
    if x.shape[0] != case.config("B"):
        raise ValueError(f"{x.shape[0]} samples, not {case.config('B')}")
    grid = vispe.Grid(shape)
    y = layer(x, grid)
    has_grad = case.backward(cotangent=y)
    result = {"y": y, "weights": _weights(layer, x, grid)}
    if has_grad:
        result["grad.x"] = x.grad
        for name, parameter in mine.items():
            grad = layer.get_parameter(parameter).grad
            result[f"grad.{name}"] = grad.reshape(*sides, -1)[line] if name == TABLE else grad
    return {name: value for name, value in result.items() if name in case.output_names}


def _own(name):
    layer, _, kind = name.partition(".")
    return f"pos_enc.{name}" if name == TABLE else f"{NAMES[layer]}.{kind}"


def _weights(layer, x, grid):
    q, k, v = (
        p(x).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
        for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    return weights_of(calls_of(q, k, v, layer.pos_enc.parts(), grid.positions(), 0, x))
