"""N(μ, Σ): beliefs and the structures of their covariances."""
