"""Export a checkpoint: its network as a checked graph, with thresholds, class weights and thumbnails."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from plsc.checkpoint import load_weights
from plsc.checkpoint.load import read_class_names
from plsc.config import Options
from plsc.data.batch import to_input
from plsc.data.decode import decode_image
from plsc.errors import CheckpointError, DataError, OptionError, suggest
from plsc.evaluate.capacity import CapacityResult, evaluate_capacity
from plsc.evaluate.report import Section
from plsc.evaluate.verification import VerificationResult
from plsc.export.folder import (
    CLASSES_NAME,
    DIVISORS,
    ROC_NAME,
    THUMBNAILS_NAME,
    TORCH_NAME,
    add_metadata,
    describe_file,
    write_about,
    write_card,
    write_tensors,
    write_triton_config,
    write_weights,
)
from plsc.export.graph import GRAPHS, Served, as_served, missing_package, write_graph
from plsc.export.served import open_model
from plsc.heads.softmax import normalised
from plsc.parallel.failure import on_main_rank
from plsc.parallel.world import World
from plsc.predict.network import Trained, open_trained
from plsc.predict.predict import Samples, open_samples
from plsc.predict.protocols import open_dataset
from plsc.storage.publish import publishing_folder
from plsc.storage.urls import local_folder
from plsc.train.build import open_targets
from plsc.train.callbacks import UserParts
from plsc.train.data import check_unseen
from plsc.train.targets import Target, evaluate_targets

logger = logging.getLogger(__name__)


BATCHES = (1, 3, 64)
TOLERANCE = 1e-5  # of a component of a unit vector

Embed = Callable[[np.ndarray], np.ndarray]


def load_graph(folder: Path, kind: str) -> Embed:
    """Load the graph of a folder that this process has written, in its own runtime."""
    if kind == "onnx":
        return open_model(folder).embed
    program = torch.export.load(folder / TORCH_NAME).module()

    def embed(images: np.ndarray) -> np.ndarray:
        with torch.no_grad():
            found: np.ndarray = program(torch.from_numpy(images)).numpy()
        return found

    return embed


def compare(served: Served, embed: Embed, images: np.ndarray) -> tuple[float, float]:
    """Return the largest difference of a value, and the lowest cosine, over batches of BATCHES images.

    images: float32 [N, C, H, W]; repeated if there are fewer than the largest batch. Raises CheckpointError
    if the differences are too large.
    """
    largest, lowest = 0.0, 1.0
    for batch in BATCHES:
        some = np.resize(images, (batch, *images.shape[1:]))
        with torch.inference_mode():
            expected = served(torch.from_numpy(some)).numpy()
        found = embed(some)
        # nan compares as the largest difference
        largest = float(np.maximum(largest, np.abs(found - expected).max()))
        lowest = float(np.minimum(lowest, (found * expected).sum(axis=1).min()))
    if not largest <= TOLERANCE:
        raise CheckpointError(
            f"the graph differs from the network: largest difference {largest:.1e}, lowest cosine "
            f"{lowest:.6f}; the limit is {TOLERANCE:g}"
        )
    return largest, lowest


_CHECKED = 64  # images
_THUMBNAIL_QUALITY = 85


@dataclass(frozen=True)
class Conversion:
    """What to export.

    Attributes:
        graph: ``onnx``, ``torch`` or ``none``; None: ``onnx`` if its packages are there, and for images.
        flip: add the embedding of the mirrored image, inside the graph.
        classes: also write the class weights.
        thumbnails: also write one image per class.
        unseen: path or URL of a labelled dataset of classes that were not trained; also write how many
            strangers a gallery accepts.
        layout: ``plain``, ``triton`` or ``insightface``; the others only for ONNX.
    """

    graph: str | None = None
    flip: bool = False
    classes: bool = False
    thumbnails: bool = False
    unseen: str | None = None
    layout: str = "plain"

    def __post_init__(self) -> None:
        known: dict[str, tuple[str, Collection[str]]] = {
            "layout": (self.layout, DIVISORS),
            "graph": (self.graph or "none", GRAPHS),
        }
        for name, (value, names) in known.items():
            if value not in names:
                raise OptionError(f"{name} is {value!r}; {suggest(value, names)}")
        other_layout = self.layout != "plain" and self.graph not in (None, "onnx")
        if other_layout or (self.graph == "none" and (self.flip or self.unseen)):
            needed = "an ONNX graph" if other_layout else "a graph"
            raise OptionError(f"layout, flip and unseen need {needed}, not {self.graph!r}")


def run_conversion(
    options: Options,
    world: World,
    user: UserParts,
    output: Path | None = None,
    conversion: Conversion | None = None,
) -> Path:
    """Write the checkpoint's network as a folder for prediction; see `Entry.convert_for_prediction`."""
    conversion = conversion or Conversion()
    trained = open_trained(options, world, user.model)
    network, config = trained.network, trained.config
    missing = missing_package() if conversion.graph in (None, "onnx") else ""
    missing = missing or ("" if network.example_input is None else "a network for images")
    if missing and conversion.graph not in (None, "none"):
        raise OptionError(
            f"the graph {conversion.graph!r} needs {missing}; or choose 'none', for the weights"
        )
    if conversion.graph is None:
        if missing:
            logger.info(f"no ONNX graph is written: missing {missing}")
        conversion = replace(conversion, graph="none" if missing else "onnx")
    folder = output or local_folder(config.checkpoint.save_dir, "checkpoint.save_dir") / "model"
    exporter = Exporter(trained, user, conversion)
    as_graph = replace(trained, config=config.changed({"data.flip": conversion.flip}))
    results = exporter.evaluate(as_graph) if conversion.graph != "none" else []
    if conversion.graph == "none" and "data.val_targets" in config.explicit:
        world.log("data.val_targets has no effect: without a graph, a model has no thresholds")
    elif conversion.graph != "none" and not results:
        world.log("the model has no thresholds: data.val_targets names no pair file")
    capacity = exporter.capacity(as_graph)
    on_main_rank(world, f"write {folder}", lambda: exporter.write(folder, results, capacity))
    world.log(f"wrote the network of {trained.path} to {folder}")
    return folder


Results = list[tuple[Target, VerificationResult]]


@dataclass(frozen=True)
class Exporter:
    """Write the folder of a model."""

    trained: Trained
    user: UserParts
    conversion: Conversion

    def evaluate(self, trained: Trained) -> Results:
        """Return the results of the network on the first pair file, if there is one; a collective."""
        targets = open_targets(trained.config, trained.world, self.user.test_reader)[:1]
        results = evaluate_targets(trained.evaluated, targets)
        return [(target, results[target.name]) for target in targets if isinstance(target, Target)]

    def capacity(self, trained: Trained) -> CapacityResult | None:
        """Return what a gallery holds, from the unseen classes; None if none are given; a collective."""
        if self.conversion.unseen is None:
            return None
        unseen = open_dataset(trained, self.conversion.unseen)
        check_unseen(unseen.place, unseen.class_names, trained.checkpoint)
        return evaluate_capacity(trained.embed(unseen.images, unseen.place), unseen.labels)

    def write(self, folder: Path, results: Results, capacity: CapacityResult | None = None) -> None:
        """Write the folder. Raises CheckpointError if the graph differs from the network; nothing is left."""
        samples = self._open_samples()
        with publishing_folder(folder) as temporary:
            about = write_weights(
                temporary, self.trained.network, self.trained.config.as_dict(), self.trained.manifest
            )
            if self.conversion.classes:
                about["classes"] = self._write_classes(temporary)
            if self.conversion.thumbnails:
                assert samples is not None
                about["thumbnails"] = self._write_thumbnails(temporary / THUMBNAILS_NAME, samples)
            measured: list[Section] = []
            if self.conversion.graph != "none":
                measured = self._write_graph(temporary, about, samples, results)
                if capacity is not None:
                    about["capacity"] = capacity.as_dict()
                    measured.append(capacity.section("Capacity"))
                    logger.info(capacity.summary())
            add_metadata(temporary, about)
            write_about(temporary, about)
            write_card(temporary, about, self.trained.manifest, measured)
            if self.conversion.layout == "triton":
                write_triton_config(temporary, about, max(BATCHES))

    def _open_samples(self) -> Samples | None:
        """Return the images for checks and thumbnails; None if there are none and none are needed."""
        conversion, data = self.conversion, self.trained.config.data
        is_set = self.user.predict_reader is not None or "data.dataset_dir" in self.trained.config.explicit
        is_useful = conversion.graph != "none" and (is_set or Path(data.dataset_dir).exists())
        if not (is_useful or conversion.thumbnails):
            return None
        samples = open_samples(self.trained, None, self.user.predict_reader)
        if not isinstance(samples, Samples):
            raise OptionError("predict_reader is a generator, but an export reads images by number")
        return samples

    def _write_graph(
        self, folder: Path, about: dict[str, Any], samples: Samples | None, results: Results
    ) -> list[Section]:
        """Write and check the graph, and return its results; add description and thresholds to `about`."""
        kind = self.conversion.graph
        assert kind is not None
        served = as_served(self.trained.network, self.conversion.flip)
        images = self._images(samples)
        started = time.monotonic()
        about["graph"] = write_graph(folder, served, kind, images.shape[1:], self.conversion.layout)
        write_about(folder, about)
        largest, cosine = compare(served, load_graph(folder, kind), images)
        about["graph"]["difference"] = {"largest": largest, "cosine": cosine}
        logger.info(
            f"{kind}: largest difference {largest:.1e}, lowest cosine {cosine:.6f}, compared "
            f"with the network in batches of {BATCHES} images ({time.monotonic() - started:.1f} s)"
        )
        measured = []
        for target, result in results:
            from plsc.evaluate.plots import plot_roc  # importing matplotlib takes a third of a second

            about["accuracy"] = result.accuracy
            about["thresholds"] = thresholds_of(result)
            plot_roc({target.name: (result.cosines, target.is_same)}, folder / ROC_NAME)
            measured.append(result.section(target.name))
        return measured

    def _images(self, samples: Samples | None) -> np.ndarray:
        """Return images, random ones or of many classes, pre-processed, float32 [n, C, H, W]."""
        if samples is None:
            logger.info("no dataset is set, so the graph is compared on random images")
            shape = (_CHECKED, *self.trained.config.model.image_shape)
            pixels = np.random.default_rng(0).integers(0, 256, shape, np.uint8)
            return to_input(torch.from_numpy(pixels), "cpu").numpy()
        order = np.argsort(samples.source.labels(), kind="stable")
        numbers = order[np.linspace(0, len(order) - 1, min(_CHECKED, len(order))).astype(np.int64)]
        images = [to_input(image[None], "cpu").numpy() for image in self._decoded(samples, numbers)]
        return np.concatenate(images)

    def _decoded(self, samples: Samples, numbers: np.ndarray) -> Iterator[Tensor]:
        """Yield images, without those that cannot be decoded if `data.bad_images` is ``skip``."""
        for number in map(int, numbers):
            try:
                image = decode_image(samples.source[number][0], self.trained.config.model.image_shape)
            except DataError as error:
                if self.trained.config.data.bad_images != "skip":
                    raise error.at(samples.source.name(number)) from error
                continue
            yield image

    def _write_classes(self, folder: Path) -> dict[str, Any]:
        """Write the L2-normalised class weights and the class names."""
        weight = load_weights(self.trained.path, "class_weights")["weight"]
        if weight.ndim != 2:
            raise CheckpointError(f"{self.trained.path} has sub-centres; expected a vector per class")
        tensors = {"weight": normalised(weight.float())[0].contiguous()}
        names = read_class_names(*self.trained.checkpoint)
        if names is not None:
            tensors["names.bytes"] = torch.from_numpy(names.text).contiguous()
            tensors["names.ends"] = torch.from_numpy(names.ends).contiguous()
        write_tensors(folder / CLASSES_NAME, tensors)
        return {"count": len(weight), "names": names is not None, **describe_file(folder, CLASSES_NAME)}

    def _write_thumbnails(self, folder: Path, samples: Samples) -> dict[str, Any]:
        """Write the first image of each class, in the size of the network's input."""
        folder.mkdir()
        labels = samples.source.labels()
        order = np.argsort(labels, kind="stable")
        numbers, firsts = np.unique(labels[order], return_index=True)
        count = 0
        for number, of_class in zip(numbers.tolist(), np.split(order, firsts[1:]), strict=True):
            image = next(self._decoded(samples, of_class), None)
            if image is None:
                continue
            count += 1
            pixels = image.permute(1, 2, 0).numpy()
            picture = Image.fromarray(pixels[:, :, 0] if pixels.shape[2] == 1 else pixels)
            picture.save(folder / f"{number}.jpg", quality=_THUMBNAIL_QUALITY)
        return {"count": count, "folder": THUMBNAILS_NAME}


def thresholds_of(result: VerificationResult) -> dict[str, float]:
    """Return the lowest accepted cosine by FAR, such as ``"1e-3"``, for FARs that the pairs can resolve."""
    return {
        f"1e{math.log10(far):.0f}": threshold
        for far, threshold in result.threshold_at_far.items()
        if threshold is not None and far not in result.unresolved_fars
    }
