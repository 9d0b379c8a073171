"""Arguments of a run, for files in memory and for stores."""

from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Annotated, Any

from vispe.backbones.device import choose_device
from vispe.errors import OptionError
from vispe.segment.classify.clustering import METHODS, Method, Number
from vispe.segment.classify.pixel_classifier import KINDS, Kind
from vispe.segment.features.feature_config import FeatureConfig
from vispe.segment.features.micro_features import NAME
from vispe.segment.model.model_file import Model
from vispe.segment.objects.options import ObjectOptions
from vispe.segment.run.reports.run_report import ProgressCallbacks
from vispe.segment.run.results_folder.resume import fingerprint_files
from vispe.segment.run.scoring import ScoreOptions
from vispe.segment.text.config import TextConfig
from vispe.segment.text.prompts import Prompts
from vispe.segment.types import LabelOptions, Paths, PostProcessing, ReadOptions
from vispe.utils.interval import Interval
from vispe.utils.options import Options

DEFAULT = FeatureConfig("both", model=NAME)
"""Default features of `segment`, for labels and clusters: vispe_micro and filters.

Their effect on clusters is measured in `eval/results/cluster.json`.
"""

_NOT_DECISIVE = (
    "images",
    "out",
    "labels",
    "object_classes",
    "stored_features",
    "storage_options",
    "force",
    "watch",
    "memory",
    "scheduler",
    "allow_download",
)


@dataclass(frozen=True)
class Request(Options):
    """Arguments of `segment` or `apply` in `vispe.segment.pipeline`; arguments of the other function have defaults.

    Attributes:
        command: `'segment'` or `'apply'`.

    Raises:
        OptionError: a value has the wrong type, or an option has no effect.
    """

    command: str
    images: Paths | str | Path
    out: str | Path
    model: str | Path | None = None
    labels: Paths | str | Path = ()
    cluster: Number | None = None
    cluster_method: Method = "kmeans"
    text: Prompts | None = None
    classifier: Kind = "ensemble"
    features: FeatureConfig | TextConfig | None = None
    reading: ReadOptions = field(default_factory=ReadOptions)
    labelling: LabelOptions = field(default_factory=LabelOptions)
    scoring: ScoreOptions = field(default_factory=ScoreOptions)
    post: PostProcessing = field(default_factory=PostProcessing)
    objects: ObjectOptions | None = None
    object_classes: Paths | str | Path = ()
    stored_features: str | Path | None = None
    storage_options: Any = None
    materials: bool = False
    trust: bool = False
    weights: str | None = None
    allow_download: bool = False
    tile: int | None = None
    seed: Annotated[int, Interval(least=0, most=(1 << 32) - 1)] = 0
    device: str = "auto"
    force: bool = False
    watch: ProgressCallbacks = field(default_factory=ProgressCallbacks)
    memory: str | None = None
    scheduler: str | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        scoring, reading = self.scoring, self.reading
        if not scoring.truth:
            for option in ("zero_is", "page", "include_labelled"):
                if getattr(scoring, option) != getattr(ScoreOptions, option):
                    raise OptionError(f"{option} has no effect without truth. Omit it.")
        if reading.normalize == "none" and reading.clip != ReadOptions.clip:
            raise OptionError("clip has no effect on normalize=none. Omit one of them.")

    @property
    def name(self) -> str:
        """Owner of options in messages."""
        return self.command

    @classmethod
    def of(cls, command: str, arguments: dict[str, Any]) -> "Request":
        """Create a request from the arguments of a function; None is replaced by the default."""
        return cls(command, **{name: value for name, value in arguments.items() if value is not None})

    def check_sources(self) -> None:
        """Check that `segment` has one source of classes, and that all options apply to it.

        Raises:
            OptionError: not exactly one of labels, cluster and text, or an option without effect.
        """
        sources = {
            "labels": bool(self.labels),
            "cluster": self.cluster is not None,
            "text": self.text is not None,
        }
        if sum(sources.values()) != 1:
            passed = " and ".join(name for name, present in sources.items() if present) or "none of them"
            raise OptionError(
                f"segment: exactly one of labels, cluster and text is required, got {passed}. Pass labels=FILE, "
                "cluster=K or text=WORDS."
            )
        classifier, method = self.classifier, self.cluster_method
        if not sources["cluster"] and method != METHODS[0]:
            raise OptionError(f"cluster_method={method!r} has no effect on labels. Use it with cluster.")
        if sources["cluster"] and classifier != KINDS[0]:
            raise OptionError(f"classifier={classifier!r} has no effect on clusters. Use cluster_method.")
        changed = [
            name for name, value in vars(self.labelling).items() if value != getattr(LabelOptions(), name)
        ]
        if changed and not sources["labels"]:
            raise OptionError(f"{changed[0]} has no effect without labels. Omit it.")
        if sources["text"] and classifier != KINDS[0]:
            raise OptionError(
                f"classifier={classifier!r} has no effect on text prompts, which need no training. Omit it."
            )
        features = self.features
        if features is not None and sources["text"] != isinstance(features, TextConfig):
            expected = "a TextConfig" if sources["text"] else "a FeatureConfig"
            raise OptionError(
                f"features is a {type(features).__name__}, but this segmentation needs {expected}."
            )
        if not sources["labels"]:
            self.post.resolve_prior(None)
        if self.object_classes and self.objects is None:
            raise OptionError("object_classes has no effect without objects. Pass class names as objects.")
        if self.objects is not None and (
            names := self.labelling.classes or getattr(self.text, "names", None)
        ):
            self.objects.numbers(names)

    def decisive(self) -> dict[str, Any]:
        """Return the arguments that determine the results, with fingerprints of the files they name.

        Images, labels, examples of object classes and ground truth are resolved and added by the run.
        """
        arguments = {name: value for name, value in vars(self).items() if name not in _NOT_DECISIVE}
        named = [self.labelling.legend, getattr(self.features, "weights", None), self.weights, self.model]
        states = {str(n): fingerprint_files(Path(n)) for n in named if n is not None and Path(n).is_file()}
        return {**arguments, "device": choose_device(self.device), "named_files": states}


def requested_features(model: Model, request: Request) -> FeatureConfig | TextConfig:
    """Return the feature configuration of a model, with the requested weights and tile.

    Raises:
        OptionError: weights for a model that has none.
    """
    if request.weights is not None and model.features.kind == "filters":
        raise OptionError(f"weights={request.weights!r} has no effect: {request.model} uses filters only.")
    overrides = {"weights": request.weights, "tile": request.tile}
    return replace(model.features, **{name: value for name, value in overrides.items() if value is not None})
