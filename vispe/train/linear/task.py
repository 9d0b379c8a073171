"""Settings of a linear segmentation, from Python, the command line or YAML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

from vispe.errors import OptionError
from vispe.images.paths import absolute
from vispe.train.retrofit.config import Teacher, flat
from vispe.train.retrofit.config_paths import absolute_teacher
from vispe.train.retrofit.recipe_files import task_arguments
from vispe.utils.options import NonNegativeFloat, PositiveFloat, PositiveInt, Probability, Seed, check_options

FREE = ("out", "force", "device", "save_steps", "logging_steps")
"""Keys that may change when an interrupted run resumes."""


@dataclass(frozen=True)
class LinearTask:
    """Images, model and training settings of a linear segmentation.

    >>> task = LinearTask(["a.png"], ["a_mask.png"], "out", model=Teacher("vit_tiny_patch16_224"))
    >>> task.identity()["steps"]
    2000

    Attributes:
        images: files, folders or wildcards; every page of a stack is an image.
        masks: masks of the images, matched by name (a.png with a.png or a_mask.png), otherwise by order.
        out: output folder.
        model: backbone; exclusive with `retrofit`.
        retrofit: folder of a finished retrofit, whose student is the backbone.
        pos_embed: positional encoding that replaces the model's own.
        val_images: validation images; default a part of `images` is held out.
        val_masks: masks of the validation images.
        val_every: without `val_images`, every n-th image is held out for validation.
        zero: whether the value 0 in a mask is the first class, or ignored.
        n_classes: number of classes, if the masks do not contain all of them.
        img_size: side of the windows in pixels, a multiple of the patch size.
        steps: number of training steps.
        batch_size: windows per step.
        lr: learning rate of the linear head, with a cosine schedule to 0.
        backbone_lr: learning rate of the backbone; 0 freezes it.
        weight_decay: weight decay of AdamW.
        norm: batch norm before the linear head.
        dropout: dropout probability of the features.
        poses: transform windows to random poses (rotations by 90 degrees and reflections).
        seed: seed of all random numbers.
        device: auto, cpu, cuda, ...
        logging_steps: training steps between two lines of log.jsonl.
        save_steps: training steps between two checkpoints.
        force: overwrite a finished run, or restart an interrupted one.
    """

    name: ClassVar[str] = "linear"
    images: list[str]
    masks: list[str]
    out: str
    model: Teacher | None = None
    retrofit: str | None = None
    pos_embed: str | None = None
    val_images: list[str] | None = None
    val_masks: list[str] | None = None
    val_every: PositiveInt = 5
    zero: Literal["class", "ignore"] = "class"
    n_classes: PositiveInt | None = None
    img_size: PositiveInt = 224
    steps: PositiveInt = 2000
    batch_size: PositiveInt = 16
    lr: PositiveFloat = 1e-3
    backbone_lr: NonNegativeFloat = 0.0
    weight_decay: NonNegativeFloat = 0.01
    norm: bool = True
    dropout: Probability = 0.1
    poses: bool = True
    seed: Seed = 0
    device: str = "auto"
    logging_steps: PositiveInt = 20
    save_steps: PositiveInt = 200
    force: bool = False

    def identity(self) -> dict[str, Any]:
        """Return the settings that must not change when a run resumes, as flat keys such as 'model.name'."""
        return flat({key: value for key, value in asdict(self).items() if key not in FREE})

    def with_absolute_paths(self) -> LinearTask:
        """Return the task with absolute paths of images, masks and models; `out` remains as it is."""
        keys = ("images", "masks", "val_images", "val_masks")
        files = {
            key: [absolute(v) for v in value] for key in keys if (value := getattr(self, key)) is not None
        }
        retrofit = None if self.retrofit is None else absolute(self.retrofit)
        model = None if self.model is None else absolute_teacher(self.model)
        return replace(self, retrofit=retrofit, model=model, **files)

    def check(self) -> None:
        """Check all settings that do not depend on the model and the data.

        Raises:
            OptionError: a number out of range, or contradictory settings.
        """
        check_options(self)
        for problem in self._problems():
            raise OptionError(problem)

    def _problems(self) -> Iterator[str]:
        if (self.model is None) == (self.retrofit is None):
            got = "neither" if self.model is None else "both"
            yield f"linear: needs either `model` or `retrofit`, got {got}."
        if self.retrofit is not None and self.pos_embed is not None:
            yield f"linear: `pos_embed` has no effect with `retrofit`, got {self.pos_embed}. Omit it."
        if (self.val_images is None) != (self.val_masks is None):
            yield "linear: `val_images` and `val_masks` must be set together, got one of them."


def read_task(argv: Sequence[str]) -> LinearTask:
    """Return the task of a command line; `--config FILE` reads YAML, which later options override."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m vispe.train.linear", description="Linear segmentation on features.", default_env=False
    )
    parser.add_argument(
        "--config", action="config", help="YAML file, or a recipe of vispe by name; later options override it"
    )
    parser.add_class_arguments(LinearTask, as_group=False)
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the former name
    values = vars(instantiate(parser.parse_args(task_arguments(argv, LinearTask))))
    values.pop("config")
    return LinearTask(**values)
