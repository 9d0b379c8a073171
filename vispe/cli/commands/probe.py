"""`vispe probe`: the positional linear probe of a model."""

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
    """Measure how much position a model's features reveal.

    A linear model is fitted on few patches of each image to read where a patch is, and scored (R²) on the
    other patches. 1: the features tell the position whatever the image shows; 0 or less: they do not.
    Homogeneous images, textures or noise show the bias best. Images are cropped to the centre square and resized to
    the model's size.

    Asked of the final features, then after every block and of every channel, and, with --baselines, after remedies:
    channels set to 0, SVD debias, and features averaged over mirrored, turned and shifted images. Controls are
    positions in random order and random numbers, which must not be readable.

    Args:
        model: timm model name, open_clip:NAME/TAG, hf:FOLDER of a transformers model, folder of a retrofit, saved
            segmenter (.vispe), or a Python callable, package.module:name or file.py:name.
        images: images, folders or wildcards; every page of a stack counts as an image.
        out: folder for report.html, report.json and probe.png; without it only the tables are printed.
        pos_embed: positional encoding that replaces the model's own.
        weights: checkpoint file, or random; the pretrained weights by default.
        img_size: side of the images in pixels, for models that are built for one size.
        target: what the verdict and the picture are about; lr is the column of a patch, ud its row.
        noise: number of images of uniform noise to probe; needs no images.
        textures: number of generated homogeneous textures to probe; needs no images.
        layers: also after every block; one more forward pass for each image.
        baselines: also after remedies; 130 forward passes for each image with 4 shifts, 10 with 1.
        blank: channels that a remedy sets to 0; by default the 4 most telling ones, chosen on other images than
            those scored.
        shifts: shifts along each side that are averaged over, 1 for none; passes grow with their square.
        step: one patch in step² is fitted.
        masks: random choices of these patches per image.
        regressor: ridge, or linear for least squares of least norm.
        alpha: penalty of ridge.
        device: where the model runs: auto, cpu, cuda, cuda:1 ...; auto takes cuda when there is one.
        seed: of noise, textures, the choice of patches and of random weights.
        force: overwrite files in the folder.
        json: print the report as JSON.

    Examples:
        vispe probe vit_small_patch14_reg4_dinov2 images/*.png --noise 4 -o out
        vispe probe vit_small_patch14_reg4_dinov2 --textures 6 --baselines --blank 47,113,117,359 -o out
        vispe probe vit_tiny_patch16_224 --noise 4 --weights random --step 3 --no-layers --json
    """
    from vispe.cli.common import Output, find, load, progress, section
    from vispe.evaluate.probe.figures.html_report import heading, probe_page
    from vispe.evaluate.probe.figures.summary_figure import plot_probe
    from vispe.evaluate.probe.source_probe import Question, asked_sources, probe_source

    question = Question(target, step, masks, regressor, alpha, layers, baselines, blank, shifts, seed)
    paths = find(images)
    sources = asked_sources(paths, noise, textures)
    pictures = {s: f"probe_{s}.png" if k else "probe.png" for k, s in enumerate(sources)}
    output = Output(out, [*pictures.values(), "report.json", "report.html"], force, paths)
    files = [str(path) for path in paths]
    subject, entries = load(model, pos_embed, weights, img_size, device, seed, images=files)
    name = subject.title
    with progress() as bar:
        results = {
            source: probe_source(
                subject, source, what, question, lambda rows, words: bar.track(rows, description=words)
            )
            for source, what in sources.items()
        }
    report = entries | {"results": {source: result.to_dict() for source, result in results.items()}}
    titles = {s: f"{name}, {heading(s, result.probe)}" for s, result in results.items()}
    output.finish(
        json,
        report,
        lambda: "\n".join(
            section(words, part)
            for s, result in results.items()
            for words, part in ((titles[s], result.probe), *result.parts())
        ),
        lambda: (
            {pictures[s]: plot_probe(result.probe, titles[s]) for s, result in results.items()}
            | {"report.json": report, "report.html": probe_page(name, results)}
        ),
    )
