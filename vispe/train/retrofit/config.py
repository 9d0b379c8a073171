"""Config of a retrofit: nested dataclasses, read from YAML by the command."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Annotated, Any, ClassVar, Literal

from vispe.images.symmetry.view_averages import MaxPoses, ViewAverage
from vispe.train.data.augmentation import Augment
from vispe.train.lr_schedule import Schedule, scheduled_lr
from vispe.utils.interval import Interval
from vispe.utils.options import (
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    Probability,
    Seed,
)

FREE = (
    "out", "force", "num_workers", "logging_steps", "save_steps", "tensorboard", "device", "micro_batch_size"
)  # fmt: skip
"""Top-level keys that may change when an interrupted run resumes: they do not affect the trained weights."""


@dataclass(frozen=True)
class Teacher:
    """Pretrained model, which is not changed.

    Attributes:
        name: timm model, or open_clip:MODEL/TAG, or open_clip:MODEL with weights; or a folder of vispe
            debias with such a model, whose debiased features are the target.
        weights: checkpoint file, or random; default the pretrained weights.
        img_size: input size of the model in pixels; default that of the checkpoint. timm models then accept any size.
        options: additional arguments of timm.create_model, such as embed_dim for a custom model.
        mean: channel means of images in [0, 1]; default those of the pretraining.
        std: channel standard deviations; default those of the pretraining.
    """

    name: str
    weights: str | None = None
    img_size: PositiveInt | None = None
    options: dict[str, Any] = field(default_factory=dict)
    mean: list[float] | None = None
    std: list[float] | None = None


@dataclass(frozen=True)
class Student:
    """Trained model.

    Attributes:
        pos_embed: positional encoding that replaces the teacher's, see vispe list.
        init: initial weights: teacher, or random as a control.
        symmetric: constrain the patch kernel to be equal in the eight poses (rotations and reflections) of a square.
        trainable: all weights; encoding, the encoding only; or lora, the encoding and low-rank updates of linear
            layers.
        rank: rank of the updates with lora.
    """

    pos_embed: str = "alibi2d"
    init: Literal["teacher", "random"] = "teacher"
    symmetric: bool = False
    trainable: Literal["all", "encoding", "lora"] = "all"
    rank: PositiveInt = 8


@dataclass(frozen=True)
class Target:
    """Features that the student learns: those of the teacher, averaged over views, with some channels ablated.

    Attributes:
        blank: none; indices of the channels that are set to 0; or auto, the channels from which the position of a
            patch is decoded best, determined by a probe on noise and textures that are not used for training.
        share: with auto, the fraction of channels to ablate.
        count: with auto, the number of channels, instead of `share`.
        folder: folder of the features of the windows of `stages[].crops`, which can be shared by several students;
            default a subfolder of `out`.
        poses: number of poses (rotations and reflections) over which the teacher's features are averaged: 1, none; 8,
            all; or a random selection in between.
        positions: number of random positions per pose, on a canvas that is larger by a sixth of the image; 0, no
            canvas. The teacher needs poses x max(1, positions) forward passes per image.
    """

    blank: Literal["none", "auto"] | list[NonNegativeInt] = "none"
    share: Annotated[float, Interval(above=0, below=1)] = 0.01
    count: PositiveInt | None = None
    folder: str | None = None
    poses: MaxPoses = 1
    positions: NonNegativeInt = 0

    @property
    def average(self) -> ViewAverage:
        """The average over views."""
        return ViewAverage(poses=self.poses, positions=self.positions)


@dataclass(frozen=True)
class Stage:
    """Training stage with one image size and its own optimizer state.

    >>> Stage(224, epochs=2, batch_size=100).updates(500)
    10

    Attributes:
        img_size: side of the images in pixels, a multiple of the patch size.
        steps: number of training steps; exclusive with `epochs`.
        epochs: number of passes over the data.
        batch_size: images per step, over all processes.
        lr: peak learning rate.
        schedule: constant, or cosine to 0.
        warmup_steps: steps of linear warm-up from 0.
        crops: number of fixed windows, sampled and augmented once, whose teacher features are computed once and stored
            in `target.folder`. By default windows and features are computed in every step.
    """

    img_size: PositiveInt
    steps: PositiveInt | None = None
    epochs: PositiveFloat | None = None
    batch_size: PositiveInt = 256
    lr: PositiveFloat = 1e-4
    schedule: Schedule = "constant"
    warmup_steps: NonNegativeInt = 0
    crops: PositiveInt | None = None

    def updates(self, count: int) -> int:
        """Return the number of training steps for `count` images, at least 1."""
        return self.steps or max(1, round((self.epochs or 0.0) * count / self.batch_size))

    def rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate of step `step` (from 0) of `steps`."""
        return scheduled_lr(step, steps, lr=self.lr, schedule=self.schedule, warmup_steps=self.warmup_steps)


@dataclass(frozen=True)
class LossWeights:
    """Weights of the loss terms; 0 disables a term.

    Attributes:
        distill: 1 - cosine of the student's and the target's patch features.
        d4: 1 - cosine of the features of a rotated or mirrored image and the rotated or mirrored features: one pose per
            step, and a second pass of the student.
        class_token: 1 - cosine of the class tokens of student and teacher.
        centred: 1 - cosine of the patch features minus their mean over the image: differences between patches.
        place: 1 - cosine of the student's features of the image at two positions on a canvas (`augment.place`), over
            the common patches: one pair per step, and a pass of the student over both canvases. The canvas is filled
            with the mean of the data, 0 after normalisation.
    """

    distill: NonNegativeFloat = 1.0
    d4: NonNegativeFloat = 0.0
    class_token: NonNegativeFloat = 0.0
    centred: NonNegativeFloat = 0.0
    place: NonNegativeFloat = 0.0


@dataclass(frozen=True)
class Probe:
    """Probe of decodable position, before and after, on images that are not used for training.

    Attributes:
        noise: number of images of uniform noise.
        textures: number of synthetic textures.
        img_size: side of the images in pixels; default that of the first stage.
        step: one patch in step² is used for fitting; default 6 if the grid is large enough.
        masks: random selections of these patches per image.
        seed: seed of all random numbers; channels are selected on other images.
    """

    noise: NonNegativeInt = 4
    textures: NonNegativeInt = 6
    img_size: PositiveInt | None = None
    step: PositiveInt | None = None
    masks: PositiveInt = 6
    seed: Seed = 90_000


@dataclass(frozen=True)
class Window:
    """Resizing and cropping of images to the size of a stage.

    Attributes:
        resize: cover, to the smallest size that covers the window; the shorter side in pixels; or none.
        crop: position of the window.
        small: handling of images that are too small: enlarge, skip, or error.
    """

    resize: PositiveInt | Literal["cover", "none"] = "cover"
    crop: Literal["random", "centre"] = "random"
    small: Literal["enlarge", "skip", "error"] = "enlarge"


@dataclass(frozen=True)
class Retrofit:
    """Config of a retrofit; `vispe retrofit --help` describes each key.

    Example:
        >>> config = Retrofit(Teacher("vit_tiny_patch16_224"), [Stage(224, steps=100)], [{"synthetic": 50}], "out")
        >>> config.identity()["student.pos_embed"]
        'alibi2d'
    """

    name: ClassVar[str] = "retrofit"
    teacher: Teacher
    stages: list[Stage]
    data: list[dict[str, Any]]
    out: str
    student: Student = field(default_factory=Student)
    target: Target = field(default_factory=Target)
    loss: LossWeights = field(default_factory=LossWeights)
    probe: Probe = field(default_factory=Probe)
    window: Window = field(default_factory=Window)
    augment: Augment = field(default_factory=Augment)
    ema_decay: Probability = 0.0
    amp: Literal["no", "bf16", "fp16"] = "no"
    grad_checkpointing: bool = False
    clip_grad: PositiveFloat | None = None
    weight_decay: NonNegativeFloat = 0.01
    micro_batch_size: PositiveInt | None = None
    seed: Seed = 0
    device: str = "auto"
    num_workers: NonNegativeInt = 0
    logging_steps: PositiveInt = 50
    save_steps: PositiveInt = 500
    tensorboard: bool = True
    force: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values of every key."""
        return asdict(self)

    def identity(self) -> dict[str, Any]:
        """Return the settings that must not change when a run resumes, as flat keys such as 'student.pos_embed'."""
        return flat({key: value for key, value in self.to_dict().items() if key not in FREE})


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Flatten nested dicts and lists of dicts to one dict with dotted keys.

    >>> flat({"seed": 0, "stages": [{"size": 224}]})
    {'seed': 0, 'stages[0].size': 224}
    """
    if isinstance(values, dict) and values:
        parts = [(f"{prefix}.{key}" if prefix else str(key), value) for key, value in values.items()]
    elif isinstance(values, list) and values and isinstance(values[0], dict):
        parts = [(f"{prefix}[{k}]", value) for k, value in enumerate(values)]
    else:
        return {prefix: values}
    return {key: value for name, part in parts for key, value in flat(part, name).items()}
