"""Torch modules as predictive models."""
