"""The folder of an exported model: its files, card and layouts, how it is served, and what is refused."""

import importlib.util
import io
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import fsspec
import numpy as np
import pytest
import torch
import torch.nn.functional as F
from PIL import Image
from safetensors import safe_open
from safetensors.torch import load_file
from torch import nn

import plsc
import plsc.checkpoint
import plsc.export
from plsc.cli import main
from plsc.data.decode import decode_image
from plsc.data.pairs import read_pairs
from plsc.data.sources import open_source
from plsc.errors import CheckpointError, DataError, OptionError
from plsc.evaluate.capacity import measure_capacity
from plsc.evaluate.embed import embed_images
from plsc.evaluate.verification import FARS, verify
from plsc.export.folder import describe_file
from plsc.models.base_model import BaseModel
from plsc.predict.predict import Samples
from tests.images import write_dataset, write_pair_file
from tests.system.small_entry import entry

onnx = pytest.importorskip("onnx", reason="plsc-torch[export] is not installed")
onnxruntime = pytest.importorskip("onnxruntime", reason="plsc-torch[export] is not installed")
hub = pytest.importorskip("huggingface_hub", reason="plsc-torch[timm] is not installed")


class Flat(BaseModel):
    def __init__(self, emb_size=8):
        super().__init__()
        self.fc = nn.Linear(3 * 16 * 16, emb_size)

    def build_network(self, input, label, is_train=True):
        return self.fc(input.flatten(1))


class Large(BaseModel):
    """Of the channels' means of 8 x 8 parts of an image."""

    def __init__(self, emb_size=8):
        super().__init__()
        self.fc = nn.Linear(3 * 14 * 14, emb_size)

    def build_network(self, input, label, is_train=True):
        return self.fc(F.avg_pool2d(input, 8).flatten(1))


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    folder = tmp_path_factory.mktemp("export")
    dataset = write_dataset(folder / "faces", classes=3, per_class=8)
    write_pair_file(dataset / "lfw.bin", dataset)
    entry(dataset, folder / "run").train()
    return dataset, folder / "run"


@pytest.fixture(scope="module")
def flat(trained, tmp_path_factory):
    """A checkpoint of a network of one layer."""
    ins = entry(trained[0], tmp_path_factory.mktemp("flat") / "run")
    ins.set_model(Flat())
    return ins.train().checkpoint


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    dataset, run = trained
    folder = tmp_path_factory.mktemp("exported") / "model"
    unseen = write_dataset(folder.parent / "unseen", classes=24, per_class=3, seed=9)
    given = ["--flip", "--classes", "--thumbnails", "--quiet", "--data.dataset_dir", str(dataset)]
    assert main(["export", str(run / "0"), str(folder), *given, "--unseen", str(unseen)]) == 0
    return folder


def test_onnxruntime_sends_nothing_to_its_maker(exported, tmp_path):
    code = f"import plsc.export; plsc.export.open_model({str(exported)!r})"
    subprocess.run([sys.executable, "-c", code], env={**os.environ, "HOME": str(tmp_path)}, check=True)
    assert not list(tmp_path.glob(".cache/*"))  # where it keeps what could not be sent


def of_flat(trained, flat, **settings):
    ins = entry(*trained, set_checkpoint_dir=flat, **settings)
    ins.set_model(Flat())
    return ins


def test_the_folder_describes_the_network_and_loads_as_the_checkpoint(trained):
    dataset, run = trained
    folder = entry(dataset, run, set_checkpoint_dir=run / "0").convert_for_prediction(graph="none")
    assert folder == run / "model"
    about = json.loads((folder / "model.json").read_text())
    assert about["input"] == {
        "shape": ["batch", 3, 16, 16], "dtype": "float32", "channels": "RGB",
        "resize": "turned upright by EXIF orientation; bilinear with antialiasing, without a crop",
        "preprocessing": "(x - 127.5) / 128",
    }  # fmt: skip
    assert about["output"] == {"shape": ["batch", 8], "normalised": False}
    card = (folder / "README.md").read_text()
    assert "Nothing was measured." in card
    hub.ModelCard(card)  # valid
    images = torch.randn(5, 3, 16, 16)
    expected = plsc.load_network(run / "0")
    assert torch.equal(plsc.load_network(folder)(images), expected(images))
    assert load_file(folder / "model.safetensors").keys() == expected.state_dict().keys()
    assert len({path.stat().st_mode for path in folder.iterdir()}) == 1  # others may read what they can list
    with pytest.raises(CheckpointError, match="exists"):
        entry(dataset, run, set_checkpoint_dir=run / "0").convert_for_prediction(graph="none")


def test_no_secret_of_a_location_is_exported(trained, flat, tmp_path):
    secret = "https://me:geheim@host.example/x.safetensors?X-Amz-Signature=geheim"
    ins = of_flat(trained, flat, set_pretrained=secret)
    folder = ins.convert_for_prediction(tmp_path / "model", graph="torch")
    assert not [path.name for path in folder.rglob("*") if path.is_file() and b"geheim" in path.read_bytes()]
    assert "host.example" in (folder / "model.json").read_text()


def test_names_of_predictions_have_no_secret(trained):
    files = fsspec.filesystem("memory")
    files.put(str(trained[0] / "images"), "/me:geheim@named/images", recursive=True)
    files.pipe("/me:geheim@named/label.txt", (trained[0] / "label.txt").read_bytes())
    assert "geheim" not in Samples(open_source("memory://me:geheim@named"), "images", 0).names([0])[0]


def test_a_custom_network_is_named_by_whoever_loads_it(trained, tmp_path):
    class Local(Flat):
        def __init__(self, emb_size, bias):
            super().__init__(emb_size)
            self.fc.bias = nn.Parameter(self.fc.bias) if bias else None

    dataset, _ = trained
    ins = entry(dataset, tmp_path / "run")
    ins.set_model(Local(8, bias=False))
    checkpoint = ins.train().checkpoint
    ins = entry(dataset, tmp_path / "run", set_checkpoint_dir=checkpoint)
    ins.set_model(Local(8, bias=False))
    folder = ins.convert_for_prediction(tmp_path / "model")
    with pytest.raises(CheckpointError, match="class"):
        plsc.load_network(folder)
    network = plsc.load_network(folder, model=Local(8, bias=False))
    assert torch.equal(network.fc.weight, load_file(folder / "model.safetensors")["fc.weight"])
    for place in (folder, checkpoint):  # by the class, which need not be in a module; it gets its arguments
        assert torch.equal(plsc.load_network(place, model=Local).fc.weight, network.fc.weight)
    with pytest.raises(OptionError, match="Linear"):
        plsc.load_network(checkpoint, model=nn.Linear)


def test_without_a_dataset_a_graph_is_compared_on_random_images(
    trained, flat, tmp_path, messages, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    ins = plsc.Entry()
    ins.set_checkpoint_dir(flat)
    ins.set_model(Flat())
    model = plsc.export.open_model(ins.convert_for_prediction("model", classes=True))
    assert any("random images" in line for line in messages)
    assert model.class_weights()[0].shape == (3, 8)
    image = model.preprocess(pictures(trained[0])[0])[None]
    expected = F.normalize(plsc.load_network(flat, model=Flat())(torch.from_numpy(image)))
    assert np.abs(model.embed(image) - expected.detach().numpy()).max() < 1e-5
    assert main(["export", str(trained[1] / "0"), "other", "--thumbnails"]) == 1
    assert not Path("other").exists()


def test_a_folder_of_another_version_or_with_a_network_of_another_module_is_refused(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "model")
    good = (folder / "model.json").read_text()
    for old, new, message in (
        ('"version": 1', '"version": 2', "version"),
        ("SmallResNet", "os:system", "class"),
    ):
        (folder / "model.json").write_text(good.replace(old, new))
        with pytest.raises(CheckpointError, match=message):
            plsc.load_network(folder)


def pictures(dataset):
    return [path.read_bytes() for path in sorted((dataset / "images").iterdir())]


def test_the_served_model_embeds_as_the_network_with_flip(trained, exported):
    dataset, run = trained
    model = plsc.export.open_model(exported)
    images = np.stack([model.preprocess(picture) for picture in pictures(dataset)])
    assert np.abs(model.embed(images) - eager(run / "0", dataset, flip=True)).max() < 1e-5
    assert model.embed(images[:0]).shape == (0, 8)
    for wrong in (images[:, :1], images[0], images.astype(np.float64)):
        with pytest.raises(CheckpointError, match="images"):
            model.embed(wrong)


def test_thresholds_accept_at_most_the_far_of_the_run_own_pairs(trained, exported):
    dataset, _ = trained
    model = plsc.export.open_model(exported)
    pairs = read_pairs(dataset / "lfw.bin")
    embeddings = model.embed(np.stack([model.preprocess(one) for one in pairs.images]))
    result = verify(embeddings, pairs.is_same)
    assert model.about["accuracy"] == result.accuracy
    assert list(model.thresholds) == [0.1]  # 20 negative pairs resolve no lower one
    accepted = result.cosines >= model.thresholds[0.1] - 1e-6
    assert accepted[~pairs.is_same].mean() <= 0.1
    assert accepted[pairs.is_same].mean() == result.tar_at_far[FARS[0]]


def test_unseen_classes_give_the_fpir_of_galleries(trained, exported, tmp_path):
    ins = entry(*trained, set_checkpoint_dir=trained[1] / "0")
    model = plsc.export.open_model(exported)
    paths = [
        exported.parent / f"unseen/images/{label}_{copy}.png" for label in range(24) for copy in range(3)
    ]
    embeddings = model.embed(np.stack([model.preprocess(path.read_bytes()) for path in paths]))
    expected = measure_capacity(embeddings, np.repeat(np.arange(24), 3))
    assert (model.capacity.classes, model.capacity.images) == (24, 72)
    for found in model.capacity.rows[1:-1]:  # the graph's embeddings differ by rounding errors
        for identities in (10, 1000):
            near = expected.fpir(found.threshold, identities).high
            assert model.capacity.fpir(found.threshold, identities).high == pytest.approx(near, rel=0.2)
    assert model.about["capacity"]["holds"] is None  # a weak network
    with pytest.raises(DataError, match=f"the classes of {trained[0]} were trained"):
        ins.convert_for_prediction(tmp_path / "other", unseen=str(trained[0]))
    few = write_dataset(tmp_path / "few", classes=3, per_class=3)
    with pytest.raises(DataError, match="images of 3 classes"):
        ins.convert_for_prediction(tmp_path / "other", unseen=str(few))


def test_class_weights_and_thumbnails(trained, exported, tmp_path):
    dataset, run = trained
    model = plsc.export.open_model(exported)
    weights, names = model.class_weights()
    expected = plsc.checkpoint.load_weights(run / "0", "class_weights")["weight"]
    assert names is None
    assert np.allclose(weights, F.normalize(expected).numpy())
    for label in range(3):
        with Image.open(io.BytesIO(model.thumbnail(label))) as picture:
            found = np.asarray(picture).astype(int)
        first = decode_image((dataset / f"images/{label}_0.png").read_bytes(), (3, 16, 16))
        assert np.abs(found - first.permute(1, 2, 0).numpy()).mean() < 16  # JPEG
    assert model.thumbnail(3) is None
    folder = Path(shutil.copytree(exported, tmp_path / "model"))
    (folder / "thumbnails/0.jpg").unlink()
    (folder / "thumbnails/0.jpg").symlink_to(dataset / "label.txt")  # a model may link to any file
    linked = plsc.export.open_model(folder)
    assert linked.thumbnail(0) is None
    assert linked.thumbnail(1) == model.thumbnail(1)


def test_broken_images_are_skipped_by_option(trained, tmp_path):
    dataset = shutil.copytree(trained[0], tmp_path / "faces")
    (dataset / "images/0_0.png").write_bytes(b"no image")
    words = ["export", str(trained[1] / "0"), str(tmp_path / "model"), "--thumbnails", "--graph", "none"]
    words += ["--quiet", "--data.dataset_dir", str(dataset)]
    assert main(words) == 1
    assert main([*words, "--data.bad_images", "skip"]) == 0
    assert all((tmp_path / f"model/thumbnails/{label}.jpg").is_file() for label in range(3))


def test_a_graph_of_torch_could_run_code_and_is_not_served(trained, flat, tmp_path, messages):
    # Of a network that is exported quickly; tests/system/test_export_networks.py has others.
    folder = of_flat(trained, flat).convert_for_prediction(tmp_path / "model", graph="torch")
    assert any(line.startswith("torch: largest difference") for line in messages)
    with pytest.raises(CheckpointError, match="code"):
        plsc.export.open_model(folder)


class Unstable(Flat):
    def build_network(self, input, label, is_train=True):
        return self.fc(input.flatten(1) + torch.compiler.is_compiling())


def test_a_graph_that_differs_leaves_no_folder(trained, tmp_path):
    dataset, _ = trained
    ins = entry(dataset, tmp_path / "run")
    ins.set_model(Unstable())
    checkpoint = ins.train().checkpoint
    ins = entry(dataset, tmp_path / "run", set_checkpoint_dir=checkpoint)
    ins.set_model(Unstable())
    with pytest.raises(CheckpointError, match="differs"):
        ins.convert_for_prediction(tmp_path / "model")
    assert not [one for one in tmp_path.iterdir() if "model" in one.name]


def test_the_card_shows_data_results_and_capacity_as_recorded(trained, exported):
    model, text = plsc.export.open_model(exported), (exported / "README.md").read_text()
    pairs = read_pairs(trained[0] / "lfw.bin")
    measured = verify(model.embed(np.stack([model.preprocess(one) for one in pairs.images])), pairs.is_same)
    assert hub.ModelCard(text).data.library_name == "plsc"
    assert f"{measured.accuracy:.4f}" in text or f"{measured.accuracy:.2%}" in text
    assert "| faces | 24 | 3 |" in text
    assert f"| thresholds | {json.dumps(model.about['thresholds'])} |" in text
    assert f"{model.capacity.images:,} images of 24 classes" in text
    assert "](" not in text  # neither pictures nor files of a report
    assert str(trained[0].parent) not in text


def test_the_files_say_how_to_use_them(exported):
    model, config = plsc.export.open_model(exported), json.loads((exported / "config.json").read_text())
    expected = {
        "fingerprint": model.fingerprint, "embedding_size": "8", "image_shape": "[3, 16, 16]",
        "flip": "true", "normalised": "true", "channels": "RGB", "preprocessing": "(x - 127.5) / 128",
        "resize": "turned upright by EXIF orientation; bilinear with antialiasing, without a crop",
        "thresholds": json.dumps(model.about["thresholds"]),
    }  # fmt: skip
    graph = onnx.load(exported / "model.onnx")
    assert {one.key: one.value for one in graph.metadata_props} == expected
    assert (config["embedding_size"], config["channels"]) == (8, "RGB")
    assert config["thresholds"] == model.about["thresholds"]
    of_weights = {"fingerprint": model.about["fingerprint"], "flip": "false", "normalised": "false"}
    for path in exported.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert file.metadata() == {"format": "pt", **expected, **of_weights}


def eager(checkpoint, dataset, shape=(3, 16, 16), flip=False, **how):
    """The embeddings of the network, of norm 1."""
    network = plsc.load_network(checkpoint, **how)
    found = embed_images(network, pictures(dataset), shape, batch_size=7, device="cpu", flip=flip)
    return F.normalize(torch.from_numpy(found)).numpy()


def test_triton_reads_the_configuration_and_serves_the_same_embeddings(trained, flat, tmp_path):
    triton = pytest.importorskip("tritonclient", reason="tritonclient is not installed")
    from google.protobuf import text_format

    # The package of this file imports grpc, which the file does not need.
    path = Path(triton.__path__[0]) / "grpc/model_config_pb2.py"
    spec = importlib.util.spec_from_file_location("model_config_pb2", path)
    messages = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(messages)
    folder = of_flat(trained, flat).convert_for_prediction(tmp_path / "repository/faces", layout="triton")
    config = text_format.Parse((folder / "config.pbtxt").read_text(), messages.ModelConfig())
    assert (config.backend, config.HasField("dynamic_batching")) == ("onnxruntime", True)
    session = onnxruntime.InferenceSession(folder / "1/model.onnx")
    for ours, theirs in ((config.input, session.get_inputs()), (config.output, session.get_outputs())):
        assert [(one.name, ["batch", *one.dims]) for one in ours] == [(one.name, one.shape) for one in theirs]
        assert [messages.DataType.Name(one.data_type) for one in ours] == ["TYPE_FP32"]
    model = plsc.export.open_model(folder)
    images = np.stack([model.preprocess(one) for one in pictures(trained[0])])
    assert len(images) <= config.max_batch_size
    found = session.run([config.output[0].name], {config.input[0].name: images})[0]
    assert np.abs(found - eager(flat, trained[0], model=Flat())).max() < 1e-5
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


def test_insightface_computes_the_same_embeddings(trained, tmp_path):
    large = {"set_image_shape": (3, 112, 112), "set_model_name": f"{__name__}:Large"}
    run = entry(trained[0], tmp_path / "run", **large).train().checkpoint
    ins = entry(trained[0], tmp_path / "out", set_checkpoint_dir=run, **large)
    folder = ins.convert_for_prediction(tmp_path / "model", layout="insightface")
    model, expected = plsc.export.open_model(folder), eager(run, trained[0], (3, 112, 112), model=Large())
    images = np.stack([model.preprocess(one) for one in pictures(trained[0])])
    pixels = (images * 128 + 127.5).round().astype(np.uint8).transpose(0, 2, 3, 1)
    assert np.abs(as_insightface(folder / "model.onnx", pixels) - expected).max() < 1e-5
    assert np.abs(model.embed(images) - expected).max() < 1e-5
    props = {one.key: one.value for one in onnx.load(folder / "model.onnx").metadata_props}
    assert props["preprocessing"] == "(x - 127.5) / 127.5"
    with safe_open(folder / "model.safetensors", "pt") as file:
        assert file.metadata()["preprocessing"] == "(x - 127.5) / 128"  # of the weights


def test_options_that_cannot_be_combined_are_refused(trained):
    ins = entry(*trained, set_checkpoint_dir=trained[1] / "0")
    for given, message in (
        ({"graph": "onx"}, "onx"),
        ({"graph": "none", "unseen": "images"}, "unseen"),
        ({"layout": "trition"}, "'triton'"),
        ({"layout": "triton", "graph": "torch"}, "ONNX"),
    ):
        with pytest.raises(OptionError, match=message):
            ins.convert_for_prediction(**given)


def rewrite(folder, change_graph=None, **change):
    """Change a model's graph and description as an attacker would: with a matching checksum."""
    path, about = folder / "model.onnx", json.loads((folder / "model.json").read_text())
    if change_graph is not None:
        path.write_bytes(change_graph(path.read_bytes()))
        about["graph"] |= describe_file(folder, path.name)
    (folder / "model.json").write_text(json.dumps({**about, **change}))


def edited(edit):
    def change(data):
        model = onnx.load_model_from_string(data)
        edit(model)
        return model.SerializeToString()

    return change


def climb_out(model):
    tensor = model.graph.initializer[0]
    tensor.ClearField("raw_data")
    tensor.data_location = onnx.TensorProto.EXTERNAL
    tensor.external_data.add(key="location", value="../../../etc/passwd")


def name_foreign_operator(model):
    model.graph.node[0].domain = "evil"


def add_loop(model):
    model.graph.node[0].attribute.add(name="body", type=onnx.AttributeProto.GRAPH).g.name = "endless"


def stretch(model):
    model.graph.node[-1].output[0] = "unit"
    model.graph.node.add(op_type="Add", input=["unit", "unit"], output=["embeddings"])


def look_around(model):
    """Subtract the images of the batch from each before the network."""
    first = model.graph.node[0]
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.array([0]), "axis"))
    total = onnx.helper.make_node("ReduceSum", [first.input[0], "axis"], ["total"], keepdims=1)
    apart = onnx.helper.make_node("Sub", [first.input[0], "total"], ["apart"])
    first.input[0] = "apart"
    model.graph.node.insert(0, apart)
    model.graph.node.insert(0, total)


def drop(model):
    """Return the embedding of the first image of a batch only."""
    model.graph.node[-1].output[0] = "all"
    for name, value in (("zero", [0]), ("one", [1])):
        model.graph.initializer.append(onnx.numpy_helper.from_array(np.array(value), name))
    model.graph.node.add(op_type="Slice", input=["all", "zero", "one"], output=["embeddings"])


def run_for_days(kind, *shapes, **attributes):
    def add(model):
        for number, shape in enumerate(shapes):
            shape = onnx.numpy_helper.from_array(np.array(shape), f"shape{number}")
            model.graph.initializer.append(shape)
            model.graph.node.add(op_type="ConstantOfShape", input=[shape.name], output=[f"x{number}"])
        inputs = [f"x{number}" for number in range(len(shapes))]
        outputs = ["", "y"] if kind in ("RNN", "RoiAlign") else ["y"]
        model.graph.node.append(onnx.helper.make_node(kind, inputs, outputs, **attributes))

    return edited(add)


def rename_input(model):
    model.graph.input[0].name = model.graph.node[0].input[0] = "pictures"


@pytest.mark.timeout(60)
@pytest.mark.parametrize("name", ["model.safetensors", "model.onnx", "classes.safetensors"])
def test_files_of_a_model_that_are_damaged_too_large_pipes_or_links_are_refused(exported, tmp_path, name):
    folder = shutil.copytree(exported, tmp_path / "model")
    path = folder / name

    def refused(reason, open_folder=plsc.export.open_model):
        with pytest.raises(CheckpointError, match=rf"{name} .*{reason}|manifest\.json"):
            open_folder(folder)

    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 1
    path.write_bytes(data)
    refused("damaged")
    if name == "model.safetensors":
        refused("", plsc.load_network)
    os.truncate(path, 8 * 10**12)
    refused("it has 8000000000000 bytes")
    about = json.loads((folder / "model.json").read_text())
    for key in ("weights", "graph", "classes"):
        del about[key]["bytes"]  # as in earlier versions
    (folder / "model.json").write_text(json.dumps(about))
    refused("too large")
    path.unlink()
    os.mkfifo(path)
    refused("regular file")
    if name == "model.safetensors":
        refused("regular file", plsc.load_network)
    path.unlink()
    path.symlink_to(exported / name)
    refused("link")
    path.unlink()
    shutil.copy(exported / name, path)
    plsc.export.open_model(folder)
    (folder / "model.json").unlink()
    os.mkfifo(folder / "model.json")
    refused("", plsc.load_network)


RNN, ROI = ([2**21, 1, 1], [1, 1024, 1], [1, 1024, 1024]), ([1, 9, 2, 2], [1, 4], [1])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"change_graph": edited(climb_out)}, "another file"),
        ({"change_graph": edited(name_foreign_operator)}, "evil"),
        ({"change_graph": edited(add_loop)}, "control flow"),
        ({"change_graph": edited(rename_input)}, "model.onnx"),
        ({"change_graph": run_for_days("RNN", *RNN, hidden_size=1024)}, "operations"),
        ({"change_graph": run_for_days("RoiAlign", *ROI, sampling_ratio=2000)}, "RoiAlign"),
        (
            {"change_graph": run_for_days("ConvTranspose", [1, 1, 64, 64], [1, 1, 999, 999])},
            "ConvTranspose",
        ),
        ({"change_graph": run_for_days("Einsum", *[[300]] * 4, equation="a,b,c,d->a")}, "Einsum"),
        ({"change_graph": edited(stretch)}, "norm 1"),
        ({"change_graph": edited(look_around)}, "batch"),
        ({"change_graph": lambda data: data[:-100]}, "model.onnx"),
        ({"output": {"shape": ["batch", 9]}}, r"\[2, 8\]"),
        ({"change_graph": edited(drop)}, r"\[1, 8\]"),
        ({"input": {"shape": ["batch", 3, 10**9, 10**9]}}, "input"),
        ({"input": {"shape": ["batch", 3, 32, 32]}}, "model.onnx"),
        ({"fingerprint": "0" * 64}, "fingerprint"),
        ({"thresholds": {"2": 0.5}}, "thresholds"),
        ({"capacity": {"table": {"format": 1}}}, "capacity"),
        ({"graph": {"file": "../../model.onnx"}}, "model.onnx"),
    ],
)
def test_a_hostile_folder_is_refused(exported, tmp_path, change, message):
    folder = shutil.copytree(exported, tmp_path / "model")
    rewrite(folder, **change)
    with pytest.raises(CheckpointError, match=message):
        plsc.export.open_model(folder)


def graph_of(*nodes, **constants):
    """Return an ONNX file from nodes (operator, inputs, output, attributes); `x` is 0.5 from the images."""
    made, value = onnx.helper.make_node, onnx.helper.make_tensor_value_info
    nodes = [
        made("ReduceMean", ["images"], ["mean"], keepdims=0),
        made("Clip", ["mean", "half", "half"], ["x"]),
        *(made(kind, inputs.split(), [output], **about) for kind, inputs, output, about in nodes),
        made("Cast", [nodes[-1][2]], ["float"], to=1),
        made("ReduceSum", ["float"], ["sum"], keepdims=0),
        made("Flatten", ["images"], ["flat"]),
        made("Slice", ["flat", "first", "last", "last_axis"], ["values"]),
        made("Add", ["values", "sum"], ["added"]),
        made("LpNormalization", ["added"], ["embeddings"]),
    ]
    held = {"first": [0], "last": [8], "last_axis": [1], "half": np.float32(0.5), **constants}.items()
    graph = onnx.helper.make_graph(
        nodes,
        "graph",
        [value("images", 1, ["n", 3, 16, 16])],
        [value("embeddings", 1, ["n", 8])],
        [onnx.numpy_helper.from_array(np.array(one), name) for name, one in held],
    )
    opset = onnx.helper.make_opsetid("", 20)
    return onnx.helper.make_model(graph, opset_imports=[opset], ir_version=9).SerializeToString()


def chain(kind, inputs, count=1000, **about):
    """Return nodes m1, m2 ...; each has the output of the one before as all inputs."""
    return [(kind, " ".join([f"m{i}"] * inputs), f"m{i + 1}", about) for i in range(count)]


FILL = ("Expand", "x size", "m0", {})  # the mean, which is known only when the graph runs, as an image
IMAGE, PADS = [1, 1, 2048, 2048], {"pads": [1023] * 4}
LARGE = {
    "products": graph_of(FILL, *chain("MatMul", 2), size=IMAGE),
    "pooling": graph_of(FILL, ("MaxPool", "m0", "y", {"kernel_shape": [2047] * 2, **PADS}), size=IMAGE),
    "kernel": graph_of(
        FILL, ("Expand", "x side", "w", {}), ("Conv", "m0 w", "y", PADS), size=IMAGE, side=[1, 1, 2047, 2047]
    ),
    "power of the batch": graph_of(
        ("ReduceMean", "images sides", "m0", {"keepdims": 0}),
        *(
            (kind, names.format(i), f"{output}{i + (kind == 'MatMul')}", {}) for i in range(4)
            for kind, names, output in (
                ("Reshape", "m{} column", "c"), ("Reshape", "m{} row", "r"), ("MatMul", "c{0} r{0}", "m")
            )
        ),
        sides=[1, 2, 3], column=[-1, 1], row=[1, -1],
    ),
    "doubled shapes": graph_of(
        ("Reshape", "images side", "s", {}), ("Shape", "s", "m0", {}), *chain("Concat", 2, axis=0),
        side=[-1, 16],
    ),
}  # fmt: skip
TWO_SETS = edited(lambda model: model.opset_import.add(version=9))
HOURS = {
    **{name: (data, r"more than 2\.1e\+09 values or 1\.1e\+12 operations") for name, data in LARGE.items()},
    "doubled strings": (
        graph_of(("Constant", "", "m0", {"value_string": "a" * 8}), *chain("StringConcat", 2)),
        "known only when the graph runs",
    ),
    "unknown size": (graph_of(("NonZero", "images", "y", {})), "known only when the graph runs"),
    "nodes": (graph_of(FILL, *chain("Relu", 1, 17_000), size=[1]), "it has 17009 nodes"),
    "operator sets": (TWO_SETS(graph_of(FILL, size=[1])), "of 2 operator sets"),
}


@pytest.mark.parametrize("name", HOURS)
def test_a_graph_that_would_compute_for_hours_is_refused_before_it_is_loaded(
    exported, tmp_path, name, monkeypatch
):
    data, message = HOURS[name]
    assert len(data) < 500_000
    folder = shutil.copytree(exported, tmp_path / "model")
    rewrite(folder, lambda _: data)
    monkeypatch.delattr("onnxruntime.InferenceSession")
    with pytest.raises(CheckpointError, match=message):
        plsc.export.open_model(folder)


def test_a_small_graph_with_computed_shapes_is_served(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "model")
    data = graph_of(
        ("Shape", "images", "s", {}), ("Gather", "s two", "side", {}), ("Range", "zero side one", "r", {}),
        ("Shape", "r", "n", {}), ("Div", "n four", "q", {}), ("ConstantOfShape", "q", "c", {}),
        ("Add", "c x", "y", {}), zero=0, one=1, two=2, four=[4],
    )  # fmt: skip
    rewrite(folder, lambda _: data)
    image = np.random.default_rng(0).uniform(0, 1, (1, 3, 16, 16)).astype(np.float32)
    expected = image.ravel()[:8] + 4 * 0.5
    found = plsc.export.open_model(folder).embed(image)
    np.testing.assert_allclose(found[0], expected / np.linalg.norm(expected), atol=1e-5)


def test_hostile_class_weights_are_refused(exported, tmp_path):
    folder = shutil.copytree(exported, tmp_path / "model")
    outside = b'{"weight":{"dtype":"F32","shape":[9,9],"data_offsets":[0,4]}}'
    for length, header in ((2**62, b"{}"), (2, b"{}"), (60, outside)):
        (folder / "classes.safetensors").write_bytes(length.to_bytes(8, "little") + header)
        rewrite(folder, classes=describe_file(folder, "classes.safetensors"))
        with pytest.raises(CheckpointError, match=r"classes\.safetensors"):
            plsc.export.open_model(folder).class_weights()


def test_an_image_over_the_limits_is_not_decoded(exported):
    model = plsc.export.open_model(exported)
    file = io.BytesIO()
    Image.new("1", (9000, 9000)).save(file, "PNG")
    with pytest.raises(DataError, match="9000x9000 pixels, over the limit"):
        model.preprocess(file.getvalue())
    with pytest.raises(DataError, match="over the limit of 10"):
        model.preprocess(file.getvalue(), max_bytes=10)
    for damaged in (b"", file.getvalue()[:50]):
        with pytest.raises(DataError):
            model.preprocess(damaged)
