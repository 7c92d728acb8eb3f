"""Other implementations for benchmarks/gpu.sh, which also run where there is no network.

    python benchmarks/rivals.py fetch build/rivals              # needs a network; then copy the folder
    python benchmarks/rivals.py fetch build/rivals --python-version 3.12 --only-binary=:all:
    python benchmarks/rivals.py install build/rivals            # what is missing here, into build/rivals/site

fetch: wheels of cut-cross-entropy and Liger, of what plsc needs besides torch, and two files of insightface
(MIT licence); other arguments go to `pip download`, such as those of another Python. install: each missing
one from the folder, else from the package index; nothing that is installed changes. The folder has no torch:
under 100 MB.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import urllib.request
from pathlib import Path

# Import name: package. torchvision is left out, because it belongs to one version of torch.
PACKAGES = {
    "cut_cross_entropy": "cut-cross-entropy",
    "liger_kernel": "liger-kernel",
    "pyarrow": "pyarrow",
    "pybase64": "pybase64",
    "simplejpeg": "simplejpeg",
    "safetensors": "safetensors",
    "fsspec": "fsspec",
    "yaml": "PyYAML",
    "tqdm": "tqdm",
    "pytest": "pytest",
    "iniconfig": "iniconfig",
    "pluggy": "pluggy",
    "pytest_timeout": "pytest-timeout",
    "hypothesis": "hypothesis",
    "sortedcontainers": "sortedcontainers",
}
INSIGHTFACE = (
    "https://raw.githubusercontent.com/deepinsight/insightface/7fadd420c2351d0ffa8cac403421c1a3ed733365/"
    "recognition/arcface_torch/"
)
FILES = ("partial_fc_v2.py", "losses.py")


def missing() -> list[str]:
    """Return the import names of packages and files that this Python lacks."""
    return [name for name in (*PACKAGES, "partial_fc_v2") if importlib.util.find_spec(name) is None]


def pip(*arguments: str, seconds: float) -> bool:
    """Run pip; return whether it succeeded in this time."""
    command = [sys.executable, "-m", "pip", *arguments, "--quiet", "--disable-pip-version-check", "--no-deps"]
    try:
        return subprocess.run(command, timeout=seconds, stdin=subprocess.DEVNULL).returncode == 0
    except subprocess.TimeoutExpired:
        return False


def fetch(folder: Path, options: list[str]) -> list[str]:
    """Fill the folder; return the names of what could not be fetched."""
    folder.mkdir(parents=True, exist_ok=True)
    failed = [
        package
        for package in PACKAGES.values()
        if not pip("download", "--dest", str(folder), *options, package, seconds=300)
    ]
    for name in FILES:
        try:
            with urllib.request.urlopen(INSIGHTFACE + name, timeout=30) as answer:
                (folder / name).write_bytes(answer.read())
        except OSError as error:
            print(f"{name}: {error}; to fetch it elsewhere:\n  curl -o {folder}/{name} {INSIGHTFACE}{name}")
            failed.append(name)
    return failed


def install(folder: Path) -> None:
    """Install what is missing into the folder's `site`, and print what remains missing."""
    site = folder / "site"
    sys.path.insert(0, str(site))
    if not missing():
        return
    site.mkdir(parents=True, exist_ok=True)
    for name in FILES:
        if (folder / name).is_file():
            shutil.copyfile(folder / name, site / name)
    is_online = True
    for name in missing():
        if name not in PACKAGES:
            print(f"{name}.py of insightface is missing; its rows are a rewrite. To fetch it:")
            for file in FILES:
                print(f"  curl -o {folder}/{file} {INSIGHTFACE}{file}")
            continue
        target = ["install", "--target", str(site), PACKAGES[name]]
        if pip(*target, "--no-index", "--find-links", str(folder), seconds=60):
            continue
        if is_online:  # the first failure may be a network that answers nothing
            is_online = pip(*target, "--retries", "0", "--timeout", "5", seconds=60)
        if not is_online:
            print(
                f"{PACKAGES[name]} is missing, and can't be had here: bash benchmarks/gpu.sh --fetch {folder}"
            )


def main() -> None:
    """Fetch or install."""
    if len(sys.argv) < 3 or sys.argv[1] not in ("fetch", "install"):
        sys.exit(__doc__)
    folder = Path(sys.argv[2])
    if sys.argv[1] == "install":
        install(folder)
    elif failed := fetch(folder, sys.argv[3:]):
        sys.exit(f"could not fetch {', '.join(failed)}")
    else:
        print(f"filled {folder}; copy it, and set RIVALS={folder} for benchmarks/gpu.sh")


if __name__ == "__main__":
    main()
