"""Audit a pretrained model, its retrofit, and small ViTs with several encodings, and count false positives.

    python eval/audit.py small [--encodings learned alibi2d ...]   # trained here, about a minute each
    python eval/audit.py alarms [--seeds 20]                       # random weights without an encoding
    vispe audit vit_small_patch14_dinov2 IMAGES --weights FILE --img-size 518 --against RETROFIT -o OUT
    python eval/audit.py keep --report OUT/report.json             # store its numbers without details
    python eval/audit.py draw                                      # figure of the audit page from these numbers

Each writes a file to eval/results/audit. The first two resume after an interruption.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (finds vispe)
import timm
import torch

from vispe.backbones.vision_model import VisionModel
from vispe.errors import counted
from vispe.evaluate.audit.findings import Audit, Finding
from vispe.evaluate.audit.html_report import plot_audit
from vispe.evaluate.audit.measures import all_measures
from vispe.evaluate.audit.runner import audit
from vispe.evaluate.audit.runs import VIEWS
from vispe.evaluate.measure.audited_model import AuditedModel
from vispe.evaluate.measure.base import Outcome
from vispe.experimental.measures.extrapolation import PATCH, ExtrapolationRecipe, train
from vispe.hosts.convert import convert
from vispe.images.textures import disc_packing, random_field, voronoi
from vispe.utils.files import write_json

sys.path.insert(0, str(Path(__file__).parent / "bench"))
from timing import environment

OUT = Path(__file__).parent / "results" / "audit"
ENCODINGS = ("learned", "sincos2d", "rope_axial", "alibi2d", "lookhere", "none")
RECIPE = ExtrapolationRecipe(shape=(12, 12), steps=400)


def textures(n: int, side: int, seed: int = 0) -> list[torch.Tensor]:
    """Return n homogeneous textures (3, side, side) with mean 0, which carry no position."""
    kinds = (random_field, disc_packing, voronoi)
    grey = (kinds[k % 3](seed * 100 + k).render(side)[0] for k in range(n))
    return [(g - g.mean()).div(g.std()).expand(3, -1, -1).contiguous() for g in grey]


def brief(result: Audit) -> dict[str, Any]:
    """Return value, interval, controls and verdict of every measure, rounded."""
    entries = {}
    for f in result.findings:
        bounds = None if f.interval is None else [round(e, 4) for e in f.interval]
        controls = {name: round(v, 4) for name, v in f.control.items()}
        entries[f.name] = {
            "value": round(f.value, 4),
            "interval": bounds,
            "control": controls,
            "verdict": f.verdict,
        }
    return {
        "verdict": result.verdict,
        "findings": entries,
        "refused": {n: w for n, (_, w) in result.refused.items()},
    }


def small(encodings: list[str]) -> None:
    """Train a small ViT with each encoding on a task of relative positions, and audit it on textures."""
    path = OUT / "small.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    for name in encodings:
        if name in rows:
            continue
        body = train(name, 0, RECIPE).body.eval()
        audited = AuditedModel(VisionModel(body), f"small ViT + {name}")
        rows[name] = brief(audit(audited, textures(8, 12 * PATCH)))
        write_json(path, {"environment": environment(), "rows": rows}, force=True)
        print(name, rows[name]["verdict"], flush=True)


def alarms(seeds: int) -> None:
    """Count verdicts on random weights without an encoding, where every yes is a false positive."""
    path = OUT / "alarms.json"
    rows = json.loads(path.read_text())["rows"] if path.exists() else {}
    for seed in range(seeds):
        if str(seed) in rows:
            continue
        torch.manual_seed(seed)
        model = convert(timm.create_model("test_vit"), "none").eval()
        result = audit(AuditedModel(VisionModel(model), "random"), textures(8, 160, seed), seed=seed)
        rows[str(seed)] = {f.name: f.verdict for f in result.findings}
        verdicts = [v for row in rows.values() for v in row.values()]
        fraction = verdicts.count("yes") / len(verdicts)
        summary = {"yes": verdicts.count("yes"), "verdicts": len(verdicts), "share": round(fraction, 4)}
        write_json(path, {"environment": environment(), **summary, "rows": rows}, force=True)
        print(seed, {n: v for n, v in rows[str(seed)].items() if v != "no"}, summary, flush=True)


def keep(report: Path) -> None:
    """Store a report of the command, rounded, with the values of every image and without details."""
    result = json.loads(report.read_text())

    def short(value: Any) -> Any:
        if isinstance(value, dict):
            return {
                k: short(v) for k, v in value.items() if k not in ("details", "misleads", "control_layers")
            }
        if isinstance(value, list):
            return [short(v) for v in value]
        # keep only the name of a folder
        value = Path(value).name if isinstance(value, str) and value.startswith("/") else value
        return round(value, 4) if isinstance(value, float) else value

    write_json(OUT / "dinov2.json", short(result) | {"environment": environment()}, force=True)


def draw() -> None:
    """Draw the stored audit of a DINOv2; curves of its controls are not stored."""
    stored = json.loads((OUT / "dinov2.json").read_text())
    findings = []
    for row in stored["findings"]:
        measure = all_measures()[row["name"]]
        # values of models count as controls only for the measures that name them
        compared = [v for k, v in row["control"].items() if k not in VIEWS or k in measure.controls]
        known = {
            **row,
            "question": measure.question,
            "number": measure.number,
            "largest": max(compared, default=0.0),
        }
        fields = {key: known[key] for key in Finding.__dataclass_fields__ if key in known}
        outcome = Outcome(row["value"], row["per_image"], row["per_layer"])
        findings.append(Finding(**fields, misleads="", outcome=outcome))
    audited = Audit(stored["title"], tuple(findings), {}, stored["images"], {})
    figure = plot_audit(audited, f"{stored['title']}, {counted(stored['images'], 'image')}")
    figure.savefig(OUT.parents[2] / "docs" / "figures" / "audit-dinov2.png")


def main() -> None:
    """Run the requested command."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("what", choices=("small", "alarms", "keep", "draw"))
    parser.add_argument("--report", type=Path)
    parser.add_argument("--encodings", nargs="+", default=list(ENCODINGS))
    parser.add_argument("--seeds", type=int, default=20)
    args = parser.parse_args()
    OUT.mkdir(parents=True, exist_ok=True)
    start = time.perf_counter()
    if args.what == "keep":
        keep(args.report)
    elif args.what == "draw":
        draw()
    elif args.what == "small":
        small(args.encodings)
    else:
        alarms(args.seeds)
    print(f"{time.perf_counter() - start:.0f} s")


if __name__ == "__main__":
    main()
