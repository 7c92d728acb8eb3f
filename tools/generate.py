"""Write what derives from the option table: the setters of Entry and the docs page of the options.

python tools/generate.py            writes plsc/config/setters.py and docs/options.md
python tools/generate.py --check    exits with 1 if one of them is out of date
"""

from __future__ import annotations

import argparse
import inspect
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from plsc.config import all_options  # noqa: E402
from plsc.config.option import OptionSpec, describe_kind  # noqa: E402
from plsc.heads import MARGINS  # noqa: E402

SETTERS_HEAD = '''"""The setters of Entry, one per option.

Written by tools/generate.py from the table in plsc/config; edit that instead.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from plsc.config import Options


class Setters:
    """Setters that check a value and put it into `options`; OptionError says what was expected."""

    options: Options
'''

PAGE_HEAD = """# Options

Written by `tools/generate.py` from the table in `plsc/config`; `plsc config` prints the same with the
values in effect. An option is set by its setter (`Entry`), by a flag (`plsc train --train.batch_size 64`)
or in a YAML file (`plsc train --config run.yaml`).

The column *checkpoint*: what the script does not set comes from a checkpoint whenever its network is used
(`model`), when its run is resumed (`run`), or never: [What a
checkpoint decides](checkpoints.md#what-a-checkpoint-decides).
"""


def annotation(kind: Any) -> str:
    """Return the type as a setter takes it."""
    text = kind.__name__ if isinstance(kind, type) and not hasattr(kind, "__args__") else str(kind)
    text = text.replace("typing.Any", "Any")
    text = re.sub(r"tuple\[(dict\[.*?\]), \.\.\.\]", r"Sequence[\1]", text)
    return re.sub(r"tuple\[(int|float|str)[^]]*\]", r"Sequence[\1]", text)


def setter(spec: OptionSpec) -> str:
    """Return the source of one setter."""
    meaning = f"Set ``{spec.path}``: {spec.meaning}. Default: {spec.default!r}."
    indent = " " * 8
    doc = f'{indent}"""{meaning}"""'
    if len(doc) > 110:
        body = textwrap.fill(meaning, 104, initial_indent=indent, subsequent_indent=indent)
        doc = f'{indent}"""{body.strip()}\n{indent}"""'
    return (
        f"\n    def {spec.setter}(self, {spec.argument}: {annotation(spec.kind)}) -> None:\n"
        f'{doc}\n        self.options.set("{spec.path}", {spec.argument})\n'
    )


def setters() -> str:
    """Return the source of plsc/config/setters.py."""
    return SETTERS_HEAD + "".join(setter(spec) for spec in all_options())


def page() -> str:
    """Return docs/options.md."""
    lines, group = [PAGE_HEAD], ""
    for spec in all_options():
        if spec.group != group:
            group = spec.group
            lines.append(
                f"\n## {group}\n\n| option | setter | type | default | checkpoint | meaning |\n"
                "|---|---|---|---|---|---|"
            )
        default = "not set" if spec.default is None else f"`{spec.default}`"
        lines.append(
            f"| `{spec.path}` | `{spec.setter}({spec.argument})` | {describe_kind(spec.kind)} | "
            f"{default} | {spec.decides} | {spec.meaning} |"
        )
    return "\n".join(lines) + "\n" + losses()


LOSSES_HEAD = """
## Losses

`dist_<loss>` has the class weights sharded over the ranks, `<loss>` all of them on every rank. c is the
cosine between a sample and its class, theta its angle; the logit of the class is scale * psi.

| loss | formula | arguments of `build_margin` |
|---|---|---|
"""


def losses() -> str:
    """Return the table of the losses, from the margins' docstrings and constructors."""
    lines = []
    for name, margin in MARGINS.items():
        formula = re.sub(r" \([\w -]+ et al\..*|\.$", "", str(margin.__doc__).splitlines()[0])
        options = inspect.signature(margin).parameters.values()
        shown = ", ".join(f"`{option.name}={option.default}`" for option in options)
        lines.append(f"| `{name}` | {formula} | {shown} |\n")
    return LOSSES_HEAD + "".join(lines)


def main() -> int:
    """Write the files, or check them."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing, compare")
    check = parser.parse_args().check
    stale = []
    for path, text in (
        (ROOT / "plsc/config/setters.py", setters()),
        (ROOT / "docs/options.md", page()),
    ):
        if path.exists() and path.read_text(encoding="utf-8") == text:
            continue
        stale.append(path.relative_to(ROOT))
        if not check:
            path.write_text(text, encoding="utf-8")
    if check and stale:
        print(f"out of date: {', '.join(map(str, stale))}; run python tools/generate.py")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
