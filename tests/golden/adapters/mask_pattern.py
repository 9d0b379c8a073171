"""Golden cases of logits under a causal mask, in a stack without parameters."""

from vispe.evaluate.attention.causal_mask import stack_scores, without_offsets

NORMS = {"l2": "l2", "layer": "layer", "layernorm": "layer", "layer_norm": "layer", "ln": "layer"}


def run(case):
    x = case.input("x")
    scores = stack_scores(x, case.config("layers"), NORMS[case.config("norm", "l2").lower()])
    result = {"scores": scores, "scores_minus_offset": without_offsets(scores)}
    yield "stack", {name: value for name, value in result.items() if name in case.output_names}
