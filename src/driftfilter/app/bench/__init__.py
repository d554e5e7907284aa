"""``driftfilter bench``."""
