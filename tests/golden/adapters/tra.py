"""Golden cases of TRA: a causal attention layer whose logits are unchanged, reduced or removed."""

import torch

import vispe

NAMES = {"toqueries": "q_proj", "tokeys": "k_proj", "tovalues": "v_proj", "c_out": "proj"}
NAMES |= {"delta_proj": "pos_enc.delta_proj"}


def _name(theirs):
    module, _, kind = theirs.partition(".")
    return f"{NAMES[module]}.{kind}"


def run(case):
    if not case.config("causal"):
        raise ValueError("the reference has no form for both sides")
    length, dim, heads = case.config("N"), case.config("dim"), case.config("heads")
    if tuple(case.input("x").shape) != (case.config("B"), length, dim):
        raise ValueError("the tokens are not those that the case says")
    bias = any(name.startswith(("toqueries.b", "tokeys.b", "tovalues.b")) for name in case.params)
    spec = {"name": "tra", "causal": True, "eps": case.config("qk_norm_eps")}
    for backend in ("reference", "sdpa"):
        layer = vispe.Attention(dim, heads, spec, fused_qkv=False, qkv_bias=bias, backend=backend)
        layer.load_state_dict({_name(name): case.param(name) for name in case.params})
        layer.double()
        x = case.input("x").double().requires_grad_()
        y = layer(x, vispe.Grid((length,)), attn_mask=torch.ones(length, length, dtype=torch.bool).tril())
        case.backward(cotangent=y)
        result = {"y": y, "grad.x": x.grad}
        result |= {f"grad.{name}": layer.get_parameter(_name(name)).grad for name in case.params}
        yield backend, {name: value for name, value in result.items() if name in case.output_names}
