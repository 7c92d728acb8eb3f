"""Trains on several ranks; one rank asks to stop, and all ranks write which events they saw."""

import json
import sys
from pathlib import Path

from plsc import Callback
from plsc.train.callbacks import EVENTS
from tests.system.small_entry import entry


class Recorder(Callback):
    def __init__(self):
        self.events = []


for event in EVENTS:
    setattr(Recorder, event, lambda self, context, event=event: self.events.append([event, context.step]))


def stop(context):
    if context.rank == context.world_size - 1 and context.step == 3:
        context.stop("the last rank has seen enough")


def main():
    dataset, folder = map(Path, sys.argv[1:])
    ins = entry(dataset, folder / "run", set_train_epochs=5, set_train_batch_size=4)
    recorder = Recorder()
    ins.add_callback(recorder)
    ins.add_callback(stop, "after_step")
    ins.add_callback(lambda context: context.layer_output("stem"), "after_backward", layers=["stem"])
    result = ins.train()
    rank = ins._world.rank
    (folder / f"{rank}.json").write_text(json.dumps([result.steps, str(result.checkpoint), recorder.events]))


def fail(context):
    if context.rank == context.world_size - 1:
        raise ZeroDivisionError("on the last rank only")


def failing():
    dataset, folder = map(Path, sys.argv[1:3])
    ins = entry(dataset, folder / "run", set_train_epochs=2, set_train_batch_size=4)
    ins.add_callback(fail, "epoch_end")
    ins.train()


if __name__ == "__main__":
    {"failing": failing, "": main}[sys.argv[3] if sys.argv[3:] else ""]()
