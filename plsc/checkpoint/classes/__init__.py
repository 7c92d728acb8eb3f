"""Change the classes of a checkpoint: grow, drop, merge, reorder."""

from plsc.checkpoint.classes.change import change_classes

__all__ = ["change_classes"]
