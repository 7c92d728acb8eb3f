"""From the options to the source of the training data."""

from __future__ import annotations

import base64

import fsspec
import pytest
from torch.utils.data import TensorDataset

from plsc.config import Options
from plsc.data.reader import ReaderLoader
from plsc.data.sources.recordio import RecordIOSource
from plsc.data.writers import convert
from plsc.errors import DataError, OptionError
from plsc.machine import on_terminal
from plsc.parallel.world import World
from plsc.train.callbacks import UserParts
from plsc.train.data import open_labelled, open_training_data
from plsc.train.run import run_training
from plsc.train.targets import load_targets
from tests.images import write_dataset, write_pair_file


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("PLSC_CACHE_DIR", str(tmp_path / "cache"))


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
    with pytest.raises(OptionError, match="no image column"):
        open_labelled(tmp_path / "train.csv")


def test_wrong_readers_are_reported_with_what_was_expected(tmp_path):
    options, world = options_of(tmp_path).resolve(), World.single()
    for reader in ("faces", 5, {}, TensorDataset):
        with pytest.raises(OptionError, match=r"train_reader is .*; expected a function that returns"):
            open_training_data(options, world, reader, None, 4)
    with pytest.raises(TypeError, match="'path'"):
        next(ReaderLoader(lambda path: iter([]), 0, 1, (3, 8, 8), global_batch=4, seed=1).epoch(0))
    with pytest.raises(OptionError, match=r"test_reader is 'lfw'; expected a function reader\(dataset_dir"):
        load_targets(options, "lfw")
    for result in (None, ([1], ["lfw"]), ([], ["lfw"])):
        with pytest.raises(OptionError, match=r"cannot use the result of test_reader: .*; expected \("):
            load_targets(options, lambda folder, names, result=result: result)


def test_the_training_data_may_be_a_url(tmp_path):
    folder = write_dataset(tmp_path / "set", classes=2, per_class=2)
    convert(str(folder), "memory://training-source/train.rec")
    source = open_labelled("memory://training-source/train.rec")
    assert type(source) is RecordIOSource
    assert source.labels().tolist() == [0, 0, 1, 1]


def test_secrets_of_urls_are_in_no_line_and_no_file_of_a_run(tmp_path, capfd):
    place, name = "memory://me:SE@CRET@redacted", "part?X-Amz-Signature=SECRET"
    folder = write_dataset(tmp_path / "set", classes=2, per_class=3)
    images = [base64.b64encode(path.read_bytes()) for path in (folder / "images").iterdir()]
    lines = [b"%b\t%d" % (image, index % 2) for index, image in enumerate([*images, b"AAAA"])]
    store = fsspec.filesystem("memory")
    store.pipe(f"{place.removeprefix('memory:/')}/{name}", b"\n".join(lines))
    store.pipe(f"{place.removeprefix('memory:/')}/file_list.txt", name.encode())
    for epochs in (1, 2):
        options = options_of(place, bad_images="replace")
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
    assert [target.name for target in load_targets(options_of(folder / "train.rec"), None)] == ["lfw"]


@pytest.mark.parametrize("name", ["pairs.txt", "lfw.bin"])
def test_pairs_that_are_a_link_out_of_the_dataset_folder_are_not_read(tmp_path, name):
    folder, secret = write_dataset(tmp_path / "set", classes=2, per_class=2), tmp_path / "netrc"
    secret.write_text("hunter2")
    (folder / name).symlink_to(secret)
    with pytest.raises(DataError, match="link that leaves") as caught:
        load_targets(options_of(folder, val_targets=name.removesuffix(".bin")), None)
    assert "hunter2" not in str(caught.value)
