"""Runs on images larger than memory: `segment` and `apply` with stores in place of files."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vispe.backbones.device import choose_device
from vispe.errors import OptionError
from vispe.segment.features.pixel_features import Features
from vispe.segment.model.model_file import load_model
from vispe.segment.out_of_core import find_stores, progress
from vispe.segment.out_of_core.block_engine import few_at_once, file_digest, refuse_whole
from vispe.segment.out_of_core.store_run import BigRun
from vispe.segment.out_of_core.train import train
from vispe.segment.run.inputs import find_files, listed
from vispe.segment.run.request import Request
from vispe.segment.run.resume import state_of
from vispe.segment.run.run_report import Report
from vispe.segment.run.run_state import refitted


@few_at_once()
def apply(asked: Request, images: Sequence[Path]) -> Report:
    """Segment stores with the model of an earlier run, as `vispe.segment.pipeline.apply` was asked to."""
    _refuse(asked)
    run = BigRun(asked, images)
    loaded = load_model(asked.model)
    refuse_whole(loaded.features)
    refitted(loaded, asked)
    facts = {"model": file_digest(asked.model), "weights": asked.weights, "tile": asked.tile}
    with run.held():
        run.begin(_decisive(asked, facts))
        return run.predict(loaded)


@few_at_once()
def segment(asked: Request, images: Sequence[Path]) -> Report:
    """Train on scribbles in stores and segment them, as `vispe.segment.pipeline.segment` was asked to."""
    _refuse(asked)
    refuse_whole(asked.features)
    stores, rest = find_stores(listed(asked.labels))
    labels = stores + find_files(rest)
    run = BigRun(asked, images, labels)
    legend = asked.labelling.legend
    facts = {
        "labels": {str(path.resolve()): state_of(path) for path in labels},
        "labelling": {**asdict(asked.labelling), "legend": None if legend is None else str(legend)},
        "classifier": asked.classifier,
        "features": asdict(asked.features),
        "seed": asked.seed,
    }
    with run.held():
        goes_on = run.begin(_decisive(asked, facts))
        kept = progress.trained_model(run.out) if goes_on and run.model_file.is_file() else None
        if kept is None or kept != file_digest(run.model_file):
            features = Features(asked.features, seed=asked.seed, device=choose_device(asked.device))
            run.keep_model(train(run, features), asked.force or goes_on)
        return run.predict(load_model(run.model_file))


def _decisive(asked: Request, facts: dict[str, Any]) -> dict[str, Any]:
    return {"command": asked.command, **facts, "device": choose_device(asked.device)}


def _refuse(asked: Request) -> None:
    """Raise OptionError for what needs a whole image at once."""
    given = {
        "truth": bool(asked.scoring.truth),
        "materials": asked.materials,
        "trust": asked.trust,
        "objects_as": asked.objects is not None and bool(asked.objects.kinds),
        "scene": asked.reading.scene is not None,
        "crop": asked.reading.crop is not None,
        "mask": bool(asked.reading.mask),
        "orientation": asked.reading.orientation != "stored",
        "text": asked.text is not None,
        "cluster": asked.cluster is not None,
    }
    for name in (name for name, present in given.items() if present):
        then = " and use vispe apply with its model" if name == "cluster" else ""
        raise OptionError(
            f"{name} does not work on images that are read block by block; cut out a part as a TIFF file, try it "
            f"there{then}."
        )
