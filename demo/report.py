"""Compare the trained network with the untrained one and with raw pixels, and write the report.

    python demo/report.py demo/output/glyphs demo/output/run

Writes `figures.json`, `roc.png`, `report.md`, `summary.txt` and the reports of the protocols
(`protocols/`) into the run's folder.
"""

from __future__ import annotations

import argparse
import json
import logging
from pathlib import Path
from string import Template
from typing import Any

import numpy as np
import torch

from plsc import Entry
from plsc.checkpoint import list_checkpoints, load_weights, read_manifest
from plsc.data.decode import decode_image
from plsc.data.pairs import read_pairs
from plsc.evaluate.embed import embed_images
from plsc.evaluate.plots import plot_roc
from plsc.evaluate.verification import scores, verify
from plsc.models import build_model

TEXT = Template((Path(__file__).parent / "report_template.md").read_text(encoding="utf-8"))


def main() -> None:
    """Embed the pairs in three ways, evaluate each, and write the report."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("data", type=Path, help="output folder of make_glyphs.py")
    parser.add_argument("run", type=Path, help="output folder of train_glyphs.py")
    options = parser.parse_args()

    pairs = read_pairs(options.data / "glyphs_unseen.bin")
    lines = (options.data / "glyphs_unseen.tsv").read_text(encoding="utf-8").splitlines()[1:]
    is_hard = np.array([line.startswith("hard\t") for line in lines])
    checkpoint = list_checkpoints(options.run)[-1][0]
    manifest = read_manifest(checkpoint)
    model = manifest.options["model"]

    channels, height, width = model["image_shape"]
    shape = (channels, height, width)

    torch.manual_seed(manifest.options["train"]["seed"])  # for the initial weights of the training
    network = build_model(model["name"], model["emb_size"], shape, model["dropout"], model["neck"])

    def embed(name: str) -> np.ndarray:
        print(f"embedding {len(pairs.images):,} images with the {name} network", flush=True)
        return embed_images(network, pairs.images, shape, batch_size=500, device="cpu", flip=False)

    pixels = np.stack([decode_image(image, shape).numpy().ravel() for image in pairs.images])
    embeddings = {"pixels": center(pixels), "untrained": embed("untrained")}
    network.load_state_dict(load_weights(checkpoint))
    embeddings["trained"] = embed("trained")

    print("verifying the pairs", flush=True)
    figures = {name: judge(e, pairs.is_same, is_hard) for name, e in embeddings.items()}
    (options.run / "figures.json").write_text(json.dumps(figures, indent=1))
    cosines = {name: scores(e) for name, e in embeddings.items()}
    plot_roc({name: (c, pairs.is_same) for name, c in cosines.items()}, options.run / "roc.png")

    protocols = run_protocols(options.data / "unseen", options.run, checkpoint)
    table = make_table(figures)
    unseen = (options.data / "classes.tsv").read_text(encoding="utf-8").count("\nunseen\t")
    (options.run / "report.md").write_text(
        TEXT.substitute(
            table=table,
            protocols=protocols,
            classes=manifest.class_num,
            ranks=manifest.world_size,
            unseen=unseen,
            pairs=len(pairs),
            step=manifest.step,
            accuracy=f"{figures['trained']['accuracy']:.3f}",
            tar=f"{figures['trained']['tar_at_far_0.01']:.3f}",
        ),
        encoding="utf-8",
    )
    (options.run / "summary.txt").write_text(
        f"demo: {manifest.class_num} classes, {manifest.world_size} ranks, verification accuracy "
        f"{figures['trained']['accuracy']:.4f} on unseen classes, report in {options.run}\n"
    )
    print(table)


def run_protocols(unseen: Path, run: Path, checkpoint: Path) -> str:
    """Evaluate the held-out images with each protocol; return a Markdown table of the results."""
    ins = Entry()
    ins.set_checkpoint_dir(str(checkpoint))
    ins.set_flip(False)
    ins.set_test_batch_size(500)
    logging.getLogger("plsc").setLevel(logging.WARNING)
    lists = {name: unseen / f"{name}.csv" for name in ("gallery", "distractors")}
    arguments: dict[str, dict[str, Any]] = {
        "pairs": {"pairs": unseen / "pairs.txt"},
        "identify": {"images": unseen / "probes.csv", **lists},
        "templates": {"images": unseen, "templates": unseen / "templates"},
    }
    rows = ["| protocol | result |", "| --- | --- |"]
    for protocol, places in arguments.items():
        print(f"evaluating the protocol {protocol}", flush=True)
        results = ins.test(protocol, **places, output=run / "protocols" / protocol).values()
        found = "; ".join(result.summary() for result in results)
        rows.append(f"| [{protocol}](protocols/{protocol}/report.md) | {found} |")
    return "\n".join(rows)


def center(pixels: np.ndarray) -> np.ndarray:
    """Subtract the mean of each image [N, P]; otherwise the background makes all images similar."""
    pixels = pixels.astype(np.float32)
    return pixels - pixels.mean(axis=1, keepdims=True)


def judge(embeddings: np.ndarray, is_same: np.ndarray, is_hard: np.ndarray) -> dict[str, float]:
    """Return the metrics of one network over all pairs, and without the hard negatives."""
    result = verify(embeddings, is_same)
    easy = verify(embeddings[np.repeat(~is_hard, 2)], is_same[~is_hard])
    return {
        "accuracy": result.accuracy,
        "tar_at_far_0.01": result.tar_at_far[0.01],
        "accuracy_without_hard": easy.accuracy,
        "tar_at_far_0.01_without_hard": easy.tar_at_far[0.01],
    }


def make_table(figures: dict[str, dict[str, float]]) -> str:
    """Return the metrics as a Markdown table."""
    rows = ["|  | accuracy | TAR at FAR 1e-2 | accuracy, random negatives | TAR, random negatives |"]
    rows.append("| --- | --- | --- | --- | --- |")
    for name, values in figures.items():
        rows.append(f"| {name} | " + " | ".join(f"{v:.3f}" for v in values.values()) + " |")
    return "\n".join(rows)


if __name__ == "__main__":
    main()
