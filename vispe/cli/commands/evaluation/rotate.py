"""`vispe rotate`: response of a model or a segmentation to rotations, reflections and shifts."""

from typing import TYPE_CHECKING, Literal

from vispe.errors import counted

if TYPE_CHECKING:
    from vispe.evaluate.rotation.report import RotationReport

POSITIONALS = ("model", "images")
SHORT = {"out": "-o"}
LIBRARY_NAMES = {"names": "classes", "truths": "masks", "size": "crop", "zero_is": "zero"}
"""Parameters of `measure` in messages, and the options of the command that set them."""


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
    patch_size: int | None = None,
    crop: int | None = None,
    clusters: int = 3,
    budget: int = 100,
    batch_size: int = 1,
    device: str = "auto",
    seed: int = 0,
    force: bool = False,
    json: bool = False,
) -> None:
    """Measure how rotating, mirroring and shifting a sample changes a model's features or a segmentation.

    Most samples under a microscope have no canonical orientation, so the features should not depend on it. Each image
    is rotated, mirrored and shifted, the output of the model is transformed back, and both are compared: 0 means no
    change, unrelated features give about 1.41, and there is no upper limit. With masks, the accuracy of a segmentation
    in each orientation and the dependence of each phase's area on it are measured too. Writes report.html and
    report.json, which contains the values of every image, into OUT. Images are not resized; error bars need 5 or more.
    Under torchrun, images are distributed over processes and the numbers are the same.

    Args:
        out: folder for report.html and report.json; by default only the table is printed.
        textures: number of additional synthetic micrographs with exact masks; no images are needed with them.
        metrics: groups to measure, separated by commas, from d4, angles, shift, lie, position, layers, fingerprint,
            clusters, quadrant, segmentation, poses; default all that apply.
        quick: fast preview with few angles and a central window of 14 patches of each image.
        angles: degrees, separated by commas; default every 15.
        symmetrize: average the patch kernel of the model over the eight poses (rotations and reflections) of a square.
        d4: average the features (or the probabilities of a saved segmentation model) over the eight poses, which makes
            the model exactly equivariant to rotations by 90 degrees at eight times the cost.
        layer: index of the block whose features are measured; negative indices count from the end; default the last.
        kind: output of a Python callable, features of a batch of images or labels of one image; default features.
        patch_size: side of a patch in pixels, for Python callables that do not define it.
        crop: side in pixels of the central window of each image that is measured; default the complete image.
        clusters: number of clusters of the features.
        budget: number of training pixels per class of a mask.

    Examples:
        vispe rotate vit_small_patch14_dinov2 images/ -o out
        vispe rotate vit_tiny_patch16_224 --textures 3 --weights random --quick
        vispe rotate vit_small_patch14_dinov2 images/ --masks masks/ --pos-embed alibi2d --symmetrize -o out
        vispe rotate seg/model.vispe images/ --masks masks/ -o out
        vispe rotate my_model.py:features images/*.png --patch-size 14 -o out
        torchrun --nproc-per-node 4 -m vispe rotate vit_base_patch16_224 images/ -o out
    """
    from vispe.backbones.distributed import Processes
    from vispe.cli.common import Output, find, progress_bar, versions
    from vispe.errors import OptionError
    from vispe.evaluate.evaluated import load_evaluated_model
    from vispe.evaluate.image_sources import load_sources
    from vispe.evaluate.rotation.evaluation import measure
    from vispe.evaluate.rotation.figures.html_report import rotation_page
    from vispe.evaluate.rotation.plan_options import check_metrics

    paths, mask_paths = find(images), find(masks)
    if not paths and textures < 1:
        raise OptionError("rotate: needs images, got none. Pass image files, or --textures N.")
    if mask_paths and not paths:
        raise OptionError("rotate: --masks needs images, got none. Textures have exact masks; omit --masks.")
    check_metrics(metrics)
    _check_effect(
        metrics,
        masks=bool(mask_paths),
        angles=angles is not None,
        clusters=clusters != 3,
        budget=budget != 100,
    )
    if not mask_paths and zero != "class":
        raise OptionError(f"rotate: `zero={zero}` has no effect without `masks`. Omit it, or pass masks.")
    output = Output(out, ["report.html", "report.json"], force, [*paths, *mask_paths])
    processes = Processes.started()
    build = {"pos_embed": pos_embed, "weights": weights, "img_size": img_size, "symmetric": symmetrize}
    features = {"d4": d4, "layer": layer, "patch_size": patch_size, "kind": kind}
    subject = load_evaluated_model(model, **build, **features, seed=seed, device=processes.device(device))
    if classes and not mask_paths and textures < 1 and subject.segmenter is None:
        raise OptionError("rotate: `classes` has no effect without `masks`. Omit it, or pass masks.")
    sources = load_sources(subject, paths, mask_paths, zero=zero, names=classes, textures=textures, seed=seed)
    settings = {"model": model, "pos_embed": pos_embed, "weights": weights, "img_size": img_size}
    settings |= {"symmetrize": symmetrize, "d4": d4, "layer": layer, "inputs": [str(path) for path in paths]}
    settings |= {"masks": [str(path) for path in mask_paths], "textures": textures, "versions": versions()}
    with progress_bar("measuring", show=processes.rank == 0) as progress:
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
            patch_size=subject.patch_size,
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


_USED_BY = {
    "masks": ("quadrant", "segmentation", "poses"),
    "angles": ("angles", "segmentation", "poses"),
    "clusters": ("clusters",),
    "budget": ("quadrant", "segmentation", "poses"),
}
"""Metrics that an option affects."""


def _check_effect(metrics: list[str] | None, **options: bool) -> None:
    """Raise `OptionError` for an option that is set but used by none of the metrics."""
    from vispe.errors import OptionError

    for option, is_set in options.items():
        if is_set and metrics is not None and not set(metrics) & set(_USED_BY[option]):
            raise OptionError(
                f"rotate: `{option}` has no effect on `metrics={','.join(metrics)}`. Omit it, or add one of "
                f"{', '.join(_USED_BY[option])}."
            )


def as_text(report: "RotationReport") -> str:
    """Return the printed summary of a report."""
    result, pattern = report.result, report.fingerprint
    lines = [f"{report.subject}, {counted(len(result.images), 'image')}", report.verdict]
    lines += [result.remedy] if result.remedy else []
    lines += ["", report.to_markdown(), ""]
    if pattern is not None:
        lines.append(
            f"Fixed pattern: {pattern.snr:.3g} times the chance level of the mean of "
            f"{counted(pattern.n_images, 'window')} (1 = no pattern, much larger = a pattern tied to the image frame)."
        )
    return "\n".join([*lines, *(f"note: {note}" for note in result.notes)])
