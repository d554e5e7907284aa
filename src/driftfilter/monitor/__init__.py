"""Alarms: what an adapter's stream looks like, and when it looks wrong."""
