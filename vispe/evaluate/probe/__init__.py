"""How much position can be read from features, layer by layer, and what takes it away."""
