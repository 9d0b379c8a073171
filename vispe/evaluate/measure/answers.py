"""Answers of text-aligned models to questions about images: similarity (CLIP) or log-probability (chat models)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Protocol

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vispe.backbones.local.transformers_model import of_transformers
from vispe.errors import OptionError, UnsupportedHost


class Answers(Protocol):
    """Callable that scores answers to a question about images."""

    def __call__(self, images: Sequence[Tensor], question: str, answers: Sequence[str]) -> Tensor:
        """Return the log-probability of each answer, (answers,), up to a common constant.

        Args:
            images: images (3, H, W) in [0, 1], in the order of the prompt.
            question: about the images.
            answers: candidate answers.
        """
        ...


class ClipAnswers:
    """Answers of an open_clip model: scaled cosine similarity of the image and a sentence that ends with the answer.

    Images are resized to the input size of the model (bicubic, antialiased), as by its own transform.

    Args:
        model: return value of `open_clip.create_model`, in evaluation mode.
        tokenizer: sentences -> ids (n, length), return value of `open_clip.get_tokenizer`.
        sentence: template with `{question}` and `{answer}`.

    Raises:
        UnsupportedHost: the model has no image and text towers, or no normalisation of images.

    >>> import open_clip
    >>> answers = ClipAnswers(open_clip.create_model("RN50").eval(), open_clip.get_tokenizer("RN50"))
    >>> answers([torch.rand(3, 64, 64)], "Which colour has the sky?", ("blue", "green")).shape
    torch.Size([2])
    """

    several = False  # compares a single image with text

    def __init__(
        self, model: Any, tokenizer: Callable[[list[str]], Tensor], sentence: str = "{question} {answer}"
    ) -> None:
        if not all(hasattr(model, part) for part in ("encode_image", "encode_text", "visual", "logit_scale")):
            raise UnsupportedHost(
                f"ClipAnswers: model has no image and text towers, got {type(model).__name__}. Pass the return value "
                "of open_clip.create_model."
            )
        if (
            getattr(model.visual, "image_mean", None) is None
            or getattr(model.visual, "image_std", None) is None
        ):
            raise UnsupportedHost(
                f"ClipAnswers: {type(model).__name__} has no image_mean and image_std. Set visual.image_mean and "
                "visual.image_std."
            )
        self.model, self.tokenizer, self.sentence = model, tokenizer, sentence

    @torch.no_grad()
    def __call__(self, images: Sequence[Tensor], question: str, answers: Sequence[str]) -> Tensor:
        """Return the log-probability of each answer, (answers,), up to a common constant.

        Raises:
            OptionError: there are several images; this model supports one image per question.
        """
        if len(images) != 1:
            raise OptionError(
                f"ClipAnswers: images must be a single image, got {len(images)}. Omit measures with several "
                "images, such as order."
            )
        visual, parameter = self.model.visual, next(self.model.parameters())
        size = visual.image_size if isinstance(visual.image_size, tuple) else (visual.image_size,) * 2
        image = torch.nn.functional.interpolate(
            images[0][None].float(), size, mode="bicubic", antialias=True, align_corners=False
        ).clamp(0, 1)
        mean, std = (torch.tensor(v)[:, None, None] for v in (visual.image_mean, visual.image_std))
        texts = self.tokenizer([self.sentence.format(question=question, answer=a) for a in answers])
        image_features = self.model.encode_image(((image - mean) / std).to(parameter), normalize=True)
        text_features = self.model.encode_text(texts.to(parameter.device), normalize=True)
        return (self.model.logit_scale.exp() * image_features @ text_features.T)[0].float().cpu()


class ChatAnswers:
    """Answers of a chat model of transformers: log-probability of generating each of them.

    Args:
        model: a vision-language model with a language model head, in evaluation mode, original or converted.
        processor: its processor, with a chat template.

    Raises:
        UnsupportedHost: the processor has no chat template.

    Example:
        ```python
        model = AutoModelForImageTextToText.from_pretrained(folder).eval()
        audited = as_audited_model(model, answers=ChatAnswers(model, AutoProcessor.from_pretrained(folder)))
        ```
    """

    def __init__(self, model: Any, processor: Any) -> None:
        if not getattr(processor, "chat_template", None):
            raise UnsupportedHost(
                f"ChatAnswers: {type(processor).__name__} has no chat template, so questions cannot be formatted. Set "
                "processor.chat_template."
            )
        self.model, self.processor = model, processor

    @torch.no_grad()
    def __call__(self, images: Sequence[Tensor], question: str, answers: Sequence[str]) -> Tensor:
        """Return the log-probability of each answer, (answers,)."""
        content = [*({"type": "image"} for _ in images), {"type": "text", "text": question}]
        prompt = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        inputs = self.processor(text=[prompt], images=[[_image(p) for p in images]], return_tensors="pt")
        inputs = {name: _to_model(value, self.model) for name, value in inputs.items()}
        return torch.stack([self._one(inputs, a) for a in answers]).float().cpu()

    def _one(self, inputs: dict[str, Any], answer: str) -> Tensor:
        """Return the log-probability of one answer: the sum over its tokens."""
        token_ids = self.processor.tokenizer(answer, add_special_tokens=False)["input_ids"]
        prompt = inputs["input_ids"]
        more = torch.tensor([token_ids], dtype=prompt.dtype, device=prompt.device)
        extended = {**inputs, "input_ids": torch.cat([prompt, more], 1)}
        for name, fill in (("attention_mask", 1), ("mm_token_type_ids", 0), ("token_type_ids", 0)):
            if name in inputs:
                extended[name] = torch.cat([inputs[name], torch.full_like(more, fill).to(inputs[name])], 1)
        logits = self.model(**extended).logits[0, prompt.shape[1] - 1 : -1]
        # logits at position i predict token i + 1
        return logits.double().log_softmax(-1).gather(1, more[0, :, None]).sum()


def answers_of(whole: Any, reader: Any) -> ClipAnswers | ChatAnswers:
    """Return the answers of a text-aligned model.

    Args:
        whole: model of open_clip or transformers.
        reader: called without arguments, returns its tokenizer or processor.

    Raises:
        UnsupportedHost: the model has no language model head, or its processor has no chat template.
    """
    if not of_transformers(whole):
        return ClipAnswers(whole, reader())
    if whole.get_output_embeddings() is None:
        raise UnsupportedHost(f"{type(whole).__name__} has no language model head")
    return ChatAnswers(whole, reader())


def _image(image: Tensor) -> Image.Image:
    """Return an image (3, H, W) in [0, 1] as a PIL image for processors."""
    return Image.fromarray(np.asarray((image.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu()))


def _to_model(value: Any, model: Any) -> Any:
    """Return a model input on the device of the model, floating-point tensors in its dtype."""
    if not isinstance(value, Tensor):
        return value
    parameter = next(model.parameters())
    return value.to(parameter) if value.is_floating_point() else value.to(parameter.device)
