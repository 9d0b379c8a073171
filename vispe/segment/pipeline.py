"""Segmentation of micrographs from scribbles, without labels, or with the model of an earlier run.

`segment` trains one classifier on all labelled images together (or finds clusters), then predicts image by
image; `apply` runs the prediction with a saved model. Each file is written under a temporary name and
renamed; the model is written first and the report is updated after every image. A run that is killed leaves only
complete files, and the same call resumes it.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from vispe.errors import InputError, OptionError, VispeError, is_out_of_memory
from vispe.images import remote
from vispe.segment.classify.clustering import METHODS, PixelClusters
from vispe.segment.classify.pixel_classifier import KINDS
from vispe.segment.features.pixel_features import FeatureConfig, Features
from vispe.segment.features.stored_features import page_digest, page_file, save_page
from vispe.segment.model.model_file import Model, load_model, open_features
from vispe.segment.model.prediction import Segmenter
from vispe.segment.objects.options import ObjectOptions
from vispe.segment.out_of_core import out_of_core_images
from vispe.segment.run.batch_run import Batch
from vispe.segment.run.disk_space import disk_space_guard
from vispe.segment.run.inputs import BatchImage, expected_facts, use_stored_features
from vispe.segment.run.request import DEFAULT, Request
from vispe.segment.run.run_report import ProgressCallbacks, Report
from vispe.segment.run.run_state import MODEL_NAME, Run, requested_features
from vispe.segment.run.scoring import ScoreOptions
from vispe.segment.run.train import train, train_clusters, train_objects
from vispe.segment.text.config import TextConfig
from vispe.segment.text.prompts import Prompts
from vispe.segment.types import LabelOptions, Paths, PostProcessing, ReadOptions
from vispe.utils.files import check_writable

__all__ = [
    "DEFAULT",
    "MODEL_NAME",
    "LabelOptions",
    "ObjectOptions",
    "PostProcessing",
    "ReadOptions",
    "ScoreOptions",
    "apply",
    "segment",
    "store_features",
]


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
    _check(request)
    with remote.storage_options(request.storage_options):
        return _segment(request)


def _segment(request: Request) -> Report:
    run = _open(request)
    with run.locked_results():
        saved_model = run.resumed_model()
        segmenter = _trained_segmenter(run) if saved_model is None else _resumed_segmenter(run, saved_model)
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


def _check(request: Request) -> None:
    sources = {
        "labels": bool(request.labels),
        "cluster": request.cluster is not None,
        "text": request.text is not None,
    }
    if sum(sources.values()) != 1:
        passed = " and ".join(name for name, present in sources.items() if present) or "none of them"
        raise OptionError(
            f"segment: exactly one of labels, cluster and text is required, got {passed}. Pass labels=FILE, cluster=K "
            "or text=WORDS."
        )
    classifier, method = request.classifier, request.cluster_method
    if not sources["cluster"] and method != METHODS[0]:
        raise OptionError(f"cluster_method={method!r} has no effect on labels. Use it with cluster.")
    if sources["cluster"] and classifier != KINDS[0]:
        raise OptionError(f"classifier={classifier!r} has no effect on clusters. Use cluster_method.")
    changed = [
        name for name, value in vars(request.labelling).items() if value != getattr(LabelOptions(), name)
    ]
    if changed and not sources["labels"]:
        raise OptionError(f"{changed[0]} has no effect without labels. Omit it.")
    if sources["text"] and classifier != KINDS[0]:
        raise OptionError(
            f"classifier={classifier!r} has no effect on text prompts, which need no training. Omit it."
        )
    features = request.features
    if features is not None and sources["text"] != isinstance(features, TextConfig):
        expected = "a TextConfig" if sources["text"] else "a FeatureConfig"
        raise OptionError(f"features is a {type(features).__name__}, but this segmentation needs {expected}.")
    if not sources["labels"]:
        request.post.resolve_prior(None)
    if request.object_classes and request.objects is None:
        raise OptionError("object_classes has no effect without objects. Pass class names as objects.")
    if request.objects is not None and (
        names := request.labelling.classes or getattr(request.text, "names", None)
    ):
        request.objects.numbers(names)


def _resumed_segmenter(run: Run, model: Model) -> Segmenter:
    features = open_features(model, run.request.device, allow_download=True)
    features = use_stored_features(features, run.request.stored_features, run.images, run.reading)
    if run.request.labels and run.request.scoring.truth:
        run.training_labels()  # labelled pixels are excluded from the scores
    run.check_truth(None if run.request.cluster is not None else model.names)
    return Segmenter(model, features, run.post)


def _trained_segmenter(run: Run) -> Segmenter:
    """Train on labels, find clusters, or encode text prompts."""
    request = run.request
    if request.text is not None:
        run.check_truth(request.text.names)
        from vispe.segment.run.zero_shot import text_model  # imports open_clip

        if request.stored_features is not None:
            raise OptionError("stored_features has no effect on text prompts. Omit it.")
        config = request.features or TextConfig()
        features, model = text_model(run, request.text, config, request.seed, request.device)
        return Segmenter(model, features, run.post)
    features = Features(request.features or DEFAULT, seed=request.seed, device=request.device)
    features = use_stored_features(features, request.stored_features, run.images, run.reading)
    if request.cluster is not None:
        clusters = PixelClusters(request.cluster, request.cluster_method, seed=request.seed)
        return Segmenter(train_clusters(run, features, clusters), features, run.post)
    return Segmenter(train(run, features), features, run.post)


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


def store_features(
    images: Paths,
    out: str | Path,
    *,
    features: FeatureConfig | None = None,
    reading: ReadOptions | None = None,
    seed: int = 0,
    device: str = "auto",
    force: bool = False,
    watch: ProgressCallbacks | None = None,
) -> Report:
    """Run the model of the features on images, and write its outputs for `stored_features` of `segment`.

    Args:
        images: files, folders or globs.
        out: folder for `<stem>_features_0000.safetensors` of each page: 32 to 40 bytes per pixel of a grey image for
            vispe_micro, and 4 bytes per value of each token of a timm model.
        features: features of a pixel; None: `DEFAULT`.
        reading: options of image reading and normalisation, which must be those of the segmentation.
        seed: seed of random weights.
        device: `'auto'`, `'cpu'`, `'cuda'` ...
        force: overwrite existing files.
        watch: callbacks for progress.

    Returns:
        The report: 'image', 'pages', 'files' and 'bytes' of each image, and the failures.

    Raises:
        OptionError: features without a model, or with filters of volumes.
        InputError: there is no input, files exist, two images have the same name, no image can be used, or memory
            runs out.
    """
    request = Request.of("features", locals())
    if out_of_core_images(request.images, None, None):
        raise OptionError(
            "features are stored for images in memory, but the images include a store or a file that is processed in "
            "blocks. Crop a part and save it as a TIFF file."
        )
    run, folder = Batch(request), Path(out)
    extractor = Features(request.features or DEFAULT, seed=seed, device=device)
    if extractor.config.kind == "filters":
        raise OptionError(
            "features=filters has no model whose outputs could be stored. Use features=both or tokens."
        )
    # the pages of two images of one name would be stored in the same files
    check_writable([page_file(folder, image.path.stem, 0) for image in run.images], True)
    run.watch.start("computing features", len(run.images))
    for image in list(run.images):
        try:
            run.report.images.append(_store(run, image, extractor, folder))
        except (VispeError, OSError) as error:
            run.fail(image, error)
    return run.report


def _store(run: Batch, image: BatchImage, extractor: Features, folder: Path) -> dict[str, Any]:
    """Write the files of one image, and return its record."""
    grey = run.pages(image, None)
    files = [page_file(folder, image.path.stem, number) for number in range(len(grey.pages))]
    check_writable(files, run.force, protect=[image.path])
    folder.mkdir(parents=True, exist_ok=True)
    facts, size = {**expected_facts(image, run.reading, extractor), "pages": len(files)}, 0
    for note in grey.notes:
        run.note(note)
    for number, path in enumerate(files):
        page, valid = grey.page(number)
        try:
            maps, model_input = extractor.model_maps(page, valid)
            page_facts = {**facts, "page": number, "page_sha256": page_digest(model_input)}
            with disk_space_guard(folder, path.name):
                size += save_page(path, maps, page_facts, run.force)
        except (MemoryError, RuntimeError) as error:
            if not is_out_of_memory(error):
                raise
            # smaller tiles, as in `segment`, would be other features than those that a segmentation expects
            raise InputError(
                f"out of memory while the model ran on page {number} of {image.path}. Use a smaller tile, such as "
                "tile=256, here and in the segmentation."
            ) from error
        run.watch.step(1 / len(files))
    record = {
        "image": str(image.path),
        "pages": len(files),
        "files": [str(path) for path in files],
        "bytes": size,
    }
    run.watch.done(record)
    return record
