"""Golden cases of Cable: a causal attention layer with content-dependent step costs."""

import torch

import vispe
from vispe import attention

NAMES = {"qkv_w": "qkv.weight", "qkv_b": "qkv.bias", "proj_w": "proj.weight", "proj_b": "proj.bias"}
NAMES |= {"gate_w": "pos_enc.gate.weight", "gate_b": "pos_enc.gate.bias"}


def _scale(case, width):
    """Return the factor of the logits: a number, the name of the default, or None."""
    scale = case.config("qk_scale", None)
    if scale is None or (isinstance(scale, str) and scale.startswith("none")):
        return 1.0
    return float(scale) if not isinstance(scale, str) else width**-0.5


def run(case):
    batch, length, dim, heads = (case.config(name) for name in ("B", "T", "C", "H"))
    if tuple(case.input("x").shape) != (batch, length, dim):
        raise ValueError("the tokens are not those that the case says")
    scale = _scale(case, dim // heads)
    for backend in ("reference", "sdpa"):
        layer = vispe.Attention(dim, heads, {"name": "cable", "causal": True})
        layer.load_state_dict({NAMES[name]: case.param(name) for name in case.params})
        layer.double()
        x = case.input("x").double().requires_grad_()
        bias = layer.pos_enc.bias(vispe.Grid((length,)).positions(), 0, x)
        q, k, v = layer.qkv(x).unflatten(-1, (3, heads, -1)).permute(2, 0, 3, 1, 4)
        mask = torch.ones(length, length, dtype=torch.bool).tril()
        y = attention(q, k, v, bias=bias, attn_mask=mask, scale=scale, backend=backend)
        y = layer.proj(y.transpose(1, 2).flatten(2))
        case.backward(cotangent=y)
        result = {"y": y, "bias": bias.dense(), "grad.x": x.grad}
        result |= {f"grad.{name}": layer.get_parameter(NAMES[name]).grad for name in case.params}
        yield backend, {name: value for name, value in result.items() if name in case.output_names}
