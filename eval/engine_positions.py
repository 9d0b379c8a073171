"""Test of exported positions and tables against the Python functions of vLLM and SGLang on the CPU.

    pip download --no-deps -d wheels vllm sglang
    python eval/engine_positions.py --vllm wheels/vllm-*.whl --sglang wheels/sglang-*.whl

An engine is a wheel, a folder that contains its package, or the installed package. Its modules import kernels, so only
the functions in question are compiled from their source files: in vLLM `get_mrope_input_positions` of each model, in
SGLang `get_rope_index` of each kind of model, and in both `MRotaryEmbedding.forward_native`.

Positions: random prompts of text, images and videos; the exported positions of the stock scheme and their delta are
compared with the engine's. Rotations: random queries and keys, rotated by the engine's layer with the exported table,
are compared with those rotated by vispe at the coordinates of the scheme.
"""

from __future__ import annotations

import argparse
import ast
import importlib.util
import json
import zipfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import checkout  # noqa: F401  (finds vispe)
import numpy as np
import torch

import vispe
from vispe.hosts.transformers.language.families import family_of
from vispe.hosts.transformers.serving import ServedPositions, serve_positions
from vispe.multimodal import Image, Stream, Text, create_scheme, rotation
from vispe.multimodal.serving import TableRows, table_of

RESULTS = Path(__file__).parent / "results"
MODELS = "vllm/model_executor/models/"
ROTARY = {
    "vllm": "vllm/model_executor/layers/rotary_embedding/",
    "sglang": "sglang/srt/layers/rotary_embedding/",
}
INDEX = ROTARY["sglang"] + "mrope_rope_index.py"
# schemes for the engines' own layers, and the parts of a step for an image of 8 x 8 tokens
SCHEMES = {"mrope": 1, "mrope_i": 1, "rope1d": 1, "pype": 1, "omnirope": 1, "v2pe(stride=4)": 16}


@dataclass(frozen=True)
class Family:
    """How an engine computes the positions of a model type.

    Attributes:
        config: class of the configuration in transformers.
        vllm: file and class of the model in vLLM.
        sglang: name of the function in SGLang.
        frames: whether text separates the frames of a video.
        framed: whether the whole video has a start and an end token, too.
        video_markers: whether a video has other start and end tokens than an image.
        text: options of the text part, where the default configuration is inconsistent.
    """

    config: str
    vllm: tuple[str, str]
    sglang: str
    frames: bool = False
    framed: bool = False
    video_markers: bool = False
    text: dict[str, Any] = field(default_factory=dict)


FAMILIES = {
    "qwen2_vl": Family("Qwen2VLConfig", ("qwen2_vl", "Qwen2VLForConditionalGeneration"), "get_rope_index"),
    "qwen2_5_vl": Family(
        "Qwen2_5_VLConfig", ("qwen2_5_vl", "Qwen2_5_VLForConditionalGeneration"), "get_rope_index"
    ),
    "qwen3_vl": Family(
        "Qwen3VLConfig", ("qwen3_vl", "Qwen3VLForConditionalGeneration"), "get_rope_index", frames=True
    ),
    "glm4v": Family(
        "Glm4vConfig",
        ("glm4_1v", "Glm4vForConditionalGeneration"),
        "get_rope_index_glm4v",
        True,
        True,
        True,
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "partial_rotary_factor": 0.5,
                "mrope_section": [8, 12, 12],
            }
        },
    ),
    "ernie4_5_vl_moe": Family(
        "Ernie4_5_VLMoeConfig",
        ("ernie45_vl", "Ernie4_5_VLMoeForConditionalGeneration"),
        "get_rope_index_ernie45",
        video_markers=True,
    ),
}


class Engine:
    """Source files of an engine, from a wheel, a folder or the installed package."""

    def __init__(self, name: str, source: Path | None) -> None:
        if source is None:
            spec = importlib.util.find_spec(name)
            if spec is None or spec.origin is None:
                raise FileNotFoundError(f"{name} is not installed. Pass a wheel or a folder with --{name}.")
            source = Path(spec.origin).parents[1]
        self.name, self.source = name, source
        self.wheel = zipfile.ZipFile(source) if source.suffix == ".whl" else None

    @property
    def version(self) -> str:
        """Version, from the metadata of the package."""
        if self.wheel is not None:
            return self.source.name.split("-")[1]
        folders = sorted(self.source.glob(f"{self.name}-*.dist-info"))
        return folders[0].name.split("-")[1].removesuffix(".dist") if folders else "unknown"

    def read(self, file: str) -> str:
        """Return the source of a file of the package."""
        if self.wheel is not None:
            return self.wheel.read(file).decode()
        return (self.source / file).read_text()

    def compiled(self, file: str, *names: str, **globals_: Any) -> dict[str, Any]:
        """Return functions of a file, and classes reduced to the methods that are named ``Class.method``."""
        body: list[ast.stmt] = []
        for node in ast.parse(self.read(file)).body:
            if isinstance(node, ast.FunctionDef) and node.name in names:
                body.append(node)
            methods = {n.partition(".")[2] for n in names if n.startswith(f"{getattr(node, 'name', '')}.")}
            if isinstance(node, ast.ClassDef) and methods:
                node.bases, node.decorator_list, node.keywords = [], [], []
                node.body = [m for m in node.body if isinstance(m, ast.FunctionDef) and m.name in methods]
                body.append(node)
        defined = {node.name for node in body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        if missing := {n.partition(".")[0] for n in names} - defined:
            raise AttributeError(f"{file} of {self.name} has no {', '.join(sorted(missing))}.")
        future = ast.parse("from __future__ import annotations").body
        module = ast.fix_missing_locations(ast.Module(body=future + body, type_ignores=[]))
        namespace: dict[str, Any] = {
            "torch": torch,
            "np": np,
            "itertools": __import__("itertools"),
            **globals_,
        }
        exec(compile(module, file, "exec"), namespace)
        return namespace


def prompt(
    family: Family, config: Any, generator: np.random.Generator
) -> tuple[list[int], dict[str, list[Any]], list[Any]]:
    """Return the tokens of a random prompt, its grids, and the features that vLLM passes to the model."""
    merge = _merge(config)
    tokens = list(generator.integers(5, 90, generator.integers(1, 9)))
    grids: dict[str, list[Any]] = {"image_grid_thw": [], "video_grid_thw": [], "second_per_grid_ts": []}
    features: list[Any] = []
    timed = "2_5" in family.config
    start, end = _markers(config, video=False)
    for _ in range(generator.integers(1, 4)):
        video = generator.random() < 0.4
        frames = int(generator.integers(1, 5)) if video else 1
        rows, columns = (int(n) for n in generator.integers(1, 6, 2))
        grid = (frames * _temporal(config) if video else 1, rows * merge, columns * merge)
        token = config.video_token_id if video and not family.framed else config.image_token_id
        first, last = _markers(config, video and family.video_markers)
        offset, ranges = len(tokens) + 1, []
        if video and family.frames:
            tokens += [first] if family.framed else []
            offset = len(tokens) + (1 if family.framed else 0)
            for number in range(frames):
                stamp = [91, 92 + number]
                before = len(tokens) + 1 + (0 if family.framed else len(stamp))
                ranges.append((before, before + rows * columns - 1))
                run = [start, *[token] * (rows * columns), end]
                tokens += run + stamp if family.framed else stamp + run
            tokens += [last] if family.framed else []
        else:
            tokens += [first, *[token] * (frames * rows * columns), last]
            ranges.append((offset, offset + frames * rows * columns - 1))
        data: dict[str, Any] = {}
        name = "video_grid_thw" if video else "image_grid_thw"
        grids[name].append(grid)
        data[name] = SimpleNamespace(data=torch.tensor(grid))
        if video and timed:
            seconds = float(generator.choice([0.25, 0.5, 1.0, 1.3, 2.0]))
            grids["second_per_grid_ts"].append(seconds)
            data["second_per_grid_ts"] = SimpleNamespace(data=torch.tensor(seconds))
        located = SimpleNamespace(offset=offset, extract_embeds_range=lambda ranges=ranges: ranges)
        kind = "video" if video else "image"
        features.append(SimpleNamespace(mm_position=located, modality=kind, data=data))
        tokens += list(generator.integers(5, 90, generator.integers(1, 6)))
    return [int(t) for t in tokens], {k: v for k, v in grids.items() if v}, features


def _merge(config: Any) -> int:
    return int(getattr(config.vision_config, "spatial_merge_size", 0) or config.vision_config.merge_size)


def _temporal(config: Any) -> int:
    return int(getattr(config.vision_config, "temporal_merge_size", 1))


def _markers(config: Any, video: bool) -> tuple[int, int]:
    """Return the tokens before and after an image or video."""
    kinds = ("video", "image", "vision") if video else ("image", "vision")
    for kind in kinds:
        if (start := getattr(config, f"{kind}_start_token_id", None)) is not None:
            return start, getattr(config, f"{kind}_end_token_id")
    return 3, 4


def vllm_positions(engine: Engine, family: Family, config: Any) -> Callable[..., tuple[Any, int]]:
    """Return vLLM's function of tokens and features of a request."""
    file, name = family.vllm
    methods = ("get_mrope_input_positions", "iter_mm_grid_thw")
    if family.frames and not family.framed:
        methods = ("get_mrope_input_positions", "_get_mrope_input_positions", "_iter_mm_grid_hw")
    made = engine.compiled(f"{MODELS}{file}.py", *(f"{name}.{m}" for m in methods))
    model = made[name]()
    model.config = _as_engine(config)
    return lambda tokens, grids, features: model.get_mrope_input_positions(tokens, features)


def _as_engine(config: Any) -> Any:
    """Return the attributes of a configuration under the names that engines read."""
    vision = config.vision_config
    video, image = _markers(config, True), getattr(config, "image_token_id", None)
    names = {
        "spatial_conv_size": _merge(config),
        "temporal_conv_size": _temporal(config),
        "im_patch_id": image,
        "video_start_token_id": video[0],
        "video_end_token_id": video[1],
    }
    return SimpleNamespace(**{**config.to_dict(), **names, "vision_config": vision})


def sglang_positions(engine: Engine, family: Family, config: Any) -> Callable[..., tuple[Any, int]]:
    """Return SGLang's function of tokens and grids of a request."""
    helpers = (
        "get_rope_index",
        "_get_llm_pos_ids_for_vision",
        "get_rope_index_glm4v",
        "get_rope_index_ernie45",
    )
    function = engine.compiled(INDEX, *helpers)[family.sglang]
    vision = config.vision_config

    def positions(tokens: list[int], grids: dict[str, list[Any]], features: list[Any]) -> tuple[Any, int]:
        tensors = {name: torch.tensor(value) for name, value in grids.items()}
        row = torch.tensor([tokens])
        if family.sglang == "get_rope_index":
            ids, delta = function(
                vision.spatial_merge_size, config.image_token_id, config.video_token_id,
                config.vision_start_token_id, config.model_type, getattr(vision, "tokens_per_second", None),
                row, **tensors,
            )  # fmt: skip
        else:
            # Ernie's videos have image tokens in SGLang
            row = row.masked_fill(row == config.video_token_id, config.image_token_id)
            ids, delta = function(row, hf_config=_as_engine(config), attention_mask=None, **_both(tensors))
        return ids[:, 0], int(delta)

    return positions


def _both(tensors: dict[str, Any]) -> dict[str, Any]:
    return {name: tensors.get(name) for name in ("image_grid_thw", "video_grid_thw")}


def compare_positions(
    served: ServedPositions, function: Callable[..., tuple[Any, int]], family: Family, prompts: int, seed: int
) -> dict[str, Any]:
    """Return the numbers of prompts, and of those with equal positions and equal deltas."""
    generator, equal, deltas, tokens_total = np.random.default_rng(seed), 0, 0, 0
    first: list[Any] = []
    for _ in range(prompts):
        tokens, grids, features = prompt(family, served.config, generator)
        ids, delta = served.positions(tokens, **grids)
        engine_ids, engine_delta = function(tokens, grids, features)
        engine_ids = torch.as_tensor(engine_ids)
        same = ids.shape == engine_ids.shape and torch.equal(ids, engine_ids.long())
        equal, deltas = equal + same, deltas + (delta == engine_delta)
        tokens_total += len(tokens)
        if not (same and delta == engine_delta) and not first:
            first = [grids, delta, engine_delta]
    row = {"prompts": prompts, "tokens": tokens_total, "equal_positions": equal, "equal_deltas": deltas}
    return row | ({"first_difference": json.loads(json.dumps(first))} if first else {})


def compare_rotations(engine: Engine, scheme: str, seed: int) -> dict[str, Any]:
    """Return the largest difference of queries and keys rotated by the engine's layer with an exported table."""
    names = ("MRotaryEmbedding.forward_native", "apply_interleaved_rope")
    common = {
        "vllm": ("common.py", "ApplyRotaryEmb.forward_static"),
        "sglang": ("utils.py", "apply_rotary_emb"),
    }
    file, function = common[engine.name]
    apply = engine.compiled(ROTARY[engine.name] + file, function)
    apply = apply["ApplyRotaryEmb"].forward_static if engine.name == "vllm" else apply["apply_rotary_emb"]
    made = engine.compiled(ROTARY[engine.name] + "mrope.py", *names, apply_rotary_emb=apply, Tuple=tuple)
    heads, width, generator = 4, 32, torch.Generator().manual_seed(seed)
    rows = TableRows(create_scheme(scheme), 256, parts=SCHEMES[scheme])
    frequencies = 1e4 ** -(torch.arange(0, width, 2) / width)
    table = table_of(rows, frequencies)
    layer = made["MRotaryEmbedding"]()
    layer.cos_sin_cache, layer.mrope_interleaved = table.cache, table.interleaved
    layer.mrope_section = None if table.sections is None else list(table.sections)
    layer.head_size = layer.rotary_dim = width
    layer.is_neox_style = True
    layer.apply_rotary_emb = SimpleNamespace(forward_native=apply)
    layer._match_cos_sin_cache_dtype = lambda query: table.cache.to(query.dtype)
    stream = Stream.of([[Text(5), Image(8, 8), Text(3)]])
    (request,) = rows.requests(stream)
    states = torch.randn(2, 1, heads, stream.shape[1], width, generator=generator)
    flat = [x[0].transpose(0, 1).flatten(1) for x in states]
    rotated = layer.forward_native(request.ids, *flat)
    ids = rows.scheme.coordinates(stream).ids
    turn = rotation(ids, frequencies, rows.scheme.allocation(len(frequencies)))
    expected = [x[0].transpose(0, 1).flatten(1) for x in (turn.query(states[0]), turn.key(states[1]))]
    difference = max(float((a - b).abs().max()) for a, b in zip(rotated, expected, strict=True))
    return {"scheme": scheme, "parts": rows.parts, "tokens": stream.shape[1], "max_difference": difference}


def measured(engine: Engine, families: Sequence[str], prompts: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield a row per family, then a row per scheme."""
    import transformers

    made = {"vllm": vllm_positions, "sglang": sglang_positions}[engine.name]
    about = {"engine": engine.name, "version": engine.version}
    for name in families:
        config = getattr(transformers, FAMILIES[name].config)(text_config=FAMILIES[name].text)
        with torch.device("meta"):
            model = transformers.AutoModelForImageTextToText.from_config(config)
        stock = family_of(config).own(config)
        for after in ("side", "max"):
            scheme = create_scheme(stock, after=after)
            served = serve_positions(model, scheme, positions=512, grid_thw=(4, 8, 8))
            function = made(engine, FAMILIES[name], served.config)
            row = compare_positions(served, function, FAMILIES[name], prompts, seed)
            yield about | {"family": name, "scheme": str(scheme)} | row
    for scheme in SCHEMES:
        yield about | compare_rotations(engine, scheme, seed)


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--vllm", type=Path, help="wheel or folder; the installed package by default")
    parser.add_argument("--sglang", type=Path, help="wheel or folder; the installed package by default")
    parser.add_argument("--families", nargs="*", default=list(FAMILIES))
    parser.add_argument("--prompts", type=int, default=200)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path, default=RESULTS / "engine_positions.json")
    args = parser.parse_args()
    rows = []
    for name in ("vllm", "sglang"):
        for row in measured(Engine(name, getattr(args, name)), args.families, args.prompts, args.seed):
            print(json.dumps(row))
            rows.append(row)
    import transformers

    versions = {
        "vispe": vispe.__version__,
        "torch": torch.__version__,
        "transformers": transformers.__version__,
    }
    args.out.write_text(json.dumps({"versions": versions, "seed": args.seed, "rows": rows}, indent=1) + "\n")


if __name__ == "__main__":
    main()
