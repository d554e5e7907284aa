"""How it is computed: curvature, posterior, prediction, resets."""
