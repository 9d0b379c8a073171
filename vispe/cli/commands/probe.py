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
        model: timm model name, or open_clip:NAME/TAG (without a tag with weights).
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
        seed: of noise, textures, the choice of patches and of random weights.
        force: overwrite files in the folder.
        json: print the report as JSON.

    Examples:
        vispe probe vit_small_patch14_reg4_dinov2 images/*.png --noise 4 -o out
        vispe probe vit_small_patch14_reg4_dinov2 --textures 6 --baselines --blank 47,113,117,359 -o out
        vispe probe vit_tiny_patch16_224 --noise 4 --weights random --step 3 --no-layers --json
    """
    import sys
    from collections.abc import Iterable
    from json import dumps
    from pathlib import Path

    import timm
    import torch
    from rich.console import Console
    from rich.progress import track
    from torch import Tensor

    import vispe
    from vispe.backbones.open_clip import load_model
    from vispe.errors import OptionError
    from vispe.evaluate.probe.pictures.page import heading, probe_page
    from vispe.evaluate.probe.pictures.sheet import plot_probe
    from vispe.evaluate.probe.run import Question, probe_source
    from vispe.files import atomic_path, check_writable, write_json
    from vispe.images.find import find_images

    if not images and noise < 1 and textures < 1:
        raise OptionError("probe needs something to look at: give images, or --noise N, or --textures N.")
    if not baselines and (blank is not None or shifts != 4):
        raise OptionError(
            "--blank and --shifts are about remedies, which were not asked for; add --baselines."
        )
    paths = find_images(images) if images else []
    asked = {"images": bool(paths), "noise": noise > 0, "textures": textures > 0}
    sources = [source for source, given in asked.items() if given]
    pictures, files = {}, []
    if out is not None:
        names = {s: f"probe_{s}.png" if k else "probe.png" for k, s in enumerate(sources)}
        pictures = {s: Path(out) / name for s, name in names.items()}
        files = [Path(out) / "report.json", Path(out) / "report.html"]
        check_writable([*files, *pictures.values()], force, protect=paths)

    net = load_model(model, pos_embed=pos_embed, weights=weights, img_size=img_size, seed=seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net.to(device)
    progress = Console(stderr=True)

    def shown(found: Iterable[Tensor], words: str) -> Iterable[Tensor]:
        quiet = not sys.stderr.isatty()
        return track(found, words, console=progress, transient=True, disable=quiet)

    question = Question(target, step, masks, regressor, alpha, layers, baselines, blank, shifts, seed)
    counts = {"images": paths, "noise": noise, "textures": textures}
    results = {source: probe_source(net, source, counts[source], question, shown) for source in sources}

    subject = " + ".join([model, *([pos_embed] if pos_embed else [])]) + (
        " (random weights)" * (weights == "random")
    )
    report = {
        "model": model,
        "pos_embed": pos_embed,
        "weights": weights or "pretrained",
        "images": [str(path) for path in paths],
        "seed": seed,
        "device": device,
        "versions": {"vispe": vispe.__version__, "torch": torch.__version__, "timm": timm.__version__},
        "results": {source: result.to_dict() for source, result in results.items()},
    }
    titles = {s: f"{subject}, {heading(s, result.probe)}" for s, result in results.items()}
    if out is not None:
        for source, result in results.items():
            with atomic_path(pictures[source], force) as temporary:
                plot_probe(result.probe, titles[source]).savefig(temporary, format="png")
        write_json(files[0], report, force)
        probe_page(subject, results).write(files[1], force)
    if json:
        print(dumps(report, indent=2, allow_nan=False))
    for source, result in () if json else results.items():
        for words, part in ((titles[source], result.probe), *result.parts()):
            print(f"{words}: {part.verdict}")
            print("".join(f"  {note}\n" for note in part.notes), end="")
            print(f"\n{part.to_markdown()}\n")
    if out is not None:
        print(f"written: {', '.join(str(p) for p in (*pictures.values(), *files))}", file=sys.stderr)
