"""Segmentation of micrographs from scribbles, from no labels, or with a model of an earlier run.

`segment` trains one classifier on all labelled images together (or finds clusters), then predicts image by
image; `apply` does the second half with a saved model. Each file is written under a temporary name and
renamed, the model comes first and the report is renewed after every image: a run that is killed leaves only
complete files.
"""

from dataclasses import replace
from pathlib import Path

from vispe.errors import OptionError, did_you_mean
from vispe.segment.batch import MODEL_NAME, Batch, Paths, Reading, Scoring
from vispe.segment.classify import KINDS
from vispe.segment.cluster import PixelClusters
from vispe.segment.dense import NAME
from vispe.segment.features import FeatureConfig, Features
from vispe.segment.modelfile import load_model, save_model
from vispe.segment.predict import Post
from vispe.segment.report import Report, Watcher
from vispe.segment.train import Labelling, train, train_clusters

__all__ = ["DEFAULT", "MODEL_NAME", "Labelling", "Post", "Reading", "Scoring", "apply", "segment"]

DEFAULT = FeatureConfig("both", model=NAME)
"""Features of `segment` with labels unless told otherwise: vispe_micro beside filters.

Clusters get filters alone: what a classifier tells apart need not be what varies most.
"""


def segment(
    images: Paths,
    out: str | Path,
    *,
    labels: Paths = (),
    cluster: int | None = None,
    classifier: str = KINDS[0],
    features: FeatureConfig | None = None,
    reading: Reading | None = None,
    labelling: Labelling | None = None,
    scoring: Scoring | None = None,
    post: Post | None = None,
    seed: int = 0,
    device: str = "auto",
    force: bool = False,
    watch: Watcher | None = None,
) -> Report:
    """Train on labels, or find clusters, and segment every image.

    Args:
        images: files, folders or globs.
        out: folder for the results: for each image `<stem>_seg.png` (`.tif` for stacks), `_prob.tif`,
            `_uncertainty.png` (`.tif`), `_overlay.png` (of the middle page); `model.vispe`, `report.json` and
            `report.csv`.
        labels: label files; one label for one image, or several matched by name (`a.png` or `a_labels.png`
            belongs to image `a`). Images without labels are predicted all the same.
        cluster: number of clusters, in place of labels.
        classifier: `'logistic'`, `'forest'` or `'boosting'`.
        features: what a pixel is described by; if None, `DEFAULT`, or filters alone for clusters.
        reading: how images are read.
        labelling: how labels are read.
        scoring: ground truth.
        post: smoothing of the result.
        seed: of all random numbers.
        device: `'auto'`, `'cpu'`, `'cuda'` ...
        force: overwrite existing results.
        watch: hears of progress.

    Raises:
        OptionError: neither or both of `labels` and `cluster`, or an unknown name.
        InputError: nothing to work on, results that exist, labels that do not fit; for a single image also
            any reason why it cannot be used. In a batch such an image is listed in `failures` and the rest
            goes on.
    """
    if bool(labels) == (cluster is not None):
        found = "both" if labels else "neither"
        raise OptionError(
            f"segment needs labels or cluster=K, got {found}; use --labels FILE or --cluster K."
        )
    if classifier not in KINDS:
        hint = did_you_mean(classifier, KINDS)
        raise OptionError(f"classifier={classifier!r} is not one of {', '.join(KINDS)}.{hint}")
    run = Batch(images, out, reading, scoring, post, force, watch, labels=labels, model=True)
    unfitted = None if cluster is None else PixelClusters(cluster, seed=seed)
    features = features or (DEFAULT if cluster is None else FeatureConfig())
    run.features = Features(features, seed=seed, device=device)
    labelling = labelling or Labelling()
    if unfitted is not None:
        run.model = train_clusters(run, unfitted, seed)
    else:
        run.model = train(run, labelling, classifier, seed)
    save_model(run.out / MODEL_NAME, run.model, force)
    return run.predict("segment", device)


def apply(
    model: str | Path,
    images: Paths,
    out: str | Path,
    *,
    reading: Reading | None = None,
    scoring: Scoring | None = None,
    post: Post | None = None,
    weights: str | None = None,
    tile: int | None = None,
    device: str = "auto",
    force: bool = False,
    watch: Watcher | None = None,
) -> Report:
    """Segment images with the model of an earlier run.

    Args:
        model: a `.vispe` file.
        images: files, folders or globs.
        out: folder for the results, as in `segment`; no model is written.
        reading: how images are read; normalisation is always that of the model.
        scoring: ground truth.
        post: smoothing of the result.
        weights: where the checkpoint of the token model is now, if it has moved; it must be the same.
        tile: another tile side in pixels, for less memory.
        device: `'auto'`, `'cpu'`, `'cuda'` ...
        force: overwrite existing results.
        watch: hears of progress.

    Raises:
        InputError: as `segment`; a model file that cannot be used.
    """
    loaded = load_model(model)
    run = Batch(images, out, reading, scoring, post, force, watch, protect=[model])
    run.reading = replace(run.reading, normalize=loaded.normalize, clip=loaded.clip)
    config = loaded.features
    if weights is not None:
        if config.kind == "filters":
            raise OptionError(f"weights={weights!r} has no effect: {model} uses filters only; leave it out.")
        config = replace(config, weights=weights)
    if tile is not None:
        config = replace(config, tile=tile)
    run.features = Features(config, seed=loaded.seed, device=device, basis=loaded.basis)
    run.model = loaded
    return run.predict("apply", device, model_file=str(model))
