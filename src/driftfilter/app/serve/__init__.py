"""``driftfilter serve``: one posterior for each tenant over one network, behind HTTP."""
