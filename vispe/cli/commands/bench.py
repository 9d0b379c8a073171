"""`vispe bench`: how fast this machine computes attention with a position bias."""

from typing import Literal

POSITIONALS = ("what",)


def bench(
    what: Literal["attention"],
    minutes: float = 4.5,
    device: Literal["auto", "cuda", "cpu"] = "auto",
    json: bool = False,
) -> int:
    """Measure on this machine which backend is the fastest for attention with a position bias.

    Fused kernels, SDPA with a dense bias, FlexAttention, extra columns and plain matrix products compute the same
    shapes in turn. Before that, output and gradients are checked against float64: when a check fails, nothing is
    timed and the exit code is 1. Every line says the fastest that is exact.

    Args:
        what: what to measure.
        minutes: start no measurement after these; what is most useful comes first.
        device: auto takes the GPU if there is one.
        json: print JSON, with every number.

    Examples:
        vispe bench attention
        vispe bench attention --minutes 2 --device cpu --json
    """
    import warnings
    from json import dumps
    from sys import stderr

    import torch

    from vispe.errors import OptionError
    from vispe.evaluate.speed import Bench, judge, plan_for, winners

    if not minutes > 0:
        raise OptionError(f"bench needs --minutes above 0, got {minutes:g}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise OptionError("bench was given --device cuda, but torch finds no GPU; use --device cpu.")
    where = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    run = Bench(
        plan_for("quick", where),
        where,
        minutes=minutes,
        say=lambda text: print(text, file=stderr, flush=True),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?i).*(kernel|attention)", UserWarning)  # of SDPA, at length
        passed = run.check()
        missing = run.run() if passed else 0
    run.state["targets"] = judge(run.state) if passed else []
    if json:
        print(dumps(run.state | {"missing": missing}, indent=1))
    elif passed:
        print(winners(run.state))
        if missing:
            print(f"{missing} measurements did not fit into {minutes:g} minutes; --minutes gives more time.")
    if passed is None:
        raise OptionError(f"{minutes:g} minutes are too short for the checks; give more with --minutes.")
    if not passed and not json:
        print("A check against float64 failed, so nothing was timed.")
    return 0 if passed else 1
