"""``driftfilter run``."""
