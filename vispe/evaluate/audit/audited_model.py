"""What is measured, as measures see it: attention layer by layer, features, descriptors, answers, and its controls."""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from typing import Any, Literal, Protocol

import torch
from torch import Tensor, nn

from vispe.backbones.attention_recorder import Seen, attention_layers, watch
from vispe.backbones.batching import labels_of
from vispe.backbones.local.transformers_model import TransformersModel, of_transformers, reads_words
from vispe.backbones.model_access import final_tokens, image_tower
from vispe.backbones.user_callables import D4Segmenter
from vispe.backbones.vision_model import VisionModel, random_twin
from vispe.errors import OptionError, ShapeError, UnsupportedHost
from vispe.evaluate.audit.answers import answers_of
from vispe.evaluate.evaluated import Subject
from vispe.evaluate.probe.feature_sources import feature_function

Need = Literal["attention", "maps", "pooled", "answers", "several", "causal"]
"""What a measure may need of a model."""


BROUGHT = 224  # side in pixels of pictures that a measure brings


class Answers(Protocol):
    """How a model with words answers a question about pictures."""

    def __call__(self, pictures: Sequence[Tensor], question: str, answers: Sequence[str]) -> Tensor:
        """Return the logarithm of the probability of each answer, (answers,), up to a common number.

        Args:
            pictures: (3, H, W) in [0, 1], in the order in which they stand in the prompt.
            question: about them.
            answers: what may be said.
        """
        ...


class Host:
    """A model, and what measures may ask of it.

    Args:
        f: images (b, c, H, W) -> maps (b, d, h, w); a `VisionModel` shows its layers as well. Or a causal language
            model of transformers, whose images are texts: ids of tokens int64 (b, 1, 1, n), one row of pixels.
        title: in words.
        answers: how it answers questions, where it can.
        patch: side of a patch in pixels, where `f` does not say it.

    Attributes:
        can: what it gives: any of 'maps', 'pooled', 'attention', 'answers', 'several' (answers about pictures that it
            looks at together), 'causal'.
        why: for what it does not give, the reason in a sentence.
        same: names of parameters that a twin with random weights has in common with the model; others have none.

    >>> import timm
    >>> host = Host(VisionModel(timm.create_model("test_vit").eval()), "test_vit")
    >>> sorted(host.can), host.patch, host.maps(torch.zeros(1, 3, 160, 160)).shape
    (['attention', 'maps', 'pooled'], 16, torch.Size([1, 64, 10, 10]))
    """

    def __init__(
        self,
        f: Callable[[Tensor], Tensor],
        title: str,
        *,
        answers: Answers | None = None,
        patch: int | None = None,
    ) -> None:
        self.f, self.title, self.answers = f, title, answers
        self.patch = patch or getattr(f, "patch", None)
        self.model = f.model if isinstance(f, VisionModel) else f if isinstance(f, nn.Module) else None
        self._words = reads_words(self.model)
        self.same: tuple[str, ...] = ()
        self.can: set[str] = {"causal"} if self._words else {"maps", "pooled"}
        no_maps = dict.fromkeys(("maps", "pooled"), "it reads ids of tokens and makes no maps of images")
        self.why = no_maps if self._words else {"causal": "its attention is not causal"}
        if answers is not None:
            self.can.add("answers")
        else:
            self.why["answers"] = "it answers no questions"
        if answers is not None and getattr(answers, "several", True):
            self.can.add("several")
        else:
            self.why["several"] = "it looks at one picture at a time"
        try:
            if self.model is None:
                raise UnsupportedHost("it is a function of images, whose attention cannot be read")
            attention_layers(self.model)
            self.can.add("attention")
        except UnsupportedHost as error:
            self.why["attention"] = str(error).rstrip(".")

    @property
    def device(self) -> torch.device:
        """Where the model is."""
        parameters = () if self.model is None else self.model.parameters()
        return next((p.device for p in parameters), torch.device("cpu"))

    @torch.no_grad()
    def maps(self, images: Tensor) -> Tensor:
        """Return the final features (b, d, h, w) float32 on the CPU of images (b, c, H, W)."""
        if "maps" in self.why:
            raise UnsupportedHost(f"{self.title} has no maps: {self.why['maps']}.")
        return self.f(images.to(self.device)).float().cpu()

    @torch.no_grad()
    def both(self, images: Tensor) -> tuple[Tensor, Tensor]:
        """Return final features (b, d, h, w) and descriptors (b, d): class tokens, or the mean of the patches."""
        maps, token = None, None
        if isinstance(self.f, VisionModel) and self.f.class_token and self.f.last:
            maps, token = final_tokens(image_tower(self.f.model), images.to(self.device))
        maps = self.maps(images) if maps is None else maps.float().cpu()
        return maps, maps.mean((2, 3)) if token is None else token.float().cpu()

    @property
    def side(self) -> int:
        """Side in pixels of pictures that a measure brings: the model's own, or whole patches of at most 224."""
        if not isinstance(self.f, VisionModel):
            return BROUGHT
        patch = self.f.patch or 1
        # large pictures say no more about a few shapes
        return self.f.size if self.f.exact else min(self.f.size, max(1, BROUGHT // patch) * patch)

    def normalised(self, pictures: Tensor) -> Tensor:
        """Return pictures (..., 3, H, W) in [0, 1] as the model gets them."""
        if not isinstance(self.f, VisionModel):
            return pictures
        return (pictures - self.f.mean.cpu()) / self.f.std.cpu()

    def watch(self, images: Tensor, on_layer: Callable[[Seen], None]) -> tuple[Tensor, Tensor] | None:
        """Call `on_layer` for every attention layer while images pass, as `vispe.backbones.attention_recorder.watch` does.

        Returns:
            `both` of these images, for which they need not pass again; None where features are of an earlier layer.

        Raises:
            UnsupportedHost: its attention cannot be read.
            ShapeError: a language model got something else than ids that it knows, (b, n) or (b, 1, 1, n).
        """
        if self.model is None or "attention" not in self.can:
            raise UnsupportedHost(f"{self.title} shows no attention: {self.why['attention']}.")
        shown = (self._ids(images) if self._words else images).to(self.device)
        if not (isinstance(self.f, VisionModel) and self.f.last):
            watch(self.model, shown, on_layer)
            return None
        found: list[tuple[Tensor, Tensor]] = []
        watch(self.model, shown, on_layer, lambda: found.append(self.both(shown)))
        return found[0]

    def _ids(self, images: Tensor) -> Tensor:
        """Return ids of tokens (b, n) as the runner gives them, as images of one row."""
        count = self.model.get_input_embeddings().num_embeddings
        row = images.ndim == 2 or (images.ndim == 4 and images.shape[1:3] == (1, 1))
        if images.dtype != torch.int64 or not row or not (images.min() >= 0 and images.max() < count):
            raise ShapeError(
                f"{self.title} reads ids of tokens, int64 (b, 1, 1, n) from 0 to {count - 1}, got {images.dtype} "
                f"{tuple(images.shape)} from {images.min():g} to {images.max():g}; give those of its tokenizer."
            )
        return images.flatten(1)

    def twin(self, seed: int = 0) -> Host:
        """Return the same architecture with random weights; `same` names parameters that nothing drew again.

        Raises:
            UnsupportedHost: it is no model whose weights could be drawn again.
        """
        if self.model is None:
            raise UnsupportedHost("it is a function of images, of which there is no twin with random weights")
        model, same = random_twin(self.model, seed)
        twin = self._of(model, f"{self.title} (random weights)")
        twin.same = tuple(same)
        return twin

    def without(self) -> Host:
        """Return the same weights without a positional encoding.

        Raises:
            UnsupportedHost: vispe cannot take its encoding away.
        """
        if self.model is None:
            raise UnsupportedHost("it is a function of images, whose encoding cannot be taken away")
        if self._words:
            raise UnsupportedHost("the encoding of a language model cannot be taken away")
        from vispe.hosts.convert import convert

        bare = copy.deepcopy(self.model)
        convert(bare.net if isinstance(bare, TransformersModel) else bare, "none")
        return self._of(bare.eval(), f"{self.title} (no encoding)")

    def _of(self, model: nn.Module, title: str) -> Host:
        f: Any = model
        if isinstance(self.f, VisionModel):
            own = {name: getattr(self.f, name) for name in ("layer", "norm", "mean", "std", "exact")}
            f = VisionModel(model, **own)
        made = Host(f, title, patch=self.patch)
        # answers are given by the whole model, of which this may be a part
        if self.answers is not None:
            made.why["answers"] = "a changed copy of the model that sees images does not speak"
        return made


def host_of(model: Subject | Callable[..., Any], title: str = "", *, answers: Answers | None = None) -> Host:
    """Return what an audit measures.

    Args:
        model: what `load_subject` found; a model, in evaluation mode, of transformers also a causal language model;
            or images (b, c, H, W) -> maps (b, d, h, w).
        title: in words; by default that of the subject, or the name of the class.
        answers: how it answers questions, such as `vispe.evaluate.audit.answers.ChatAnswers`; a subject with words
            brings its own.

    Raises:
        OptionError: a model in training mode; a segmenter of which neither classes nor probabilities are known.

    >>> import timm
    >>> host_of(timm.create_model("test_vit").eval()).title
    'VisionTransformer'
    """
    if isinstance(model, Subject):
        f = _Classes(model) if model.features is None else model.features
        patch = 1 if model.features is None else model.patch
        host = Host(f, title or model.title, patch=patch, answers=answers)
        if answers is None and model.whole is not None and model.reader is not None:
            try:
                answers = answers_of(model.whole.to(host.device), model.reader)
                return Host(f, host.title, patch=patch, answers=answers)
            except UnsupportedHost as error:
                host.why["answers"] = str(error).rstrip(".")
        return host
    net = TransformersModel(model) if of_transformers(model) and not reads_words(model) else model
    f = feature_function(net)
    named = model.model if isinstance(model, VisionModel) else model
    return Host(f, title or getattr(named, "__name__", type(named).__name__), answers=answers)


class _Classes:
    """A segmenter as features: images (b, c, H, W) -> (b, K, H, W), probabilities, or labels one-hot."""

    def __init__(self, subject: Subject) -> None:
        self.segmenter, self.names = subject.segmenter, subject.names
        self.probabilities = getattr(self.segmenter, "probabilities", None)
        # averaged over poses, labels alone are known
        if isinstance(self.segmenter, D4Segmenter):
            self.probabilities = None
        if self.probabilities is None and not self.names:
            raise OptionError(
                f"{subject.title} gives labels and does not say of how many classes; give it `names`, or a method "
                "probabilities(image) -> (K, H, W)."
            )

    def __call__(self, images: Tensor) -> Tensor:
        if self.probabilities is not None:
            return torch.stack([torch.as_tensor(self.probabilities(image)).float() for image in images])
        labels = torch.stack([torch.as_tensor(labels_of(self.segmenter, image)) for image in images])
        # classes count from 1, and 0 is no data
        return (labels[:, None] == torch.arange(1, len(self.names) + 1)[:, None, None]).float()
