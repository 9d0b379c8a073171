"""Golden cases of the vision tower of MiniMax M3 VL: rotation by frame, row and column, in window order."""

from tests.golden.adapters._packed import rotated
from tests.golden.adapters._rotary import requested
from vispe.grid import packed_positions


def run(case):
    pos = packed_positions(case.input("grid_thw"), case.config("spatial_merge_size"))
    result = rotated(case, "rope_axial.minimax", pos) | {"position_ids": pos.coords[0].long()}
    if case.config("rotary_dim", result["cos"].shape[-1]) != result["cos"].shape[-1]:
        raise ValueError(f"{result['cos'].shape[-1]} channels are rotated")
    yield "float32", requested(case, result)
