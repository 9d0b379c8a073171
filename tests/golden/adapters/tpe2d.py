"""Golden cases of 2D-TPE: a layer whose two branches are mixed by gates."""

import torch

import vispe

NAMES = {"q_proj": "q_proj", "k_proj": "k_proj", "v_proj": "v_proj", "proj": "o_proj"}
NAMES |= {f"pos_enc.gate_{i}": f"gate_{i}" for i in (1, 2, 3)}


def run(case):
    heads, width, shape = case.config("heads"), case.config("head_dim"), tuple(case.config("grid"))
    spec = {
        "name": "tpe2d",
        "gate_dim": case.config("gate_dim"),
        "temperature": case.config("theta"),
        "causal": case.config("causal"),
    }
    x = case.input("x")
    dim = x.shape[-1]
    if x.shape[:2] != (case.config("B"), shape[0] * shape[1]) or case.config("dim", dim) != dim:
        raise ValueError("the tokens are not those of the configuration")
    for backend in ("reference", "sdpa"):
        layer = vispe.Attention(dim, heads, spec, fused_qkv=False, head_dim=width, backend=backend)
        named = {
            f"{ours}.{kind}": f"{theirs}.{kind}"
            for ours, theirs in NAMES.items()
            for kind in ("weight", "bias")
        }
        zeros = {
            name: torch.zeros_like(p) for name, p in layer.state_dict().items() if name.endswith(".bias")
        }
        inputs = {ours: case.param(theirs) for ours, theirs in named.items() if theirs in case.params}
        layer.load_state_dict({**zeros, **inputs})
        layer.double()
        x = case.input("x").double().requires_grad_()
        y = layer(x, vispe.Grid(shape))
        result = {"y": y}
        if case.backward(cotangent=y):
            result["grad.x"] = x.grad
            grads = dict(layer.named_parameters())
            result |= {f"grad.{theirs}": grads[ours].grad for ours, theirs in named.items() if ours in grads}
        yield backend, {name: value for name, value in result.items() if name in case.output_names}
