"""Evaluate embeddings: embed images, verify pairs, plot the results (`plots` imports matplotlib)."""
