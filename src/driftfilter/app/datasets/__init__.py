"""Published data sets: where they are, what they contain, and whether a folder has all of it."""
