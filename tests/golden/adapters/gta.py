"""Golden cases of GTA: transformed queries, keys and values, and attention with gradients.

Coordinates of the cases are given, x before y and falling as in the reference; ours are y before x.
"""

import math

import torch

import vispe
from vispe.encodings.parts.rotary.gta_representations import circle


def run(case):
    case.ignore("seed", "how the case was made")
    batch, heads, tokens, width = case.input("q").shape
    dims, freqs = case.config("f_dims"), case.config("so2_freqs", 0)
    coord = case.input("coord") if "coord" in case.inputs else torch.zeros(batch, tokens, 2)
    size = coord.shape[-1]
    if tokens != case.config("views", 1) * math.prod(case.config("grid_hw")) or sum(dims.values()) != width:
        raise ValueError("the tokens or channels of the case do not add up")
    if case.config("scale", None) != "C^-0.5" and not case.usual_scale(width):
        raise ValueError(f"unknown scale {case.config('scale')}")
    if dims.get("so2", 0) != 2 * size * freqs and dims.get("so2", 0):
        raise ValueError("the so2 channels do not fit the number of frequencies")
    options = {name: dims.get(name, 0) for name in ("se3", "so3", "so2", "t2")}
    turns = {
        "axes": size,
        "max_freq": case.config("max_freqs", [1.0] * size)[::-1],
        "share_freqs": case.config("shared_freqs", False),
        "normalize": "none",
    }
    encoding = vispe.create_encoding(
        "gta", dim=heads * width, num_heads=heads, **options, values=case.config("v_transform", True), **turns
    )
    start = torch.tensor([case.config("trans_coeff", 0.01)])
    start = case.param("trans_coeff") if "trans_coeff" in case.params else start
    if options["se3"]:
        encoding.load_state_dict({"scale": start.reshape(1)})
        encoding.double()
    circles = encoding
    if not options["so2"] and freqs:  # the circles of a case may be listed without channels that use them
        circles = vispe.create_encoding("gta", dim=2 * size * freqs, num_heads=1, **turns)
    attrs = {"extrinsic": case.input("extrinsic").double()} if "extrinsic" in case.inputs else {}
    pos = encoding.prepare(vispe.Positions(coord.double().flip(-1), attrs=attrs))
    for backend in ("reference", "sdpa"):
        result = _run(case, encoding, pos, backend)
        result["so2_mats"] = circle(circles.angles(pos))
        yield backend, {name: value for name, value in result.items() if name in case.output_names}


def _run(case, encoding, pos, backend):
    encoding.zero_grad()
    q, k, v = (case.input(name).double().requires_grad_() for name in "qkv")
    transform = encoding.transform(pos, 0)
    y = vispe.attention(q, k, v, transform=transform, backend=backend)
    has_grad = case.backward(cotangent=y)
    eye = torch.eye(k.shape[2], dtype=k.dtype).expand(*k.shape[:2], -1, -1)
    result = {
        "q_t": transform.query(q),
        "k_t": transform.key(k),
        "v_t": transform.value(v),
        "attn": vispe.attention(transform.query(q), transform.key(k), eye, backend=backend),
        "y": y,
        "grad.q": q.grad,
        "grad.k": k.grad,
        "grad.v": v.grad,
    }
    if encoding.se3 and has_grad:
        result["grad.trans_coeff"] = encoding.scale.grad.reshape(case.outputs["grad.trans_coeff"].shape)
    return result
