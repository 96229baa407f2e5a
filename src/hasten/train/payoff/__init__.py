"""The payoff predictor: labels by replay of the model's own text, fitting, and what it is worth."""
