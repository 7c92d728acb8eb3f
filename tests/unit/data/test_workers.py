import gc
import os
import subprocess
import sys
import threading
import time

import onnx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from plsc.data import workers
from plsc.data.workers import AHEAD_PER_THREAD, THREAD_NAME, Stopped, in_order, run_in_process
from plsc.errors import DataError


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
    monkeypatch.setattr(workers, "SECONDS_TO_WARNING", 1)
    monkeypatch.setattr(workers, "SECONDS_TO_ERROR", 2)
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
from plsc.data import workers
workers.SECONDS_TO_WARNING = 1
workers.SECONDS_TO_ERROR = 60

def image(size): return torch.ones(size, dtype=torch.uint8)
def function(size): return lambda: size
def fail(size):
    class Mine(Exception): pass
    raise Mine("the picture is missing")
def run(name, work):
    try:
        print(name, [len(one) for one in workers.WorkerProcesses(work, 2).in_order([1000, 3_000_000] * 2)])
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
