"""`vispe retrofit evaluate`: evaluation of a retrofit, before and after, in one report."""

from typing import Literal

POSITIONALS = ("checkpoint",)
SHORT = {"out": "-o"}
LIBRARY_NAMES = {"zero_is": "zero"}


def retrofit_evaluate(
    checkpoint: str,
    images: list[str] | None = None,
    masks: list[str] | None = None,
    out: str | None = None,
    zero: Literal["class", "ignore"] = "class",
    classes: list[str] | None = None,
    img_size: int | None = None,
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
    """Evaluate a retrofit: the model before and after, in one report.

    Measures decodable position, the fixed pattern of the image frame, the response to rotated images, similarity to the
    teacher, effective rank and, with masks, linear segmentation compared with classical filters. Noise and textures are
    generated, so images are optional; pass your own to evaluate the retrofit on your samples. Writes report.html and
    report.json, which contains the values of every image, into OUT.

    Args:
        checkpoint: output folder of vispe retrofit.
        images: images, folders or wildcards, separated by commas; centre-cropped, not resized.
        out: folder for report.html and report.json; by default only the table is printed.
        img_size: side of the windows in pixels; default the largest of the training.
        noise: number of noise images.
        textures: number of synthetic textures.
        step: the probe is fitted on one patch in step²; default 6 if the grid is large enough.
        rotation: rotate and mirror images too.
        budget: number of labelled pixels per class.

    Examples:
        vispe retrofit evaluate out -o out/report
        vispe retrofit evaluate out --images micrographs --masks masks -o out/report
    """
    settings = {name: value for name, value in locals().items() if name != "json"}
    settings |= {"images": images or (), "masks": masks or ()}
    from vispe.cli.common import Output, progress_bar
    from vispe.train.evaluate.html_report import to_text
    from vispe.train.evaluate.retrofit_folder import evaluate_checkpoint

    output = Output(out, ["report.html", "report.json"], force)
    with progress_bar("reading") as progress:
        report = evaluate_checkpoint(**settings, progress=progress)
    output.finish(json, report.to_dict(), lambda: to_text(report))
