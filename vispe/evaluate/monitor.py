"""Measures of an audit inside the user's own evaluation: they read the forward passes that run anyway."""

from __future__ import annotations

import time
import warnings
from collections.abc import Sequence
from contextlib import ExitStack
from typing import Any, Self

import torch
from torch import Tensor, nn

from vispe.backbones.attention_recorder import LayerAttention, attention_layers, reading_attention, tower_of
from vispe.backbones.local.transformers_model import TransformersModel, is_language_model, of_transformers
from vispe.errors import InputError, OptionError, UnsupportedHost, counted
from vispe.evaluate.audit.findings import Audit, Finding
from vispe.evaluate.audit.measures import choose
from vispe.evaluate.measure.audited_model import as_audited_model
from vispe.evaluate.measure.base import Accumulator, Measure
from vispe.evaluate.measure.verdict import judge

SHARE = 0.1  # part of the time of the evaluation in which passes are recorded
# of timm, open_clip and transformers
NORMS = ("norm", "ln_post", "layernorm", "post_layernorm")


class Monitor:
    """Collects measures of an audit from forward passes of a model, inside a `with` statement.

    Of a recorded pass, the first image is measured. Passes are recorded as long as they take at most a tenth of the
    time since the first one, so that the evaluation is at most about 10 % slower; the model runs no additional pass,
    and its outputs are unchanged. The first pass is always recorded. Controls, such as random weights, would need
    passes of their own: `vispe audit` runs them.

    Attributes:
        passes: number of forward passes in evaluation mode.
        recorded: number of recorded passes, which is the number of measured images.
        other_sizes: number of passes with images of another size than the first one; they are not recorded, as the
            numbers of several grids cannot be averaged.
    """

    def __init__(self, model: nn.Module, measures: Sequence[str | Measure] | None = None) -> None:
        # of a model of transformers, only its image tower is observed
        self._is_vision_model = of_transformers(model) and not is_language_model(model)
        self.model = TransformersModel(model).net if self._is_vision_model else model
        attention_layers(self.model)
        self.tower, _ = tower_of(self.model)
        self.norm = next(
            (n for name in NORMS if isinstance(n := getattr(self.tower, name, None), nn.Module)), None
        )
        self.measures, self.refused = self._supported(measures)
        self.passes = self.recorded = self.other_sizes = 0
        self._size: tuple[int, ...] | None = None  # of the recorded images
        self._ledger = {m.name: Accumulator() for m in self.measures}
        self._current: dict[str, Accumulator] = {}  # of the pass that runs
        self._began: float | None = None
        self._spent = 0.0
        self._grid: Any = None
        self._tokens: Tensor | None = None  # of the last call of the norm
        self._size_of_pass: tuple[int, ...] | None = None
        self._entered, self._pass = ExitStack(), ExitStack()

    def __enter__(self) -> Self:
        """Start to observe forward passes."""
        handles = (
            self.tower.register_forward_pre_hook(self._start, with_kwargs=True),
            self.tower.register_forward_hook(self._end, always_call=True),
        )
        for handle in handles:
            self._entered.callback(handle.remove)
        return self

    def __exit__(self, *_: object) -> None:
        """Remove all hooks."""
        self._pass.close()
        self._entered.close()

    def report(self) -> Audit:
        """Return the findings, with intervals over the measured images; without controls of other weights.

        Raises:
            InputError: no forward pass was recorded.
        """
        if not self.recorded:
            raise InputError(
                f"monitor: no forward pass of {type(self.tower).__name__} in evaluation mode, got {self.passes}. Call "
                "the model itself inside the with statement, after model.eval()."
            )
        if self.other_sizes:
            warnings.warn(
                f"monitor: {counted(self.other_sizes, 'forward pass')} with images of another size than {self._size} "
                "could not be recorded. Use a monitor for each size.",
                stacklevel=2,
            )
        audited = as_audited_model(self.model)
        findings, refused = [], dict(self.refused)
        for measure in self.measures:
            try:
                outcome = measure.summarize(self._ledger[measure.name], audited)
            except UnsupportedHost as error:
                refused[measure.name] = measure.question, str(error).rstrip(".")
                continue
            findings.append(Finding.of(measure, outcome, {}, judge(measure.limit, outcome, {})))
        missing = {"random, none": "a monitor runs no passes of its own"}
        return Audit(audited.title, tuple(findings), refused, self.recorded, missing)

    def _supported(
        self, measures: Sequence[str | Measure] | None
    ) -> tuple[tuple[Measure, ...], dict[str, tuple[str, str]]]:
        """Return the measures that need no passes of their own, and the question and reason for each of the others."""
        names = [one for one in measures or () if isinstance(one, str)]
        chosen = choose(names or None) if measures is None or names else []
        chosen += [one for one in measures or () if not isinstance(one, str)]
        refused = {m.name: reason for m in chosen if (reason := self._reason(m)) is not None}
        supported = tuple(m for m in chosen if m.name not in refused)
        if (measures is not None and refused) or not supported:
            name = next(iter(refused), "none")
            raise OptionError(
                f"monitor: measures must read attention layers or features only, got {name!r}: "
                f"{refused.get(name, 'there are none')}. Run vispe.evaluate.audit for it."
            )
        return supported, {m.name: (m.question, refused[m.name]) for m in chosen if m.name in refused}

    def _reason(self, measure: Measure) -> str | None:
        kind = type(measure)
        if measure.items or kind.rerun is not Measure.rerun:
            return "it runs the model on other images"
        name, stages = type(self.tower).__name__, getattr(self.tower, "stage_names", None)
        if "maps" in measure.needs and stages and stages[-1] not in self.tower.out_features:
            return f"the out_features of {name} are without the last stage, {stages[-1]!r}, which it reads"
        if "maps" in measure.needs and self.norm is None and not self._returns_tokens():
            return f"{name} has no final norm, whose output it reads"
        others = measure.needs - {"attention", "maps"}
        return f"it needs {min(others)}" if others else None

    def _returns_tokens(self) -> bool:
        """Whether the output of the tower has its tokens: that of transformers' models other than backbones."""
        return self._is_vision_model and not hasattr(self.tower, "stage_names")

    def _start(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Begin a forward pass; add the hooks of the layers if it is recorded."""
        if module.training:
            return
        images = next((v for v in (*args, *kwargs.values()) if isinstance(v, Tensor)), None)
        self.passes += 1
        now = time.perf_counter()
        self._began = now if self._began is None else self._began
        if images is None:
            return
        size = tuple(images.shape[-2:] if images.ndim == 4 else images.shape[1:2])  # or the length of a text
        if self._size is not None and size != self._size:
            self.other_sizes += 1
            return
        if self._spent > SHARE * (now - self._began):
            return
        self._tokens, self._size_of_pass = None, size
        for name in self._ledger:
            self._current[name] = Accumulator()
            self._current[name].begin(self.recorded)
        self._pass.enter_context(reading_attention(self.model, images, self._on_layer, first=True))
        if self.norm is not None:
            self._pass.callback(self.norm.register_forward_hook(self._on_norm).remove)
        self._pass.callback(self._add_time, now)

    def _end(self, module: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        """Finish a forward pass; a pass that raised an error, without output, is not counted."""
        del module, args
        try:
            if output is not None and self._current:
                self._on_features(output)
        finally:
            self._pass.close()
            current, self._current = self._current, {}
        if output is None or not current:
            return
        self.recorded += 1
        self._size = self._size_of_pass
        for name, accumulator in current.items():
            self._ledger[name].join(accumulator)

    def _add_time(self, began: float) -> None:
        self._spent += time.perf_counter() - began

    def _on_layer(self, layer: LayerAttention) -> None:
        self._grid = layer.grid
        for measure in self.measures:
            measure.on_layer(self._current[measure.name], layer)

    def _on_norm(self, module: nn.Module, args: tuple[Any, ...], tokens: Tensor) -> None:
        """Store the output of the norm; the last one is that of the last block, if several stages are normalised."""
        del module, args
        self._tokens = tokens

    @torch.no_grad()
    def _on_features(self, output: Any) -> None:
        """Pass the final features of the first image, tokens (b, n, d), to the measures that read them."""
        if not any("maps" in measure.needs for measure in self.measures):
            return
        tokens = self._tokens
        if self._returns_tokens():  # the norm of CLIP has one token only
            tokens = output[0] if isinstance(output, tuple) else output.last_hidden_state
        if tokens is None:
            return
        prefix, (h, w) = self._grid.prefix, self._grid.shape
        if tokens.ndim != 3 or tokens.shape[1] != prefix + h * w:
            raise UnsupportedHost(
                f"monitor: the final features of {type(self.tower).__name__} must be {counted(prefix, 'prefix token')} "
                f"and {h} x {w} patches, got the shape {tuple(tokens.shape)}. Choose measures of attention, such as "
                "monitor(model, ['heads'])."
            )
        maps = tokens[0, prefix:].float().cpu().T.unflatten(1, (h, w))
        if not maps.isfinite().all():
            raise InputError(
                f"monitor: the features of {type(self.tower).__name__} must be finite, got NaN or inf."
            )
        for measure in self.measures:
            measure.on_features(self._current[measure.name], maps)


def monitor(model: nn.Module, measures: Sequence[str | Measure] | None = None) -> Monitor:
    """Return a context manager that measures positional bias in the forward passes of an evaluation.

    Args:
        model: ViT of timm, open_clip or transformers, converted or not, with or without a head, or a model with
            `vispe.Attention` layers. It is called as usual, with batches of images (b, 3, H, W), in evaluation mode.
        measures: names, families or instances of measures that read attention layers or final features; by default
            those of the audit that do.

    Raises:
        UnsupportedHost: the attention of the model cannot be read.
        OptionError: a named measure runs the model on images of its own.
        UnknownName: a measure does not exist.

    >>> import timm
    >>> model = timm.create_model("test_vit").eval()
    >>> with monitor(model, ["heads", "probe"]) as m:
    ...     logits = model(torch.randn(2, 3, 160, 160))
    >>> [finding.name for finding in m.report().findings], m.recorded
    (['probe', 'heads'], 1)
    """
    return Monitor(model, measures)
