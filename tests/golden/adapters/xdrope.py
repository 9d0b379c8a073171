"""Golden cases of XD-RoPE: ids of HunyuanVL, and both layouts of the sections."""

import torch

from tests.golden.adapters._rotary import requested
from vispe.grid.frequencies import inverse_frequencies, ntk_base
from vispe.multimodal import Stream, create_scheme, newline_images, rotation, tables

STRETCHED = ("dynamic", "xdrope", "ntk_alpha")  # types of RoPE in which alpha has an effect


def run(case):
    case.ignore("padding_side", "the mask has it")
    section = case.config("mrope_section", None) or case.config("xdrope_section")
    scheme = create_scheme(
        "xdrope",
        sections=tuple(int(s) for s in section),
        layout=case.config("layout"),
        image_index=case.config("image_index", "batch"),
    )
    types = case.input("mm_token_type_ids")
    mask = case.input("attention_mask") if "attention_mask" in case.inputs else torch.ones_like(types)
    grids = case.input("image_grid_thw") if "image_grid_thw" in case.inputs else None
    types, images = newline_images(types, grids, merge=case.config("spatial_merge_size"), mask=mask)
    coordinates = scheme.coordinates(Stream.from_ids(types, images, mask=mask))
    delta = coordinates.delta("max")
    q, k = (case.input(name).requires_grad_() for name in "qk")
    sizes = case.config("batch"), case.config("num_heads"), case.config("num_key_value_heads")
    if (len(q), q.shape[1], k.shape[1]) != sizes or q.shape[-1] != case.config("head_dim"):
        raise ValueError(
            f"queries {tuple(q.shape)} and keys {tuple(k.shape)} are not those of the configuration"
        )
    frequencies = inverse_frequencies(q.shape[-1], _base(case))
    axis = scheme.allocation(len(frequencies))
    rotary = rotation(coordinates.ids, frequencies, axis)
    rotated = {"q_rot": rotary.query(q), "k_rot": rotary.key(k)}
    case.backward(**{f"cotangent.{name}": y for name, y in rotated.items()})
    by_channel = len(axis) == q.shape[-1]
    cos, sin = (t if by_channel else t.tile(2) for t in tables(coordinates.ids, frequencies, axis))
    result = {
        "position_ids": coordinates.ids,
        "rope_deltas": delta,
        "inv_freq": frequencies,
        "cos": cos,
        "sin": sin,
    }
    result |= rotated | {"grad.q": q.grad, "grad.k": k.grad}
    if "decode_position_ids" in case.output_names:
        count = case.outputs["decode_position_ids"].shape[-1]
        number = coordinates.mask.sum(1, keepdim=True) + torch.arange(count)
        result["decode_position_ids"] = scheme.text(number + delta)
    yield "float32", requested(case, result)


def _base(case):
    """Return the base of the frequencies, scaled by alpha if the case has it."""
    base, alpha = case.config("rope_theta"), case.config("alpha", None)
    if case.config("rope_type", "dynamic") not in STRETCHED or not alpha:
        return base
    return ntk_base(base, alpha, case.config("head_dim"))
