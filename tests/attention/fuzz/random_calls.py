"""A random call of attention from a seed, its definition in float64, and the comparison of both."""

import math
import random
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests.attention.fuzz.random_biases import Maker, RandomBias, Tokens
from vispe import Grid, attention
from vispe.attention import DistanceBias, PairRotation, WindowMask

KINDS = (
    "none", "distance", "distance", "slopes", "table", "table", "hides", "profile", "radial", "offset", "sum", "sum",
    "gated", "gated table", "decomposed", "decomposed both", "context", "windows", "windows and table",
    "subset of distance", "subset of table", "subset of sum", "free", "low rank", "tensor", "tensor and table",
    "cross of position",
    "hides and slopes", "hides and table", "offset context", "offset context", "context and table", "cross of sum",
    "cross of profile", "cross of radial", "cross of offset", "cross of none",
)  # fmt: skip
LAYOUTS = ("bhnd", "bnhd", "nbhd", "strided", "offset", "expanded", "packed")
HEAD_DIMS = (8, 16, 17, 32, 33, 40, 64, 64, 65, 72, 80, 88, 96, 97, 100, 127, 128, 130)
# relative errors of the output, the log-sum-exp and the gradients that are always accepted
LIMITS = {torch.float32: (4e-6, 3e-5), torch.float16: (2e-3, 8e-3), torch.bfloat16: (1.5e-2, 6e-2)}
# accepted multiple of the change of the results when all inputs change by one rounding error: cancellation
CONDITION = 12.0


@dataclass
class RandomCall:
    """A call of attention made from a seed."""

    seed: int
    small: bool
    label: str = ""
    leaves: list[Tensor] = field(default_factory=list)
    params: list[Tensor] = field(default_factory=list)
    bias: RandomBias | None = None
    layout: str = "bhnd"
    groups: int = 1
    arguments: dict[str, Any] = field(default_factory=dict)
    visible: Tensor | None = None
    rotation: Any = None
    sinks: Tensor | None = None
    added: Tensor | None = None

    def __post_init__(self) -> None:
        rng = self.rng = random.Random(self.seed)
        torch.manual_seed(self.seed)
        kind = rng.choice(KINDS)
        self.dtype = rng.choice([torch.float32] * 6 + [torch.float16, torch.bfloat16])
        b, h, d = rng.choice([1, 2, 3]), rng.choice([1, 2, 2, 3, 4]), rng.choice(HEAD_DIMS)
        kv_heads = rng.choice([x for x in (1, 2, 3) if h % x == 0]) if rng.random() < 0.3 else h
        width = d if rng.random() < 0.7 else rng.choice(HEAD_DIMS)
        sizes = [0.5, 2.0, 2.0, 20.0] if self.dtype == torch.float32 else [0.5, 2.0, 5.0]
        self.maker = Maker(rng, b, h, d, rng.choice(sizes))
        grid, pos, tokens = self._grid(kind)
        n = m = pos.tokens
        self.groups = h // kv_heads
        self.bias = self._bias(kind, grid, pos, tokens)
        if kind.startswith("subset"):
            n = m = self.bias.bias.pos.tokens
        if kind.startswith("cross"):
            n = rng.randint(1, 40) if self.bias is None else self.bias.bias.pos_q.tokens
        self._masks(kind, b, h, n, m)
        self._inputs((b, h, n, d), (b, kv_heads, m, d), (b, kv_heads, m, width))
        self._options(h, kv_heads, n, m, d, width, kind)
        self.params = self.maker.params
        self.label = (
            f"{kind}, grid {grid.shape} + {grid.prefix}, q ({b}, {h}, {n}, {d}), {kv_heads} key heads, {m} keys, d_v "
            f"{width}, {str(self.dtype)[6:]}, {self.layout}, {', '.join(sorted(self.arguments))}"
        )

    def _grid(self, kind: str) -> tuple[Grid, Any, Tokens]:
        rng, limit = (
            self.rng,
            self.rng.choice([12, 40, 70]) if self.small else self.rng.choice([60, 300, 1300]),
        )
        axes = 2 if kind.startswith(("decomposed", "windows")) else rng.choice([1, 2, 2, 2, 3])
        while True:
            shape = tuple(rng.randint(1, {1: limit, 2: 40, 3: 9}[axes]) for _ in range(axes))
            if math.prod(shape) <= limit:
                break
        # multiples of 1/4: the float32 coordinates are exact, so that their differences do not cancel
        spacing = tuple(round(4 * rng.uniform(0.3, 3.0)) / 4 for _ in shape) if rng.random() < 0.2 else None
        grid = Grid(
            shape, 0 if kind.startswith("windows") else rng.choice([0, 0, 1, 1, 2, 5]), spacing=spacing
        )
        return grid, grid.positions(), Tokens(grid)

    def _bias(self, kind: str, grid: Grid, pos: Any, tokens: Tokens) -> RandomBias | None:
        rng, make = self.rng, self.maker
        if kind.startswith("subset"):
            count = rng.randint(1, pos.tokens)
            rows = [torch.randperm(pos.tokens)[:count] for _ in range(rng.choice([1, make.b]))]
            index = torch.stack(rows)
            pos, tokens = pos.gather(index), Tokens(grid, index)
        learned = rng.random() < 0.5
        simple = {
            "none": lambda: None,
            "distance": lambda: make.distance(pos, tokens, False),
            "slopes": lambda: make.distance(pos, tokens, True),
            "table": lambda: make.table(pos, tokens),
            "hides": lambda: make.table(pos, tokens, rng.choice([0.3, 0.9])),
            "profile": lambda: make.profile(pos, tokens),
            "radial": lambda: make.radial(pos, tokens),
            "offset": lambda: make.offset(pos, tokens),
            "sum": lambda: make.sum(make.distance(pos, tokens, learned), make.table(pos, tokens)),
            "gated": lambda: make.gated(make.distance(pos, tokens, False), pos.tokens),
            "gated table": lambda: make.gated(make.table(pos, tokens), pos.tokens),
            "decomposed": lambda: make.decomposed(pos, tokens, rng.choice(["query", "key"])),
            "decomposed both": lambda: make.sum(*(make.decomposed(pos, tokens, s) for s in ("query", "key"))),
            "context": lambda: make.context(pos),
            "offset context": lambda: make.offset_context(pos, tokens),
            "context and table": lambda: make.sum(make.offset_context(pos, tokens), make.table(pos, tokens)),
            "hides and slopes": lambda: make.sum(
                make.distance(pos, tokens, True), make.table(pos, tokens, rng.choice([0.3, 0.9]))
            ),
            "hides and table": lambda: make.sum(
                make.table(pos, tokens, rng.choice([0.3, 0.9])), make.table(pos, tokens)
            ),
            "windows": lambda: make.windows(pos, tokens),
            "windows and table": lambda: make.sum(
                make.table(pos, tokens, prefix=False), make.windows(pos, tokens)
            ),
            "free": lambda: make.free(pos.tokens, grid.axes),
            "low rank": lambda: make.low_rank(pos.tokens),
            "tensor": lambda: make.tensor(pos.tokens),
            "tensor and table": lambda: make.sum(make.table(pos, tokens), make.tensor(pos.tokens)),
        }
        if kind.startswith("cross of"):
            rows = torch.randperm(pos.tokens)[: rng.randint(1, pos.tokens)]
            name = kind.removeprefix("cross of ")
            inner = simple[rng.choice(["table", "distance", "slopes"]) if name == "position" else name]()
            return None if inner is None else make.cross(inner, pos.gather(rows[None]), pos, rows)
        if kind.startswith("subset"):
            kind = {"table": "table", "distance": "slopes", "sum": "sum"}[kind.split()[-1]]
        return simple[kind]()

    def _masks(self, kind: str, b: int, h: int, n: int, m: int) -> None:
        rng, choice = self.rng, self.rng.random()
        if choice < 0.25:
            keys = torch.rand(b, m) > rng.choice([0.1, 0.5])
            if rng.random() < 0.3:
                keys[rng.randrange(b)] = False  # closed rows
            self.arguments["key_padding_mask"], self.visible = keys, keys[:, None, None]
        elif choice < 0.35:
            self.arguments["is_causal"], self.visible = True, torch.ones(n, m, dtype=torch.bool).tril()
            if rng.random() < 0.3:
                keys = torch.rand(b, m) > 0.5
                self.arguments["key_padding_mask"], self.visible = keys, self.visible & keys[:, None, None]
        elif choice < 0.45:
            mask = torch.rand(rng.choice([1, b]), rng.choice([1, h]), n, m) > 0.3
            self.arguments["attn_mask"], self.visible = mask, mask
            if rng.random() < 0.5:
                # additive: random numbers, -inf for masked pairs
                added = torch.randn(mask.shape).to(rng.choice([torch.float32, self.dtype]))
                self.added = added.masked_fill(~mask, -math.inf).requires_grad_(rng.random() < 0.3)
                self.arguments["attn_mask"] = self.added
        elif choice < 0.6 and b == 1 and n == m:
            ends = [0, *sorted(rng.randint(0, n) for _ in range(rng.randint(0, 3))), n]
            which = torch.bucketize(torch.arange(n), torch.tensor(ends), right=True)
            self.arguments["cu_seqlens"] = torch.tensor(ends, dtype=rng.choice([torch.int32, torch.int64]))
            self.visible = which[:, None] == which[None]
        elif choice < 0.7 and kind == "windows":
            # as the argument of shifted windows instead of as a bias
            self.arguments["attn_mask"] = self.bias.bias

    def _inputs(self, *shapes: tuple[int, ...]) -> None:
        rng, layout = self.rng, self.rng.choice(LAYOUTS)
        if layout == "packed" and len({*shapes}) > 1:
            layout = "bnhd"
        self.layout = layout
        stored = {
            "bhnd": lambda b, h, n, d: (b, h, n, d),
            "bnhd": lambda b, h, n, d: (b, n, h, d),
            "nbhd": lambda b, h, n, d: (n, b, h, d),
            "strided": lambda b, h, n, d: (b, h, n, 2 * d),
            "offset": lambda b, h, n, d: (b, h, n + 1, d + 3),
            "expanded": lambda b, h, n, d: (1, h, n, d),
            "packed": lambda b, h, n, d: (b, n, 3, h, d),
        }[layout]
        self.batch = shapes[0][0]
        shapes = shapes[:1] if layout == "packed" else shapes
        frozen = rng.random() < 0.3
        for shape in shapes:
            needs_grad = not frozen or rng.random() < 0.7
            self.leaves.append(torch.randn(stored(*shape)).to(self.dtype).requires_grad_(needs_grad))

    def _options(self, h: int, kv_heads: int, n: int, m: int, d: int, width: int, kind: str) -> None:
        rng, arguments = self.rng, self.arguments
        if kv_heads != h:
            arguments["enable_gqa"] = True
        if rng.random() < 0.3:
            arguments["scale"] = rng.choice([0.3, 1.0, 1e-3])
        if rng.random() < 0.3:
            arguments["deterministic"] = rng.choice([True, False])
        if rng.random() < 0.3:
            arguments["return_lse"] = True
        if rng.random() < 0.15:
            self.sinks = torch.randn(h, requires_grad=True)
            arguments["sinks"] = self.sinks
        if rng.random() < 0.1:
            arguments["softcap"] = rng.choice([0.7, 5.0])
        if n == m and d >= 2 and rng.random() < 0.25:
            pairs, layout = rng.randint(1, d // 2), rng.choice(["half", "interleaved"])
            angle = torch.rand(1, rng.choice([1, kv_heads]), n, pairs) * 6
            values = width >= 2 * pairs and rng.random() < 0.3
            arguments["transform"] = PairRotation(angle.cos(), angle.sin(), layout, values)
            self.rotation = angle.cos().double(), angle.sin().double(), layout, values

    def backends(self) -> tuple[str, ...]:
        """Return the backends of the CPU that claim full precision."""
        bias = None if self.bias is None else self.bias.bias
        # the columns of squared distances that are not normalised cancel, as `lowrank` documents
        inexact = isinstance(bias, DistanceBias) and bias.normalize == "none"
        return ("auto", "reference", "sdpa", *(() if inexact else ("lowrank",)))

    def views(self, leaves: list[Tensor]) -> list[Tensor]:
        """Return q, k, v as views of the leaves."""
        view = {
            "bhnd": lambda x: x,
            "bnhd": lambda x: x.transpose(1, 2),
            "nbhd": lambda x: x.permute(1, 2, 0, 3),
            "strided": lambda x: x[..., ::2],
            "offset": lambda x: x[:, :, 1:, 3:],
            "expanded": lambda x: x.expand(self.batch, -1, -1, -1),
        }
        if self.layout == "packed":
            return list(leaves[0].permute(2, 0, 3, 1, 4))
        return [view[self.layout](x) for x in leaves]

    def inputs(self) -> list[Tensor]:
        """Return all tensors that the results depend on."""
        return [*self.leaves, *self.params, *(t for t in (self.added, self.sinks) if t is not None)]

    def run(self, backend: str) -> tuple[Tensor, ...]:
        """Return the results of a backend: output, and log-sum-exp if the call returns it."""
        bias = None if self.bias is None else self.bias.bias
        if isinstance(self.arguments.get("attn_mask"), WindowMask):
            bias = None
        result = attention(*self.views(self.leaves), bias=bias, backend=backend, **self.arguments)
        return result if isinstance(result, tuple) else (result,)

    def definition(
        self, inputs: list[Tensor], eps: float = 0.0, delta_error: Tensor | None = None
    ) -> tuple[Tensor, ...]:
        """Return the results for `inputs` in float64.

        Args:
            inputs: the tensors of `inputs`, in float64.
            eps: random relative errors of both terms of the logits, and of the gradient of the logits.
            delta_error: errors (b, h, n, 1) of delta, the row sum of output times gradient in the backward pass.
        """

        def rounded(x: Tensor) -> Tensor:
            return x * (1 + eps * torch.randn(x.shape, dtype=x.dtype)) if eps else x

        q, k, v = self.views(inputs[: len(self.leaves)])
        params = inputs[len(self.leaves) :]
        k, v = (t.repeat_interleave(self.groups, 1) for t in (k, v))
        scale = self.arguments.get("scale") or q.shape[-1] ** -0.5
        rotated_q, rotated_k, rotated_v = q, k, v
        if self.rotation:
            rotated_q, rotated_k = self._rotate(q), self._rotate(k)
            rotated_v = self._rotate(v) if self.rotation[3] else v
        logits = rounded(scale * rotated_q @ rotated_k.mT)
        softcap = self.arguments.get("softcap")
        logits = logits if softcap is None else softcap * (logits / softcap).tanh()
        if self.bias is not None:
            logits = logits + rounded(self.bias.dense(params, q, k, scale))
        if self.added is not None:
            logits = logits + params[len(self.params)]
        if self.visible is not None:
            logits = logits.masked_fill(~self.visible, -math.inf)
        if self.sinks is not None:
            logits = torch.cat([logits, params[-1][:, None, None].expand(*logits.shape[:3], 1)], -1)
        no_key = (logits == -math.inf).all(-1, keepdim=True)
        logits = logits.masked_fill(no_key, 0.0)
        weights = logits.softmax(-1).masked_fill(no_key, 0.0)
        if delta_error is not None and logits.requires_grad:
            change = weights.detach() * delta_error
            logits.register_hook(lambda grad: rounded(grad) + change)
        out = (weights if self.sinks is None else weights[..., :-1]) @ rotated_v
        out = self._rotate(out, -1) if self.rotation and self.rotation[3] else out
        if "return_lse" not in self.arguments:
            return (out,)
        return out, logits.logsumexp(-1).masked_fill(no_key[..., 0], -math.inf)

    def _rotate(self, x: Tensor, sign: int = 1) -> Tensor:
        cos, sin, layout, _ = self.rotation
        if cos.shape[1] > 1:
            cos, sin = (t.repeat_interleave(x.shape[1] // t.shape[1], 1) for t in (cos, sin))
        sin, pairs = sign * sin, cos.shape[-1]
        rotated_part, unrotated = x[..., : 2 * pairs], x[..., 2 * pairs :]
        a, b = (
            rotated_part.chunk(2, -1)
            if layout == "half"
            else (rotated_part[..., ::2], rotated_part[..., 1::2])
        )
        new = a * cos - b * sin, b * cos + a * sin
        new = torch.cat(new, -1) if layout == "half" else torch.stack(new, -1).flatten(-2)
        return torch.cat([new, unrotated], -1)
