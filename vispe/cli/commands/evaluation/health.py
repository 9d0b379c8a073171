"""`vispe health`: statistics of the attention heads of a model."""

POSITIONALS = ("model", "images")
SHORT = {"out": "-o"}
LEGEND = """\
Means over the heads of a layer; distances in patches; position: fraction of the variance of the
logits explained by the offset."""


def health(
    model: str,
    images: list[str] | None = None,
    out: str | None = None,
    pos_embed: str | None = None,
    weights: str | None = None,
    img_size: int | None = None,
    noise: int = 0,
    batch_size: int = 1,
    device: str = "auto",
    seed: int = 0,
    force: bool = False,
    json: bool = False,
) -> None:
    """Report attention heads that collapse, stay local, or attend by position instead of content.

    For every head: the largest fraction of attention on one token (which token, and whether it is the same in all
    images), entropy, attention to the neighbours, the distance that contains 95 % of the attention compared with that
    of the position bias alone, the fraction of the logits explained by the offset, massive query and key channels.
    Images are centre-cropped to a square and resized to the input size of the model. Memory does not depend on their
    number.

    Args:
        out: folder for report.html, report.json and heads.png; by default only the table is printed.
        noise: number of images of uniform noise, instead of images.

    Examples:
        vispe health vit_small_patch14_dinov2 images/*.png -o out
        vispe health vit_base_patch16_224 --noise 8 --json
        vispe health vit_tiny_patch16_224 --noise 2 --weights random --pos-embed alibi2d.geometric
    """
    import warnings

    from vispe.cli.common import Output, find, load, progress, section
    from vispe.errors import OptionError, UnsupportedHost, counted
    from vispe.evaluate.attention.head_figures import health_page, plot_health
    from vispe.evaluate.attention.head_health import head_health
    from vispe.evaluate.measure.audited_model import as_audited_model
    from vispe.evaluate.measure.probe_images import load_images

    if bool(images) == (noise > 0):
        inputs = f"{counted(len(images or ()), 'image argument')} and --noise {noise}"
        raise OptionError(f"health: needs either images or --noise, got {inputs}. Pass one of them.")
    paths = find(images)
    output = Output(out, ["report.html", "heads.png", "report.json"], force, paths)
    files = [str(path) for path in paths]
    subject, entries = load(model, pos_embed, weights, img_size, device, seed, inputs=files, noise=noise)
    name, host = subject.title, as_audited_model(subject)
    if host.model is None or "attention" not in host.can:
        raise UnsupportedHost(f"health: cannot read the attention of {name}: {host.why['attention']}.")
    inputs, _, remarks = load_images(subject, paths, noise=noise, seed=seed)
    with progress() as bar:
        result = head_health(
            host.model, bar.track(inputs, description="measuring heads"), batch_size=batch_size
        )
    for remark in remarks:
        warnings.warn(remark, stacklevel=1)
    title = f"{name}, {result.images} {'noise ' * (not paths)}image{'s' * (result.images > 1)}"
    report = entries | result.to_dict()

    def contents() -> dict[str, object]:
        figure = plot_health(result, title)
        return {"report.html": health_page(result, title, figure), "heads.png": figure, "report.json": report}

    output.finish(json, report, lambda: f"{section(title, result)}\n{LEGEND}", contents)
