"""Golden cases of SeqPE: the digit encoder, attention with its vectors, and the auxiliary losses.

Attention runs in float64, as in `alibi2d`. The vectors of the cases come as an attribute of the positions.
"""

import torch
from timm.models import VisionTransformer

import vispe
from vispe.encodings.parts.seqpe.encoder import DigitEncoder, digits_of, may_attend
from vispe.encodings.rotary.content.seqpe import contrastive_loss, transfer_loss
from vispe.grid import PerToken


def run(case):
    if "seed" in case.settings:
        case.ignore("seed", "all values are given")
    if "positions" in case.inputs:
        yield from _encoder(case)
    elif "pivot" in case.inputs:
        yield from _losses(case)
    else:
        yield from _attention(case)


def _encoder(case):
    for key in ("act", "mode"):
        if key in case.settings:
            case.ignore(key, "the tanh form of GELU without dropout, which the encoder always has")
    axes, count, base = case.config("data_dim"), case.config("max_digits"), case.config("base", 10)
    direction, hide, last = (case.config(k) for k in ("attn_direction", "mask_padding", "use_cls_token"))
    out, eps = case.config("out_proj_dim", -1), case.config("ln_eps", 1e-5)
    encoder = DigitEncoder(
        case.config("embed_dim"),
        case.config("heads"),
        case.config("layers"),
        axes,
        count,
        out if out > 0 else case.config("embed_dim"),
        direction=direction,
        final_norm=case.config("use_last_layernorm"),
        mask_padding=hide,
        class_token=last,
        temperature=case.config("temperature"),
        base=base,
        eps=eps,
    )
    encoder.load_state_dict({name: case.param(name) for name in case.params})
    positions = case.input("positions")
    positions = positions[:, None] if positions.ndim == 1 else positions
    digits, real = digits_of(positions, count, base)
    pe = encoder(positions)
    case.backward(cotangent=pe)
    result = {
        "digits": digits,
        "pad_mask": real,
        "attn_mask": may_attend(real, direction, hide, last),
        "pe": pe,
        **{f"grad.{name}": p.grad for name, p in encoder.named_parameters()},
    }
    yield "encoder", {name: value for name, value in result.items() if name in case.output_names}


def _losses(case):
    case.ignore("dim", "the width of the vectors")
    case.ignore("n_candidates", "the number of candidates per pivot")
    heads = case.config("heads") if case.config("multi_head") else None
    if heads is None:
        case.ignore("heads", "not multi_head")
    pivot, candidates, main, transfer = (
        case.input(n).requires_grad_() for n in ("pivot", "candidates", "main", "transfer")
    )
    scale = case.config("logit_scale")
    smoothing = case.config("label_smoothing", 0.0)
    contrastive = contrastive_loss(
        pivot, candidates, case.input("labels"), heads=heads, logit_scale=scale, label_smoothing=smoothing
    )
    transferred = transfer_loss(
        main,
        case.input("main_indices"),
        transfer,
        samples=case.config("batch"),
        beta=case.config("beta"),
        metric=case.config("metric"),
        heads=heads,
        logit_scale=scale,
    )
    contrastive.backward()
    transferred.backward()
    grads = {"pivot": pivot, "candidates": candidates, "main": main, "transfer": transfer}
    result = {"contrastive": contrastive, "transfer": transferred}
    for name, value in grads.items():
        result[f"grad.{name}"] = torch.zeros_like(value) if value.grad is None else value.grad
    yield "losses", {name: value for name, value in result.items() if name in case.output_names}


def _attention(case):
    dim, heads, width = case.config("dim"), case.config("heads"), case.input("pe").shape[-1]
    if case.config("pe_dim", -1) not in (-1, width):
        raise ValueError(f"the vectors of the case have {width} channels, not {case.config('pe_dim')}")
    spec = {
        "name": "seqpe",
        "mode": case.config("pe_apply_method"),
        "multi_head": case.config("multi_head"),
        "out_dim": width,
    }
    weights = {n: case.param(n) for n in case.params if not n.startswith("pe_qk")}
    encoding_params = {n.replace("pe_qk", "pe_qk.0"): case.param(n) for n in case.params - set(weights)}
    if not encoding_params:  # the vectors have been projected already
        encoding_params = {"pe_qk.0.weight": torch.eye(width)}
    encoding_params.setdefault("pe_qk.0.bias", torch.zeros(len(encoding_params["pe_qk.0.weight"])))
    encoding_params = {f"pos_enc.{n}": value for n, value in encoding_params.items()}
    bias = "qkv.bias" in weights
    for backend in ("reference", "sdpa"):
        layer = vispe.Attention(dim, heads, spec, qkv_bias=bias, backend=backend)
        _load(layer, {**weights, **encoding_params})
        yield backend, _run_layer(case, layer, layer.pos_enc, lambda x, pos, layer=layer: layer(x, pos))
    n = case.input("x").shape[1]
    model = VisionTransformer(
        img_size=(1, n),
        patch_size=1,
        embed_dim=dim,
        depth=1,
        num_heads=heads,
        num_classes=0,
        qkv_bias=bias,
        class_token=False,
        global_pool="",
    )
    vispe.convert(model, spec)
    attn, encoding = model.blocks[0].attn, model.pos_enc
    _load(attn, weights)
    _load(encoding, {name.removeprefix("pos_enc."): value for name, value in encoding_params.items()})
    model.double()
    captured = {}
    attn.register_forward_pre_hook(lambda module, args, kwargs: captured.update(kwargs), with_kwargs=True)
    model(torch.zeros(1, 3, 1, n).double())
    context = captured["attn_mask"]

    def forward(x, pos):
        mine = type(context)(pos, context.encodings, context.mask, context.is_causal)
        return attn(x, attn_mask=mine)

    yield "timm", _run_layer(case, attn, encoding, forward)


def _load(module, state):
    missing = module.load_state_dict(state, strict=False)
    if missing.unexpected_keys or any("encoder" not in key for key in missing.missing_keys):
        raise ValueError(f"the parameters do not fit: {missing}")
    module.double()


def _run_layer(case, layer, encoding, forward):
    layer.zero_grad()
    encoding.zero_grad()
    x, pe = (case.input(n).double().requires_grad_() for n in ("x", "pe"))
    pos = vispe.Grid((1, x.shape[1])).positions().replace(attrs={"seqpe": PerToken(pe, (1,))})
    y = forward(x, pos)
    case.backward(cotangent=y)
    result = {"y": y, "grad.x": x.grad, "grad.pe": pe.grad}
    for name, parameter in (*layer.named_parameters(), *encoding.named_parameters()):
        name = name.removeprefix("pos_enc.").replace("pe_qk.0", "pe_qk")
        result[f"grad.{name}"] = parameter.grad
    return {name: value for name, value in result.items() if name in case.output_names}
