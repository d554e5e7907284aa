"""Source networks by name: where they come from, and the transform of their images."""
