"""How models with words answer questions about pictures: by likeness (CLIP), or by what a chat model would say."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from vispe.backbones.local.transformers_model import of_transformers
from vispe.errors import OptionError, UnsupportedHost


class ClipAnswers:
    """Answers of an open_clip model: how alike a picture and a sentence are, which ends with the answer.

    Pictures are brought to the size of the model, as its own preparation does (bicubic).

    Args:
        model: as `open_clip.create_model` returns it, in evaluation mode.
        tokenizer: sentences -> ids (n, length), as `open_clip.get_tokenizer` returns it.
        sentence: question and answer, in one sentence.

    Raises:
        UnsupportedHost: the model has no towers for images and texts, or does not say how images are normalised.

    >>> import open_clip
    >>> answers = ClipAnswers(open_clip.create_model("RN50").eval(), open_clip.get_tokenizer("RN50"))
    >>> answers([torch.rand(3, 64, 64)], "Which colour has the sky?", ("blue", "green")).shape
    torch.Size([2])
    """

    several = False  # it compares one picture with words

    def __init__(
        self, model: Any, tokenizer: Callable[[list[str]], Tensor], sentence: str = "{question} {answer}"
    ) -> None:
        if not all(hasattr(model, part) for part in ("encode_image", "encode_text", "visual", "logit_scale")):
            raise UnsupportedHost(
                f"{type(model).__name__} has no towers for images and texts; give a model of open_clip.create_model."
            )
        if (
            getattr(model.visual, "image_mean", None) is None
            or getattr(model.visual, "image_std", None) is None
        ):
            raise UnsupportedHost(
                f"{type(model).__name__} does not say how images are normalised; set visual.image_mean and image_std."
            )
        self.model, self.tokenizer, self.sentence = model, tokenizer, sentence

    @torch.no_grad()
    def __call__(self, pictures: Sequence[Tensor], question: str, answers: Sequence[str]) -> Tensor:
        """Return the logarithm of the probability of each answer, (answers,), up to a common number.

        Raises:
            OptionError: several pictures, which this model cannot look at together.
        """
        if len(pictures) != 1:
            raise OptionError(
                f"A model of likeness looks at one picture at a time, got {len(pictures)}; leave out measures that "
                "show several, such as order."
            )
        visual, like = self.model.visual, next(self.model.parameters())
        size = visual.image_size if isinstance(visual.image_size, tuple) else (visual.image_size,) * 2
        image = torch.nn.functional.interpolate(
            pictures[0][None].float(), size, mode="bicubic", antialias=True, align_corners=False
        ).clamp(0, 1)
        mean, std = (torch.tensor(v)[:, None, None] for v in (visual.image_mean, visual.image_std))
        texts = self.tokenizer([self.sentence.format(question=question, answer=a) for a in answers])
        seen = self.model.encode_image(((image - mean) / std).to(like), normalize=True)
        said = self.model.encode_text(texts.to(like.device), normalize=True)
        return (self.model.logit_scale.exp() * seen @ said.T)[0].float().cpu()


class ChatAnswers:
    """Answers of a chat model of transformers: how probable it is that it says each of them.

    Args:
        model: a vision-language model with a head, in evaluation mode; converted ones as well.
        processor: its processor, with a template for chats.

    Raises:
        UnsupportedHost: the processor has no template for chats.

    Example:
        ```python
        model = AutoModelForImageTextToText.from_pretrained(folder).eval()
        host = host_of(model, answers=ChatAnswers(model, AutoProcessor.from_pretrained(folder)))
        ```
    """

    def __init__(self, model: Any, processor: Any) -> None:
        if not getattr(processor, "chat_template", None):
            raise UnsupportedHost(
                f"{type(processor).__name__} has no template for chats, so nothing says how a question is put; set "
                "processor.chat_template."
            )
        self.model, self.processor = model, processor

    @torch.no_grad()
    def __call__(self, pictures: Sequence[Tensor], question: str, answers: Sequence[str]) -> Tensor:
        """Return the logarithm of the probability of each answer, (answers,)."""
        content = [*({"type": "image"} for _ in pictures), {"type": "text", "text": question}]
        prompt = self.processor.apply_chat_template(
            [{"role": "user", "content": content}], add_generation_prompt=True
        )
        given = self.processor(text=[prompt], images=[[_image(p) for p in pictures]], return_tensors="pt")
        given = {name: _placed(value, self.model) for name, value in given.items()}
        return torch.stack([self._one(given, a) for a in answers]).float().cpu()

    def _one(self, given: dict[str, Any], answer: str) -> Tensor:
        """Return the logarithm of the probability of one answer: the sum over its tokens."""
        said = self.processor.tokenizer(answer, add_special_tokens=False)["input_ids"]
        prompt = given["input_ids"]
        more = torch.tensor([said], dtype=prompt.dtype, device=prompt.device)
        inputs = {**given, "input_ids": torch.cat([prompt, more], 1)}
        for name, fill in (("attention_mask", 1), ("mm_token_type_ids", 0), ("token_type_ids", 0)):
            if name in given:
                inputs[name] = torch.cat([given[name], torch.full_like(more, fill).to(given[name])], 1)
        logits = self.model(**inputs).logits[0, prompt.shape[1] - 1 : -1]
        # a token is foretold by the one before it
        return logits.double().log_softmax(-1).gather(1, more[0, :, None]).sum()


def answers_of(whole: Any, reader: Any) -> ClipAnswers | ChatAnswers:
    """Return how a model with words answers.

    Args:
        whole: of open_clip or transformers.
        reader: called without arguments, gives its tokenizer or its processor.

    Raises:
        UnsupportedHost: it has no head for words, or what it needs for answers is missing.
    """
    if not of_transformers(whole):
        return ClipAnswers(whole, reader())
    if whole.get_output_embeddings() is None:
        raise UnsupportedHost(f"{type(whole).__name__} has no head that says words")
    return ChatAnswers(whole, reader())


def _image(picture: Tensor) -> Image.Image:
    """Return a picture (3, H, W) in [0, 1] as processors take it."""
    return Image.fromarray(np.asarray((picture.clamp(0, 1) * 255).round().byte().permute(1, 2, 0).cpu()))


def _placed(value: Any, model: Any) -> Any:
    """Return an input of a model on its device, pictures in its dtype."""
    if not isinstance(value, Tensor):
        return value
    like = next(model.parameters())
    return value.to(like) if value.is_floating_point() else value.to(like.device)
