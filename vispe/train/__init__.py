"""Retrofit: take positional bias out of a pretrained vision transformer by distillation.

The teacher is the model as it is; the student has the same weights and another positional encoding, and learns the
teacher's features without the channels that tell positions. `vispe.train.retrofit.recipe.retrofit` runs it all, and
so does the command `vispe retrofit`. Importing this package alone imports nothing heavy.
"""
