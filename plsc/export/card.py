"""What an export says about itself: README.md, config.json, and metadata in the ONNX and safetensors files.

README.md is a model card with the header of the Hugging Face Hub. It shows what the checkpoint, the export
and reports of ``plsc test`` recorded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import yaml
from safetensors.torch import load_file

from plsc.checkpoint import Manifest
from plsc.checkpoint.shard_file import checksum
from plsc.config.data import DataOptions
from plsc.errors import DataError, printable
from plsc.evaluate.report import Section, lines_of
from plsc.export.folder import DIVISORS, WEIGHTS_NAME, describe_file, write_tensors
from plsc.storage.regular import read_regular
from plsc.storage.urls import base_name, shown

_MOST_BYTES = 2**24  # of a report or a licence
_TASK = "image-feature-extraction"  # of the Hub
_FOLDERS = re.compile(r"(\w+:/)?/\S*/(?=\S)")  # of absolute paths and URLs
_MARKS = re.compile(r"[\\|<\[`]")  # of Markdown
_LICENCES = {"README.md": r"\A---\n(?:(?!---).*\n)*?license: *(\S.*)", "LICENSE": r"(\S.*)"}


def facts(about: dict[str, Any], of_graph: bool) -> dict[str, Any]:
    """Return what a user of the graph, or of the weights, must know; about: the contents of model.json."""
    graph, given = about["graph"] if of_graph else {}, about["input"]
    flip = bool(graph.get("flip"))
    found: dict[str, Any] = {
        "fingerprint": "flip-" * flip + about["fingerprint"],
        "embedding_size": about["output"]["shape"][1],
        "normalised": of_graph,
        "flip": flip,
    }
    if isinstance(given, dict) and "preprocessing" in given:  # of images
        found["image_shape"] = given["shape"][1:]
        found |= {name: one for name, one in given.items() if name not in ("shape", "dtype")}
        found["preprocessing"] = f"(x - 127.5) / {DIVISORS[graph.get('layout', 'plain')]:g}"
    return {**found, "thresholds": about["thresholds"]} if "thresholds" in about else found


def add_metadata(folder: Path, about: dict[str, Any]) -> None:
    """Add the facts to the files of an export, and their new sizes and checksums to `about`."""
    for what in {"weights", "classes", "graph"} & about.keys():
        name = about[what]["file"]
        path, held = folder / name, _as_text(facts(about, of_graph=what == "graph"))
        if path.suffix == ".safetensors":
            write_tensors(path, load_file(path), {"format": "pt", **held})
        elif path.suffix == ".onnx":
            import onnx

            model = onnx.load(path)
            onnx.helper.set_model_props(model, held)
            onnx.save(model, path)
        about[what] |= describe_file(folder, name)
    about["weights"] |= asdict(checksum(folder / WEIGHTS_NAME))


def _as_text(values: dict[str, Any]) -> dict[str, str]:
    return {name: one if isinstance(one, str) else json.dumps(one) for name, one in values.items()}


def write_card(
    folder: Path, about: dict[str, Any], manifest: Manifest, measured: list[Section], reports: Sequence[str],
    data: DataOptions,
) -> None:  # fmt: skip
    """Write README.md and config.json of an export.

    about: the contents of model.json. manifest: of the checkpoint. measured: the results of the export.
    reports: folders of ``plsc test``. data: options of the user; licences are read only in their datasets.
    Raises DataError if a folder has no report, or that of other weights.
    """
    measured = [replace(one, title=base_name(shown(one.title))) for one in measured]  # without folders
    network, known = about["options"]["model"]["name"], facts(about, of_graph="graph" in about)
    config = {"model_type": "plsc", "architectures": [network], **known}
    (folder / "config.json").write_text(json.dumps(config, indent=1) + "\n", encoding="utf-8")
    limits = ["- The results hold for samples like those that were measured, prepared as above."]
    limits += ["- Results on pairs, of a gallery or per group that are not shown above were not measured."]
    if "graph" in about:
        largest = about["graph"]["difference"]["largest"]
        limits.append(f"- The graph differs from the network by up to {largest:.1e} per value.")
    header: dict[str, Any] = {"library_name": "plsc", "tags": ["plsc", network]}
    header |= {"pipeline_tag": _TASK} if "image_shape" in known else {}
    if indexed := [_indexed(one) for one in measured if "tar_intervals" in one.values]:
        header["model-index"] = [{"name": network, "results": indexed}]
    results = _results(measured, reports, about["fingerprint"]) or "Nothing was measured."
    lines = [
        *("---", yaml.safe_dump(header, sort_keys=False).rstrip(), "---", ""),
        *(f"# {network}: embeddings of {known['embedding_size']} values", ""),
        *(f"Written by plsc {about['plsc']} from step {about['step']:,} of a run. Input and output:", ""),
        *("| | |", "|---|---|", *(f"| {name} | {one} |" for name, one in _as_text(known).items()), ""),
        *("## Training data", "", *_training_data(manifest, data), ""),
        *("## Results", "", results, ""),
        *("## Limits", "", *limits, ""),
    ]
    (folder / "README.md").write_text("\n".join(lines), encoding="utf-8")


def _results(measured: Sequence[Section], reports: Sequence[str], fingerprint: str) -> str:
    """Return all results one level lower, without pictures, files and the folders of paths."""
    lines = ["Of this export:", ""] if measured else []
    lines += [line for section in measured for line in lines_of(section)]
    for folder in reports:
        try:
            text = read_regular(Path(folder) / "report.md", _MOST_BYTES).decode()
        except (OSError, ValueError) as error:
            raise DataError(
                f"{folder}: {error}; expected a folder that plsc test --protocol wrote"
            ) from error
        if fingerprint not in text:
            raise DataError(f"the report {folder} is not of the exported weights; test their checkpoint")
        lines += ["", "Of `plsc test`, whose embedding (see below), and so thresholds, may be others:", ""]
        lines += text.splitlines()[2:]  # without its title
    text = "\n".join(line for line in lines if not line.startswith(("![", "[")))
    return _FOLDERS.sub("", re.sub("^## ", "### ", text, flags=re.MULTILINE)).strip()


def _indexed(section: Section) -> dict[str, Any]:
    """Return the result on a pair file for the ``model-index`` of the Hub."""
    found, metrics = section.values, [{"type": "accuracy", "value": section.values["accuracy"]}]
    for far, (low, high) in found["tar_intervals"].items():
        if far not in found["unresolved_fars"]:
            name = f"TAR at FAR {far}, 95% interval {low:.4f} to {high:.4f}"
            metrics.append({"type": "tar", "value": found["tar_at_far"][far], "name": name})
    task = {"type": _TASK, "name": "verification of pairs"}
    return {"task": task, "dataset": {"type": section.title, "name": section.title}, "metrics": metrics}


def _training_data(manifest: Manifest, given: DataOptions) -> list[str]:
    """Return a table of the datasets that the checkpoint names, with the licences of those that are given."""
    data = manifest.options.get("data") or {}
    place = str(data.get("dataset_dir") or "not recorded")
    is_given = Path(place).absolute() == Path(given.dataset_dir).absolute()
    rows = ["| dataset | images | classes | licence |", "|---|---:|---:|---|"]
    for name, head in manifest.heads.items():
        images = "not recorded" if head.num_samples is None else f"{head.num_samples:,}"
        licence = _licence(Path(place)) if is_given and not name else "not recorded"
        cells = name or base_name(shown(place)), images, f"{head.class_num:,}", licence
        line = " | ".join(_MARKS.sub(r"\\\g<0>", printable(cell)) for cell in cells)
        rows.append(f"| {line} |")
    return rows


def _licence(place: Path) -> str:
    """Return what README.md in the folder of a dataset names, or the first line of its LICENSE."""
    for name, pattern in _LICENCES.items():
        with suppress(OSError, ValueError):
            text = read_regular(place / name, _MOST_BYTES, place).decode()
            if found := re.search(pattern, text):
                return found[1]
    return "not recorded"
