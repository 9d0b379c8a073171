"""Golden cases of spectra of features and tables."""

import numpy as np

from vispe.evaluate.features.spectrum import alpha_req, eigenspectrum, rankme, stable_rank, width


def run(case):
    kind = case.config("what")
    if kind == "alpha_req":
        x = case.input("x")
        shares = eigenspectrum(x)
        result = {
            "eigenspectrum": shares.numpy(),
            "alpha": np.array([alpha_req(shares, case.config("first"), case.config("last"))]),
            "rankme": np.array([rankme(x)]),
        }
    elif kind == "stable_rank":
        result = {"stable_rank": np.array([stable_rank(case.input("x"))])}
    else:
        table = case.input("table")
        similarity, wide = width(table, case.config("threshold"))
        rows = table[case.input("rows")]
        result = {
            "similarity": similarity.numpy(),
            "width": np.array([wide]),
            "stable_rank": np.array([stable_rank(rows)]),
        }
    yield kind, {name: value for name, value in result.items() if name in case.output_names}
