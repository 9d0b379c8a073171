"""Segmentation of micrographs from scribbles, from no labels, or with a model of an earlier run.

`segment` trains one classifier on all labelled images together (or finds clusters), then predicts image by
image; `apply` does the second half with a saved model. Each file is written under a temporary name and
renamed, the model comes first and the report is renewed after every image: a run that is killed leaves only
complete files, and the same call goes on where it stopped.
"""

from dataclasses import replace
from pathlib import Path
from typing import Literal

from vispe.errors import OptionError, did_you_mean
from vispe.segment.classify.clustering import METHODS, PixelClusters
from vispe.segment.classify.pixel_classifier import KINDS
from vispe.segment.features.micro_features import NAME
from vispe.segment.features.pixel_features import FeatureConfig, Features
from vispe.segment.model.model_file import Model, load_model, open_features
from vispe.segment.objects.options import ObjectOptions
from vispe.segment.out_of_core import large_images
from vispe.segment.run.batch_run import Batch
from vispe.segment.run.inputs import Paths, Reading
from vispe.segment.run.prediction import Post, Segmenter
from vispe.segment.run.request import Labelling, Request
from vispe.segment.run.run_report import Report, Watcher
from vispe.segment.run.run_state import MODEL_NAME, refitted
from vispe.segment.run.scoring import Scoring
from vispe.segment.run.train import read_drawn, train, train_clusters
from vispe.segment.text.config import TextConfig
from vispe.segment.text.prompts import Prompts

__all__ = [
    "DEFAULT",
    "MODEL_NAME",
    "Labelling",
    "ObjectOptions",
    "Post",
    "Reading",
    "Scoring",
    "apply",
    "segment",
]

DEFAULT = FeatureConfig("both", model=NAME)
"""Features of `segment` unless others are given: vispe_micro beside filters.

For labels as for clusters; how clusters fare with each is measured in `eval/results/cluster.json`.
"""


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
    reading: Reading | None = None,
    labelling: Labelling | None = None,
    scoring: Scoring | None = None,
    post: Post | None = None,
    objects: ObjectOptions | None = None,
    materials: bool = False,
    trust: bool = False,
    seed: int = 0,
    device: str = "auto",
    force: bool = False,
    watch: Watcher | None = None,
    memory: str | None = None,
    scheduler: str | None = None,
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
            belongs to image `a`). Images without labels are predicted all the same.
        cluster: number of clusters, in place of labels; `'auto'` chooses 2 to 8 by peaks of grey levels or silhouette
            (`vispe.segment.classify.cluster_count`), and draws them in `clusters.png`.
        cluster_method: `'kmeans'` or `'spectral'`.
        text: classes in words, in place of labels; nothing is trained.
        classifier: `'logistic'`, `'forest'` or `'boosting'`.
        features: what a pixel is described by; if None, `DEFAULT`. With `text` a
            `TextConfig`, which names a model of open_clip.
        reading: how images are read.
        labelling: how labels are read.
        scoring: ground truth.
        post: weighing and smoothing of the result.
        objects: patches of which classes are objects to be cut, measured and counted: also `<stem>_objects.tif`,
            `<stem>_objects.csv`, `<stem>_objects.png` and `objects.csv`.
        materials: measure each page: intercepts, grain size, interfaces, correlation (`vispe.segment.materials`).
        trust: report whether the result depends on how the sample lies, turned, mirrored or shifted.
        seed: of all random numbers.
        device: `'auto'`, `'cpu'`, `'cuda'` ...
        force: overwrite existing results.
        watch: its methods are called as the run goes on.
        memory: of images in Zarr stores, and large TIFF files: what the work may take, such as '2 GiB'.
        scheduler: address of a dask scheduler for such images.

    Raises:
        OptionError: not exactly one of `labels`, `cluster` and `text`, or an unknown name.
        InputError: nothing to work on, results that exist, labels that do not fit; for a single image also
            any reason why it cannot be used. In a batch such an image is listed in `failures` and the rest
            goes on.
    """
    asked = Request.of("segment", locals())
    _check(asked)
    if stores := large_images(images, memory, scheduler):
        from vispe.segment.out_of_core import entry_points

        return entry_points.segment(replace(asked, features=features or DEFAULT), stores)
    run = Batch(asked)
    with run.begun():
        kept = run.kept_model()
        by = _learnt(run) if kept is None else _kept(run, kept)
        if kept is None:
            run.keep_model(by.model)
        return run.predict(by)


def _check(asked: Request) -> None:
    """Refuse options of `segment` that exclude each other."""
    ways = {
        "labels": bool(asked.labels),
        "cluster": asked.cluster is not None,
        "text": asked.text is not None,
    }
    if sum(ways.values()) != 1:
        given = " and ".join(name for name, present in ways.items() if present) or "none of them"
        raise OptionError(
            f"segment needs one of labels, cluster and text, got {given}; use --labels FILE, --cluster [K] or --text "
            "A B."
        )
    if not 0 <= asked.seed < 1 << 32:
        raise OptionError(f"seed={asked.seed} must be a whole number from 0 to {(1 << 32) - 1}.")
    classifier, method = asked.classifier, asked.cluster_method
    if classifier not in KINDS:
        hint = did_you_mean(classifier, KINDS)
        raise OptionError(f"classifier={classifier!r} is not one of {', '.join(KINDS)}.{hint}")
    if not ways["cluster"] and method != METHODS[0]:
        raise OptionError(f"cluster_method={method!r} has no effect on labels; use it with --cluster.")
    if ways["cluster"] and classifier != KINDS[0]:
        raise OptionError(f"classifier={classifier!r} has no effect on clusters; use --cluster-method.")
    changed = [name for name, value in vars(asked.labelling).items() if value != getattr(Labelling(), name)]
    if changed and not ways["labels"]:
        raise OptionError(f"{changed[0]} has no effect without labels; leave it out.")
    if ways["text"] and classifier != KINDS[0]:
        raise OptionError(f"classifier={classifier!r} has no effect on text, which trains none.")
    features = asked.features
    if features is not None and ways["text"] != isinstance(features, TextConfig):
        wanted = "a TextConfig" if ways["text"] else "a FeatureConfig"
        raise OptionError(f"features is a {type(features).__name__}, but this segmentation needs {wanted}.")
    if not ways["labels"]:
        asked.post.weighing(None)
    if asked.objects is not None and (names := asked.labelling.classes or getattr(asked.text, "names", None)):
        asked.objects.numbers(names)


def _kept(run: Batch, model: Model) -> Segmenter:
    """Go on with the model of an unfinished run."""
    features = open_features(model, run.asked.device, allow_download=True)
    if run.asked.labels:
        read_drawn(run)  # labelled pixels are left out of scores
    run.check_truth(None if run.asked.cluster is not None else model.names)
    return Segmenter(model, features, run.post)


def _learnt(run: Batch) -> Segmenter:
    """Train on labels, find clusters, or read texts."""
    asked = run.asked
    if asked.text is not None:
        run.check_truth(asked.text.names)
        from vispe.segment.text.zero_shot import text_model  # brings open_clip along

        config = asked.features or TextConfig()
        features, model = text_model(run, asked.text, config, asked.seed, asked.device)
        return Segmenter(model, features, run.post)
    features = Features(asked.features or DEFAULT, seed=asked.seed, device=asked.device)
    if asked.cluster is not None:
        clusters = PixelClusters(asked.cluster, asked.cluster_method, seed=asked.seed)
        return Segmenter(train_clusters(run, features, clusters), features, run.post)
    return Segmenter(train(run, features), features, run.post)


def apply(
    model: str | Path,
    images: Paths,
    out: str | Path,
    *,
    reading: Reading | None = None,
    scoring: Scoring | None = None,
    post: Post | None = None,
    objects: ObjectOptions | None = None,
    materials: bool = False,
    trust: bool = False,
    weights: str | None = None,
    allow_download: bool = False,
    tile: int | None = None,
    device: str = "auto",
    force: bool = False,
    watch: Watcher | None = None,
    memory: str | None = None,
    scheduler: str | None = None,
) -> Report:
    """Segment images with the model of an earlier run.

    Args:
        model: a `.vispe` file.
        images: files, folders or globs.
        out: folder for the results, as in `segment`; no model is written.
        reading: how images are read; normalisation is always that of the model.
        scoring: ground truth.
        post: weighing and smoothing of the result.
        objects: patches of which classes are objects to be cut, measured and counted: also `<stem>_objects.tif`,
            `<stem>_objects.csv`, `<stem>_objects.png` and `objects.csv`.
        materials: measure each page: intercepts, grain size, interfaces, correlation (`vispe.segment.materials`).
        trust: report whether the result depends on how the sample lies, turned, mirrored or shifted.
        weights: where the checkpoint of the token model is now, if it has moved; it must be the same.
        allow_download: fetch weights that the model file names and that are not on this disk.
        tile: another tile side in pixels, for less memory.
        device: `'auto'`, `'cpu'`, `'cuda'` ...
        force: overwrite existing results.
        watch: its methods are called as the run goes on.
        memory: of images in Zarr stores, and large TIFF files, as in `segment`.
        scheduler: address of a dask scheduler for such images.

    Raises:
        InputError: as `segment`; a model file that cannot be used.
    """
    asked = Request.of("apply", locals())
    if stores := large_images(images, memory, scheduler):
        from vispe.segment.out_of_core import entry_points

        return entry_points.apply(asked, stores)
    loaded = load_model(model)
    reading = replace(asked.reading, normalize=loaded.normalize, clip=loaded.clip)
    run = Batch(replace(asked, reading=reading))
    run.post.weighing(loaded.classifier)
    if asked.objects is not None:
        asked.objects.numbers(loaded.names)
    config = refitted(loaded, asked)
    with run.begun():
        run.check_truth(None if isinstance(loaded.classifier, PixelClusters) else loaded.names)
        features = open_features(loaded, device, config, allow_download=allow_download)
        return run.predict(Segmenter(loaded, features, run.post))
