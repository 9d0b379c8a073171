"""Run timm's own model tests with an encoding in every ViT, and compare the counts with stock timm.

    python eval/timm_contracts.py [--encodings alibi2d peg ...] [--models vit_tiny_patch16_224 ...] [--workers 2]

Fetches the source release of the installed timm from the package index for its tests (or takes `--source DIR`) and
writes eval/results/timm_contracts.json after every encoding; a run that was stopped goes on where it was. What is
left out, for stock timm and for every encoding alike, is in `LEFT_OUT`, with the reason.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tarfile
import tempfile
from importlib import metadata
from pathlib import Path

import checkout  # noqa: F401  (finds vispe)

import vispe

OUT = Path(__file__).parent / "results" / "timm_contracts.json"
MODELS = (
    "vit_tiny_patch16_224",
    "deit_tiny_distilled_patch16_224",
    "vit_small_patch14_reg4_dinov2",
    "vit_xsmall_patch16_clip_224",
    "vit_base_patch32_siglip_256",
    "vit_pwee_patch16_reg1_gap_256",
    "vit_dwee_patch16_reg1_gap_256",
    "vit_tiny_r_s16_p8_224",
)
LEFT_OUT = {
    "torchscript": "a converted model cannot be scripted: a script knows no positions that follow the grid",
    "_fx": "torch.fx records tensors and plain numbers only, and the context of positions is neither; "
    "torch.export, which took its place, is tested",
    "load_pretrained": "needs the weights of the hub; loading is tested with local state dicts",
}
DEPTH = 4  # blocks of every model, stock too: the contracts are the same, and half of the tests build models
PLUGIN = f"""
import os, timm, timm.models, vispe
spec = os.environ.get("VISPE_SPEC")
added = {{"depth": {DEPTH}, **({{"pos_embed": spec}} if spec else {{}})}}
stock = timm.create_model
def create_model(name, *args, **kwargs):
    return stock(name, *args, **{{**added, **kwargs}})
timm.create_model = timm.models.create_model = create_model
"""


def main() -> None:
    """Run stock timm once, then every encoding that the file does not have."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--encodings", nargs="+", default=vispe.list_encodings(ndim=2))
    parser.add_argument("--models", nargs="+", default=MODELS)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--source", type=Path, help="folder with timm's tests/")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    versions = {p: metadata.version(p) for p in ("timm", "torch")} | {"vispe": vispe.__version__}
    kept = json.loads(args.out.read_text())["rows"] if args.out.exists() else []
    rows = {r["encoding"]: r for r in kept}
    with tempfile.TemporaryDirectory() as folder:
        source = args.source or fetch(Path(folder), versions["timm"])
        (Path(folder) / "vispe_in_timm.py").write_text(PLUGIN)
        for spec in ("stock", *args.encodings):
            if spec in rows and rows[spec]["models"] == list(args.models):
                continue
            counts, failed = run(spec, args.models, source, Path(folder), args.workers)
            rows[spec] = {"encoding": spec, "models": list(args.models), **counts, "not_passed": failed}
            args.out.write_text(
                json.dumps(
                    {"versions": versions, "depth": DEPTH, "left_out": LEFT_OUT, "rows": list(rows.values())},
                    indent=1,
                )
                + "\n"
            )
            print(spec, counts, *failed, sep="\n  ", flush=True)
    wanted = {k: rows["stock"].get(k) for k in ("passed", "skipped")}
    other = [s for s, r in rows.items() if {k: r.get(k) for k in wanted} != wanted]
    sys.exit(f"Counts differ from stock timm ({wanted}): {', '.join(other)}" if other else 0)


def fetch(folder: Path, version: str) -> Path:
    """Download the source release of timm and return where it lies."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "timm", "-d"]
    subprocess.run([*command, str(folder), f"timm=={version}"], check=True)
    with tarfile.open(next(folder.glob("timm-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"timm-{version}"


def run(
    spec: str, models: list[str], source: Path, plugins: Path, workers: int
) -> tuple[dict[str, int], list[str]]:
    """Return how many tests passed, skipped or failed, and the names of those that did not pass."""
    chosen = " or ".join(models)
    command = [sys.executable, "-m", "pytest", "-q", "-rfE", "-p", "vispe_in_timm", "-n", str(workers)]
    without = "".join(f" and not {name}" for name in LEFT_OUT)
    command += ["-k", f"({chosen}){without}", "-W", "ignore", "tests/test_models.py"]
    paths = os.pathsep.join(filter(None, (str(plugins), os.environ.get("PYTHONPATH"))))
    env = {**os.environ, "PYTHONPATH": paths, "VISPE_SPEC": "" if spec == "stock" else spec}
    done = subprocess.run(command, cwd=source, env=env, capture_output=True, text=True, check=False)
    last = (done.stdout.strip().splitlines() or [""])[-1]
    counts = {name: int(n) for n, name in re.findall(r"(\d+) (passed|failed|skipped|errors?)", last)}
    failed = [
        line.split("test_models.py::")[-1] for line in done.stdout.splitlines() if line.startswith("FAILED")
    ]
    if not counts:
        sys.exit(f"timm's tests did not run:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return counts, [line[:300] for line in failed]


if __name__ == "__main__":
    main()
