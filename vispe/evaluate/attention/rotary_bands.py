"""Rotary bands: pairs of channels that hardly turn, whose keys all point one way and make a sink (DoPE).

Keys of a pair that turns spread over all directions, and their Gram matrix has two equal eigenvalues. Where the angle
stays below a quarter turn over the whole picture, keys with a common part add up, and whatever query points there
finds them all: a low rank. `vispe.evaluate.attention.band_ablation` shows what a model does without turning such pairs.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from vispe.attention.transform.abstract_transform import Layout
from vispe.attention.transform.chain import Chain
from vispe.attention.transform.pairs import PairRotation
from vispe.backbones.attention_recorder import Seen
from vispe.errors import OptionError, UnsupportedHost
from vispe.evaluate.attention.head_health import massive
from vispe.evaluate.attention.head_statistics import sums_of
from vispe.evaluate.audit.audited_model import Host
from vispe.evaluate.audit.measure import Kept, Measure, Outcome
from vispe.grid import Grid

TOP = 8  # eigenvalues of a head that count; its rank by one of them is always 1


def effective_rank(keys: Tensor, top: int = TOP) -> Tensor:
    """Return exp of the entropy of the largest eigenvalues of K^T K, (...): 1 where all keys point one way.

    Args:
        keys: (..., n, d), rotated, not centred.
        top: how many eigenvalues share the whole; all where there are fewer.

    Raises:
        OptionError: `top` is below 1.

    >>> round(float(effective_rank(torch.eye(4).double(), 3)), 6)
    3.0
    """
    if top < 1:
        raise OptionError(f"effective_rank needs top of 1 or more eigenvalues, got {top}.")
    values = torch.linalg.eigvalsh(keys.mT @ keys).clamp(min=0)[..., -top:]
    total = values.sum(-1, keepdim=True)
    # keys that are all 0 point nowhere: 0 / 0 is NaN
    return torch.special.entr(values / total).sum(-1).exp()


def pairs_of(x: Tensor, layout: Layout) -> Tensor:
    """Return channels (..., n, d) as pairs (..., pairs, n, 2)."""
    both = x.unflatten(-1, (2, -1)).mT if layout == "half" else x.unflatten(-1, (-1, 2))
    return both.transpose(-3, -2)


def band_ranks(keys: Tensor, layout: Layout) -> Tensor:
    """Return the effective rank of every rotary pair (..., pairs): from 1, one way, to 2, all ways alike.

    Args:
        keys: (..., n, d), rotated.
        layout: which channels are a pair.

    >>> keys = torch.tensor([[1.0, 0, 1, 1], [0.0, 1, 2, 2]]).double()
    >>> [round(rank, 3) for rank in band_ranks(keys, "interleaved").tolist()]
    [2.0, 1.0]
    """
    return effective_rank(pairs_of(keys, layout), 2)


def band_shares(q: Tensor, k: Tensor, layout: Layout) -> Tensor:
    """Return the share of each rotary pair in the largest logits that queries and keys could have, (..., pairs).

    The logit of a pair is at most |q_pair| |k_pair|; the means over tokens of both norms are multiplied.

    Args:
        q: (..., n, d), rotated or not.
        k: like q.
        layout: which channels are a pair.
    """
    of_q, of_k = (torch.hypot(*pairs_of(x, layout).unbind(-1)).mean(-1) for x in (q, k))
    most = of_q * of_k
    return most / most.sum(-1, keepdim=True)


def rotated(seen: Seen) -> tuple[Tensor, Tensor, PairRotation] | None:
    """Return rotated queries and keys of the patches (h, N, channels that turn) and what turned them.

    None where the layer turns no pairs of channels.
    """
    transform = seen.call.transform
    links = transform.links if isinstance(transform, Chain) else (transform,)
    turn = next((link for link in links if isinstance(link, PairRotation)), seen.turned)
    if turn is None or seen.call.whole:
        return None
    prefix, channels = seen.grid.prefix, 2 * turn.cos.shape[-1]
    q, k, _ = seen.remember("qkv", seen.call.transformed)
    return q[0, :, prefix:, :channels], k[0, :, prefix:, :channels], turn


def turning(rotation: PairRotation, grid: Grid) -> Tensor:
    """Return by how many radians keys turn from a patch to the one below and to the right, (h or 1, pairs, 2)."""
    turn = rotation.of_keys
    angle = torch.complex(turn.cos[0].double(), turn.sin[0].double())[:, -grid.patches :]
    angle = angle.unflatten(1, grid.shape)
    # the sum of all steps has their mean direction: an angle that wraps does no harm
    down = (angle[:, 1:] * angle[:, :-1].conj()).sum((1, 2)).angle()
    right = (angle[:, :, 1:] * angle[:, :, :-1].conj()).sum((1, 2)).angle()
    return torch.stack([down, right], -1)


@dataclass(frozen=True)
class Bands(Measure):
    """Ranks of rotary pairs, pairs that hardly turn, and channels far above the others."""

    name = "bands"
    family = "attention"
    asks = "Does a rotary band that hardly turns make a sink?"
    number = "share of bands whose keys point one way in the logits of the head that has most"
    misleads = (
        "Keys that point one way make a sink only where queries do so too; short grids have pairs that hardly turn "
        "with any weights."
    )
    needs = frozenset({"attention"})
    controls = ("random",)

    def see(self, kept: Kept, seen: Seen) -> None:
        """Keep ranks, turns and norms of a layer whose keys turn."""
        found = rotated(seen)
        if found is None:
            return
        queries, keys, rotation = found
        keys = keys.double()
        ranks = band_ranks(keys, rotation.layout)
        # 2 - rank is 1 for a pair of one direction and 0 for all of them; the lowest rank alone is close to 1 in any
        # large model, so pairs count by what they can add to a logit
        alike = ((2 - ranks) * band_shares(queries.double(), keys, rotation.layout)).nansum(1)
        kept.layer(alike=float(alike.max()), lowest=float(np.nanmin(ranks.cpu())))
        sums = sums_of(seen)
        side = torch.tensor(seen.grid.shape, dtype=torch.float64)
        over = turning(rotation, seen.grid).cpu().abs() @ side
        kept.add(f"ranks {seen.layer}", ranks)
        kept.add(f"turn {seen.layer}", over.repeat_interleave(len(ranks) // len(over), 0))
        kept.add(f"head {seen.layer}", effective_rank(keys))
        kept.add(f"q {seen.layer}", sums.q)
        kept.add(f"k {seen.layer}", sums.k)

    def finish(self, kept: Kept, host: Host) -> Outcome:
        """Return the largest one-way share of a head, and what bands it comes from."""
        if not any("alike" in record for record in kept.records):
            raise UnsupportedHost(
                "No layer turns pairs of channels of its keys, so there are no bands to look at."
            )
        alike, n = kept.column("alike"), len(kept.records)
        layers = sorted(int(name.split()[1]) for name in kept.sums if name.startswith("ranks"))
        ranks, turn, head = (
            torch.stack([kept.sums[f"{name} {i}"] for i in layers]) / n for name in ("ranks", "turn", "head")
        )
        found = list(massive((kept.sums[f"q {i}"], kept.sums[f"k {i}"]) for i in layers))
        order = ranks.flatten().nan_to_num(math.inf).argsort()[:5]
        places = np.stack(np.unravel_index(order.numpy(), tuple(ranks.shape)), 1).tolist()
        still = turn < math.pi / 2
        return Outcome(
            float(alike.max(1).mean()),
            per_image=alike.max(1).tolist(),
            per_layer=alike.mean(0).tolist(),
            details={
                "lowest_rank": float(kept.column("lowest").min(1).mean()),
                "lowest": [
                    {"layer": layers[i], "head": j, "pair": p, "rank": float(ranks[i, j, p])}
                    | {"radians_over_the_picture": float(turn[i, j, p])}
                    for i, j, p in places
                ],
                "still": [row.all(0).nonzero().flatten().tolist() for row in still],
                "rank_of_still": float(ranks[still].nanmean()),
                "rank_of_turning": float(ranks[~still].nanmean()),
                "head_rank": head.mean(1).tolist(),
                "massive": len(found),
                "massive_turning": sum(channel < 2 * ranks.shape[-1] for *_, channel, _ in found),
            },
        )
