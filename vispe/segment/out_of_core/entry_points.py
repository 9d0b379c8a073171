"""Out-of-core runs: `segment` and `apply` for stores."""

from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from vispe.backbones.device import choose_device
from vispe.errors import OptionError
from vispe.segment.features.pixel_features import Features
from vispe.segment.model.model_file import load_model
from vispe.segment.out_of_core import find_stores, progress
from vispe.segment.out_of_core.block_engine import check_supported, file_digest, limit_concurrency
from vispe.segment.out_of_core.store_run import OutOfCoreRun
from vispe.segment.out_of_core.train import train
from vispe.segment.run.inputs import as_list, find_files
from vispe.segment.run.request import Request
from vispe.segment.run.resume import fingerprint_files
from vispe.segment.run.run_report import Report
from vispe.segment.run.run_state import requested_features


@limit_concurrency()
def apply(request: Request, images: Sequence[Path]) -> Report:
    """Segment stores with the model of an earlier run, with the arguments of `vispe.segment.pipeline.apply`."""
    _check_supported(request)
    run = OutOfCoreRun(request, images)
    loaded = load_model(request.model)
    check_supported(loaded.features)
    requested_features(loaded, request)
    facts = {"model": file_digest(request.model), "weights": request.weights, "tile": request.tile}
    with run.locked_results():
        run.begin(_decisive(request, facts))
        return run.predict(loaded)


@limit_concurrency()
def segment(request: Request, images: Sequence[Path]) -> Report:
    """Train on scribbles in stores and segment them, with the arguments of `vispe.segment.pipeline.segment`."""
    _check_supported(request)
    check_supported(request.features)
    stores, rest = find_stores(as_list(request.labels))
    labels = stores + find_files(rest)
    run = OutOfCoreRun(request, images, labels)
    legend = request.labelling.legend
    facts = {
        "labels": {str(path.resolve()): fingerprint_files(path) for path in labels},
        "labelling": {**asdict(request.labelling), "legend": None if legend is None else str(legend)},
        "classifier": request.classifier,
        "features": asdict(request.features),
        "seed": request.seed,
    }
    with run.locked_results():
        goes_on = run.begin(_decisive(request, facts))
        model_digest = progress.trained_model(run.out) if goes_on and run.model_file.is_file() else None
        if model_digest is None or model_digest != file_digest(run.model_file):
            features = Features(request.features, seed=request.seed, device=choose_device(request.device))
            run.write_model(train(run, features), request.force or goes_on)
        return run.predict(load_model(run.model_file))


def _decisive(request: Request, facts: dict[str, Any]) -> dict[str, Any]:
    return {"command": request.command, **facts, "device": choose_device(request.device)}


def _check_supported(request: Request) -> None:
    """Raise OptionError for options that need a complete image in memory."""
    options = {
        "truth": bool(request.scoring.truth),
        "materials": request.materials,
        "trust": request.trust,
        "objects_as": request.objects is not None and bool(request.objects.kinds),
        "scene": request.reading.scene is not None,
        "crop": request.reading.crop is not None,
        "mask": bool(request.reading.mask),
        "orientation": request.reading.orientation != "stored",
        "text": request.text is not None,
        "cluster": request.cluster is not None,
    }
    for name in (name for name, present in options.items() if present):
        continuation = " and use vispe apply with the model" if name == "cluster" else ""
        raise OptionError(
            f"{name} is not supported for images processed in blocks. Crop a part, save it as a TIFF file, run "
            f"vispe segment on it{continuation}."
        )
