"""Run seeds and print one line of JSON for each that fails, then a summary.

python -m tests.attention.fuzz FIRST LAST                        (backends of the CPU, up to 1,300 tokens)
python -m tests.attention.fuzz FIRST LAST --blocks               (the same in blocks, up to 75 tokens)
TRITON_INTERPRET=1 python -m tests.attention.fuzz FIRST LAST     (fused kernels, up to 75 tokens)
python -m tests.attention.fuzz FIRST LAST --cuda                 (fused kernels on a GPU, up to 1,300 tokens)

With TRITON_INTERPRET=1, --blocks selects small tiles, so that small grids have many.
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
from vispe.attention.backends import blocked, blocks, content_cpu
from vispe.attention.backends.triton import tiles as sizes
from vispe.attention.bias.cache import masks
from vispe.errors import BackendUnavailable

TILES = sizes.Tiles(32, 16, 4, 1)


def use_blocks(patch: pytest.MonkeyPatch) -> None:
    """Compute biases of all sizes in small blocks, until `patch` is undone."""
    for name in ("MIN_QUERIES", "MIN_CONTENT_TOKENS", "MIN_CONTENT_BYTES", "SHORTEST_ROW"):
        patch.setattr(blocked, name, 0)
    patch.setattr(blocks.attention, "FORWARD_BLOCK", 2800)
    patch.setattr(blocks.attention, "BACKWARD_BLOCK", 1500)
    patch.setattr(masks, "MAX_MASK_BYTES", 0)
    patch.setattr(content_cpu, "MIN_BIAS_BYTES", 0)
    patch.setattr(content_cpu, "ROWS", 16)
    patch.setattr(content_cpu, "SDPA_ROWS", 16)


def use_small_tiles(patch: pytest.MonkeyPatch) -> None:
    """Run all kernels with tiles of 32 x 16 tokens, until `patch` is undone."""
    for key, table in sizes.TABLES.items():
        patch.setitem(sizes.TABLES, key, {name: dict.fromkeys((64, 128), TILES) for name in table})


def main(first: int, last: int, blocks: bool = False, cuda: bool = False) -> None:
    """Run the seeds from `first` up to, but not including, `last`."""
    interpreted, counts, start = os.environ.get("TRITON_INTERPRET") == "1", Counter(), time.time()
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if cuda:
        torch.set_default_device("cuda")
    if interpreted:
        from tests.attention.triton.interpreter import make_faster

        make_faster(pytest.MonkeyPatch())
    if blocks:
        (use_small_tiles if interpreted else use_blocks)(pytest.MonkeyPatch())
    for seed in range(first, last):
        call = RandomCall(seed, small=interpreted or blocks)
        judge = Judge(call)
        for backend in ("triton", "auto") if interpreted or cuda else call.backends():
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
    main(int(sys.argv[1]), int(sys.argv[2]), blocks="--blocks" in sys.argv, cuda="--cuda" in sys.argv)
