"""From options to the source and the loader: which ones, what they read, what is refused."""

import base64
import functools
import io
from dataclasses import replace

import fsspec
import numpy as np
import pytest
import torch
from PIL import Image
from torch.utils.data import TensorDataset

from plsc.config import Options
from plsc.data.sources import TorchDatasetSource
from plsc.data.writers import convert
from plsc.errors import DataError, OptionError
from plsc.machine import on_terminal
from plsc.parallel.world import World
from plsc.train.build import open_targets
from plsc.train.callbacks import UserParts
from plsc.train.data import (
    count_classes,
    open_labelled,
    open_training_data,
)
from plsc.train.run import run_training
from plsc.utils import base64_reader
from tests.images import write_dataset, write_pair_file

ALONE = World.single()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PLSC_CACHE_DIR", str(tmp_path / "cache"))


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    return write_dataset(tmp_path_factory.mktemp("data") / "set", classes=4, per_class=5)


def feed(dataset, reader=None, transform=None, **settings):
    options = Options()
    options.set("data.dataset_dir", str(dataset))
    options.set("model.image_shape", (3, 16, 16))
    for name, value in settings.items():
        options.set(name.replace("__", "."), value)
    return open_training_data(options, ALONE, reader, transform, 6)


def names(feed, epoch=0):
    return [name for batch in feed.loader.epoch(epoch) for name in batch.names]


def blur(image: torch.Tensor) -> torch.Tensor:
    return image // 2


def test_a_transform_of_the_user_s_runs_in_processes_and_changes_the_images(dataset):
    made = feed(dataset, transform=blur, data__flip=False)
    assert made.loader.kind == "processes"
    plain = feed(dataset, data__flip=False)
    assert all(batch.mirrored is None for batch in plain.loader.epoch(0))
    assert any(batch.mirrored.any() for batch in feed(dataset).loader.epoch(0))
    for ours, theirs in zip(made.loader.epoch(0), plain.loader.epoch(0), strict=True):
        assert torch.equal(ours.images, theirs.images // 2)


def test_a_balanced_order_and_batches_of_classes_come_from_the_options(tmp_path):
    dataset = write_dataset(tmp_path / "set", classes=4, per_class=5)
    label = dataset / "label.txt"
    label.write_text("".join(label.read_text().splitlines(keepends=True)[:-3]))  # the last class has 2
    made = feed(dataset, data__order={"name": "balanced", "balance": 0.0}, data__last_batch="keep")
    counts = np.bincount(np.concatenate([batch.labels for batch in made.loader.epoch(0)]))
    assert counts.tolist() == [5, 4, 4, 4]
    chosen = {"name": "classes", "images_per_class": 3}
    made = feed(dataset, data__order=chosen, train__limit_train_batches=2)
    for batch in made.loader.epoch(1):
        assert sorted(np.bincount(batch.labels, minlength=4)) == [0, 0, 3, 3]


def test_bad_labels_stop_the_run_or_are_bad_samples(dataset):
    with pytest.raises(DataError, match=r"label 3 .*label\.txt:16.*outside 0\.\.2"):
        feed(dataset, head__class_num=3)
    made = feed(dataset, head__class_num=3, data__bad_images="skip")
    assert "note: 5 samples have labels outside 0..2" in made.notes
    batches = list(made.loader.epoch(0))
    assert {problem.kind for batch in batches for problem in batch.problems} == {"label"}


def reader():
    for value in range(12):
        yield np.full((3, 16, 16), value, dtype=np.float32), value % 4


@pytest.mark.parametrize(("ranks", "shards"), [(1, True), (3, True), (3, False)])
def test_every_sample_of_a_reader_is_trained_once_an_epoch(tmp_path, monkeypatch, ranks, shards):
    """Whether it yields all samples on every rank or, as the original's base64 reader, a rank's own."""
    image = io.BytesIO()
    Image.new("RGB", (16, 16)).save(image, "png")
    text = base64.b64encode(image.getvalue()).decode()
    for part in range(6):
        lines = [f"{text}\t{4 * part + line}\n" for line in range(4)]
        (tmp_path / f"part_{part}").write_text("".join(lines))
    (tmp_path / "file_list.txt").write_text("".join(f"part_{part}\n" for part in range(6)))
    labels = []
    for rank in range(ranks):
        monkeypatch.setenv("RANK", f"{rank}")
        monkeypatch.setenv("WORLD_SIZE", f"{ranks}")
        made = base64_reader.train(tmp_path, "file_list.txt", 24, (3, 16, 16))
        everything = functools.partial(made, 0, 1)  # which declares nothing
        options = Options()
        options.set_together({
            "model.image_shape": (3, 16, 16), "head.class_num": 24, "data.last_batch": "keep",
            "data.num_workers": 0,
        })  # fmt: skip
        world = replace(ALONE, rank=rank, size=ranks)
        built = open_training_data(options, world, made if shards else everything, None, 6)
        assert built.is_of_ranks == shards
        labels += [label for batch in built.loader.epoch(0) for label in batch.labels.tolist()]
    assert sorted(labels) == list(range(24))


@pytest.mark.parametrize(
    ("how", "noun"),
    [
        ({"reader": reader, "transform": blur, "head__class_num": 4}, "generator"),
        ({"reader": reader}, r"head\.class_num"),
        ({"reader": lambda: iter(()), "data__order": "balanced", "head__class_num": 4}, "labels"),
        ({"data__order": {"name": "block", "balance": 0.1}}, "balance"),
        ({"transform": blur, "data__cache": "memory:1M"}, "threads"),
    ],
)
def test_what_does_not_go_together_is_refused(how, noun, dataset):
    with pytest.raises(OptionError, match=noun):
        feed(dataset, **how)


def test_a_dataset_without_samples_is_refused_in_one_line():
    options = Options()
    options.set("head.class_num", 4)
    with pytest.raises(DataError, match="contains no samples"):
        open_training_data(options, ALONE, Nothing(), None, 6)


class Nothing:
    """A dataset of nothing."""

    def __len__(self):
        return 0

    def __getitem__(self, index):
        raise IndexError(index)


def options_of(location: object, **more: str) -> Options:
    options = Options()
    options.set("data.dataset_dir", str(location))
    for name in more.keys() & {"bad_images", "val_targets"}:
        options.set(f"data.{name}", more.pop(name))
    options.set("data.format_arguments", more)
    return options


def test_columns_and_the_label_map_reach_the_source(tmp_path):
    (tmp_path / "train.csv").write_text("photo,label,who\na.jpg,3,bo\nb.jpg,4,al\n")
    (tmp_path / "map.json").write_text('{"al": 8, "bo": 9}')
    source = open_labelled(tmp_path / "train.csv", {"image_column": "photo"})
    assert source.labels().tolist() == [3, 4]
    more = {"label_column": "who", "label_map": str(tmp_path / "map.json")}
    source = open_labelled(tmp_path / "train.csv", {"image_column": "photo", **more})
    assert source.labels().tolist() == [9, 8]


def test_wrong_readers_are_reported_with_what_was_expected(tmp_path):
    options, world = options_of(tmp_path).resolve(), World.single()
    for reader in ("faces", 5, {}, TensorDataset):
        with pytest.raises(OptionError, match="train_reader"):
            open_training_data(options, world, reader, None, 4)
    with pytest.raises(OptionError, match="test_reader"):
        open_targets(options, World.single(), "lfw")
    for result in (None, ([1], ["lfw"]), ([], ["lfw"])):
        with pytest.raises(OptionError, match="test_reader"):
            open_targets(options, World.single(), lambda folder, names, result=result: result)


def test_secrets_of_urls_are_in_no_line_and_no_file_of_a_run(tmp_path, capfd):
    place, name = "memory://me:SE@CRET@redacted", "part?X-Amz-Signature=SECRET"
    folder = write_dataset(tmp_path / "set", classes=2, per_class=3)
    images = [base64.b64encode(path.read_bytes()) for path in (folder / "images").iterdir()]
    lines = [b"%b\t%d" % (image, index % 2) for index, image in enumerate([*images, b"AAAA"])]
    store = fsspec.filesystem("memory")
    store.pipe(f"{place.removeprefix('memory:/')}/{name}", b"\n".join(lines))
    store.pipe(f"{place.removeprefix('memory:/')}/file_list.txt", name.encode())
    for epochs in (1, 2):
        options = options_of(place, bad_images="skip")
        for path, value in {
            "model.name": "SmallResNet", "model.image_shape": (3, 16, 16), "model.emb_size": 8,
            "train.batch_size": 4, "train.epochs": epochs, "data.num_workers": 0,
            "checkpoint.save_dir": str(tmp_path / "out"), "checkpoint.upload_dir": f"{place}/up",
            "checkpoint.load_dir": "last",
        }.items():  # fmt: skip
            options.set(path, value)
        with on_terminal():
            run_training(options, World.single(), UserParts())
    said = "".join(capfd.readouterr())
    assert "part?***:7: " in said  # of the broken image
    assert "memory://redacted/up" in said
    files = [path for path in tmp_path.rglob("*") if path.is_file()]
    assert {"manifest.json", "bad_samples.txt"} < {path.name for path in files}
    assert not [path for path in files if b"CRET" in path.read_bytes() or "CRET" in str(path)]
    sent = [path for path in store.find(place.removeprefix("memory:/")) if "/up/" in path]
    assert sent
    assert not [path for path in sent if b"CRET" in store.cat(path)]
    assert "CRET" not in said


def test_pair_files_lie_beside_a_data_file(tmp_path):
    folder = write_dataset(tmp_path / "set", classes=3, per_class=2)
    write_pair_file(folder / "lfw.bin", folder)
    convert(str(folder), str(folder / "train.rec"))
    assert [
        target.name for target in open_targets(options_of(folder / "train.rec"), World.single(), None)
    ] == ["lfw"]


@pytest.mark.parametrize("name", ["pairs.txt", "lfw.bin"])
def test_pairs_that_are_a_link_out_of_the_dataset_folder_are_not_read(tmp_path, name):
    folder, secret = write_dataset(tmp_path / "set", classes=2, per_class=2), tmp_path / "netrc"
    secret.write_text("hunter2")
    (folder / name).symlink_to(secret)
    with pytest.raises(DataError, match="link that leaves") as caught:
        open_targets(options_of(folder, val_targets=name.removesuffix(".bin")), World.single(), None)
    assert "hunter2" not in str(caught.value)


def test_a_label_that_makes_most_classes_empty_has_to_be_confirmed():
    source = TorchDatasetSource([(b"x", label) for label in (0, 1, 2_900_000)])
    with pytest.raises(OptionError, match="2900000"):
        count_classes(source, None, True)
    assert count_classes(source, 2_900_001, True)[0] == 2_900_001
    assert count_classes(TorchDatasetSource([(b"x", 0)]), None, True, least=20_000)[0] == 20_000
