"""Golden cases of V2PE: the authors' strides per tile, and the span per block of the package Multimodal-RoPEs."""

import torch

from tests.golden.adapters._rotary import requested, transformed
from tests.golden.adapters.mrope import rope_delta
from vispe.multimodal import Image, Stream, create_scheme

DELTAS = {"max": "max", "ceil(max)": "ceil"}  # conventions of the package


def run(case):
    yield "float32", _package(case) if case.config("variant", None) == "span_per_block" else _authors(case)


def _authors(case):
    case.ignore("num_heads", "all heads have the same rotation")
    case.ignore("random_stride_set", "what the strides were drawn from; they are given")
    for name in ("image_start_id", "image_end_id"):
        case.ignore(name, "markers are text")
    tokens, version = case.config("num_image_token"), case.config("version")
    visual = (case.input("input_ids") == case.config("image_context_id")).long()
    stream = Stream.from_ids(
        visual, [Image(1, tokens, tiles=(1, n)) for n in case.input("num_tiles").tolist()]
    )
    stride, draws = case.config("stride"), None
    if version == "default":
        stride = tokens
    elif "drawn_strides" in case.inputs:
        draws = case.input("drawn_strides").flatten()[stream.blocks.picture.clamp(min=0)]
    scheme = create_scheme("v2pe", **({} if stride is None else {"stride": stride}))
    coordinates = scheme.coordinates(stream, draws=draws)
    if stride is None and draws is None:
        raise ValueError(f"a case of {version} without strides")
    ids = coordinates.ids.float()  # as the reference hands them on
    result = transformed(case, ids, scheme.allocation(case.config("head_dim") // 2))
    steps = case.outputs.get("decode_position_ids", torch.empty(0)).size
    result |= {"position_ids": ids[0, 0], "decode_position_ids": coordinates.decode(int(steps))[0, 0]}
    return requested(case, result)


def _package(case):
    types, mask = case.input("mm_token_type_ids"), case.input("attention_mask")
    tokens = case.input("input_ids")
    for kind, name in ((1, "image_token_id"), (2, "video_token_id")):
        if not torch.equal((tokens == case.config(name)) & mask.bool(), (types == kind) & mask.bool()):
            raise ValueError(f"types of tokens and {name} do not agree")
    for name in ("vision_start_token_id", "vision_end_token_id"):
        case.ignore(name, "markers are text")
    grids = (case.input(n) if n in case.inputs else None for n in ("image_grid_thw", "video_grid_thw"))
    stream = Stream.from_ids(
        types, *grids, mask=mask, merge=case.config("spatial_merge_size"), separate_frames=True
    )
    scheme = create_scheme("v2pe", stride=case.config("visual_stride"), per="picture")
    coordinates = scheme.coordinates(stream, padding=case.config("padding_position"))
    end, _, length = case.config("rope_delta_convention").partition("+1 - ")
    deltas = rope_delta(stream, coordinates, DELTAS[end.strip()], length == "padded length")
    return requested(case, {"position_ids": coordinates.ids.expand(3, -1, -1), "rope_deltas": deltas})
