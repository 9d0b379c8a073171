"""The command `vispe suggest`."""

from typing import Literal

POSITIONALS = ("image",)
SHORT = {"out": "-o"}


def suggest(
    image: str,
    out: str,
    model: str | None = None,
    labels: str | None = None,
    count: int = 5,
    page: int | None = None,
    classifier: Literal["logistic", "forest", "boosting"] | None = None,
    features: Literal["filters", "tokens", "both"] | None = None,
    classes: list[str] | None = None,
    legend: str | None = None,
    max_classes: int | None = None,
    label_page: int | None = None,
    channel: str | None = None,
    z: str | None = None,
    axes: str | None = None,
    orientation: Literal["stored", "tag"] = "stored",
    crop: str | None = None,
    mask: str | None = None,
    seed: int | None = None,
    device: str = "auto",
    force: bool = False,
    json: bool = False,
) -> None:
    """Show where the next strokes on an image would teach most.

    Give the strokes so far (--labels), or a model of an earlier run (--model). Places count for how unsure the model is
    there, and for how unlike what is labelled they look. OUT then holds the picture with numbered rings,
    NAME_suggest.png, and NAME_suggest.json: for each place x, y and radius in pixels, uncertainty, and the reason.

    Args:
        image: an image file.
        out: folder for the results.
        model: a model.vispe file.
        labels: a file of strokes on this image, as for vispe segment.
        count: places at most.
        page: page (from 0) of a stack; default the middle one.
        classifier: with labels, as for vispe segment; default logistic.
        features: with labels, filters, tokens of vispe_micro, or both (default).
        classes: names of the classes 1, 2, ..., separated by commas.
        legend: JSON file with class names by number, grey level or colour.
        max_classes: more different labels than this are taken for a mistake; default 20.
        label_page: page (from 0) that labels of one page belong to, in a stack.
        channel: channels to use, by number (from 0) or name, separated by commas.
        z: page (from 0) or range a:b of a stack.
        axes: meaning of the stored axes, such as ZYX, where the file is wrong.
        orientation: as for vispe segment.
        crop: rows and columns of the sample, such as 0:884,0:1024; nothing is suggested elsewhere.
        mask: image file with 0 for pixels where nothing is suggested.
        seed: with labels, of all random numbers; default 0.
        device: auto, cpu, cuda, ...
        force: overwrite existing results.
        json: print what the JSON file holds instead of one line for each place.

    Examples:
        vispe suggest steel.png --labels scribbles.png --classes matrix,carbide -o out
        vispe suggest more/steel2.png --model out/model.vispe --count 3 -o out
    """
    import sys
    from json import dumps

    from vispe.cli.terminal import one_line
    from vispe.segment.features.micro_features import NAME
    from vispe.segment.features.pixel_features import FeatureConfig
    from vispe.segment.live.suggest_file import suggest_file
    from vispe.segment.run.inputs import Reading
    from vispe.segment.run.request import Labelling

    named = {"classes": classes, "legend": legend, "max_classes": max_classes, "label_page": label_page}
    named = {key: value for key, value in named.items() if value is not None}
    config = (
        None if features is None else FeatureConfig(features, model=None if features == "filters" else NAME)
    )
    found = suggest_file(
        image,
        out,
        model=model,
        labels=labels,
        count=count,
        page=page,
        features=config,
        classifier=classifier,
        reading=Reading(
            channel, z, axes, orientation=orientation, crop=crop, mask=() if mask is None else (mask,)
        ),
        labelling=Labelling(**named) if named else None,
        seed=seed,
        device=device,
        force=force,
        watch=lambda text: print(f"vispe: note: {one_line(text)}", file=sys.stderr),
    )
    if json:
        print(dumps(found, indent=2))
        return
    for place in found["places"]:
        where = f"x={place['x']} y={place['y']} radius={place['radius']} px"
        why = f"{one_line(place['reason'])} (uncertainty {place['uncertainty']:.2f})"
        print(f"{place['number']}: {where}, {why}")
    print(one_line(f"-> {found['files']['png']}"))
