"""What the command line says of wrong flags and files of options, in words of its user."""

import contextlib

import pytest

from plsc import cli
from plsc.cli.parser import Argument, Command, CommandParser, Group, word
from plsc.config import all_options
from tests.command_line import options_from


def said_of(capsys, *arguments) -> str:
    assert cli.main([str(argument) for argument in arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("plsc: error: ")
    assert len(error.splitlines()) == 1
    assert not any(internal in error for internal in ("<class", "Union", "NoneType", "set_"))
    return error


@pytest.mark.parametrize(
    ("text", "place", "noun"),
    [
        ("\n\ntrain:\n  epochs: 1\n  batch_size: 0", ":5:", "train.batch_size"),
        ("optim.lr: fast", ":1:", "optim.lr"),
        ("train: {batch_sise: 3}", ":1:", "'train.batch_size'"),
        ("train:\n  epochs: [1", ":2", "YAML"),
        ("model:\ntrain: 3\n", ":2:", "'train'"),
        ("hello", "", "options"),
        (b"\xff\xfe", "", "utf-8"),
        (b"a: \0", "", "YAML"),
        ("[" * 100_000, "", "YAML"),
    ],
)
def test_what_is_wrong_in_a_file_of_options_is_told_with_its_name_and_line(
    text, place, noun, tmp_path, capsys
):
    file = tmp_path / "run.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    said = said_of(capsys, "config", f"--config={file}")
    assert f"error: {file}{place}" in said
    assert noun in said


def test_a_string_that_begins_with_a_star_is_a_string(capsys):
    assert cli.main(["config", "--data.val_targets", "*a&b"]) == 0
    assert "val_targets: '*a&b'" in capsys.readouterr().out
    assert cli.main(["config", "--data.dataset_dir", "x " * 80 + "x"]) == 0
    assert f"dataset_dir: {'x ' * 80}x " in capsys.readouterr().out  # on one line


def test_numbers_lists_and_nulls_are_read_as_yaml_has_them(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text(
        "train.epochs: 4\noptim:\n  lr: 1e-3\n  optimizer_arguments: {eps: 1e-7}\n"
        "data:\n  dataset_dir: 2020-01-01\n  val_targets: null\nhead:\ntrain:\n  batch_size: '8'\n"
    )
    options = options_from("--config", str(file), "--model.image_shape=1,8,8", "--no-data.flip")
    assert options.values == {
        "train.epochs": 4, "optim.lr": 1e-3, "optim.optimizer_arguments": {"eps": 1e-7},
        "data.dataset_dir": "2020-01-01", "data.val_targets": None, "train.batch_size": 8,
        "model.image_shape": (1, 8, 8), "data.flip": False,
    }  # fmt: skip
    assert options_from("--head.class_num", "None", "--data.val_targets", "None").values == {
        "head.class_num": None, "data.val_targets": "None"
    }  # fmt: skip
    assert options_from("--optim.lr=2", "--config", str(file)).optim.lr == 1e-3  # the last one counts


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["config", "--train.batch_size", "abc"], "train.batch_size"),
        (["config", "--optim.lr", "fast"], "number"),
        (["config", "--data.flip", "maybe"], "maybe"),
        (["config", "--model.image_shape", "3x112"], "integers"),
        (["config", "--train.epochs", "2.5"], "train.epochs"),
        (["config", "--batch_size", "3"], "--train.batch_size"),
        (["config", "--config", "/none.yaml"], "'/none.yaml'"),
        (["trian"], "'train'"),
        (["data", "insp"], "'inspect'"),
        (["predict", "--output", "x.csv"], ".npz"),
        (["data", "inspect", "x", "--check"], "--check"),
        (["data", "inspect", "x", "--check", "1.5"], "integer"),
        (["data", "inspect", "x", "--chek", "0"], "--check"),
        (["data", "inspect", "x", "y"], "argument y"),
        (["plan", "--head.class_num", "9", "--rankz", "8"], "--ranks"),
        (["plan"], "head.class_num"),
    ],
)
def test_a_wrong_verb_flag_or_value_is_told_in_words_of_its_user(arguments, expected, capsys):
    assert expected in said_of(capsys, *arguments)


@pytest.mark.parametrize("words", ["predict --output URL", "data pack URL y", "launch --log-dir URL x"])
def test_a_url_is_no_local_folder(words, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert cli.main(words.replace("URL", "s3://me:SECRET@bucket/x").split()) == 1
    assert "SECRET" not in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


def printed(capsys, *words: str) -> str:
    with contextlib.suppress(SystemExit):
        assert cli.main(words) == 0
    return capsys.readouterr().out


def verbs(group=cli.COMMANDS, before=()):
    for name, found in group.commands.items():
        yield from verbs(found, (*before, name)) if isinstance(found, Group) else [(*before, name)]


def test_the_help_of_a_verb_fits_on_a_screen_and_that_of_plsc_has_every_verb(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    overview = printed(capsys)
    assert sorted(name for names in cli.COMMANDS.sections.values() for name in names) == sorted(
        cli.COMMANDS.commands
    )
    for words in verbs():
        assert words[-1] in overview
        said = printed(capsys, *words, "--help")
        assert f"usage: plsc {' '.join(words)}" in said
        assert len(said.splitlines()) <= 60


def test_plsc_options_prints_the_table(capsys):
    said = " ".join(printed(capsys, "options").split())
    for spec in all_options():
        assert f"--{spec.path} (" in said
        assert " ".join(spec.meaning.split()) in said
    head = printed(capsys, "options", "head")
    assert "--head.margin (a number or None" in head
    assert "--optim" not in head
    assert "--optim.schedule" in printed(capsys, "options", "cosine")
    assert "did you mean" in said_of(capsys, "options", "train.batch_sise")


@pytest.mark.parametrize(
    ("words", "flip", "checkpoint"),
    [
        (["5", "--data.flip"], True, "5"),
        (["--data.flip", "5"], True, "5"),
        (["--no-data.flip", "5"], False, "5"),
        (["--output=x", "--no-data.flip", "5", "--k", "2"], False, "5"),
    ],
)
def test_a_switch_is_a_switch_and_a_checkpoint_may_stand_anywhere(words, flip, checkpoint):
    arguments = [
        word("checkpoint", "x", None),
        Argument("output", str, None, "x"),
        Argument("k", int, 1, "x"),
    ]
    given = CommandParser("x", Command("x", print, arguments, options=())).read(words)
    assert (given["options"].data.flip, given["checkpoint"]) == (flip, checkpoint)
