"""Golden cases of the three-cell benchmark: labels and scores."""

from vispe.experimental.three_cell import dataset


def run(case):
    if list(case.config("label_order")) != list(dataset.BITS):
        raise ValueError(f"the labels of the case are ordered {case.config('label_order')}")
    if "cells_rgb_xy" in case.inputs:
        case.ignore("vector_sum_rule", "a sentence: beyond the last cell along both axes")
        cells = case.input("cells_rgb_xy").long()
        yield "labels", {"labels": dataset.labels(cells, case.config("grid"))}
        return
    case.ignore("printed_decimals", "the tolerance allows for it")
    result = dataset.score(case.input("logits"), case.input("labels"), case.config("threshold", 0.5))
    yield (
        "score",
        {
            "percent_distance_orientation_area_vectorsum": [
                result.distance,
                result.orientation,
                result.area,
                result.vector_sum,
            ],
            "percent_average": result.average,
        },
    )
