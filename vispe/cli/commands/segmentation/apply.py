"""`vispe apply`: segment more images with a saved model."""

from typing import Literal

POSITIONALS = ("model", "images")
SHORT = {"out": "-o"}
LIBRARY_NAMES = {"zero_is": "truth_zero", "page": "truth_page", "include_labelled": "score_labelled"}
ADVANCED = (
    *("truth_zero", "truth_page", "scene", "orientation", "touching", "object_min_area", "fill_holes"),
    *("exclude_border", "objects_as", "stored_features", "tile", "scheduler", "storage_options"),
)
_MODEL_OPTIONS = (
    *("labels", "cluster", "cluster_method", "text", "readout", "templates", "background", "classifier"),
    *("features", "filters_3d", "model", "pos_embed", "token_stride", "token_shifts", "layers", "classes"),
    *("legend", "dense", "max_classes", "label_page", "normalize", "clip", "seed", "object_classes"),
)
UNAVAILABLE = dict.fromkeys(
    _MODEL_OPTIONS, ": the model decides it. Omit it, or train another model with `vispe segment`."
)


def apply(
    model: str,
    images: list[str],
    out: str,
    truth: list[str] | None = None,
    truth_zero: Literal["class", "ignore"] = "class",
    truth_page: int | None = None,
    channel: str | None = None,
    z: str | None = None,
    axes: str | None = None,
    scene: str | None = None,
    orientation: Literal["stored", "tag"] = "stored",
    crop: str | None = None,
    mask: list[str] | None = None,
    prior: Literal["sqrt", "em", "uniform"] | None = None,
    clean: bool = False,
    smooth: int = 0,
    min_area: int = 0,
    objects: list[str] | None = None,
    touching: Literal["split", "keep"] | None = None,
    object_min_area: int | None = None,
    fill_holes: bool = False,
    exclude_border: bool = False,
    objects_as: list[str] | None = None,
    materials: bool = False,
    trust: bool = False,
    stored_features: str | None = None,
    weights: str | None = None,
    tile: int | None = None,
    device: str = "auto",
    memory: str | None = None,
    scheduler: str | None = None,
    storage_options: str | None = None,
    force: bool = False,
    json: bool = False,
) -> int:
    """Segment more images with a model trained by `vispe segment`.

    Writes the same files as `vispe segment` for each image into OUT, and report.html, report.json and report.csv.
    Grey levels are normalised as in training.

    Args:
        model: the model.vispe file of an earlier run.
        images: image files, folders or globs, or OME-Zarr stores, which may be larger than memory.
        out: folder for the results.
        truth: ground-truth masks to score against, matched to the images by name.
        weights: checkpoint of the token model, if the file was moved.
        force: overwrite existing results, and restart an interrupted run, which is otherwise resumed.

    Examples:
        vispe apply out/model.vispe more/*.png -o more_out
        vispe apply out/model.vispe stack.tif --z 0:20 -o stack_out --json
    """
    from vispe.cli.segmentation_console import Console
    from vispe.segment import pipeline
    from vispe.segment.objects.options import options_or_none
    from vispe.segment.types import PostProcessing

    object_options = options_or_none(
        objects,
        touching=touching,
        min_area=object_min_area,
        fill_holes=fill_holes,
        exclude_border=exclude_border,
        kinds=None if objects_as is None else tuple(objects_as),
    )
    with Console(json, apply, POSITIONALS) as console:
        report = pipeline.apply(
            model,
            images,
            out,
            reading=pipeline.ReadOptions(
                channel, z, axes, scene=scene, orientation=orientation, crop=crop, mask=mask or ()
            ),
            scoring=pipeline.ScoreOptions(truth or (), truth_zero, truth_page),
            post=PostProcessing(smooth, min_area, prior, clean),
            objects=object_options,
            materials=materials,
            trust=trust,
            stored_features=stored_features,
            weights=weights,
            tile=tile,
            device=device,
            force=force,
            watch=console,
            memory=memory,
            scheduler=scheduler,
            storage_options=storage_options,
        )
    return console.finish(report, out)
