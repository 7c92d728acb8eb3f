"""How good are the embeddings? Embed images, verify pairs, draw the result (`plots` imports matplotlib)."""
