"""Golden cases of orthogonal polynomials at the cell centres of a grid; compared in float64."""

import vispe


def run(case):
    grid, degree = tuple(case.config("grid")), case.config("degree")
    if case.config("coordinates", "cell centres on [-1,1]") != "cell centres on [-1,1]":
        raise ValueError(f"coordinates are {case.config('coordinates')!r}, not cell centres")
    options = {
        "dim": 8,
        "degree": degree,
        "basis": case.config("basis", "legendre"),
        "orthonormal": case.config("orthonormal", False),
    }
    result = {"table": _values(grid, options)}
    for name, side in zip(("y", "x") if len(grid) == 2 else ("t", "y", "x"), grid, strict=False):
        result[name] = _values((side,), options)
    yield "features", {name: value for name, value in result.items() if name in case.output_names}


def _values(shape, options):
    encoding = vispe.create_encoding("legendre", axes=len(shape), **options)
    return encoding.features(encoding.place(vispe.Grid(shape).positions()))[0]
