"""Golden cases of iRPE: piecewise index, bucket numbers, single terms with gradients, and attention layers.

Layers run in float64, see `alibi2d`.
"""

import torch
from timm.models import VisionTransformer

import vispe
from vispe.encodings.parts.bias.buckets import piecewise_index
from vispe.encodings.parts.bias.irpe_tables import bucket_ids, num_buckets

METHODS = {"euc": "euclidean", "quant": "quantization"}
MODES = {"ctx": "contextual"}


def run(case):
    case.ignore("seed", "how the case was made")
    if "ratios" in case.settings:
        yield "index", dict(_piecewise(case))
    elif "num_buckets" in case.settings:
        yield "ids", dict(_buckets(case))
    elif "dim" in case.settings:
        yield from _attention(case)
    else:
        yield "term", _term(case)


def _times(text, ratio):
    """Parse the value of a parameter in the file, such as '2*ratio'."""
    factor, star, unit = text.partition("*")
    if (star, unit) != ("*", "ratio"):
        raise ValueError(f"cannot read {text!r}")
    return float(factor) * ratio


def _piecewise(case):
    for ratio in case.config("ratios"):
        rule = [_times(case.config(name), ratio) for name in ("alpha", "beta", "gamma")]
        for kind in ("int", "float"):
            spellings = [f"{kind}_{number}".replace(".", "p") for number in (float(ratio), ratio)]
            name = next((n for n in spellings if n in case.output_names), spellings[0])
            yield name, piecewise_index(case.input(f"x_{kind}"), *rule)


def _grid(case):
    return vispe.Grid((case.config("height"), case.config("width")), prefix=case.config("skip"))


def _buckets(case):
    grid, ratio, counts = _grid(case), case.config("ratio"), case.config("num_buckets")
    for name in case.output_names:
        kind = name.removeprefix("bucket_ids_")
        method, _, axis = kind.partition("_")
        method = METHODS.get(method, method)
        prefix = min(grid.prefix, 1)
        if counts[kind] != num_buckets(method, ratio, prefix):
            raise ValueError(f"{kind} has {counts[kind]} buckets, not {num_buckets(method, ratio, prefix)}")
        yield name, bucket_ids(grid, method, ratio, prefix)[axis == "cols"][0]


def _spec(case):
    return {
        "name": "irpe",
        "method": METHODS.get(case.config("method"), case.config("method")),
        "mode": MODES.get(case.config("mode"), case.config("mode")),
        "on": "".join(case.config("rpe_on")),
        "shared": case.config("shared_head"),
        "ratio": case.config("ratio"),
        "prefix_buckets": min(case.config("skip"), 1),
    }


def _term(case):
    heads, spec = case.config("num_heads"), _spec(case)
    on = spec["on"]
    if case.config("transposed", on != "v") != (on != "v"):
        raise ValueError(f"a term on {on} with transposed={case.config('transposed')}")
    encoding = vispe.create_encoding(spec, dim=heads * case.config("head_dim"), num_heads=heads)
    encoding.load_state_dict({f"rpe_{on}.{name}": case.param(name) for name in case.params})
    encoding.double()
    x = case.input("x").double().requires_grad_()
    pos = _grid(case).positions()
    if on == "v":
        y = encoding.value_term(pos, 0).apply(x)
    else:  # a term on q is the transpose of what the module returns
        y = encoding.bias(pos, 0).dense(q=x, k=x, scale=1.0)
        y = y if on == "k" else y.transpose(-1, -2)
    case.backward(cotangent=y)
    result = {"y": y, "grad.x": torch.zeros_like(x) if x.grad is None else x.grad}  # a bias does not read x
    result |= {f"grad.{n.removeprefix(f'rpe_{on}.')}": p.grad for n, p in encoding.named_parameters()}
    return {name: value for name, value in result.items() if name in case.output_names}


def _attention(case):
    if not case.usual_scale(case.config("dim") // case.config("num_heads")):
        raise ValueError(f"unknown scale {case.config('scale')}")
    dim, heads, grid, spec = case.config("dim"), case.config("num_heads"), _grid(case), _spec(case)
    weights = {name: case.param(name) for name in case.params}
    renamed = {
        f"pos_enc.{name}" if name.startswith("rpe_") else name: value for name, value in weights.items()
    }
    backends = ("reference",) if "v" in spec["on"] else ("reference", "sdpa")
    for backend in backends:
        layer = vispe.Attention(
            dim, heads, spec, qkv_bias=case.config("qkv_bias", "qkv.bias" in case.params), backend=backend
        )
        layer.load_state_dict(renamed)
        yield backend, _run_layer(case, layer.double(), lambda x, layer=layer: layer(x, grid))
    for fused in (True, False):
        yield f"timm, fused={fused}", _run_timm(case, spec, weights, grid, fused)


def _run_timm(case, spec, weights, grid, fused):
    """The attention layer of a converted timm model, with entries of released checkpoints."""
    model = VisionTransformer(
        img_size=grid.shape,
        patch_size=1,
        embed_dim=case.config("dim"),
        depth=1,
        num_heads=case.config("num_heads"),
        num_classes=0,
        qkv_bias=case.config("qkv_bias", "qkv.bias" in case.params),
        class_token=grid.prefix > 0,
        reg_tokens=max(grid.prefix - 1, 0),
        global_pool="",
    )
    vispe.convert(model, spec)
    other_entries = {k: v for k, v in model.state_dict().items() if ".attn." not in k}
    model.load_state_dict({**other_entries, **{f"blocks.0.attn.{k}": v for k, v in weights.items()}})
    model.double()
    attn = model.blocks[0].attn
    attn.fused_attn = fused
    captured = {}
    attn.register_forward_pre_hook(lambda module, args, kwargs: captured.update(kwargs), with_kwargs=True)
    model(torch.zeros(2, 3, *grid.shape).double())  # what the model hands to its attention
    return _run_layer(case, attn, lambda x: attn(x, attn_mask=captured["attn_mask"]))


def _run_layer(case, layer, forward):
    layer.zero_grad()
    x = case.input("x").double().requires_grad_()
    y = forward(x)
    case.backward(cotangent=y)
    result = {"y": y, "grad.x": x.grad}
    result |= {f"grad.{name.replace('pos_enc.', '')}": p.grad for name, p in layer.named_parameters()}
    return {name: value for name, value in result.items() if name in case.output_names}
