"""Golden cases of ConViT's gated positional self-attention: whole layers, fused and in two steps, with gradients."""

import torch

import vispe
from vispe.encodings.multi_softmax import calls_of, weights_of


def run(case):
    dim, heads, strength = case.config("dim"), case.config("heads"), case.config("locality_strength")
    grid = vispe.Grid(case.config("grid"))
    local = case.config("local_init")
    spec = {"name": "gpsa", "local_init": local} | ({"locality_strength": strength} if local else {})
    if len(case.input("x")) != case.config("B"):
        raise ValueError("the batch is not as the case says")
    has_bias = "qk.bias" in case.params
    for backend in ("reference", "sdpa", "auto"):
        layer = vispe.Attention(dim, heads, spec, fused_qkv=False, qkv_bias=has_bias, backend=backend)
        layer.load_state_dict(_ours(case))
        layer.double()
        x = case.input("x").double().requires_grad_()
        y = layer(x, grid)
        case.backward(cotangent=y)
        result = {"y": y, "grad.x": x.grad, "weights": _weights(layer, x, grid)}
        result |= {f"grad.{name}": value for name, value in _theirs(layer).items()}
        yield backend, {name: value for name, value in result.items() if name in case.output_names}


def _ours(case):
    """Return the weights of a case with the names of the layer."""
    state = {}
    for name in case.params:
        value = case.param(name)
        if name.startswith("qk."):
            kind = name.removeprefix("qk.")
            state[f"q_proj.{kind}"], state[f"k_proj.{kind}"] = value.chunk(2)
        elif name.startswith("v."):
            state[f"v_proj.{name.removeprefix('v.')}"] = value
        elif name.startswith("proj."):
            state[name] = value
        else:
            state[f"pos_enc.{name}"] = value
    return state


def _theirs(layer):
    """Return the gradients of a layer with the names of the case."""
    inputs = [(name, p.grad) for name, p in layer.named_parameters() if p.grad is not None]
    grads = {name.removeprefix("pos_enc."): grad for name, grad in inputs}
    for kind in ("weight", "bias"):
        if f"q_proj.{kind}" in grads:
            grads[f"qk.{kind}"] = torch.cat([grads.pop(f"{letter}_proj.{kind}") for letter in "qk"])
            grads[f"v.{kind}"] = grads.pop(f"v_proj.{kind}")
    return grads


def _weights(layer, x, grid):
    q, k, v = (
        getattr(layer, f"{letter}_proj")(x).unflatten(-1, (layer.num_heads, -1)).transpose(1, 2)
        for letter in "qkv"
    )
    return weights_of(calls_of(q, k, v, layer.pos_enc.parts(), grid.positions(), 0, x))
