"""`vispe suggest`: regions of an image to label next (active learning)."""

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
    classifier: Literal["ensemble", "logistic", "forest", "boosting"] | None = None,
    features: Literal["filters", "tokens", "both"] | None = None,
    stored_features: str | None = None,
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
    """Suggest where further scribbles on an image would help the classifier most.

    Pass the existing scribbles (--labels), or a model of an earlier run (--model). Regions are ranked by the
    uncertainty of the model and by their dissimilarity to the labelled pixels. Writes the image with numbered rings,
    NAME_suggest.png, and NAME_suggest.json with x, y and radius in pixels, uncertainty and reason of each region.

    Args:
        image: an image file.
        out: folder for the results.
        model: a model.vispe file.
        labels: scribbles on this image, as for vispe segment.
        count: largest number of regions.
        classifier: with labels, as for vispe segment (default ensemble); logistic is the fastest.
        features: with labels, filters, tokens of vispe_micro, or both (default).
        max_classes: largest number of distinct label values; more are reported as an error; default 20.
        crop: rows and columns of the sample, such as 0:884,0:1024; nothing is suggested elsewhere.
        mask: image file with 0 for pixels where nothing is suggested.
        seed: with labels, seed of all random numbers; default 0.
        json: print the contents of the JSON file instead of one line per region.

    Examples:
        vispe suggest steel.png --labels scribbles.png --classes matrix,carbide -o out
        vispe suggest more/steel2.png --model out/model.vispe --count 3 -o out
    """
    import sys
    from json import dumps

    from vispe.cli.terminal import one_line
    from vispe.segment.features.feature_config import FeatureConfig
    from vispe.segment.features.micro_features import NAME
    from vispe.segment.live.suggest_file import suggest_file
    from vispe.segment.types import LabelOptions, ReadOptions

    label_options = {
        "classes": classes,
        "legend": legend,
        "max_classes": max_classes,
        "label_page": label_page,
    }
    label_options = {key: value for key, value in label_options.items() if value is not None}
    config = (
        None if features is None else FeatureConfig(features, model=None if features == "filters" else NAME)
    )
    suggestion = suggest_file(
        image,
        out,
        model=model,
        labels=labels,
        count=count,
        page=page,
        features=config,
        classifier=classifier,
        reading=ReadOptions(
            channel, z, axes, orientation=orientation, crop=crop, mask=() if mask is None else (mask,)
        ),
        labelling=LabelOptions(**label_options) if label_options else None,
        stored_features=stored_features,
        seed=seed,
        device=device,
        force=force,
        watch=lambda text: print(f"vispe: note: {one_line(text)}", file=sys.stderr),
    )
    if json:
        print(dumps(suggestion, indent=2))
        return
    for region in suggestion["places"]:
        location = f"x={region['x']} y={region['y']} radius={region['radius']} px"
        reason = f"{one_line(region['reason'])} (uncertainty {region['uncertainty']:.2f})"
        print(f"{region['number']}: {location}, {reason}")
    print(one_line(f"-> {suggestion['files']['png']}"))
