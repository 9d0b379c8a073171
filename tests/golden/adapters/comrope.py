"""Golden cases of ComRoPE and its baselines: token positions, and attention layers with gradients.

Layers run in float32, as the reference did: an exponential has nearly the same rounding in every float32
implementation, and float64 would be five times as far away. The commuting kinds run a second time in the folded form,
without exponentials.
"""

import copy
import math

import torch
from timm.models import VisionTransformer

import vispe
from vispe.encodings.parts.rotary.skew_symmetric import skew_matrix, skew_upper
from vispe.hosts.common.context import Context

NAMES = {
    "comrope-ap": "comrope_ap",
    "comrope-ld": "comrope_ld",
    "liere": "liere",
    "vanilla-rope": "comrope_ap.rope",
}


def run(case):
    if "positions" in case.output_names:
        yield "places", {"positions": _positions(case)}
    else:
        yield from _attention(case)


def _positions(case):
    axes, prefix = case.config("num_axes"), int(case.config("prepend_cls", True))
    side = case.config("image_size") // case.config("patch_size")
    frames = case.config("num_frames", 16)
    grid = vispe.Grid((frames, side, side)[3 - axes :], prefix=prefix)
    encoding = vispe.create_encoding(
        "comrope_ld",
        dim=16,
        num_heads=1,
        axes=axes,
        normalize="common" if case.config("axis_scale", True) else "none",
        cls_position=case.config("cls_position", 0.5),
        jitter=case.config("perturbation_intensity", 0.0),
        jitter_offset=case.config("offset_intensity", 0.0),
    )
    noise = case.input("noise")
    draws = {
        "comrope_jitter": torch.cat([noise.new_zeros(prefix, axes), noise])[None],
        "comrope_offset": case.input("offset_noise"),
    }
    return encoding.coordinates(encoding.prepare(grid.positions(), draws=draws))[0]


def _spec(case):
    kind, base = case.config("kind"), case.config("theta_base", None)
    options = {
        "axes": case.config("num_axes"),
        "block": case.config("block_size"),
        "normalize": "none",
        "init_std": case.config("init_std", 1.0),
    }
    if kind == "liere":
        options["scale_factor"] = case.config("scale_factor", 1.0)
        options["init"] = "normal"
    else:
        case.ignore("scale_factor", "only LieRE divides its generators")
    if kind == "vanilla-rope":
        options.update(init_std=1.0, base=base)
    return vispe.encodings.registry.parse_spec({"name": NAMES[kind], **options})[0]


def _own(case, heads):
    """Return the encoding's parameters from the reference's."""
    if "exponent_matrix" in case.params:
        return {"skew": skew_upper(case.param("exponent_matrix").sum(1, keepdim=True)) / 2}
    freqs = case.param("freqs")
    encoding_params = {"skew": skew_upper(freqs)}
    if "multiplier" in case.params:
        encoding_params["theta"] = case.param("multiplier")[0, :, :, 0, 0]
    return encoding_params


def _attention(case):
    for key in ("seed", "transformers"):
        case.ignore(key, "how the case was made")
    dim, heads = case.config("hidden"), case.config("heads")
    usual = math.isclose(case.config("q_scale", (dim // heads) ** -0.5), (dim // heads) ** -0.5, rel_tol=1e-6)
    if dim // heads != case.config("head_dim") or not usual:
        raise ValueError("the head width or the scale is not the usual one")
    tokens = int(torch.tensor(case.config("grid")).prod()) + int(case.config("class_token"))
    if tokens != case.input("positions").shape[1]:
        raise ValueError("the grid does not have as many tokens as there are positions")
    spec, encoding_params = _spec(case), _own(case, heads)
    names = {"out_proj": "proj"}
    weights = {}
    for name in case.params - {"freqs", "multiplier", "exponent_matrix"}:
        module, _, kind = name.partition(".")
        weights[f"{names.get(module, module)}.{kind}"] = case.param(name)
    bias = "q_proj.bias" in weights
    fixed = vispe.create_encoding(spec, dim=dim, num_heads=heads)
    if "exponent_matrix" in case.params:  # the start of axial RoPE has to be that of the reference
        case.agree("the generators of axial RoPE", fixed.skew, encoding_params["skew"])
    for backend in ("reference", "sdpa"):
        layer = vispe.Attention(dim, heads, spec, fused_qkv=False, qkv_bias=bias, backend=backend)
        layer.load_state_dict({**weights, **{f"pos_enc.{k}": v for k, v in encoding_params.items()}})
        yield (
            backend,
            _run(case, layer, layer.pos_enc, [layer.q_proj, layer.k_proj], layer),
        )
    if spec["name"] != "liere":
        yield "folded", _run_folded(case, layer)
    yield "timm", _run_timm(case, spec, weights, encoding_params, bias)


def _run(case, layer, encoding, projections, forward, reference=True):
    layer.zero_grad()
    heads, width = case.config("heads"), case.config("head_dim")
    x = case.input("x").float().requires_grad_()
    positions = case.input("positions").float().requires_grad_()
    pos = vispe.Positions(positions)
    y = forward(x, pos)
    has_grad = case.backward(cotangent=y)
    transform = encoding.transform(pos, 0)
    q, k = (p(x).unflatten(-1, (heads, width)).transpose(1, 2) for p in projections)
    q, k = transform.query(q) * case.config("q_scale"), transform.key(k)
    eye = torch.eye(x.shape[1], dtype=x.dtype).expand(*k.shape[:2], -1, -1)
    result = {
        "y": y,
        "attn": vispe.attention(q, k, eye, scale=1.0, backend="reference"),
        "grad.x": x.grad,
        "grad.positions": positions.grad,
    }
    if has_grad and hasattr(encoding, "theta"):
        result["grad.multiplier"] = encoding.theta.grad[None, :, :, None, None]
    if reference:
        result["q_rot"], result["k_rot"] = q, k
        result["exponent_matrix"] = encoding.generators()
        result["rotation_blocks"] = encoding.rotations(pos).transpose(1, 2)
        if has_grad:
            result["grad.freqs"] = skew_matrix(encoding.skew.grad, encoding.width)
        for name in ("q_proj", "k_proj", "v_proj", "proj"):
            for kind, p in layer.get_submodule(name).named_parameters():
                result[f"grad.{'out_proj' if name == 'proj' else name}.{kind}"] = p.grad
    return {name: value for name, value in result.items() if name in case.output_names}


def _run_folded(case, layer):
    """The same layer without matrix exponentials: q and k are projected into the basis of the generators."""
    layer = copy.deepcopy(layer)
    layer.pos_enc, basis = layer.pos_enc.fold()
    with torch.no_grad():
        for projection in (layer.q_proj, layer.k_proj):
            for p in projection.parameters():
                p.copy_(layer.pos_enc.in_basis(p, basis))
    return _run(case, layer, layer.pos_enc, [layer.q_proj, layer.k_proj], layer, reference=False)


def _run_timm(case, spec, weights, encoding_params, bias):
    dim, heads = case.config("hidden"), case.config("heads")
    model = VisionTransformer(
        img_size=4, patch_size=1, embed_dim=dim, depth=1, num_heads=heads, num_classes=0, qkv_bias=bias
    )
    # images have two axes, for which ComRoPE needs two blocks; LieRE needs one
    vispe.convert(model, {"name": "liere", "axes": 2, "block": spec["block"]})
    attn = model.blocks[0].attn
    attn.pos_enc = vispe.create_encoding(spec, dim=dim, num_heads=heads)
    fused = {
        f"qkv.{kind}": torch.cat([weights[f"{p}_proj.{kind}"] for p in "qkv"])
        for kind in ("weight", "bias")[: 1 + bias]
    }
    projection = {k: v for k, v in weights.items() if k.startswith("proj.")}
    attn.load_state_dict({**fused, **projection, **{f"pos_enc.{k}": v for k, v in encoding_params.items()}})
    x = case.input("x").float().requires_grad_()
    positions = case.input("positions").float().requires_grad_()
    y = attn(x, attn_mask=Context(vispe.Positions(positions), (), None, False))
    result = {"y": y}
    if case.backward(cotangent=y):
        result |= {f"grad.q_proj.{kind}": p.grad[:dim] for kind, p in attn.qkv.named_parameters()}
        result |= {"grad.x": x.grad, "grad.positions": positions.grad}
    return {name: value for name, value in result.items() if name in case.output_names}
