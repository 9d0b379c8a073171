"""Golden cases of the ranks of keys and of their rotary bands."""

from vispe.evaluate.attention.rotary_bands import band_ranks, effective_rank


def run(case):
    keys = case.input("k")
    layout, top = case.config("layout", "half"), case.config("top", keys.shape[-1])
    result = {"effective_rank": effective_rank(keys, top), "band_rank": band_ranks(keys, layout)}
    yield "ranks", {name: value for name, value in result.items() if name in case.output_names}
