"""Fitted estimators of `PixelClassifier`, stored as plain arrays: the linear classifier and the trees."""
