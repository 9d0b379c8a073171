"""Evaluation of training-free debiasing on a DINOv2: remaining decodable position and loss of accuracy.

    python eval/remedies.py --weights dinov2.safetensors --microscopy ../shared/data/microscopy

Every method of `vispe.debias` on the same images at one size: held-out R² within images (ridge, nearest neighbours) and
across images (ridge, nearest neighbours, a network), effective rank, cosine to the model's own features, error of a
rotation by 90 degrees, and mIoU of few scribbles: tokens alone, alongside filters, and lost with scribbles in one
corner. RASA and blanked channels are fitted on other images of the same kind. `--students` adds models of `vispe
retrofit` with this model as their teacher, also compared with its mean over poses and positions. Writes remedies.json
after each method, so that an interrupted run resumes; then prints the table.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import checkout  # noqa: F401  (finds vispe)
import numpy as np
import timm
import torch
from torch import Tensor

import vispe
from vispe.backbones.load_model import load_model
from vispe.backbones.vision_model import VisionModel
from vispe.errors import InputError
from vispe.evaluate.features.position_across_images import position_across_images
from vispe.evaluate.probe.group_averages import effective_rank, mean_cosine
from vispe.evaluate.probe.regression_data import Fit
from vispe.evaluate.probe.splits import Trials
from vispe.evaluate.rotation.metrics.equivariance import equivariance
from vispe.evaluate.rotation.record_key import FULL
from vispe.images.symmetry import D4
from vispe.train.evaluate.mask_scores import FilterFeatures, finite_mean
from vispe.train.evaluate.probe_images import CentreWindows, Noise, Settings, Textures, probe_step
from vispe.utils.files import atomic_path

sys.path.insert(0, str(Path(__file__).parent / "bench"))
from dinov2_evaluation.probe_images import Extent, Frame, frames_of
from dinov2_evaluation.scribbled import drawn, learnt
from timing import environment

OUT = Path(__file__).parent / "results" / "remedies.json"
METHODS = ("none", "registers", "blank", "svd", "rasa", "poses", "positions", "poses+positions", "poses+rasa")
FITTED = ("registers", "blank", "rasa", "poses+rasa")
KINDS = ("noise", "textures", "micrographs")
BUDGET = 100  # scribbled pixels of each class


def main() -> None:
    """Measure missing rows, then print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--model", default="vit_small_patch14_dinov2.lvd142m")
    parser.add_argument("--weights", required=True, help="checkpoint of the model")
    parser.add_argument("--microscopy", type=Path, required=True, help="folder of the micrograph sets")
    parser.add_argument("--size", type=int, default=518, help="side of images in pixels")
    parser.add_argument("--images", type=int, default=4, help="noise images, and textures")
    parser.add_argument("--each", type=int, default=2, help="micrographs of each set")
    parser.add_argument("--kinds", nargs="+", default=KINDS, choices=KINDS, help="kinds of images")
    parser.add_argument(
        "--students", nargs="+", default=[], help="folders of vispe retrofit, named by the folder"
    )
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    net = load_model(args.model, weights=args.weights, any_size=True).model
    model = VisionModel(net)
    settings = Settings(model.patch_size, 0, model.mean, model.std)
    frames = frames_of(args.microscopy, Extent(each=None))
    scored, fitted = selected(frames, args.each)
    noise, textures = Noise(16, args.size, settings), Textures(16, args.size, settings)
    kinds = {
        "noise": (Noise(args.images, args.size, settings), [noise[k] for k in range(8, 16)]),
        "textures": (Textures(args.images, args.size, settings), [textures[k] for k in range(8, 16)]),
        "micrographs": (windows(scored, args.size, settings), windows(fitted, args.size, settings)),
    }
    report = stored(args.out) or {"rows": [], "across": {}, "fits": {}, "refused": {}}
    report |= {"model": args.model, "size": args.size, "environment": environment()}
    for kind in args.kinds:
        images, fit = kinds[kind]
        for method in METHODS:
            measure(report, args.out, model, kind, method, images, fit, scored, settings)
        targets = symmetrised(model, images) if args.students else []
        for folder in args.students:
            measure(
                report,
                args.out,
                model,
                kind,
                Path(folder).name,
                images,
                fit,
                scored,
                settings,
                folder,
                targets,
            )
    print(markdown(report))


@torch.no_grad()
def symmetrised(model: VisionModel, images: Any) -> list[Tensor]:
    """Return the features of the model averaged over poses and positions, the target of a student."""
    features = vispe.debias(model, "poses+positions", seed=1)
    return [features(image[None])[0].double() for image in images]


def selected(frames: list[Frame], each: int) -> tuple[list[Frame], list[Frame]]:
    """Return the first images of each set, which are scored, and the next two, for fits."""
    groups: dict[str, list[Frame]] = {}
    for frame in frames:
        groups.setdefault(frame.group, []).append(frame)
    scored = [frame for own in groups.values() for frame in own[:each]]
    return scored, [frame for own in groups.values() for frame in own[each : each + 2] if frame.homogeneous]


def windows(frames: list[Frame], size: int, settings: Settings) -> list[Tensor]:
    """Return the central windows of micrographs."""
    return list(CentreWindows([settings.normalized(f.image) for f in frames], settings.patch_size, size))


def measure(
    report: dict[str, Any],
    out: Path,
    model: VisionModel,
    kind: str,
    method: str,
    images: Any,
    fit: Any,
    frames: list[Frame],
    settings: Settings,
    student: str | None = None,
    targets: Sequence[Tensor] = (),
) -> None:
    """Add the rows of a method, or of the student in a folder, on the images of a kind, if they are missing."""
    if f"{kind} {method}" in report["across"]:
        return
    start, features = time.process_time(), model
    if student is not None:
        features = VisionModel(load_model(student, any_size=True).model)
    elif method != "none":
        try:
            features = vispe.debias(model, method, list(fit) if method in FITTED else None, seed=1)
        except InputError as error:  # such as a model without outliers
            report["refused"][f"{kind} {method}"] = str(error)
            return
    seconds = time.process_time() - start
    rows, maps = [], []
    filters = FilterFeatures(settings.mean, settings.std)
    rng = np.random.default_rng(0)
    for number, image in enumerate(images):
        start = time.process_time()
        with torch.no_grad():
            map_of = features(image[None])[0].double()
        row: dict[str, Any] = {"kind": kind, "method": method, "image": number}
        row["cpu_s"] = time.process_time() - start
        with torch.no_grad():
            own = map_of if method == "none" else model(image[None])[0].double()
        row |= {"rank": effective_rank(map_of) / effective_rank(own), "cosine": mean_cosine(map_of, own)}
        if targets:
            row["cosine_symmetrised"] = mean_cosine(map_of, targets[number])
            row["rank_symmetrised"] = effective_rank(map_of) / effective_rank(targets[number])
        row |= within(map_of, rng)
        if kind == "micrographs":
            row |= segmented(map_of, image, frames[number], number, frames, filters, settings)
        rows.append(row)
        maps.append(map_of)
        print(kind, method, number, f"{row['cpu_s']:.1f} s", file=sys.stderr, flush=True)
    report["across"][f"{kind} {method}"] = position_across_images(maps).to_dict()
    square = next(image for image in images if image.shape[-1] == image.shape[-2])
    # of a rotation by 90 degrees, since each pose costs as many forward passes as the features
    result = equivariance(features, [square], elements=D4[1:2], measures=("error",), controls=False)
    (mean,) = (r for r in result if (r.metric, r.part) == ("error", FULL) and r.transform == D4[1].name)
    report["fits"][f"{kind} {method}"] = {
        "fit_cpu_s": round(seconds, 1),
        "rotation_error": float(np.mean(mean.values)),
    }
    report["rows"] += [{k: rounded(v) for k, v in row.items()} for row in rows]
    with atomic_path(out, force=True) as part:
        part.write_text(json.dumps(report) + "\n", encoding="utf-8")


def rounded(value: Any) -> Any:
    """Return a JSON value; scores that are not defined, such as those of a single class, become None."""
    if not isinstance(value, float):
        return value
    return round(value, 4) if np.isfinite(value) else None


def within(maps: Tensor, rng: np.random.Generator) -> dict[str, float]:
    """Return the R² of the probes within an image."""
    feats = maps.permute(1, 2, 0).numpy()
    trials = Trials(("lr+ud", "radial"), probe_step(maps.shape[1]), 4, Fit("ridge", 1.0))
    drawn_trials = trials.draw(tuple(feats.shape[:2]), rng)
    r2, _ = trials.scores(feats, drawn_trials)
    values = dict(zip(("r2", "r2_radial"), np.median(np.reshape(r2, (2, -1)), axis=1).tolist(), strict=True))
    return values | {"knn": trials.knn(feats, drawn_trials)}


def segmented(
    maps: Tensor,
    image: Tensor,
    frame: Frame,
    number: int,
    frames: list[Frame],
    filters: FilterFeatures,
    settings: Settings,
) -> dict[str, Any]:
    """Return the mIoU of few scribbles: tokens alone, alongside filters, and the loss with scribbles in one corner."""
    side = image.shape[-2:]
    truth = CentreWindows([frame.truth], settings.patch_size, max(side))[0].numpy()
    n_classes = int(max(f.truth.max() for f in frames if f.group == frame.group))
    with torch.no_grad():
        plain = filters(image[None])[0].double()
    spread, *corners = drawn(truth, number, BUDGET)
    covered = np.any([marks > 0 for marks in (spread, *corners)], axis=0)
    expected = np.where(covered, 0, truth)
    alone = learnt([maps], spread, expected, n_classes)
    result = {"set": frame.group, "alone": alone, "filters": learnt([plain], spread, expected, n_classes)}
    result["with filters"] = learnt([maps, plain], spread, expected, n_classes)
    if frame.homogeneous:
        lost = [alone - learnt([maps], marks, expected, n_classes) for marks in corners]
        result["corner"] = float(finite_mean(np.array(lost)))
    return result


def stored(path: Path) -> dict[str, Any] | None:
    """Return the report of an earlier run."""
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else None


def gain(rows: list[dict[str, Any]], key: str, method: str) -> str:
    """Return mean and paired difference to the model itself, with a 95 % interval of a bootstrap over images."""
    values = {
        m: [np.nan if r.get(key) is None else r[key] for r in rows if r["method"] == m]
        for m in (method, "none")
    }
    own, base = (np.array(values[m]) for m in (method, "none"))
    if method == "none" or len(own) != len(base):
        return f"{np.nanmean(own):.3f}"
    difference = (own - base)[np.isfinite(own - base)]
    picks = np.random.default_rng(0).integers(len(difference), size=(4_000, len(difference)))
    low, high = np.percentile(difference[picks].mean(1), [2.5, 97.5])
    return f"{np.nanmean(own):.3f} ({difference.mean():+.3f}, {low:+.3f} to {high:+.3f})"


def markdown(report: dict[str, Any]) -> str:
    """Return the tables of a report."""
    kinds = [k for k in KINDS if any(r["kind"] == k for r in report["rows"])]
    lines = [
        f"{' ; '.join(kinds)}",
        "",
        "| method | R² | R² radial | kNN | across: ridge | kNN | network | rank | cosine | error of rot90 | CPU s |",
        "|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    known = dict.fromkeys((*METHODS, *(r["method"] for r in report["rows"])))
    methods = [m for m in known if all(f"{k} {m}" in report["across"] for k in kinds)]
    for method in methods:
        cells = [method]
        for key in ("r2", "r2_radial", "knn"):
            cells.append("; ".join(f"{np.median(column(report, k, method, key)):.2f}" for k in kinds))
        for regressor in ("ridge", "knn", "mlp"):
            r2 = [report["across"][f"{k} {method}"]["r2"][regressor] for k in kinds]
            cells.append("; ".join(f"{(one['lr'] + one['ud']) / 2:.2f}" for one in r2))
        for key in ("rank", "cosine"):
            cells.append("; ".join(f"{np.mean(column(report, k, method, key)):.2f}" for k in kinds))
        cells.append("; ".join(f"{report['fits'][f'{k} {method}']['rotation_error']:.2f}" for k in kinds))
        cells.append(f"{np.median(column(report, kinds[0], method, 'cpu_s')):.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    rows = [r for r in report["rows"] if r["kind"] == "micrographs"]
    lines += ["", "| method | tokens alone | with filters | lost in a corner |", "|---|---|---|---|"]
    for method in methods:
        cells = [gain(rows, key, method) for key in ("alone", "with filters", "corner")]
        lines.append(f"| {method} | {' | '.join(cells)} |")
    return "\n".join(lines)


def column(report: dict[str, Any], kind: str, method: str, key: str) -> list[float]:
    """Return a number of every image of a kind."""
    return [r[key] for r in report["rows"] if (r["kind"], r["method"]) == (kind, method)]


if __name__ == "__main__":
    torch.set_num_threads(1)
    print(f"vispe {vispe.__version__}, timm {timm.__version__}", file=sys.stderr)
    main()
