"""Golden cases of positional attention: a layer whose weights come from a table of positions."""

import torch

import vispe

NAMES = {"v_proj": "v_proj", "proj": "o_proj", "pos_enc.qk_proj": "qk_proj"}


def run(case):
    dim, heads = case.config("dim"), case.config("heads")
    table, x = case.input("p"), case.input("x")
    if tuple(x.shape) != (case.config("B"), case.config("N"), dim):
        raise ValueError("the tokens are not those of the configuration")
    for shape, backend in (
        ((1, len(table)), "reference"),
        ((len(table), 1), "sdpa"),
        ((1, len(table)), "lowrank"),
    ):
        spec = {
            "name": "positional_attention",
            "table": "learned",
            "pos_dim": case.config("pos_dim"),
            "grid": shape,
        }
        layer = vispe.Attention(dim, heads, spec, fused_qkv=False, backend=backend)
        state = {
            f"{ours}.{n.partition('.')[2]}": case.param(n)
            for n in case.params
            for ours, theirs in NAMES.items()
            if n.startswith(f"{theirs}.")
        }
        unused = {n: p for n, p in layer.state_dict().items() if n.startswith(("q_proj.", "k_proj."))}
        zeros = {f"{n}.bias": torch.zeros_like(layer.get_parameter(f"{n}.bias")) for n in NAMES}
        layer.load_state_dict({**zeros, **unused, **state, "pos_enc.places.weight": table[None]})
        layer.double()
        yield backend, _run(case, layer, vispe.Grid(shape))


def _run(case, layer, grid):
    x = case.input("x").double().requires_grad_()
    y = layer(x, grid)
    result = {"y": y}
    if case.backward(cotangent=y):
        result |= {"grad.x": x.grad, "grad.p": layer.pos_enc.places.weight.grad[0]}
        for ours, theirs in NAMES.items():
            for kind in ("weight", "bias"):
                result[f"grad.{theirs}.{kind}"] = layer.get_parameter(f"{ours}.{kind}").grad
    return {name: value for name, value in result.items() if name in case.output_names}
