"""Golden cases of the rules by which relevance is split between tokens and positions."""

from vispe.experimental.measures.saliency_rules import (
    rotated,
    split_epsilon,
    split_ratio,
    through_product,
    through_rotation,
    through_softmax,
)


def run(case):
    rule = case.config("rule")
    if rule == "rotary":
        yield rule, {name: value for name, value in rotary(case).items() if name in case.output_names}
        return
    split = {"add_epsilon": split_epsilon, "add_ratio": split_ratio}[rule]
    inputs = (case.input(name).double() for name in ("x", "e", "relevance"))
    tokens, positions = split(*inputs, case.config("epsilon"))
    yield rule, {"tokens": tokens.numpy(), "positions": positions.numpy()}


def rotary(case):
    options = {"layout": case.config("layout"), "eps": case.config("epsilon_add")}
    eps, scale = case.config("epsilon_matmul"), case.config("scale")
    q, k, v, cos, sin = (case.input(name).double() for name in ("q", "k", "v", "cos", "sin"))
    of_q, of_cos, of_sin = through_rotation(q, cos, sin, case.input("relevance").double(), **options)
    result = {"q": of_q, "cos": of_cos.sum(0), "sin": of_sin.sum(0)}
    # a whole head, whose output is its own relevance
    turned_q, turned_k = (x * cos + rotated(x, options["layout"]) * sin for x in (q, k))
    product = turned_q @ turned_k.mT
    logits = product * scale
    weights = logits.softmax(-1)
    out = weights @ v
    of_weights, of_v = through_product(weights, v, out, out, eps)
    of_logits = through_softmax(logits, weights, of_weights)
    both = through_product(turned_q, turned_k.mT, product, of_logits, eps)
    parts = [through_rotation(x, cos, sin, r, **options) for x, r in ((q, both[0]), (k, both[1].mT))]
    result |= {"attn_q": parts[0][0], "attn_k": parts[1][0], "attn_v": of_v}
    result |= {"attn_cos": (parts[0][1] + parts[1][1]).sum(0), "attn_sin": (parts[0][2] + parts[1][2]).sum(0)}
    return {name: value.numpy() for name, value in result.items()}
