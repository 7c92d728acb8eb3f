"""One option table; setters, flags and checkpoints derive from it."""

import dataclasses
import inspect
import os
import pathlib
import re
import sys
from typing import Any

import numpy as np
import pytest
from torch import nn

from plsc import names
from plsc.config import Options, all_options
from plsc.config.text import render_options
from plsc.entry import Entry
from plsc.errors import CheckpointError, OptionError, PlscError
from plsc.heads.margins import MARGINS
from plsc.models import NETWORKS
from plsc.optim import OPTIMIZERS
from plsc.parallel.world import World
from plsc.predict.protocols import Evaluator, ProtocolData
from plsc.train.callbacks import UserParts
from plsc.train.log import LOGGERS
from plsc.train.run import CALLBACKS, build_run
from tests.command_line import options_from
from tests.images import write_dataset

SPECS = list(all_options())


def test_the_lines_of_the_docs_restore_the_training_of_plsc_0_1(tmp_path):
    page = (pathlib.Path(__file__).parents[2] / "docs/migrate.md").read_text(encoding="utf-8")
    lines = re.search(r"^```python\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)[1]
    names = {}
    exec(lines.replace("set_lr(0.1 *", "set_lr(0.4 *"), names)  # another rate than the default
    ins = names["ins"]
    # config.py of PLSC 0.1.
    assert (ins.test_batch_size, ins.train_epochs, ins.with_test) == (120, 120, True)
    assert (ins.loss_type, ins.model_name, ins.emb_size) == ("dist_arcface", "ResNet50", 512)
    assert (ins.image_shape, ins.dataset_dir, ins.model_save_dir) == ((3, 112, 112), "./train_data", "output")
    ins.set_dataset_dir(write_dataset(tmp_path / "set", classes=3, per_class=3))
    run = build_run(ins.options, World.single(), UserParts())
    margin = run.head.margin
    assert (type(margin).__name__, margin.margin, margin.scale) == ("ArcFace", 0.5, 64)
    # Its Entry._get_optimizer: lr * global_batch_size / 1024, piecewise_decay, Momentum, L2Decay(5e-4).
    for step in (0, 1, 99_999, 100_000, 159_999, 160_000, 219_999, 220_000, 1_000_000):
        expected = 0.4 * 64 / 1024 * 0.1 ** sum(step >= end for end in (100_000, 160_000, 220_000))
        assert run.rate(step) == pytest.approx(expected), step
    groups = [*run.optimizer.param_groups, *run.rows.param_groups]
    for group in groups:
        assert (group["momentum"], group["weight_decay"], group["nesterov"]) == (0.9, 5e-4, False)
    decayed = sum(len(group["params"]) for group in run.optimizer.param_groups)
    assert decayed == len(list(run.network.parameters()))
    assert run.options.optim.clip_norm == 0
    # The end of models/resnet.py.
    norm, dropout, _, linear, last = run.network.neck
    assert (type(norm), type(last)) == (nn.BatchNorm2d, nn.BatchNorm1d)
    assert (dropout.p, linear.in_features, linear.out_features) == (0.4, 512 * 7 * 7, 512)


MAPPINGS = {
    "head.loss_arguments": (("adaface",), {"h": 0.4}),
    "head.execution": ((), {"kernels": "torch"}),
    "head.class_margins": ((), {"a": 0.5, "b": 0.05}),
    "data.format_arguments": (("folder",), {"label_map": "ids.json"}),
    "precision.lists": ((), {"custom_white_list": ["softmax"]}),
    "precision.scaling_arguments": ((), {"incr_ratio": 3.0}),
}


@pytest.mark.parametrize("spec", [one for one in SPECS if one.argument[0] == "*"], ids=lambda spec: spec.path)
def test_every_mapping_is_set_beside_what_takes_it_and_checked_at_the_call(spec):
    first, arguments = MAPPINGS[spec.path]
    ins = Entry()
    getattr(ins, spec.setter)(*first, **arguments)
    assert ins.options.get(spec.path) == arguments
    for wrong in ({"nosuch": 1}, {next(iter(arguments)): -3}):
        with pytest.raises(OptionError):
            getattr(ins, spec.setter)(*first, **wrong)
    assert ins.options.get(spec.path) == arguments
    getattr(ins, spec.setter)(*first)
    assert ins.options.get(spec.path) is None


def test_a_name_and_its_arguments_are_one_option_whose_arguments_are_checked():
    ins = Entry()
    for setter, path, name, good, wrong in (
        ("set_order", "data.order", "balanced", {"balance": 0.2}, {"balance": -3}),
        ("set_lr_schedule", "optim.schedule", "cosine", {"end_factor": 0.5}, {"power": 2}),
        ("set_lr_schedule", "optim.schedule", "step", {"factor": 0.5}, {"boundaries": (5, 5)}),
    ):
        getattr(ins, setter)(name, **good)
        assert ins.options.get(path) == {"name": name, **good}
        with pytest.raises(OptionError):
            getattr(ins, setter)(name, **wrong)
        assert ins.options.get(path) == {"name": name, **good}
    with pytest.raises(OptionError, match="a name"):
        ins.options.set("data.order", {"name": "balanced"})


def test_boundaries_and_factor_of_plsc_choose_the_step_schedule_in_any_order():
    ins = Entry()
    ins.set_step_boundaries([10, 20])
    ins.set_lr_decay_factor(0.2)
    ins.set_lr_schedule("step")
    assert ins.lr_schedule == {"name": "step", "boundaries": [10, 20], "factor": 0.2}
    ins.set_lr_schedule("cosine")
    assert ins.lr_schedule == "cosine"


@pytest.mark.parametrize("spec", [one for one in SPECS if one.argument[0] != "*"], ids=lambda spec: spec.path)
def test_every_option_has_a_setter_that_sets_it_and_a_meaning(spec):
    method = getattr(Entry, spec.setter)
    _, (name, _), *others = inspect.signature(method).parameters.items()
    assert all(one.default is None or one.kind is inspect.Parameter.VAR_KEYWORD for _, one in others)
    assert name == spec.argument.partition(",")[0]
    assert len(spec.meaning) > 5
    ins = Entry()
    value = spec.default
    if value is None:
        kinds = {str | None: "memory://somewhere", dict[str, Any] | None: {"eps": 1e-7}}
        value = kinds.get(spec.kind, 7)
    method(ins, value)
    assert ins.options.get(spec.path) == value
    assert getattr(ins, spec.setter.removeprefix("set_")) == value
    assert spec.path in ins.options.explicit


@pytest.mark.parametrize(
    ("setter", "value", "expected"),
    [
        ("set_train_batch_size", 0, "train.batch_size"),
        ("set_train_batch_size", True, "integer"),
        ("set_train_batch_size", 1.5, "integer"),
        ("set_log_period", 2**63, "integer"),
        ("set_lr", float("nan"), "number"),
        ("set_image_shape", (2, 112, 112), "channels"),
        ("set_image_shape", b"ab", "integers"),
        ("set_loss_type", "cosine", "dist_softmax"),
        ("set_scale", "fast", "'auto'"),
        ("set_limit_train_batches", True, "train.limit_train_batches"),
        ("set_model_save_dir", " ", "non-empty"),
        ("set_model_save_dir", "a\0b", "string"),
        ("set_calc_acc", 1, "True or False"),
        ("set_dataset_dir", None, "string"),
        ("set_neck", "norm-norm", "model.neck"),
        ("set_model_name", "resnets/ResNet50", "'torchvision/NAME'"),
        ("set_freeze", {"stem": 1}, "strings"),
    ],
)
def test_a_wrong_value_says_what_was_expected_and_what_came(setter, value, expected):
    ins = Entry()
    before = ins.options.as_dict()
    with pytest.raises(OptionError) as caught:
        getattr(ins, setter)(value)
    assert expected in str(caught.value)
    assert repr(value) in str(caught.value)
    assert "\n" not in str(caught.value)
    assert ins.options.as_dict() == before


@pytest.mark.parametrize(
    "value",
    [10**400, "a" * 10**5, ["a" * 10**3] * 10**2],
    ids=["no float", "text", "list"],
)
def test_a_huge_value_is_refused_in_a_line_that_is_not(value):
    ins = Entry()
    for spec in all_options():
        if spec.kind in (float, int, tuple[float, ...], bool):
            with pytest.raises(OptionError) as caught:
                getattr(ins, spec.setter)(value)
            assert len(str(caught.value)) < 2000
    with pytest.raises(OptionError):
        ins.options.set("optim.groups", [{"eps": value}])


def test_numpy_integers_and_paths_are_taken():
    ins = Entry()
    ins.set_train_batch_size(np.int64(32))
    ins.set_dataset_dir(pathlib.Path("some/where"))
    ins.set_image_shape(np.array([3, 32, 32]))
    assert ins.options.train.batch_size == 32
    assert type(ins.options.train.batch_size) is int
    assert ins.options.data.dataset_dir == "some/where"
    assert ins.options.model.image_shape == (3, 32, 32)


@pytest.mark.parametrize(
    ("wrong", "near"),
    [
        ("train.batchsize", "train.batch_size"),
        ("train.learning_rate", "optim.lr"),
        ("set_backbone", "model.name"),
        ("train.nosuch", None),  # train.epochs is something else
    ],
)
def test_an_unknown_option_gets_a_near_spelling_or_a_synonym_and_nothing_else(wrong, near):
    with pytest.raises(OptionError) as caught:
        Options().set(wrong, 3)
    assert near in str(caught.value) if near else "mean" not in str(caught.value)


def test_an_error_of_a_verb_keeps_its_type_and_shows_no_frame_inside_plsc(tmp_path, caplog):
    caplog.set_level("DEBUG", "plsc")
    ins = Entry()
    ins.set_dataset_dir(str(tmp_path / "nothing"))
    ins.set_model_save_dir(str(tmp_path / "run"))
    for call in (ins.train, lambda: ins.set_train_batch_size("x")):
        with pytest.raises(PlscError) as caught:
            call()
        assert {frame.path.name for frame in caught.traceback} <= {"test_config.py", "entry.py", "options.py"}
    assert "open_source" in caplog.text


def test_entry_is_an_ordinary_object_whose_construction_changes_nothing():
    hook, environment = sys.excepthook, dict(os.environ)
    ins = Entry()
    assert (sys.excepthook, dict(os.environ)) == (hook, environment)
    with pytest.raises(AttributeError, match=r"'set_bach_size'.*'set_train_batch_size'"):
        ins.set_bach_size(3)
    with pytest.raises(AttributeError, match="train_transfrom"):
        ins.train_transfrom = None
    assert not hasattr(ins, "set_nothing")


def test_a_checkpoint_gives_what_nobody_set_and_differences_are_told():
    saved = Options()
    saved.set_together({"model.emb_size": 64, "optim.lr": 0.2, "runtime.device": "cpu"})
    plain = saved.as_dict()
    plain["head"]["of_a_newer_version"] = 1
    mine = Options()
    mine.set("optim.lr", 0.3)
    config = mine.resolve(plain)
    assert config.model.emb_size == 64
    assert config.optim.lr == 0.3
    assert config.runtime.device == "auto"
    (difference,) = config.differences
    assert difference.startswith("optim.lr")


def test_flags_and_config_file_set_the_same_options_and_flags_win(tmp_path):
    config = tmp_path / "run.yaml"
    config.write_text(
        "train:\n  batch_size: 32\n  epochs: 3\nmodel:\n  image_shape: [1, 32, 32]\n"
        "optim:\n  schedule: {name: step, boundaries: [10, 20]}\nhead:\n  scale: auto\n"
    )
    options = options_from("--config", str(config), "--train.batch_size", "64")
    assert {path: options.get(path) for path in options.explicit} == {
        "train.batch_size": 64, "train.epochs": 3, "model.image_shape": (1, 32, 32), "head.scale": "auto",
        "optim.schedule": {"name": "step", "boundaries": [10, 20]},
    }  # fmt: skip
    assert (
        options_from("--optim.schedule", "{name: cosine, end_factor: 0.5}").optim.schedule["end_factor"]
        == 0.5
    )
    assert options_from("--head.scale", "32").head.scale == 32
    assert options.origins["train.batch_size"] == "--train.batch_size"
    assert options.origins["train.epochs"] == f"{config}:3"
    assert f"  epochs: 3  # {config}:3\n" in render_options(options)


def test_margin_and_scale_have_one_place():
    for name in ("margin", "scale"):
        with pytest.raises(OptionError, match=rf"head\.{name}"):
            options_from("--head.loss_arguments", f"{{{name}: 0.4}}")
    ins = Entry()
    ins.set_loss_type("adaface", margin=0.3, h=0.4)
    assert (ins.options.get("head.margin"), ins.options.get("head.loss_arguments")) == (0.3, {"h": 0.4})
    with pytest.raises(OptionError, match="easy_margin"):
        ins.set_loss_type("arcface", 1.0, 0.3, 0.1, easy_margin=True)


def test_what_plsc_config_prints_is_read_back_as_the_same_options(tmp_path):
    options = options_from("--train.batch_size", "64", "--data.val_targets", "lfw,agedb")
    text = render_options(options)
    for spec in SPECS:
        assert spec.meaning in text
    config = tmp_path / "all.yaml"
    config.write_text(text)
    assert options_from("--config", str(config)).as_dict() == options.as_dict()


@pytest.mark.parametrize("inputs", [3, [3], [{"name": [1]}], [{"name": "image", "shape": 3}]])
def test_other_inputs_than_an_image_and_a_label_are_refused(inputs):
    with pytest.raises(OptionError, match="inputs"):
        Entry().set_input_info(inputs)


def test_a_former_option_of_a_run_is_ignored_at_its_default_and_refused_otherwise():
    options = Options()
    for value, use in (("replicated", "run"), ("sharded", "model")):
        assert options.resolve({"parallel": {"backbone": value}}, use).adopted == set()
    with pytest.raises(CheckpointError, match=r"parallel\.backbone"):
        options.resolve({"parallel": {"backbone": "sharded"}})


def test_names_are_those_of_the_owners():
    for listed, owned in (
        (names.NETWORKS, NETWORKS),
        (names.MARGINS, MARGINS),
        (names.OPTIMIZERS, OPTIMIZERS),
        (names.LOGGERS, LOGGERS),
        (names.CALLBACKS, CALLBACKS),
    ):
        assert tuple(listed) == tuple(owned)
    known = {field.name for field in dataclasses.fields(ProtocolData)}
    for name, arguments in names.PROTOCOLS.items():
        assert hasattr(Evaluator, f"run_{name}")
        assert known.issuperset(arguments)
    arguments = {name: inspect.signature(margin).parameters for name, margin in MARGINS.items()}
    without = [name for name, found in arguments.items() if not any("margin" in one for one in found)]
    assert set(names.NO_MARGIN) == set(without)
