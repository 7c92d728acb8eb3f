"""Train on several ranks with parts of a user; write what each saw: entry_worker.py CASE DATASET FOLDER"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import torch

from plsc import Callback
from plsc.errors import TrainingError
from plsc.train.callbacks import EVENTS
from tests.spoiled import Spoiled, SpoilImage
from tests.system.small_entry import entry

CASE, DATASET, FOLDER = sys.argv[1], Path(sys.argv[2]), Path(sys.argv[3])
RANK, LAST = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]) - 1


class Recorder(Callback):
    def __init__(self):
        self.events = []


for event in EVENTS:
    setattr(Recorder, event, lambda self, context, event=event: self.events.append([event, context.step]))


def stopped(ins):
    """The last rank asks to stop."""

    def stop(context):
        if RANK == LAST and context.step == 3:
            context.stop("the last rank has seen enough")

    recorder = Recorder()
    ins.add_callback(recorder)
    ins.add_callback(stop, "after_step")
    ins.add_callback(lambda context: context.layer_output("stem"), "after_backward", layers=["stem"])
    result = ins.train()
    return [result.steps, str(result.checkpoint), recorder.events]


def failing(ins):
    """A callback of the last rank raises; each rank writes what it got."""

    def fail(context):
        if RANK == LAST:
            raise ZeroDivisionError("on the last rank only")

    ins.add_callback(fail, "epoch_end")
    if child := os.fork():  # all ranks are ended when the first one ends: it stays until another has written
        _, status = os.waitpid(child, 0)
        until = time.monotonic() + 20
        while not (FOLDER / "0.json").exists() and time.monotonic() < until:
            time.sleep(0.05)
        os._exit(os.waitstatus_to_exitcode(status))
    try:
        ins.train()
    except Exception as error:
        write([type(error).__name__, str(error)])
        raise


def bad_loss(ins):
    """The last rank gets an image that spoils its loss; return its name and the message."""
    ins.set_model(Spoiled())
    ins.set_sync_batch_norm(True)
    spoil = SpoilImage(image=1, rank=LAST)
    ins.add_callback(spoil)
    try:
        ins.train()
    except TrainingError as error:
        return [getattr(spoil, "names", ["", ""])[1], str(error)]


class Norms(Callback):
    """torch's norm of the whole gradients, and the logged one."""

    def __init__(self):
        self.expected, self.logged_norms = [], []

    def after_backward(self, context):
        gradients = [p.grad for p in context.network.parameters() if p.grad is not None]
        self.expected.append(float(torch.nn.utils.get_total_norm(gradients)))

    def logged(self, context):
        self.logged_norms.append(context.metrics["gradient_norm"])


def logged(ins):
    """Return the entries that a logger got, and the norms."""
    ins.set_log_period(2)
    ins.set_callbacks("gradient_norm")
    entries, norms = [], Norms()
    ins.add_callback(norms)
    ins.set_loggers("jsonl", SimpleNamespace(write=entries.append, close=lambda: None))
    ins.train()
    return [entries, norms.expected, norms.logged_norms]


def write(seen):
    part = FOLDER / f"{RANK}.part"
    part.write_text(json.dumps(seen))
    part.rename(FOLDER / f"{RANK}.json")


def main():
    epochs = 2 if CASE in ("logged", "failing") else 5
    ins = entry(DATASET, FOLDER / "run", set_train_epochs=epochs, set_train_batch_size=4)
    write({one.__name__: one for one in (stopped, failing, bad_loss, logged)}[CASE](ins))


if __name__ == "__main__":
    main()
