"""An Entry that trains a small network for an epoch."""

from plsc import Entry
from plsc.config import Options


def entry(dataset, save_dir, **settings):
    ins = Entry()
    ins.set_seed(3)
    ins.set_model_name("SmallResNet")
    ins.set_emb_size(8)
    ins.set_image_shape((3, 16, 16))
    ins.set_dataset_dir(dataset)
    ins.set_model_save_dir(save_dir)
    ins.set_train_batch_size(12)
    ins.set_train_epochs(1)
    ins.set_log_period(1)
    ins.set_warmup_steps(0)
    ins.set_clip_norm(0)
    ins.set_lr_schedule("constant")
    ins.set_with_test(False)
    for name, value in settings.items():
        setter = getattr(ins, name)
        setter(**value) if isinstance(value, dict) else setter(value)
    return ins


SMALL = {
    "model.name": "SmallResNet",
    "model.emb_size": 8,
    "model.image_shape": (3, 16, 16),
    "train.batch_size": 12,
    "train.epochs": 1,
}


def shrink_defaults(monkeypatch, values):
    """Give options other defaults, for scripts that set no sizes."""
    init = Options.__init__

    def with_values(self):
        init(self)
        self.values |= values  # without an origin: nobody has set them

    monkeypatch.setattr(Options, "__init__", with_values)
