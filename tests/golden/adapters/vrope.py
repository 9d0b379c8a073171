"""Golden cases of VRoPE: positions of every pair, and rotated queries and keys."""

from tests.golden.adapters._rotary import transformed
from vispe.multimodal import Image, Stream, Text, Video, create_scheme


def run(case):
    case.ignore("half_time_dim_requested", "the reference switches its pairs of time off")
    case.ignore("num_heads", "all heads have the same rotation")
    if case.config("half_time_dim_used", 0):
        raise ValueError("the release has no pairs of time")
    scheme, pairs = create_scheme("vrope"), case.config("half_head_dim")
    stream = Stream.of([[_segment(*row) for row in case.input("segments").tolist()]])
    coordinates, axis = scheme.coordinates(stream), scheme.allocation(pairs)
    result = transformed(case, coordinates.ids, axis, double=True)
    result["position_ids"] = coordinates.ids[axis, 0].T
    result["decode_position_ids"] = coordinates.decode(case.config("decode_steps"))[axis, 0].T
    result |= {"current_index": coordinates.next[0], "total_token_len": stream.lengths[0]}
    yield "float32", {name: value for name, value in result.items() if name in case.output_names}


def _segment(kind, t, h, w):
    if kind in (0, 3):
        return Text(t, shared=kind == 3)
    return Image(h, w) if kind == 1 else Video(t, h, w)
