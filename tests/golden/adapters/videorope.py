"""Golden cases of VideoRoPE and the baselines of its authors' code."""

from tests.golden.adapters.mrope import delta_of, outputs, rope_delta, sections_of, stream_of
from vispe.multimodal import create_scheme


def run(case):
    variant = case.config("variant")
    for key in ("python_random_seed", "scale_draw"):
        case.ignore(key, "nothing is drawn")
    scheme = SCHEMES[variant](case)
    stream, padding, ends = stream_of(case), case.config("padding_position"), delta_of(case)
    # the sum of two counts that both have padding; the delta is that of the frames alone
    if variant == "tad_rope":
        result = scheme.coordinates(stream, padding=2 * padding)
        delta = result.delta() - (~result.mask).sum(1, keepdim=True)
    else:
        result = scheme.coordinates(stream, padding=padding)
        delta = rope_delta(stream, result, *ends)
    yield "float32", outputs(case, result, delta)


def _videorope(case):
    return create_scheme("videorope", sections=sections_of(case), scale=case.config("temporal_scale"))


def _mrope(case):
    case.ignore("temporal_scale", "frames have a distance of one step")
    return create_scheme("mrope", sections=sections_of(case))


def _one_axis(name):
    def scheme(case):
        case.ignore("temporal_scale", "frames have a distance of one step")
        case.ignore("mrope_section", "there is one axis")
        return create_scheme(name)

    return scheme


SCHEMES = {
    "videorope": _videorope,
    "m_rope": _mrope,
    "tad_rope": _one_axis("tad_rope"),
    "vanilla_rope": _one_axis("rope1d"),
}
