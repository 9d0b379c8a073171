"""The retrofit by distillation: recipe, loop, losses, checkpoints."""
