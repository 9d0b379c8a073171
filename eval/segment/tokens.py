"""Evaluation of dense ViT tokens in `vispe segment`: mean IoU with tokens alone, and time.

One linear classifier per image from its own scribbles on 48 components of the tokens, for every combination of the
stride of the patches, the shifts along each axis, the blocks that are concatenated, and the enlargement of the input
image (probabilities are averaged back to its pixels). Classes are not weighted by their frequency. The images are the
micrographs of a folder, and synthetic tasks of `models.micro.tasks`, by formula, from seeds that no training used. The
reported setting is selected on synthetic tasks alone, among those without enlargement: the cheapest one that is not
significantly worse than the best (the paired interval of 95 % contains 0). Finished rows are stored, so that an
interrupted run resumes; `--fresh` discards them. Images whose maps need more than `--memory` GiB are listed as omitted,
and shifts by a fraction of a pixel (two of a stride of 7) are skipped. `--times` measures all settings of the file in
one run, in CPU seconds, in addition to filters with vispe_micro.

    python eval/segment/tokens.py ../shared/data/microscopy --weights dinov2_vits14.safetensors
    python eval/segment/tokens.py ../shared/data/microscopy --weights dinov2_vits14.safetensors --times
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(1, str(Path(__file__).resolve().parents[1]))
import checkout  # noqa: F401  (finds vispe)
import numpy as np
import torch
from PIL import Image
from torch.nn.functional import interpolate

from vispe.images.normalize import normalize
from vispe.images.read import read_image
from vispe.segment.classify.pixel_classifier import PixelClassifier
from vispe.segment.features.feature_cache import CachedFeatures
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.micro_features import NAME
from vispe.segment.features.pixel_features import Features
from vispe.segment.metrics import mean_iou
from vispe.segment.model.prediction import predict_page
from vispe.segment.types import PostProcessing
from vispe.utils.files import atomic_path
from vispe.utils.version import versions

RESULT = Path(__file__).resolve().parents[1] / "results" / "segment_tokens.json"
SYNTHETIC = "synthetic"
COMPONENTS = 48
_SIDE = 384  # pixels of a synthetic task


@dataclass(frozen=True)
class Setting:
    """One way to get tokens."""

    stride: int
    shifts: int
    layers: str
    scale: float

    def __str__(self) -> str:
        return f"stride {self.stride}, shifts {self.shifts}, layers {self.layers}, x{self.scale:g}"

    def config(self, model: str, weights: str) -> FeatureConfig:
        """Return the features."""
        blocks = None if self.layers == "last" else tuple(int(block) for block in self.layers.split(","))
        return FeatureConfig(
            "tokens", model=model, weights=weights, components=COMPONENTS,
            token_stride=self.stride, token_shifts=self.shifts, layers=blocks,
        )  # fmt: skip


def parsed(name: str) -> Setting:
    """Return the setting of a name."""
    stride, shifts, layers, scale = (
        part.removeprefix(word)  # layers are joined by commas without blanks
        for part, word in zip(name.split(", "), ("stride ", "shifts ", "layers ", "x"), strict=True)
    )
    return Setting(int(stride), int(shifts), layers, float(scale))


@dataclass(frozen=True)
class Picture:
    """A page (h, w, c) with classes from 1: `drawn` (h, w), 0 where nothing is drawn, and `truth` (h, w)."""

    page: np.ndarray
    drawn: np.ndarray
    truth: np.ndarray


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("data", type=Path, help="folder of the micrograph sets")
    parser.add_argument("--model", default="vit_small_patch14_dinov2", help="timm model")
    parser.add_argument("--weights", required=True, help="checkpoint file, or random")
    parser.add_argument("--strides", nargs="+", type=int, default=[14, 7])
    parser.add_argument("--shifts", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--layers", nargs="+", default=["last", "8", "5,8,11"])
    parser.add_argument("--scales", nargs="+", type=float, default=[1, 2, 3.5])
    parser.add_argument("--sets", nargs="+", help="sets of micrographs; all by default")
    parser.add_argument("--max-images", type=int, help="images of a set, from the first one on")
    parser.add_argument("--synthetic", type=int, default=60, help="synthetic tasks")
    parser.add_argument("--memory", type=float, default=3, help="GiB that the maps of an image may take")
    parser.add_argument("--result", type=Path, default=RESULT)
    parser.add_argument("--fresh", action="store_true", help="measure everything again")
    parser.add_argument("--times", action="store_true", help="measure what the settings of the file cost")
    options = parser.parse_args()
    provenance = {"model": options.model, "weights": digest(options.weights), "versions": versions()}
    rows: list[dict[str, Any]] = []
    times: dict[str, float] = {}
    if options.result.exists() and not options.fresh:
        state = json.loads(options.result.read_text())
        if {key: state[key] for key in provenance} != provenance:
            raise SystemExit(f"{options.result} was made with other weights or versions; use --fresh.")
        rows, times = state["rows"], state["summary"].get("seconds_per_megapixel", {})
    if options.times:
        settings = list(map(parsed, dict.fromkeys(row["setting"] for row in rows)))
        save(options.result, provenance, rows, timed(settings, options.model, options.weights))
        return
    done = {(row["setting"], row["set"], row["image"]) for row in rows}
    axes = options.strides, options.shifts, options.layers, options.scales
    expected = list(images(options.data, options.sets, options.max_images, options.synthetic))
    for setting in itertools.starmap(Setting, itertools.product(*axes)):
        remaining = [(name, image) for name, image in expected if (str(setting), name, image) not in done]
        # the distance of looks is a whole number of pixels
        if not remaining or setting.stride % setting.shifts:
            continue
        features = CachedFeatures(setting.config(options.model, options.weights))
        for name, image in remaining:
            row = {"setting": str(setting), "set": name, "image": image}
            rows.append(row | measure(opened(options.data, name, image), features, setting, options.memory))
            save(options.result, provenance, rows, times)
            print(*rows[-1].values(), sep=" | ", flush=True)
    save(options.result, provenance, rows, times)
    print(json.dumps(summary(rows, times), indent=1))


def digest(weights: str) -> str:
    """Return the SHA-256 of a checkpoint file; other words as they are."""
    path = Path(weights)
    return hashlib.sha256(path.read_bytes()).hexdigest() if path.is_file() else weights


def images(
    data: Path, sets: Sequence[str] | None, most: int | None, synthetic: int
) -> Iterator[tuple[str, str]]:
    """Yield the set and the name of each image; of a synthetic task its number."""
    yield from ((SYNTHETIC, str(number)) for number in range(synthetic))
    for folder in sorted(path for path in data.iterdir() if (path / "images").is_dir()):
        if sets is None or folder.name in sets:
            for path in sorted((folder / "scribbles").glob("*.png"))[:most]:
                yield folder.name, path.stem


def opened(data: Path, name: str, image: str) -> Picture:
    """Read a micrograph, or draw a synthetic task."""
    if name == SYNTHETIC:
        return drawn_task(int(image))
    read = read_image(data / name / "images" / f"{image}.png")
    page = normalize(read, "stack", (0.5, 99.5))[0][0]
    drawn, truth = (
        np.asarray(Image.open(data / name / folder / f"{image}.png")) for folder in ("scribbles", "masks")
    )
    return Picture(np.ascontiguousarray(page), drawn.astype(np.int64), truth.astype(np.int64) + 1)


def drawn_task(number: int) -> Picture:
    """Draw a synthetic task with strokes over the image."""
    from models.micro.tasks import task
    from models.micro.validate import strokes

    random = np.random.default_rng([2**31, number])
    while True:
        one = task(random, _SIDE)
        drawn = strokes(random, one.labels, False)
        if drawn is not None:
            break
    grey = float(np.ptp(one.image, axis=0).max()) < 1e-3
    page = np.ascontiguousarray((one.image[:1] if grey else one.image).transpose(1, 2, 0), np.float32)
    truth = one.labels.astype(np.int64) + 1
    return Picture(page, np.where(drawn, truth, 0), truth)


def measure(image: Picture, features: CachedFeatures, setting: Setting, memory: float) -> dict[str, Any]:
    """Train on the scribbles of an image and score all of its pixels."""
    height, width = image.truth.shape
    page = enlarged(image.page, setting.scale)
    # the maps grow with the enlargement, the looks and the blocks
    blocks, looks = setting.layers.count(",") + 1, 1 if page.shape[2] in (1, 3) else page.shape[2]
    cells = page.shape[0] * page.shape[1] / (setting.stride / setting.shifts) ** 2
    expected = 4 * cells * features._model._model.embed_dim * blocks * looks / 2**30
    if expected > memory:
        return {"left_out": f"maps of {expected:.1f} GiB"}
    valid = np.ones(page.shape[:2], bool)
    features.basis = None
    features.keep(page)
    features.fit([(page, valid)])
    # scribbles name pixels of the image: each is the one of the enlarged page in its middle
    y, x = np.nonzero(image.drawn)
    rows, columns = (((axis + 0.5) * setting.scale).astype(int) for axis in (y, x))
    positions, inverse = np.unique(rows * page.shape[1] + columns, return_inverse=True)
    actual = features.prepare(page, valid).gather_indices(positions)[inverse]
    classes = int(max(image.truth.max(), image.drawn.max()))
    fitted = PixelClassifier("logistic", classes).fit(actual, image.drawn[y, x])
    features.apply(page, valid, fitted.linear)
    prob = predict_page(
        page, valid, features, fitted, PostProcessing(prior="uniform"), lambda share: None
    ).prob
    prob = interpolate(torch.from_numpy(np.ascontiguousarray(prob))[None], (height, width), mode="area")[0]
    labels = prob.argmax(0).numpy() + 1
    return {"miou": round(mean_iou(labels, image.truth, classes), 4)}


def timed(settings: Sequence[Setting], model: str, weights: str) -> dict[str, float]:
    """Return the processor time of each setting's maps of a synthetic task, in seconds per megapixel of the image."""
    page = drawn_task(0).page
    several = {str(setting): (setting.config(model, weights), setting.scale) for setting in settings}
    several["filters and vispe_micro"] = (FeatureConfig("both", model=NAME), 1)
    result = {}
    for name, (config, scale) in several.items():
        features, recorded = Features(config), enlarged(page, scale)
        valid, spent = np.ones(recorded.shape[:2], bool), []
        features.fit([(recorded, valid)])
        for _ in range(2):
            start = time.process_time()
            features.prepare(recorded, valid).gather_indices(np.arange(recorded.shape[0] * recorded.shape[1]))
            spent.append(time.process_time() - start)
        result[name] = round(1e6 * min(spent) / page[..., 0].size, 1)
        print(name, result[name], sep=" | ", flush=True)
    return result


def enlarged(page: np.ndarray, scale: float) -> np.ndarray:
    """Enlarge a page (h, w, c) by cubic interpolation."""
    if scale == 1:
        return page
    size = [round(side * scale) for side in page.shape[:2]]
    planes = torch.from_numpy(page).permute(2, 0, 1)[None]
    grown = interpolate(planes, size, mode="bicubic", align_corners=False).clamp(0, 1)
    return np.ascontiguousarray(grown[0].permute(1, 2, 0).numpy())


def save(path: Path, made: dict[str, Any], rows: Sequence[dict[str, Any]], times: dict[str, float]) -> None:
    """Write the rows, one a line, and what they come to."""
    state = {"what": __doc__.splitlines()[0], **made, "summary": summary(rows, times)}
    lines = ",\n".join(json.dumps(row, separators=(",", ":")) for row in rows)
    with atomic_path(path, force=True) as temporary:
        temporary.write_text(f'{json.dumps(state, separators=(",", ":"))[:-1]},\n"rows":[\n{lines}\n]}}\n')


def summary(rows: Sequence[dict[str, Any]], times: dict[str, float]) -> dict[str, Any]:
    """Average each setting on synthetic tasks and on micrographs, and name the one that synthetic tasks choose."""
    table: dict[str, dict[str, Any]] = {}
    score: dict[str, dict[str, float]] = {}
    for setting in dict.fromkeys(row["setting"] for row in rows):
        setting_rows = [row for row in rows if row["setting"] == setting and "miou" in row]
        table[setting] = {"left_out": sum("left_out" in row for row in rows if row["setting"] == setting)}
        score[setting] = {row["image"]: row["miou"] for row in setting_rows if row["set"] == SYNTHETIC}
        for name in dict.fromkeys(row["set"] for row in setting_rows):
            table[setting][name] = _mean([row["miou"] for row in setting_rows if row["set"] == name])
        if micrographs := [row["miou"] for row in setting_rows if row["set"] != SYNTHETIC]:
            table[setting]["micrographs"] = _mean(micrographs)
    same_scale = {name: image_scores for name, image_scores in score.items() if parsed(name).scale == 1}
    return {"chosen": chosen(same_scale, times), "seconds_per_megapixel": times, "settings": table}


def chosen(score: dict[str, dict[str, float]], times: dict[str, float]) -> str | None:
    """Return the cheapest setting that is not clearly worse than the best; None until tasks and times are complete."""
    tasks = set().union(*score.values())
    if (
        not tasks
        or any(set(image_scores) != tasks for image_scores in score.values())
        or not set(score) <= set(times)
    ):
        return None
    names = sorted(tasks)
    values = {
        setting: np.array([image_scores[name] for name in names]) for setting, image_scores in score.items()
    }
    best = max(values, key=lambda setting: values[setting].mean())
    draws = np.random.default_rng(0).integers(0, len(names), (4000, len(names)))
    near = [s for s, v in values.items() if np.quantile((values[best] - v)[draws].mean(1), 0.025) <= 0]
    return min(near, key=lambda setting: times[setting])


def _mean(values: Sequence[float]) -> float:
    return round(float(np.mean(values)), 4)


if __name__ == "__main__":
    main()
