"""Where the time of a training step goes: a table, advice, and a trace for the usual viewers."""
