"""Golden cases of multimodal rotary positions: of Hugging Face's models and of the package Multimodal-RoPEs."""

import torch

from vispe.grid.frequencies import inverse_frequencies
from vispe.multimodal import Stream, create_scheme, rotation, tables

MADE = {
    "implementation": "where the case comes from; the variant names its rules",
    "vision_start_token_id": "markers are text",
    "vision_end_token_id": "markers are text",
}
LAYOUTS = {
    "one placeholder span per video": False,
    "one placeholder span per frame": True,
    "one placeholder span per frame (video_grid_thw rows are split into t rows of t=1)": True,
}
DELTAS = {  # convention: largest of which axes, and whether padding counts
    "max position + 1 - padded length": ("max", True),
    "max position + 1 - unpadded length": ("max", False),
    "max of the t row + 1 - padded length": ("time", True),
}
TIME_ROW = ("videorope", "hope")  # the package takes the largest t here


def run(case):
    variant = case.config("variant")
    if variant.startswith("hf_"):
        yield from _huggingface(case)
        return
    stream = stream_of(case)
    result = SCHEMES[variant](case).coordinates(stream, padding=case.config("padding_position"))
    end, padded = delta_of(case)
    if variant in TIME_ROW:
        end = "time"
    yield "float32", outputs(case, result, rope_delta(stream, result, end, padded))


def rope_delta(stream, result, end, padded):
    """Return the rotary delta; without images, the packages also count the position of padding."""
    if padded and not stream.blocks.visual.any():
        return result.ids.amax((0, 2))[:, None] + 1 - result.ids.shape[-1]
    return result.delta(end, padded)


def stream_of(case, seconds=None):
    """Describe the sequences of a case; ids of tokens and their types must agree."""
    for key in MADE:
        case.ignore(key, MADE[key])
    types, ids = case.input("mm_token_type_ids"), case.input("input_ids")
    for kind, key in ((1, "image_token_id"), (2, "video_token_id")):
        if case.config(key, None) is not None and not torch.equal(types == kind, ids == case.config(key)):
            raise ValueError(f"types and {key} do not agree")
    grids = (
        case.input(name) if name in case.inputs else None for name in ("image_grid_thw", "video_grid_thw")
    )
    return Stream.from_ids(
        types,
        *grids,
        mask=case.input("attention_mask") if "attention_mask" in case.inputs else None,
        merge=case.config("spatial_merge_size"),
        seconds=seconds,
        separate_frames=LAYOUTS[case.config("video_layout")],
    )


def delta_of(case):
    """Return the end of the sequence that is the origin of the rotary delta, and whether padding counts."""
    return DELTAS[case.config("rope_delta_convention")]


def outputs(case, result, delta):
    """Return positions, tables, rotated queries and keys, and gradients, as requested by the case."""
    heads, kv_heads = case.config("num_heads"), case.config("num_key_value_heads")
    q, k = (case.input(name).requires_grad_() for name in "qk")
    if (q.shape[1], k.shape[1]) != (heads, kv_heads):
        raise ValueError(f"{q.shape[1]} and {k.shape[1]} heads; the case says {heads} and {kv_heads}")
    frequencies = inverse_frequencies(case.config("head_dim"), case.config("rope_theta"))
    axis = result.scheme.allocation(len(frequencies), kv_heads)
    ids = result.ids.float()  # the references have no other
    rotary = rotation(ids, frequencies, axis)
    rotated = {"q_rot": rotary.query(q), "k_rot": rotary.key(k)}
    case.backward(**{f"cotangent.{name}": y for name, y in rotated.items()})
    cos, sin = (t.tile(2) for t in tables(ids, frequencies, axis))
    requested = {
        "position_ids": ids.expand(3, -1, -1),
        "rope_deltas": delta,
        "inv_freq": frequencies,
        "cos": cos,
        "sin": sin,
        "grad.q": q.grad,
        "grad.k": k.grad,
        **rotated,
    }
    if "decode_position_ids" in case.output_names:
        count = case.outputs["decode_position_ids"].shape[-1]
        number = result.mask.sum(1, keepdim=True) + torch.arange(count)  # of each token that comes, from 0
        requested["decode_position_ids"] = (number + delta).expand(3, -1, -1)
        cos, sin = (t.tile(2) for t in tables(requested["decode_position_ids"], frequencies, axis))
        requested |= {"decode_cos": cos, "decode_sin": sin}
    return {name: value for name, value in requested.items() if name in case.output_names}


def _huggingface(case):
    seconds, rate = None, case.config("tokens_per_second", None)
    if "second_per_grid_ts" in case.inputs:
        seconds = case.input("second_per_grid_ts")
    elif rate is not None and "video_grid_thw" in case.inputs:
        seconds = torch.ones(len(case.input("video_grid_thw")))  # the models take one frame per second
    stream = stream_of(case, seconds)
    spec = {"chunked": "mrope", "interleaved": "mrope_i(clip=true)"}[case.config("frequency_allocation")]
    after = {"max(h,w)//merge": "side"}[case.config("advance_after_visual")]
    scheme = create_scheme(spec, sections=sections_of(case), after=after, tokens_per_second=rate)
    result = scheme.coordinates(stream, padding=case.config("padding_position"))
    yield "float32", outputs(case, result, result.delta(*delta_of(case)))
    if "decode_position_ids_generate" in case.output_names:
        count = case.outputs["decode_position_ids_generate"].shape[-1]
        yield "decode", {"decode_position_ids_generate": result.decode(count)}


def sections_of(case):
    """Return the sections of a case."""
    return tuple(case.config("mrope_section"))


def _vanilla(case):
    case.ignore("mrope_section", "there is one axis")
    case.ignore("temporal_stride", "there is one axis")
    return create_scheme("rope1d")


def _mrope(name, **fixed):
    def scheme(case):
        stride = case.config("temporal_stride", 2.0 if name == "mrope" else 1.0)
        return create_scheme(name, sections=sections_of(case), stride=stride, **fixed)

    return scheme


def _reset(name, **fixed):
    return lambda case: _mrope(name, spatial_reset=case.config("spatial_reset", False), **fixed)(case)


def _omni(name, **fixed):
    def scheme(case):
        case.ignore("spatial_reset", "the package always resets here")
        return _mrope(name, **fixed)(case)

    return scheme


def _mmrope(case):
    case.ignore("mrope_section", "the pattern of axes is fixed")
    scale = tuple(case.config("position_scale", (1.0, 1.0, 1.0)))
    return create_scheme("mmrope", stride=case.config("temporal_stride", 1.0), scale=scale)


def _videorope(case):
    scale = case.config("temporal_stride", 2.0)
    return create_scheme("videorope", sections=sections_of(case), scale=scale, layout="package")


def _hope(case):
    for key in (
        "temporal_stride",
        "temporal_stride_lst",
        "temporal_scale",
        "scale_draw",
        "python_random_seed",
    ):
        case.ignore(key, "frames are separate segments, and then nothing depends on their distance")
    if "drawn_scales" in case.inputs:
        case.input("drawn_scales")
    return create_scheme("hope_vlm", sections=sections_of(case), layout="package")


def _circle(case):
    radius, offset = case.config("radius", -1), case.config("move_to_positive", False)
    relative = str(radius).startswith("auto")  # 'auto', or 'auto-2' for twice that
    if relative:
        radius = float(str(radius).partition("-")[2] or 1)
    plane = {"circle": float(case.config("dff_rate", False)), "no_circle": 1.0}[
        case.config("method", "circle")
    ]
    return create_scheme(
        "circlerope",
        sections=sections_of(case),
        radius=radius,
        relative=relative,
        alpha=case.config("alpha", -1),
        blend=plane,
        move_to_origin=case.config("move_to_origin", False),
        offset=None if offset is False else 0.0 if offset == "auto" else float(offset),
        stride=case.config("temporal_stride", 1.0),
        precision="float32",
    )


SCHEMES = {
    "vanilla-rope": _vanilla,
    "mrope": _mrope("mrope"),
    "mrope-interleave": _reset("mrope_i", clip=True),
    "mhrope": _reset("mhrope"),
    "omnirope": _omni("omnirope"),
    "ilrope": _omni("ilrope", clip=True),
    "mmrope": _mmrope,
    "videorope": _videorope,
    "hope": _hope,
    "circlerope": _circle,
}
