"""Evaluate embeddings: embed images, verify pairs, plot the results (`plots` imports matplotlib).

Functions that compute from arrays take tensors, too, of any device.
"""

from plsc.evaluate.arrays import take_tensors

for _name in (
    "all_pairs", "capacity", "classification", "curves", "groups", "identification",
    "retrieval", "templates", "verification",
):  # fmt: skip
    take_tensors(f"{__name__}.{_name}")
