"""Runs on images larger than memory: `segment` and `apply` with stores in place of files."""

from collections.abc import Callable, Sequence
from dataclasses import asdict
from pathlib import Path

from vispe.backbones.device import choose_device
from vispe.errors import InputError, OptionError
from vispe.images.find import match_files
from vispe.segment.big import find_stores, progress
from vispe.segment.big import stem as stem_of
from vispe.segment.big.engine import few_at_once, file_digest, refuse_whole
from vispe.segment.big.scribbles import read_scribbles
from vispe.segment.big.state import BigRun
from vispe.segment.big.train import train
from vispe.segment.features.features import FeatureConfig, Features
from vispe.segment.model.file import load_model, save_model
from vispe.segment.run.batch import MODEL_NAME
from vispe.segment.run.disk import room
from vispe.segment.run.inputs import Reading, find_files
from vispe.segment.run.predict import Post
from vispe.segment.run.report import Report, Watcher
from vispe.segment.run.resume import state_of
from vispe.segment.run.scoring import Scoring
from vispe.segment.run.train import Labelling


@few_at_once()
def apply(
    model: str | Path,
    images: Sequence[Path],
    out: str | Path,
    reading: Reading | None,
    post: Post | None,
    weights: str | None,
    tile: int | None,
    device: str,
    *,
    force: bool,
    watch: Watcher | None,
    memory: str | None,
    scheduler: str | None,
) -> Report:
    """Segment stores with the model of an earlier run; see `vispe.segment.pipeline.apply`."""
    run = BigRun(images, out, reading, post, force, watch, memory, scheduler, model=False)
    loaded = load_model(model)
    refuse_whole(loaded.features)
    if weights is not None and loaded.features.kind == "filters":
        raise OptionError(f"weights={weights!r} has no effect: {model} uses filters only; leave it out.")
    device = choose_device(device)
    run.model_file = Path(model)
    asked = {
        "command": "apply",
        "model": file_digest(model),
        "weights": weights,
        "tile": tile,
        "device": device,
    }
    with run.held():
        run.begin(asked)
        return run.predict("apply", loaded, weights, tile, device, model_file=str(model))


@few_at_once()
def segment(
    images: Sequence[Path],
    out: str | Path,
    labels: Sequence[str | Path],
    classifier: str,
    features: FeatureConfig,
    reading: Reading | None,
    labelling: Labelling | None,
    post: Post | None,
    seed: int,
    device: str,
    *,
    force: bool,
    watch: Watcher | None,
    memory: str | None,
    scheduler: str | None,
) -> Report:
    """Train on scribbles in stores and segment them; see `vispe.segment.pipeline.segment`."""
    refuse_whole(features)
    run = BigRun(images, out, reading, post, force, watch, memory, scheduler, model=True)
    found, how = _labels(labels), labelling or Labelling()
    run.labels_of = pairs = match_labels(found, list(run.images), run.note)
    device = choose_device(device)
    asked = {
        "command": "segment",
        "labels": {str(path.resolve()): state_of(path) for path in found},
        "labelling": {**asdict(how), "legend": None if how.legend is None else str(how.legend)},
        "classifier": classifier,
        "features": asdict(features),
        "seed": seed,
        "device": device,
    }
    with run.held():
        goes_on = run.begin(asked)
        run.model_file = run.out / MODEL_NAME
        kept = progress.trained_model(run.out) if goes_on and run.model_file.is_file() else None
        if kept is None or kept != file_digest(run.model_file):
            taught = [path for path in run.images if path in pairs]
            label_files, opened = [pairs[path] for path in taught], [run.images[path] for path in taught]
            drawn, names, colors, notes = read_scribbles(label_files, opened, how)
            limits = [run.limits(path, run.reading)[0] for path in taught]
            fresh = Features(features, seed=seed, device=device)
            model = train(
                *(opened, label_files, limits, drawn, names, colors, fresh, classifier),
                *(run.reading.normalize, run.reading.clip, seed, run.watch, notes),
            )
            for text in dict.fromkeys(notes):
                run.note(text)
            with room(run.out, MODEL_NAME):
                save_model(run.model_file, model, force or goes_on)
                progress.note_run(run.out, run.asked, run.records, file_digest(run.model_file))
            run.wrote_model = True
        loaded = load_model(run.model_file)
        return run.predict("segment", loaded, features.weights, features.tile, device)


def refuse(
    scoring: Scoring | None, *, trust: bool = False, text: bool = False, cluster: bool = False
) -> None:
    """Raise OptionError for what needs a whole image at once."""
    asked = {
        "truth": scoring is not None and bool(scoring.truth),
        "trust": trust,
        "text": text,
        "cluster": cluster,
    }
    for name, given in asked.items():
        if given:
            then = " and use vispe apply with its model" if name == "cluster" else ""
            raise OptionError(
                f"{name} does not work on images that are read block by block; cut out a part as a TIFF file, try it "
                f"there{then}."
            )


def _labels(patterns: Sequence[str | Path]) -> list[Path]:
    """Find label files and stores."""
    patterns = [patterns] if isinstance(patterns, str | Path) else list(patterns)
    found, rest = find_stores(patterns)
    return found + find_files(rest)


def match_labels(
    labels: Sequence[Path], images: Sequence[Path], note: Callable[[str], None]
) -> dict[Path, Path]:
    """Give each label file or store to its image, by name."""
    matched, strays = match_files(images, labels, "labels", stem_of)
    for label in strays:
        note(f"{label} belongs to no image and is not used.")
    if not matched:
        raise InputError(
            f"no labels file belongs to an image by name: found {labels[0].name} for images such as {images[0].name}; "
            "name them alike, for example a.zarr and a_labels.png."
        )
    return matched
