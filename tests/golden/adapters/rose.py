"""Golden cases of RoSE: positions in physical units, rotated queries and keys of two grids, and gradients."""

import torch

import vispe
from tests.golden.adapters._rotary import requested

STARTS = {"log": "log", "rope": "rope"}  # every other name starts as the identity
SCALES = ("scale_a", "scale_b", "scale_c", "scale_d")


def run(case):
    case.ignore("seed", "how the case was made")
    yield "float64", _run(case)


def _run(case):
    heads, width = case.config("num_heads"), case.config("head_dim")
    learned, start = case.config("learnable_scale", False), case.config("initial_scaling", None)
    scaled = bool(learned or start)
    encoding = vispe.create_encoding(
        "rose",
        dim=heads * width,
        num_heads=heads,
        axes=len(case.config("q_grid")),
        temperature=case.config("base_theta", 10000.0),
        temperature_scaling=case.config("frequency_scaling", "sqrt"),
        rotary_ratio=case.config("rotary_ratio", 1.0),
        init_std=0.0,
        spacing_scale=STARTS.get(start, "identity") if scaled else "none",
        learn_scale=bool(learned),
    ).double()
    if encoding.rotary_heads != case.config("rotary_heads", encoding.rotary_heads):
        raise ValueError("rotary_heads is not that of the ratio")
    result = {"initial_freqs": encoding.freqs.detach().clone()}
    inputs = {name: case.param(name).double() for name in ("freqs", *SCALES) if name in case.params}
    encoding.load_state_dict({**encoding.state_dict(), **inputs})
    result |= _rotated(case, encoding, heads)
    return requested(case, result)


def _rotated(case, encoding, heads):
    sides, result = {}, {}
    for name in "qk":
        pos = _positions(case.config(f"{name}_grid"), case.config(f"{name}_spacing"))
        sides[name] = case.input(name).double().requires_grad_()
        if len(sides[name]) != case.config("batch", len(sides[name])):
            raise ValueError(f"batch is not that of {name}")
        split = sides[name].unflatten(-1, (heads, -1)).transpose(1, 2)
        transform = encoding.transform(pos, 0)
        rotated = (transform.query if name == "q" else transform.key)(split)
        result[f"{name}_positions"] = encoding.scaled_coords(pos)[0]
        result[f"{name}_rot"] = rotated.transpose(1, 2)
        sides[f"{name}_rot"] = rotated
    result["scores"] = sides["q_rot"] @ sides["k_rot"].mT
    if case.backward(cotangent=result["scores"]):
        parameters = {**dict(encoding.named_parameters()), "q": sides["q"], "k": sides["k"]}
        result |= {f"grad.{name}": p.grad for name, p in parameters.items() if p.grad is not None}
    return result


def _positions(shape, spacing):
    """Return positions on a grid; spacings that `Grid` rejects are passed as free coordinates."""
    pos, step = vispe.Grid(tuple(shape)).positions(), torch.tensor(spacing, dtype=torch.float64)
    return vispe.Positions(pos.coords.double() * step, cell=step[None])
