"""The command `vispe apply`."""

from typing import Literal

POSITIONALS = ("model", "images")
SHORT = {"out": "-o"}
_DECIDED = (
    *("labels", "cluster", "cluster_method", "text", "readout", "templates", "background", "classifier"),
    *("features", "filters_3d", "model", "pos_embed", "token_stride", "token_shifts", "layers", "classes"),
    *("legend", "dense", "max_classes", "label_page", "normalize", "clip", "seed"),
)
ELSEWHERE = dict.fromkeys(
    _DECIDED, ": the model decides it. Leave it out, or train another model with `vispe segment`."
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
    """Segment more images with a model that `vispe segment` wrote.

    The folder OUT then holds the same files for each image as after `vispe segment`, and report.html,
    report.json and report.csv. Grey levels are normalised as they were for the training.

    Args:
        model: the model.vispe file of an earlier run.
        images: image files, folders or globs, or OME-Zarr stores, which may be larger than memory.
        out: folder for the results.
        truth: ground-truth masks to score against, matched to the images by name.
        truth_zero: whether the value 0 in a mask is the first class, or is left out of the score.
        truth_page: page (from 0) that a mask of one page belongs to, in a stack.
        channel: channels to use, by number (from 0) or name, separated by commas.
        z: page (from 0) or range a:b of a stack.
        axes: meaning of the stored axes, such as ZYX, where the file is wrong.
        scene: which of several scenes of CZI, LIF, ND2, DM3 and DM4 files, by name or number (from 0).
        orientation: stored (default) reads the pixels as Fiji, napari and ilastik show them; tag applies the
            orientation tag of the file, as web browsers and labelme do.
        crop: rows and columns of the sample, such as 0:884,0:1024, or :-64,: without an information bar at the bottom;
            other pixels count in no number and are 0 in label maps.
        mask: image file with 0 for pixels that count in no number; one for all images, or several matched by name.
        prior: what classes are weighed by: how frequent they are is estimated on each page, without labels. sqrt takes
            the root of it (default, safe), em all of it, uniform nothing, so that rare classes come out too large.
            Fractions in the report are estimated with all of it, unless prior is uniform.
        clean: let class probabilities follow the edges of the picture (guided filter, radius 4 px): specks go, and
            boundaries move to edges. Helps where classes differ in grey, and harms what is smaller than the radius.
        smooth: average probabilities over squares of this radius, in pixels.
        min_area: patches with fewer pixels take the class of their surroundings.
        objects: classes, by name or number, whose connected patches are objects: adds a map and a table of them for
            each image, and objects.csv for all; counts and sizes are in report.json. A Z stack has objects in three
            dimensions.
        touching: split (default) cuts patches at their necks, for grains or nuclei that touch; keep takes what is
            connected for one object, for networks and branches.
        object_min_area: objects with fewer pixels are left out, and counted in the report; default 10.
        fill_holes: holes belong to the object around them; the label map stays as it is.
        exclude_border: leave out objects at the border of the image.
        objects_as: files of objects for other programs: geojson (QuPath), rois (ImageJ), coco, separated by commas.
        materials: measure each page as materials science does: mean intercepts and their direction, ASTM E112 grain
            size number, interfaces, two-point correlation, with intervals; curves go to a table for each image.
        trust: tell how far the result depends on how the sample lies: segment the picture turned, mirrored and shifted
            as well, and report what changes; takes about 13 times as long (of a stack only the middle page).
        weights: where the checkpoint of the token model is now, if it has moved.
        tile: side of the pieces in which an image is worked on, in pixels.
        device: auto, cpu, cuda, ...
        memory: what the work on an OME-Zarr store, or a large TIFF file, may take besides the libraries; default 2 GiB.
        scheduler: address of a dask scheduler, such as tcp://host:8786, whose workers segment the blocks of a store.
        force: overwrite existing results, and begin a run anew that did not end (without it the same command goes on).
        json: print the report as JSON instead of one line for each image.

    Examples:
        vispe apply out/model.vispe more/*.png -o more_out
        vispe apply out/model.vispe stack.tif --z 0:20 -o stack_out --json
    """
    from vispe.cli.commands.segment import Console
    from vispe.segment import pipeline
    from vispe.segment.objects.options import options_or_none
    from vispe.segment.run.prediction import Post

    counted = options_or_none(
        objects,
        touching=touching,
        min_area=object_min_area,
        fill_holes=fill_holes,
        exclude_border=exclude_border,
        kinds=None if objects_as is None else tuple(objects_as),
    )
    with Console(json) as console:
        report = pipeline.apply(
            model,
            images,
            out,
            reading=pipeline.Reading(
                channel, z, axes, scene=scene, orientation=orientation, crop=crop, mask=mask or ()
            ),
            scoring=pipeline.Scoring(truth or (), truth_zero, truth_page),
            post=Post(smooth, min_area, prior, clean),
            objects=counted,
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
