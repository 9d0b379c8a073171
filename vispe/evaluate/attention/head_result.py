"""What is known about the attention heads of a model, in numbers, sentences and tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vispe.errors import OptionError
from vispe.report.table import aligned, json_entries

PATTERNS = ("distributed", "local", "sink", "dead")  # their numbers are codes 0 to 3


@dataclass(frozen=True)
class Thresholds:
    """Above which a head belongs to a class, asked in this order.

    Attributes:
        dead: mass of the sink.
        sink: mass of the sink.
        local: mass of the neighbours.
    """

    dead: float = 0.95
    sink: float = 0.5
    local: float = 0.6

    def classify(self, sink: Tensor, local: Tensor) -> Tensor:
        """Return codes of `PATTERNS` int64 for masses of any equal shape."""
        code = torch.where(local > self.local, 1, 0)
        code = torch.where(sink > self.sink, 2, code)
        return torch.where(sink > self.dead, 3, code)


@dataclass(frozen=True, eq=False)
class HeadHealth:
    """What `head_health` found; arrays are (layers, heads) unless said otherwise.

    Attributes:
        paths: names of the layers.
        tokens: what each token is: class, register 1, ..., then `patch row,column`.
        grid: patches (gh, gw).
        images: how many were seen.
        sink_token: number of the token that receives most attention in the mean over images.
        sink_mass: the share that it receives; uniform attention gives 1 / tokens.
        sink_agreement: share of images in which this very token receives most.
        peak_mass: mean over images of the largest share in each: above `sink_mass` where the sink moves.
        entropy: mean entropy of the rows divided by ln tokens; 1 is uniform.
        local_mass: from patches to the 3 x 3 patches around them; uniform attention gives 9 / patches, less at rims.
        pattern: codes of `PATTERNS`.
        position_share: share of the variance of the logits between patches that their offset explains, NaN under a
            mask: a head near 1 looks at places and not at things.
        reach: distance in patches that holds 50 % and 95 % of the attention between patches (2, layers, heads).
        bias_reach: the same of the attention that the bias alone would give on this grid, its rims included; NaN
            without a bias, or with one that depends on what is seen. `reach / bias_reach` is 1 where content does
            not change how far a head looks.
        receptive_field: the theoretical one of the bias (arXiv 2307.10156) for eps 0.5 and 0.05: distance within
            which 1 - eps of exp(bias) lies over the offsets of this grid, each counted once; NaN likewise.
        profile: share of the attention between patches at each rounded distance (layers, heads, distances).
        bias_profile: the same of the bias alone (layers, heads, distances), NaN likewise.
        uniform_profile: the same of uniform attention (distances,).
        massive: (layer, head, "q" or "k", channel, norm in mean norms of the head) of channels whose norm over all
            tokens is above 5 times the mean of the head.
        position_r2: variance over patches of each input channel that its place explains (layers, channels), adjusted
            for chance; NaN for one image. Layouts that all images share count as place.
        thresholds: of the classes.
    """

    paths: tuple[str, ...]
    tokens: tuple[str, ...]
    grid: tuple[int, int]
    images: int
    sink_token: np.ndarray
    sink_mass: np.ndarray
    sink_agreement: np.ndarray
    peak_mass: np.ndarray
    entropy: np.ndarray
    local_mass: np.ndarray
    pattern: np.ndarray
    position_share: np.ndarray
    reach: np.ndarray
    bias_reach: np.ndarray
    receptive_field: np.ndarray
    profile: np.ndarray
    bias_profile: np.ndarray
    uniform_profile: np.ndarray
    massive: tuple[tuple[int, int, str, int, float], ...]
    position_r2: np.ndarray
    thresholds: Thresholds = field(default_factory=Thresholds)

    def sink_kind(self, layer: int, head: int) -> str:
        """Return class, distillation, register, prefix or patch: what the strongest token of a head is."""
        return self.tokens[self.sink_token[layer, head]].split()[0]

    def heads(self, *patterns: str) -> list[tuple[int, int]]:
        """Return (layer, head) of all heads of some classes, such as ``heads("sink", "dead")``."""
        if unknown := set(patterns) - set(PATTERNS):
            raise OptionError(f"There is no class {min(unknown)!r} of heads; they are {', '.join(PATTERNS)}.")
        codes = [PATTERNS.index(p) for p in patterns]
        return [(int(i), int(j)) for i, j in zip(*np.nonzero(np.isin(self.pattern, codes)), strict=True)]

    @property
    def collapsed(self) -> float:
        """Share of heads that are sinks or dead."""
        return float((self.pattern >= 2).mean())

    @property
    def verdict(self) -> str:
        """One sentence on the classes."""
        total, kinds = self.pattern.size, [self.sink_kind(*head) for head in self.heads("sink", "dead")]
        if not kinds:
            return f"no head of {total} collapses onto one token"
        words = ", ".join(f"{kinds.count(k)} onto {_a(k)}" for k in dict.fromkeys(kinds))
        dead = len(self.heads("dead"))
        return f"{len(kinds)} of {total} heads collapse onto one token ({words}; {dead} of them dead)"

    @property
    def notes(self) -> tuple[str, ...]:
        """What weakens the verdict or is worth a look, one sentence each."""
        notes = []
        if self.images < 2:
            notes.append(
                "One image cannot show whether a sink stays in its place, nor which channels tell position."
            )
        moving = int(((self.pattern < 2) & (self.peak_mass > self.thresholds.sink)).sum())
        if moving:
            notes.append(f"{moving} more heads collapse in each image, but onto changing tokens.")
        return tuple(notes)

    def to_dict(self) -> dict[str, Any]:
        """Return everything as JSON values; NaN becomes None."""
        names = [n for n, v in vars(self).items() if isinstance(v, np.ndarray)]
        return {
            **json_entries(self, "verdict", "notes", "collapsed", "images", "grid"),
            "layers": list(self.paths),
            "tokens": list(self.tokens),
            "patterns": list(PATTERNS),
            "thresholds": vars(self.thresholds),
            **json_entries(self, "massive", *names),
        }

    def rows(self) -> list[list[str]]:
        """Return the table of the layers as text, the heads of the columns first."""
        head = ["layer", *PATTERNS, "sink mass", "entropy", "local", "position", "95 % reach", "of the bias"]
        rows = [head]
        for i in range(len(self.paths)):
            counts = [str(int((self.pattern[i] == c).sum())) for c in range(len(PATTERNS))]
            means = (self.sink_mass, self.entropy, self.local_mass, self.position_share)
            numbers = [f"{m[i].mean():.2f}" for m in means]
            far = [f"{r[1, i].mean():.1f}" for r in (self.reach, self.bias_reach)]
            rows.append([str(i), *counts, *numbers, *("-" if t == "nan" else t for t in far)])
        return rows

    def to_markdown(self) -> str:
        """Return a table of the layers as Markdown, its columns aligned."""
        return aligned(self.rows(), left=())


def _a(kind: str) -> str:
    return f"the {kind} token" if kind in ("class", "distillation") else f"a {kind}"
