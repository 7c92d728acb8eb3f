"""Resuming in one process: any step, every kind of data, and what is refused."""

import dataclasses
import json
import os
import random
import shutil
import signal

import numpy as np
import pytest
import torch
from PIL import Image

from plsc.checkpoint import list_checkpoints, read_manifest
from plsc.config import Options
from plsc.errors import CheckpointError, OptionError, TrainingInterrupted
from plsc.parallel.world import World
from plsc.train.callbacks import FunctionCallback, UserParts
from plsc.train.folder import RunFolder
from plsc.train.restore import unpack_generators
from plsc.train.run import settle
from plsc.train.saving import pack_generators
from tests.images import write_dataset, write_pair_file
from tests.resuming import Drawing, different, losses_of, options_of, saved_at, train

WORLD = World.single()
STEPS_PER_EPOCH = 5  # 18 images, 4 a step, the last batch padded


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    folder = write_dataset(tmp_path_factory.mktemp("data") / "set", classes=6, per_class=3)
    write_pair_file(folder / "lfw.bin", folder, pairs=20)
    return folder


def arrays_of(dataset):
    for line in (dataset / "label.txt").read_text().splitlines():
        name, label = line.split("\t")
        array = np.asarray(Image.open(dataset / name), dtype=np.float32).transpose(2, 0, 1)
        yield (array - 127.5) / 128, int(label)


def shuffling_reader(dataset):
    samples = list(arrays_of(dataset))

    def reader():
        order = list(range(len(samples)))
        random.shuffle(order)
        for index in order:
            image, label = samples[index]
            yield image + np.random.rand(), label

    return reader


class NoisyDataset(torch.utils.data.Dataset):
    def __init__(self, dataset):
        self.samples = list(arrays_of(dataset))

    def __len__(self):
        return len(self.samples)

    def __getitem__(self, index):
        image, label = self.samples[index]
        return torch.from_numpy(image) + torch.rand(3, 1, 1), label


def sharding_itself(reader):
    reader.shards_itself = True
    return reader


def kinds_of_data(dataset):
    reader, samples = shuffling_reader(dataset), NoisyDataset(dataset)
    block = {"name": "block", "block_samples": 2, "pool_samples": 6}
    adam = {
        "optim__optimizer": "adam", "head__optimizer": "adamw", "optim__lr": 0.005,
        "optim__schedule": "polynomial", "optim__warmup_steps": "1ep",
    }  # fmt: skip
    return {
        "global": ({"train__test_period": 2}, None),
        "block, threads": ({"data__order": block, "data__num_workers": 2}, None),
        "adam, polynomial": (adam, None),
        "balanced": ({"data__order": {"name": "balanced", "balance": 0.2}}, None),
        "classes": ({"data__order": {"name": "classes", "images_per_class": 2}}, None),
        "sequential, keep": ({"data__order": "sequential", "data__last_batch": "drop"}, None),
        "dataset": ({}, samples),
        # Its steps end with an epoch, whose length only an epoch seen to its end has told.
        "generator": ({"head__class_num": 6, "train__steps": 10, "train__epochs": 9}, reader),
        "generator ahead": ({"head__class_num": 6, "data__num_workers": 1}, reader),
        "generator that shards itself": ({"head__class_num": 6}, sharding_itself(lambda *_: reader())),
        "micro-batches": ({"train__micro_batches": 2}, None),
    }  # fmt: skip


@pytest.mark.slow
def test_a_run_goes_on_from_any_step_with_any_data_to_the_same_bits(dataset, tmp_path):
    for kind, (settings, reader) in kinds_of_data(dataset).items():
        folder = tmp_path / kind
        settings = {"train__batch_size": 4, "head__loss_type": "dist_adaface", **settings}

        def start(name, folder=folder, settings=settings, reader=reader, **more):
            options = options_of(dataset, folder / name, **settings, **more)
            return train(options, WORLD, user=UserParts(train_reader=reader))

        whole = start("saving", checkpoint__every_n_steps=1, checkpoint__keep_last=-1)
        if kind == "global":
            start("whole")
            assert different(folder / "saving/1", folder / "whole/1") == []
        for step in (1, 4, STEPS_PER_EPOCH, 9) if kind == "global" else (3, whole.steps - 1):
            start(f"{step}", checkpoint__load_dir=str(saved_at(folder / "saving", step)))
            assert different(folder / f"{step}/1", folder / "saving/1") == [], (kind, step)
            later = {s: x for s, x in losses_of(folder / "saving").items() if s > step}
            assert losses_of(folder / f"{step}") == later, (kind, step)


def test_generators_come_back_from_text_and_nothing_else_does():
    packed = pack_generators(WORLD.device)
    np.random.standard_normal(), random.gauss(0, 1)
    in_between = pack_generators(WORLD.device)

    def draws():
        return random.gauss(0, 1), np.random.standard_normal(), torch.rand(1).item()

    after = draws()
    unpack_generators(in_between, WORLD.device)
    assert draws() == after
    unpack_generators(packed, WORLD.device)
    assert pack_generators(WORLD.device).equal(packed)
    sound = json.loads(bytes(packed.tolist()))
    broken = [
        b"\x80\x04.", b"[]", b"{}", b"[" * 100_000,
        *(json.dumps({**sound, key: value}).encode() for key, value in [
            ("python", [3, [1, 2], None]), ("numpy", ["PCG", [1], 0, 0, 0.0]), ("torch", "00"),
            ("python", [3, [2**70] * 625, None]), ("numpy", [*sound["numpy"][:2], 2**31 - 1, 0, 0.0]),
        ]),
    ]  # fmt: skip
    for text in broken:
        with pytest.raises(CheckpointError, match="random generators in the checkpoint is damaged"):
            unpack_generators(torch.tensor(list(text), dtype=torch.uint8), WORLD.device)
        assert pack_generators(WORLD.device).equal(packed), text[:50]


@pytest.fixture(scope="module")
def trained(dataset, tmp_path_factory):
    """Two epochs, each a checkpoint."""
    save_dir = tmp_path_factory.mktemp("trained") / "run"
    train(options_of(dataset, save_dir, train__batch_size=4, data__val_targets=""), WORLD)
    return save_dir


def open_load_dir(options, world):
    place = options.checkpoint
    return RunFolder(world, place.save_dir, place.upload_dir, place.load_dir, place.download_dir).find()


def manifest_of(trained, **changes):
    return dataclasses.replace(read_manifest(trained / "1"), **changes)


def kept(trained, ranks, saved_on=4, **settings):
    """Resume, on so many ranks, a run of 4 ranks with 8 images each."""
    options = Options()
    for path, value in settings.items():
        options.set(path.replace("__", "."), value)
    scalars = {**manifest_of(trained).scalars, "global_batch": 32}
    manifest = manifest_of(
        trained, world_size=saved_on, scalars=scalars, options={"train": {"batch_size": 8}}
    )
    config = settle(options, (trained / "1", manifest), ranks)
    return config.train.global_batch_size or config.train.batch_size * ranks


def test_a_resumed_run_keeps_the_global_batch_on_any_number_of_ranks_and_refuses_another(trained):
    assert kept(trained, 4) == kept(trained, 3) == 32
    # The script that set the batch of a rank is started again, on fewer ranks.
    assert kept(trained, 2, train__batch_size=8) == 32
    assert kept(trained, 2, train__batch_size=16) == 32
    for ranks, settings, noun in (
        (4, {"train__batch_size": 5}, "20, but .* 32"),
        (4, {"train__global_batch_size": 24}, "24, but .* 32"),
    ):
        with pytest.raises(OptionError, match=noun):
            kept(trained, ranks, **settings)


def test_last_is_the_newest_checkpoint_and_best_the_one_that_best_json_names(trained):
    options = options_of("unused", trained, checkpoint__load_dir="last")
    assert open_load_dir(options, WORLD)[0] == trained / "1"
    options.set("checkpoint.load_dir", "best")
    file = trained / "best.json"
    best = json.loads(file.read_text())["path"]
    assert open_load_dir(options, WORLD)[0] == trained / best
    # As a folder that was moved: only the name counts.
    file.write_text('{"path": "/somewhere/else/0", "metric": "loss", "value": 1.5}')
    assert open_load_dir(options, WORLD)[0] == trained / "0"
    file.write_text('{"path": "7"}')
    with pytest.raises(CheckpointError, match="'7'"):
        open_load_dir(options, WORLD)
    for text in ('{"path": ".."}', "[]", " " * 2**17, "[" * 60_000):
        file.write_text(text)
        with pytest.raises(CheckpointError, match=r"best\.json"):
            open_load_dir(options, WORLD)
    file.write_text(json.dumps({"path": best}))


def test_last_is_in_the_newest_version_folder(trained, tmp_path):
    options = options_of("unused", tmp_path, checkpoint__load_dir="last")
    with pytest.raises(OptionError, match="no checkpoint"):
        open_load_dir(options, WORLD)
    for name, checkpoints in {"version_2": ["0"], "version_10": ["0", "1"], "version_11": []}.items():
        for checkpoint in checkpoints:
            shutil.copytree(trained / checkpoint, tmp_path / name / checkpoint)
        (tmp_path / name).mkdir(exist_ok=True)
    assert open_load_dir(options, WORLD)[0] == tmp_path / "version_10/1"
    shutil.copytree(trained / "0", tmp_path / "0")
    assert open_load_dir(options, WORLD)[0] == tmp_path / "version_10/1"


@pytest.mark.parametrize("is_link", [False, True])
def test_a_checkpoint_that_was_downloaded_is_not_uploaded_and_a_link_to_one_only_once(
    dataset, trained, tmp_path, is_link
):
    run, store = tmp_path / "run", tmp_path / "store"
    options = options_of(
        dataset, run, checkpoint__load_dir=str(run / "start"), data__val_targets="",
        checkpoint__upload_dir=f"file://{store}", train__epochs=3,
    )  # fmt: skip
    if is_link:
        shutil.copytree(trained, run)
        shutil.copytree(trained / "0", store / "0")
        (run / "start").symlink_to("1")
    else:
        options.set("checkpoint.download_dir", f"file://{trained}/1")
    train(options, WORLD)
    assert (run / "start").is_dir()
    assert [path.name for path, _ in list_checkpoints(store)] == (["0", "1", "2"] if is_link else ["2"])


def test_a_signal_between_two_epochs_saves_what_no_checkpoint_has(dataset, tmp_path):
    def stop(context):
        if context.step == 9:  # after the third epoch
            os.kill(os.getpid(), signal.SIGTERM)

    user = UserParts(callbacks=(FunctionCallback(stop, "epoch_end", 1, ()),))
    options = options_of(
        dataset, tmp_path / "run", train__batch_size=6, train__epochs=4, data__val_targets="",
        checkpoint__every_n_epochs=2,
    )  # fmt: skip
    with pytest.raises(TrainingInterrupted, match=r"after step 9; the state was saved to \S+/run/2;"):
        train(options, WORLD, user=user)
    assert read_manifest(tmp_path / "run/2").step == 9


def test_a_signal_after_a_save_does_not_save_again_without_its_metrics(dataset, tmp_path):
    stop = FunctionCallback(lambda _: os.kill(os.getpid(), signal.SIGTERM), "after_step", 2, ())
    options = options_of(dataset, tmp_path / "run", train__batch_size=6, checkpoint__every_n_steps=2)
    with pytest.raises(TrainingInterrupted):
        train(options, WORLD, user=UserParts(callbacks=(stop,)))
    assert "loss" in read_manifest(next((tmp_path / "run").glob("0-step*"))).metrics


def test_what_does_not_fit_the_run_is_refused(dataset, trained, tmp_path):
    class Scaled(Drawing):
        def __init__(self):
            super().__init__()
            self.scale = torch.nn.Linear(8, 8)

    def refused(match, damage=None, network=Drawing, **settings):
        options = options_of(
            dataset, tmp_path / "new", checkpoint__load_dir=str(trained / "1"), train__epochs=3,
            data__val_targets="", **settings,
        )  # fmt: skip
        file = trained / "1" / "manifest.json"
        sound = file.read_text()
        try:
            if damage:
                manifest = json.loads(sound)
                damage(manifest)
                file.write_text(json.dumps(manifest))
            with pytest.raises(CheckpointError, match=match):
                train(options, WORLD, network)
        finally:
            file.write_text(sound)

    refused("classes 6", head__class_num=9)
    refused("bfloat16", head__row_dtype="bfloat16")
    refused("exp_avg", head__optimizer="adamw")
    refused("'dist_cosface'", head__loss_type="dist_cosface")
    refused("'Adam'", optim__optimizer="adam")
    refused(r"scale\.weight", network=Scaled)
    refused("'mine:Scaled'", model__name="mine:Scaled", network=Scaled)
    refused("optimizer_numbers", lambda m: m["scalars"].update(optimizer_numbers=[1]))
    key = "momentum.backbone.fc.bias"
    refused("tensor '(rank0|momentum)", lambda m: m["tensors"]["rank0.random"].update(shape=[2**40]))
    refused("tensor '(rank0|momentum)", lambda m: m["tensors"][key].update(shape=[2**40]))
    refused("'momentum", lambda m: m["tensors"][key].update(dtype="int8"))

    def numbers(value):
        states = {"backbone.fc.bias": {"momentum_buffer": value}}
        return lambda m: m["scalars"].update(optimizer_numbers=states)

    refused("tensor", numbers(10**400))
    refused("damaged", numbers({"$tensor": ["other", True]}))
    refused("option", lambda m: m["options"]["optim"].update(lr="x"))


class Counting(torch.nn.Linear):
    """Counts its steps in its extra state, and uses the count."""

    def __init__(self, make=torch.tensor):
        super().__init__(6 * 4 * 4, 8)
        self.make, self.steps = make, 0

    def forward(self, input):
        self.steps += self.training
        return super().forward(input) * (1 + self.steps % 3)

    def get_extra_state(self):
        return self.make([self.steps])

    def set_extra_state(self, state):
        self.steps = int(state[0])


class Extra(Drawing):
    def __init__(self, make=torch.tensor):
        super().__init__()
        self.fc = Counting(make)


def test_the_extra_state_of_a_network_is_resumed(dataset, tmp_path):
    settings = {"train__batch_size": 4, "checkpoint__every_n_steps": 3, "checkpoint__keep_last": -1}
    train(options_of(dataset, tmp_path / "whole", **settings), WORLD, Extra)
    before = str(saved_at(tmp_path / "whole", 3))
    train(options_of(dataset, tmp_path / "resumed", checkpoint__load_dir=before, **settings), WORLD, Extra)
    assert different(tmp_path / "resumed/1", tmp_path / "whole/1") == []


class Complex(Drawing):
    def __init__(self):
        super().__init__()
        self.register_buffer("phase", torch.zeros(2, dtype=torch.complex64))


@pytest.mark.parametrize(("network", "noun"), [(lambda: Extra(dict.fromkeys), "extra"), (Complex, "phase")])
def test_a_network_that_cannot_be_saved_is_refused_before_the_first_step(network, noun, dataset, tmp_path):
    with pytest.raises(CheckpointError, match=noun):
        train(options_of(dataset, tmp_path / "run", train__batch_size=4), WORLD, network)
    assert not (tmp_path / "run/metrics.jsonl").read_text()


class Buffered(Drawing):
    """Has a buffer that `change` replaces in each step."""

    def __init__(self, change=torch.clone, first=torch.ones(1)):  # noqa: B008 - it is cloned
        super().__init__()
        self.register_buffer("late", None if first is None else first.clone())
        self.change = change

    def build_network(self, input, label, is_train=True):
        if is_train:
            self.late = self.change(self.late)
        return super().build_network(input, label, is_train)


@pytest.mark.parametrize(
    "network",
    [
        lambda: Buffered(lambda old: torch.ones(1) if old is None else old + 1, None),
        lambda: Buffered(lambda old: torch.cat([old, old])),
        lambda: Buffered(lambda old: old.double()),
    ],
)
def test_buffers_that_a_resumed_run_would_not_have_are_refused_after_the_first_step(
    network, dataset, tmp_path
):
    with pytest.raises(CheckpointError, match="late"):
        train(options_of(dataset, tmp_path / "run", train__batch_size=4), WORLD, network)
    assert not list_checkpoints(tmp_path / "run")


def test_a_network_that_lacks_a_saved_buffer_is_not_resumed(dataset, tmp_path):
    train(options_of(dataset, tmp_path / "a", train__batch_size=4, train__steps=2), WORLD, Buffered)
    options = options_of(dataset, tmp_path / "b", checkpoint__load_dir=str(tmp_path / "a/0-step2"))
    with pytest.raises(CheckpointError, match="late"):
        train(options, WORLD)


class Odd(Drawing):
    """Has a frozen table of integers, and a buffer whose elements share memory."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.arange(3), requires_grad=False)
        self.register_buffer("ones", torch.ones(1).expand(8))


def test_unusual_tensors_do_not_change_training_saving_and_resuming(dataset, tmp_path):
    settings = {"train__batch_size": 6, "train__epochs": 1, "checkpoint__every_n_steps": 1}
    train(options_of(dataset, tmp_path / "plain", **settings), WORLD)
    train(options_of(dataset, tmp_path / "odd", **settings), WORLD, Odd)
    assert losses_of(tmp_path / "odd") == losses_of(tmp_path / "plain")
    load_dir = str(saved_at(tmp_path / "odd", 1))
    train(options_of(dataset, tmp_path / "again", **settings, checkpoint__load_dir=load_dir), WORLD, Odd)
    assert different(tmp_path / "again/0", tmp_path / "odd/0") == []


def test_the_middle_of_an_epoch_needs_the_same_data(dataset, tmp_path):
    train(options_of(dataset, tmp_path / "a", train__batch_size=4, train__steps=2), WORLD)
    other = write_dataset(tmp_path / "other", classes=6, per_class=4)
    resumed = options_of(other, tmp_path / "b", checkpoint__load_dir=str(tmp_path / "a/0-step2"))
    with pytest.raises(CheckpointError, match="18, but this run has 24"):
        train(resumed, WORLD)
