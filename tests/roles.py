"""The role of a tensor from its key, for tests that write checkpoints by hand."""

from __future__ import annotations

import re

from plsc.checkpoint.manifest import (
    BACKBONE,
    CLASS_OPTIMIZER,
    CLASS_WEIGHTS,
    EXTRA,
    OPTIMIZER,
    RANK,
    STATISTICS,
    Role,
)

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
    """Return the role of a tensor from its key."""
    matches = ((kind, re.fullmatch(pattern, key, re.DOTALL)) for kind, pattern in _PATTERNS)
    kind, match = next((kind, match) for kind, match in matches if match)
    role = {name: text for name, text in match.groupdict().items() if text is not None}
    if kind == CLASS_OPTIMIZER:
        role["of"] = f"{'heads' if '.' in role['of'] else 'head'}.{role['of']}"
    return Role(kind, **{"name": "momentum_buffer", **role})
