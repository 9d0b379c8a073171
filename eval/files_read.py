"""Count the files of vispe whose functions run in a call, as a measure of locality of the code.

Two calls: a ViT-Ti of timm with `alibi2d`, created and run once, and `vispe segment` on an image of 64 x 64 pixels with
two scribbles. Bodies of modules and classes do not count, functions called while modules are imported do.

    python eval/files_read.py
"""

from __future__ import annotations

import json
import sys
import tempfile
import threading
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import Any

import checkout  # noqa: F401  (finds vispe)
import numpy as np

from vispe.utils.files import write_json
from vispe.utils.version import __version__

RESULT = Path(__file__).resolve().parent / "results" / "files_read.json"
PACKAGE = f"{Path(__file__).resolve().parents[1] / 'vispe'}/"
OPTIMIZED = 1  # flag of code objects: functions have it, bodies of modules and classes do not


def main() -> None:
    calls = {"alibi2d forward": forward, "segment 64 px": segment}
    files = {name: traced(call) for name, call in calls.items()}
    counts = {name: len(paths) for name, paths in files.items()}
    write_json(RESULT, {"versions": {"vispe": __version__}, "counts": counts, "files": files}, force=True)
    print(json.dumps(counts))


def traced(call: Callable[[], Any]) -> list[str]:
    """Return the files of the package in which a function runs during a call, in all threads."""
    paths: set[str] = set()

    def profile(frame: FrameType, event: str, _: Any) -> None:
        code = frame.f_code
        if event == "call" and code.co_flags & OPTIMIZED and code.co_filename.startswith(PACKAGE):
            paths.add(code.co_filename.removeprefix(PACKAGE))

    threading.setprofile(profile)
    sys.setprofile(profile)
    try:
        call()
    finally:
        sys.setprofile(None)
        threading.setprofile(None)  # type: ignore[arg-type]
    return sorted(paths)


def forward() -> None:
    """Create a converted ViT-Ti and run it on one image."""
    import timm
    import torch

    import vispe  # noqa: F401  (pos_embed by name)

    timm.create_model("vit_tiny_patch16_224", pos_embed="alibi2d").eval()(torch.zeros(1, 3, 224, 224))


def segment() -> None:
    """Segment an image of two textures, from two scribbles."""
    from PIL import Image

    from vispe.cli.main import main as command

    with tempfile.TemporaryDirectory() as folder:
        image = np.random.default_rng(0).integers(0, 60, (64, 64), np.uint8)
        image[:, 32:] += 120
        labels = np.zeros_like(image)
        labels[4:9, 4:9], labels[50:55, 50:55] = 1, 2
        for name, values in {"image": image, "scribbles": labels}.items():
            Image.fromarray(values).save(f"{folder}/{name}.png")
        command(["segment", f"{folder}/image.png", f"--labels={folder}/scribbles.png", f"--out={folder}/out"])


if __name__ == "__main__":
    main()
