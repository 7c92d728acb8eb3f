"""Small parts of training: schedule, guards, log, combinations of options."""

import os
import shutil
from types import SimpleNamespace

import pytest
import torch
from torch import nn

from plsc.checkpoint import list_checkpoints
from plsc.config import Options
from plsc.errors import OptionError, TrainingError
from plsc.models import BaseModel
from plsc.parallel.world import World
from plsc.train.build import check_combinations
from plsc.train.callbacks import UserParts
from plsc.train.loop import exchange_status
from plsc.train.run import build_run, run_training
from plsc.train.step import Step, clip_gradients
from tests.images import write_dataset
from tests.overflowing import Overflow
from tests.resuming import options_of


def test_a_deterministic_run_has_deterministic_products_on_a_gpu(dataset, tmp_path, monkeypatch):
    # Without it torch refuses the first product there.
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", "to be restored")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG")
    monkeypatch.setattr(torch, "use_deterministic_algorithms", lambda _: None)
    monkeypatch.setattr(torch.utils.deterministic, "fill_uninitialized_memory", True)
    options = options_for(dataset, tmp_path, train__deterministic=True)
    build_run(options, World.single(), UserParts())
    assert not torch.utils.deterministic.fill_uninitialized_memory  # it costs a write of every allocation
    assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
    with pytest.raises((RuntimeError, NotImplementedError)):  # nothing computes on this device
        build_run(options, World.single("cuda:99"), UserParts())
    assert os.environ["CUBLAS_WORKSPACE_CONFIG"] == ":4096:8"


class Overflowing(BaseModel):
    """Its third backward pass overflows; no loss tells, for the run ends there."""

    def __init__(self):
        super().__init__()
        self.fc = nn.Linear(3 * 16 * 16, 8)
        self.passes = 0

    def build_network(self, input, label, is_train=True):
        self.passes += is_train
        x = self.fc(input.flatten(1))
        return Overflow.apply(x) if self.passes == 3 else x


@pytest.mark.parametrize("when", [{"train__steps": 3}, {"checkpoint__every_n_steps": 3}], ids=str)
def test_weights_that_a_gradient_ruined_are_not_saved(when, dataset, tmp_path):
    every = {"train__with_test": False, "train__epochs": 3}
    options = options_for(dataset, tmp_path, train__batch_size=3, **every, **when)
    with pytest.raises(TrainingError, match=r"fc\.bias and 1 more of the network .* after step 3"):
        run_training(options, World.single(), UserParts(model=Overflowing()))
    assert not [manifest.step for _, manifest in list_checkpoints(tmp_path / "out")]


def options_for(dataset, tmp_path, **changes):
    small = {"model__name": "SmallResNet", "train__batch_size": 4, **changes}
    return options_of(dataset, tmp_path / "out", **small)


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "set", classes=3, per_class=3)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model__image_shape": (3, 20, 16)}, "16"),
        ({"model__name": "no_such_package:Net"}, "no_such_package"),
        ({"head__loss_type": "softmax", "head__margin": 0.4}, "margin"),
        ({"head__loss_type": "dist_softmax", "head__scale": 30.0}, "scale"),
        ({"train__global_batch_size": 6}, "global batch of 4"),
        ({"head__loss_type": "dist_softmax", "head__hard_share": 0.5}, "head.sample_ratio"),
        ({"optim__freeze": ("stemm",)}, "'stem'"),
        ({"speed__compile": True, "memory__recompute": "all"}, "memory.recompute"),
        ({"speed__compile": True, "train__deterministic": True}, "train.deterministic"),
        ({"speed__compile": True, "precision__lists": {"custom_black_list": ["exp"]}}, "precision.lists"),
    ],
)
def test_names_and_combinations_are_refused_before_any_data_is_read(tmp_path, changes, expected):
    options = options_for(tmp_path / "no dataset here", tmp_path, **changes)
    with pytest.raises(OptionError) as caught:
        build_run(options, World.single(), UserParts())
    assert expected in str(caught.value)
    assert "\n" not in str(caught.value)


def test_what_is_set_and_has_no_effect_is_said_in_a_line():
    options = Options()
    assert options.idle_note() == ""
    options.set("precision.scaling_arguments", {"decr_ratio": 0.25})
    options.set("optim.momentum", 0.5)
    assert "precision.scaling_arguments" in options.idle_note()
    assert "momentum" not in options.idle_note()
    options.set_together(
        {"optim.optimizer": "adam", "head.optimizer": "adagrad", "precision.mode": "float16"}
    )
    assert "optim.momentum" in options.idle_note()
    assert "precision" not in options.idle_note()


class Stages(BaseModel):
    """What every option of a network can be about; notes the types of its maps."""

    def __init__(self):
        super().__init__()
        torch.manual_seed(4)
        self.conv = nn.Conv2d(3, 6, 4, stride=4)
        self.norm = nn.BatchNorm2d(6)
        self.dropout = nn.Dropout(0.3)
        self.fc = nn.Linear(96, 8)
        self.fc.bias.requires_grad_(False)  # by its owner
        self.types = []

    def build_network(self, input, label, is_train=True):
        maps = self.norm(self.conv(input))
        kept = self.dropout(maps)
        self.types = [maps.dtype, kept.dtype]
        return self.fc(kept.flatten(1))


def two_steps(network, dataset, tmp_path, **changes):
    """Return the losses of two steps, and of which types maps were before and behind the dropout."""
    options = options_for(dataset, tmp_path, **changes)
    run = build_run(options, World.single(), UserParts(model=network))
    run.network.train()
    step, losses = Step(run), []
    for batch in run.data.loader.epoch(0):
        sizes = exchange_status(run.world, batch, run.head.class_num).sizes
        losses.append(float(step.make(batch, sizes, False).output.mean_loss))
    return losses[:2], network.types


@pytest.mark.parametrize("loss_type", ["arcface", "dist_arcface"])
def test_without_a_trainable_parameter_the_head_alone_is_trained(loss_type, dataset, tmp_path):
    changes = {"optim__freeze": ("*",), "head__loss_type": loss_type, "train__epochs": 1}
    options = options_for(dataset, tmp_path, train__with_test=False, **changes)
    run = build_run(options, World.single(), UserParts(model=Stages()))
    before = [p.detach().clone() for p in (*run.network.parameters(), *run.head.parameters())]
    batch = next(iter(run.data.loader.epoch(0)))
    Step(run).make(batch, exchange_status(run.world, batch, run.head.class_num).sizes, False)
    after = [*run.network.parameters(), *run.head.parameters()]
    assert [torch.equal(*pair) for pair in zip(before, after, strict=True)] == [True] * 6 + [False]


def test_a_network_of_ones_own_goes_through_a_second_run_as_if_there_had_been_no_first(dataset, tmp_path):
    network, lists = Stages(), ["conv2d", "batch_norm", "exp"]
    first = {
        "precision__mode": "bfloat16", "precision__lists": {"custom_black_list": lists},
        "optim__freeze": ("conv", "norm"),
    }  # fmt: skip
    assert two_steps(network, dataset, tmp_path, **first)[1] == [torch.float32] * 2
    assert [name for name, p in network.named_parameters() if p.requires_grad] == ["fc.weight"]
    for changes, types in (
        ({"precision__mode": "bfloat16"}, [torch.bfloat16] * 2),
        (
            {"precision__mode": "bfloat16", "precision__lists": {"custom_black_list": ["batch_norm"]}},
            [torch.float32] * 2,
        ),
        ({}, [torch.float32] * 2),
    ):
        fresh = Stages()
        fresh.load_state_dict(network.state_dict())
        found = two_steps(network, dataset, tmp_path, **changes)
        assert found == two_steps(fresh, dataset, tmp_path, **changes)
        assert found[1] == types
        trained = [name for name, p in network.named_parameters() if p.requires_grad]
        assert trained == ["conv.weight", "conv.bias", "norm.weight", "norm.bias", "fc.weight"]


def test_more_ranks_than_global_batch_is_refused():
    options = Options()
    options.set("train.global_batch_size", 3)
    with pytest.raises(OptionError, match="at least 4"):
        check_combinations(options, 4)


def test_too_few_classes_are_refused(dataset, tmp_path):
    options = options_for(dataset, tmp_path, head__class_num=1)
    with pytest.raises(OptionError, match="class_num is 1"):
        build_run(options, World.single(), UserParts())


def test_a_save_folder_among_the_class_folders_is_refused(dataset, tmp_path):
    for label in "ab":
        (tmp_path / "faces" / label).mkdir(parents=True)
        shutil.copy(dataset / "images/0_0.png", tmp_path / "faces" / label / "1.png")
    options = options_for(tmp_path / "faces", tmp_path)
    options.set("checkpoint.save_dir", tmp_path / "faces" / "output")
    with pytest.raises(OptionError, match="every folder is a class"):
        build_run(options, World.single(), UserParts())


def test_one_class_is_refused_and_empty_classes_are_noted(dataset, tmp_path):
    shutil.copytree(dataset / "images", tmp_path / "nested" / "train")
    with pytest.raises(OptionError, match="have the same class"):
        build_run(options_for(tmp_path / "nested", tmp_path), World.single(), UserParts())
    options = options_for(dataset, tmp_path, head__class_num=5)
    run = build_run(options, World.single(), UserParts())
    assert run.notes[0] == "images per class: least 0, median 3, most 3"
    assert run.notes[1].startswith("note: 2 of 5 classes have no images, the first one is class 3")


def test_a_metric_that_no_checkpoint_would_have_is_refused(dataset, tmp_path):
    options = options_for(dataset, tmp_path, checkpoint__monitor="accuracy")
    with pytest.raises(OptionError, match="monitor is 'accuracy'"):
        build_run(options, World.single(), UserParts())
    options.set("checkpoint.monitor", "loss")
    assert build_run(options, World.single(), UserParts()).retention.monitor == "loss"


@pytest.mark.parametrize(("limit", "norm"), [(0.0, 5.0), (10.0, 5.0), (1.0, 1.0)])
def test_clipping_makes_gradients_shorter_but_never_longer(limit, norm):
    network = nn.Linear(2, 1, bias=False)
    network.weight.grad = torch.tensor([[3.0, -4.0]])
    options = SimpleNamespace(optim=SimpleNamespace(clip_norm=limit))
    clip_gradients(SimpleNamespace(options=options, network=network))
    assert network.weight.grad.norm() == pytest.approx(norm, rel=1e-5)
