"""Golden cases of the theoretical receptive field of a bias."""

import numpy as np

from vispe.evaluate.attention.receptive_field import one_sided, plane


def run(case):
    bias = case.config("form"), case.config("parameter"), np.atleast_1d(case.config("eps")).tolist()
    result = {
        "one_sided": np.array(one_sided(*bias, case.config("distances"))),
        "plane": np.array(plane(*bias, case.config("grid_radius"))),
    }
    yield "fields", {name: value for name, value in result.items() if name in case.output_names}
