"""Golden cases of the scores and classes of attention heads."""

from vispe.evaluate.attention.head_health import PATTERNS, Thresholds, language_scores


def run(case):
    for key in ("L", "H", "T"):
        if key in case.settings:
            case.ignore(key, "the shape of the maps")
    if "causal" in case.settings:
        case.ignore("causal", "the maps are given; the scores do not depend on how they were masked")
    names = [name.lower().replace("bos-", "") for name in case.config("pattern_codes", list(PATTERNS))]
    if names != list(PATTERNS):
        raise ValueError(f"the classes of the case are {names}")
    result = language_scores(
        case.input("attn"),
        Thresholds(**case.config("thresholds", {})),
        window=case.config("local_window", 3),
        clamp=case.config("entropy_clamp", 1e-10),
    )
    yield "scores", {name: value for name, value in vars(result).items() if name in case.output_names}
