"""`vispe retrofit evaluate`: what a retrofit took and what it left, before and after, on one page."""

from typing import Literal

POSITIONALS = ("checkpoint",)
SHORT = {"out": "-o"}


def retrofit_evaluate(
    checkpoint: str,
    images: list[str] | None = None,
    masks: list[str] | None = None,
    out: str | None = None,
    zero: Literal["class", "ignore"] = "class",
    classes: list[str] | None = None,
    size: int | None = None,
    noise: int = 32,
    textures: int = 9,
    step: int | None = None,
    rotation: bool = True,
    budget: int = 100,
    batch_size: int = 1,
    device: str = "auto",
    seed: int = 0,
    force: bool = False,
    json: bool = False,
) -> None:
    """Measure what a retrofit took and what it left: before and after, on one page.

    Readable position, the pattern that is tied to the frame, the response to turned images, likeness to the teacher,
    effective rank and, with masks, linear segmentation beside classical filters. Noise and textures are made, so no
    images are needed; yours tell what the retrofit means for your samples. OUT then holds report.html, to be read, and
    report.json with the number of every image.

    Args:
        checkpoint: folder that vispe retrofit wrote.
        images: images, folders or wildcards, separated by commas; the middle of each is used, nothing is resized.
        masks: files with the true classes, matched to the images by name (a.png with a.png or a_mask.png) or else by
            order.
        out: folder for report.html and report.json; without it only the table is printed.
        zero: whether the value 0 in a mask is the first class, or is left out.
        classes: names of the classes, separated by commas.
        size: side of the windows in pixels; the largest of the training by default.
        noise: noise images.
        textures: synthetic textures.
        step: the probe fits one patch in step²; 6 where the grid is large enough for that, by default.
        rotation: turn and mirror images too.
        budget: scribbled pixels of each class.
        batch_size: images that a model sees at once.
        device: auto, cpu, cuda, ...
        seed: of all random numbers.
        force: overwrite files in the folder.
        json: print the report as JSON.

    Examples:
        vispe retrofit evaluate out -o out/report
        vispe retrofit evaluate out --images micrographs --masks masks -o out/report
    """
    given = {name: value for name, value in locals().items() if name != "json"}
    given |= {"images": images or (), "masks": masks or ()}
    from vispe.cli.common import Output, share_done
    from vispe.train.evaluate.html_report import to_text
    from vispe.train.evaluate.retrofit_folder import evaluate_checkpoint

    output = Output(out, ["report.html", "report.json"], force)
    with share_done("reading") as progress:
        report = evaluate_checkpoint(**given, progress=progress)
    output.finish(json, report.to_dict(), lambda: to_text(report))
