"""Golden cases of 2D ALiBi: distances, slopes, attention layers with gradients, and ViTs.

Layers run in float64: the gradient of a key bias is exactly 0, and the rounding of float32 around zero reveals
nothing about the method. Speed and rounding in other dtypes are the subject of tests/attention/test_attention.py.
"""

import torch
from timm.models import VisionTransformer

import vispe
from tests.golden.adapters._norm import norm_of, norm_of_blocks

SLOPES = {"constant": "constant", "fixed": "geometric", "learned": "learned"}


def run(case):
    if "distance" in case.output_names:
        yield from _distance(case)
    elif "x" in case.inputs:
        yield from _attention(case)
    elif "image0" in case.inputs:
        yield from _vit(case)
    else:
        yield from _slopes(case)


def _options(case, slopes="constant"):
    return {
        "slopes": slopes,
        "metric": case.config("metric"),
        "normalize": "max" if case.config("normalize") else "none",
        "wrap": case.config("wrap"),
    }


def _grid(case):
    prefix = case.config("n_reg_tokens") + int(case.config("add_cls"))
    return vispe.Grid((case.config("n_tokens_h"), case.config("n_tokens_w")), prefix=prefix)


def _distance(case):
    encoding = vispe.create_encoding("alibi2d", num_heads=1, **_options(case))
    yield "dense", {"distance": encoding.bias(_grid(case).positions(), layer=0).dense()[0, 0]}


def _slopes(case):
    case.ignore("learned_init", "a sentence; the initial values are random")
    result = {}
    for kind in case.config("slope_types"):
        for heads in case.config("num_heads"):
            encoding = vispe.create_encoding("alibi2d", num_heads=heads, slopes=SLOPES[kind])
            result[f"{kind}_{heads}"] = torch.as_tensor(encoding.head_slopes()).reshape(-1, 1, 1)
    yield "slopes", result


def _norm(case):
    norm = case.config("qk_norm", False)
    if not norm:
        case.ignore("qk_norm_layer", "without qk_norm there is no norm to choose")
        return None
    return norm_of(norm if isinstance(norm, str) else case.config("qk_norm_layer", None) or "LayerNorm")


def _attention(case):
    if case.config("jitter_mag", 0.0):
        raise ValueError("the noise of a jittered case is not in the file")
    if not case.usual_scale(case.config("dim") // case.config("num_heads")):
        raise ValueError(f"unknown scale {case.config('scale')}")
    dim, heads, grid = case.config("dim"), case.config("num_heads"), _grid(case)
    slopes, norm, bias = (
        SLOPES[case.config("slope_type")],
        _norm(case),
        case.config("qkv_bias", "qkv.bias" in case.params),
    )
    spec = {"name": "alibi2d", **_options(case, slopes)}
    weights = {name: case.param(name) for name in case.params - {"m"}}
    encoding_params = {"slope": case.param("m").flatten()} if slopes == "learned" else {}
    fixed = vispe.create_encoding(spec, num_heads=heads)
    if slopes != "learned":  # fixed slopes come as a parameter too: ours must be the same
        weights_m = torch.tensor(fixed.head_slopes()).reshape(-1, 1, 1)
        case.agree("the slopes", weights_m, case.param("m"))
    for backend in ("reference", "sdpa"):
        layer = vispe.Attention(dim, heads, spec, qkv_bias=bias, qk_norm=norm, backend=backend)
        layer.load_state_dict({**weights, **{f"pos_enc.{k}": v for k, v in encoding_params.items()}})
        layer.double()
        yield backend, _run_layer(case, layer, layer.pos_enc, grid, lambda x, layer=layer: layer(x, grid))
    yield "timm", _run_timm(case, spec, weights, encoding_params, grid, norm)


def _run_timm(case, spec, weights, encoding_params, grid, norm):
    """Run the attention layer of a converted timm block within the block of the model."""
    dim, heads = case.config("dim"), case.config("num_heads")
    model = VisionTransformer(
        img_size=grid.shape,
        patch_size=1,
        embed_dim=dim,
        depth=1,
        num_heads=heads,
        num_classes=0,
        qkv_bias=case.config("qkv_bias", "qkv.bias" in case.params),
        qk_norm=norm is not None,
        norm_layer=norm,
        class_token=bool(case.config("add_cls")),
        reg_tokens=case.config("n_reg_tokens"),
        global_pool="",
    )
    vispe.convert(model, spec)
    attn = model.blocks[0].attn
    attn.load_state_dict({**weights, **{f"pos_enc.{k}": v for k, v in encoding_params.items()}})
    model.double()
    encoding = attn.pos_enc or model.pos_enc
    captured = {}
    attn.register_forward_pre_hook(lambda module, args, kwargs: captured.update(kwargs), with_kwargs=True)
    model(torch.zeros(2, 3, *grid.shape).double())  # what the model hands to its attention
    return _run_layer(case, attn, encoding, grid, lambda x: attn(x, attn_mask=captured["attn_mask"]))


def _run_layer(case, layer, encoding, grid, forward):
    layer.zero_grad()
    x = case.input("x").double().requires_grad_()
    y = forward(x)
    case.backward(cotangent=y)
    heads = case.config("num_heads")
    dense = encoding.bias(grid.positions(), layer=0).dense()[0]
    result = {"y": y, "bias": dense.expand(heads, -1, -1), "grad.x": x.grad}
    for name, parameter in layer.named_parameters():
        name = name.replace("pos_enc.slope", "m")
        shape = (-1, 1, 1) if name == "m" else parameter.shape
        result[f"grad.{name}"] = None if parameter.grad is None else parameter.grad.reshape(shape)
    return {name: value for name, value in result.items() if name in case.output_names}


def _vit(case):
    case.ignore("state_dict_is", "a sentence")
    case.ignore("arch", "a sentence: the class that is built below")
    sizes = case.config("image_sizes")
    options = _options(case, SLOPES[case.config("slope_type")])
    model = VisionTransformer(
        img_size=case.config("img_size"),
        patch_size=case.config("patch_size"),
        embed_dim=case.config("embed_dim"),
        depth=case.config("depth"),
        num_heads=case.config("num_heads"),
        mlp_ratio=case.config("mlp_ratio"),
        reg_tokens=case.config("reg_tokens"),
        class_token=case.config("class_token"),
        no_embed_class=case.config("no_embed_class"),
        init_values=case.config("init_values"),
        dynamic_img_size=case.config("dynamic_img_size"),
        norm_layer=norm_of_blocks(case),
        global_pool="",
        num_classes=0,
        pos_embed={"name": "alibi2d", **options},
    ).eval()
    if case.config("pos_embed") not in ("none", ""):
        raise ValueError("the case has an absolute table")
    model.load_state_dict({name: case.param(name) for name in case.params})
    for fused in (True, False):
        for block in model.blocks:
            block.attn.fused_attn = fused
        images = {f"tokens{i}": model.forward_features(case.input(f"image{i}")) for i in range(len(sizes))}
        yield "fused" if fused else "unfused", images
