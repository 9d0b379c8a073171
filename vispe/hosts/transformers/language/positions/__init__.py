"""Positions of the tokens of a call of a converted model, and the state that its KV cache stores.

`pipeline.positions_of_call` runs the steps: `position_ids` splits what the caller passed, `token_index` numbers the
tokens, `coordinates` assigns coordinates of the scheme, and `kv_cache` holds the state for the next call.
"""
