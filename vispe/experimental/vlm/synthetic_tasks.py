"""Synthetic tasks that depend on position only: index of an image, location in an image, time in a video.

Every patch has a uniform colour, so a patch contains no information about its position. Minimal versions of benchmarks
of spatial relations (VSR, arXiv 2205.00363) and of needles among images and frames.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vispe.errors import OptionError
from vispe.train.vlm.prompts import OrderedPrompt

# colours of patches; the background is 0
COLOURS = torch.tensor([[1.0, -1, -1], [-1, 1, -1], [-1, -1, 1], [1, 1, -1], [1, -1, 1], [-1, 1, 1]])
TASKS = {"picture": 2, "place": 4, "time": 2}
"""Number of answers by task: end of a sequence of images, corner of an image, end of a video."""


@dataclass(frozen=True)
class Words:
    """Token ids of a model with the image format of Qwen2-VL.

    Attributes:
        image: placeholder of an image token.
        video: placeholder of a video token.
        start: token before an image.
        end: token after an image.
        width: number of values per patch, a multiple of 3.
        first: first of 16 tokens for colours, questions and answers.
    """

    image: int
    video: int
    start: int
    end: int
    width: int
    first: int = 1

    def colour(self, k: int) -> int:
        """Return the token of a colour."""
        return self.first + k

    def question(self, task: str) -> int:
        """Return the token of the question of a task."""
        return self.first + 6 + list(TASKS).index(task)

    def answer(self, task: str, k: int) -> int:
        """Return the token of answer `k`; image sequences and videos have separate tokens."""
        return self.first + 9 + {"picture": 0, "place": 2, "time": 6}[task] + k


def draw(task: str, size: Sequence[int], words: Words, generator: torch.Generator) -> OrderedPrompt:
    """Return a random sample of a task.

    Args:
        task: 'picture': images of 2 x 2 tokens with one colour each; is the image of the target colour the first or the
            last? 'place': an image with one coloured patch; in which corner is it? 'time': frames of 2 x 2 tokens; is
            the frame of the target colour the first or the last?
        size: 'picture', 'time': number of images or frames; 'place': rows and columns.
        words: token ids of the model.
        generator: random generator.

    Raises:
        OptionError: unknown task, or a size below 2.

    >>> words = Words(image=20, video=21, start=22, end=23, width=12)
    >>> draw("picture", (2,), words, torch.Generator().manual_seed(0)).inputs["input_ids"].shape
    torch.Size([1, 15])
    """
    if task not in TASKS or any(n < 2 for n in size) or len(size) != 1 + (task == "place"):
        raise OptionError(
            f"draw: task must be one of {', '.join(TASKS)} with sizes of 2 or more (place: rows and columns), got "
            f"{task!r} with {tuple(size)}."
        )

    def number(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    target = number(len(COLOURS))
    if task == "place":
        rows, columns = size
        answer = number(4)
        patches = torch.zeros(rows, columns, 3)
        patches[(rows - 1) * (answer // 2), (columns - 1) * (answer % 2)] = COLOURS[target]
        grids = [[1, rows, columns]]
    else:
        # all other images or frames have random colours other than the target
        others = (target + 1 + torch.randint(len(COLOURS) - 1, (size[0],), generator=generator)) % len(
            COLOURS
        )
        answer = number(2)
        others[(size[0] - 1) * answer] = target
        patches = COLOURS[others].repeat_interleave(4, 0)
        grids = [[1, 2, 2]] * size[0] if task == "picture" else [[size[0], 2, 2]]
    patches = patches.reshape(-1, 3)
    patches = patches + 0.1 * torch.randn(patches.shape, generator=generator)
    return _sample(task, target, answer, patches, torch.tensor(grids), words)


def _sample(
    task: str, target: int, answer: int, patches: Tensor, grids: Tensor, words: Words
) -> OrderedPrompt:
    """Return tokens and pixels: images between start and end tokens, question, answer."""
    kind, mark = ("video", words.video) if task == "time" else ("image", words.image)
    tokens: list[int] = []
    for grid in grids.prod(1).tolist():
        tokens += [words.start, *[mark] * grid, words.end]
    tokens += [words.question(task), words.colour(target), words.answer(task, answer)]
    pixels = "pixel_values_videos" if kind == "video" else "pixel_values"
    # values of a patch are ordered by channel, then frame and pixel
    inputs = {pixels: patches.repeat_interleave(words.width // 3, 1), f"{kind}_grid_thw": grids}
    ids = torch.tensor([tokens])
    return OrderedPrompt({"input_ids": ids, **inputs}, (), slice(len(tokens) - 1, len(tokens)))
