import dataclasses
import json

import pytest
import torch
from safetensors.torch import save_file

from plsc.checkpoint import (
    Manifest,
    ShardedTensor,
    Snapshot,
    load_tensors,
    load_weights,
    read_manifest,
    save_checkpoint,
)
from plsc.checkpoint.manifest import HeadInfo, checksum
from plsc.checkpoint.remote import fetch
from plsc.errors import CheckpointError
from plsc.parallel.world import World
from tests.roles import role_of_key

WORLD = World.single()
MANIFEST = Manifest("0.1.0", 7, 1, 0, 1, 3, {"": HeadInfo(5, [(0, 5)])})


def make_state():
    generator = torch.Generator().manual_seed(0)
    tensors = {"model.a": torch.randn(4, 3, generator=generator), "model.n": torch.tensor(3)}
    tensors["other"] = torch.ones(2)
    sharded = {"head.weight": ShardedTensor(torch.randn(5, 3, generator=generator), 5, 0)}
    return tensors, sharded


def by_role(tensors):
    """Return the tensors by role, by default those of `make_state`."""
    tensors = {**make_state()[0], **make_state()[1]} if tensors is None else tensors
    return {role_of_key(key): value for key, value in tensors.items()}


def save(folder, name, tensors=None):
    return save_checkpoint(folder, name, Snapshot(by_role(tensors), MANIFEST), WORLD)


@pytest.fixture
def saved(tmp_path):
    return save(tmp_path, "1")


def load(path, tensors=None):
    return load_tensors(path, by_role(tensors), WORLD)


def refusal(path, tensors=None):
    with pytest.raises(CheckpointError) as caught:
        load(path, tensors)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_sharded_tensors_load_as_whole_ones_and_vice_versa(saved):
    tensors, sharded = make_state()
    whole, rows = torch.nn.Parameter(torch.zeros(5, 3)), ShardedTensor(torch.zeros(4, 3), 4, 0)
    load(saved, {"head.weight": whole, "model.a": rows})
    assert torch.equal(whole, sharded["head.weight"].local)
    assert torch.equal(rows.local, tensors["model.a"])
    assert torch.equal(load_weights(saved, "class_weights")["weight"], whole)
    with pytest.raises(CheckpointError, match="has no backbone"):
        load_weights(saved)


@pytest.mark.parametrize(
    ("tensors", "message"),
    [
        ({"absent": torch.zeros(1)}, "missing"),
        ({"model.a": torch.zeros(3, 4)}, "[3, 4]"),
        ({"model.a": torch.zeros(4, 3).double()}, "float64"),
        ({"head.weight": ShardedTensor(torch.zeros(6, 3), 6, 0)}, "[6, 3]"),
    ],
)
def test_a_mismatched_tensor_is_reported_before_another_is_overwritten(saved, tensors, message):
    sound = torch.zeros(2)
    assert message in refusal(saved, {"other": sound, **tensors})
    assert not sound.any()


def data_file(folder):
    (file,) = folder.glob("*.safetensors")
    return file


def sign(folder, **changes):
    """Make the manifest match the files, as an attacker would."""
    manifest = read_manifest(folder)
    files = {path.name: checksum(path) for path in folder.glob("*.safetensors")}
    text = dataclasses.replace(manifest, files=files, **changes).to_json()
    (folder / "manifest.json").write_text(text)


def test_a_flipped_bit_in_the_data_is_detected(saved):
    content = bytearray(data_file(saved).read_bytes())
    content[-1] ^= 1
    data_file(saved).write_bytes(content)
    assert "checksum" in refusal(saved)
    with pytest.raises(CheckpointError, match="is damaged"):
        load_weights(saved, "extra")


def test_a_truncated_file_or_garbage_is_refused(saved):
    whole = data_file(saved).read_bytes()
    for content in (*(whole[:keep] for keep in (0, 4, 100, -1)), b"\xff" * 64, b"\x02" + bytes(7) + b"[]"):
        data_file(saved).write_bytes(content)
        sign(saved)
        assert data_file(saved).name in refusal(saved)


def test_a_missing_an_extra_and_a_linked_file_are_reported(saved):
    file = data_file(saved)
    extra = saved / "extra.safetensors"
    extra.write_bytes(file.read_bytes())
    assert f"{extra} is not in the manifest" in refusal(saved)
    extra.unlink()
    outside = file.rename(saved.parent / "outside")
    assert str(file) in refusal(saved)
    file.symlink_to(outside)
    assert "link" in refusal(saved)


def forge(saved, tensors, places):
    metadata = {"DCP_SHARDING_INFO": places if isinstance(places, str) else json.dumps(places)}
    save_file(tensors, data_file(saved), metadata=metadata)
    sign(saved)
    return refusal(saved)


def at(*offsets):
    return {"saved_offsets": list(offsets)}


@pytest.mark.parametrize(
    ("rows", "place", "message"),
    [
        (4, at(0, 0), "head.weight"),
        (4, at(1, 0), "head.weight"),
        (5, at(0, 1), "head.weight"),
        (5, at(0), "head.weight"),
        (5, at(2**70, 0), "integer"),
        (6, at(0, 0), "head.weight"),
        (5, [], "head.weight"),
    ],
)
def test_missing_or_misplaced_rows_in_a_header_are_detected(saved, rows, place, message):
    tensors, _ = make_state()
    places = {key: at(*[0] * value.dim()) for key, value in tensors.items()}
    assert message in forge(
        saved, {**tensors, "head.weight": torch.zeros(rows, 3)}, {**places, "head.weight": place}
    )


def test_a_header_without_valid_offsets_or_with_another_tensor_than_the_manifest_is_refused(saved):
    tensors, sharded = make_state()
    for places in ("", "[" * 100_000, "{}"):
        forge(saved, tensors, places)
    tensors["head.weight"] = sharded["head.weight"].local
    places = {key: at(*[0] * value.dim()) for key, value in tensors.items()}
    assert "'model.n'" in forge(saved, {**tensors, "model.n": torch.tensor(1.5)}, places)


def test_the_same_rows_in_two_files_are_detected(saved):
    (saved / "twice.safetensors").write_bytes(data_file(saved).read_bytes())
    sign(saved)
    assert "twice" in refusal(saved)


@pytest.mark.parametrize("others", [(), ("manifest.json",)])
def test_a_folder_that_is_not_a_checkpoint_is_not_replaced(others, tmp_path):
    (tmp_path / "1").mkdir()
    for name in ("part_0.txt", *others):  # a partition has a manifest, too
        (tmp_path / "1" / name).write_text('{"format": 1}')
    checkpoint = save(tmp_path / "run", "1")
    with pytest.raises(CheckpointError, match="exists"):
        save(tmp_path, "1")
    with pytest.raises(CheckpointError, match="exists"):
        fetch(checkpoint.as_uri(), WORLD, tmp_path / "1")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["1", "run"]
    assert (tmp_path / "1" / "part_0.txt").exists()


@pytest.mark.parametrize("whose", ["a", ""])  # of another run; of none, which a command has written
def test_the_checkpoint_of_another_run_is_not_replaced_by_a_download(whose, tmp_path):
    own = save_checkpoint(tmp_path, "1", Snapshot({}, dataclasses.replace(MANIFEST, run_id=whose)), WORLD)
    other = save_checkpoint(
        tmp_path / "b", "1", Snapshot({}, dataclasses.replace(MANIFEST, run_id="b")), WORLD
    )
    before = (own / "manifest.json").read_bytes()
    with pytest.raises(CheckpointError, match="exists"):
        fetch(other.as_uri(), WORLD, own)
    assert (own / "manifest.json").read_bytes() == before


def test_a_later_checkpoint_of_the_run_is_not_replaced_by_a_download(tmp_path):
    later, first = (dataclasses.replace(MANIFEST, run_id="a", step=step) for step in (7, 6))
    own = save_checkpoint(tmp_path, "1", Snapshot({}, later), WORLD)
    other = save_checkpoint(tmp_path / "store", "0", Snapshot({}, first), WORLD)
    with pytest.raises(CheckpointError, match="step 7"):
        fetch(other.as_uri(), WORLD, own)
    assert read_manifest(own) == later
    assert fetch(own.as_uri(), WORLD, other) == other
    assert read_manifest(other) == later


def test_a_save_dir_that_cannot_be_created_gives_a_one_line_error(tmp_path):
    (tmp_path / "file").touch()
    with pytest.raises(CheckpointError, match=r"could not save checkpoint .*Not a directory"):
        save(tmp_path / "file" / "x", "1")


@pytest.mark.parametrize(
    "tensor",
    [
        torch.tensor(3),
        torch.zeros(0, 4),
        torch.arange(24.0).view(4, 6).t(),
        torch.nn.Parameter(torch.ones(2, 2)),
    ],
)
def test_a_snapshot_copy_is_equal_and_independent(tensor):
    a, b = role_of_key("a"), role_of_key("b")
    copy = Snapshot({a: tensor, b: ShardedTensor(tensor, 5, 0)}, MANIFEST).copy_to_host()
    for made in (copy.tensors[a], copy.tensors[b].local):
        assert made.dtype == tensor.dtype
        assert torch.equal(made, tensor.detach())
        assert made.is_contiguous()
        assert not made.requires_grad
        assert made.numel() == 0 or made.data_ptr() != tensor.data_ptr()
