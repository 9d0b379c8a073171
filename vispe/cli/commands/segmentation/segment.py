"""`vispe segment`: segmentation of micrographs."""

from typing import Literal

POSITIONALS = ("images",)
SHORT = {"out": "-o"}
LIBRARY_NAMES = {"zero_is": "truth_zero", "page": "truth_page", "include_labelled": "score_labelled"}
OPTIONAL_VALUE = {"cluster": "auto"}
MULTI_WORD = ("text",)
ADVANCED = (
    "cluster_method", "readout", "templates", "background", "filters_3d", "stored_features", "pos_embed",
    "token_stride", "token_shifts", "layers", "legend", "dense", "max_classes", "label_page", "truth_zero",
    "truth_page", "score_labelled", "scene", "orientation", "normalize", "clip", "object_classes", "touching",
    "object_min_area", "fill_holes", "exclude_border", "objects_as", "tile", "scheduler", "storage_options",
)  # fmt: skip


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
    stored_features: str | None = None,
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
    object_classes: list[str] | None = None,
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
    storage_options: str | None = None,
    force: bool = False,
    json: bool = False,
) -> int:
    """Segment micrographs from a few scribbles, without labels, or from text.

    Pass scribbles (--labels) to train a classifier, request clusters (--cluster), or describe the classes in words
    (--text, experimental), which needs the weights of a CLIP model and is unreliable on micrographs, since they are
    rare in the training data of such models. Writes a label map, class probabilities, an uncertainty map and an
    overlay for each image into OUT, and report.html, report.json, report.csv, and model.vispe for `vispe apply`.

    Args:
        images: image files, folders or globs: PNG, TIFF (OME, ImageJ, stacks), JPEG, BMP, GIF, WebP, NPY, PFM, and with
            the extra vendors CZI, LIF, ND2, MRC, DM3, DM4, HDF5, IMS, EMD, NRRD, MHA and NIfTI; or OME-Zarr stores,
            which may be larger than memory. In folders, labels, masks and results (a_labels.png, a_seg.png) are
            skipped.
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
            prompts of one class, and a single class is compared with a background. Experimental: its accuracy on
            micrographs is not measured; compare with a few scribbles before using a number.
        readout: method for patch features of a CLIP model: naclip (default), clearclip, sclip, maskclip or vanilla,
            with options such as 'naclip(sigma=3,residual=true,mlp=true)'.
        templates: prompt templates, with {} for the text, separated by commas, or a file with one per line.
        background: text prompt of an additional background class; 'none' disables it.
        classifier: ensemble (default) averages logistic regression and extremely randomised trees, and is the most
            accurate; logistic is the fastest; forest is a random forest; boosting is the slowest.
        features: filters (26 multi-scale filters), tokens (of --model) or both (default).
        filters_3d: for Z stacks, additional 3D filters, which include the adjacent slices.
        model: vispe_micro, a small rotation-equivariant ViT shipped with vispe (default), or a model whose patch tokens
            are the features: a timm model such as vit_small_patch14_dinov2, open_clip:NAME/TAG, hf:FOLDER of a
            transformers model, or the folder of a retrofit; for --text an open_clip model (default ViT-B-16).
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
        dense: every pixel is labelled, and 0 is a class.
        max_classes: largest number of distinct label values; more are reported as an error.
        truth: ground-truth masks, or shapes as for labels, to score against, matched like labels.
        score_labelled: score the labelled pixels too.
        object_classes: examples of classes of the --objects, learnt by size, shape and mean grey level: a CSV file with
            the columns object_class and object (its number in objects.csv of an earlier run) or x and y, and image if
            there are several; or label files with a label on each example. vispe apply repeats them.
        normalize: grey limits per file (stack), per page (image), or none.
        force: overwrite existing results, and restart an interrupted run, which is otherwise resumed.

    Examples:
        vispe segment steel.png --labels scribbles.png --classes matrix,carbide -o out
        vispe segment 'run/*.tif' --labels run_labels/ --truth masks/ -o out --classifier forest
        vispe segment steel.png --cluster 3 -o out
        vispe segment steel.png --cluster -o out
        vispe segment steel.png --text matrix precipitate -o out
        vispe segment steel.png --labels scribbles.png --model vit_small_patch14_dinov2 --pos-embed alibi2d -o out
        vispe segment steel.png --labels scribbles.png --model vit_small_patch14_dinov2 --token-stride 7 -o out
    """
    from vispe.cli.segmentation_console import Console
    from vispe.segment import pipeline
    from vispe.segment.features.feature_config import FeatureConfig
    from vispe.segment.objects.options import options_or_none
    from vispe.segment.text.prompts import prompts_or_none
    from vispe.segment.types import PostProcessing

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
            object_classes=object_classes or (),
            materials=materials,
            trust=trust,
            stored_features=stored_features,
            seed=seed,
            device=device,
            force=force,
            watch=console,
            memory=memory,
            scheduler=scheduler,
            storage_options=storage_options,
        )
    return console.finish(report, out)
