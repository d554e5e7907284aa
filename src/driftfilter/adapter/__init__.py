"""The front door: a model that adapts while it predicts."""
