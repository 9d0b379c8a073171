"""Run timm's own model tests with an encoding in every ViT, and compare every outcome with stock timm.

    python eval/timm_contracts.py [--sets small wide families windows] [--encodings alibi2d peg ...] [--num-workers 1]

Fetches the source release of the installed timm from the package index for its tests (or takes `--source DIR`) and
writes eval/results/timm_contracts.json after every encoding; an interrupted run resumes, and `--check` only reads that
file. `LEFT_OUT` lists the tests that are skipped, for stock timm and for every encoding.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tarfile
import tempfile
from collections import Counter
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (finds vispe)

import vispe

OUT = Path(__file__).parent / "results" / "timm_contracts.json"
SETS = {
    "small": (
        "vit_tiny_patch16_224",
        "deit_tiny_distilled_patch16_224",
        "vit_small_patch14_reg4_dinov2",
        "vit_xsmall_patch16_clip_224",
        "vit_base_patch32_siglip_256",
        "vit_pwee_patch16_reg1_gap_256",
        "vit_dwee_patch16_reg1_gap_256",
        "vit_tiny_r_s16_p8_224",
    ),
    # the smallest model of each kind of block, embedding, prefix, pooling and norm among timm's vit* and deit*
    "wide": (
        "deit3_small_patch16_224",
        "deit_tiny_distilled_patch16_224",
        "test_vit",
        "test_vit2",
        "test_vit3",
        "vit_base_mci_224",
        "vit_base_patch14_reg1_tipsv2",
        "vit_base_patch16_radio_v3",
        "vit_base_patch16_rpn_224",
        "vit_base_patch16_siglip_224",
        "vit_base_patch16_xp_224",
        "vit_dpwee_patch16_reg1_gap_256",
        "vit_dwee_patch16_reg1_gap_256",
        "vit_little_patch16_reg4_gap_256",
        "vit_medium_patch16_gap_240",
        "vit_pwee_patch16_reg1_gap_256",
        "vit_small_patch14_reg4_dinov2",
        "vit_small_patch16_18x2_224",
        "vit_tiny_patch16_224",
        "vit_tiny_r_s16_p8_224",
        "vit_wee_patch16_reg1_gap_256",
        "vit_xsmall_patch16_clip_224",
        "vitamin_small_224",
    ),
    "families": (
        "eva02_tiny_patch14_224",
        "naflexvit_base_patch16_gap",
        "vit_small_patch16_dinov3",
        "vit_small_patch16_rope_mixed_224",
    ),
    "windows": (
        "swin_tiny_patch4_window7_224",
        "swin_s3_tiny_224",
        "swinv2_tiny_window8_256",
        "samvit_base_patch16_224",
    ),
}
# encodings of the larger sets: a bias, a rotation, content and values
FEW = (
    "alibi2d",
    "rope_mixed",
    "irpe",
)
WINDOWED = ("alibi2d", "rpb_cpb", "irpe")  # models of these tests have one head, which lookhere refuses
REFUSED = {("families", "peg")}  # NaFlexVit cannot mix tokens between blocks
LEFT_OUT = {
    "torchscript": "a converted model cannot be scripted: a script knows no positions that follow the grid",
    "load_pretrained": "needs the weights of the hub; loading is tested with local state dicts",
    "features_pretrained": "needs the weights of the hub",
}
EXPLAINED = {  # tests that are run and may differ
    "test_swin_family_script_after_resize": "scripts the model, see what is omitted",
    "test_radio_checkpoint_filter": "reads values of timm's own absolute table, which an encoding takes out",
} | dict.fromkeys(  # an encoding and a model
    (f"{spec} vit_dwee_patch16_reg1_gap_256" for spec in ("carope", "selective_rope", "tpe2d")),
    "refused: reads tokens and turns heads of one width, and differential attention has heads of half the width",
)
DEPTH = 4  # blocks of every model, stock too: the contracts are the same, and half of the tests build models
PLUGIN = f"""
import json, os, timm, timm.models, vispe
models, left_out = (os.environ[name].split() for name in ("VISPE_MODELS", "VISPE_LEFT_OUT"))
spec = os.environ.get("VISPE_SPEC")
added = {{"pos_embed": spec}} if spec else {{}}
stock = timm.create_model
outcomes = {{}}
def create_model(name, *args, **kwargs):
    short = {{"depths": (2, 2, 2, 2)}} if name.startswith("swin") else {{"depth": {DEPTH}}}
    return stock(name, *args, **{{**short, **added, **kwargs}})
timm.create_model = timm.models.create_model = create_model
def pytest_collection_modifyitems(items):
    def chosen(item):
        params = getattr(getattr(item, "callspec", None), "params", {{}})
        return params.get("model_name") in models and not any(word in item.name for word in left_out)
    items[:] = [item for item in items if chosen(item)]
def pytest_runtest_logreport(report):
    if report.when == "call" or report.outcome != "passed":
        outcomes[report.nodeid.split("::")[-1]] = report.outcome
def pytest_sessionfinish(session):
    if not hasattr(session.config, "workerinput"):
        with open(os.environ["VISPE_OUTCOMES"], "w") as file:
            json.dump(outcomes, file)
"""


def main() -> None:
    """Run stock timm once for every set, then every encoding that the file does not have."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--sets", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument(
        "--encodings", nargs="+", help="all for the small set, three for the others by default"
    )
    parser.add_argument("--num-workers", type=int, default=1)
    parser.add_argument("--source", type=Path, help="folder with timm's tests/")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--check", action="store_true")
    args = parser.parse_args()
    versions = {p: metadata.version(p) for p in ("timm", "torch")} | {"vispe": vispe.__version__}
    head = {"versions": versions, "depth": DEPTH, "left_out": LEFT_OUT, "sets": SETS}
    rows = _kept(args.out, head)
    if not args.check:
        with tempfile.TemporaryDirectory() as folder:
            source = args.source or fetch(Path(folder), versions["timm"])
            (Path(folder) / "vispe_in_timm.py").write_text(PLUGIN)
            for name, spec in _wanted(args.sets, args.encodings):
                if (name, spec) in rows:
                    continue
                outcomes = run(spec, SETS[name], source, Path(folder), args.num_workers)
                rows[name, spec] = {
                    "set": name,
                    "encoding": spec,
                    **_counts(outcomes, rows.get((name, "stock"))),
                }
                if spec == "stock":
                    rows[name, spec]["outcomes"] = outcomes
                args.out.write_text(
                    json.dumps({**head, "explained": EXPLAINED, "rows": list(rows.values())}, indent=1) + "\n"
                )
                print(name, spec, {k: v for k, v in rows[name, spec].items() if k != "outcomes"}, flush=True)
    differing: list[str] = []
    for (name, spec), row in rows.items():
        known = [model for model in SETS[name] if f"{spec} {model}" in EXPLAINED]
        unknown = [test for test in row["differs"] if not any(f"{model}]" in test for model in known)]
        wrong = [test for test in unknown if test.partition("[")[0] not in EXPLAINED]
        differing += [f"{name} {spec}: {', '.join(wrong)}"] if wrong else []
    sys.exit("Outcomes differ from those of stock timm:\n" + "\n".join(differing) if differing else 0)


def _wanted(sets: list[str], encodings: list[str] | None) -> list[tuple[str, str]]:
    """Return which encoding is run on which set, stock timm first."""
    result = []
    alone = vispe.list_encodings(ndim=2, exclude=vispe.list_encodings(kind="positions"))
    every = [*alone, "rfs(reach=28)+rope_axial", "stretch+sincos2d"]
    for name in sets:
        chosen = encodings or (every if name == "small" else WINDOWED if name == "windows" else FEW)
        result += [(name, spec) for spec in ("stock", *chosen) if (name, spec) not in REFUSED]
    return result


def _kept(out: Path, head: dict[str, Any]) -> dict[tuple[str, str], dict[str, Any]]:
    """Return the rows of an earlier run of the same tests with the same packages."""
    retained = json.loads(out.read_text()) if out.exists() else {"rows": []}
    if any(retained.get(key) != json.loads(json.dumps(value)) for key, value in head.items()):
        return {}
    return {(row["set"], row["encoding"]): row for row in retained["rows"]}


def _counts(outcomes: dict[str, str], stock: dict[str, Any] | None) -> dict[str, Any]:
    """Return how many tests had each outcome, and which had another one than with stock timm."""
    expected = outcomes if stock is None else stock["outcomes"]
    return {
        **Counter(outcomes.values()),
        "differs": sorted(t for t in {*outcomes, *expected} if outcomes.get(t) != expected.get(t)),
    }


def fetch(folder: Path, version: str) -> Path:
    """Download the source release of timm and return where it lies."""
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--no-binary", "timm", "-d"]
    subprocess.run([*command, str(folder), f"timm=={version}"], check=True)
    with tarfile.open(next(folder.glob("timm-*.tar.gz"))) as archive:
        archive.extractall(folder, filter="data")
    return folder / f"timm-{version}"


def run(spec: str, models: Sequence[str], source: Path, plugins: Path, workers: int) -> dict[str, str]:
    """Return the outcome of every test of the models, by the test's name."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "vispe_in_timm",
        "-W",
        "ignore",
        "tests/test_models.py",
    ]
    command += ["-n", str(workers)] if workers > 1 else []
    result = plugins / "outcomes.json"
    result.unlink(missing_ok=True)
    arguments = {
        "PYTHONPATH": os.pathsep.join(filter(None, (str(plugins), os.environ.get("PYTHONPATH")))),
        "VISPE_SPEC": "" if spec == "stock" else spec,
        "VISPE_MODELS": " ".join(models),
        "VISPE_LEFT_OUT": " ".join(LEFT_OUT),
        "VISPE_OUTCOMES": str(result),
    }
    done = subprocess.run(
        command, cwd=source, env={**os.environ, **arguments}, capture_output=True, text=True, check=False
    )
    outcomes = json.loads(result.read_text()) if result.exists() else {}
    if not outcomes:
        sys.exit(f"timm's tests did not run:\n{done.stdout[-2000:]}\n{done.stderr[-2000:]}")
    return outcomes


if __name__ == "__main__":
    main()
