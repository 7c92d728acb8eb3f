"""Change the classes of a checkpoint: grow, drop, merge, reorder."""

from plsc.checkpoint.classes.change import change_classes, read_class_map

__all__ = ["change_classes", "read_class_map"]
