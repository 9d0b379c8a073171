"""Golden cases of the PESI scores."""

from vispe.experimental.measures.pesi import pesi


def run(case):
    for key in list(case.settings):
        case.ignore(key, "the definition, which has no choices here")
    table = case.input("pe")
    plain = pesi(table)
    found = {
        "undirected_monotonicity": plain.undirected_monotonicity,
        "undirected_asymmetry": plain.undirected_asymmetry,
    }
    for name in case.output_names:
        prefix, _, count = name.rpartition("_")
        if prefix == "directed_monotonicity" and count.isdigit():
            found[name] = pesi(table, int(count)).directed_monotonicity
    yield "scores", {name: value for name, value in found.items() if name in case.output_names}
