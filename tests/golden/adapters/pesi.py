"""Golden cases of the PESI scores."""

from vispe.experimental.measures.pesi import pesi


def run(case):
    for key in list(case.settings):
        case.ignore(key, "the definition, which has no choices here")
    table = case.input("pe")
    plain = pesi(table)
    result = {
        "undirected_monotonicity": plain.undirected_monotonicity,
        "undirected_asymmetry": plain.undirected_asymmetry,
    }
    for name in case.output_names:
        prefix, _, count = name.rpartition("_")
        if prefix == "directed_monotonicity" and count.isdigit():
            result[name] = pesi(table, int(count)).directed_monotonicity
    yield "scores", {name: value for name, value in result.items() if name in case.output_names}
