"""Golden cases of HoPE for vision-language models, by draws and, if all draws are equal, by the option."""

import torch

from tests.golden.adapters.mrope import delta_of, outputs, rope_delta, sections_of, stream_of
from vispe.multimodal import create_scheme


def run(case):
    if case.config("variant") != "hope":
        raise ValueError(f"unknown variant {case.config('variant')}")
    case.ignore("python_random_seed", "what was drawn is given")
    case.ignore("scale_draw", "one for each image in the order of the sequence")
    stream, choices = stream_of(case), case.config("temporal_scale")
    choices = tuple(choices) if isinstance(choices, list) else (choices,)
    draws = torch.ones(len(stream.blocks.tokens), dtype=torch.float64)
    draws[stream.blocks.visual] = case.input("drawn_scales")
    padding = case.config("padding_position")
    scheme = create_scheme("hope_vlm", sections=sections_of(case), train_scales=choices)
    result = scheme.coordinates(stream, draws=draws, padding=padding)
    yield "draws", outputs(case, result, rope_delta(stream, result, *delta_of(case)))
    if len(choices) == 1:
        scheme = create_scheme("hope_vlm", sections=sections_of(case), scale=choices[0])
        result = scheme.coordinates(stream, padding=padding)
        yield "scale", outputs(case, result, rope_delta(stream, result, *delta_of(case)))
