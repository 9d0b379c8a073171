"""Golden cases of the divergence between the heads of two models."""

from vispe.evaluate.attention.divergence import mixture_kl, strongest, symmetric_kl


def run(case):
    a, b = case.input("a"), case.input("b")
    causal = case.config("causal", True)
    # what the cases call jsd has the arguments of its divergences swapped
    jsd = mixture_kl(a, b, causal=causal)
    result = {
        "jsd": jsd,
        "symmetric_kl": symmetric_kl(a, b, causal=causal),
        "layer_distance": jsd.min().reshape(1),
        "argmax": strongest(a, causal=causal),
    }
    yield "heads", {name: value for name, value in result.items() if name in case.output_names}
