"""Each command of docs/recipes.md starts on ten images in the layout of its dataset."""

import re
import shlex
from pathlib import Path

import pytest

from plsc.cli import main
from plsc.data.writers import convert
from plsc.models import resnet
from tests.images import write_dataset, write_pair_file

PAGE = (Path(__file__).parents[2] / "docs" / "recipes.md").read_text()
COMMANDS = [
    shlex.split(block.replace("\\\n", "")) for block in re.findall(r"```sh\n(plsc launch .*?)```", PAGE, re.S)
]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory):
    root = tmp_path_factory.mktemp("recipes")
    images = write_dataset(root / "images", classes=5, per_class=2)
    folder = root / "dataset"
    folder.mkdir()
    convert(str(images), str(folder / "train.rec"))
    for name in ("lfw", "cfp_fp", "agedb_30"):
        write_pair_file(folder / f"{name}.bin", images, pairs=10)
    return folder


@pytest.mark.slow
@pytest.mark.parametrize(
    "words", COMMANDS, ids=[words[words.index("--checkpoint.save_dir") + 1] for words in COMMANDS]
)
def test_a_recipe_starts(words, dataset, tmp_path, monkeypatch, capsys):
    for depth in (50, 100):
        monkeypatch.setitem(resnet.IRESNET_BLOCKS, depth, (1, 1, 1, 1))
    flags = words[words.index("train") :]
    if any(word.startswith("timm/") for word in flags):
        pytest.importorskip("timm")
    small = ["--data.dataset_dir", str(dataset), "--checkpoint.save_dir", str(tmp_path)]
    small += ["--train.fast_dev_run", "1"]
    small += ["--train.batch_size", "2", "--train.micro_batches", "1", "--train.test_batch_size", "20"]
    small += ["--model.image_shape", "[3,32,32]", "--optim.lr", "0.001"]
    assert main([*flags, *small]) == 0
    assert "loss" in capsys.readouterr().out
