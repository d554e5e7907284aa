"""What is assumed: predictive model, observation, transition."""
