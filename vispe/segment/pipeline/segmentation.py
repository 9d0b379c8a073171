"""Runs of `segment` and `apply`.

`segment` trains one classifier on all labelled images together (or finds clusters), then predicts image by
image; `apply` runs the prediction with a saved model. Each file is written under a temporary name and
renamed; the model is written first and the report is updated after every image. A run that is killed leaves only
complete files, and the same call resumes it.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from vispe.images import remote
from vispe.segment.classify.clustering import METHODS, PixelClusters
from vispe.segment.classify.pixel_classifier import KINDS
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.model.model_file import load_model, open_features
from vispe.segment.model.prediction import Segmenter
from vispe.segment.objects.options import ObjectOptions
from vispe.segment.out_of_core import out_of_core_images
from vispe.segment.pipeline.segmenters import resumed_segmenter, trained_segmenter
from vispe.segment.run.batch_run import Batch
from vispe.segment.run.object_training import train_objects
from vispe.segment.run.reports.run_report import ProgressCallbacks, Report
from vispe.segment.run.request import Request, requested_features
from vispe.segment.run.run_state import Run
from vispe.segment.run.scoring import ScoreOptions
from vispe.segment.run.stored_inputs import use_stored_features
from vispe.segment.text.config import TextConfig
from vispe.segment.text.prompts import Prompts
from vispe.segment.types import LabelOptions, Paths, PostProcessing, ReadOptions


def segment(
    images: Paths,
    out: str | Path,
    *,
    labels: Paths = (),
    cluster: int | Literal["auto"] | None = None,
    cluster_method: str = METHODS[0],
    text: Prompts | None = None,
    classifier: str = KINDS[0],
    features: FeatureConfig | TextConfig | None = None,
    reading: ReadOptions | None = None,
    labelling: LabelOptions | None = None,
    scoring: ScoreOptions | None = None,
    post: PostProcessing | None = None,
    objects: ObjectOptions | None = None,
    object_classes: Paths = (),
    materials: bool = False,
    trust: bool = False,
    stored_features: str | Path | None = None,
    seed: int = 0,
    device: str = "auto",
    force: bool = False,
    watch: ProgressCallbacks | None = None,
    memory: str | None = None,
    scheduler: str | None = None,
    storage_options: Mapping[str, Any] | str | Path | None = None,
) -> Report:
    """Train on labels, or find clusters, and segment every image.

    Args:
        images: files, folders or globs.
        out: folder for the results: for each image `<stem>_seg.png` (`.tif` for stacks), `_prob.tif`,
            `_uncertainty.png` (`.tif`), `_overlay.png` (of the middle page), with `materials` also
            `_materials.csv`, with `trust` also `_trust.png` and
            `_disagreement.png` (of the middle page); `model.vispe`, `report.html`, `report.json` and
            `report.csv`.
        labels: label files; one label for one image, or several matched by name (`a.png` or `a_labels.png`
            belongs to image `a`). Images without labels are predicted as well.
        cluster: number of clusters, instead of labels; `'auto'` chooses 2 to 8 by peaks of grey levels or silhouette
            (`vispe.segment.classify.cluster_count`), and plots them in `clusters.png`.
        cluster_method: `'kmeans'` or `'spectral'`.
        text: text prompts of the classes, instead of labels; nothing is trained.
        classifier: `'ensemble'`, `'logistic'`, `'forest'` or `'boosting'`.
        features: features of a pixel; if None, `DEFAULT`. With `text` a `TextConfig`, which names an open_clip model.
        reading: options of image reading.
        labelling: options of label reading.
        scoring: ground truth.
        post: reweighting and smoothing of the result.
        objects: classes whose connected components are split, measured and counted; also writes
            `<stem>_objects.tif`, `<stem>_objects.csv`, `<stem>_objects.png` and `objects.csv`.
        object_classes: examples of classes of objects, from which a classifier by size, shape and mean grey is
            learnt: CSV files (`vispe.segment.objects.examples.read_examples`) or label files, matched like `labels`.
            Adds the columns `object_class` and `object_probability`, and writes `<stem>_object_classes.png`; the
            classifier is part of `model.vispe`, and `apply` repeats it.
        materials: measure each page: intercepts, grain size, interfaces, correlation (`vispe.segment.materials`).
        trust: report whether the result depends on the pose of the sample (rotations, reflections, shifts).
        stored_features: folder of `store_features` with the model outputs of all images.
        seed: seed of all random numbers.
        device: `'auto'`, `'cpu'`, `'cuda'` ...
        force: overwrite existing results.
        watch: callbacks for progress.
        memory: memory limit such as '2 GiB' for images in Zarr stores and for large TIFF files.
        scheduler: address of a dask scheduler for such images.
        storage_options: options of fsspec for images at URLs, or a JSON object or file with them; they are not stored.

    Returns:
        The report, as written to `report.json`.

    Raises:
        OptionError: not exactly one of `labels`, `cluster` and `text`, or an unknown name.
        InputError: there is no input, results exist, or labels do not match. A single image that cannot be
            used is an error as well; in a batch, such an image is listed in `failures`, and the run
            continues.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from PIL import Image
        >>> folder = Path(tempfile.mkdtemp())
        >>> grey = np.repeat([[60, 190]], 48, 0).repeat(24, 1).astype(np.uint8)
        >>> Image.fromarray(grey).save(folder / "a.png")
        >>> report = segment(folder / "a.png", folder / "out", cluster=2, features=FeatureConfig())
        >>> report.images[0]["map_fractions"]
        {'cluster 1': 0.5, 'cluster 2': 0.5}
    """
    request = Request.of("segment", locals())
    request.check_sources()
    with remote.storage_options(request.storage_options):
        return _segment(request)


def _segment(request: Request) -> Report:
    run = _open(request)
    with run.locked_results():
        saved_model = run.resumed_model()
        segmenter = trained_segmenter(run) if saved_model is None else resumed_segmenter(run, saved_model)
        if saved_model is None:
            if request.object_classes:
                segmenter = train_objects(run, segmenter)
            run.write_model(segmenter.model)
        return run.predict(segmenter)


def _open(request: Request) -> Run:
    """Open the images of a run: in blocks, or each completely in memory."""
    stores = out_of_core_images(request.images, request.memory, request.scheduler)
    if not stores:
        return Batch(request)
    from vispe.segment.out_of_core.store_run import OutOfCoreRun

    return OutOfCoreRun(request, stores)


def apply(
    model: str | Path,
    images: Paths,
    out: str | Path,
    *,
    reading: ReadOptions | None = None,
    scoring: ScoreOptions | None = None,
    post: PostProcessing | None = None,
    objects: ObjectOptions | None = None,
    materials: bool = False,
    trust: bool = False,
    stored_features: str | Path | None = None,
    weights: str | None = None,
    allow_download: bool = False,
    tile: int | None = None,
    device: str = "auto",
    force: bool = False,
    watch: ProgressCallbacks | None = None,
    memory: str | None = None,
    scheduler: str | None = None,
    storage_options: Mapping[str, Any] | str | Path | None = None,
) -> Report:
    """Segment images with the model of an earlier run.

    Args:
        model: a `.vispe` file.
        images: files, folders or globs.
        out: folder for the results, as in `segment`; no model is written.
        reading: options of image reading; normalisation is always that of the model.
        scoring: ground truth.
        post: reweighting and smoothing of the result.
        objects: classes whose connected components are split, measured and counted; also writes
            `<stem>_objects.tif`, `<stem>_objects.csv`, `<stem>_objects.png` and `objects.csv`. If None, those of the
            object classes of the model, if it has any.
        materials: measure each page: intercepts, grain size, interfaces, correlation (`vispe.segment.materials`).
        trust: report whether the result depends on the pose of the sample (rotations, reflections, shifts).
        stored_features: as in `segment`.
        weights: new path of the token model's checkpoint, if it has moved; the weights must be identical.
        allow_download: download weights that the model file names and that are not on this disk.
        tile: another tile side in pixels, to reduce memory.
        device: `'auto'`, `'cpu'`, `'cuda'` ...
        force: overwrite existing results.
        watch: callbacks for progress.
        memory: memory limit for images in Zarr stores and for large TIFF files, as in `segment`.
        scheduler: address of a dask scheduler for such images.
        storage_options: options of fsspec for images at URLs, or a JSON object or file with them; they are not stored.

    Raises:
        OptionError: an option that does not apply to the model.
        InputError: as `segment`; an unusable model file.

    Example:
        >>> import tempfile
        >>> import numpy as np
        >>> from PIL import Image
        >>> folder = Path(tempfile.mkdtemp())
        >>> grey = np.repeat([[60, 190]], 48, 0).repeat(24, 1).astype(np.uint8)
        >>> Image.fromarray(grey).save(folder / "a.png")
        >>> report = segment(folder / "a.png", folder / "out", cluster=2, features=FeatureConfig())
        >>> report = apply(folder / "out" / "model.vispe", folder / "a.png", folder / "again")
        >>> report.images[0]["map_fractions"]
        {'cluster 1': 0.5, 'cluster 2': 0.5}
    """
    request = Request.of("apply", locals())
    with remote.storage_options(request.storage_options):
        return _apply(request)


def _apply(request: Request) -> Report:
    loaded = load_model(str(request.model))
    if request.objects is None and loaded.objects is not None:
        request = replace(request, objects=loaded.objects.options)
    reading = replace(request.reading, normalize=loaded.normalize, clip=loaded.clip)
    run = _open(replace(request, reading=reading))
    run.check_features(loaded.features)
    run.post.resolve_prior(loaded.classifier)
    if request.objects is not None:
        request.objects.numbers(loaded.names)
    config = requested_features(loaded, request)
    with run.locked_results():
        run.check_truth(None if isinstance(loaded.classifier, PixelClusters) else loaded.names)
        features = open_features(loaded, request.device, config, allow_download=request.allow_download)
        features = use_stored_features(features, request.stored_features, run.images, run.reading)
        return run.predict(Segmenter(loaded, features, run.post))
