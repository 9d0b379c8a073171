"""The command `vispe segment`."""

from collections.abc import Mapping
from typing import Any, Literal

from vispe.cli.terminal import one_line

POSITIONALS = ("images",)
SHORT = {"out": "-o"}
BARE = {"cluster": "auto"}
SEVERAL = ("text",)


def segment(
    images: list[str],
    out: str,
    labels: list[str] | None = None,
    cluster: int | Literal["auto"] | None = None,
    cluster_method: Literal["kmeans", "spectral"] = "kmeans",
    text: list[str] | None = None,
    readout: str | None = None,
    templates: list[str] | None = None,
    background: str | None = None,
    classifier: Literal["logistic", "forest", "boosting"] = "logistic",
    features: Literal["filters", "tokens", "both"] | None = None,
    filters_3d: bool = False,
    model: str | None = None,
    pos_embed: str | None = None,
    weights: str | None = None,
    token_stride: int | None = None,
    token_shifts: int | None = None,
    layers: list[int] | None = None,
    classes: list[str] | None = None,
    legend: str | None = None,
    dense: bool = False,
    max_classes: int = 20,
    label_page: int | None = None,
    truth: list[str] | None = None,
    truth_zero: Literal["class", "ignore"] = "class",
    truth_page: int | None = None,
    score_labelled: bool = False,
    channel: str | None = None,
    z: str | None = None,
    axes: str | None = None,
    scene: str | None = None,
    orientation: Literal["stored", "tag"] = "stored",
    crop: str | None = None,
    mask: list[str] | None = None,
    normalize: Literal["stack", "image", "none"] = "stack",
    clip: list[float] | None = None,
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
    tile: int | None = None,
    seed: int = 0,
    device: str = "auto",
    memory: str | None = None,
    scheduler: str | None = None,
    force: bool = False,
    json: bool = False,
) -> int:
    """Segment micrographs from a few scribbles, from no labels, or from words.

    Give scribbles (--labels) and a classifier learns to tell the classes apart, or ask for clusters
    (--cluster), or name the classes in words (--text), which needs the weights of a CLIP model and is
    unreliable on micrographs, since such models have seen few. The folder OUT then holds, for each image, a
    label map, class probabilities, a map of uncertainty and a picture; and report.html to look at, report.json,
    report.csv, and model.vispe for `vispe apply`.

    Args:
        images: image files, folders or globs: PNG, TIFF (OME, ImageJ, stacks), JPEG, BMP, GIF, WebP, NPY, and with the
            extra vendors CZI, LIF, ND2, MRC, DM3 and DM4; or OME-Zarr stores, which may be larger than memory. In
            folders, labels, masks and results (a_labels.png, a_seg.png) are passed over.
        out: folder for the results.
        labels: label files, 0 or black = unlabelled: label images, colour drawings, JSON strokes, GeoJSON of QuPath,
            .roi or RoiSet.zip of ImageJ, COCO JSON; several are matched to the images by name (a.png with a.png,
            a_labels.png or a.geojson). They are separated by commas; several whose names hold commas are written as
            '["a,1.png", "b,1.png"]'.
        cluster: number of clusters, in place of labels; without a number, 3 to 8 by the peaks of the grey levels; with
            fewer peaks, 2 to 8 by the silhouette. clusters.png shows both. They are numbered from dark to bright.
        cluster_method: kmeans, or spectral, which finds clusters of any shape and takes longer.
        text: the classes in words, in place of labels, such as --text matrix precipitate; 'pore/hole' are two words for
            one class, and a single class is compared with a background. Words are unreliable on micrographs: compare
            with a few scribbles before using a number.
        readout: how a CLIP model is read patch by patch: naclip (default), clearclip, sclip, maskclip or vanilla, with
            options such as 'naclip(sigma=3,residual=true,mlp=true)'.
        templates: sentences around each text, with {} for it, separated by commas, or a file with one in each line.
        background: words of a further class, background, for everything else; 'none' for no such class.
        classifier: logistic is the fastest and goes best with vispe_micro; forest is better on thin and rare classes
            where there are filters alone; boosting is the slowest.
        features: filters (26 multi-scale filters), tokens (of --model) or both (default).
        filters_3d: for Z stacks, filters of the volume too: they see the slices above and below.
        model: vispe_micro, a small ViT that comes with vispe and does not care how the sample lies (default), or
            a timm model whose patch tokens are features, such as vit_small_patch14_dinov2, or open_clip:NAME/TAG;
            for --text a model of open_clip (default ViT-B-16).
        pos_embed: positional encoding that replaces the model's own, such as alibi2d.
        weights: checkpoint file of the model, or for --text also a tag of open_clip (default laion2b_s34b_b88k);
            default timm's pretrained weights; 'random' only for trials.
        token_stride: pixels between the tokens of a timm model, a divisor of its patch, so that patches overlap;
            default the patch. Finer textures are told apart, but tokens grow with (patch/stride)^2, and attention with
            the square of that: half the patch is 4 times the tokens and up to 16 times the time.
        token_shifts: look this many times along each axis, moved by a part of the stride each time, and put the tokens
            between each other; a divisor of the stride. K costs K^2 passes and no memory for attention. Default 2 for
            a ViT with an even stride, else 1.
        layers: blocks of the timm model whose outputs are joined, from 0, such as 5,8,11; negative numbers count from
            the end; default the last.
        classes: names of the classes 1, 2, ..., separated by commas.
        legend: JSON file with class names by number, grey level or colour.
        dense: every pixel is labelled; 0 is a class too.
        max_classes: more different labels than this are taken for a mistake.
        label_page: page (from 0) that labels of one page belong to, in a stack.
        truth: ground-truth masks, or shapes as for labels, to score against, matched like labels.
        truth_zero: whether the value 0 in a mask is the first class, or is left out of the score.
        truth_page: page (from 0) that a mask of one page belongs to, in a stack.
        score_labelled: score the labelled pixels too.
        channel: channels to use, by number (from 0) or name, separated by commas.
        z: page (from 0) or range a:b of a stack.
        axes: meaning of the stored axes, such as ZYX, where the file is wrong.
        scene: which of several scenes of CZI, LIF, ND2, DM3 and DM4 files, by name or number (from 0).
        orientation: stored (default) reads the pixels as Fiji, napari and ilastik show them; tag applies the
            orientation tag of the file, as web browsers and labelme do.
        crop: rows and columns of the sample, such as 0:884,0:1024, or :-64,: without an information bar at the bottom;
            other pixels count in no number and are 0 in label maps.
        mask: image file with 0 for pixels that count in no number; one for all images, or several matched by name.
        normalize: one pair of grey limits for the whole file, one for each page, or none.
        clip: the two percentiles that become black and white; default 0.5,99.5.
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
        tile: side of the pieces in which an image is worked on, in pixels.
        seed: of all random numbers.
        device: auto, cpu, cuda, ...
        memory: what the work on an OME-Zarr store, or a large TIFF file, may take besides the libraries; default 2 GiB.
        scheduler: address of a dask scheduler, such as tcp://host:8786, whose workers segment the blocks of a store.
        force: overwrite existing results, and begin a run anew that did not end (without it the same command goes on).
        json: print the report as JSON instead of one line for each image.

    Examples:
        vispe segment steel.png --labels scribbles.png --classes matrix,carbide -o out
        vispe segment 'run/*.tif' --labels run_labels/ --truth masks/ -o out --classifier forest
        vispe segment steel.png --cluster 3 -o out
        vispe segment steel.png --cluster -o out
        vispe segment steel.png --text matrix precipitate -o out
        vispe segment steel.png --labels scribbles.png --model vit_small_patch14_dinov2 --pos-embed alibi2d -o out
        vispe segment steel.png --labels scribbles.png --model vit_small_patch14_dinov2 --token-stride 7 -o out
    """
    from vispe.segment import pipeline
    from vispe.segment.features.pixel_features import FeatureConfig
    from vispe.segment.objects.options import options_or_none
    from vispe.segment.run.prediction import Post
    from vispe.segment.text.prompts import prompts_or_none

    prompts = prompts_or_none(
        text,
        only={"readout": readout, "templates": templates, "background": background},
        never={
            "filters_3d": filters_3d or None,
            "features": features,
            "classes": classes,
            "legend": legend,
            "token_stride": token_stride,
            "token_shifts": token_shifts,
            "layers": layers,
        },
    )
    if prompts is not None:
        from vispe.segment.text.config import TextConfig

        config = TextConfig(
            model or TextConfig.model, weights, pos_embed, readout or TextConfig.readout, tile=tile
        )
    else:
        kind = features or "both"
        if kind != "filters":
            model = model or "vispe_micro"
        config = FeatureConfig(
            kind,
            model=model,
            pos_embed=pos_embed,
            weights=weights,
            tile=tile,
            filters_3d=filters_3d,
            token_stride=token_stride,
            token_shifts=token_shifts,
            layers=None if layers is None else tuple(layers),
        )
    counted = options_or_none(
        objects,
        touching=touching,
        min_area=object_min_area,
        fill_holes=fill_holes,
        exclude_border=exclude_border,
        kinds=None if objects_as is None else tuple(objects_as),
    )
    with Console(json) as console:
        report = pipeline.segment(
            images,
            out,
            labels=labels or (),
            cluster=cluster,
            cluster_method=cluster_method,
            text=prompts,
            classifier=classifier,
            features=config,
            reading=pipeline.Reading(
                channel,
                z,
                axes,
                normalize,
                tuple(clip) if clip else (0.5, 99.5),
                scene,
                orientation,
                crop,
                mask or (),
            ),
            labelling=pipeline.Labelling(classes, legend, dense, max_classes, label_page),
            scoring=pipeline.Scoring(truth or (), truth_zero, truth_page, score_labelled),
            post=Post(smooth, min_area, prior, clean),
            objects=counted,
            materials=materials,
            trust=trust,
            seed=seed,
            device=device,
            force=force,
            watch=console.watcher,
            memory=memory,
            scheduler=scheduler,
        )
    return console.finish(report, out)


class Console:
    """Shows a run to a person: results on stdout, progress with the time left and notes on stderr.

    Args:
        json: print the whole report as JSON at the end instead of one line for each image.
    """

    def __init__(self, json: bool) -> None:
        from rich.progress import TextColumn

        from vispe.cli.common import progress
        from vispe.segment.run.run_report import Watcher

        bar = progress(TextColumn("{task.completed:.1f}/{task.total:.0f} images"))
        stderr = bar.console

        class Shown(Watcher):
            """Shows the run on the terminal."""

            task = None

            def start(self, what: str, total: int) -> None:
                if self.task is not None:
                    bar.remove_task(self.task)
                self.task = bar.add_task(what, total=total)

            def step(self, share: float) -> None:
                bar.advance(self.task, share)

            def note(self, text: str) -> None:
                stderr.print(f"vispe: note: {one_line(text)}")

            def failed(self, path: str, reason: str) -> None:
                stderr.print(f"vispe: {one_line(path)} was left out: {one_line(reason)}")

            def done(self, record: Mapping[str, Any]) -> None:
                if not json:
                    print(one_line(describe(record)), flush=True)

        self.json, self.bar, self.stderr, self.watcher = json, bar, stderr, Shown()

    def __enter__(self) -> "Console":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def finish(self, report: Any, out: str) -> int:
        """Print the report or what was left out, and return the exit code."""
        import json

        if self.json:
            print(json.dumps(report.as_dict(), indent=2))
        if report.failures:
            count = len(report.failures)
            self.stderr.print(f"vispe: {len(report.images)} image(s) done in {out}, {count} left out:")
            for failure in report.failures:
                self.stderr.print(one_line(f"  {failure['image']}: {failure['reason']}"))
        return report.exit_code


def describe(record: Mapping[str, Any]) -> str:
    """Say in one line what was found in an image."""
    from vispe.segment.classify.fractions import estimate_words, map_words

    line = f"{record['image']}: {map_words(record['map_fractions'])}"
    if record["fraction_kind"] == "estimate" and None not in record["map_fractions"].values():
        ends = record["fractions_ci95"] or {}
        shares = (f"{name} {estimate_words(v, ends.get(name))}" for name, v in record["fractions"].items())
        line += f"; estimated true fractions (95 %): {', '.join(shares)}"
    if "objects" in record:
        counts = ", ".join(f"{found['count']} {name}" for name, found in record["objects"]["classes"].items())
        line += f"; objects: {counts}"
    if "scores" in record:
        line += f"; mIoU {record['scores']['miou']:.3f}"
    if "trust" in record:
        line += f"; trust: {record['trust']['brief']}"
    return f"{line} -> {record['files']['labels']}"
