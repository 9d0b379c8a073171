"""The task of a linear segmentation, written in Python or read from the command line and YAML."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

from vispe.errors import OptionError
from vispe.train.retrofit.config import Teacher, flat
from vispe.train.retrofit.recipe_files import with_recipes

FREE = ("out", "force", "device", "checkpoint_every", "log_every")
"""Keys that may differ when a stopped run goes on."""


@dataclass(frozen=True)
class LinearTask:
    """Images, model and training of a linear segmentation.

    >>> task = LinearTask(["a.png"], ["a_mask.png"], "out", model=Teacher("vit_tiny_patch16_224"))
    >>> task.identity()["steps"]
    2000

    Attributes:
        images: files, folders or wildcards; every page of a stack is an image.
        masks: their masks, matched by name (a.png with a.png or a_mask.png), or else by order.
        out: folder for the results.
        model: backbone; or else
        retrofit: folder of a finished retrofit, whose student is the backbone.
        pos_embed: positional encoding that replaces the model's own.
        val_images: images to score; by default some of the images are held out.
        val_masks: their masks.
        val_every: without val_images, every n-th image is held out and scored.
        zero: whether the value 0 in a mask is the first class, or does not count.
        n_classes: number of classes, where the masks do not show all.
        size: side of the windows in pixels, a multiple of the patch.
        steps: updates.
        batch: windows for each update.
        rate: learning rate of the linear map; it falls to 0 along a cosine.
        backbone_rate: learning rate of the backbone; 0 keeps it frozen.
        weight_decay: of AdamW.
        norm: batch norm before the linear map.
        dropout: share of features that are dropped in training.
        poses: put windows into the eight poses of a square at random.
        seed: of everything drawn.
        device: auto, cpu, cuda, ...
        log_every: updates between two lines of log.jsonl.
        checkpoint_every: updates between two states that a stopped run can go on from.
        force: replace a finished run, or begin a stopped one anew.
    """

    images: list[str]
    masks: list[str]
    out: str
    model: Teacher | None = None
    retrofit: str | None = None
    pos_embed: str | None = None
    val_images: list[str] | None = None
    val_masks: list[str] | None = None
    val_every: int = 5
    zero: Literal["class", "ignore"] = "class"
    n_classes: int | None = None
    size: int = 224
    steps: int = 2000
    batch: int = 16
    rate: float = 1e-3
    backbone_rate: float = 0.0
    weight_decay: float = 0.01
    norm: bool = True
    dropout: float = 0.1
    poses: bool = True
    seed: int = 0
    device: str = "auto"
    log_every: int = 20
    checkpoint_every: int = 200
    force: bool = False

    def identity(self) -> dict[str, Any]:
        """Return what a run that is continued must have in common, as flat keys such as 'model.name'."""
        return flat({key: value for key, value in asdict(self).items() if key not in FREE})

    def check(self) -> None:
        """Check all that can be checked without the model and the data.

        Raises:
            OptionError: a number out of its range, or keys that contradict each other.
        """
        for problem in self._problems():
            raise OptionError(problem)

    def _problems(self) -> Iterator[str]:
        if (self.model is None) == (self.retrofit is None):
            given = "neither" if self.model is None else "both"
            yield f"Linear segmentation needs a model or a retrofit, one of them, got {given}."
        if self.retrofit is not None and self.pos_embed is not None:
            yield f"pos_embed={self.pos_embed} has no effect on the student of a retrofit, which has its own."
        if (self.val_images is None) != (self.val_masks is None):
            yield "val_images and val_masks belong together; give both or neither."
        for key in ("size", "steps", "batch", "log_every", "checkpoint_every"):
            if getattr(self, key) < 1:
                yield f"{key} must be at least 1, got {getattr(self, key)}."
        if self.rate <= 0 or self.backbone_rate < 0 or self.weight_decay < 0 or not 0 <= self.dropout < 1:
            got = f"{self.rate}, {self.backbone_rate}, {self.weight_decay} and {self.dropout}"
            needed = "rate must be above 0, backbone_rate and weight_decay 0 or more, and dropout from 0 to below 1"
            yield f"{needed}; got {got}."


def read_task(argv: Sequence[str]) -> LinearTask:
    """Return the task of a command line; `--config FILE` reads YAML, options after it win."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(
        prog="python -m vispe.train.linear", description="Linear segmentation on features.", default_env=False
    )
    parser.add_argument(
        "--config", action="config", help="YAML file, or a recipe of vispe by name; options after it win"
    )
    parser.add_class_arguments(LinearTask, as_group=False)
    instantiate = getattr(parser, "instantiate", None) or parser.instantiate_classes  # the older name
    values = vars(instantiate(parser.parse_args(with_recipes(argv))))
    values.pop("config")
    return LinearTask(**values)
