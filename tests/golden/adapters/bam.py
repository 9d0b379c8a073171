"""Golden cases of BAM: the initial values and the bias, on a line and in the plane."""

import torch

import vispe
from tests.golden.adapters._line import positions

NAMES = ("shape", "scale", "loc")


def run(case):
    case.ignore("jitter", "all values are given")
    heads, length = case.config("n_heads"), case.config("seq_len")
    options = {
        "shape_init": case.config("shape_init"),
        "scale_init": case.config("scale_init"),
        "loc_init": float(case.config("loc_init")),
        "eps": case.config("eps"),
    }
    learned = vispe.create_encoding(
        "bam", num_heads=heads, axes=1, train_loc=bool(case.config("train_loc")), **options
    )
    start = {name: getattr(learned, name) for name in NAMES}
    start = {f"init.{n}": torch.zeros(heads) if v is None else v.flatten() for n, v in start.items()}
    result = {name: value for name, value in start.items() if name in case.output_names}
    if result:
        yield "start", result
    for route, pos in positions(length).items():
        encoding = vispe.create_encoding(
            "bam", num_heads=heads, axes=pos.axes, train_loc=True, **options
        ).double()
        yield route, _bias(case, encoding, pos)
    if not case.param("loc").any():  # without a location at all
        encoding = vispe.create_encoding("bam", num_heads=heads, **{**options, "loc_init": 0.0}).double()
        yield "no location", _bias(case, encoding, positions(length)[f"2D {(1, length)}"])


def _bias(case, encoding, pos):
    # the axis that is longer than one token is the line
    along = max(range(pos.axes), key=lambda a: float(pos.coords[..., a].max()))
    with torch.no_grad():
        encoding.shape.copy_(case.param("shape").flatten())
        encoding.scale.copy_(case.param("scale").flatten())
        if encoding.loc is not None:
            encoding.loc.zero_()[:, along] = case.param("loc").flatten()
    dense = encoding.bias(pos, 0).dense()
    result = {"bias": dense}
    if case.backward(cotangent=dense):
        result |= {"grad.shape": encoding.shape.grad, "grad.scale": encoding.scale.grad}
        if encoding.loc is not None:
            result["grad.loc"] = encoding.loc.grad[:, along]
        result = {n: v if n == "bias" else v.reshape(1, -1, 1, 1) for n, v in result.items()}
    return {name: value for name, value in result.items() if name in case.output_names}
