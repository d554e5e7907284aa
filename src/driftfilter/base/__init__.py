"""What everything stands on: checks, inputs, random numbers."""
