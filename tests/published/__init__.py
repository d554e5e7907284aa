"""Published methods as their authors wrote them: the oracles of the presets."""
