"""`vispe audit`: what positions do to a model, in one page."""

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
    """Say what positions do to a model: measures with controls and intervals, on one page.

    Features: can place be read from them, do pictures share a pattern, do few channels carry it? Attention: do heads
    look at places, sinks or bands instead of things? Behaviour: what changes when the same content is shifted, turned
    or cut in strips? Every number is compared with what it is without the effect: random weights, no
    encoding, or a number that is known. Images are cropped to the centre square and resized to the model's size. A
    run that was killed goes on from its folder.

    Args:
        model: timm model name, open_clip:NAME/TAG, hf:FOLDER of a transformers model, folder of a retrofit, saved
            segmenter (.vispe), or a Python callable, package.module:name or file.py:name.
        images: images, folders or wildcards; every page of a stack counts as an image. 5 or more give intervals.
        out: folder for report.html, report.json and audit.png; without it only the table is printed.
        noise: number of images of uniform noise beside them.
        textures: number of generated homogeneous textures beside them.
        only: names of measures, or families: attention, features, behaviour; by default those of the page.
        controls: other passes to compare with: random, none; by default both, where a measure asks for them.
        against: another model, named likewise, which is measured on the same images; differences are in pairs.
        pos_embed: positional encoding that replaces the model's own.
        weights: checkpoint file, or random; the pretrained weights by default.
        img_size: side of the images in pixels, for models that are built for one size.
        device: where the model runs: auto, cpu, cuda, cuda:1 ...; auto takes cuda when there is one.
        seed: of noise, textures, random weights, and of what is drawn.
        force: overwrite files in the folder.
        json: print the report as JSON.

    Examples:
        vispe audit vit_small_patch14_dinov2 images/*.png -o out
        vispe audit vit_base_patch16_224 --noise 8 --only features --json
        vispe audit vit_tiny_patch16_224 --textures 6 --weights random --pos-embed alibi2d --only attention
    """
    from pathlib import Path

    from vispe.backbones.distributed import Processes
    from vispe.cli.common import Output, find, section, share_done, versions
    from vispe.errors import OptionError
    from vispe.evaluate.attention.divergence import heads_apart
    from vispe.evaluate.audit.audited_model import host_of
    from vispe.evaluate.audit.findings import Against
    from vispe.evaluate.audit.html_report import audit_page, plot_audit
    from vispe.evaluate.audit.measure import choose
    from vispe.evaluate.audit.probe_images import pictures_of
    from vispe.evaluate.audit.runner import VIEWS, audit
    from vispe.evaluate.evaluated import load_subject
    from vispe.files import remove

    paths, measures = find(images), choose(only)
    output = Output(out, ["report.html", "report.json", "audit.png"], force, paths)
    processes = Processes.started()
    built = {"img_size": img_size, "seed": seed, "device": processes.device(device)}
    subject = load_subject(model, pos_embed=pos_embed, weights=weights, **built)
    pictures, names, notes = pictures_of(subject, paths, noise=noise, textures=textures, seed=seed)
    other = None
    if against is not None:
        # a retrofit has the size that it was made for
        sized = {} if Path(against).is_dir() else {"img_size": img_size}
        other = load_subject(against, seed=seed, device=built["device"], **sized)
    if other is not None and (other.size, other.channels) != (subject.size, subject.channels):
        raise OptionError(
            f"{against} takes images of {other.size} px and {model} of {subject.size} px, which cannot be compared in "
            "pairs; give --img-size."
        )
    states: list[Path] = []
    found, hosts = [], [host_of(one) for one in ([subject] if other is None else [subject, other])]
    for k, host in enumerate(hosts):
        # what was kept stays until the report is written, so that a run that was killed goes on
        kept = None if out is None else Path(out, f"audit-{k}.state")
        states += [] if kept is None else [kept]
        with share_done(host.title, show=processes.main) as progress:
            found.append(
                audit(
                    host,
                    pictures,
                    measures,
                    controls=VIEWS if controls is None else controls,
                    seed=seed,
                    names=names,
                    state=kept,
                    processes=processes,
                    on_progress=progress,
                )
            )
    if not processes.main:
        return
    result = found[0]
    pair = Against(*found, *heads_apart(*hosts, pictures, measures)) if len(found) > 1 else None
    report = {
        "model": model,
        "pos_embed": pos_embed,
        "weights": weights or "pretrained",
        "inputs": list(names),
    }
    report |= {"seed": seed, "versions": versions(), "remarks": list(notes)} | result.to_dict()
    report |= {} if pair is None else {"against": pair.to_dict()}

    def contents() -> dict[str, object]:
        figure = plot_audit(result, f"{result.title}, {result.images} image(s)")
        return {"report.html": audit_page(result, figure, pair), "report.json": report, "audit.png": figure}

    def text() -> str:
        tables = [section(result.title, result), *([] if pair is None else [pair.to_markdown()])]
        return "\n".join(tables)

    output.finish(json, report, text, contents)
    for state in states:
        # each process has a file of its own
        for path in state.parent.glob(f"{state.name}*"):
            if re.fullmatch(r"(\.\d+)?", path.name.removeprefix(state.name)):
                remove(path, state.parent)
