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
    Homogeneous images, or noise, show the bias best. Images are cropped to the centre square and resized to
    the model's size.

    Args:
        model: timm model name.
        images: images, folders or wildcards; every page of a stack counts as an image.
        out: folder for report.json and probe.png; without it only the table is printed.
        pos_embed: positional encoding that replaces the model's own.
        weights: checkpoint file, or random; the pretrained weights by default.
        img_size: side of the images in pixels, for models that are built for one size.
        target: what the verdict and the picture are about.
        noise: number of images of uniform noise to probe; needs no images.
        step: one patch in step² is fitted.
        masks: random choices of these patches per image.
        regressor: ridge, or linear for least squares of least norm.
        alpha: penalty of ridge.
        seed: of noise, of the choice of patches and of random weights.
        force: overwrite files in the folder.
        json: print the report as JSON.

    Examples:
        vispe probe vit_small_patch14_reg4_dinov2 images/*.png -o out
        vispe probe vit_small_patch14_reg4_dinov2 --noise 8 --pos-embed alibi2d --weights alibi.pth
        vispe probe vit_tiny_patch16_224 --noise 4 --weights random --step 3 --json
    """
    import sys
    from json import dumps
    from pathlib import Path

    import numpy as np
    import timm
    import torch
    from rich.console import Console
    from rich.progress import track

    import vispe
    from vispe.errors import OptionError
    from vispe.evaluate.backbone import load_backbone, noise_images, read_squares
    from vispe.evaluate.plots import plot_probe
    from vispe.evaluate.probe import positional_probe
    from vispe.evaluate.ramps import TARGETS
    from vispe.segment.images import find_images
    from vispe.segment.outputs import atomic_path, check_writable, write_json

    if not images and noise < 1:
        raise OptionError("probe needs something to look at: give images, or --noise N.")
    paths = find_images(images) if images else []
    sources = [*(["images"] if paths else []), *(["noise"] if noise > 0 else [])]
    pictures = (
        {} if out is None else {s: Path(out) / f"probe{'_noise' * (s != sources[0])}.png" for s in sources}
    )
    if out is not None:
        check_writable([Path(out) / "report.json", *pictures.values()], force, protect=paths)

    net = load_backbone(model, pos_embed=pos_embed, weights=weights, img_size=img_size, seed=seed)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    net.to(device)
    progress = Console(stderr=True)
    results = {}
    for source in sources:
        rng = np.random.default_rng(seed)
        found = read_squares(paths, net) if source == "images" else noise_images(noise, net, rng)
        results[source] = positional_probe(
            net,
            track(
                found, f"probing {source}", console=progress, transient=True, disable=not sys.stderr.isatty()
            ),
            targets=(target, *TARGETS),
            step=step,
            masks_per_image=masks,
            regressor=regressor,
            alpha=alpha,
            generator=rng,
        )

    shown = " + ".join([model, *([pos_embed] if pos_embed else [])]) + (
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
    if json:
        print(dumps(report, indent=2, allow_nan=False))
    for source, result in results.items():
        kind = "image" if source == "images" else "noise image"
        title = f"{shown}, {result.n_images} {kind}{'s' * (result.n_images > 1)}"
        if not json:
            print(f"{title}: {result.verdict}")
            print("".join(f"  {note}\n" for note in result.notes), end="")
            print(f"\n{result.to_markdown()}\n")
        if out is not None:
            with atomic_path(pictures[source], force) as temporary:
                plot_probe(result, title).savefig(temporary, format="png")
    if out is not None:
        write_json(Path(out) / "report.json", report, force)
        print(
            f"written: {', '.join(str(p) for p in (*pictures.values(), Path(out) / 'report.json'))}",
            file=sys.stderr,
        )
