"""Golden cases of the position encoding generator: the convolution, with a class token, and in ViTs.

Modules run in float32 and in float64, ViTs converted and with the encoding called between stock blocks.
"""

import torch
from timm.models import VisionTransformer

import vispe
from tests.golden.adapters._norm import norm_of_blocks


def run(case):
    if "image0" in case.inputs:
        yield from _vit(case)
    else:
        yield from _module(case)


def _module(case):
    prefix = case.config("num_prefix_tokens", 0)
    grid = vispe.Grid((case.config("height"), case.config("width")), prefix=prefix)
    kernel, stride = case.config("kernel_size"), case.config("stride", 1)
    dim = case.config("embed_dim", None) or case.config("dim")
    for name, expected in {"in_chans": dim, "groups": dim, "padding": kernel // 2, "bias": True}.items():
        if case.config(name, expected) != expected:
            raise ValueError(f"the reference has {name}={expected} here, the case says {case.config(name)}")
    if case.config("residual", stride == 1) != (stride == 1):
        raise ValueError("the identity term belongs to stride 1")
    for dtype in (torch.float32, torch.float64):
        encoding = vispe.create_encoding("peg", dim=dim, kernel_size=kernel)
        state = {f"pos_block.0.{name}": case.param(name) for name in case.params}
        encoding.rename_checkpoint_keys(state, "", "")
        encoding.load_state_dict(state)
        encoding.to(dtype)
        x = case.input("x").to(dtype).requires_grad_()
        pos = grid.positions()
        y = encoding.mix(x, pos, 0) if stride == 1 else encoding.shrink(x, pos, 0, stride)[0]
        case.backward(cotangent=y)
        actual = {"y": y, "grad.x": x.grad}
        for name in case.params:
            actual[f"grad.{name}"] = getattr(encoding.proj[0], name.rpartition(".")[2]).grad
        yield str(dtype), {name: value for name, value in actual.items() if name in case.output_names}


def _vit(case):
    case.ignore("arch", "a sentence: the class that is built below")
    after = list(case.config("peg_after_blocks"))
    spec = {"name": "peg", "after": after}
    images = range(len(case.config("image_sizes")))
    weights, pegs = {}, {}
    for name in case.params:
        prefix, _, suffix = name.partition(".")
        (weights if prefix == "vit" else pegs)[suffix] = case.param(name)
    named = {int(name.partition(".")[0]) for name in pegs}
    if named == set(after) and named != set(range(len(after))):  # numbered by block, not in order
        order = {str(layer): str(i) for i, layer in enumerate(after)}
        pegs = {f"{order[n.partition('.')[0]]}.{n.partition('.')[2]}": p for n, p in pegs.items()}
    pegs = {f"pos_block.{name}": p for name, p in pegs.items()}

    model = _model(case, pos_embed=spec)
    model.load_state_dict({**weights, **pegs})
    for checkpointing in (False, True):
        model.set_grad_checkpointing(checkpointing)
        result = {}
        for i in images:
            tokens = model.forward_features(case.input(f"image{i}"))
            result |= {f"tokens{i}": tokens, f"pooled{i}": _pooled(case, model, tokens)}
        yield f"converted, checkpointing={checkpointing}", result
    stock = _model(case, pos_embed="none")
    stock.load_state_dict(weights)
    encoding = vispe.create_encoding(spec, dim=case.config("embed_dim"), depth=case.config("depth"))
    encoding.rename_checkpoint_keys(pegs, "", "")
    encoding.load_state_dict(pegs)
    result = {}
    for i in images:
        image = case.input(f"image{i}")
        shape = [n // case.config("patch_size") for n in image.shape[-2:]]
        pos = vispe.Grid(shape, prefix=stock.num_prefix_tokens).positions()
        hooks = [
            stock.blocks[layer].register_forward_hook(
                lambda _module, _given, x, pos=pos, layer=layer: encoding.mix(x, pos, layer)
            )
            for layer in after
        ]
        tokens = stock.forward_features(image)
        result |= {f"tokens{i}": tokens, f"pooled{i}": _pooled(case, stock, tokens)}
        for hook in hooks:
            hook.remove()
    yield "own loop", result


def _model(case, pos_embed):
    if case.config("pos_embed") not in ("none", ""):
        raise ValueError("the case has an absolute table")
    return VisionTransformer(
        img_size=case.config("img_size"),
        patch_size=case.config("patch_size"),
        embed_dim=case.config("embed_dim"),
        depth=case.config("depth"),
        num_heads=case.config("num_heads"),
        mlp_ratio=case.config("mlp_ratio"),
        reg_tokens=case.config("reg_tokens"),
        class_token=case.config("class_token"),
        no_embed_class=case.config("no_embed_class"),
        dynamic_img_size=case.config("dynamic_img_size"),
        fc_norm=case.config("fc_norm"),
        norm_layer=norm_of_blocks(case),
        pos_embed=pos_embed,
        global_pool="",
        num_classes=0,
    ).eval()


def _pooled(case, model, tokens):
    pool = case.config("pool").lower()
    if any(word in pool for word in ("mean", "average", "avg", "gap")):
        return tokens[:, model.num_prefix_tokens :].mean(1)
    if not any(word in pool for word in ("class", "cls", "token")):
        raise ValueError(f"unknown pool {pool}")
    return tokens[:, 0]
