"""`vispe debias`: a model with less positional bias, without training."""

POSITIONALS = ("model", "images")
SHORT = {"out": "-o"}


def debias(
    model: str,
    out: str,
    images: list[str] | None = None,
    method: str = "poses",
    rounds: int | None = None,
    positions: int | None = None,
    blank: list[int] | None = None,
    directions: int | None = None,
    neurons: int | None = None,
    noise: int = 0,
    textures: int = 0,
    pos_embed: str | None = None,
    weights: str | None = None,
    img_size: int | None = None,
    device: str = "auto",
    seed: int = 0,
    force: bool = False,
    json: bool = False,
) -> None:
    """Reduce the positional bias of a model without training.

    Writes a folder that other commands accept as a model: vispe segment --model OUT, vispe probe OUT, vispe audit OUT,
    vispe rotate OUT, and teacher.name of vispe retrofit. It contains the name of the model and a linear map, but
    not the weights of the model.

    Methods: poses, the mean over the eight poses (8 forward passes per image); positions, the mean over random
    positions (8); registers, an additional token that takes the activations which make single patches outliers; rasa,
    removal of the directions of linear regressions of position; blank, the most informative channels set to 0; svd,
    removal of the directions in which a black image varies. Join them by +, such as poses+positions (8) or
    poses+rasa. registers, rasa and blank are fitted on images, which need no labels; use images of the kind that the
    model will see, but not those of an evaluation.

    Args:
        out: output folder.
        images: images, folders or wildcards on which registers, rasa and blank are fitted.
        method: names of methods, joined by +.
        rounds: for rasa, number of rounds; each removes two directions; default 32, but at most a quarter of all.
        positions: positions for each pose; default 1 with poses, else 8.
        blank: for blank, channels to set to 0; default the 4 most informative ones of the images.
        directions: for svd, number of directions; default 16.
        neurons: for registers, number of register neurons; default 10.
        noise: number of images of uniform noise to fit on, in addition to images.
        textures: number of synthetic homogeneous textures to fit on, in addition to images.

    Examples:
        vispe debias vit_small_patch14_dinov2 --method poses+positions -o symmetric
        vispe debias vit_small_patch14_dinov2 micrographs/*.tif --method rasa -o rasa
        vispe debias vit_tiny_patch16_224 --weights random --method rasa --textures 8 -o rasa
    """
    import warnings
    from pathlib import Path

    from vispe.backbones.local.debiased_folder import MAP, RECORD, save_debiased
    from vispe.backbones.model_names import NETWORKS, absolute_name, check_kind
    from vispe.cli.common import Output, find, load, progress
    from vispe.errors import counted
    from vispe.evaluate.measure.probe_images import load_images
    from vispe.evaluate.probe.remedies import debias as debiased
    from vispe.evaluate.probe.remedies import parse_method

    parse_method(method)
    check_kind(model, [kind for kind in NETWORKS if kind != "debiased"])
    paths = find(images)
    Output(out, [RECORD, MAP], force, paths)
    subject, entries = load(model, pos_embed, weights, img_size, device, seed)
    options = {"rounds": rounds, "positions": positions, "directions": directions}
    options |= {"neurons": neurons, "seed": seed}
    if blank is not None:
        options["channels"] = blank
    remarks: list[str] = []
    with progress() as bar:
        fitted = None
        if paths or noise or textures:
            pages, _, remarks = load_images(subject, paths, noise=noise, textures=textures, seed=seed)
            fitted = bar.track(pages, description="computing features")
        result = debiased(subject.features, method, fitted, **options).model.debiasing
    for remark in remarks:
        warnings.warn(remark, stacklevel=1)
    # the folder may be used from elsewhere
    file = weights if weights in (None, "random") else str(Path(weights).resolve())
    arguments = {
        "name": absolute_name(model),
        "pos_embed": pos_embed,
        "weights": file,
        "img_size": img_size,
        "seed": seed,
    }
    save_debiased(out, result, arguments, force)
    passes = counted(result.average.passes, "forward pass")
    report = entries | {"method": method, "passes": result.average.passes, **result.details}

    def text() -> str:
        fit = ", ".join(f"{key} {value}" for key, value in result.details.items() if value)
        return f"{subject.title}, {method}: {passes} per image{f'; {fit}' if fit else ''}\nwritten: {out}"

    Output(None, ()).finish(json, report, text)
