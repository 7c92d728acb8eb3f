"""What an export says about itself, and its layouts for other programs."""

import importlib.util
import json
import shutil
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open

import plsc
from plsc.data.pairs import read_pairs
from plsc.errors import OptionError
from plsc.evaluate.embed import embed_images
from plsc.evaluate.verification import verify
from plsc.export import open_model
from tests.images import write_dataset, write_pair_file
from tests.system.small_entry import entry

onnx = pytest.importorskip("onnx", reason="plsc-torch[export] is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="plsc-torch[export] is not installed")
hub = pytest.importorskip("huggingface_hub", reason="plsc-torch[timm] is not installed")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """A checkpoint of a network for images of 112 x 112."""
    folder = tmp_path_factory.mktemp("card")
    dataset = write_dataset(folder / "faces", classes=3, per_class=8)
    write_pair_file(dataset / "lfw.bin", dataset)
    entry(dataset, folder / "run", set_image_shape=(3, 112, 112)).train()
    return dataset, folder / "run"


def opened(trained):
    return entry(*trained, set_image_shape=(3, 112, 112), set_checkpoint_dir=trained[1] / "0")


def converted(trained, folder, **how):
    return opened(trained).convert_for_prediction(folder, **how)


@pytest.fixture(scope="module")
def explained(trained, tmp_path_factory):
    """An export with everything that can be measured."""
    folder = tmp_path_factory.mktemp("explained")
    unseen = write_dataset(folder / "unseen", classes=24, per_class=3, seed=9)
    return converted(trained, folder / "model", flip=True, classes=True, unseen=str(unseen))


def test_the_card_shows_data_results_and_capacity_as_recorded(trained, explained):
    model, text = open_model(explained), (explained / "README.md").read_text()
    pairs = read_pairs(trained[0] / "lfw.bin")
    measured = verify(model.embed(np.stack([model.preprocess(one) for one in pairs.images])), pairs.is_same)
    accuracy, tar = hub.ModelCard(text).data.eval_results
    low, high = measured.tar_intervals[0.1]
    assert accuracy.metric_value == measured.accuracy
    assert tar.metric_value == measured.tar_at_far[0.1]
    assert tar.metric_name == f"TAR at FAR 0.1, 95% interval {low:.4f} to {high:.4f}"
    assert "| faces | 24 | 3 |" in text
    assert f"| thresholds | {json.dumps(model.about['thresholds'])} |" in text
    assert f"{model.capacity.images:,} images of 24 classes, without distractors" in text
    assert "Nothing was measured" not in text
    assert "](" not in text  # neither pictures nor files of a report
    assert str(trained[0].parent) not in text


def test_the_card_names_pair_files_without_their_folders(trained, tmp_path):
    (tmp_path / "my faces").mkdir()
    pairs = shutil.copy(trained[0] / "lfw.bin", tmp_path / "my faces")
    how = {"set_image_shape": (3, 112, 112), "set_checkpoint_dir": trained[1] / "0", "set_val_targets": pairs}
    text = (entry(*trained, **how).convert_for_prediction(tmp_path / "model") / "README.md").read_text()
    result, *_ = hub.ModelCard(text).data.eval_results
    assert (result.dataset_type, result.dataset_name) == ("lfw.bin", "lfw.bin")
    assert "my faces" not in text


def test_the_card_says_that_nothing_was_measured(trained, tmp_path):
    folder = converted(trained, tmp_path / "model", graph="none")
    text = (folder / "README.md").read_text()
    assert "Nothing was measured." in text
    assert "| faces | 24 | 3 |" in text
    assert hub.ModelCard(text).data.eval_results is None


def test_the_files_say_how_to_use_them(explained):
    folder = explained
    model, config = open_model(folder), json.loads((folder / "config.json").read_text())
    graph = onnx.load(folder / "model.onnx")
    expected = {
        "fingerprint": model.fingerprint, "embedding_size": "8", "image_shape": "[3, 112, 112]",
        "flip": "true", "normalised": "true", "channels": "RGB", "preprocessing": "(x - 127.5) / 128",
        "resize": "turned upright by EXIF orientation; bilinear with antialiasing, without a crop",
        "thresholds": json.dumps(model.about["thresholds"]),
    }  # fmt: skip
    assert {one.key: one.value for one in graph.metadata_props} == expected
    assert {name: config[name] for name in ("embedding_size", "thresholds", "channels")} == {
        "embedding_size": 8, "thresholds": model.about["thresholds"], "channels": "RGB",
    }  # fmt: skip
    of_weights = {"fingerprint": model.about["fingerprint"], "flip": "false", "normalised": "false"}
    for path in folder.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt", **expected, **of_weights}


def pictures(trained):
    return [path.read_bytes() for path in sorted((trained[0] / "images").iterdir())[:16]]


@pytest.fixture(scope="module")
def expected(trained):
    """The 16 embeddings of the network."""
    network = plsc.load_network(trained[1] / "0")
    how = {"batch_size": 16, "device": "cpu", "flip": False}
    found = embed_images(network, pictures(trained), (3, 112, 112), **how)
    return F.normalize(torch.from_numpy(found)).numpy()


def test_triton_reads_the_configuration_and_serves_the_same_embeddings(trained, tmp_path, expected):
    triton = pytest.importorskip("tritonclient", reason="tritonclient is not installed")
    from google.protobuf import text_format

    # The package of this file imports grpc, which the file does not need.
    path = Path(triton.__path__[0]) / "grpc/model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    messages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(messages)
    folder = converted(trained, tmp_path / "repository/faces", layout="triton")
    config = text_format.Parse((folder / "config.pbtxt").read_text(), messages.ModelConfig())
    assert (config.backend, config.HasField("dynamic_batching")) == ("onnxruntime", True)
    session = onnxruntime.InferenceSession(folder / "1/model.onnx")
    for ours, theirs in ((config.input, session.get_inputs()), (config.output, session.get_outputs())):
        assert [(one.name, ["batch", *one.dims]) for one in ours] == [(one.name, one.shape) for one in theirs]
        assert [messages.DataType.Name(one.data_type) for one in ours] == ["TYPE_FP32"]
    model = open_model(folder)
    images = np.stack([model.preprocess(one) for one in pictures(trained)])
    assert len(images) <= config.max_batch_size
    found = session.run([config.output[0].name], {config.input[0].name: images})[0]
    assert np.abs(found - expected).max() < 1e-5
    assert np.array_equal(model.embed(images), found)


def as_insightface(path, pictures):
    """Embed RGB pictures as `ArcFaceONNX` of insightface 2.1: __init__ and get_feat."""
    names = [node.name for node in onnx.load(path).graph.node[:8]]
    found = [any(name.startswith(parts) for name in names) for parts in (("Sub", "_minus"), ("Mul", "_mul"))]
    mean, std = (0.0, 1.0) if all(found) else (127.5, 127.5)
    session = onnxruntime.InferenceSession(path)
    (given,), (output,) = session.get_inputs(), session.get_outputs()
    assert given.shape[2:] == list(pictures.shape[1:3])
    blob = ((pictures.astype(np.float32) - mean) * (1 / std)).transpose(0, 3, 1, 2)  # cv2.dnn.blobFromImages
    return session.run([output.name], {given.name: np.ascontiguousarray(blob, np.float32)})[0]


def test_insightface_computes_the_same_embeddings(trained, tmp_path, expected):
    folder = converted(trained, tmp_path / "model", layout="insightface")
    model = open_model(folder)
    images = np.stack([model.preprocess(one) for one in pictures(trained)])
    pixels = (images * 128 + 127.5).round().astype(np.uint8).transpose(0, 2, 3, 1)
    found = as_insightface(folder / "model.onnx", pixels)
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(model.embed(images) - expected).max() < 1e-5
    props = {one.key: one.value for one in onnx.load(folder / "model.onnx").metadata_props}
    assert props["preprocessing"] == "(x - 127.5) / 127.5"
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata()["preprocessing"] == "(x - 127.5) / 128"  # of the weights


def test_layouts_that_do_not_fit_are_refused(trained, tmp_path):
    small = entry(trained[0], tmp_path / "run")
    checkpoint = small.train().checkpoint
    small = entry(trained[0], tmp_path / "run", set_checkpoint_dir=checkpoint)
    for ins, how, message in (
        (opened(trained), {"layout": "trition"}, "did you mean 'triton'"),
        (opened(trained), {"layout": "triton", "graph": "torch"}, "ONNX"),
        (small, {"layout": "insightface"}, r"\[3, 16, 16\]; .* \[3, 112, 112\]"),
    ):
        with pytest.raises(OptionError, match=message):
            ins.convert_for_prediction(tmp_path / "model", **how)
