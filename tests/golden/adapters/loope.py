"""Golden cases of LOOPE: orders of cells, static tables, and the released network.

Tables have the rounding of the authors' code, which grows with the number of cells.
"""

import torch

import vispe


def run(case):
    if "sizes_hw" in case.inputs:
        yield from _orders(case)
    elif "image" in case.inputs:
        yield from _released(case)
    else:
        yield from _static(case)


def _orders(case):
    case.ignore("start", "a sentence: the first cell")
    if case.config("index_base") != 1 or not case.config("major_axis").startswith("x (width) always"):
        raise ValueError("the case numbers cells in another way")
    encoding = vispe.create_encoding("loope.static", dim=2)
    result = {}
    for h, w in case.input("sizes_hw").tolist():
        order = encoding.static(vispe.Grid((h, w)).positions()).reshape(h, w)
        result[f"index_{h}x{w}"] = order.to(torch.int64)
    yield "order", result


def _static(case):
    case.ignore("seq_length", "the number of tokens")
    side, at = case.config("grid"), case.config("cls_position", 0)
    temperature = case.config("temperature", 10000.0)
    options = {"class_token": "origin", "context": "none", "temperature": temperature, "exact": False}
    if at != 0:
        raise ValueError(f"the class token is at {at}, not at the origin")
    h, w = (side, side) if isinstance(side, int) else side
    pos = vispe.Grid((h, w), prefix=1).positions()
    result = {}
    for order, name in (("gilbert", "hilbert_pe"), ("raster", "sincos1d_pe")):
        encoding = vispe.create_encoding("loope", dim=case.config("dim"), order=order, **options)
        result[name] = encoding.table(pos)
    yield "table", {name: value for name, value in result.items() if name in case.output_names}


def _released(case):
    case.ignore("seed", "the parameters are given")
    side, patch = case.config("img_size"), case.config("patch_size")
    for name, expected in {
        "act": "gelu(erf)",
        "bn_eps": 1e-5,
        "bn_momentum": 0.1,
        "batch": len(case.input("image")),
    }.items():
        if case.config(name, expected) != expected:
            raise ValueError(f"the reference has {name}={expected}, the case says {case.config(name)}")
    grid = vispe.Grid((side // patch, side // patch), prefix=1)
    train = case.config("mode") == "train"
    # in training batch norm cancels most of the gradients before it, so that the float32 of the case shows
    for dtype in (torch.float32,) if train else (torch.float32, torch.float64):
        encoding = vispe.create_encoding(
            "loope.released", dim=case.config("dim"), grid=grid.shape, exact=dtype == torch.float64
        )
        state = {name: case.param(name) for name in case.params}
        encoding.rename_checkpoint_keys(state, "", "")
        encoding.load_state_dict(state)
        encoding.to(dtype).train(train)
        image = case.input("image").to(dtype).requires_grad_()
        pos = grid.positions()
        table = encoding.table(pos, image)
        mean, var = (encoding.network.norm[f"running_{n}"].clone() for n in ("mean", "var"))
        case.backward(cotangent=table)
        shift = encoding.shift(pos, image)
        actual = {
            "pos_embed": table,
            "context_bias": shift,
            "positions": encoding.static(pos) + shift,
            "grad.image_corner": None if image.grad is None else image.grad[..., :8, :8],
            "bn_running_mean_after": mean,
            "bn_running_var_after": var,
        }
        for i in range(5):
            for last in ("weight", "bias"):
                actual[f"grad.art_conv.{2 * i}.{last}"] = getattr(encoding.network.convs[i], last).grad
        for last in ("weight", "bias"):
            actual[f"grad.art_conv.10.{last}"] = encoding.network.norm[last].grad
        actual["grad.art_conv.12.weight"] = encoding.network.linear.weight.grad
        actual["grad.cls_token"] = encoding.vector.grad
        yield str(dtype), {name: value for name, value in actual.items() if name in case.output_names}
