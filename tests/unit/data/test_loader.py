import gc
import os
import random
import resource
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchvision.transforms import v2

from plsc.data import loader as module
from plsc.data.batch import Batch, are_mirrored
from plsc.data.decode import decode_image
from plsc.data.loader import (
    AHEAD_PER_THREAD,
    THREAD_NAME,
    Recipe,
    SourceLoader,
    Stopped,
    in_order,
    run_in_process,
)
from plsc.data.order import BatchPlan
from plsc.data.sources import TorchDatasetSource, open_source
from plsc.data.sources.base import CachedSource, SampleCache
from plsc.errors import DataError
from tests.distributed.launch import Ranks
from tests.distributed.test_interruption import wait_for
from tests.unit.data.conftest import hostile_images

SHAPE = (3, 24, 20)


def loader(source, batch=4, rank=0, ranks=1, last_batch="keep", **options) -> SourceLoader:
    plan = BatchPlan(len(source), batch, ranks, 11, last_batch)
    running = {name: options.pop(name) for name in ("kind", "num_workers") if name in options}
    return SourceLoader(source, plan, rank, Recipe(SHAPE, 11, **options), **running)


RUNNING = [("threads", 0), ("threads", 3), ("processes", 2)]


def same(left: list[Batch], right: list[Batch]) -> bool:
    return len(left) == len(right) and all(
        torch.equal(a.final_images(), b.final_images())
        and torch.equal(a.labels, b.labels)
        and (a.names, a.problems) == (b.names, b.problems)
        for a, b in zip(left, right, strict=True)
    )


def test_batches_have_the_images_labels_and_names_of_the_plan(label_folder):
    source = open_source(label_folder(10))
    batches = loader(source, flip=False)
    assert batches.steps_per_epoch == 3
    for step, batch in enumerate(batches.epoch(5)):
        indices = batches.plan.global_indices(5, step).tolist()
        assert batch.names == [source.name(i) for i in indices]
        assert batch.labels.tolist() == [source[i][1] for i in indices]
        expected = torch.stack([decode_image(source[i][0], SHAPE) for i in indices])
        assert torch.equal(batch.images, expected)
        assert not batch.problems


def test_batches_of_a_transform_do_not_depend_on_the_kind_and_number_of_workers(label_folder):
    folder = label_folder(10)
    (folder / "images/3.jpg").write_bytes(b"no image")
    source = open_source(folder)
    transform = v2.Compose(
        [
            v2.RandAugment(2, 5),
            v2.RandomApply([v2.GaussianBlur(3)], 0.5),
            v2.RandomChoice([v2.RandomGrayscale(0.5), v2.ColorJitter(0.3, 0.3, 0.3, 0.1)]),
            v2.ToDtype(torch.float32, scale=True),
            v2.RandomErasing(0.5),
        ]
    )
    options = {"batch": 2, "transform": transform, "bad_images": "skip"}
    alone, helped = loader(source, **options), loader(source, num_workers=2, **options)
    assert helped.kind == "processes"
    expected = [list(alone.epoch(epoch)) for epoch in (0, 1)]
    next(helped.epoch(0))  # an epoch that is stopped early
    assert same(list(helped.epoch(0)), expected[0])
    assert same(list(helped.epoch(1, start_step=2)), expected[1][2:])
    assert same(list(loader(source, kind="threads", **options).epoch(0)), expected[0])
    assert not same(expected[0], expected[1])


@pytest.fixture
def damaged(label_folder) -> Path:
    """The first images are bad, each in another way; the last two are good."""
    hostile = hostile_images()
    folder = label_folder(len(hostile) + 5)
    for index, data in enumerate(hostile.values()):
        (folder / f"images/{index}.jpg").write_bytes(data)
    missing, huge, device = (folder / f"images/{len(hostile) + more}.jpg" for more in range(3))
    missing.unlink()
    os.truncate(huge, 2**30)
    device.unlink()
    os.mkfifo(device)
    return folder


@pytest.mark.parametrize(("kind", "num_workers"), RUNNING[::2])
def test_skip_leaves_out_counts_and_names_bad_images(damaged, kind, num_workers):
    source = open_source(damaged)
    skipping = loader(source, bad_images="skip", kind=kind, num_workers=num_workers)
    batches = list(skipping.epoch(0))
    good = [name for batch in batches for name in batch.names]
    problems = [problem.text for batch in batches for problem in batch.problems]
    kinds = {problem.kind for batch in batches for problem in batch.problems}
    assert kinds == {"undecodable", "missing", "empty", "too large", "unreadable"}
    assert sorted(good) == sorted(source.name(i) for i in range(len(source) - 2, len(source)))
    assert len(problems) == len(source) - 2
    for index in range(len(source) - 2):
        assert sum(problem.startswith(source.name(index) + ": ") for problem in problems) == 1
    assert all(len(batch.images) == len(batch.labels) == len(batch.names) for batch in batches)


@pytest.mark.parametrize(("kind", "num_workers"), RUNNING)
def test_stop_reports_the_bad_image_and_exceptions_keep_their_type(label_folder, kind, num_workers):
    folder = label_folder(5)
    (folder / "images/3.jpg").write_bytes((folder / "images/3.jpg").read_bytes()[:200])
    for source, error, match in (
        (open_source(folder), DataError, r"images/3\.jpg \(label\.txt:4\)"),
        (TorchDatasetSource(Buggy()), KeyError, "a mistake of mine"),
    ):
        with pytest.raises(error, match=match):
            list(loader(source, batch=2, kind=kind, num_workers=num_workers).epoch(0))


def test_an_error_of_a_transform_is_never_skipped(label_folder):
    source = open_source(label_folder(3))
    batches = loader(source, bad_images="skip", transform=lambda image: image[:1])
    with pytest.raises(DataError, match="tensor"):
        list(batches.epoch(0))


def test_float_images_of_a_dataset_stay_float_and_mixed_ones_are_refused():
    floats = [(torch.full(SHAPE, float(i)), i) for i in range(3)]
    (batch,) = loader(TorchDatasetSource(floats)).epoch(0)
    assert batch.images.dtype == torch.float32
    assert batch.images[:, 0, 0, 0].tolist() == batch.labels.tolist()
    items = [(torch.zeros(SHAPE), 0), (np.zeros((24, 20, 3), dtype=np.uint8), 1)]
    with pytest.raises(DataError, match="uint8 and float32"):
        list(loader(TorchDatasetSource(items)).epoch(0))


INTERRUPTED = """
import signal, sys, time
from pathlib import Path
from plsc.data.loader import SourceLoader
from plsc.data.order import BatchPlan
from plsc.data.loader import Recipe
from plsc.data.sources import open_source

signals = []
source = open_source(sys.argv[1])
batches = SourceLoader(
    source, BatchPlan(len(source), 1, 1, 0), 0, Recipe((3, 24, 20), 0), kind=sys.argv[2], num_workers=2
)
count = 0
for batch in batches.epoch(0):
    if count == 0:  # the first worker is running, the second may be starting
        for number in (signal.SIGINT, signal.SIGTERM):
            signal.signal(number, lambda number, frame: signals.append(number))
        Path("ready").touch()
        while not Path("go on").exists():
            time.sleep(0.01)
    count += 1
print(count, len(signals))
"""


@pytest.mark.parametrize(("number", "kind"), [(signal.SIGINT, "threads"), (signal.SIGTERM, "processes")])
def test_workers_leave_a_signal_to_the_main_process(label_folder, tmp_path, number, kind):
    script = tmp_path / "interrupted.py"
    script.write_text(INTERRUPTED)
    job = Ranks(script, 0, str(label_folder(30)), kind, cwd=tmp_path)
    wait_for((tmp_path / "ready").exists, job)
    os.killpg(job.pid, number)  # as a terminal and torchrun do
    (tmp_path / "go on").touch()
    output, errors = job.communicate()
    assert (job.returncode, output, errors) == (0, "30 1\n", "")


class DiesAtOne:
    def __len__(self) -> int:
        return 4

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 1:
            os.kill(os.getpid(), signal.SIGKILL)
        return torch.zeros(SHAPE), 0


def test_a_dead_worker_gives_a_one_line_error(monkeypatch):
    monkeypatch.setattr("plsc.data.loader.SECONDS_TO_WARNING", 1)
    with pytest.raises(DataError, match="process died"):
        list(loader(TorchDatasetSource(DiesAtOne()), batch=1, num_workers=1).epoch(0))


def test_the_input_is_normalised_mirrored_and_contiguous(label_folder):
    reading = loader(open_source(label_folder(10)), batch=10)
    for epoch in (1, 0):
        (batch,) = reading.epoch(epoch)
        mirrored = are_mirrored(11, epoch, reading.plan.global_indices(epoch, 0))
        assert batch.mirrored.tolist() == mirrored.tolist()
        assert 0 < mirrored.sum() < 10
    expected = (batch.final_images().float() - 127.5) / 128
    assert torch.equal(batch.input("cpu"), expected)
    assert batch.input("cpu").is_contiguous()
    for position, flip in enumerate(batch.mirrored.tolist()):
        plain = batch.images[position]
        assert torch.equal(batch.final_images()[position], plain.flip(-1) if flip else plain)


def test_a_label_out_of_range_is_a_bad_sample_of_kind_label(label_folder):
    source = open_source(label_folder(12))  # labels 0, 1, 2 in turn
    batches = list(loader(source, bad_images="skip", class_num=2).epoch(0))
    assert sum(len(batch.problems) for batch in batches) == 4
    assert {problem.kind for batch in batches for problem in batch.problems} == {"label"}
    assert all((batch.labels < 2).all() for batch in batches)
    with pytest.raises(DataError, match=r"label 2 is outside 0\.\.1"):
        list(loader(source, class_num=2).epoch(0))


class Noisy:
    """A dataset with random transforms, as those of torchvision."""

    targets = tuple(range(9))

    def __len__(self) -> int:
        return 9

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        noise = torch.rand(SHAPE) + random.random() + float(np.random.rand())
        return noise, index


def test_random_numbers_of_a_dataset_depend_only_on_sample_and_epoch():
    source = TorchDatasetSource(Noisy())
    alone = loader(source, batch=2)
    helped = loader(source, batch=4, num_workers=2)
    before = torch.get_rng_state()

    def by_label(reading, epoch):
        return {
            int(label): image
            for batch in reading.epoch(epoch)
            for label, image in zip(batch.labels, batch.images, strict=True)
        }

    first, again, later = by_label(alone, 0), by_label(helped, 0), by_label(alone, 1)
    assert all(torch.equal(first[label], again[label]) for label in range(9))
    through_cache = by_label(loader(CachedSource(source, SampleCache(None, 10**6, 9), SHAPE, False)), 0)
    assert all(torch.equal(first[label], through_cache[label]) for label in range(9))
    assert not any(torch.equal(first[label], later[label]) for label in range(9))
    assert torch.equal(torch.get_rng_state(), before)


class Buggy(Noisy):
    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        if index == 4:
            raise KeyError("a mistake of mine")
        return super().__getitem__(index)


BIG = 2**24


class Counting:
    """A source that counts how often each sample is read."""

    def __init__(self, source) -> None:
        self.source = source
        self.reads = np.zeros(len(source), dtype=int)

    def __len__(self):
        return len(self.source)

    def __getitem__(self, index):
        self.reads[index] += 1
        return self.source[index]

    def name(self, index):
        return self.source.name(index)

    def labels(self):
        return self.source.labels()


def caches(folder: Path, limit: int, count: int):
    return {"memory": SampleCache(None, limit, count), "disk": SampleCache(folder, limit, count)}


def batches_of(source, epoch=0, threads=2):
    loader = SourceLoader(source, BatchPlan(len(source), 4, 1, 0), 0, Recipe(SHAPE, 0), num_workers=threads)
    return list(loader.epoch(epoch))


@pytest.mark.parametrize("decoded", [False, True])
@pytest.mark.parametrize("kind", ["memory", "disk"])
def test_each_sample_is_read_once_and_the_batches_are_the_same(label_folder, tmp_path, kind, decoded):
    plain = open_source(label_folder(12))
    counting = Counting(plain)
    cached = CachedSource(counting, caches(tmp_path, BIG, 12)[kind], SHAPE, decoded)
    for epoch in range(3):
        for ours, expected in zip(batches_of(cached, epoch), batches_of(plain, epoch), strict=True):
            assert torch.equal(ours.final_images(), expected.final_images())
            assert torch.equal(ours.labels, expected.labels)
            assert ours.names == expected.names
    assert counting.reads.tolist() == [1] * 12


@given(st.lists(st.binary(max_size=300), max_size=30), st.integers(0, 4000))
def test_the_cache_limit_holds_and_cached_content_is_correct(tmp_path_factory, entries, limit):
    folder = tmp_path_factory.mktemp("cache")
    for cache in caches(folder, limit, len(entries) + 1).values():
        for index, data in enumerate(entries):
            cache.put(index, data)
            cache.put(index, data)  # a second put is ignored
        kept = [cache.get(index) for index in range(len(entries))]
        assert all(found in (None, data) for found, data in zip(kept, entries, strict=True))
        assert sum(len(data) for data in kept if data is not None) <= cache.used <= limit
        assert cache.get(len(entries)) is None


def test_a_full_disk_only_stops_caching(tmp_path):
    cache = SampleCache(tmp_path, BIG, 9)
    cache.put(0, b"a" * 100)
    assert not list(tmp_path.iterdir())  # it has no name
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, before[1]))
    try:
        cache.put(1, b"b" * 5000)
        cache.put(2, b"c" * 5000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
        signal.signal(signal.SIGXFSZ, handler)
    assert [cache.get(index) for index in range(3)] == [b"a" * 100, None, None]


def test_concurrent_threads_keep_the_cache_limit(tmp_path):
    for cache in caches(tmp_path, 50_000, 400).values():

        def fill(first: int, cache=cache) -> None:
            for index in range(first, 400, 3):
                cache.put(index, bytes([index % 256]) * 500)

        threads = [threading.Thread(target=fill, args=(first,)) for first in (0, 0, 1, 2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        found = [(i, data) for i in range(400) if (data := cache.get(i)) is not None]
        assert all(data == bytes([i % 256]) * 500 for i, data in found)
        assert 70 <= len(found) <= 100
        assert cache.used <= 50_000


def test_a_bad_image_is_reported_by_name_and_not_cached(label_folder, tmp_path):
    folder = label_folder(3)
    (folder / "images/1.jpg").write_bytes(b"\xff\xd8 no jpeg")
    cache = SampleCache(None, BIG, 3)
    cached = CachedSource(open_source(folder), cache, SHAPE, decoded=True)
    for _ in range(2):
        with pytest.raises(DataError, match=r"^images/1\.jpg \(label\.txt:2\): ") as caught:
            cached[1]
        assert caught.value.kind == "undecodable"
    assert cache.used == 0


def test_float_images_are_not_cached(tmp_path):
    items = [(torch.full(SHAPE, 0.5), 3)]
    cached = CachedSource(TorchDatasetSource(items), SampleCache(None, BIG, 1), SHAPE, decoded=True)
    assert torch.equal(cached[0][0], items[0][0])
    assert cached[0][1] == 3
    with pytest.raises(IndexError):
        cached[1]


# Threads and processes.


def data_threads() -> int:
    return sum(thread.name.startswith(THREAD_NAME) for thread in threading.enumerate())


def square(value: int, stopped) -> int:
    time.sleep(0.002 * (value % 3))  # so that they do not finish in order
    return value * value


@settings(max_examples=30)
@given(st.integers(0, 12), st.integers(0, 5))
def test_results_come_in_the_order_of_the_requests(count, threads):
    assert list(in_order(square, range(count), threads)) == [v * v for v in range(count)]
    assert data_threads() == 0


def test_a_bounded_number_of_requests_is_computed_ahead():
    taken, threads = [], 3

    def requests():
        for value in range(100):
            taken.append(value)
            yield value

    results = in_order(square, requests(), threads)
    for asked in range(1, 20):
        next(results)
        assert len(taken) <= asked + AHEAD_PER_THREAD * threads
    results.close()


def fail_at_three(value: int, stopped) -> int:
    if value == 3:
        raise KeyError("three")
    return value


@pytest.mark.parametrize("threads", [0, 1, 4])
def test_an_exception_is_raised_in_place_of_its_result_and_ends_the_threads(threads):
    results = in_order(fail_at_three, range(50), threads)
    assert [next(results) for _ in range(3)] == [0, 1, 2]
    with pytest.raises(KeyError, match="three"):
        next(results)
    assert data_threads() == 0


@pytest.mark.parametrize("is_interrupted", [True, False])
def test_closing_early_stops_running_work(is_interrupted):
    began, stopped_early = threading.Event(), []

    def work(value, stopped):
        if value == 0:
            return value
        began.set()
        while not stopped():
            time.sleep(0.001)
        stopped_early.append(value)
        raise Stopped

    results = in_order(work, range(100), 2)
    assert next(results) == 0
    assert began.wait(10)
    assert data_threads() == 2
    if is_interrupted:
        with pytest.raises(KeyboardInterrupt):
            results.throw(KeyboardInterrupt)
    del results
    assert data_threads() == 0
    assert 1 <= len(stopped_early) <= 2  # the running ones; nothing else was started


def test_a_forked_process_does_not_destroy_garbage_of_its_parent():
    runtime = pytest.importorskip("onnxruntime")
    value = onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [1])
    node = onnx.helper.make_node("Identity", ["x"], ["y"])
    out = onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [1])
    opsets = [onnx.helper.make_opsetid("", 17)]
    model = onnx.helper.make_model(onnx.helper.make_graph([node], "g", [value], [out]), opset_imports=opsets)
    options = runtime.SessionOptions()
    options.intra_op_num_threads = 3
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")

    def results():
        yield gc.collect()

    gc.disable()
    try:
        session = runtime.InferenceSession(model.SerializeToString(), options, ["CPUExecutionProvider"])
        cycle = [session]
        cycle.append(cycle)
        del session, cycle
        time.sleep(0.3)  # until its threads wait
        assert len(list(run_in_process(results))) == 1
    finally:
        gc.enable()


def test_a_process_that_does_not_answer_is_reported(monkeypatch, caplog):
    monkeypatch.setattr(module, "SECONDS_TO_WARNING", 1)
    monkeypatch.setattr(module, "SECONDS_TO_ERROR", 2)
    monkeypatch.setattr("torch.utils.data._utils.MP_STATUS_CHECK_INTERVAL", 0.1)  # until it is killed

    def results():
        yield 1
        threading.Event().wait()

    coming = run_in_process(results)
    assert next(coming) == 1
    with pytest.raises(DataError, match="no data for 2 s"):
        next(coming)
    assert "no data for 1 s" in caplog.text


SCRIPT = """
import multiprocessing, sys, torch
from plsc.data import loader
loader.SECONDS_TO_WARNING = 1
loader.SECONDS_TO_ERROR = 60

def image(size): return torch.ones(size, dtype=torch.uint8)
def function(size): return lambda: size
def fail(size):
    class Mine(Exception): pass
    raise Mine("the picture is missing")
def run(name, work):
    try:
        print(name, [len(one) for one in loader.WorkerProcesses(work, 2).in_order([1000, 3_000_000] * 2)])
    except Exception as error:
        print(name, type(error).__name__, " ".join(str(error).split("Caught ")[-1].split()), flush=True)
def daemon():
    process = multiprocessing.get_context("fork").Process(target=run, args=["daemon", image], daemon=True)
    process.start()
    process.join()

if __name__ == "__main__":
    multiprocessing.set_start_method(sys.argv[1])
    for name in sys.argv[2:]:
        daemon() if name == "daemon" else run(name, globals().get(name, lambda size: size))
"""


def run_script(folder, method, *names, shared_memory=""):
    """Return what is printed for each of the named functions: the sizes of its results, or its error."""
    (folder / "script.py").write_text(SCRIPT)
    command = [sys.executable, str(folder / "script.py"), method, *names]
    if shared_memory:
        if subprocess.run(["unshare", "-m", "true"], capture_output=True).returncode:
            pytest.skip("unshare needs root")
        mount = f'mount -t tmpfs -o size={shared_memory} tmpfs /dev/shm && exec "$@"'
        command = ["unshare", "-m", "sh", "-c", mount, "sh", *command]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    done = subprocess.run(command, capture_output=True, text=True, timeout=100, env=environment)
    printed = dict(line.split(" ", 1) for line in done.stdout.splitlines())
    assert printed.keys() == set(names), done.stderr
    return printed


def test_full_shared_memory_is_one_message(tmp_path):
    error = run_script(tmp_path, "forkserver", "image", shared_memory="2m")["image"]  # less than one result
    assert error.startswith("DataError /dev/shm")
    assert "--shm-size" in error


def test_what_processes_cannot_do_is_one_message(tmp_path):
    errors = run_script(tmp_path, "fork", "function", "fail", "daemon")
    assert "Can't pickle" in errors["function"]
    assert "picture is missing" in errors["fail"]
    spawned = run_script(tmp_path, "spawn", "image", "lambda")
    assert spawned["image"] == "[1000, 3000000, 1000, 3000000]"  # although it takes over a second to start
    for error in (errors["daemon"], spawned["lambda"]):
        assert error.startswith("OptionError ")
        assert "data.num_workers" in error
