"""Evaluation of a DINOv2 before and after a retrofit: decodable position, similarity to the teacher, segmentation.

    python eval/dinov2.py --students FOLDER [FOLDER ...] --microscopy ../shared/data/microscopy

Each folder was written by `vispe retrofit` (`configs/dinov2_vits14_cpu.yaml`). Teacher, teacher with its blanked
channels at 0, and student are evaluated on the same images at 224 and 518 px: held-out R² of position on noise,
generated textures and homogeneous micrographs; cosine and effective rank on textures, micrographs and synthetic images
of another seed; the equivariance error under rotation; and segmentation from few scribbles, also with filters.
Micrographs are windows of frames from homogeneous sets, which have scribbles in a corner; for scribbles all sets are
used. With `--pool`, similarity is also measured on training images of the students. `--quick` uses few images and
records this in the results.

Writes STUDENT.json for each folder by its name, row by row, so that an interrupted run resumes; then table.md and
dinov2.png of all results in the folder (`--out`; by default eval/results/dinov2, and the guide shows it).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import shutil
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (finds vispe)
import torch

from vispe.train.evaluate.model_pair import ModelPair
from vispe.train.evaluate.probe_images import Settings
from vispe.train.retrofit.student import load_student
from vispe.utils.files import atomic_path

sys.path.insert(0, str(Path(__file__).parent / "bench"))
sys.path.insert(0, str(Path(__file__).parent))
from dinov2_evaluation import figure, metrics, probe_images, scribbled
from dinov2_evaluation.table import markdown
from dinov2_evaluation.targets import gains, targets
from small_retrofit_report import rounded
from timing import environment

OUT = Path(__file__).parent / "results" / "dinov2"
FULL, QUICK = probe_images.Extent(), probe_images.QUICK
KEYS = ("question", "kind", "size", "set")
"""What tells a row from another one."""

Job = tuple[dict[str, Any], Callable[[], dict[str, Any]]]


def main() -> None:
    """Measure missing rows, then write the table and draw the figure."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--students", type=Path, nargs="+", required=True, help="folders of vispe retrofit")
    parser.add_argument("--microscopy", type=Path, required=True, help="folder of the micrograph sets")
    parser.add_argument("--pool", type=Path, help="folder of unlabelled images, for likeness alone")
    parser.add_argument("--out", type=Path, default=OUT)
    parser.add_argument("--quick", action="store_true", help="few images; marked in the results")
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    args = parser.parse_args()
    names = [folder.resolve().name for folder in args.students]
    if len(set(names)) < len(names):
        parser.error(f"--students has folders of one name ({', '.join(names)}); results are named by it.")
    extent = QUICK if args.quick else FULL
    frames = probe_images.frames_of(args.microscopy, extent)
    args.out.mkdir(parents=True, exist_ok=True)
    for name, folder in zip(names, args.students, strict=True):
        measured(name, folder, frames, extent, args)
    reports = [json.loads(file.read_text(encoding="utf-8")) for file in sorted(args.out.glob("*.json"))]
    reports = [report for report in reports if "rows" in report]  # layers.json is of another program
    text = markdown(reports)
    (args.out / "table.md").write_text(text, encoding="utf-8")
    figure.draw(reports).savefig(args.out / "dinov2.png", bbox_inches="tight")
    if args.out == OUT:  # the guide shows it
        shutil.copy(OUT / "dinov2.png", OUT.parents[2] / "docs" / "figures" / "retrofit.png")
    print(text)


def measured(
    name: str,
    folder: Path,
    frames: list[probe_images.Frame],
    extent: probe_images.Extent,
    args: argparse.Namespace,
) -> None:
    """Measure a student and write its results, row by row.

    Raises:
        SystemExit: the file holds results of other weights, versions or numbers of images.
    """
    file = args.out / f"{name}.json"
    student, teacher, card = load_student(folder)
    # numbers as they are written, so that a run that goes on finds the same
    head: dict[str, Any] = rounded(
        {
            "what": (__doc__ or "").splitlines()[0],
            "quick": args.quick,
            "extent": json.loads(json.dumps(asdict(extent))),
            "teacher": teacher_of(card),
            "student": {"name": name, **facts(folder, card)},
            "environment": environment("scikit-image", "scikit-learn", "numpy"),
        }
    )
    rows: list[dict[str, Any]] = []
    if file.exists() and not args.fresh:
        retained = json.loads(file.read_text(encoding="utf-8"))
        same = [retained[k] == head[k] for k in ("quick", "extent", "teacher", "student")]
        if not all(same) or retained["environment"]["versions"] != head["environment"]["versions"]:
            raise SystemExit(
                f"{file} was measured with other weights, versions or numbers of images; use --fresh or --out."
            )
        rows = retained["rows"]
    pair = ModelPair(student=student, teacher=teacher, channels=card["blanked"])
    done = {identity(row) for row in rows}
    for requested, job in jobs(
        pair, Settings(teacher.patch_size, 0, teacher.mean, teacher.std), frames, extent, args
    ):
        if identity(requested) in done:
            continue
        start = time.process_time()
        with torch.no_grad():
            result = job()
        if result.get("pictures") != 0:
            rows.append(rounded(requested | result | {"cpu_s": round(time.process_time() - start, 1)}))
            write(file, head, rows)
        print(name, *requested.values(), f"{time.process_time() - start:.0f} s", flush=True)
    write(file, head, rows)


def jobs(
    pair: ModelPair,
    settings: Settings,
    frames: list[probe_images.Frame],
    extent: probe_images.Extent,
    args: argparse.Namespace,
) -> Iterator[Job]:
    """Yield the identity of each row, and the function that measures it."""
    for size in extent.sizes:
        for kind in probe_images.KINDS:
            if kind == "pool" and args.pool is None:
                continue

            def look(kind: str = kind, size: int = size) -> dict[str, Any]:
                shown = probe_images.load_images(kind, size, settings, extent, frames, args.pool)
                return (
                    metrics.looked_at(pair, kind, size, shown, settings, extent) if shown else {"pictures": 0}
                )

            yield {"question": "look", "kind": kind, "size": size}, look

        def turn(size: int = size) -> dict[str, Any]:
            return metrics.rotated(pair, probe_images.rotated_of(size, settings, extent, frames))

        yield {"question": "turned", "size": size}, turn
    size = extent.sizes[-1]
    for group in dict.fromkeys(frame.group for frame in frames):
        own = [frame for frame in frames if frame.group == group]

        def scribble(own: list[probe_images.Frame] = own) -> dict[str, Any]:
            return scribbled.scribbled(pair, own, size, settings, extent.budget)

        requested = {"question": "scribbles", "set": group, "size": size, "homogeneous": own[0].homogeneous}
        yield requested, scribble


def identity(row: dict[str, Any]) -> tuple[Any, ...]:
    """Return the identity of a row."""
    return tuple(row.get(key) for key in KEYS)


def teacher_of(card: dict[str, Any]) -> dict[str, Any]:
    """Return the name of the teacher, and the name and sha256 of its weight file without its path."""
    teacher = card["config"]["teacher"]
    weights = teacher["weights"]
    local = weights not in (None, "random") and Path(weights).is_file()
    known = {"file": Path(weights).name, "sha256": sha256(Path(weights))} if local else {"weights": weights}
    return {"name": teacher["name"], **known}


def facts(folder: Path, card: dict[str, Any]) -> dict[str, Any]:
    """Return the training settings from the card of a student, without file paths."""
    config = card["config"]
    return {
        "sha256": sha256(folder / "student.safetensors"),
        "config": {
            key: config[key]
            for key in ("student", "stages", "loss", "augment", "weight_decay", "ema_decay", "seed")
        },
        "blank": {key: config["target"][key] for key in ("blank", "share", "count")},
        "blanked": card["blanked"],
        "encoding": card.get("encoding"),
        "updates": card.get("updates"),
        "pictures": card.get("data", {}).get("fingerprint"),
        "last_line": card.get("last_line"),
        "versions": card.get("versions"),
    }


def sha256(file: Path) -> str:
    """Return the sha256 of a file."""
    with file.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def write(file: Path, head: dict[str, Any], rows: list[dict[str, Any]]) -> None:
    """Write the results atomically: a line for each row."""
    summary = {"targets": [c.to_dict() for c in targets(rows)], "student minus teacher": gains(rows)}
    text = json.dumps(rounded(head | summary | {"rows": rows}), ensure_ascii=False, separators=(",", ":"))
    with atomic_path(file, force=True) as part:
        part.write_text(text.replace('{"question":', '\n{"question":') + "\n", encoding="utf-8")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()
