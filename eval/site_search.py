"""Build the documentation and search its index for standard terms that are not names of vispe.

    python eval/site_search.py                    # build into a temporary folder, then search
    python eval/site_search.py --site build/site  # search a site that was built before

A term is found if a section of a page outside of the reference contains its words in this order, in any case; hyphens
count as spaces, and the last word may continue (`embedding` finds `embeddings`). The program prints a page for each
term, one with the term in a heading if there is one, and fails if a term is missing.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
TERMS = (
    # attention and kernels
    *(
        "attention mask",
        "attention bias",
        "backend",
        "dispatch",
        "fused kernel",
        "FlexAttention",
        "log-sum-exp",
    ),
    *(
        "softmax",
        "dropout",
        "head_dim",
        "KV cache",
        "cross-attention",
        "class token",
        "register token",
        "low rank",
        "cache",
    ),
    # encodings
    *("positional encoding", "position embedding", "rotary embedding", "RoPE", "ALiBi", "relative position"),
    *("frequency", "extrapolation", "interpolation", "resample", "sampler", "coordinates", "external memory"),
    # models
    *("checkpoint", "monkey patch", "import hook", "LoRA", "quantization", "torch.compile", "ONNX", "export"),
    *("fine-tune", "vision-language model", "packing", "serving", "weights", "sliding window"),
    # training
    *(
        "dataset",
        "dataloader",
        "trainer",
        "optimizer",
        "learning rate",
        "scheduler",
        "distillation",
        "teacher",
    ),
    *("retrofit", "loss", "augmentation", "seed"),
    # measurements
    *(
        "equivariance",
        "invariance",
        "linear probe",
        "occlusion",
        "perturbation",
        "ablation",
        "saliency",
        "baseline",
    ),
    *("receptive field", "attention sink", "confidence interval", "bootstrap", "figure"),
    # micrographs
    *(
        "scribble",
        "annotation",
        "label map",
        "uncertainty",
        "calibration",
        "out-of-distribution",
        "guided filter",
    ),
    *("cluster", "zarr", "pixel size"),
)


def build(folder: Path) -> None:
    """Build the site into a folder."""
    command = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(folder)]
    done = subprocess.run(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), "NO_MKDOCS_2_WARNING": "1"},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise SystemExit(f"mkdocs failed:\n{done.stderr[-2000:]}")


def pages_of(site: Path) -> dict[str, list[str]]:
    """Return the addresses of the sections that contain each term; those with the term in the heading come first."""
    sections = json.loads((site / "search" / "search_index.json").read_text(encoding="utf-8"))["docs"]
    texts = [
        (s["location"] or "index", plain(s["title"]), plain(s["text"]))
        for s in sections
        if not s["location"].startswith("reference/")  # lists of names, which do not explain a term
    ]
    result = {}
    for term in TERMS:
        pattern = re.compile(r"\b" + re.escape(plain(term)))
        headings = [page for page, title, _ in texts if pattern.search(title)]
        result[term] = headings + [page for page, _, text in texts if pattern.search(text)]
    return result


def plain(text: str) -> str:
    """Return text in lower case without tags, with single spaces for hyphens and white space."""
    return re.sub(r"[\s\-\u2010\u2011]+", " ", re.sub(r"<[^>]+>", " ", text)).lower()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--site", type=Path, help="folder of a site that was built before")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        if options.site is None:
            build(Path(folder))
        pages = pages_of(options.site or Path(folder))
    for term, found_on in pages.items():
        print(f"{term:24} {len(found_on):4}  {found_on[0] if found_on else 'MISSING'}")
    missing = [term for term, found_on in pages.items() if not found_on]
    print(f"{len(TERMS) - len(missing)} of {len(TERMS)} terms are found.")
    sys.exit(bool(missing))


if __name__ == "__main__":
    main()
