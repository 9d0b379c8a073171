"""Made tasks in which position alone decides: which picture, where in the picture, when in the video.

Every patch has one colour, so a patch by itself does not say where it is. After the tests of vision-language models
that need places (VSR, arXiv 2205.00363, of relations; needles among pictures and frames), as small as can be.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from vispe.errors import OptionError
from vispe.train.vlm.prompts import Arranged

COLOURS = torch.tensor(
    [[1.0, -1, -1], [-1, 1, -1], [-1, -1, 1], [1, 1, -1], [1, -1, 1], [-1, 1, 1]]
)  # of patches; the ground is 0
TASKS = {"picture": 2, "place": 4, "time": 2}
"""Name and number of answers: which end of a row of pictures, which corner of a picture, which end of a video."""


@dataclass(frozen=True)
class Words:
    """Tokens of a model, for pictures as Qwen2-VL takes them.

    Attributes:
        image: stands for a token of an image.
        video: of a video.
        start: before a picture.
        end: after it.
        width: numbers of a patch, 3 of them colours or a multiple.
        first: of 16 tokens for colours, questions and answers.
    """

    image: int
    video: int
    start: int
    end: int
    width: int
    first: int = 1

    def colour(self, k: int) -> int:
        """Token of a colour."""
        return self.first + k

    def question(self, task: str) -> int:
        """Token that asks."""
        return self.first + 6 + list(TASKS).index(task)

    def answer(self, task: str, k: int) -> int:
        """Token that answers; ends of pictures and of videos have words of their own."""
        return self.first + 9 + {"picture": 0, "place": 2, "time": 6}[task] + k


def draw(task: str, size: Sequence[int], words: Words, generator: torch.Generator) -> Arranged:
    """Return a sample of a task.

    Args:
        task: 'picture': images of 2 x 2 tokens, of one colour each; is that of the colour asked for the first or the
            last? 'place': an image with one patch of a colour; in which corner is it? 'time': frames of 2 x 2 tokens;
            is that of the colour the first or the last?
        size: 'picture', 'time': how many; 'place': rows and columns.
        words: tokens of the model.
        generator: of everything drawn.

    Raises:
        OptionError: there is no such task, or a size is below 2.

    >>> words = Words(image=20, video=21, start=22, end=23, width=12)
    >>> draw("picture", (2,), words, torch.Generator().manual_seed(0)).inputs["input_ids"].shape
    torch.Size([1, 15])
    """
    if task not in TASKS or any(n < 2 for n in size) or len(size) != 1 + (task == "place"):
        raise OptionError(
            f"A task is one of {', '.join(TASKS)} with sizes of 2 or more (place: rows and columns), got {task!r} with "
            f"{tuple(size)}."
        )

    def number(n: int) -> int:
        return int(torch.randint(n, (), generator=generator))

    asked = number(len(COLOURS))
    if task == "place":
        rows, columns = size
        answer = number(4)
        patches = torch.zeros(rows, columns, 3)
        patches[(rows - 1) * (answer // 2), (columns - 1) * (answer % 2)] = COLOURS[asked]
        grids = [[1, rows, columns]]
    else:
        # the others have any colour but that
        others = (asked + 1 + torch.randint(len(COLOURS) - 1, (size[0],), generator=generator)) % len(COLOURS)
        answer = number(2)
        others[(size[0] - 1) * answer] = asked
        patches = COLOURS[others].repeat_interleave(4, 0)
        grids = [[1, 2, 2]] * size[0] if task == "picture" else [[size[0], 2, 2]]
    patches = patches.reshape(-1, 3)
    patches = patches + 0.1 * torch.randn(patches.shape, generator=generator)
    return _sample(task, asked, answer, patches, torch.tensor(grids), words)


def _sample(task: str, asked: int, answer: int, patches: Tensor, grids: Tensor, words: Words) -> Arranged:
    """Return tokens and pixels: pictures between marks, question, answer."""
    kind, mark = ("video", words.video) if task == "time" else ("image", words.image)
    tokens: list[int] = []
    for grid in grids.prod(1).tolist():
        tokens += [words.start, *[mark] * grid, words.end]
    tokens += [words.question(task), words.colour(asked), words.answer(task, answer)]
    pixels = "pixel_values_videos" if kind == "video" else "pixel_values"
    # a patch is colour by colour, frames and pixels within
    inputs = {pixels: patches.repeat_interleave(words.width // 3, 1), f"{kind}_grid_thw": grids}
    ids = torch.tensor([tokens])
    return Arranged({"input_ids": ids, **inputs}, (), slice(len(tokens) - 1, len(tokens)))
