"""`vispe apply`: segment more images with a saved model."""

from typing import Literal

POSITIONALS = ("model", "images")
SHORT = {"out": "-o"}
_MODEL_OPTIONS = (
    *("labels", "cluster", "cluster_method", "text", "readout", "templates", "background", "classifier"),
    *("features", "filters_3d", "model", "pos_embed", "token_stride", "token_shifts", "layers", "classes"),
    *("legend", "dense", "max_classes", "label_page", "normalize", "clip", "seed"),
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
    weights: str | None = None,
    tile: int | None = None,
    device: str = "auto",
    memory: str | None = None,
    scheduler: str | None = None,
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
        truth_zero: whether the value 0 in a mask is the first class, or is excluded from the score.
        truth_page: page of the stack (from 0) that a single-page mask belongs to.
        channel: channels to use, by number (from 0) or name, separated by commas.
        z: page (from 0) or range a:b of a stack.
        axes: order of the stored axes, such as ZYX; overrides the metadata of the file.
        scene: scene to read from CZI, LIF, ND2, DM3 and DM4 files, by name or number (from 0).
        orientation: stored (default) reads the pixels as Fiji, napari and ilastik do; tag applies the orientation tag
            of the file, as web browsers and labelme do.
        crop: rows and columns of the sample, such as 0:884,0:1024, or :-64,: to exclude an information bar at the
            bottom; other pixels are excluded from all numbers and are 0 in label maps.
        mask: image file with 0 for pixels to exclude from all numbers; one for all images, or several matched by name.
        prior: class prior, estimated on each page without labels. sqrt uses its square root (default, safe), em the
            full estimate, uniform no prior, which overestimates rare classes. Fractions in the report use the full
            estimate unless prior is uniform.
        clean: smooth class probabilities along the edges of the image (guided filter, radius 4 px): removes specks and
            moves boundaries to edges. Helps if classes differ in grey level; removes structures smaller than the
            radius.
        smooth: average probabilities over squares of this radius, in pixels.
        min_area: connected regions with fewer pixels are assigned the class of their surroundings.
        objects: classes, by name or number, whose connected regions are objects: writes an object map and a table for
            each image, and objects.csv for all; counts and sizes are in report.json. Objects of Z stacks are 3D.
        touching: split (default) separates touching objects at their necks, for grains or nuclei; keep treats each
            connected region as one object, for networks and branches.
        object_min_area: objects with fewer pixels are excluded; their number is in the report; default 10.
        fill_holes: count holes as part of the object around them; the label map is unchanged.
        exclude_border: exclude objects that touch the border of the image.
        objects_as: object files for other programs: geojson (QuPath), rois (ImageJ), coco, separated by commas.
        materials: measure quantities of materials science on each page: mean intercepts and their direction, ASTM E112
            grain size number, interfaces, two-point correlation, with intervals; curves are written to a table per
            image.
        trust: report how much the result depends on the pose of the sample: segments the image rotated, mirrored and
            shifted as well; takes about 13 times as long (for stacks, only the middle page is tested).
        weights: checkpoint of the token model, if the file was moved.
        tile: side of the tiles in which an image is processed, in pixels.
        device: auto, cpu, cuda, ...
        memory: memory limit for OME-Zarr stores and large TIFF files, in addition to the libraries; default 2 GiB.
        scheduler: address of a dask scheduler, such as tcp://host:8786, whose workers segment the blocks of a store.
        force: overwrite existing results, and restart an interrupted run (without it, the same command resumes the
            run).
        json: print the report as JSON instead of one line per image.

    Examples:
        vispe apply out/model.vispe more/*.png -o more_out
        vispe apply out/model.vispe stack.tif --z 0:20 -o stack_out --json
    """
    from vispe.cli.commands.segment import Console
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
            weights=weights,
            tile=tile,
            device=device,
            force=force,
            watch=console.watcher,
            memory=memory,
            scheduler=scheduler,
        )
    return console.finish(report, out)
