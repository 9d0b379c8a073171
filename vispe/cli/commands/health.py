"""`vispe health`: the attention heads of a model."""

from typing import Literal

POSITIONALS = ("model", "images")
SHORT = {"out": "-o"}


def health(
    model: str,
    images: list[str] | None = None,
    out: str | None = None,
    pos_embed: str | None = None,
    weights: str | None = None,
    img_size: int | None = None,
    noise: int = 0,
    batch: int = 1,
    device: Literal["auto", "cpu", "cuda"] = "auto",
    seed: int = 0,
    force: bool = False,
    json: bool = False,
) -> None:
    """Report which attention heads of a model collapse, stay local, or look at places instead of things.

    Of every head: the share of attention that one token receives (which one, and whether it is the same in all
    images), entropy, attention to the neighbours, distance that holds 95 % of the attention against that of the
    position bias alone, share of the logits that the offset explains, massive query and key channels. Images are
    cropped to the centre square and resized to the model's size. Memory does not grow with their number.

    Args:
        model: timm model name, or open_clip:NAME/TAG (without a tag with weights).
        images: images, folders or wildcards; every page of a stack counts as an image.
        out: folder for report.html, report.json and heads.png; without it only the table is printed.
        pos_embed: positional encoding that replaces the model's own.
        weights: checkpoint file, or random; the pretrained weights by default.
        img_size: side of the images in pixels, for models that are built for one size.
        noise: number of images of uniform noise to look at in place of images.
        batch: images at once.
        device: where the model runs; auto takes cuda when there is one.
        seed: of noise and of random weights.
        force: overwrite files in the folder.
        json: print the report as JSON.

    Examples:
        vispe health vit_small_patch14_dinov2 images/*.png -o out
        vispe health vit_base_patch16_224 --noise 8 --json
        vispe health vit_tiny_patch16_224 --noise 2 --weights random --pos-embed alibi2d.geometric
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
    from vispe.backbones.open_clip import load_model
    from vispe.backbones.timm import noise_images, read_squares
    from vispe.errors import BackendUnavailable, OptionError
    from vispe.evaluate.attention.head_plots import health_page, plot_health
    from vispe.evaluate.attention.heads import head_health
    from vispe.files import atomic_path, check_writable, write_json
    from vispe.images.find import find_images

    if bool(images) == (noise > 0):
        raise OptionError("health needs something to look at: give either images or --noise N.")
    if device == "cuda" and not torch.cuda.is_available():
        raise BackendUnavailable("--device cuda was asked, but torch finds no CUDA device; use --device cpu.")
    paths = find_images(images) if images else []
    names = ("report.json", "heads.png", "report.html")
    files = [] if out is None else [Path(out) / name for name in names]
    check_writable(files, force, protect=paths)

    net = load_model(model, pos_embed=pos_embed, weights=weights, img_size=img_size, seed=seed)
    place = device if device != "auto" else "cuda" if torch.cuda.is_available() else "cpu"
    found = read_squares(paths, net) if paths else noise_images(noise, net, np.random.default_rng(seed))
    progress = Console(stderr=True)
    shown = track(
        found, "looking at heads", console=progress, transient=True, disable=not sys.stderr.isatty()
    )
    result = head_health(net.to(place), shown, batch=batch)

    title = " + ".join([model, *([pos_embed] if pos_embed else [])])
    title += " (random weights)" * (weights == "random")
    title += f", {result.images} {'noise ' * (not paths)}image{'s' * (result.images > 1)}"
    report = {
        "model": model,
        "pos_embed": pos_embed,
        "weights": weights or "pretrained",
        "inputs": [str(path) for path in paths],
        "noise": noise,
        "seed": seed,
        "device": place,
        "versions": {"vispe": vispe.__version__, "torch": torch.__version__, "timm": timm.__version__},
        **result.to_dict(),
    }
    if files:
        figure = plot_health(result, title)
        with atomic_path(files[1], force) as temporary:
            figure.savefig(temporary, format="png")
        health_page(result, title, figure).write(files[2], force)
        write_json(files[0], report, force)
    if json:
        print(dumps(report, indent=2, allow_nan=False))
    else:
        print(f"{title}: {result.verdict}")
        print("".join(f"  {note}\n" for note in result.notes), end="")
        print(f"\n{result.to_markdown()}\n")
        print(
            "Means over the heads of a layer; distances in patches; position: share of the logits' variance that"
        )
        print("the offset explains.")
    if files:
        print(f"written: {', '.join(map(str, reversed(files)))}", file=sys.stderr)
