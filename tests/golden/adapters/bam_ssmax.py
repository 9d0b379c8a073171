"""Golden cases of BAM with scalable softmax: whole attention layers, the factor in one encoding or in a sum."""

import torch

import vispe
from tests.golden.adapters._line import line

PROJECTIONS = {"wq": "q_proj", "wk": "k_proj", "wv": "v_proj", "wo": "proj"}


def run(case):
    heads, scaled, eps = case.config("heads"), case.config("ssmax_prior"), case.config("eps")
    if case.config("kv_heads") not in (None, heads):
        raise ValueError("fewer key heads than query heads are not of vispe.Attention")
    causal = case.config("causal")
    prior = {"axes": 1, "train_loc": True, "eps": eps}
    one = {"name": "bam_ssmax", "scale_prior": scaled, "causal": causal, **prior}
    for backend in ("reference", "sdpa"):
        yield backend, _layer(case, one, backend, causal)
    if not scaled:
        two = [{"name": "ssmax", "causal": causal}, {"name": "bam", **prior}]
        yield "ssmax+bam", _layer(case, two, "sdpa", causal)


def _layer(case, spec, backend, causal):
    dim, heads, length = case.config("dim"), case.config("heads"), case.config("seq_len")
    layer = vispe.Attention(dim, heads, spec, fused_qkv=False, qkv_bias=False, backend=backend)
    layer.proj.bias = None
    encodings = {n: e for part in layer.pos_enc.parts() for n, e in part.named_parameters()}
    names = {"seq_scale": "seq_scale", **{f"prior.{n}": n for n in ("shape", "scale", "loc")}}
    with torch.no_grad():
        for theirs, mine in names.items():
            encodings[mine].copy_(case.param(theirs).reshape(encodings[mine].shape))
        for theirs, mine in PROJECTIONS.items():
            layer.get_submodule(mine).weight.copy_(case.param(f"{theirs}.weight"))
    layer.double()
    x = case.input("x").double().requires_grad_()
    mask = torch.ones(length, length, dtype=torch.bool).tril() if causal else None
    y = layer(x, line(length), attn_mask=mask)
    case.backward(cotangent=y)
    result = {"y": y, "grad.x": x.grad}
    encodings = {n: e for part in layer.pos_enc.parts() for n, e in part.named_parameters()}
    for theirs, mine in names.items():
        grad = encodings[mine].grad
        result[f"grad.{theirs}"] = None if grad is None else grad.reshape(1, heads, 1, 1)
    for theirs, mine in PROJECTIONS.items():
        result[f"grad.{theirs}.weight"] = layer.get_submodule(mine).weight.grad
    return {name: value for name, value in result.items() if name in case.output_names}
