"""`vispe receptive-field`: the pixels that the feature of the central patch depends on."""

POSITIONALS = ("model", "images")
SHORT = {"out": "-o"}


def receptive_field(
    model: str,
    images: list[str] | None = None,
    out: str | None = None,
    pos_embed: str | None = None,
    weights: str | None = None,
    img_size: int | None = None,
    noise: int = 0,
    device: str = "auto",
    seed: int = 0,
    force: bool = False,
    json: bool = False,
) -> None:
    """Measure how far a model looks: the pixels that its central feature depends on.

    The effective receptive field: the influence of a pixel is the norm of the gradient of the feature of the central
    patch with respect to the pixel, averaged over images. The table has the radius that contains 50 % and 95 % of the
    influence, the area of the smallest region with 95 %, and the influence of the patch itself, each with the value
    for uniform influence. Images are centre-cropped to a square and resized to the input size of the model.

    Args:
        out: folder for report.html, report.json and receptive_field.png; by default only the table is printed.
        noise: number of images of uniform noise, instead of images.

    Examples:
        vispe receptive-field vit_small_patch14_dinov2 images/*.png -o out
        vispe receptive-field vit_tiny_patch16_224 --noise 4 --weights random --pos-embed alibi2d
        vispe receptive-field resnet18 --noise 2 --json
    """
    import warnings

    from vispe.cli.common import Output, find, load, progress, section
    from vispe.errors import OptionError, UnsupportedHost, counted
    from vispe.evaluate.effective_receptive_field import effective_receptive_field
    from vispe.evaluate.measure.probe_images import load_images
    from vispe.evaluate.plots.receptive_field import plot_receptive_field
    from vispe.utils.report.result import Drawing, Note, Rows, Section, report_page

    if bool(images) == (noise > 0):
        inputs = f"{counted(len(images or ()), 'image argument')} and --noise {noise}"
        raise OptionError(f"receptive-field: needs either images or --noise, got {inputs}. Pass one of them.")
    paths = find(images)
    output = Output(out, ["report.html", "receptive_field.png", "report.json"], force, paths)
    files = [str(path) for path in paths]
    subject, entries = load(model, pos_embed, weights, img_size, device, seed, inputs=files, noise=noise)
    if subject.features is None:
        raise UnsupportedHost(
            f"receptive-field: {subject.title} must have features, got a segmenter of labels. Use the model that "
            "computes its features."
        )
    pages, _, remarks = load_images(subject, paths, noise=noise, seed=seed)
    with progress() as bar:
        tracked = bar.track(pages, description="measuring gradients")
        result = effective_receptive_field(subject.features, tracked, seed=seed)
    for remark in remarks:
        warnings.warn(remark, stacklevel=1)
    report = entries | result.to_dict()

    def contents() -> dict[str, object]:
        figure = plot_receptive_field(result, subject.title)
        sections = [
            Section(
                "Influence",
                "Numbers are means over images, with 95 % intervals for five images or more.",
                Rows(result.table()),
                Drawing(figure, "Influence of every pixel on the feature of the central patch."),
                *(Note(note) for note in result.notes),
            )
        ]
        page = report_page(subject.title, "Effective receptive field", result.verdict, result.tone, sections)
        return {"report.html": page, "receptive_field.png": figure, "report.json": report}

    output.finish(json, report, lambda: section(subject.title, result), contents)
