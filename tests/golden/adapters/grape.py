"""Golden cases of GRAPE: rotations, gated biases, and the layer with path sums."""

import torch
from torch import nn

import vispe
from vispe.encodings.parts.rotary.grape_rank2 import rotate_rank2


def run(case):
    for name in ("seed", "learnable"):
        case.ignore(name, "all values are given")
    if not any(kind in name for name in case.params for kind in ("u", "v")):
        case.ignore("l2_norm", "there are no gates")
    if "log_freq" in case.params:
        yield from _commuting(case)
    elif "a" in case.inputs:
        yield from _rank2(case)
    elif "k" in case.inputs:
        yield from _gated(case)
    else:
        yield from _path(case)


def _commuting(case):
    heads, width, length = case.config("heads"), case.config("head_dim"), case.config("seq")
    encoding = vispe.create_encoding(
        "grape",
        dim=heads * width,
        num_heads=heads,
        base=case.config("base"),
        scale=case.config("log_freq_scale"),
        shared=case.config("share_across_heads"),
    )
    start = encoding.log_freq.detach().clone()
    with torch.no_grad():
        encoding.log_freq.copy_(case.param("log_freq"))
    q, k = (case.input(n).requires_grad_() for n in ("q", "k"))
    transform = encoding.transform(vispe.Grid((length,)).positions(), 0)
    q_rot = transform.query(q.transpose(1, 2)).transpose(1, 2)
    k_rot = transform.key(k.transpose(1, 2)).transpose(1, 2)
    case.backward(cotangent_q=q_rot, cotangent_k=k_rot)
    result = {"log_freq_init": start, "q_rot": q_rot, "k_rot": k_rot}
    result |= {"grad.q": q.grad, "grad.k": k.grad, "grad.log_freq": encoding.log_freq.grad}
    yield "transform", {name: value for name, value in result.items() if name in case.output_names}


def _rank2(case):
    a, b, x, positions = (case.input(n) for n in ("a", "b", "x", "positions"))
    omega, dim = case.config("omega"), case.config("dim")
    encoding = vispe.create_encoding("grape", dim=dim, num_heads=1, planes="rank2").double()
    encoding.load_state_dict({"a": omega * a[None], "b": b[None]})
    transform = encoding.transform(vispe.Positions(positions[None, :, None]), 0)
    y = transform.query(x[None, None])[0, 0]
    yield "transform", {"rotation": transform.q[0, 0, :, 0], "y": y}
    yield "in place", {"y": rotate_rank2(x, a, b, positions * omega)}


def _gated(case):
    heads, width = case.config("heads"), case.config("head_dim")
    q, k = (case.input(n).requires_grad_() for n in ("q", "k"))
    rotated = {"q": q.transpose(1, 2), "k": k.transpose(1, 2)}
    pos = vispe.Grid((case.config("seq"),)).positions()
    result, encodings = {}, {}
    kinds = {
        "alibi": ("none", None),
        "key": ("key", "key"),
        "query": ("query", "query"),
        "querykey": ("query_key", "qk"),
    }
    for output, (gates, group) in kinds.items():
        if f"bias_{output}" not in case.output_names:
            continue
        options = {} if gates == "none" else {"l2_norm": case.config("l2_norm", True)}
        encodings[output] = vispe.create_encoding(
            "grape_alibi", dim=heads * width, num_heads=heads, gates=gates, causal=True, **options
        )
        names = [n.partition(".")[2] for n in case.params if group and n.startswith(f"{group}.")]
        encodings[output].load_state_dict({n: case.param(f"{group}.{n}") for n in names})
        result[f"bias_{output}"] = encodings[output].bias(pos, 0).dense(**rotated)
        if case.backward(**{f"cotangent_{output}": result[f"bias_{output}"]}):
            for n in names:
                result[f"grad.{group}.{n}"] = getattr(encodings[output], n).grad
    result |= {"grad.q": q.grad, "grad.k": k.grad, "slopes": next(iter(encodings.values())).head_slopes()}
    yield "dense", {name: value for name, value in result.items() if name in case.output_names}


def _path(case):
    heads, width, length = case.config("heads"), case.config("head_dim"), case.config("seq")
    eps = case.config("qk_rmsnorm_eps")
    spec = {"name": "grape_path", "p_dim": case.config("p_head_dim"), "base": case.config("rope_base_for_p")}
    names = {"q_proj": "c_q", "k_proj": "c_k", "v_proj": "c_v", "proj": "c_proj", "pos_enc.c_p": "c_p"}
    names |= {"q_norm": "q_rms", "k_norm": "k_rms"}
    for backend in ("reference", "sdpa"):
        layer = vispe.Attention(
            case.input("x").shape[-1],
            heads,
            spec,
            head_dim=width,
            fused_qkv=False,
            qkv_bias=False,
            qk_norm=lambda d: nn.RMSNorm(d, eps=eps),
            backend=backend,
        )
        state = {f"{mine}.weight": case.param(f"{theirs}.weight") for mine, theirs in names.items()}
        layer.load_state_dict({**state, "proj.bias": torch.zeros_like(layer.proj.bias)})
        layer.double()
        x = case.input("x").double().requires_grad_()
        grid = vispe.Grid((length,))
        y = layer(x, grid, attn_mask=torch.ones(length, length, dtype=torch.bool).tril())
        case.backward(cotangent=y)
        result = {"y": y, "grad.x": x.grad}
        result["bias_lower"] = layer.pos_enc.bias(grid.positions(), 0, x).dense()
        for mine, theirs in names.items():
            result[f"grad.{theirs}.weight"] = layer.get_parameter(f"{mine}.weight").grad
        yield backend, {name: value for name, value in result.items() if name in case.output_names}
