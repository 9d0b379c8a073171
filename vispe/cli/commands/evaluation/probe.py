"""`vispe probe`: linear probe for position in the features of a model."""

from typing import Literal

POSITIONALS = ("model", "images")
SHORT = {"out": "-o"}


def probe(
    model: str,
    images: list[str] | None = None,
    out: str | None = None,
    pos_embed: str | None = None,
    weights: str | None = None,
    img_size: int | None = None,
    target: Literal["lr+ud", "lr", "ud", "diag", "radial", "raster"] = "lr+ud",
    noise: int = 0,
    textures: int = 0,
    layers: bool = True,
    baselines: bool = False,
    blank: list[int] | None = None,
    shifts: int = 4,
    step: int = 6,
    masks: int = 6,
    regressor: Literal["ridge", "linear"] = "ridge",
    alpha: float = 1.0,
    device: str = "auto",
    seed: int = 0,
    force: bool = False,
    json: bool = False,
) -> None:
    """Measure how much position can be decoded from a model's features.

    A linear model is fitted on a few patches of each image to predict the position of a patch, and scored (R²) on the
    other patches. 1: position can be decoded regardless of the image content; 0 or less: it cannot. Homogeneous
    images, textures or noise show the bias best. Images are centre-cropped to a square and resized to the input size
    of the model.

    Probes the final features, then every block and every channel, and, with --baselines, features after remedies:
    channels set to 0, SVD debiasing, averages over mirrored, rotated and shifted images, RASA (removal of the
    directions of linear regressions of position, fitted on images that are not scored, of the same kind and of several
    kinds), and RASA after the average over poses. The controls, shuffled positions and random numbers, must not be
    decodable.

    For four images or more, ridge regression, nearest neighbours and a small network are also fitted on half of the
    images (of at most 16) and scored on the others: non-linear probes of the position that images have in common.

    Args:
        out: folder for report.html, report.json and probe.png; by default only the tables are printed.
        target: position target of the verdict and the figure; lr is the column of a patch, ud its row.
        noise: number of images of uniform noise to probe; needs no images.
        textures: number of synthetic homogeneous textures to probe; needs no images.
        layers: probe every block too; one additional forward pass per image.
        baselines: probe the remedies too; 138 forward passes per image with 4 shifts, 18 with 1.
        blank: channels that a remedy sets to 0; default the 4 most informative ones, selected on images that are not
            scored.
        shifts: number of shifts along each axis to average over, 1 for none; the cost grows with the square.
        step: one patch in step² is used for fitting.
        masks: random selections of these patches per image.
        regressor: ridge, or linear for minimum-norm least squares.
        alpha: ridge penalty.

    Examples:
        vispe probe vit_small_patch14_reg4_dinov2 images/*.png --noise 4 -o out
        vispe probe vit_small_patch14_reg4_dinov2 --textures 6 --baselines --blank 47,113,117,359 -o out
        vispe probe vit_tiny_patch16_224 --noise 4 --weights random --step 3 --no-layers --json
    """
    from vispe.cli.common import Output, find, load, progress, section
    from vispe.evaluate.probe.figures.html_report import heading, probe_page
    from vispe.evaluate.probe.figures.summary_figure import plot_probe
    from vispe.evaluate.probe.source_probe import Question, probe_source, requested_sources

    question = Question(target, step, masks, regressor, alpha, layers, baselines, blank, shifts, seed)
    paths = find(images)
    sources = requested_sources(paths, noise, textures)
    figures = {s: f"probe_{s}.png" if k else "probe.png" for k, s in enumerate(sources)}
    output = Output(out, [*figures.values(), "report.json", "report.html"], force, paths)
    files = [str(path) for path in paths]
    subject, entries = load(model, pos_embed, weights, img_size, device, seed, images=files)
    name = subject.title
    with progress() as bar:
        results = {
            source: probe_source(
                subject, source, images, question, lambda items, text: bar.track(items, description=text)
            )
            for source, images in sources.items()
        }
    report = entries | {"results": {source: result.to_dict() for source, result in results.items()}}
    titles = {s: f"{name}, {heading(s, result.probe)}" for s, result in results.items()}
    output.finish(
        json,
        report,
        lambda: "\n".join(
            section(title, part)
            for s, result in results.items()
            for title, part in ((titles[s], result.probe), *result.parts())
        ),
        lambda: (
            {figures[s]: plot_probe(result.probe, titles[s]) for s, result in results.items()}
            | {"report.json": report, "report.html": probe_page(name, results)}
        ),
    )
