"""What a retrofit is told: nested dataclasses, which the command reads from YAML; every check that needs no model."""

import math
from dataclasses import asdict, dataclass, field
from typing import Any, Literal

from vispe.errors import OptionError
from vispe.train.data.augment import Augment

FREE = ("out", "force", "workers", "log_every", "checkpoint_every", "tensorboard", "device", "chunk")
"""Top-level keys that may differ when a stopped run is continued: they do not say what is learnt."""


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
        blank: none; numbers of the channels that are set to 0; or auto, the channels that tell most of the position
            of a patch, found by probe on noise and textures that are not trained on.
        share: with auto, the share of all channels that is blanked.
        count: with auto, their number, in place of the share.
    """

    blank: Literal["none", "auto"] | list[int] = "none"
    share: float = 0.01
    count: int | None = None


@dataclass(frozen=True)
class Stage:
    """A part of the training with images of one size, and an optimizer of its own.

    Attributes:
        size: side of the images in pixels, a multiple of the patch.
        steps: updates; or else
        epochs: passes through the data.
        batch: images for each update, over all processes.
        rate: peak learning rate.
        schedule: constant, or cosine down to 0.
        warmup: updates in which the rate rises from 0.
    """

    size: int
    steps: int | None = None
    epochs: float | None = None
    batch: int = 256
    rate: float = 1e-4
    schedule: Literal["constant", "cosine"] = "constant"
    warmup: int = 0

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
        return self.rate * (
            0.5 + 0.5 * math.cos(math.pi * (step - self.warmup) / max(1, steps - self.warmup))
        )


@dataclass(frozen=True)
class Weights:
    """Weights of the parts of the loss; 0 leaves a part out.

    Attributes:
        distill: 1 - cosine between the student's and the target's patch features.
        d4: 1 - cosine between the features of a turned or mirrored image and the features, turned or mirrored: one
            pose for each update, and a second pass of the student.
        class_token: 1 - cosine between the class tokens of student and teacher.
    """

    distill: float = 1.0
    d4: float = 0.0
    class_token: float = 0.0


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
    """How a picture becomes an image of the size of a stage, see `vispe.train.data.Batches`.

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
    """Everything about a retrofit, see `vispe.cli.retrofit.retrofit` for each key."""

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

    def check(self) -> None:
        """Check all that can be checked without the model and the data.

        Raises:
            OptionError: a number out of its range, or keys that contradict each other.
        """
        _check_numbers(self)
        student, target, loss = self.student, self.target, self.loss
        if not self.stages:
            raise OptionError("A retrofit needs stages, got none; give at least one, with size and steps.")
        for k, stage in enumerate(self.stages):
            _check_stage(f"stages[{k}]", stage)
        if not self.data:
            raise OptionError("A retrofit needs data, got no source; name at least one, such as a folder.")
        if isinstance(target.blank, str) and target.blank not in ("none", "auto"):
            raise OptionError(f"target.blank={target.blank!r} is not none, auto or a list of channels.")
        if isinstance(target.blank, list) and len(set(target.blank)) < len(target.blank):
            raise OptionError(f"target.blank names a channel twice: {target.blank}; name each once.")
        if target.blank != "auto" and (target.count is not None or target.share != Target.share):
            raise OptionError(
                f"target.count and target.share say how many channels blank=auto takes, but target.blank is "
                f"{target.blank!r}; leave them out."
            )
        if target.count is not None and target.share != Target.share:
            raise OptionError("target.count and target.share both say how many channels; give one.")
        if target.blank == "auto" and not self.probe.noise + self.probe.textures:
            raise OptionError(
                "target.blank=auto needs pictures to probe; give probe.noise or probe.textures."
            )
        if student.rank != Student.rank and student.trainable != "lora":
            raise OptionError(
                f"student.rank={student.rank} is about lora, but student.trainable is {student.trainable}; "
                "set trainable: lora or leave rank out."
            )
        if student.init == "random" and student.trainable != "all":
            raise OptionError(
                f"A student with random weights must train all of them, got student.trainable={student.trainable}; "
                "use init: teacher or trainable: all."
            )
        if not loss.distill + loss.d4 + loss.class_token:
            raise OptionError(
                "All parts of the loss have weight 0, so nothing would be learnt; give one a weight."
            )
        if self.teacher.name.startswith("open_clip:") and self.teacher.options:
            raise OptionError(
                f"teacher.options are for timm models, got {self.teacher.options} for {self.teacher.name}; "
                "leave them out."
            )
        for key in ("mean", "std"):
            value = getattr(self.teacher, key)
            if value is not None and (len(value) != 3 or (key == "std" and min(value) <= 0)):
                raise OptionError(f"teacher.{key} must be three numbers, std above 0, got {value}.")


def flat(values: Any, prefix: str = "") -> dict[str, Any]:
    """Return nested dicts and lists of dicts as one dict with dotted keys."""
    if isinstance(values, dict) and values:
        parts = [(f"{prefix}.{key}" if prefix else str(key), value) for key, value in values.items()]
    elif isinstance(values, list) and values and isinstance(values[0], dict):
        parts = [(f"{prefix}[{k}]", value) for k, value in enumerate(values)]
    else:
        return {prefix: values}
    return {key: value for name, part in parts for key, value in flat(part, name).items()}


def _check_stage(name: str, stage: Stage) -> None:
    if (stage.steps is None) == (stage.epochs is None):
        found = "neither" if stage.steps is None else "both"
        raise OptionError(f"{name} needs steps or epochs, one of them, got {found}.")
    for key in ("size", "steps", "batch"):
        if (value := getattr(stage, key)) is not None and value < 1:
            raise OptionError(f"{name}.{key} must be at least 1, got {value}.")
    if (stage.epochs is not None and stage.epochs <= 0) or stage.rate <= 0 or stage.warmup < 0:
        raise OptionError(
            f"{name} needs epochs and rate above 0 and warmup of 0 or more, got epochs={stage.epochs}, "
            f"rate={stage.rate}, warmup={stage.warmup}."
        )
    if stage.steps is not None and stage.warmup >= stage.steps:
        raise OptionError(
            f"{name}.warmup={stage.warmup} leaves no update of its {stage.steps} steps; lower it."
        )


def _check_numbers(config: Retrofit) -> None:
    least = {
        "student.rank": 1, "target.count": 1, "probe.noise": 0, "probe.textures": 0, "probe.size": 1, "probe.step": 1,
        "probe.masks": 1, "workers": 0, "log_every": 1, "checkpoint_every": 1, "chunk": 1, "weight_decay": 0, "seed": 0,
        "loss.distill": 0, "loss.d4": 0, "loss.class_token": 0, "ema": 0, "probe.seed": 0,
    }  # fmt: skip
    for key, low in least.items():
        value: Any = config
        for part in key.split("."):
            value = getattr(value, part)
        if value is not None and not value >= low:
            raise OptionError(f"{key} must be at least {low}, got {value}.")
    if config.ema >= 1:
        raise OptionError(f"ema is a decay from 0 (none) to below 1, such as 0.999, got {config.ema}.")
    if config.clip is not None and not config.clip > 0:
        raise OptionError(f"clip is a largest norm above 0, got {config.clip}; leave it out for none.")
    if not 0 < config.target.share < 1:
        raise OptionError(f"target.share must lie between 0 and 1, got {config.target.share}.")
