"""Golden cases of DeBERTa's disentangled attention, with separate and with shared projections of relative positions."""

import torch

import vispe
from vispe.encodings.multi_softmax import calls_of, weights_of

NAMES = {"query_proj": "q_proj", "key_proj": "k_proj", "value_proj": "v_proj"}


def run(case):
    for backend in ("reference", "sdpa"):
        yield backend, _run(case, backend, (case.config("N"),))
    yield "row of a grid", _run(case, "reference", (1, case.config("N")))
    yield "column of a grid", _run(case, "reference", (case.config("N"), 1))


def _spec(case, axes):
    buckets, most = case.config("position_buckets"), case.config("max_relative_positions")
    terms = [t for t in ("p2c", "c2p") if t in case.config("pos_att_type")]
    if most < 1:
        most = case.config("max_position_embeddings")
    return {
        "name": "deberta",
        "terms": "both" if len(terms) == 2 else terms[0],
        "share_att_key": case.config("share_att_key"),
        "position_buckets": buckets if buckets > 0 else None,
        "max_relative_positions": most,
        "rescale": True,
        "axes": axes,
    }


def _run(case, backend, shape):
    heads, width = case.config("heads"), case.config("head_dim")
    dim = case.input("x").shape[-1]
    if case.config("dim", dim) != dim:
        raise ValueError(f"tokens of {dim} channels")
    layer = vispe.Attention(
        dim,
        heads,
        _spec(case, len(shape)),
        fused_qkv=False,
        qkv_bias="query_proj.bias" in case.params,
        proj=False,
        head_dim=width,
        backend=backend,
    ).double()
    encoding = layer.pos_enc
    if encoding.share_att_key:
        encoding.tie(layer)
    # on two axes the embeddings of the one along which there is one patch are 0
    start = 2 * encoding.span * (len(shape) == 2 and shape[0] == 1)
    line = slice(start, start + 2 * encoding.span)
    mine = {name: _own(name) for name in case.params}
    if len(mine) != len(list(layer.parameters())):
        raise ValueError("the case does not have the parameters of its options")
    with torch.no_grad():
        encoding.rel_embeddings.zero_()
        for name, parameter in mine.items():
            target = layer.get_parameter(parameter)
            (target[line] if name == "rel_embeddings" else target).copy_(case.param(name))
    x, grid = case.input("x").double().requires_grad_(), vispe.Grid(shape)
    if x.shape != (case.config("B"), grid.tokens, dim):
        raise ValueError(f"tokens of shape {tuple(x.shape)}")
    y = layer(x, grid)
    q, k, v = (
        p(x).unflatten(-1, (heads, -1)).transpose(1, 2) for p in (layer.q_proj, layer.k_proj, layer.v_proj)
    )
    positions = torch.arange(grid.tokens)
    result = {"y": y, "weights": weights_of(calls_of(q, k, v, encoding.parts(), grid.positions(), 0, x))}
    result["relative_pos"] = encoding.buckets(positions[:, None] - positions)
    if case.backward(cotangent=y):
        result["grad.x"] = x.grad
        for name, parameter in mine.items():
            grad = layer.get_parameter(parameter).grad
            result[f"grad.{name}"] = grad[line] if name == "rel_embeddings" else grad
    return {name: value for name, value in result.items() if name in case.output_names}


def _own(name):
    layer, _, kind = name.partition(".")
    return f"{NAMES[layer]}.{kind}" if layer in NAMES else f"pos_enc.{name}"
