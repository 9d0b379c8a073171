"""Golden cases of MuViT: coordinates of crops of several magnifications, rotated queries and keys, gradients."""

import vispe
from tests.golden.adapters._rotary import requested
from vispe.grid.crops import crop_positions


def run(case):
    case.ignore("seed", "how the case was made")
    yield "float64", _run(case)


def _run(case):
    heads, width, size = (case.config(name) for name in ("num_heads", "head_dim", "size"))
    encoding = vispe.create_encoding(
        "rope_muvit",
        dim=heads * width,
        num_heads=heads,
        axes=len(size),
        temperature=case.config("theta", 10000.0),
    ).double()
    if list(encoding.axis_dims) != list(case.config("axis_dims", encoding.axis_dims)):
        raise ValueError("axis_dims are not those of head_dim")
    inputs = {name: case.param(name).double() for name in case.params}
    encoding.load_state_dict({**encoding.state_dict(), **inputs})
    q, k = (case.input(name).double().requires_grad_() for name in "qk")
    batch, boxes = case.config("batch", len(q)), None
    if "bbox" in case.inputs:
        boxes = case.input("bbox").double()
    pos = crop_positions(
        size, case.config("patch_size"), levels=case.config("levels"), boxes=boxes, edges="box"
    )
    if boxes is None:
        pos = pos.replace(coords=pos.coords.double())
    transform = encoding.transform(pos, 0)
    result = {"q_rot": transform.query(q), "k_rot": transform.key(k)}
    result["coords"] = pos.coords.expand(batch, -1, -1)
    result["scores"] = result["q_rot"] @ result["k_rot"].mT
    if case.backward(cotangent=result["scores"]):
        result |= {"grad.q": q.grad, "grad.k": k.grad}
        result |= {f"grad.{name}": p.grad for name, p in encoding.named_parameters()}
    return requested(case, result)
