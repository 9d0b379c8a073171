"""Run seeds and print one line of JSON for each that fails, then a summary.

python -m tests.attention.fuzz FIRST LAST                        (backends of the CPU, up to 1,300 tokens)
TRITON_INTERPRET=1 python -m tests.attention.fuzz FIRST LAST     (fused kernels, up to 75 tokens)
"""

import json
import os
import sys
import time
import traceback
import warnings
from collections import Counter

import pytest
import torch

from tests.attention.fuzz.judge import Judge
from tests.attention.fuzz.random_calls import RandomCall
from vispe.errors import BackendUnavailable


def main(first: int, last: int) -> None:
    """Run the seeds from `first` up to, but not including, `last`."""
    interpreted, counts, start = os.environ.get("TRITON_INTERPRET") == "1", Counter(), time.time()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if interpreted:
        from tests.attention.triton.interpreter import make_faster

        make_faster(pytest.MonkeyPatch())
    for seed in range(first, last):
        call = RandomCall(seed, small=interpreted)
        judge = Judge(call)
        for backend in ("triton", "auto") if interpreted else call.backends():
            try:
                cancellation, failures = judge.errors(backend)
            except BackendUnavailable:
                counts[f"{backend}: unsupported"] += 1
                continue
            except Exception:  # an error of the call is a failure of this seed, not the end of the run
                cancellation, failures = {}, {"exception": traceback.format_exc()[-500:]}
            outcome = "failed" if failures else "passed, with cancellation" if cancellation else "passed"
            counts[f"{backend}: {outcome}"] += 1
            if failures:
                record = {"seed": seed, "backend": backend, "call": call.label, "failures": failures}
                sys.stdout.write(json.dumps(record) + "\n")
                sys.stdout.flush()
    summary = {"seeds": [first, last], "seconds": round(time.time() - start), **dict(sorted(counts.items()))}
    sys.stdout.write(json.dumps(summary) + "\n")


if __name__ == "__main__":
    main(int(sys.argv[1]), int(sys.argv[2]))
