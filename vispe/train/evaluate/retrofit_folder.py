"""Evaluation of a finished retrofit from its folder, image files and masks; writes report.html and report.json."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

import timm
import torch

from vispe.backbones.device import choose_device
from vispe.errors import OptionError
from vispe.evaluate.evaluated import EvaluatedModel
from vispe.images.file_search import find_images
from vispe.images.sequences import FileImages, FileMasks
from vispe.train.evaluate.before_after import Progress, evaluate
from vispe.train.evaluate.html_report import evaluation_page
from vispe.train.evaluate.probe_images import Settings
from vispe.train.evaluate.result import RetrofitReport
from vispe.train.retrofit.student import check_size, load_student
from vispe.utils.files import check_writable
from vispe.utils.options import PositiveInt, checked
from vispe.utils.version import __version__


@checked
def evaluate_checkpoint(
    checkpoint: str | Path,
    images: Sequence[str] = (),
    masks: Sequence[str] = (),
    out: str | Path | None = None,
    *,
    zero: Literal["class", "ignore"] = "class",
    classes: Sequence[str] | None = None,
    img_size: PositiveInt | None = None,
    device: str = "auto",
    force: bool = False,
    progress: Progress = lambda part, share: None,
    **extent: Any,
) -> RetrofitReport:
    """Evaluate a finished retrofit, before and after, and write the report.

    Args:
        checkpoint: folder of the retrofit, with card.json and student.safetensors.
        images: files, folders or wildcards; every page of a stack is an image.
        masks: ground-truth masks, matched by name, otherwise by order; they enable linear segmentation.
        out: output folder for report.html and report.json; None writes no files.
        zero: whether the value 0 in a mask is the first class, or ignored.
        classes: names of the classes.
        img_size: side of the windows in pixels; default the largest size of the training, or the fixed input size of
            the teacher.
        device: 'auto', 'cpu', 'cuda' ...
        force: overwrite existing files.
        progress: called before each part with its name and the completed fraction of it.
        **extent: attributes of `Extent`: noise, textures, step, rotation, budget, batch_size and seed.

    Returns:
        The measurements of teacher and student.

    Raises:
        InputError: there is no finished retrofit, images and masks do not match, or the files exist.
        OptionError: masks without images, options of masks without masks, or a size that the models do not support.
    """
    if masks and not images:
        raise OptionError("evaluate: `masks` needs `images`, got none. Pass the images of the masks.")
    if not masks:
        changed = {"zero": zero != "class", "classes": classes, "budget": extent.get("budget", 100) != 100}
        for option in (option for option, is_set in changed.items() if is_set):
            raise OptionError(f"evaluate: `{option}` has no effect without `masks`. Omit it, or pass masks.")
    image_files, mask_files = find_images(images) if images else [], find_images(masks) if masks else []
    files = [] if out is None else [Path(out) / "report.json", Path(out) / "report.html"]
    check_writable(files, force, protect=[*image_files, *mask_files])
    student, teacher, card = load_student(checkpoint)
    config = card["config"]
    side = img_size or (
        teacher.size if teacher.exact else max(stage["img_size"] for stage in config["stages"])
    )
    check_size(side, teacher, "the teacher")
    torch_device = choose_device(device)
    for model in (student.model, teacher.model):
        model.to(torch_device).eval()
    subject = EvaluatedModel("The retrofit", mean=teacher.mean, std=teacher.std)
    file_images = FileImages(image_files, subject.tensor)
    truths = (
        FileMasks(file_images, mask_files, zero, len(classes) if classes else None) if mask_files else None
    )
    facts = {
        "checkpoint": str(checkpoint),
        "teacher": config["teacher"],
        "student": config["student"],
        "images": list(map(str, image_files)),
        "masks": list(map(str, mask_files)),
        "versions": {"vispe": __version__, "torch": torch.__version__, "timm": timm.__version__},
    }
    report = evaluate(
        teacher.model,
        student.model,
        file_images,
        channels=card["blanked"],
        truths=truths,
        n_classes=None if truths is None else truths.n_classes,
        classes=classes,
        image_names=file_images.names,
        img_size=side,
        settings=Settings(teacher.patch_size, side, teacher.mean, teacher.std),
        subject=f"{config['teacher']['name']} + {config['student']['pos_embed']}",
        facts=facts,
        notes=(*file_images.notes, *(truths.notes if truths else ())),
        progress=progress,
        **extent,
    )
    if files:
        report.write_json(files[0], force)
        evaluation_page(report).write(files[1], force)
    return report
