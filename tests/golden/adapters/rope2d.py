"""Golden cases of rotary encodings of grids: axial and mixed (rope-vit) and DINOv3, as tables and in attention."""

import torch
from timm.models import VisionTransformer

import vispe


def run(case):
    case.ignore("seed", "how the case was made")
    kind = case.config("kind", None)
    if kind in ("axial", "mixed"):
        yield from _attention(case, kind)
    elif "periods" in case.output_names or "normalize_coords" in case.settings:
        yield "dinov3", _dinov3(case)
    elif "freqs" in case.params:
        yield "mixed", _mixed(case)
    else:
        yield "axial", _axial(case)


def _build(case, name, **options):
    heads = case.config("num_heads")
    return vispe.create_encoding(name, dim=heads * case.config("head_dim"), num_heads=heads, **options)


def _grid(case, prefix):
    return vispe.Grid((case.config("height"), case.config("width")), prefix=prefix)


def _axial(case):
    prefix = case.config("prefix_tokens", 0)
    transform = _build(case, "rope_axial", temperature=case.config("theta", 100.0)).transform(
        _grid(case, prefix).positions(), 0
    )
    q, k = (case.input(name).requires_grad_() for name in "qk")
    rotated = transform.query(q), transform.key(k)
    scores = rotated[0] @ rotated[1].transpose(-1, -2)
    result = {"cos": transform.cos[0, 0, prefix:], "sin": transform.sin[0, 0, prefix:], "scores": scores}
    result |= {"q_rot": rotated[0], "k_rot": rotated[1]}
    if case.backward(cotangent=scores):
        result |= {"grad.q": q.grad, "grad.k": k.grad}
    return _asked(case, result)


def _mixed(case):
    case.ignore("rotate", "how the frequencies were drawn; they are given")
    prefix = case.config("prefix_tokens", 0)
    options = {"temperature": case.config("theta", 10.0), "trainable": case.config("trainable", True)}
    pos = _grid(case, prefix).positions()
    q, k = (case.input(name).requires_grad_() for name in "qk")
    loss, layers, result = torch.zeros(()), [], {}
    for layer, freqs in enumerate(case.param("freqs").unbind(1)):
        layers.append(_build(case, "rope_mixed", **options))
        layers[-1].load_state_dict({"freqs": freqs})
        transform = layers[-1].transform(pos, layer)
        rotated = transform.query(q), transform.key(k)
        result |= {f"q_rot{layer}": rotated[0], f"k_rot{layer}": rotated[1]}
        result.setdefault("cos", []).append(transform.cos[0, :, prefix:])
        result.setdefault("sin", []).append(transform.sin[0, :, prefix:])
        if "cotangent" in case.inputs:
            scores = rotated[0] @ rotated[1].transpose(-1, -2)
            loss = loss + (scores * case.input("cotangent")[layer]).sum()
    if len(layers) != case.config("depth", len(layers)):
        raise ValueError("the frequencies are not for so many layers")
    result |= {name: torch.stack(result[name]) for name in ("cos", "sin")}
    if loss.requires_grad:
        loss.backward()
        result |= {"grad.q": q.grad, "grad.k": k.grad}
        if layers[0].freqs.grad is not None:
            result["grad.freqs"] = torch.stack([e.freqs.grad for e in layers], 1)
    return _asked(case, result)


def _dinov3(case):
    if "32" not in case.config("dtype", "float32"):
        raise ValueError(f"tables in {case.config('dtype')}; ours are in float32")
    if "half" not in case.config("layout", "half"):
        raise ValueError(f"unknown layout {case.config('layout')}")
    options = {
        name: case.config(name)
        for name in ("shift_coords", "jitter_coords", "rescale_coords", "min_period", "max_period")
        if case.config(name, None) is not None
    }
    if case.config("base", None) is not None:
        options["temperature"] = case.config("base")
    encoding = _build(case, "rope_dinov3", normalize_coords=case.config("normalize_coords"), **options)
    encoding.train(case.config("training", False))
    stored = {"shift_coords": "shift_hw", "jitter_coords": "jitter_hw", "rescale_coords": "rescale"}
    draws = {ours: case.input(name) for ours, name in stored.items() if name in case.inputs}
    if encoding.training and set(draws) != set(options) & set(stored):
        raise ValueError("the case does not give every draw")
    prefix = case.config("num_prefix_tokens", 0)
    pos = encoding.prepare(_grid(case, prefix).positions(), draws=draws)
    transform = encoding.transform(pos, 0)
    result = {name: getattr(transform, name)[0, 0, prefix:].repeat(1, 2) for name in ("cos", "sin")}
    result["periods"] = encoding.periods()
    if "q" in case.inputs:
        q, k = (case.input(name).requires_grad_() for name in "qk")
        result |= {"q_rot": transform.query(q), "k_rot": transform.key(k)}
        result["scores"] = result["q_rot"] @ result["k_rot"].transpose(-1, -2)
        if case.backward(cotangent=result["scores"]):
            result |= {"grad.q": q.grad, "grad.k": k.grad}
    return _asked(case, result)


def _asked(case, result):
    return {name: value for name, value in result.items() if name in case.output_names}


def _attention(case, kind):
    if not case.usual_scale(case.config("dim") // case.config("num_heads")):
        raise ValueError(f"unknown scale {case.config('scale')}")
    dim, heads, bias = (
        case.config("dim"),
        case.config("num_heads"),
        case.config("qkv_bias", "qkv.bias" in case.params),
    )
    prefix = case.config("num_prefix_tokens", 1)
    grid = _grid(case, prefix)
    spec = {"name": f"rope_{kind}", "temperature": case.config("theta")}
    weights = {name: case.param(name) for name in case.params - {"freqs"}}
    encoding_params = {"pos_enc.freqs": case.param("freqs")[:, 0]} if kind == "mixed" else {}
    for backend in ("reference", "sdpa"):
        layer = vispe.Attention(dim, heads, spec, qkv_bias=bias, backend=backend)
        layer.load_state_dict({**weights, **encoding_params})
        layer.double()
        yield backend, _run_layer(case, layer, lambda x, layer=layer: layer(x, grid))
    model = VisionTransformer(
        img_size=grid.shape,
        patch_size=1,
        embed_dim=dim,
        depth=1,
        num_heads=heads,
        num_classes=0,
        qkv_bias=bias,
        class_token=prefix > 0,
        reg_tokens=max(prefix - 1, 0),
        global_pool="",
    )
    vispe.convert(model, spec)
    attn = model.blocks[0].attn
    attn.load_state_dict({**weights, **encoding_params})
    model.double()
    captured = {}
    attn.register_forward_pre_hook(lambda module, args, kwargs: captured.update(kwargs), with_kwargs=True)
    model(torch.zeros(2, 3, *grid.shape).double())  # what the model hands to its attention
    yield "timm", _run_layer(case, attn, lambda x: attn(x, attn_mask=captured["attn_mask"]))


def _run_layer(case, layer, forward):
    layer.zero_grad()
    x = case.input("x").double().requires_grad_()
    y = forward(x)
    result = {"y": y}
    if case.backward(cotangent=y):
        result["grad.x"] = x.grad
    for name, parameter in layer.named_parameters():
        if parameter.grad is not None:
            grad = parameter.grad[:, None] if name == "pos_enc.freqs" else parameter.grad
            result[f"grad.{name.removeprefix('pos_enc.')}"] = grad
    return _asked(case, result)
