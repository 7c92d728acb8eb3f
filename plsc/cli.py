"""The plsc command: the options as flags and in a file, one verb each."""

from __future__ import annotations

import functools
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import yaml
from jsonargparse import ActionConfigFile, ArgumentError, ArgumentParser, Namespace

import plsc.checkpoint_cli as checkpoint_cli
import plsc.data_cli as data_cli
from plsc.config import Options, all_options
from plsc.config_file import check_config_files, place_in_config_file, refuse_aliases
from plsc.errors import OptionError, PlscError, worded
from plsc.flags import explain, in_flags, option_flags
from plsc.plan import ARGUMENTS as PLAN_ARGUMENTS
from plsc.plan import plan
from plsc.verbs import in_words, report
from plsc.version import __version__

_VERBS = {
    "train": "train, from the start or from --checkpoint.load_dir",
    "test": "verify the network of --checkpoint.load_dir on the pair files",
    "predict": "write the embeddings of the dataset's images to a .npz file",
    "profile": "make some steps of the training, and print where their time goes; nothing is saved",
    "dominant": "write the checkpoint of --checkpoint.load_dir with each class's dominant sub-centre alone",
    "config": "print the options in effect, with their defaults and meanings, as YAML",
}
# Have verbs and flags of their own.
_FAMILIES = {
    "data": ("prepare, convert and look at datasets; see plsc data --help", data_cli.main),
    "checkpoint": (
        "look at, check and change checkpoints; see plsc checkpoint --help",
        checkpoint_cli.main,
    ),
}
_PLAN = "print the memory, arithmetic and network of a step that a head and a backbone would need"


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command line; return the exit code."""
    try:
        code = _main(arguments)
        sys.stdout.flush()
    except KeyboardInterrupt:  # the second one, where the first stops in good order
        print("plsc: stopped at once; what was saved before stays", file=sys.stderr)
        code = 128 + signal.SIGINT
    except BrokenPipeError:  # who reads has seen enough: plsc plan ... | head
        os.dup2(
            os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno()
        )  # for what Python flushes at its end
        code = 128 + signal.SIGPIPE
    return code


def _main(arguments: Sequence[str] | None) -> int:
    if "" not in sys.path:
        sys.path.insert(0, "")  # as `python script.py` would: people's own modules lie here
    arguments = sys.argv[1:] if arguments is None else arguments
    if arguments and arguments[0] in _FAMILIES:
        return _FAMILIES[arguments[0]][1](arguments[1:])
    with worded(in_flags):
        try:
            if not arguments:
                verbs = ", ".join([*_VERBS, "plan", *_FAMILIES])
                raise OptionError(f"a verb must be given, one of {verbs}; see plsc --help")
            refuse_aliases(arguments)
            if arguments[0] in _VERBS:
                check_config_files(arguments)
            return _run(_parse(arguments), arguments)
        except PlscError as error:
            return report(error, in_flags)


def _parse(arguments: Sequence[str]) -> Namespace:
    parser = ArgumentParser(
        prog="plsc",
        description="Train classifiers over very many classes.",
        version=__version__,
        exit_on_error=False,
        allow_abbrev=False,
    )
    verbs = parser.add_subcommands(dest="verb")
    for name, meaning in _VERBS.items():
        verb = ArgumentParser(
            description=f"{meaning[0].upper()}{meaning[1:]}.",
            exit_on_error=False,
            allow_abbrev=False,
        )
        verb.add_argument("--config", action=ActionConfigFile, help="YAML file of options")
        if name == "predict":
            verb.add_argument("--output", type=str, default="embeddings.npz", help="file to write")
        if name == "profile":
            verb.add_argument("--output", type=str, default="profile", help="folder for the traces")
            verb.add_argument("--steps", type=int, default=20, help="steps that are measured")
        if name == "dominant":
            verb.add_argument("--output", type=str, required=True, help="checkpoint to write")
        for spec in all_options():
            verb.add_argument(
                f"--{spec.path}", type=spec.kind, default=spec.default, help=spec.meaning
            )
        verbs.add_subcommand(name, verb, help=meaning)
    verbs.add_subcommand("plan", _plan_parser(), help=_PLAN)
    for name, (meaning, _) in _FAMILIES.items():
        verbs.add_subcommand(
            name, ArgumentParser(exit_on_error=False, allow_abbrev=False), help=meaning
        )
    try:
        return parser.parse_args(arguments, defaults=False)
    except (ArgumentError, OverflowError) as error:  # the latter: a number that no float can hold
        called = next((word for word in arguments if word in (*_VERBS, "plan")), "")
        flags = _plan_flags() if called == "plan" else option_flags()
        program = f"plsc {called}".rstrip()
        place = functools.partial(place_in_config_file, arguments=arguments)
        raise OptionError(explain(in_words(str(error)), flags, program, place)) from error


def _plan_parser() -> ArgumentParser:
    parser = ArgumentParser(
        description=f"{_PLAN[0].upper()}{_PLAN[1:]}.", exit_on_error=False, allow_abbrev=False
    )
    for argument in PLAN_ARGUMENTS:
        how: dict[str, Any] = {"type": argument.kind, "default": argument.default}
        if argument.kind is bool:
            how |= {"nargs": "?", "const": True}
        names = [f"--{name}" for name in (argument.name, argument.option) if name]
        parser.add_argument(*names, help=argument.meaning, **how)
    return parser


def _plan_flags() -> dict[str, tuple[Any, str]]:
    return {
        name: (argument.kind, argument.meaning)
        for argument in PLAN_ARGUMENTS
        for name in (argument.name, argument.option)
        if name
    }


def _run(parsed: Namespace, arguments: Sequence[str]) -> int:
    given = parsed[parsed.verb] if parsed.get(parsed.verb) else Namespace()
    if parsed.verb == "plan":
        print(plan(**vars(given)).render())
        return 0
    options = _read_options(given, arguments)
    if parsed.verb == "config":
        print(render_options(options))
        return 0
    from plsc.entry import Entry  # loads torch: not needed for --help

    entry = Entry()
    entry.options = options
    if parsed.verb == "train":
        result = entry.train()
        if entry.is_main:
            print(
                f"trained {result.steps} step{'s' * (result.steps != 1)}; last checkpoint {result.checkpoint}"
            )
    elif parsed.verb == "profile":
        entry.profile(given.get("steps", 20), given.get("output", "profile"))
    elif parsed.verb == "test":
        entry.test()
    elif parsed.verb == "dominant":
        entry.keep_dominant(given.output)
    else:
        output = Path(given.get("output") or "embeddings.npz")
        if not output.absolute().parent.is_dir():
            raise OptionError(f"--output is {output}, but there is no folder {output.parent}")
        prediction = entry.predict()
        if entry.is_main:
            _write_prediction(output, prediction)
    return 0


def _read_options(given: Namespace, arguments: Sequence[str] = ()) -> Options:
    options = Options()
    for spec in all_options():
        value = given.get(spec.path, spec)
        if value is spec:
            continue
        try:
            options.set(spec.path, value)
        except OptionError as error:
            place = place_in_config_file(spec.path, str(value), arguments)
            if place is None:
                raise
            raise OptionError(f"{place}: {error}") from error
    return options


def render_options(options: Options) -> str:
    """Return the options as YAML that --config reads, each with its meaning.

    Those that were not set are comments: in a file, an option that stands there counts as set, and a loss
    refuses options that it does not have.
    """
    lines: list[str] = []
    group = ""
    for spec in all_options():
        if spec.group != group:
            group = spec.group
            lines.append(f"{group}:")
        lines.append(f"  # {spec.meaning} (default: {_plain(spec.default)})")
        mark = "" if spec.path in options.explicit else "# "
        lines.append(f"  {mark}{spec.name}: {_plain(options.get(spec.path))}")
    return "\n".join(lines)


def _plain(value: Any) -> str:
    if isinstance(value, tuple):
        value = list(value)
    return yaml.safe_dump(value, default_flow_style=True).replace("\n...", "").strip()


def _write_prediction(path: Path, prediction: Any) -> None:
    with path.open("wb") as file:
        np.savez(
            file,
            embeddings=prediction.embeddings,
            names=np.array(prediction.names),
            labels=prediction.labels,
        )
    print(f"wrote {len(prediction.embeddings)} embeddings to {path}")


if __name__ == "__main__":
    sys.exit(main())
