"""`vispe rotate`: what a model or a segmentation makes of a sample that is turned, mirrored or shifted."""

from typing import TYPE_CHECKING, Literal

if TYPE_CHECKING:
    from vispe.evaluate.rotation.report import RotationReport as Report

POSITIONALS = ("model", "images")
SHORT = {"out": "-o"}


def rotate(
    model: str,
    images: list[str] | None = None,
    out: str | None = None,
    masks: list[str] | None = None,
    zero: Literal["class", "ignore"] = "class",
    classes: list[str] | None = None,
    textures: int = 0,
    metrics: list[str] | None = None,
    quick: bool = False,
    angles: list[float] | None = None,
    pos_embed: str | None = None,
    weights: str | None = None,
    img_size: int | None = None,
    symmetrize: bool = False,
    d4: bool = False,
    layer: int | None = None,
    kind: Literal["features", "segmenter"] | None = None,
    patch: int | None = None,
    crop: int | None = None,
    clusters: int = 3,
    budget: int = 100,
    batch_size: int = 1,
    device: str = "auto",
    seed: int = 0,
    force: bool = False,
    json: bool = False,
) -> None:
    """Measure what turning, mirroring and shifting a sample changes in a model's features or a segmentation.

    A sample under a microscope mostly has no up, so a model should see the same in it however it lies. Here each
    image is turned, mirrored and shifted, what the model makes of it is moved back, and both are compared: 0 means
    that nothing changed, about 1.41 is what unrelated features give, and there is no upper limit. With masks it is
    also measured how accurate a segmentation is in each orientation, and how much the area of each phase depends
    on it. OUT then holds report.html, to be read, and report.json with the number of every image. Images are not
    resized; 5 or more of them give error bars. The same command under torchrun spreads images over processes and
    finds the same numbers.

    Args:
        model: timm model name, open_clip:NAME/TAG, hf:FOLDER of a transformers model, folder of a retrofit, saved
            segmenter (.vispe), or a Python callable, package.module:name or file.py:name.
        images: images, folders or wildcards; every page of a stack counts as an image.
        out: folder for report.html and report.json; without it only the table is printed.
        masks: files with the true classes, matched to the images by name (a.png with a.png or a_mask.png) or else by
            order.
        zero: whether the value 0 in a mask is the first class, or is left out.
        classes: names of the classes, separated by commas.
        textures: number of synthetic micrographs, with exact masks, that are measured too; alone they need no images.
        metrics: only these, separated by commas, of d4, angles, shift, lie, position, layers, fingerprint, clusters,
            quadrant, segmentation, poses; default all that can be measured.
        quick: a first look, with few angles and a window of 14 patches from the middle of each image.
        angles: degrees, separated by commas; default every 15.
        pos_embed: positional encoding that replaces the model's own, such as alibi2d.
        weights: checkpoint file, or random; the pretrained weights by default.
        img_size: side of the images in pixels that the model is built for.
        symmetrize: average the patch kernel of the model over the eight poses of a square.
        d4: average the features (or the probabilities of a saved segmentation model) over the eight poses, which
            makes quarter turns exact for eight times the work.
        layer: block whose features are measured, from 0, or negative from the end; default the last.
        kind: what a Python function gives, features of a batch of images or labels of one image; default features.
        patch: side of a patch in pixels, where a Python function does not say it.
        crop: side in pixels of the window from the middle of each image that is measured; default the whole image.
        clusters: number of clusters of the features.
        budget: pixels of each class of a mask that a classifier learns from.
        batch_size: images that the model sees at once; more is faster on a GPU and needs more memory.
        device: auto, cpu, cuda, ...
        seed: of all random numbers.
        force: overwrite files in the folder.
        json: print the report as JSON.

    Examples:
        vispe rotate vit_small_patch14_dinov2 images/ -o out
        vispe rotate vit_tiny_patch16_224 --textures 3 --weights random --quick
        vispe rotate vit_small_patch14_dinov2 images/ --masks masks/ --pos-embed alibi2d --symmetrize -o out
        vispe rotate seg/model.vispe images/ --masks masks/ -o out
        vispe rotate my_model.py:features images/*.png --patch 14 -o out
        torchrun --nproc-per-node 4 -m vispe rotate vit_base_patch16_224 images/ -o out
    """
    from vispe.backbones.distributed import Processes
    from vispe.cli.common import Output, find, share_done, versions
    from vispe.errors import OptionError
    from vispe.evaluate.evaluated import load_subject
    from vispe.evaluate.image_sources import load_sources
    from vispe.evaluate.rotation.evaluation import check_metrics, measure
    from vispe.evaluate.rotation.figures.html_report import rotation_page

    paths, mask_paths = find(images), find(masks)
    if not paths and textures < 1:
        raise OptionError("rotate needs something to look at: give images, or --textures N.")
    if mask_paths and not paths:
        raise OptionError(
            "--masks were given without images; textures bring their own, so leave --masks out."
        )
    check_metrics(metrics)
    output = Output(out, ["report.html", "report.json"], force, [*paths, *mask_paths])
    processes = Processes.started()
    built = {"pos_embed": pos_embed, "weights": weights, "img_size": img_size, "symmetric": symmetrize}
    taken = {"d4": d4, "layer": layer, "patch": patch, "kind": kind}
    subject = load_subject(model, **built, **taken, seed=seed, device=processes.device(device))
    sources = load_sources(subject, paths, mask_paths, zero=zero, names=classes, textures=textures, seed=seed)
    settings = {"model": model, "pos_embed": pos_embed, "weights": weights, "img_size": img_size}
    settings |= {"symmetrize": symmetrize, "d4": d4, "layer": layer, "inputs": [str(path) for path in paths]}
    settings |= {"masks": [str(path) for path in mask_paths], "textures": textures, "versions": versions()}
    with share_done("measuring", show=processes.rank == 0) as progress:
        report = measure(
            subject.features,
            sources.images,
            segmenter=subject.segmenter,
            truths=sources.truths,
            n_classes=sources.n_classes,
            names=sources.class_names,
            image_names=sources.names,
            metrics=metrics,
            quick=quick,
            angles=angles,
            patch=subject.patch,
            size=subject.window(crop),
            exact=subject.exact,
            batch_size=batch_size,
            clusters=clusters,
            budget=budget,
            seed=seed,
            subject=subject.title,
            show=subject.picture,
            settings=settings,
            notes=sources.notes,
            processes=processes,
            progress=progress,
        )
    if processes.rank == 0:
        values = report.to_dict()
        output.finish(
            json,
            values,
            lambda: as_text(report),
            lambda: {"report.html": rotation_page(report), "report.json": values},
        )


def as_text(report: "Report") -> str:
    """Return what is printed of a report."""
    result, pattern = report.result, report.fingerprint
    lines = [f"{report.subject}, {len(result.images)} image(s)", report.verdict]
    lines += [result.remedy] if result.remedy else []
    lines += ["", report.to_markdown(), ""]
    if pattern is not None:
        lines.append(
            f"Fixed pattern: {pattern.snr:.3g} times what chance leaves in the mean of {pattern.n_images} windows "
            "(1 = no pattern, much more = one that is tied to the frame)."
        )
    return "\n".join([*lines, *(f"note: {note}" for note in result.notes)])
