"""Golden cases of the rotary tables of V-JEPA 2 (`repeat`) and V-JEPA 2.1 (`interleave`)."""

import torch

import vispe
from tests.golden.adapters._rotary import requested

PRESETS = {"repeat": "rope_axial.vjepa2", "interleave": "rope_axial.vjepa21"}
SCHEDULES = {"index": "none", "interpolate": "align_corners", "snap": "rescale"}


def run(case):
    case.ignore("seed", "how the case was made")
    yield "float64", _run(case)


def _run(case):
    heads, width = case.config("num_heads"), case.config("head_dim")
    options = {"schedule": SCHEDULES[case.config("coordinates", "index")]}
    side = case.config("reference_size", None)
    if options["schedule"] != "none":
        options["reference"] = (1, side, side)
    encoding = vispe.create_encoding(
        PRESETS[case.config("variant")],
        dim=heads * width,
        num_heads=heads,
        temperature=case.config("theta", 10000.0),
        **options,
    )
    pos, patches = _positions(case)
    transform = encoding.transform(pos, 0)
    q, k = (case.input(name).double().requires_grad_() for name in "qk")
    if q.shape[:2] != (case.config("batch", len(q)), heads):
        raise ValueError("the configuration is not that of q")
    result = {"q_rot": transform.query(q), "k_rot": transform.key(k)}
    result["scores"] = result["q_rot"] @ result["k_rot"].mT
    # the first pair of each axis rotates by one radian per unit of the scaled coordinate
    first = torch.arange(3) * (width // 6)
    result["positions"] = encoding.angles(pos)[:, 0, patches][..., first]
    if case.backward(cotangent=result["scores"]):
        result |= {"grad.q": q.grad, "grad.k": k.grad}
    return requested(case, result)


def _positions(case):
    """Return the positions of class tokens, patches and registers, and the slice of the patches."""
    shape = tuple(case.config(name) for name in ("frames", "height", "width"))
    cls, registers = case.config("cls_tokens", 0), case.config("register_tokens", 0)
    pos = vispe.Grid(shape, prefix=cls + registers).positions()
    pos = pos.replace(coords=pos.coords.double(), extent=pos.extent.double(), cell=pos.cell.double())
    ids = torch.arange(pos.tokens - cls - registers)[None]
    if "ids" in case.inputs:
        ids = case.input("ids").long()
    if ids.shape[1] != case.config("remaining_tokens", ids.shape[1]):
        raise ValueError("remaining_tokens is not the number of ids")
    outside = torch.arange(cls + registers).expand(len(ids), -1)
    order = torch.cat([outside[:, :cls], ids + cls + registers, outside[:, cls:]], 1)
    return pos.gather(order), slice(cls, cls + ids.shape[1])
