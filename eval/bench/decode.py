"""Benchmark of the time per generated token of vision-language models with a position scheme, relative to stock.

    python eval/bench/decode.py

Random models of two layers with one image, one thread and a KV cache. Both models of a pair decode tokens interleaved,
so that a noisy machine slows both equally; a time is the median CPU time of the process over tokens. Writes
eval/results/decode_cpu.json.
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import timing
import torch

import vispe

OUT = Path(__file__).parents[1] / "results" / "decode_cpu.json"
IMAGE = 180
TEXT = {
    "hidden_size": 72, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 6,
    "num_key_value_heads": 3, "head_dim": 24, "vocab_size": 192, "tie_word_embeddings": False,
    "pad_token_id": 0, "bos_token_id": None, "eos_token_id": None,
}  # fmt: skip
ROPE = {"rope_type": "default", "rope_theta": 1e4}


def main() -> None:
    """Time every family with every scheme."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--families", nargs="+", choices=BUILDERS, default=list(BUILDERS))
    parser.add_argument("--schemes", nargs="+", default=["rope1d", "mrope_i", "vrope"])
    parser.add_argument("--tokens", type=int, default=300, help="timed tokens of each model")
    parser.add_argument("--out", type=Path, default=OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    rows = []
    for family in args.families:
        stock, inputs = BUILDERS[family]()
        for scheme in args.schemes:
            model = vispe.convert(copy.deepcopy(stock), scheme)
            base, ours = timed(stock, model, inputs, args.tokens)
            row = {"family": family, "scheme": scheme, "stock_ms": base, "ms": ours}
            row |= {"more_ms": round(ours - base, 3), "ratio": round(ours / base, 3)}
            rows.append(row)
            print(row, flush=True)
    result = {"environment": timing.environment("transformers", "vispe"), "tokens": args.tokens, "rows": rows}
    args.out.write_text(json.dumps(result, indent=2) + "\n")


def timed(stock: Any, model: Any, inputs: dict[str, Any], tokens: int) -> tuple[float, float]:
    """Return the milliseconds of CPU time per token of both models, measured interleaved."""
    runs = [steps(one, inputs) for one in (stock, model)]
    times: tuple[list[float], list[float]] = ([], [])
    for number in range(tokens + 20):
        for which in (0, 1) if number % 2 else (1, 0):
            times[which].append(next(runs[which]))
    base, ours = (round(1e3 * statistics.median(t[20:]), 3) for t in times)
    return base, ours


def steps(model: Any, inputs: dict[str, Any]) -> Iterator[float]:
    """Generate greedily without a stop token, with the methods that `generate` calls; yield the seconds per token."""
    kwargs = {k: v for k, v in inputs.items() if k != "input_ids"} | {"use_cache": True}
    ids = inputs["input_ids"]
    with torch.no_grad():
        keys = model._prepare_position_ids_for_generation(ids, kwargs)
        kwargs["position_ids"] = keys
        first = True
        while True:
            start = time.process_time()
            arguments = ids if first else ids[:, -1:]
            named = model.prepare_inputs_for_generation(arguments, is_first_iteration=first, **kwargs)
            outputs = model(**named, return_dict=True)
            kwargs = model._update_model_kwargs_for_generation(outputs, kwargs)
            ids = torch.cat([ids, outputs.logits[:, -1:].argmax(-1)], 1)
            first = False
            yield time.process_time() - start


def llava() -> tuple[Any, dict[str, Any]]:
    """Return a LLaVA of two layers and a prompt with an image of 3 x 3 tokens."""
    import transformers

    vision = {"hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2}
    vision |= {"model_type": "clip_vision_model", "patch_size": 4, "image_size": 12}
    text = TEXT | {"model_type": "qwen2", "rope_parameters": dict(ROPE)}
    config = transformers.LlavaConfig(
        text_config=text, vision_config=vision, image_seq_length=9, image_token_id=IMAGE
    )
    torch.manual_seed(0)
    model = transformers.LlavaForConditionalGeneration(config).eval()
    return model, prompt(9) | {"pixel_values": torch.randn(1, 3, 12, 12)}


def qwen3_vl() -> tuple[Any, dict[str, Any]]:
    """Return a Qwen3-VL of two layers and a prompt with an image of 2 x 3 tokens."""
    import transformers

    vision = {"depth": 2, "num_heads": 2, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2}
    vision |= {"hidden_size": 32, "intermediate_size": 40, "out_hidden_size": 72}
    vision |= {"num_position_embeddings": 16, "deepstack_visual_indexes": [0, 1]}
    text = TEXT | {"rope_parameters": ROPE | {"mrope_section": [4, 4, 4]}}
    tokens = {"video_token_id": 181, "vision_start_token_id": 182, "vision_end_token_id": 183}
    config = transformers.Qwen3VLConfig(
        text_config=text, vision_config=vision, image_token_id=IMAGE, **tokens
    )
    torch.manual_seed(0)
    model = transformers.Qwen3VLForConditionalGeneration(config).eval()
    grid = {"pixel_values": torch.randn(24, 96), "image_grid_thw": torch.tensor([[1, 4, 6]])}
    arguments = prompt(6)
    return model, arguments | grid | {"mm_token_type_ids": (arguments["input_ids"] == IMAGE).long()}


def prompt(tokens: int) -> dict[str, Any]:
    """Return a prompt with this number of image tokens."""
    ids = torch.tensor([[3, 5, 182, *[IMAGE] * tokens, 183, 7, 9]])
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


BUILDERS = {"llava": llava, "qwen3_vl": qwen3_vl}

if __name__ == "__main__":
    main()
