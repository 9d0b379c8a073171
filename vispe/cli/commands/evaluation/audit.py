"""`vispe audit`: positional bias of a model, in one report."""

import re

POSITIONALS = ("model", "images")
SHORT = {"out": "-o"}


def audit(
    model: str,
    images: list[str] | None = None,
    out: str | None = None,
    noise: int = 0,
    textures: int = 0,
    only: list[str] | None = None,
    controls: list[str] | None = None,
    against: str | None = None,
    pos_embed: str | None = None,
    weights: str | None = None,
    img_size: int | None = None,
    device: str = "auto",
    seed: int = 0,
    force: bool = False,
    json: bool = False,
) -> None:
    """Audit the positional bias of a model: measures with controls and confidence intervals in one report.

    Features: can position be decoded from them, do images share a pattern, do few channels carry it? Attention: do
    heads attend to fixed positions, sinks or bands instead of content? Behaviour: what changes if the same content is
    shifted, rotated or occluded in strips? Every number is compared with a control without the effect: random
    weights, no encoding, or a known number. Images are centre-cropped to a square and resized to the input size of the
    model. An interrupted run resumes from its folder.

    Args:
        images: images, folders or wildcards; every page of a stack counts as an image. Intervals need 5 or more.
        out: folder for report.html, report.json and audit.png; by default only the table is printed.
        noise: number of additional images of uniform noise.
        textures: number of additional synthetic homogeneous textures.
        only: names of measures, or families: attention, features, behaviour; default the measures of the report.
        controls: control models to compare with: random, none; default both, for measures that use them.
        against: another model, named in the same way, measured on the same images for paired differences.

    Examples:
        vispe audit vit_small_patch14_dinov2 images/*.png -o out
        vispe audit vit_base_patch16_224 --noise 8 --only features --json
        vispe audit vit_tiny_patch16_224 --textures 6 --weights random --pos-embed alibi2d --only attention
    """
    from pathlib import Path

    from vispe.backbones.distributed import Processes
    from vispe.backbones.model_names import accepts_img_size
    from vispe.cli.common import Output, find, progress_bar, section, versions
    from vispe.errors import OptionError, counted
    from vispe.evaluate.attention.divergence import compare_heads_or_reason
    from vispe.evaluate.audit.findings import Comparison
    from vispe.evaluate.audit.html_report import audit_page, plot_audit
    from vispe.evaluate.audit.measures import choose
    from vispe.evaluate.audit.runner import audit
    from vispe.evaluate.audit.runs import VIEWS
    from vispe.evaluate.evaluated import load_evaluated_model
    from vispe.evaluate.measure.audited_model import as_audited_model
    from vispe.evaluate.measure.probe_images import load_images
    from vispe.utils.files import remove

    if only:
        import vispe.experimental.measures  # noqa: F401  (can be requested by name)
    paths, measures = find(images), choose(only)
    output = Output(out, ["report.html", "report.json", "audit.png"], force, paths)
    processes = Processes.started()
    options = {"img_size": img_size, "seed": seed, "device": processes.device(device)}
    subject = load_evaluated_model(model, pos_embed=pos_embed, weights=weights, **options)
    image_options = {"noise": noise, "textures": textures, "seed": seed}
    inputs, names, notes = load_images(subject, paths, **image_options)
    other = None
    if against is not None:
        size = {"img_size": img_size} if accepts_img_size(against) else {}
        other = load_evaluated_model(against, seed=seed, device=options["device"], **size)
    if other is not None and (other.size, other.channels) != (subject.size, subject.channels):
        raise OptionError(
            f"audit: paired comparison needs one image size, got {subject.size} px for {model} and {other.size} px for "
            f"{against}. Set --img-size."
        )
    states: list[Path] = []
    audits, hosts, inputs_of = [], [as_audited_model(subject)], [inputs]
    if other is not None:
        # the same images, as the other model normalises them
        hosts.append(as_audited_model(other))
        inputs_of.append(load_images(other, paths, **image_options)[0])
    for k, (host, images_of_host) in enumerate(zip(hosts, inputs_of, strict=True)):
        # the state file exists until the report is written, so that an interrupted run can resume
        state = None if out is None else Path(out, f"audit-{k}.state")
        states += [] if state is None else [state]
        with progress_bar(host.title, show=processes.main) as progress:
            audits.append(
                audit(
                    host,
                    images_of_host,
                    measures,
                    controls=VIEWS if controls is None else controls,
                    seed=seed,
                    names=names,
                    state=state,
                    processes=processes,
                    on_progress=progress,
                )
            )
    if not processes.main:
        return
    result = audits[0]
    pair = (
        Comparison(*audits, *compare_heads_or_reason(*hosts, *inputs_of, measures))
        if len(audits) > 1
        else None
    )
    report = {
        "model": model,
        "pos_embed": pos_embed,
        "weights": weights or "pretrained",
        "inputs": list(names),
    }
    report |= {"seed": seed, "versions": versions(), "remarks": list(notes)} | result.to_dict()
    report |= {} if pair is None else {"against": pair.to_dict()}

    def contents() -> dict[str, object]:
        figure = plot_audit(result, f"{result.title}, {counted(result.images, 'image')}")
        return {"report.html": audit_page(result, figure, pair), "report.json": report, "audit.png": figure}

    def text() -> str:
        tables = [section(result.title, result), *([] if pair is None else [pair.to_markdown()])]
        return "\n".join(tables)

    output.finish(json, report, text, contents)
    for state in states:
        # each process writes its own file, numbered by rank
        for path in state.parent.glob(f"{state.name}*"):
            if re.fullmatch(r"(\.\d+)?", path.name.removeprefix(state.name)):
                remove(path, state.parent)
