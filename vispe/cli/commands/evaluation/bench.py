"""`vispe bench`: speed of the attention backends on this machine."""

from typing import Literal

POSITIONALS = ("what",)


def bench(
    what: Literal["attention"],
    minutes: float = 4.5,
    device: Literal["auto", "cuda", "cpu"] = "auto",
    json: bool = False,
) -> int:
    """Benchmark the attention backends for attention with a position bias on this machine.

    Times fused kernels, SDPA with a dense bias, FlexAttention, extra columns and plain matrix products on the same
    shapes. Output and gradients are first checked against float64; if a check fails, nothing is timed and the exit
    code is 1. Each line names the fastest exact backend.

    Args:
        what: operation to benchmark.
        minutes: time limit; no measurement is started after it. The most useful ones run first.
        device: auto uses the GPU if available.

    Examples:
        vispe bench attention
        vispe bench attention --minutes 2 --device cpu --json
    """
    import warnings
    from json import dumps
    from sys import stderr

    import torch

    from vispe.errors import OptionError
    from vispe.experimental.speed import Bench, judge, plan_for, winners

    if not minutes > 0:
        raise OptionError(f"bench: --minutes must be above 0, got {minutes:g}.")
    if device == "cuda" and not torch.cuda.is_available():
        raise OptionError("bench: torch finds no GPU, got --device cuda. Use --device cpu.")
    target = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    run = Bench(
        plan_for("quick", target),
        target,
        minutes=minutes,
        say=lambda text: print(text, file=stderr, flush=True),
    )
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?i).*(kernel|attention)", UserWarning)  # long warnings of SDPA
        passed = run.check()
        missing = run.run() if passed else 0
    run.state["targets"] = judge(run.state) if passed else []
    if json:
        print(dumps(run.state | {"missing": missing}, indent=1))
    elif passed:
        print(winners(run.state))
        if missing:
            print(
                f"{missing} measurements were skipped after {minutes:g} minutes. Increase --minutes to run them."
            )
    if passed is None:
        raise OptionError(f"bench: the checks did not finish in {minutes:g} minutes. Increase --minutes.")
    if not passed and not json:
        print("A check against float64 failed, so nothing was timed.")
    return 0 if passed else 1
