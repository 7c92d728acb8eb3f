"""What each tensor of a checkpoint is: its role, from which its key follows.

The manifest has the role of every tensor since format 2. That of format 1 is read from the key, here alone.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

BACKBONE = "backbone"  # name: of the network's state dict
CLASS_WEIGHTS = "class_weights"  # a parameter of a head: weight or bias
STATISTICS = "head_statistics"  # a buffer of a head: what its margin counts
OPTIMIZER = "optimizer"  # state of the network's optimizer
CLASS_OPTIMIZER = "class_optimizer"  # state of the optimizer of sharded class weights
RANK = "rank"  # of one rank alone: random generators, buffers that differ
CLASS_NAMES = "class_names"
EXTRA = "extra"
KINDS = (
    BACKBONE, CLASS_WEIGHTS, STATISTICS, OPTIMIZER, CLASS_OPTIMIZER, RANK, CLASS_NAMES, EXTRA
)  # fmt: skip


@dataclass(frozen=True)
class Role:
    """What a tensor is.

    of: of class weights, statistics and class names the head's name, empty where there is one head; of an
    optimizer's state the key of the tensor that it belongs to; of a rank its number. name: which one it is,
    such as ``weight``, ``momentum_buffer`` or ``random``.
    """

    kind: str
    name: str
    of: str = ""

    @property
    def key(self) -> str:
        """The tensor's key in the checkpoint."""
        if self.kind in (CLASS_WEIGHTS, STATISTICS):
            return f"{head_prefix(self.of)}.{self.name}"
        if self.kind == OPTIMIZER:
            is_momentum = self.name == "momentum_buffer"
            return f"momentum.{self.of}" if is_momentum else f"optimizer.{self.name}.{self.of}"
        if self.kind == CLASS_OPTIMIZER:
            return f"rows.{self.of.partition('.')[2]}.{self.name}"
        if self.kind == RANK:
            return f"rank{self.of}.{self.name}"
        if self.kind == CLASS_NAMES:
            return ".".join(filter(None, (CLASS_NAMES, self.of, self.name)))
        return f"{BACKBONE}.{self.name}" if self.kind == BACKBONE else self.name


def head_prefix(name: str) -> str:
    """Return what the keys of a head's tensors begin with; name: empty for a single head."""
    return f"heads.{name}" if name else "head"


_PATTERNS = (
    (BACKBONE, r"backbone\.(?P<name>.+)"),
    (CLASS_WEIGHTS, r"(head|heads\.(?P<of>[^.]+))\.(?P<name>weight|bias)"),
    (STATISTICS, r"(head|heads\.(?P<of>[^.]+))\.(?P<name>.+)"),
    (OPTIMIZER, r"(momentum|optimizer\.(?P<name>[^.]+))\.(?P<of>.+)"),
    (CLASS_OPTIMIZER, r"rows\.(?P<of>([^.]+\.)?(weight|bias))\.(?P<name>[^.]+)"),
    (RANK, r"rank(?P<of>\d+)\.(?P<name>.+)"),
    (EXTRA, r"(?P<name>.*)"),
)


def role_of_key(key: str) -> Role:
    """Return the role of a tensor of a checkpoint of format 1, or of one that is named as there."""
    matches = ((kind, re.fullmatch(pattern, key, re.DOTALL)) for kind, pattern in _PATTERNS)
    kind, found = next((kind, found) for kind, found in matches if found)
    role = {name: text for name, text in found.groupdict().items() if text is not None}
    if kind == CLASS_OPTIMIZER:
        role["of"] = f"{'heads' if '.' in role['of'] else 'head'}.{role['of']}"
    return Role(kind, **{"name": "momentum_buffer", **role})
