"""A training script that is in no hurry while all nodes are there: elastic_job.py DATASET SAVE_DIR"""

from __future__ import annotations

import os
import sys
import time

from torch import nn

from plsc import Entry
from plsc.models import BaseModel

ALL_RANKS = "3"


class Net(BaseModel):
    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(3)
        self.fc = nn.Linear(768, 16)

    def build_network(self, input, label, is_train=True):
        if os.environ["WORLD_SIZE"] == ALL_RANKS:
            time.sleep(0.2)
        return self.fc(self.norm(input).flatten(1))


def main() -> None:
    dataset, save_dir = sys.argv[1:]
    ins = Entry()
    ins.set_model(Net())
    ins.set_emb_size(16)
    ins.set_image_shape((3, 16, 16))
    ins.set_sync_batch_norm(True)
    ins.set_dataset_dir(dataset)
    ins.set_model_save_dir(save_dir)
    ins.set_checkpoint_dir("last")
    ins.set_train_batch_size(7)
    ins.set_train_epochs(30)
    ins.set_log_period(1)
    ins.set_num_workers(0)
    ins.train()


if __name__ == "__main__":
    main()
