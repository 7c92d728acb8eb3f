"""Python blocks of README.md and docs/ run, flags of `plsc` in shell blocks exist, links lead somewhere;
each recipe starts on ten images.

The blocks of a page run in order, in one namespace, in a folder with a dataset `faces` and its checkpoint
`saved_model/7`; the default network and images are small. A block after `<!-- not run: reason -->` is left
out. test_head_alone.py checks what the blocks of docs/head.md compute.
"""

from __future__ import annotations

import re
import shlex
import shutil
from pathlib import Path

import pytest
import torch
from mdit_py_plugins.anchors.index import slugify
from torch import nn

from plsc.cli import COMMANDS, main
from plsc.cli.parser import CommandParser, find_command
from plsc.data.writers import convert
from plsc.models import resnet
from tests.images import write_dataset, write_pair_file
from tests.system.small_entry import SMALL, entry, shrink_defaults

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
_BLOCK = re.compile(r"(<!-- not run: .*-->\n+)?^```(python|sh)\n(.*?)^```$", re.MULTILINE | re.DOTALL)


def blocks(page, language):
    found = _BLOCK.findall(page.read_text(encoding="utf-8"))
    return [code for skipped, written, code in found if written == language and not skipped]


def names(language):
    pages = [page for page in PAGES if blocks(page, language)]
    return [pytest.param(page, id=str(page.relative_to(ROOT))) for page in pages]


@pytest.fixture(scope="module")
def surroundings(tmp_path_factory):
    folder = tmp_path_factory.mktemp("docs")
    write_dataset(folder / "faces", classes=6, per_class=4)
    write_pair_file(folder / "faces" / "lfw.bin", folder / "faces")
    for name in ("train_data", "faces_val"):
        shutil.copytree(folder / "faces", folder / name)
    result = entry(folder / "faces", folder / "run").train()
    shutil.copytree(result.checkpoint, folder / "saved_model" / "7")
    return folder


@pytest.mark.parametrize("page", names("python"))
def test_the_python_blocks_run(page, surroundings, tmp_path, monkeypatch):
    shutil.copytree(surroundings, tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    shrink_defaults(monkeypatch, {**SMALL, "train.with_test": False})
    backbone = nn.Sequential(nn.Flatten(), nn.Linear(48, 512))
    names = {
        "__name__": "docs",
        "backbone": backbone,
        "optimizer": torch.optim.SGD(backbone.parameters(), 0.1),
        "batches": [(torch.randn(4, 3, 4, 4), torch.arange(4))],
        "classes": 10,
    }
    for code in blocks(page, "python"):
        exec(compile(code, str(page), "exec"), names)


@pytest.mark.parametrize("page", names("sh"))
def test_the_flags_of_commands_exist(page, monkeypatch):
    monkeypatch.setattr("plsc.cli.parser.set_from_file", lambda options, file: None)
    lines = "".join(blocks(page, "sh")).replace("\\\n", " ").splitlines()
    if page.stem == "migrate":
        lines += re.findall(r"`(plsc (?:launch|data) [^`]+)`", page.read_text(encoding="utf-8"))
    for line in lines:
        command = re.split(r"\s(?:[|>&;#]|2>)", line.replace("-m plsc.cli", "&& plsc").split("&& ")[-1])[0]
        words = shlex.split(command)
        if words[:1] == ["plsc"] and words[-1:] != ["--help"]:
            name, found, words = find_command(COMMANDS, words[1:])
            CommandParser(name, found).read(words)


def anchors(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    titles = [
        re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", one) for one in re.findall(r"^#+ (.*)$", text, re.MULTILINE)
    ]
    return {slugify(title) for title in titles}


@pytest.mark.parametrize(
    "page", [*PAGES, ROOT / "CONTRIBUTING.md", ROOT / "CHANGELOG.md"], ids=lambda page: page.stem
)
def test_links_to_files_and_headings_exist(page):
    for link in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if "://" not in link:
            path, _, anchor = link.partition("#")
            target = page.parent / path if path else page
            assert target.exists(), link
            assert not anchor or target.suffix != ".md" or anchor in anchors(target), link


RECIPES = [
    shlex.split(block.replace("\\\n", ""))
    for block in re.findall(r"```sh\n(plsc launch .*?)```", (ROOT / "docs/recipes.md").read_text(), re.S)
]


@pytest.fixture(scope="module")
def ten_images(tmp_path_factory):
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
    "words", RECIPES, ids=[words[words.index("--checkpoint.save_dir") + 1] for words in RECIPES]
)
def test_a_recipe_starts(words, ten_images, tmp_path, monkeypatch, capsys):
    for depth in (50, 100):
        monkeypatch.setitem(resnet.IRESNET_BLOCKS, depth, (1, 1, 1, 1))
    flags = words[words.index("train") :]
    if any(word.startswith("timm/") for word in flags):
        pytest.importorskip("timm")
    small = ["--data.dataset_dir", str(ten_images), "--checkpoint.save_dir", str(tmp_path)]
    small += ["--train.fast_dev_run", "1"]
    small += ["--train.batch_size", "2", "--train.micro_batches", "1", "--train.test_batch_size", "20"]
    small += ["--model.image_shape", "[3,32,32]", "--optim.lr", "0.001"]
    assert main([*flags, *small]) == 0
    assert "loss" in capsys.readouterr().out
