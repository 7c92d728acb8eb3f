"""Every change of classes compared with the reference implementation, and what is refused."""

import json
import os
import re
import resource

import numpy as np
import pytest
import torch
from safetensors import safe_open

from plsc.checkpoint import ShardedTensor, load_tensors, load_weights
from plsc.checkpoint import load as reading
from plsc.checkpoint.classes import change_classes
from plsc.checkpoint.manifest import rank_of_shard
from plsc.checkpoint.remote import verify
from plsc.checkpoint.save import local_of
from plsc.cli import main
from plsc.errors import CheckpointError, DataError, OptionError
from plsc.heads.weights import initial_rows
from plsc.parallel.world import World, class_ranges
from tests.unit.checkpoint.classes_reference import (
    SEED,
    class_map,
    ends_of,
    grown,
    make_tensors,
    merged,
    reordered,
    write_checkpoint,
)

CASES = [
    # files, centers, dtype, kind of state, sharded
    (1, 1, torch.float32, "int8", True),
    (2, 3, torch.bfloat16, "int8", True),
    (3, 2, torch.bfloat16, "adamw", True),
    (4, 1, torch.float64, "adagrad", True),
    (2, 2, torch.float32, "sgd", False),
]


@pytest.fixture(autouse=True)
def small_pieces(monkeypatch):
    """Use pieces of a few rows, so that piece boundaries are tested."""
    monkeypatch.setattr(reading, "PIECE_BYTES", 100)


def load_all(folder):
    """Return every tensor of a checkpoint, as a run would load it, after all checks."""
    manifest = verify(folder)
    tensors = {}
    for info in manifest.tensors.values():
        empty = torch.zeros(info.shape, dtype=getattr(torch, info.dtype))
        tensors[info.role] = ShardedTensor(empty, info.shape[0], 0) if info.sharded else empty
    load_tensors(folder, tensors, World.single())
    return manifest, {role.key: local_of(value) for role, value in tensors.items()}


def check(folder, before, expected, others, exact=True):
    manifest, found = load_all(folder)
    for key, tensor in expected.items():
        assert found[key].dtype == tensor.dtype
        if exact or key not in ("head.weight", "head.bias"):
            assert torch.equal(found[key], tensor), key
        else:
            rounding = 1e-2 if tensor.dtype == torch.bfloat16 else 1e-5
            assert torch.allclose(found[key].double(), tensor.double(), rtol=rounding, atol=1e-6)
    for key, tensor in others.items():
        assert torch.equal(found[key], tensor), key
    classes = len(expected["head.weight"])
    ranks = len(before.files) if before.tensors["head.weight"].sharded else 1
    assert manifest.class_num == classes
    assert manifest.heads[""].class_ranges == class_ranges(classes, ranks)
    assert manifest.options["head"]["class_num"] == classes
    assert manifest.scalars == {**before.scalars, "metrics": {}}
    assert [*map(rank_of_shard, manifest.shards)] == [*map(rank_of_shard, before.shards)]
    same = ("step", "epoch", "step_in_epoch", "world_size", "emb_size")
    assert all(getattr(manifest, name) == getattr(before, name) for name in same)
    return manifest


@pytest.mark.parametrize("case", CASES)
def test_every_change_equals_the_reference_implementation(tmp_path, case):
    files, centers, dtype, kind, is_sharded = case
    rng = np.random.default_rng(CASES.index(case))
    count = int(rng.integers(files + 3, 40))
    tensors, others = make_tensors(rng, count, centers, dtype, kind, is_sharded)
    source = tmp_path / "5"
    ends = ends_of(rng, count, files)
    before = write_checkpoint(source, tensors, others, ends, is_sharded)
    bytes_before = {path.name: path.read_bytes() for path in source.iterdir()}

    more = int(rng.integers(1, 30))
    change_classes(source, tmp_path / "grown", grow=more)
    manifest = check(tmp_path / "grown", before, grown(tensors, more), others)
    assert manifest.lineage[0]["what"] == "grow"

    dropped = rng.choice(count, int(rng.integers(1, count - 1)), replace=False)
    list_file = tmp_path / "ids.txt"
    list_file.write_text("".join(f"{c}\n" for c in dropped))
    change_classes(source, tmp_path / "dropped", drop=list_file)
    left = [c for c in range(count) if c not in dropped]
    check(tmp_path / "dropped", before, reordered(tensors, left), others)
    numbers = class_map(tmp_path / "dropped")
    assert numbers.tolist() == [left.index(c) if c in left else -1 for c in range(count)]

    joining = rng.choice(count, int(rng.integers(1, count - 1)), replace=False)
    stay = [c for c in range(count) if c not in joining]
    pairs = {int(c): int(rng.choice(stay)) for c in joining}
    change_classes(source, tmp_path / "merged", merge=pairs)
    check(tmp_path / "merged", before, merged(tensors, pairs), others, exact=centers > 1)
    numbers = class_map(tmp_path / "merged").tolist()
    assert numbers == [stay.index(pairs.get(c, c)) for c in range(count)]

    order = rng.permutation(count)
    change_classes(source, tmp_path / "reordered", reorder=order)
    check(tmp_path / "reordered", before, reordered(tensors, order), others)
    assert class_map(tmp_path / "reordered")[order].tolist() == list(range(count))

    assert {path.name: path.read_bytes() for path in source.iterdir()} == bytes_before
    for rank in range(files):  # tensors of a rank stay in its file
        (shard,) = (tmp_path / "grown").glob(f"shard-{rank + 1:05d}-*")
        with safe_open(shard, framework="pt") as file:
            assert torch.equal(file.get_tensor(f"rank{rank}.backbone.mean"), torch.arange(4.0) + rank)
    assert load_weights(tmp_path / "grown").keys() == {"head.weight", "count", "empty"}


@pytest.fixture
def small(tmp_path):
    rng = np.random.default_rng(0)
    tensors, others = make_tensors(rng, 10, 1, torch.float32, "adamw", True)
    folder = tmp_path / "run" / "5"
    write_checkpoint(folder, tensors, others, [4, 10])
    return folder, tensors


def test_the_lineage_has_each_change_and_new_rows_never_repeat(small):
    folder, _ = small
    ids = folder.parent / "ids.txt"
    ids.write_bytes(b"\xef\xbb\xbf9\r\n 3\t\n7\n\n\n")
    change_classes(folder, folder.parent / "b", drop=ids)
    change_classes(folder.parent / "b", folder.parent / "c", grow=3)
    manifest, found = load_all(folder.parent / "c")
    first, second = manifest.lineage
    expected = {"what": "drop", "source": "5", "classes_before": 10, "classes_after": 7}
    assert expected.items() <= first.items()
    assert (second["what"], second["source"]) == ("grow", "b")
    new = found["head.weight"][7:]
    assert 0.002 < float(new.std()) < 0.03
    # A head of 10 classes initialised classes 7, 8 and 9 with other rows, which have moved since.
    assert not torch.isclose(new, initial_rows(SEED, 7, 10, 6)).any()
    assert not (folder.parent / "c/classes.tsv").exists()


def test_a_merged_class_keeps_its_row_if_the_directions_cancel(tmp_path):
    rows = torch.randn(5, 6, generator=torch.Generator().manual_seed(0))
    rows[4] = -3 * rows[1]
    write_checkpoint(tmp_path / "5", {"head.weight": rows}, {}, [5])
    change_classes(tmp_path / "5", tmp_path / "b", merge={4: 1})
    assert torch.equal(load_all(tmp_path / "b")[1]["head.weight"], rows[:4])


REFUSED = {
    "drop": {
        "3\n10\n": "{list}:2: class 10",
        "3 4\n": "{list}:1: .* number",
        "3\n\n4\n": "{list}:2: ",
        "3\n4\n5\n4\n": "{list}:4: .* repeated; .* 2",
        "\0\udcff": "{list}:1: .* number",
        "": "{list} is empty",
        "".join(f"{c}\n" for c in range(9)): "leaves 1 of 10",
    },
    "merge": {
        "3\n": "{list}:1: .* two",
        "1 2\n3 3\n": "{list}:2: .* into 3",
        "1 2\n2 3\n": "{list}:1: .* into 2, .* into 3",
    },
    "reorder": {"0\n2\n": "2 of 10 classes"},
}


@pytest.mark.parametrize(
    ("what", "text", "message"),
    [(what, text, message) for what, some in REFUSED.items() for text, message in some.items()],
)
def test_a_bad_list_is_refused_with_its_line(small, capsys, what, text, message):
    folder, _ = small
    listed = folder.parent / "list.txt"
    listed.write_bytes(text.encode("utf-8", "surrogateescape"))
    words = ["checkpoint", "classes", folder, folder.parent / "b", f"--{what}", listed]
    assert main([*map(str, words)]) == 1
    assert re.search(message.format(list=listed), capsys.readouterr().err)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["5", "list.txt"]


def refusal(*arguments, **settings):
    with pytest.raises((OptionError, DataError, CheckpointError)) as caught:
        change_classes(*arguments, **settings)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def test_invalid_arguments_are_refused(small, tmp_path):
    folder, _ = small
    new = folder.parent / "b"
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "dangling").symlink_to(tmp_path / "nowhere")
    for noun, given in [
        ("no change", {}),
        ("grow and drop", {"grow": 1, "drop": [1]}),
        ("grow", {"grow": 0}),
        ("merge:1", {"merge": [[1, 2, 3], [4, 5, 0]]}),
        ("number", {"drop": [1.5]}),
        ("number", {"drop": np.array([2**63], np.uint64)}),
        ("pipe", {"drop": tmp_path / "pipe"}),
        ("bytes free", {"grow": 10**12}),
    ]:
        assert noun in refusal(folder, new, **given)
    for noun, target in [
        ("exists", folder.parent),
        ("exists", tmp_path / "dangling"),
        ("inside", folder / "b"),
        ("folder", "s3://bucket/b"),
    ]:
        assert noun in refusal(folder, target, grow=1)
    assert "exist" in refusal(tmp_path / "none", new, grow=1)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["5"]


def test_a_checkpoint_that_is_damaged_or_has_no_classes_and_a_full_disk_leave_nothing(small):
    folder, _ = small
    new = folder.parent / "b"
    file = sorted(folder.glob("*.safetensors"))[1]
    sound = file.read_bytes()
    file.write_bytes(sound[:-1] + bytes([sound[-1] ^ 1]))
    assert "is damaged" in refusal(folder, new, grow=1)
    file.write_bytes(sound)
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (4096, limits[1]))  # as a full disk
    try:
        assert "published" in refusal(folder, new, grow=1000)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert sorted(path.name for path in folder.parent.iterdir()) == ["5"]
    path = folder / "manifest.json"
    manifest = json.loads(path.read_text())

    def changed(**fields):
        path.write_text(json.dumps({**manifest, **fields}))
        return refusal(folder, new, grow=1)

    assert "11 rows" in changed(heads={"": {**manifest["heads"][""], "class_num": 11}})
    assert "seed is 'a'" in changed(options={"train": {"seed": "a"}})
    assert "lineage" in changed(lineage=[3])
    write_checkpoint(folder.parent / "c", {"head.weight": torch.zeros(2, 6)}, {}, [2])
    file = folder.parent / "c" / "manifest.json"
    file.write_text(file.read_text().replace('"head.weight"', '"head.w"'))
    assert "the role of" in refusal(folder.parent / "c", new, grow=1)
    file.write_text(file.read_text().replace('"head.w"', '"heads.a.weight"').replace('"of": ""', '"of": "a"'))
    assert "'heads.a.weight'" in refusal(folder.parent / "c", new, grow=1)
    broken = torch.zeros(4, 6)
    broken[2, 3] = torch.nan
    write_checkpoint(folder.parent / "d", {"head.weight": broken}, {}, [4])
    assert "not finite" in refusal(folder.parent / "d", new, merge={2: 1})
    assert not new.exists()


def test_the_epoch_length_is_reset_at_its_end_and_kept_within_it(tmp_path):
    for step_in_epoch, left in ((0, None), (3, 7)):
        folder = tmp_path / str(step_in_epoch)
        write_checkpoint(folder, {"head.weight": torch.ones(4, 6)}, {}, [4])
        path = folder / "manifest.json"
        manifest = json.loads(path.read_text())
        manifest["step_in_epoch"] = step_in_epoch
        manifest["scalars"]["steps_per_epoch"] = 7
        path.write_text(json.dumps(manifest))
        changed = change_classes(folder, tmp_path / f"{step_in_epoch}-b", drop=[1])
        assert changed.scalars["steps_per_epoch"] == left
