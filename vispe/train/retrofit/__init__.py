"""Retrofit by distillation: recipe, training loop, losses and checkpoints."""
