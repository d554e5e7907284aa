"""Readers of streams of data: one small module for each shape in which data lie in files."""
