"""Weights of insightface, PLSC 0.1 and plain files are imported with the same numbers."""

import copy
import json
import shutil

import pytest
import torch
import torch.nn.functional as F
from safetensors import safe_open
from safetensors.torch import save_file

from plsc.checkpoint.remote import verify
from plsc.cli import main
from plsc.data.decode import decode_image
from plsc.data.sources import open_source
from plsc.data.writers import convert
from plsc.errors import PlscError
from plsc.predict.importing import Network, import_checkpoint
from tests.distributed.launch import run_code
from tests.images import write_dataset
from tests.system.small_entry import entry
from tests.unit.checkpoint.external_files import (
    names,
    random_network,
    save_arcface_torch,
    save_plsc1,
)

CLASSES, EMB = 11, 16
GENERATOR = torch.Generator().manual_seed(5)
ROWS = torch.randn(CLASSES, EMB, generator=GENERATOR)


@pytest.fixture(scope="module", autouse=True)
def narrow_networks():
    """Use the same layers, but an eighth as wide, so that 1/50 of the data is read and written."""
    with pytest.MonkeyPatch.context() as patch:
        for module in ("plsc.models.resnet", "plsc.checkpoint.layouts"):
            patch.setattr(f"{module}.BASIC_WIDTHS", (8, 16, 32, 64))
        yield


@pytest.fixture(scope="module")
def iresnet():
    return random_network("IResNet18", EMB, (3, 16, 16))


@pytest.fixture(scope="module")
def arcface_torch(iresnet, tmp_path_factory):
    return save_arcface_torch(tmp_path_factory.mktemp("arcface") / "run", ROWS, 3, iresnet)


@pytest.fixture(scope="module")
def resnet():
    return random_network("ResNet18", EMB, (3, 32, 32))


def tensors_of(path):
    """Return all tensors of a checkpoint, joined from its files, and its manifest."""
    manifest = verify(path)
    parts = {}
    for name in sorted(manifest.files):
        with safe_open(path / name, framework="pt") as file:
            for key in file.keys():  # noqa: SIM118
                parts.setdefault(key, []).append(file.get_tensor(key))
    return {k: torch.cat(v) if v[0].ndim else v[0] for k, v in parts.items()}, manifest


def same_backbone(tensors, network):
    state = network.state_dict()
    for name, value in state.items():
        if not name.endswith("num_batches_tracked"):
            torch.testing.assert_close(tensors[f"backbone.{name}"], value, rtol=0, atol=0)


def refusal(source, target, **options):
    before = names(target.parent)
    with pytest.raises(PlscError) as caught:
        import_checkpoint(source, target, **options)
    assert "\n" not in str(caught.value)
    assert names(target.parent) == before
    return str(caught.value)


def test_arcface_torch_is_imported(arcface_torch, iresnet, tmp_path):
    imported = import_checkpoint(arcface_torch, tmp_path / "ck")
    tensors, manifest = tensors_of(tmp_path / "ck")
    same_backbone(tensors, iresnet)
    assert torch.equal(tensors["head.weight"], ROWS)
    assert {key.split(".")[0] for key in tensors} == {"backbone", "head"}
    assert (manifest.class_num, manifest.emb_size) == (CLASSES, EMB)
    assert manifest.options["model"]["name"] == "IResNet18"
    assert manifest.options["model"]["image_shape"] == [3, 16, 16]
    assert imported.match.share == 1.0
    assert imported.notes == []


def test_an_imported_model_trains_from_the_loss_of_arcface_torchs_formula(arcface_torch, iresnet, tmp_path):
    """The formula (Deng et al. 2019): s = 64, cos(theta + 0.5) for the label, cross-entropy."""
    record = tmp_path / "train.rec"
    convert(str(write_dataset(tmp_path / "images", CLASSES, 2)), str(record))
    import_checkpoint(arcface_torch, tmp_path / "imported")
    ins = entry(record, tmp_path / "run", set_model_name="IResNet18", set_emb_size=EMB, set_dropout=0)
    ins.set_pretrained(tmp_path / "imported")
    ins.set_loss_type("dist_arcface", 1.0, 0.5, 0.0)
    ins.set_scale(64)
    ins.set_flip(False)
    ins.set_train_batch_size(2 * CLASSES)  # one step with all images
    ins.train()
    loss = json.loads((tmp_path / "run/metrics.jsonl").read_text().splitlines()[0])["loss"]

    source = open_source(record)
    images = torch.stack([decode_image(source[index][0], (3, 16, 16)) for index in range(len(source))])
    labels = torch.tensor(source.labels())
    network = copy.deepcopy(iresnet).train()  # batch norm has the statistics of the batch
    with torch.no_grad():
        embeddings = F.normalize(network((images.float() - 127.5) / 128)).double()
    theta = torch.acos(embeddings @ F.normalize(ROWS.double()).T)
    logits = 64 * torch.cos(theta + 0.5 * F.one_hot(labels, CLASSES))
    assert loss == pytest.approx(float(F.cross_entropy(logits, labels)), rel=1e-4)


@pytest.mark.parametrize("prefix", ["", "rank_"])
def test_older_partial_fc_shards_are_imported(iresnet, tmp_path, prefix):
    folder = tmp_path / "old"
    folder.mkdir()
    for rank, part in enumerate([slice(0, 6), slice(6, 11)]):
        torch.save(ROWS[part].clone(), folder / f"{prefix}{rank}_softmax_weight.pt")
        torch.save(ROWS[part] * 2, folder / f"{prefix}{rank}_softmax_weight_mom.pt")
    state = {f"module.{name}": value for name, value in iresnet.state_dict().items()}
    torch.save({"conv1.weight": torch.zeros(1)}, folder / "100backbone.pth")
    torch.save(state, folder / "200backbone.pth")  # the later one of two steps
    import_checkpoint(folder, tmp_path / "ck")
    tensors, _ = tensors_of(tmp_path / "ck")
    same_backbone(tensors, iresnet)
    assert torch.equal(tensors["head.weight"], ROWS)


def test_plsc1_class_weights_and_resnet_are_imported(resnet, tmp_path):
    source = save_plsc1(tmp_path / "old", ROWS, 4, backbone=resnet)
    network = Network("ResNet18", None, (3, 32, 32))
    imported = import_checkpoint(source, tmp_path / "ck", network=network)
    tensors, manifest = tensors_of(tmp_path / "ck")
    same_backbone(tensors, resnet)
    assert torch.equal(tensors["head.weight"], ROWS)
    assert (imported.network, imported.class_num) == ("ResNet18", CLASSES)
    assert manifest.options["model"]["image_shape"] == [3, 32, 32]
    assert imported.layout == "plsc1"
    assert "--model" in refusal(source, tmp_path / "a")
    (source / "batch_norm_3.w_1").unlink()
    assert "ResNet18" in refusal(source, tmp_path / "b", network=network)


def test_plsc1_softmax_is_imported_with_its_bias_and_half_precision_becomes_float32(tmp_path):
    bias = torch.arange(CLASSES).float()
    source = save_plsc1(tmp_path / "old", ROWS.half(), 2, bias=bias, loss="softmax")
    imported = import_checkpoint(source, tmp_path / "ck")
    tensors, manifest = tensors_of(tmp_path / "ck")
    assert torch.equal(tensors["head.bias"], bias)
    assert torch.equal(tensors["head.weight"], ROWS.half().float())
    assert manifest.options["head"]["loss_type"] == "dist_softmax"
    assert any("backbone" in note for note in imported.notes)


@pytest.mark.parametrize("suffix", ["safetensors", "pth", "legacy"])
def test_a_single_file_is_imported_by_name_and_mismatches_are_reported(tmp_path, suffix):
    network = random_network("torchvision/resnet18", EMB, (3, 32, 32))
    state = dict(network.network.state_dict())
    state["fc.weight"], state["fc.bias"] = torch.zeros(1000, 512), torch.zeros(1000)
    state["extra.weight"] = torch.zeros(2)
    path = tmp_path / f"weights.{'safetensors' if suffix == 'safetensors' else 'pth'}"
    if suffix == "safetensors":
        save_file(state, path)
    else:
        wrapped = {"state_dict": {f"module.{k}": v for k, v in state.items()}, "epoch": 3}
        torch.save(wrapped, path, _use_new_zipfile_serialization=suffix == "pth")
    model = Network("torchvision/resnet18", EMB, (3, 32, 32))
    imported = import_checkpoint(path, tmp_path / "ck", network=model)
    tensors, _ = tensors_of(tmp_path / "ck")
    name = "network.layer3.0.conv1.weight"
    assert torch.equal(tensors[f"backbone.{name}"], network.state_dict()[name])
    assert set(imported.match.unused) == {"fc.weight", "fc.bias", "extra.weight"}
    assert {name.split(".")[0] for name in imported.match.missing} == {"neck"}
    assert 0.99 < imported.match.share < 1


def test_backbone_and_head_of_one_file_are_imported(tmp_path):
    network = random_network("SmallResNet", EMB, (1, 16, 16))
    state = {f"backbone.{name}": value for name, value in network.state_dict().items()}
    save_file({**state, "head.weight": ROWS.double()}, tmp_path / "a.safetensors")
    model = Network("SmallResNet", EMB, (1, 16, 16))
    import_checkpoint(tmp_path / "a.safetensors", tmp_path / "ck", network=model)
    tensors, _ = tensors_of(tmp_path / "ck")
    same_backbone(tensors, network)
    assert torch.equal(tensors["head.weight"], ROWS)


def test_the_command_prints_what_was_imported(arcface_torch, tmp_path, capsys):
    assert main(["checkpoint", "import", str(arcface_torch), str(tmp_path / "ck")]) == 0
    printed = capsys.readouterr().out
    assert all(word in printed for word in ("IResNet18", "100.0%", "11 classes"))
    assert main(["checkpoint", "import", str(arcface_torch), str(tmp_path / "ck")]) == 1
    assert "exists" in capsys.readouterr().err
    wrong = ["--image_shape", "3,x"]
    assert main(["checkpoint", "import", str(arcface_torch), str(tmp_path / "b"), *wrong]) == 1
    assert "image_shape" in capsys.readouterr().err


def test_a_missing_repeated_misplaced_or_linked_shard_is_refused(arcface_torch, tmp_path):
    broken = shutil.copytree(arcface_torch, tmp_path / "broken")
    first, second, last = (broken / f"checkpoint_gpu_{rank}.pt" for rank in range(3))
    outside, again = tmp_path / "elsewhere.pt", broken / "checkpoint_gpu_02.pt"
    shutil.copy(last, again)
    assert "ranks [0, 1, 2, 2]" in refusal(broken, tmp_path / "ck")
    again.unlink()
    second.rename(outside)
    assert "ranks [0, 2]" in refusal(broken, tmp_path / "ck")
    second.symlink_to(outside)
    assert "is a link" in refusal(broken, tmp_path / "ck")
    second.unlink()
    outside.rename(second)
    first.rename(outside)
    last.rename(first)
    outside.rename(last)
    assert "the shapes" in refusal(broken, tmp_path / "ck")
    last.rename(first)
    assert "expected 11" in refusal(broken, tmp_path / "ck", class_num=11)


def test_rows_that_are_not_finite_are_reported_with_their_class(tmp_path):
    rows = ROWS.clone()
    rows[7, 3] = float("inf")
    source = save_plsc1(tmp_path / "old", rows, 2)
    assert "head.weight from class 6" in refusal(source, tmp_path / "ck")


@pytest.mark.parametrize("value", [torch.int8, torch.bool, torch.complex64, torch.float8_e4m3fn, 1e300])
def test_quantised_weights_and_values_beyond_float32_are_refused(tmp_path, value):
    state = random_network("SmallResNet", EMB, (1, 16, 16)).state_dict()
    key = "stem.0.weight"
    is_type = isinstance(value, torch.dtype)
    state[key] = state[key].to(value) if is_type else torch.full_like(state[key], value, dtype=torch.float64)
    save_file(state, tmp_path / "a.safetensors")
    model = Network("SmallResNet", EMB, (1, 16, 16))
    with pytest.raises(PlscError, match=f"{key} .*(quantised|finite)"):
        import_checkpoint(tmp_path / "a.safetensors", tmp_path / "ck", network=model)


def test_damaged_plsc1_files_and_those_that_contradict_meta_json_are_refused(tmp_path):
    source = save_plsc1(tmp_path / "old", ROWS, 2)
    meta = json.loads((source / "meta.json").read_text())
    for name, value in (("num_classes", 12), ("pretrain_nranks", 3), ("emb_dim", None)):
        (source / "meta.json").write_text(json.dumps({**meta, name: value}))
        assert "meta.json" in refusal(source, tmp_path / "ck")
    (source / "meta.json").write_text(json.dumps(meta))
    column = source / "dist@arcface@rank@00001.w_0"
    whole = column.read_bytes()
    column.write_bytes(whole[:-4])
    assert "is truncated" in refusal(source, tmp_path / "ck")
    (source / "dist@softmax@rank@00000.w_0").write_bytes(whole)
    assert "of one loss" in refusal(source, tmp_path / "ck")
    (source / "dist@softmax@rank@00000.w_0").unlink()
    column.unlink()
    assert "num_classes" in refusal(source, tmp_path / "ck")


def test_an_unknown_layout_or_network_is_refused(tmp_path):
    (tmp_path / "empty").mkdir()
    for noun, given in (
        ("onnx", {"layout": "onnx"}), ("checkpoint_gpu_", {"layout": "insightface"}), ("layout", {})
    ):  # fmt: skip
        assert noun in refusal(tmp_path / "empty", tmp_path / "ck", **given)
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    assert "--model" in refusal(tmp_path / "a.safetensors", tmp_path / "ck")
    network = Network("SmallResNet", 8, (1, 16, 16))
    assert "no tensor in" in refusal(tmp_path / "a.safetensors", tmp_path / "ck", network=network)


WITH_LITTLE_MEMORY = """
import resource, sys
from plsc.predict.importing import import_checkpoint
import plsc.models
taken = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmData")) << 10
limit = taken + 90 * 2**20  # memory mapped from files does not count
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
import_checkpoint(sys.argv[1], sys.argv[2])
"""


@pytest.mark.slow
def test_the_rows_are_streamed(tmp_path):
    rows = torch.randn(120_000, 256)  # 117 MiB
    source = save_plsc1(tmp_path / "old", rows, 2)
    run_code(WITH_LITTLE_MEMORY, str(source), str(tmp_path / "ck"))
    (shard,) = (tmp_path / "ck").glob("shard-*")
    with safe_open(shard, "pt") as file:
        assert torch.equal(file.get_tensor("head.weight"), rows)
