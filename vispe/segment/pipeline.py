"""Segmentation of micrographs from scribbles, from no labels, or with a model of an earlier run.

`segment` trains one classifier on all labelled images together (or finds clusters), then predicts image by
image; `apply` does the second half with a saved model. Each file is written under a temporary name and
renamed, the model comes first and the report is renewed after every image: a run that is killed leaves only
complete files, and the same call goes on where it stopped; see `vispe.segment.run.resume`.
"""

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

from vispe.backbones.device import choose_device
from vispe.errors import OptionError, did_you_mean
from vispe.segment.big import large_images
from vispe.segment.classify.cluster import METHODS, PixelClusters
from vispe.segment.classify.pixels import KINDS
from vispe.segment.features.dense import NAME
from vispe.segment.features.features import FeatureConfig, Features
from vispe.segment.model.file import Model, load_model, open_features
from vispe.segment.run.batch import MODEL_NAME, Batch
from vispe.segment.run.inputs import Paths, Reading
from vispe.segment.run.predict import Post
from vispe.segment.run.report import Report, Watcher
from vispe.segment.run.resume import state_of
from vispe.segment.run.scoring import Scoring
from vispe.segment.run.train import Labelling, read_drawn, train, train_clusters
from vispe.segment.text.config import TextConfig
from vispe.segment.text.prompts import Prompts

__all__ = ["DEFAULT", "MODEL_NAME", "Labelling", "Post", "Reading", "Scoring", "apply", "segment"]

_NOT_DECISIVE = frozenset(
    {"images", "out", "labels", "force", "watch", "memory", "scheduler", "allow_download"}
)

DEFAULT = FeatureConfig("both", model=NAME)
"""Features of `segment` unless told otherwise: vispe_micro beside filters.

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
            `_uncertainty.png` (`.tif`), `_overlay.png` (of the middle page), with `trust` also `_trust.png` and
            `_disagreement.png` (of the middle page); `model.vispe`, `report.json` and `report.csv`.
        labels: label files; one label for one image, or several matched by name (`a.png` or `a_labels.png`
            belongs to image `a`). Images without labels are predicted all the same.
        cluster: number of clusters, in place of labels; `'auto'` chooses 2 to 8 by their silhouette.
        cluster_method: `'kmeans'` or `'spectral'`.
        text: classes in words, in place of labels; nothing is trained. See `vispe.segment.text.prompts`.
        classifier: `'logistic'`, `'forest'` or `'boosting'`.
        features: what a pixel is described by; if None, `DEFAULT`. With `text` a
            `TextConfig`, which names a model of open_clip.
        reading: how images are read.
        labelling: how labels are read.
        scoring: ground truth.
        post: weighing and smoothing of the result.
        trust: report whether the result depends on how the sample lies; see `vispe.segment.trust`.
        seed: of all random numbers.
        device: `'auto'`, `'cpu'`, `'cuda'` ...
        force: overwrite existing results.
        watch: hears of progress.
        memory: of images in Zarr stores, and large TIFF files: what the work may take, such as '2 GiB'; see
            `vispe.segment.big`.
        scheduler: address of a dask scheduler for such images.

    Raises:
        OptionError: not exactly one of `labels`, `cluster` and `text`, or an unknown name.
        InputError: nothing to work on, results that exist, labels that do not fit; for a single image also
            any reason why it cannot be used. In a batch such an image is listed in `failures` and the rest
            goes on.
    """
    arguments = dict(locals())
    ways = {"labels": bool(labels), "cluster": cluster is not None, "text": text is not None}
    if sum(ways.values()) != 1:
        found = " and ".join(name for name, given in ways.items() if given) or "none of them"
        raise OptionError(
            f"segment needs one of labels, cluster and text, got {found}; use --labels FILE, --cluster [K] or --text "
            "A B."
        )
    if not 0 <= seed < 1 << 32:
        raise OptionError(f"seed={seed} must be a whole number from 0 to {(1 << 32) - 1}.")
    if classifier not in KINDS:
        hint = did_you_mean(classifier, KINDS)
        raise OptionError(f"classifier={classifier!r} is not one of {', '.join(KINDS)}.{hint}")
    if cluster is None and cluster_method != METHODS[0]:
        raise OptionError(
            f"cluster_method={cluster_method!r} has no effect on labels; use it with --cluster."
        )
    if cluster is not None and classifier != KINDS[0]:
        raise OptionError(f"classifier={classifier!r} has no effect on clusters; use --cluster-method.")
    given = [
        name for name, value in vars(labelling or Labelling()).items() if value != getattr(Labelling(), name)
    ]
    if given and not labels:
        raise OptionError(f"{given[0]} has no effect without labels; leave it out.")
    if text is not None and classifier != KINDS[0]:
        raise OptionError(
            f"classifier={classifier!r} has no effect on text, which trains none; leave it out."
        )
    if (text is not None) != isinstance(features, TextConfig) and features is not None:
        wanted = "a TextConfig" if text is not None else "a FeatureConfig"
        raise OptionError(f"features is a {type(features).__name__}, but this segmentation needs {wanted}.")
    if post is not None and (text is not None or cluster is not None):
        post.weighing(None)
    if stores := large_images(images, memory, scheduler):
        from vispe.segment.big import run as large

        large.refuse(scoring, trust=trust, text=text is not None, cluster=cluster is not None)
        return large.segment(
            *(stores, out, labels, classifier, features or DEFAULT, reading, labelling, post, seed, device),
            force=force,
            watch=watch,
            memory=memory,
            scheduler=scheduler,
        )
    run = Batch(images, out, reading, scoring, post, force, watch, labels=labels, model=True, trust=trust)
    with run.begun(_decisive("segment", arguments)):
        if (kept := run.kept_model()) is not None:
            run.model, run.features = kept, open_features(kept, device, allow_download=True)
            if labels:
                read_drawn(run, labelling or Labelling())  # labelled pixels are left out of scores
            run.check_truth(None if cluster is not None else len(kept.names))
        elif text is not None:
            run.check_truth(len(text.names))
            from vispe.segment.text.zero_shot import text_model  # brings open_clip along

            run.features, run.model = text_model(run, text, features or TextConfig(), seed, device)
        else:
            run.features = Features(features or DEFAULT, seed=seed, device=device)
            if cluster is not None:
                run.model = _clustered(run, PixelClusters(cluster, cluster_method, seed=seed), seed)
            else:
                run.model = train(run, labelling or Labelling(), classifier, seed)
        if kept is None:
            run.keep_model()
        return run.predict("segment", device)


def _clustered(run: Batch, unfitted: PixelClusters, seed: int) -> Model:
    """Find clusters, and say what their user should know."""
    found = train_clusters(run, unfitted, seed)
    if said := unfitted.note():
        run.note(said)
    return replace(found, notes={**found.notes, **unfitted.facts()})


def _decisive(command: str, given: Mapping[str, Any]) -> dict[str, Any]:
    """Choose from the arguments of a function those that decide the results, with fingerprints of the files they name.

    The images, labels and truth that a run has found are left to it.
    """
    kept = {key: value for key, value in given.items() if key not in _NOT_DECISIVE}
    named = [
        getattr(given.get("labelling"), "legend", None),
        getattr(given.get("features"), "weights", None),
        given.get("weights"),
        given.get("model"),
    ]
    states = {str(name): state_of(Path(name)) for name in named if name is not None and Path(name).is_file()}
    return {"command": command, **kept, "device": choose_device(given["device"]), "named_files": states}


def apply(
    model: str | Path,
    images: Paths,
    out: str | Path,
    *,
    reading: Reading | None = None,
    scoring: Scoring | None = None,
    post: Post | None = None,
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
        trust: report whether the result depends on how the sample lies; see `vispe.segment.trust`.
        weights: where the checkpoint of the token model is now, if it has moved; it must be the same.
        allow_download: fetch weights that the model file names and that are not on this disk.
        tile: another tile side in pixels, for less memory.
        device: `'auto'`, `'cpu'`, `'cuda'` ...
        force: overwrite existing results.
        watch: hears of progress.
        memory: for images larger than memory, as in `segment`.
        scheduler: likewise.

    Raises:
        InputError: as `segment`; a model file that cannot be used.
    """
    arguments = dict(locals())
    if stores := large_images(images, memory, scheduler):
        from vispe.segment.big import run as large

        large.refuse(scoring, trust=trust)
        return large.apply(
            *(model, stores, out, reading, post, weights, tile, device),
            force=force,
            watch=watch,
            memory=memory,
            scheduler=scheduler,
        )
    loaded = load_model(model)
    run = Batch(images, out, reading, scoring, post, force, watch, protect=[model], trust=trust)
    run.post.weighing(loaded.classifier)
    run.reading = replace(run.reading, normalize=loaded.normalize, clip=loaded.clip)
    config = loaded.features
    if weights is not None:
        if config.kind == "filters":
            raise OptionError(f"weights={weights!r} has no effect: {model} uses filters only; leave it out.")
        config = replace(config, weights=weights)
    if tile is not None:
        config = replace(config, tile=tile)
    with run.begun(_decisive("apply", arguments)):
        run.check_truth(None if isinstance(loaded.classifier, PixelClusters) else len(loaded.names))
        run.features = open_features(loaded, device, config, allow_download=allow_download)
        run.model = loaded
        return run.predict("apply", device, model_file=str(model))
