"""From options to the loader: which one, what it reads, what is refused."""

from __future__ import annotations

import base64
import functools
import io
from dataclasses import replace

import numpy as np
import pytest
import torch
from PIL import Image

from plsc.config import Options
from plsc.config.data import AugmentationArguments
from plsc.config.option import read_arguments
from plsc.data.loader import CachedSource
from plsc.data.sources import open_source
from plsc.errors import DataError, OptionError
from plsc.parallel.world import World
from plsc.train.data import NO_AUGMENTATION, open_rank_source, open_training_data
from plsc.utils import base64_reader
from tests.images import write_dataset

ALONE = World.single()


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


def test_threads_are_the_default_and_are_said_once(dataset):
    made = feed(dataset)
    assert made.notes == [
        "images per class: least 5, median 5, most 5",
        "data: 2 threads per rank load images in the background, "
        "because there is no custom Python code in the data pipeline",
    ]
    assert (made.num_samples, made.class_num) == (20, 4)


def blur(image: torch.Tensor) -> torch.Tensor:
    return image // 2


def test_a_transform_of_the_user_s_runs_in_processes_and_changes_the_images(dataset):
    made = feed(dataset, transform=blur, data__flip=False)
    assert "processes per rank load images in the background, because of your transform" in made.notes[-1]
    plain = feed(dataset, data__flip=False)
    for ours, theirs in zip(made.loader.epoch(0), plain.loader.epoch(0), strict=True):
        assert torch.equal(ours.images, theirs.images // 2)


def test_the_augmentation_of_the_options_reaches_the_images(dataset):
    plain = next(feed(dataset, data__flip=False).loader.epoch(0)).images
    for setting in (
        {"data__augmentation": {"crop_padding": 2}},
        {"data__augmentation": {"colour_jitter": (0.5, 0.5, 0.5)}},
        {"data__augmentation": {"low_resolution": 1.0}},
        {"data__augmentation": {"random_erasing": 1.0}},
    ):
        assert not torch.equal(next(feed(dataset, data__flip=False, **setting).loader.epoch(0)).images, plain)


@pytest.mark.parametrize("order", ["global", "block", "sequential"])
def test_each_order_reads_everything(dataset, order):
    made = feed(
        dataset,
        data__order={"name": order, "block_samples": 3, "pool_samples": 7} if order == "block" else order,
        data__last_batch="keep",
    )
    source = open_source(dataset)
    expected = [source.name(index) for index in range(20)]
    assert sorted(names(made)) == sorted(expected)
    assert (names(made) == expected) == (order == "sequential")


def test_a_balanced_order_and_batches_of_classes_come_from_the_options_and_the_log_describes_them(tmp_path):
    dataset = write_dataset(tmp_path / "set", classes=4, per_class=5)
    label = dataset / "label.txt"
    label.write_text("".join(label.read_text().splitlines(keepends=True)[:-3]))  # the last class has 2
    made = feed(dataset, data__order={"name": "balanced", "balance": 0.0}, data__last_batch="keep")
    counts = np.bincount(np.concatenate([batch.labels for batch in made.loader.epoch(0)]))
    assert counts.tolist() == [5, 4, 4, 4]
    assert made.notes[1] == (
        "order 'balanced': 4 to 5 images per class and epoch; all images are used within the first 2 whole "
        "epochs"
    )
    made = feed(
        dataset,
        data__order={"name": "classes", "images_per_class": 3},
        train__limit_train_batches=2,
    )
    for batch in made.loader.epoch(1):
        assert sorted(np.bincount(batch.labels, minlength=4)) == [0, 0, 3, 3]
    assert made.notes[1] == (
        "order 'classes': 2 classes of 3 images per step; every image is used at least once per cycle of 4 "
        "steps (2 epochs); 1 of 4 classes have fewer images and repeat them"
    )


@pytest.mark.parametrize("order", ["balanced", "classes"])
def test_orders_by_class_need_labels_in_advance(dataset, order):
    with pytest.raises(OptionError, match=f"'{order}' needs the labels of all samples, but a generator"):
        feed(dataset, reader=lambda: iter(()), data__order=order, head__class_num=4)


@pytest.mark.parametrize("where", ["memory", "disk"])
def test_the_cache_is_filled_by_the_first_epoch(dataset, where, tmp_path):
    made = feed(
        dataset,
        data__cache=f"{tmp_path if where == 'disk' else where}:1M",
    )
    list(made.loader.epoch(0))
    assert made.notes[-1].endswith(
        "because there is no custom Python code in the data pipeline"
    )  # nor did anybody choose
    source = made.loader.source
    assert isinstance(source, CachedSource)
    assert source.cache.used > 0
    plain = feed(dataset)
    for ours, theirs in zip(made.loader.epoch(1), plain.loader.epoch(1), strict=True):
        assert torch.equal(ours.final_images(), theirs.final_images())


def test_a_cache_for_processes_is_refused(dataset):
    with pytest.raises(OptionError, match=r"works only with threads.*data\.num_workers"):
        feed(dataset, transform=blur, data__cache="memory:1M")
    feed(dataset, transform=blur, data__cache="memory:1M", data__num_workers=0)


def test_bad_labels_stop_the_run_or_are_bad_samples(dataset):
    with pytest.raises(DataError, match=r"label 3 .*label\.txt:16.*outside 0\.\.2"):
        feed(dataset, head__class_num=3)
    made = feed(dataset, head__class_num=3, data__bad_images="skip")
    assert "note: 5 samples have labels outside 0..2" in made.notes
    batches = list(made.loader.epoch(0))
    assert {problem.kind for batch in batches for problem in batch.problems} == {"label"}


def test_a_label_that_makes_far_more_classes_than_images_is_taken_for_a_slip(tmp_path):
    dataset = write_dataset(tmp_path / "set", classes=4, per_class=5)
    with (dataset / "label.txt").open("a") as file:
        file.write("images/0_0.png 99999999999\n")
    said = r"the label 99999999999 at .*label\.txt:\d+.* would mean 100,000,000,000 classes for 21 images"
    with pytest.raises(OptionError, match=said):
        feed(dataset)


def reader():
    for value in range(12):
        yield np.full((3, 16, 16), value, dtype=np.float32), value % 4


def test_a_generator_reader_runs_ahead_in_a_process(dataset):
    made = feed(dataset, reader=reader, head__class_num=4)
    assert "the reader prefetches in a separate process" in made.notes[-1]
    inline = feed(dataset, reader=reader, head__class_num=4, data__num_workers=0)
    for ours, theirs in zip(made.loader.epoch(0), inline.loader.epoch(0), strict=True):
        assert torch.equal(ours.images, theirs.images)


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("shards", [True, False])
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
        for name, value in {
            "model.image_shape": (3, 16, 16),
            "head.class_num": 24,
            "data.last_batch": "keep",
            "data.num_workers": 0,
        }.items():
            options.set(name, value)
        world = replace(ALONE, rank=rank, size=ranks)
        built = open_training_data(options, world, made if shards else everything, None, 6)
        assert built.is_of_ranks == shards
        labels += [label for batch in built.loader.epoch(0) for label in batch.labels.tolist()]
    assert sorted(labels) == list(range(24))


def test_a_transform_of_a_generator_reader_is_refused(dataset):
    with pytest.raises(OptionError, match="cannot be used with a generator reader"):
        feed(dataset, reader=reader, head__class_num=4, transform=blur)


class OneOf:
    """The world of one rank of several, which the others answer with what is in `answers`."""

    def __init__(self, rank, size, answers):
        self.rank, self.size, self.answers = rank, size, answers

    def all_gather_object(self, value):
        return [value if rank == self.rank else other for rank, other in enumerate(self.answers)]


@pytest.fixture
def parts(tmp_path):
    """Three parts of unlike counts; the last one is on another machine."""
    for part, per_class in enumerate((2, 3)):
        write_dataset(tmp_path / f"part-{part}", classes=2, per_class=per_class)
    (tmp_path / "file_list.txt").write_text("part-0\npart-1\npart-2\n")
    return tmp_path


def test_a_rank_opens_its_own_part_and_needs_no_other(parts):
    for rank, count in ((0, 4), (1, 6)):
        world = OneOf(rank, 3, [(count, "")] * 3)
        assert len(open_rank_source(str(parts), world)) == count


def test_parts_of_unlike_counts_are_refused_with_the_counts(parts):
    with pytest.raises(DataError, match=r"rank 0 has 4 and rank 1 has 6; partition the data again for 3"):
        open_rank_source(str(parts), OneOf(0, 3, [(4, ""), (6, ""), (5, "")]))


def test_what_one_rank_cannot_open_all_ranks_tell(parts):
    with pytest.raises(DataError, match=r"^rank 2: .*part-2 does not exist"):
        open_rank_source(str(parts), OneOf(2, 3, [(4, "")] * 3))
    with pytest.raises(DataError, match=r"^rank 1: it is gone"):
        open_rank_source(str(parts), OneOf(0, 3, [(4, ""), (0, "it is gone"), (4, "")]))


def test_parts_of_base64_lines_are_opened_one_a_rank(tmp_path):
    image = base64.b64encode(b"some image").decode()
    for part in range(2):
        lines = [f"{image}\t{10 * part + line}\n" for line in range(3)]
        (tmp_path / f"part_{part}").write_text("".join(lines))
    (tmp_path / "file_list.txt").write_text("part_0\npart_1\n")
    source = open_rank_source(str(tmp_path), OneOf(1, 2, [(3, "")] * 2))
    assert source.labels().tolist() == [10, 11, 12]
    assert source[2] == (b"some image", 12)
    assert source.name(2) == "part_1:3"


def test_another_number_of_parts_than_ranks_is_refused(parts):
    with pytest.raises(DataError, match="lists 3 parts for 2 ranks; start 3 ranks"):
        open_rank_source(str(parts), OneOf(0, 2, [(4, "")] * 2))


def test_rank_files_need_an_even_batch_and_no_reader(dataset):
    with pytest.raises(OptionError, match=r"'rank_files' .* cannot be used with a reader"):
        feed(dataset, reader=[(blur, 1)], data__order="rank_files")
    options = Options()
    options.set("data.order", "rank_files")
    with pytest.raises(OptionError, match="global batch size 7 is not a multiple of 2 ranks"):
        open_training_data(options, replace(ALONE, size=2), None, None, 7)


def test_ranks_with_files_of_their_own_read_each_sample_once(parts):
    (parts / "file_list.txt").write_text("part-1\n")
    made = feed(parts, data__order="rank_files", data__last_batch="keep")
    assert made.num_samples == 6
    assert len(set(names(made))) == 6


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


def test_augmentation_switched_off_leaves_images_alone():
    arguments = {
        "crop_padding": 4,
        "colour_jitter": (0.1, 0.2, 0.3),
        "low_resolution": 0.5,
        "random_erasing": 0.5,
    }
    switched = read_arguments(AugmentationArguments, arguments, "data.augmentation")
    assert all(vars(switched).values())  # every kind is on, a new one must be added above
    options = Options()
    options.set("data.augmentation", arguments)
    options.set_together(NO_AUGMENTATION)
    left = options.data.augmentation
    assert read_arguments(AugmentationArguments, left, "data.augmentation") == AugmentationArguments()
    assert options.data.flip is False


def test_an_argument_that_the_order_does_not_have_is_refused(dataset):
    with pytest.raises(OptionError, match="balance"):
        feed(dataset, data__order={"name": "block", "balance": 0.1})
