"""What the command line says of wrong flags and files of options, in words of its user."""

import pytest

from plsc import cli
from plsc.errors import OptionError, failure_text
from plsc.flags import in_flags


def said_of(capsys, *arguments) -> str:
    assert cli.main([str(argument) for argument in arguments]) == 1
    error = capsys.readouterr().err
    assert error.startswith("plsc: error: ")
    assert len(error.splitlines()) == 1
    for word in ("<class", "Parser key", "Union", "NoneType", "set_"):
        assert word not in error
    return error


@pytest.mark.parametrize(
    ("flag", "value", "expected"),
    [
        ("train.batch_size", "abc", "--train.batch_size is 'abc'; expected an integer (training"),
        ("optim.lr", "fast", "--optim.lr is 'fast'; expected a number"),
        ("data.flip", "maybe", "--data.flip is 'maybe'; expected true or false"),
        ("head.class_num", "x", "--head.class_num is 'x'; expected an integer or null"),
        ("model.image_shape", "[3,112]", "is '[3, 112]'; expected a list of integers (channels,"),
        ("optim.step_boundaries", "[1,a]", "expected a list of integers"),
        ("train.epochs", "0", "train.epochs is 0; expected at least 1"),
        ("train.epochs", "0", "; see --train.epochs"),
        ("batch_size", "3", "no option --batch_size; did you mean 'train.batch_size'?"),
        ("lr", "3", "did you mean 'optim.lr'?"),
        (
            "config",
            "/none.yaml",
            "--config wants a YAML file of options, but /none.yaml cannot be read: No",
        ),
    ],
)
def test_a_wrong_flag_is_told_in_words_of_its_user(flag, value, expected, capsys):
    assert expected in said_of(capsys, "config", f"--{flag}", value)


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("train: {batch_size: abc}", ":1: train.batch_size is 'abc'; expected an integer"),
        (
            "\n\ntrain:\n  epochs: 1\n  batch_size: 0",
            ":5: train.batch_size is 0; expected between 1",
        ),
        ("optim.lr: fast", ":1: optim.lr is 'fast'; expected a number"),
        (
            "train: {batch_sise: 3}",
            ":1: there is no option 'train.batch_sise'; did you mean 'train.batch_size'?",
        ),
        (
            "train:\n  epochs: [1",
            ":2 is no YAML: expected ',' or ']', but got '<stream end>'; write options as lines",
        ),
        (
            "train:\n\tepochs: 1",
            ":2 is no YAML: found character '\\t' that cannot start any token; write",
        ),
        (
            "model:\ntrain: 3\n",
            ":2: train is '3'; it is a group: expected its options in lines below",
        ),
        (
            "optim: [a]",
            ":1: optim is a list; it is a group: expected its options in lines below it, inde",
        ),
        ("hello", " holds no options but a text; expected lines such as 'train:'"),
        ("", " is empty; expected lines such as 'train:'"),
        (b"\xff\xfe", " is no text in UTF-8 (byte 0)"),
        (b"a: \0", " is no YAML: unacceptable character"),
        ("[" * 100_000, " is no YAML: "),
        ("#" * 2**20 + "\n", " has more than 1048576 bytes"),
    ],
)
def test_what_is_wrong_in_a_file_of_options_is_told_with_its_name_and_line(
    text, expected, tmp_path, capsys
):
    file = tmp_path / "run.yaml"
    file.write_bytes(text.encode() if isinstance(text, str) else text)
    assert f"error: {file}{expected}" in said_of(capsys, "config", f"--config={file}")


def test_yaml_aliases_are_refused_before_they_are_expanded(tmp_path, capsys):
    bomb = "&a [x, x]"
    for level in range(40):  # 2^41 strings
        bomb = f"&a{level} [{bomb}, *a{level - 1 if level else ''}]"
    file = tmp_path / "run.yaml"
    file.write_text(f"optim:\n  groups: {bomb}\n")
    assert f"{file} has the YAML alias *a in line 2; expected" in said_of(
        capsys, "config", "--config", file
    )
    for arguments in (
        ["config", "--optim.groups", bomb],
        ["config", f"--optim.groups={bomb}"],
        ["config", "--config", f"optim: {{groups: {bomb}}}"],
        ["plan", "--classes", bomb],
    ):
        assert " has the YAML alias *a in line 1; expected" in said_of(capsys, *arguments)


def test_a_string_that_begins_with_a_star_is_a_string(capsys):
    assert cli.main(["config", "--data.image_column", "*a&b"]) == 0
    assert "image_column: '*a&b'" in capsys.readouterr().out


def test_a_wrong_flag_beside_a_file_of_options_is_told_as_the_flag(tmp_path, capsys):
    file = tmp_path / "run.yaml"
    file.write_text("train: {batch_size: 3}")
    said = said_of(capsys, "config", "--config", file, "--train.batch_size", "abc")
    assert "error: --train.batch_size is 'abc'" in said


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (
            [],
            "a verb must be given, one of train, test, predict, profile, dominant, config, plan, data, ch",
        ),
        (["trian"], "no verb 'trian'; known: train, test,"),
        (["data", "insp"], "did you mean 'inspect'?"),
        (["data"], "a verb must be given"),
        (["dominant"], "--output must be given; see plsc dominant --help"),
        (["data", "inspect", "x", "--check"], "--check needs a value behind it"),
        (["data", "inspect", "x", "--check", "1.5"], "--check is '1.5'; expected a whole number"),
        (
            ["data", "inspect", "x", "--chek", "0"],
            "plsc data inspect has no option --chek; did you mean '--check'?; see plsc data inspect --help",
        ),
        (["data", "inspect", "x", "y"], "plsc data inspect does not take 'y'"),
        (["checkpoint", "lst"], "did you mean 'list'?"),
    ],
)
def test_a_wrong_verb_or_a_missing_value_is_told_in_words_of_its_user(arguments, expected, capsys):
    assert expected in said_of(capsys, *arguments)


def test_setters_become_flags_with_their_values():
    text = "see set_lr(); set_num_workers(0), set_sync_batch_norm(True), or set_last_batch('pad')"
    assert in_flags(text) == (
        "see --optim.lr; --data.num_workers 0, --model.sync_batch_norm true, or --data.last_batch pad"
    )
    assert in_flags("set_checkpoint_dir('my run')") == "--checkpoint.load_dir 'my run'"
    assert in_flags("set_nothing(1) of preset_lr()") == "set_nothing(1) of preset_lr()"
    assert in_flags("by set_label_column()", short=True) == "by --label_column"


def test_a_script_still_hears_of_setters_after_the_command_ran(capsys):
    assert cli.main(["config", "--train.epochs", "0"]) == 1
    assert "see --train.epochs" in capsys.readouterr().err
    assert "see set_train_epochs()" in failure_text(OptionError("see set_train_epochs()"))
