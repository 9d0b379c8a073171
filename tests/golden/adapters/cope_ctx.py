"""Golden cases of contextual counts, for explicit queries and logits."""

import torch

import vispe
from vispe import Grid


def run(case):
    if case.config("soft_onehot"):
        raise ValueError("the reference's soft one-hot does not run for tensors of heads")
    case.ignore("soft_onehot_temp", "there is no soft one-hot")
    batch, heads, queries, keys, width, most = (
        case.config(name) for name in ("B", "H", "Nq", "Nk", "D", "max_pos")
    )
    for route, shape in (("causal", (keys,)), ("column", (keys, 1))):
        q = case.input("q").double().requires_grad_()
        logits = case.input("attn_logits").double().requires_grad_()
        table = case.param("pos_emb").double().requires_grad_()
        encoding = vispe.create_encoding(
            "cope", dim=heads * (width + keys), num_heads=heads, max_pos=most, causal=route == "causal"
        ).double()
        # more channels, which the table does not read: there the product of queries and keys is the logits
        encoding.load_state_dict({"pos_emb": torch.cat([table.detach(), table.new_zeros(most, keys)], 1)})
        wide = torch.cat([q, logits], -1)
        eye = torch.eye(keys, dtype=q.dtype).expand(batch, heads, -1, -1)
        k = torch.cat([eye.new_zeros(batch, heads, keys, width), eye], -1)
        rows = []
        for i in range(queries):  # every query stands last, so that it counts all keys
            last = torch.cat([wide.new_zeros(batch, heads, keys - 1, width + keys), wide[:, :, i : i + 1]], 2)
            bias = encoding.bias(Grid(shape).positions(), 0)
            rows.append(bias.dense(q=last, k=k, scale=1.0)[:, :, -1])
        bias = torch.stack(rows, 2)
        case.backward(cotangent=bias)
        result = {"bias": bias, "grad.q": q.grad, "grad.attn_logits": logits.grad}
        result["grad.pos_emb"] = None if encoding.pos_emb.grad is None else encoding.pos_emb.grad[:, :width]
        yield route, {name: value for name, value in result.items() if name in case.output_names}
