"""Golden cases of the vision tower of Kimi K2.5: rotation, added table, and pooling over frames and windows."""

import torch

import vispe
from tests.golden.adapters._packed import rotated
from tests.golden.adapters._rotary import requested
from vispe.grid import packed_positions, pool_windows


def run(case):
    grids = case.input("grid_thw")
    spec = "rope_axial.moonvit"
    result = rotated(case, spec, packed_positions(grids, frames=False))
    shape = case.config("table_height"), case.config("table_width")
    table = case.param("table")
    if tuple(table.shape[:2]) != shape:
        raise ValueError(f"the table is {tuple(table.shape)}, the configuration says {shape}")
    encoding = vispe.create_encoding(
        "learned_video.moonvit",
        dim=table.shape[-1],
        grid=shape,
        frames=case.config("pos_emb_time"),
        temperature=case.config("time_theta", 10000.0),
    )
    encoding.load_state_dict({"weight": table.flatten(0, 1)[None]})
    result["added"] = torch.cat([encoding.table(vispe.Grid(size).positions())[0] for size in grids.tolist()])
    if case.backward(**{"cotangent.added": result["added"]}):
        result["grad.table"] = encoding.weight.grad.reshape(table.shape)
    if "hidden" in case.inputs:
        result["pooled"] = pool_windows(case.input("hidden"), grids, tuple(case.config("merge_kernel_size")))
    yield "float32", requested(case, result)
