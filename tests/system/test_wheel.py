"""The package that pip builds: from an sdist, in an environment without this repository."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from plsc.version import DISTRIBUTION
from tests.images import write_dataset
from tests.system.test_native_builds import compiler_in

ROOT = Path(__file__).parents[2]


def run(*command: str | Path, cwd: Path, fails: bool = False) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, cwd=cwd, env=environment, capture_output=True, text=True)
    assert (done.returncode != 0) is fails, done.stdout + done.stderr
    return done.stderr if fails else done.stdout


@pytest.mark.slow
def test_a_wheel_built_from_the_sdist_trains_with_its_c_parts_and_finds_another_package_of_its_name(
    tmp_path, monkeypatch
):
    if shutil.which("gcc"):
        monkeypatch.setenv("CC", str(compiler_in(tmp_path)))  # without optimisation, which takes seconds
    tracked = run("git", "ls-files", "-z", cwd=ROOT).split("\0")
    for name in filter(None, tracked):
        if name.startswith("plsc/") or "/" not in name:
            (tmp_path / "source" / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / "source" / name).write_bytes((ROOT / name).read_bytes())
    run(sys.executable, "setup.py", "-q", "sdist", "-d", tmp_path / "sdist", cwd=tmp_path / "source")
    pip = sys.executable, "-m", "pip", "--disable-pip-version-check"
    offline = "--no-deps", "--no-build-isolation", "--no-index"
    (sdist,) = (tmp_path / "sdist").iterdir()
    run(*pip, "wheel", "-q", *offline, sdist, "-w", tmp_path / "wheel", cwd=tmp_path)
    (wheel,) = (tmp_path / "wheel").iterdir()

    environment = tmp_path / "environment"
    run(sys.executable, "-m", "venv", "--without-pip", environment, cwd=tmp_path)
    python = environment / "bin" / "python"
    run(*pip, "--python", python, "install", "-q", *offline, wheel, cwd=tmp_path)
    packages = Path(
        run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))", cwd=tmp_path).strip()
    )
    (packages / "torch_and_others.pth").write_text(
        sysconfig.get_path("purelib")
    )  # their .pth files are not read

    dataset = write_dataset(tmp_path / "set", classes=4, per_class=3)
    small = (
        "--model.name=SmallResNet",
        "--model.image_shape=[3,16,16]",
        "--train.batch_size=12",
        "--train.epochs=1",
    )
    words = ["train", f"--data.dataset_dir={dataset}", *small]
    both = f"from plsc.cli import main; main({words}); main(['doctor'])"  # in one process
    assert "C library" in run(python, "-c", both, cwd=tmp_path)
    assert "train" in run(environment / "bin" / "plsc", "--help", cwd=tmp_path)
    for name in ("heads/kernels/libnative.so", "data/native/libdata.so", "entry.py", "config/setters.pyi"):
        assert (packages / "plsc" / name).exists()

    (packages / "plsc" / "engine").mkdir()
    error = run(python, "-c", "import plsc", cwd=tmp_path, fails=True)
    assert "ImportError" in error
    assert "PaddlePaddle" in error


def test_every_command_that_installs_an_extra_names_our_distribution():
    project = (ROOT / "pyproject.toml").read_text()
    assert f'\nname = "{DISTRIBUTION}"\n' in project
    files = [
        *ROOT.glob("*.md"),
        *ROOT.glob("docs/**/*.md"),
        *ROOT.glob("demo/*.md"),
        *ROOT.glob("plsc/**/*.py"),
    ]
    text = "\n".join(path.read_text() for path in [*files, ROOT / "pyproject.toml"])
    named = re.findall(r"(\bplsc[\w-]*|[\s'\"]\.)\[([a-z,]+)\]", text)
    assert {name.strip("'\" ") for name, _ in named} == {DISTRIBUTION, "."}
    known = set(re.findall(r"^(\w+) = \[", project, re.MULTILINE))
    assert {extra for _, extras in named for extra in extras.split(",")} <= known
