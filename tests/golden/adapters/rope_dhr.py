"""Golden cases of RoPE-DHR, with the order of tiles and the positions of the reference."""

from vispe.multimodal import Image, Stream, create_scheme
from vispe.multimodal.schemes.rope_dhr import SHRINK, media_ids

ORDERS = {"columns outer, rows inner": "column_major", "rows outer, columns inner": "row_major"}


def run(case):
    case.ignore("grids_columns_rows", "the same as the input tile_grid")
    case.ignore("tiles_per_image", "the same as the input num_tiles")
    if case.config("epsilon") != SHRINK:
        raise ValueError(f"tiles are made smaller by {case.config('epsilon')}")
    side, tokens = case.config("thumbnail_side"), case.input("input_ids")
    if side * side != case.config("tokens_per_tile"):
        raise ValueError("tiles and thumbnail have different sizes")
    start, end = case.config("image_start_id"), case.config("image_end_id")
    inside = (tokens == start).long().cumsum(1) - (tokens == end).long().cumsum(1)
    visual = inside * (tokens != start)
    images = [
        Image(side, side, (rows, columns), "last") if n > 1 else Image(side, side)
        for (columns, rows), n in zip(
            case.input("tile_grid").tolist(), case.input("num_tiles").tolist(), strict=True
        )
    ]
    order = ORDERS[case.config("tile_order_used_by_reference")]
    stream = Stream.from_ids(visual, images)
    coordinates = create_scheme("rope_dhr", tile_order=order, sampling="corner").coordinates(stream)
    yield (
        "float64",
        {"position_ids": coordinates.ids[0], "media_position_ids": media_ids(stream, coordinates)},
    )
