"""Weights of insightface, PLSC 0.1 and plain files are imported with the same numbers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from plsc.checkpoint.importers import Network, import_checkpoint
from plsc.checkpoint.remote import verify
from plsc.cli import main
from plsc.errors import PlscError
from plsc.parallel.collectives import class_ranges
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
        for module in ("plsc.models.iresnet", "plsc.checkpoint.importers.insightface"):
            patch.setattr(f"{module}.WIDTHS", (8, 16, 32, 64))
        patch.setattr("plsc.models.resnet.BASIC_WIDTHS", (8, 16, 32, 64))
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


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_arcface_torch_is_imported_for_any_number_of_ranks(arcface_torch, iresnet, tmp_path, ranks):
    imported = import_checkpoint(arcface_torch, tmp_path / "ck", ranks=ranks)
    tensors, manifest = tensors_of(tmp_path / "ck")
    same_backbone(tensors, iresnet)
    assert torch.equal(tensors["head.weight"], ROWS)
    assert {key.split(".")[0] for key in tensors} == {"backbone", "head"}
    assert manifest.heads[""].class_ranges == class_ranges(CLASSES, ranks)
    assert (manifest.class_num, manifest.emb_size, manifest.world_size) == (CLASSES, EMB, ranks)
    assert manifest.options["model"]["name"] == "IResNet18"
    assert manifest.options["model"]["image_shape"] == [3, 16, 16]
    assert imported.match.share == 1.0
    assert imported.notes == []


def test_the_first_ranks_of_arcface_torch_have_one_class_more(iresnet, tmp_path):
    save_arcface_torch(tmp_path / "run", ROWS[:10], 4, iresnet)  # 3, 3, 2 and 2 classes
    import_checkpoint(tmp_path / "run", tmp_path / "ck", ranks=2)
    assert torch.equal(tensors_of(tmp_path / "ck")[0]["head.weight"], ROWS[:10])


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
    import_checkpoint(folder, tmp_path / "ck", ranks=2)
    tensors, _ = tensors_of(tmp_path / "ck")
    same_backbone(tensors, iresnet)
    assert torch.equal(tensors["head.weight"], ROWS)


@pytest.mark.parametrize("saved_by", [1, 3, 4])
def test_plsc1_class_weights_and_resnet_are_imported(resnet, tmp_path, saved_by):
    source = save_plsc1(tmp_path / "old", ROWS, saved_by, backbone=resnet)
    imported = import_checkpoint(source, tmp_path / "ck", ranks=2)
    tensors, manifest = tensors_of(tmp_path / "ck")
    same_backbone(tensors, resnet)
    assert torch.equal(tensors["head.weight"], ROWS)
    assert (imported.network, imported.class_num) == ("ResNet18", CLASSES)
    assert manifest.options["model"]["image_shape"] == [3, 32, 32]
    assert imported.layout == "plsc1"


def test_plsc1_softmax_is_imported_with_its_bias(tmp_path):
    bias = torch.arange(CLASSES).float()
    source = save_plsc1(tmp_path / "old", ROWS, 2, bias=bias, loss="softmax")
    imported = import_checkpoint(source, tmp_path / "ck", ranks=3)
    tensors, manifest = tensors_of(tmp_path / "ck")
    assert torch.equal(tensors["head.bias"], bias)
    assert manifest.options["head"]["loss_type"] == "dist_softmax"
    assert "no backbone found, only the head" in imported.notes


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
    import_checkpoint(tmp_path / "a.safetensors", tmp_path / "ck", ranks=2, network=model)
    tensors, _ = tensors_of(tmp_path / "ck")
    same_backbone(tensors, network)
    assert torch.equal(tensors["head.weight"], ROWS)


def test_half_precision_rows_are_converted_to_float32(tmp_path):
    source = save_plsc1(tmp_path / "old", ROWS.half(), 2)
    import_checkpoint(source, tmp_path / "ck")
    assert torch.equal(tensors_of(tmp_path / "ck")[0]["head.weight"], ROWS.half().float())


def test_the_command_prints_what_was_imported(arcface_torch, tmp_path, capsys):
    assert main(["checkpoint", "import", str(arcface_torch), str(tmp_path / "ck"), "--ranks", "2"]) == 0
    printed = capsys.readouterr().out
    assert "IResNet18, embedding size 16" in printed
    assert "(100.0% of its elements)" in printed
    assert "11 classes" in printed
    assert main(["checkpoint", "import", str(arcface_torch), str(tmp_path / "ck")]) == 1
    assert "already exists" in capsys.readouterr().err
    assert (
        main(
            [
                "checkpoint",
                "import",
                str(arcface_torch),
                str(tmp_path / "b"),
                "--image_shape",
                "3,x",
            ]
        )
        == 1
    )
    assert "expected channels,height,width" in capsys.readouterr().err


@pytest.fixture
def broken(arcface_torch, tmp_path):
    """A copy of the arcface_torch run, to be damaged."""
    return shutil.copytree(arcface_torch, tmp_path / "broken")


def test_a_missing_shard_is_detected(broken, tmp_path):
    (broken / "checkpoint_gpu_1.pt").unlink()
    assert "of the ranks [0, 2]" in refusal(broken, tmp_path / "ck")


def test_a_missing_last_shard_is_detected_by_size_or_number_of_classes(broken, tmp_path):
    (broken / "checkpoint_gpu_2.pt").unlink()
    assert "expected 11" in refusal(broken, tmp_path / "ck", class_num=11)


def test_a_repeated_or_misplaced_shard_is_detected(broken, tmp_path):
    shutil.copy(broken / "checkpoint_gpu_2.pt", broken / "checkpoint_gpu_02.pt")
    assert "of the ranks [0, 1, 2, 2]" in refusal(broken, tmp_path / "ck")
    (broken / "checkpoint_gpu_02.pt").unlink()
    (broken / "checkpoint_gpu_0.pt").rename(broken / "x")
    (broken / "checkpoint_gpu_2.pt").rename(broken / "checkpoint_gpu_0.pt")
    (broken / "x").rename(broken / "checkpoint_gpu_2.pt")
    assert "files are missing or from different runs" in refusal(broken, tmp_path / "ck")


def test_a_link_among_the_shards_is_refused(broken, tmp_path):
    (broken / "checkpoint_gpu_1.pt").rename(tmp_path / "elsewhere.pt")
    (broken / "checkpoint_gpu_1.pt").symlink_to(tmp_path / "elsewhere.pt")
    assert "is a link" in refusal(broken, tmp_path / "ck")


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_rows_that_are_not_finite_are_reported_with_their_class(tmp_path, value):
    rows = ROWS.clone()
    rows[7, 3] = value
    source = save_plsc1(tmp_path / "old", rows, 2)
    assert "head.weight from class 6 contains values that are not finite" in refusal(source, tmp_path / "ck")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"num_classes": 12}, "says num_classes 12, the files have 11"),
        ({"pretrain_nranks": 3}, "are files missing"),
        ({"emb_dim": None}, "says emb_dim None"),
    ],
)
def test_plsc1_files_that_contradict_meta_json_are_refused(tmp_path, change, message):
    source = save_plsc1(tmp_path / "old", ROWS, 2)
    meta = json.loads((source / "meta.json").read_text())
    (source / "meta.json").write_text(json.dumps({**meta, **change}))
    assert message in refusal(source, tmp_path / "ck")


def test_damaged_plsc1_files_give_a_one_line_error(tmp_path):
    source = save_plsc1(tmp_path / "old", ROWS, 2)
    column = source / "dist@arcface@rank@00001.w_0"
    whole = column.read_bytes()
    column.write_bytes(whole[:-4])
    assert "is truncated" in refusal(source, tmp_path / "ck")
    (source / "dist@softmax@rank@00000.w_0").write_bytes(whole)
    assert "of one loss" in refusal(source, tmp_path / "ck")
    (source / "dist@softmax@rank@00000.w_0").unlink()
    column.unlink()
    assert "says num_classes 11, the files have 6" in refusal(source, tmp_path / "ck")
    column.write_bytes(whole)
    (source / "meta.json").write_text("[" * 100_000)
    assert "meta.json" in refusal(source, tmp_path / "ck")


def test_a_plsc1_backbone_with_a_layer_missing_is_refused(resnet, tmp_path):
    source = save_plsc1(tmp_path / "old", ROWS, 1, backbone=resnet)
    (source / "batch_norm_3.w_1").unlink()
    assert "is not a complete ResNet18" in refusal(source, tmp_path / "ck")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "onnx"}, "unknown layout 'onnx'"),
        ({"layout": "insightface"}, "has neither checkpoint_gpu_"),
        ({}, "no known layout"),
    ],
)
def test_unsupported_imports_give_a_one_line_error(tmp_path, options, message):
    (tmp_path / "empty").mkdir()
    assert message in refusal(tmp_path / "empty", tmp_path / "ck", **options)


def test_a_file_without_network_name_requires_model(tmp_path):
    save_file({"a": torch.zeros(2)}, tmp_path / "a.safetensors")
    assert "pass --model" in refusal(tmp_path / "a.safetensors", tmp_path / "ck")
    network = Network("SmallResNet", 8, (1, 16, 16))
    assert "no tensor in" in refusal(tmp_path / "a.safetensors", tmp_path / "ck", network=network)


def test_a_full_disk_is_reported_and_nothing_is_left(arcface_torch, tmp_path, monkeypatch):
    def full(*_):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("plsc.checkpoint.save.write_shard", full)
    assert "No space left on device; nothing was published" in refusal(arcface_torch, tmp_path / "ck")


WITH_LITTLE_MEMORY = """
import resource, sys
from plsc.checkpoint.importers import import_checkpoint
import plsc.models
taken = next(int(l.split()[1]) for l in open("/proc/self/status") if l.startswith("VmData")) << 10
limit = taken + 90 * 2**20  # memory mapped from files does not count
resource.setrlimit(resource.RLIMIT_DATA, (limit, limit))
import_checkpoint(sys.argv[1], sys.argv[2], ranks=3)
"""


@pytest.mark.slow
def test_the_rows_are_streamed(tmp_path):
    rows = torch.randn(120_000, 256)  # 117 MiB
    source = save_plsc1(tmp_path / "old", rows, 2)
    subprocess.run([sys.executable, "-c", WITH_LITTLE_MEMORY, source, tmp_path / "ck"], check=True)
    with safe_open(tmp_path / "ck" / "shard-00003-0.safetensors", "pt") as file:
        assert torch.equal(file.get_tensor("head.weight"), rows[80_000:])
