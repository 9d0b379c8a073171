"""The rotary kernels compiled for GPUs that are not there: wide loads and stores, no spills."""

import pytest

pytest.importorskip("triton", reason="Triton is not installed")
CASES = [
    {"name": name, "arch": arch, "half": half, "pairs": pairs, "shared": shared}
    for arch in (80, 90, 100)
    for name, half, pairs, shared in (
        ("rotate", True, 32, True),
        ("rotate", True, 32, False),
        ("rotate", False, 16, True),
        ("grad_tables", False, 32, True),
    )
]


def report(name, arch, half, pairs, shared, width=64):
    """Return counts of instructions of one kernel for q and k in bfloat16, as slices of one projection."""
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from tests.attention.triton.compiled import machine_code
    from vispe.attention.backends.triton.rotary import kernels as rotary
    from vispe.attention.backends.triton.rotary.op import ELEMENTS, HEADS

    kernel = getattr(rotary, name)
    rest = triton.next_power_of_2(max(1, width - 2 * pairs))
    constants = {
        "D": width, "BR": rest, "E": width, "BS": rest, "PAIRS": pairs, "BP": pairs, "BM": ELEMENTS // pairs,
        "PER": HEADS if shared else 1, "COUNT": 2, "HALF": half, "BACK": False, "SHARED": shared,
    }  # fmt: skip
    signature, attrs, chosen = {}, {}, {}
    for place, argument in enumerate(kernel.arg_names):
        if argument in constants:
            signature[argument] = "constexpr"
            chosen[(place,)] = constants[argument]
            continue
        pointer = argument.isupper()
        letters = "*fp32" if argument.lstrip("D") in ("COS", "SIN") else "*bf16"
        signature[argument] = letters if pointer else "i32"
        if pointer or len(argument) == 2:
            attrs[(place,)] = [["tt.divisibility", 16]]
    source = ASTSource(kernel, signature, chosen, attrs)
    options = {"num_warps": 4, "enable_fp_fusion": True}
    ops = [
        op
        for _, op, _, _ in machine_code(
            triton.compile(source, target=GPUTarget("cuda", arch, 32), options=options)
        )
    ]

    def count(*starts):
        return sum(op.startswith(starts) for op in ops)

    return {
        "loads": count("LDG"), "wide_loads": sum(op.startswith("LDG") and ".128" in op for op in ops),
        "stores": count("STG"), "wide_stores": sum(op.startswith("STG") and ".128" in op for op in ops),
        "spills": count("LDL", "STL"), "shuffles": count("SHFL", "STS"), "all": len(ops),
    }  # fmt: skip


@pytest.mark.slow
def test_machine_code(fresh_kernels):
    for case in CASES:
        found = report(**case)
        assert found["spills"] == 0, (case, found)
        assert found["wide_loads"] == found["loads"], (case, found)
        assert found["wide_stores"] == found["stores"] > 0, (case, found)
