"""Result of `head_health`: arrays per head, a verdict, notes and tables."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor

from vispe.errors import OptionError, counted
from vispe.utils.options import Options, UnitInterval
from vispe.utils.report.html_page import Tone
from vispe.utils.report.result import Result
from vispe.utils.report.table import json_entries

PATTERNS = ("distributed", "local", "sink", "dead")  # codes 0 to 3


@dataclass(frozen=True)
class Thresholds(Options):
    """Lower bounds of the classes of heads, tested in this order.

    Attributes:
        dead: attention on the strongest token.
        sink: attention on the strongest token.
        local: attention on the neighbouring patches.
    """

    dead: UnitInterval = 0.95
    sink: UnitInterval = 0.5
    local: UnitInterval = 0.6

    def classify(self, sink: Tensor, local: Tensor) -> Tensor:
        """Return the codes of `PATTERNS`, int64, for sink and local mass of equal shape."""
        code = torch.where(local > self.local, 1, 0)
        code = torch.where(sink > self.sink, 2, code)
        return torch.where(sink > self.dead, 3, code)


@dataclass(frozen=True, eq=False)
class HeadHealth(Result):
    """Statistics of attention heads; arrays are (layers, heads) unless stated otherwise.

    Attributes:
        paths: names of the layers.
        tokens: name of each token: class, register 1, ..., then `patch row,column`.
        grid: patches (gh, gw).
        images: number of images.
        sink_token: index of the token with the most attention, averaged over images.
        sink_mass: fraction of the attention on that token; uniform attention gives 1 / tokens.
        sink_agreement: fraction of images in which that token receives the most attention.
        peak_mass: largest fraction on one token per image, averaged over images; above `sink_mass` if the sink moves.
        entropy: mean entropy of the rows divided by ln tokens; 1 is uniform.
        local_mass: attention from patches to the 3 x 3 patches around them; uniform attention gives 9 / patches, less
            at the border.
        pattern: codes of `PATTERNS`.
        position_share: fraction of the variance of the logits between patches that is explained by their offset, NaN
            under a mask: a head near 1 attends by position rather than by content.
        reach: distance in patches that contains 50 % and 95 % of the attention between patches (2, layers, heads).
        bias_reach: `reach` for the attention of the bias alone on this grid, borders included; NaN without a
            bias, or if the bias depends on content. `reach / bias_reach` is 1 for heads whose reach does not
            depend on content.
        receptive_field: theoretical receptive field of the bias (arXiv 2307.10156) for eps 0.5 and 0.05:
            distance that contains 1 - eps of exp(bias) over the offsets of this grid, each counted once; NaN
            as for `bias_reach`.
        profile: fraction of the attention between patches at each rounded distance (layers, heads, distances).
        bias_profile: `profile` for the bias alone (layers, heads, distances); NaN as for `bias_reach`.
        uniform_profile: `profile` for uniform attention (distances,).
        massive: (layer, head, "q" or "k", channel, ratio to the mean norm of the head) of channels whose norm over all
            tokens is above 5 times the mean of the head.
        position_r2: fraction of the variance over patches of each input channel that is explained by the position
            (layers, channels), adjusted for chance; NaN for one image. A layout that all images have in
            common counts as position.
        thresholds: lower bounds of the classes.
    """

    left = ()

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
        """Return the kind of the strongest token of a head: class, distillation, register, prefix or patch."""
        return self.tokens[self.sink_token[layer, head]].split()[0]

    def heads(self, *patterns: str) -> list[tuple[int, int]]:
        """Return (layer, head) of all heads in the given classes, such as ``heads("sink", "dead")``.

        Raises:
            OptionError: a class that does not exist.
        """
        if unknown := set(patterns) - set(PATTERNS):
            raise OptionError(
                f"heads: unknown class, got {min(unknown)!r}. Use one of {', '.join(PATTERNS)}."
            )
        codes = [PATTERNS.index(p) for p in patterns]
        return [(int(i), int(j)) for i, j in zip(*np.nonzero(np.isin(self.pattern, codes)), strict=True)]

    @property
    def collapsed(self) -> float:
        """Fraction of heads that are sinks or dead."""
        return float((self.pattern >= 2).mean())

    @property
    def verdict(self) -> str:
        """Verdict in one sentence: collapsed heads by the kind of their sink."""
        total, kinds = self.pattern.size, [self.sink_kind(*head) for head in self.heads("sink", "dead")]
        if not kinds:
            return f"none of {counted(total, 'head')} collapses onto one token"
        words = ", ".join(f"{kinds.count(k)} onto {_a(k)}" for k in dict.fromkeys(kinds))
        dead = len(self.heads("dead"))
        return (
            f"{len(kinds)} of {counted(total, 'head')} collapse onto one token ({words}; {dead} of them dead)"
        )

    @property
    def notes(self) -> tuple[str, ...]:
        """Caveats of the verdict, one sentence each."""
        notes = []
        if self.images < 2:
            notes.append(
                "One image does not show whether a sink stays on the same token, or which channels encode position."
            )
        moving = int(((self.pattern < 2) & (self.peak_mass > self.thresholds.sink)).sum())
        if moving:
            verb = "collapses" if moving == 1 else "collapse"
            notes.append(f"{counted(moving, 'more head')} {verb} in every image, but onto different tokens.")
        return tuple(notes)

    def to_dict(self) -> dict[str, Any]:
        """Return all fields as JSON values; NaN becomes None."""
        names = [n for n, v in vars(self).items() if isinstance(v, np.ndarray)]
        return {
            **json_entries(self, "verdict", "notes", "collapsed", "images", "grid"),
            "layers": list(self.paths),
            "tokens": list(self.tokens),
            "patterns": list(PATTERNS),
            "thresholds": vars(self.thresholds),
            **json_entries(self, "massive", *names),
        }

    @property
    def tone(self) -> Tone:
        """Colour of the verdict in the report."""
        return "mild" if self.collapsed > 0 else "good"

    def table(self) -> list[list[str]]:
        """Return the table of layers as text, header first."""
        head = ["layer", *PATTERNS, "sink mass", "entropy", "local", "position", "95 % reach", "of the bias"]
        rows = [head]
        for i in range(len(self.paths)):
            counts = [str(int((self.pattern[i] == c).sum())) for c in range(len(PATTERNS))]
            means = (self.sink_mass, self.entropy, self.local_mass, self.position_share)
            numbers = [f"{m[i].mean():.2f}" for m in means]
            far = [f"{r[1, i].mean():.1f}" for r in (self.reach, self.bias_reach)]
            rows.append([str(i), *counts, *numbers, *("-" if t == "nan" else t for t in far)])
        return rows


def _a(kind: str) -> str:
    return f"the {kind} token" if kind in ("class", "distillation") else f"a {kind}"
