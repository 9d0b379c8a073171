"""`vispe segment`: segmentation of micrographs, and the console output of segmentation runs."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from vispe.cli.arguments import name_options
from vispe.cli.terminal import one_line

POSITIONALS = ("images",)
SHORT = {"out": "-o"}
OPTIONAL_VALUE = {"cluster": "auto"}
MULTI_WORD = ("text",)


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
    classifier: Literal["ensemble", "logistic", "forest", "boosting"] = "ensemble",
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
    """Segment micrographs from a few scribbles, without labels, or from text.

    Pass scribbles (--labels) to train a classifier, request clusters (--cluster), or describe the classes in words
    (--text), which needs the weights of a CLIP model and is unreliable on micrographs, since they are rare in the
    training data of such models. Writes a label map, class probabilities, an uncertainty map and an overlay for each
    image into OUT, and report.html, report.json, report.csv, and model.vispe for `vispe apply`.

    Args:
        images: image files, folders or globs: PNG, TIFF (OME, ImageJ, stacks), JPEG, BMP, GIF, WebP, NPY, and with the
            extra vendors CZI, LIF, ND2, MRC, DM3 and DM4; or OME-Zarr stores, which may be larger than memory. In
            folders, labels, masks and results (a_labels.png, a_seg.png) are skipped.
        out: folder for the results.
        labels: label files, 0 or black = unlabelled: label images, colour drawings, JSON scribbles, GeoJSON of QuPath,
            .roi or RoiSet.zip of ImageJ, COCO JSON; several are matched to the images by name (a.png with a.png,
            a_labels.png or a.geojson). Separate files by commas; write names that contain commas as
            '["a,1.png", "b,1.png"]'.
        cluster: number of clusters, instead of labels; without a number, 3 to 8 by the peaks of the grey-level
            histogram, or, with fewer peaks, 2 to 8 by the silhouette score. clusters.png shows both. Clusters are
            numbered from dark to bright.
        cluster_method: kmeans, or spectral for clusters of any shape, which is slower.
        text: text prompts of the classes, instead of labels, such as --text matrix precipitate; 'pore/hole' are two
            prompts of one class, and a single class is compared with a background. Text is unreliable on micrographs:
            compare with a few scribbles before using a number.
        readout: method for patch features of a CLIP model: naclip (default), clearclip, sclip, maskclip or vanilla,
            with options such as 'naclip(sigma=3,residual=true,mlp=true)'.
        templates: prompt templates, with {} for the text, separated by commas, or a file with one per line.
        background: text prompt of an additional background class; 'none' disables it.
        classifier: ensemble (default) averages logistic regression and extremely randomised trees, and is the most
            accurate; logistic is the fastest; forest is a random forest; boosting is the slowest.
        features: filters (26 multi-scale filters), tokens (of --model) or both (default).
        filters_3d: for Z stacks, additional 3D filters, which include the adjacent slices.
        model: vispe_micro, a small rotation-equivariant ViT shipped with vispe (default), or a timm model whose patch
            tokens are the features, such as vit_small_patch14_dinov2, or open_clip:NAME/TAG; for --text an open_clip
            model (default ViT-B-16).
        pos_embed: positional encoding that replaces the model's own, such as alibi2d.
        weights: checkpoint file of the model, or for --text also a tag of open_clip (default laion2b_s34b_b88k);
            default timm's pretrained weights; 'random' for tests only.
        token_stride: stride of the patch embedding of a timm model in pixels, a divisor of the patch size, so that
            patches overlap; default the patch size. Resolves finer textures, but the number of tokens grows with
            (patch/stride)^2 and attention with its square: half the patch size is 4 times the tokens and up to 16 times
            the time.
        token_shifts: number of sub-stride shifts per axis whose features are interleaved; a divisor of the stride. K
            needs K^2 passes but no additional memory for attention. Default 2 for a ViT with an even stride, otherwise
            1.
        layers: indices of the blocks of the timm model whose outputs are concatenated, such as 5,8,11; negative indices
            count from the end; default the last.
        classes: names of the classes 1, 2, ..., separated by commas.
        legend: JSON file with class names by number, grey level or colour.
        dense: every pixel is labelled, and 0 is a class.
        max_classes: largest number of distinct label values; more are reported as an error.
        label_page: page of the stack (from 0) that single-page labels belong to.
        truth: ground-truth masks, or shapes as for labels, to score against, matched like labels.
        truth_zero: whether the value 0 in a mask is the first class, or is excluded from the score.
        truth_page: page of the stack (from 0) that a single-page mask belongs to.
        score_labelled: score the labelled pixels too.
        channel: channels to use, by number (from 0) or name, separated by commas.
        z: page (from 0) or range a:b of a stack.
        axes: order of the stored axes, such as ZYX; overrides the metadata of the file.
        scene: scene to read from CZI, LIF, ND2, DM3 and DM4 files, by name or number (from 0).
        orientation: stored (default) reads the pixels as Fiji, napari and ilastik do; tag applies the orientation tag
            of the file, as web browsers and labelme do.
        crop: rows and columns of the sample, such as 0:884,0:1024, or :-64,: to exclude an information bar at the
            bottom; other pixels are excluded from all numbers and are 0 in label maps.
        mask: image file with 0 for pixels to exclude from all numbers; one for all images, or several matched by name.
        normalize: grey limits per file (stack), per page (image), or none.
        clip: the two percentiles that are mapped to black and white; default 0.5,99.5.
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
        tile: side of the tiles in which an image is processed, in pixels.
        seed: seed of all random numbers.
        device: auto, cpu, cuda, ...
        memory: memory limit for OME-Zarr stores and large TIFF files, in addition to the libraries; default 2 GiB.
        scheduler: address of a dask scheduler, such as tcp://host:8786, whose workers segment the blocks of a store.
        force: overwrite existing results, and restart an interrupted run (without it, the same command resumes the
            run).
        json: print the report as JSON instead of one line per image.

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
    from vispe.segment.run.prediction import PostProcessing
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
    object_options = options_or_none(
        objects,
        touching=touching,
        min_area=object_min_area,
        fill_holes=fill_holes,
        exclude_border=exclude_border,
        kinds=None if objects_as is None else tuple(objects_as),
    )
    with Console(json, segment, POSITIONALS) as console:
        report = pipeline.segment(
            images,
            out,
            labels=labels or (),
            cluster=cluster,
            cluster_method=cluster_method,
            text=prompts,
            classifier=classifier,
            features=config,
            reading=pipeline.ReadOptions(
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
            labelling=pipeline.LabelOptions(classes, legend, dense, max_classes, label_page),
            scoring=pipeline.ScoreOptions(truth or (), truth_zero, truth_page, score_labelled),
            post=PostProcessing(smooth, min_area, prior, clean),
            objects=object_options,
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
    """Console output of a segmentation run: results on stdout, progress and notes on stderr.

    Args:
        json: print the complete report as JSON at the end instead of one line per image.
        command: function of the command, whose options replace parameters in messages.
        positionals: positional parameters of the command.
    """

    def __init__(self, json: bool, command: Callable[..., int], positionals: Sequence[str]) -> None:
        from rich.progress import TextColumn

        from vispe.cli.common import progress
        from vispe.segment.run.run_report import ProgressCallbacks

        def message(text: str) -> str:
            return one_line(name_options(text, command, positionals))

        bar = progress(TextColumn("{task.completed:.1f}/{task.total:.0f} images"))
        stderr = bar.console

        class Display(ProgressCallbacks):
            """Watcher that prints to the terminal."""

            task = None

            def start(self, what: str, total: int) -> None:
                if self.task is not None:
                    bar.remove_task(self.task)
                self.task = bar.add_task(what, total=total)

            def step(self, share: float) -> None:
                bar.advance(self.task, share)

            def note(self, text: str) -> None:
                stderr.print(f"vispe: note: {message(text)}")

            def failed(self, path: str, reason: str) -> None:
                stderr.print(f"vispe: {one_line(path)} was skipped: {message(reason)}")

            def done(self, record: Mapping[str, Any]) -> None:
                if not json:
                    print(one_line(describe(record)), flush=True)

        self.json, self.bar, self.stderr, self.watcher = json, bar, stderr, Display()
        self._message = message

    def __enter__(self) -> "Console":
        self.bar.start()
        return self

    def __exit__(self, *error: object) -> None:
        self.bar.stop()

    def finish(self, report: Any, out: str) -> int:
        """Print the report (with `json`) or the skipped images, and return the exit code."""
        import json

        if self.json:
            print(json.dumps(report.as_dict(), indent=2))
        if report.failures:
            count = len(report.failures)
            self.stderr.print(f"vispe: {len(report.images)} image(s) done in {out}, {count} skipped:")
            for failure in report.failures:
                self.stderr.print(f"  {one_line(failure['image'])}: {self._message(failure['reason'])}")
        return report.exit_code


def describe(record: Mapping[str, Any]) -> str:
    """Return the results of an image as one line."""
    from vispe.segment.classify.fractions import estimate_words, map_words

    line = f"{record['image']}: {map_words(record['map_fractions'])}"
    if record["fraction_kind"] == "estimate" and None not in record["map_fractions"].values():
        bounds = record["fractions_ci95"] or {}
        fractions = (
            f"{name} {estimate_words(v, bounds.get(name))}" for name, v in record["fractions"].items()
        )
        line += f"; estimated true fractions (95 %): {', '.join(fractions)}"
    if "objects" in record:
        classes = record["objects"]["classes"].items()
        counts = ", ".join(f"{objects['count']} {name}" for name, objects in classes)
        line += f"; objects: {counts}"
    if "scores" in record:
        line += f"; mIoU {record['scores']['miou']:.3f}"
    if "trust" in record:
        line += f"; trust: {record['trust']['brief']}"
    return f"{line} -> {record['files']['labels']}"
