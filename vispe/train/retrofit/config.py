"""The config of a retrofit: nested dataclasses, which the command reads from YAML."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from vispe.train.data.augmentation import Augment

FREE = ("out", "force", "workers", "log_every", "checkpoint_every", "tensorboard", "device", "chunk")
"""Top-level keys that may differ when a stopped run is continued: they do not change what is learnt."""


@dataclass(frozen=True)
class Teacher:
    """The pretrained model that is kept as it is.

    Attributes:
        name: timm model, or open_clip:MODEL/TAG, or open_clip:MODEL with weights.
        weights: checkpoint file, or random; the pretrained weights by default.
        img_size: side in pixels that the model is built for; its own by default. timm models take any size then.
        options: more arguments for timm.create_model, such as embed_dim for a model of your own.
        mean: of the channels of images in [0, 1]; by default what the model was trained with.
        std: of the channels, likewise.
    """

    name: str
    weights: str | None = None
    img_size: int | None = None
    options: dict[str, Any] = field(default_factory=dict)
    mean: list[float] | None = None
    std: list[float] | None = None


@dataclass(frozen=True)
class Student:
    """The model that is trained.

    Attributes:
        pos_embed: positional encoding that replaces the teacher's, see vispe list.
        init: teacher, to start from its weights; random, to start from none, as a control.
        symmetric: keep the patch kernel the same in the eight poses of a square.
        trainable: all weights; the encoding alone; or lora, the encoding and low-rank changes of the linear layers.
        rank: of the changes with lora.
    """

    pos_embed: str = "alibi2d"
    init: Literal["teacher", "random"] = "teacher"
    symmetric: bool = False
    trainable: Literal["all", "encoding", "lora"] = "all"
    rank: int = 8


@dataclass(frozen=True)
class Target:
    """What is taken out of the teacher's features before the student learns them.

    Attributes:
        blank: none; numbers of the channels that are set to 0; or auto, the channels from which the position of a
            patch is read best, found by a probe on noise and textures that are not trained on.
        share: with auto, the share of all channels that is blanked.
        count: with auto, their number, in place of the share.
        folder: where features of the windows of `stages[].crops` are kept, for other students too; below `out` by
            default.
    """

    blank: Literal["none", "auto"] | list[int] = "none"
    share: float = 0.01
    count: int | None = None
    folder: str | None = None


@dataclass(frozen=True)
class Stage:
    """A part of the training with images of one size, and an optimizer of its own.

    >>> Stage(224, epochs=2, batch=100).updates(500)
    10

    Attributes:
        size: side of the images in pixels, a multiple of the patch.
        steps: updates; or else
        epochs: passes through the data.
        batch: images for each update, over all processes.
        rate: peak learning rate.
        schedule: constant, or cosine down to 0.
        warmup: updates in which the rate rises from 0.
        crops: windows that the stage goes through, drawn and changed once; the teacher's features of each are computed
            once and kept in `target.folder`. By default windows are drawn and the teacher is asked in every update.
    """

    size: int
    steps: int | None = None
    epochs: float | None = None
    batch: int = 256
    rate: float = 1e-4
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: int = 0
    crops: int | None = None

    def updates(self, count: int) -> int:
        """Return the number of updates with `count` images of data, at least 1."""
        if self.steps is not None:
            return self.steps
        return max(1, round((self.epochs or 0.0) * count / self.batch))

    def rate_at(self, step: int, steps: int) -> float:
        """Return the learning rate of update `step` (from 0) of `steps`."""
        if step < self.warmup:
            return self.rate * (step + 1) / (self.warmup + 1)
        if self.schedule == "constant":
            return self.rate
        # half a cosine over the updates after the warmup
        done = (step - self.warmup) / max(1, steps - self.warmup)
        return self.rate * (0.5 + 0.5 * math.cos(math.pi * done))


@dataclass(frozen=True)
class Weights:
    """Weights of the parts of the loss; 0 leaves a part out.

    Attributes:
        distill: 1 - cosine between the student's and the target's patch features.
        d4: 1 - cosine between the features of a turned or mirrored image and the features, turned or mirrored: one
            pose for each update, and a second pass of the student.
        class_token: 1 - cosine between the class tokens of student and teacher.
        centred: 1 - cosine between the patch features, less their mean over the image: what tells patches apart.
        place: 1 - cosine between the student's features of the image at two places of a canvas (`augment.place`), over
            the patches that both show: one pair for each update, and a pass of the student over both canvases. The mean
            of the data, 0 in normalised images, is around the image.
    """

    distill: float = 1.0
    d4: float = 0.0
    class_token: float = 0.0
    centred: float = 0.0
    place: float = 0.0


@dataclass(frozen=True)
class Probe:
    """How the readable position is measured, before and after, on pictures that are not trained on.

    Attributes:
        noise: pictures of uniform noise.
        textures: generated textures.
        size: side of the pictures in pixels; that of the first stage by default.
        step: one patch in step² is fitted; 6 where the grid is large enough for that, by default.
        masks: choices of these patches for each picture.
        seed: of everything drawn; pictures to choose channels on are others.
    """

    noise: int = 4
    textures: int = 6
    size: int | None = None
    step: int | None = None
    masks: int = 6
    seed: int = 90_000


@dataclass(frozen=True)
class Window:
    """How a picture becomes an image of the size of a stage.

    Attributes:
        resize: cover, to the smallest size that covers it; the shortest side in pixels; or none.
        crop: where the window is cut.
        small: what is done with pictures that would have to be enlarged: enlarge, skip, or error.
    """

    resize: int | Literal["cover", "none"] = "cover"
    crop: Literal["random", "centre"] = "random"
    small: Literal["enlarge", "skip", "error"] = "enlarge"


@dataclass(frozen=True)
class Retrofit:
    """Everything about a retrofit; `vispe retrofit --help` describes each key.

    >>> config = Retrofit(Teacher("vit_tiny_patch16_224"), [Stage(224, steps=100)], [{"synthetic": 50}], "out")
    >>> config.identity()["student.pos_embed"]
    'alibi2d'
    """

    teacher: Teacher
    stages: list[Stage]
    data: list[dict[str, Any]]
    out: str
    student: Student = field(default_factory=Student)
    target: Target = field(default_factory=Target)
    loss: Weights = field(default_factory=Weights)
    probe: Probe = field(default_factory=Probe)
    window: Window = field(default_factory=Window)
    augment: Augment = field(default_factory=Augment)
    ema: float = 0.0
    amp: Literal["no", "bf16", "fp16"] = "no"
    grad_checkpointing: bool = False
    clip: float | None = None
    weight_decay: float = 0.01
    chunk: int | None = None
    seed: int = 0
    device: str = "auto"
    workers: int = 0
    log_every: int = 50
    checkpoint_every: int = 500
    tensorboard: bool = True
    force: bool = False

    def to_dict(self) -> dict[str, Any]:
        """Return JSON values of every key."""
        return asdict(self)

    def identity(self) -> dict[str, Any]:
        """Return what a run that is continued must have in common, as flat keys such as 'student.pos_embed'."""
        return flat({key: value for key, value in self.to_dict().items() if key not in FREE})


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested dicts and lists of dicts as one dict with dotted keys.

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
