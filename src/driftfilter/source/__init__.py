"""p(θ_S given D_S): what source data say about the parameters."""
