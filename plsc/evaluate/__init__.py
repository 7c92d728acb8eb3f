"""How good are the embeddings? Embed images, verify pairs, draw the result.

The pictures are in `plsc.evaluate.plots` and `plsc.evaluate.hardest`, which import matplotlib.
"""
