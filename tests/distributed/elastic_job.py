"""A training script that is slow until SAVE_DIR/hurry exists: elastic_job.py DATASET SAVE_DIR"""

from __future__ import annotations

import sys
import time
from pathlib import Path

from torch import nn

from plsc import Entry
from plsc.models import BaseModel
from tests.undrawn import draw_nothing

DATASET, SAVE_DIR = sys.argv[1:]


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.fc = nn.Linear(768, 16)

    def build_network(self, input, label, is_train=True):
        if not Path(SAVE_DIR, "hurry").exists():
            time.sleep(0.15)
        return self.fc(self.norm(input).flatten(1))


def main() -> None:
    draw_nothing()
    ins = Entry()
    ins.set_model(Net())
    ins.set_emb_size(16)
    ins.set_image_shape((3, 16, 16))
    ins.set_sync_batch_norm(True)
    ins.set_dataset_dir(DATASET)
    ins.set_model_save_dir(SAVE_DIR)
    ins.set_checkpoint_dir("last")
    ins.set_train_batch_size(2)
    ins.set_train_epochs(12)
    ins.set_log_period(1)
    ins.set_num_workers(0)
    ins.train()


if __name__ == "__main__":
    main()
