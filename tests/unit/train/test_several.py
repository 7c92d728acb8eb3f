"""Runs over several datasets in one process: resuming, leaving one out, and what is refused."""

import json
import math
import shutil

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import yaml
from safetensors.torch import load_file

from plsc import Entry, open_embeddings
from plsc.actions.dominant import run_dominant
from plsc.actions.predict import run_prediction
from plsc.checkpoint import load_weights, read_manifest
from plsc.checkpoint.classes import change_classes
from plsc.checkpoint.save import local_of
from plsc.cli import main
from plsc.errors import CheckpointError, DataError, OptionError
from plsc.evaluate.classification import ClassificationResult
from plsc.gallery import open_gallery
from plsc.heads import DenseHead, ShardedHead
from plsc.parallel.world import World
from plsc.run.build_heads import options_of
from plsc.run.run import build_run
from plsc.run.user_parts import UserParts
from plsc.state.restore import restore
from plsc.state.tensors import collect_tensors
from tests.images import write_dataset
from tests.resuming import (
    Drawing,
    different,
    losses_of,
    saved_at,
    tensors_of,
    train,
)
from tests.resuming import (
    options_of as run_options,
)

WORLD = World.single()
GLYPHS = {"loss_type": "cosface", "margin": 0.35, "scale": 30.0}


@pytest.fixture(scope="module")
def sets(tmp_path_factory):
    """18, 8 and 6 images of 6, 4 and 3 classes."""
    folder = tmp_path_factory.mktemp("sets")
    write_dataset(folder / "faces", classes=6, per_class=3, seed=1)
    write_dataset(folder / "glyphs", classes=4, per_class=2, seed=2)
    write_dataset(folder / "cars", classes=3, per_class=2, seed=3)
    return folder


def options(sets, save_dir, *names, **settings):
    """Options of a run with steps of 6 images; faces have twice the weight of any other."""
    made = run_options("unused", save_dir, train__batch_size=6, **settings)
    for name in names or ("faces", "glyphs"):
        more = {"faces": {"weight": 2.0}, "glyphs": GLYPHS}.get(name, {})
        made.add_data_set(name=name, path=str(sets / name), **more)
    return made


CASES = {
    "plain": {"head__loss_type": "dist_adaface", "train__calc_acc": True},
    "all at once": {
        "head__sample_ratio": 0.5, "head__optimizer": "adamw", "head__lr_factor": 0.01,
        "head__sub_centers": 2, "head__margin_warmup_steps": 9,
        "optim__clip_norm": 0.5, "data__order": "block", "data__num_workers": 1,
        "data__block_samples": 2, "data__pool_samples": 4, "data__cache": "memory",
    },
    "micro-batches": {"train__micro_batches": 2, "head__row_dtype": "bfloat16", "head__offload": True},
}  # fmt: skip


@pytest.fixture(scope="module")
def trained(sets, tmp_path_factory):
    """Two epochs of 5 steps, with a checkpoint after every step."""
    save_dir = tmp_path_factory.mktemp("trained") / "run"
    saving = {"checkpoint__every_n_steps": 1, "checkpoint__keep_last": -1}
    train(options(sets, save_dir, **CASES["plain"], **saving), WORLD)
    return save_dir


@pytest.mark.parametrize("case", CASES)
def test_a_run_goes_on_from_any_step_to_the_same_bits(sets, trained, tmp_path, case):
    saving = {"checkpoint__every_n_steps": 1, "checkpoint__keep_last": -1}
    whole = trained
    if case != "plain":
        whole = tmp_path / "whole"
        train(options(sets, whole, **CASES[case], **saving), WORLD)
    losses = losses_of(whole)
    assert sorted(losses) == list(range(1, 11))
    for step in (2, 5, 8) if case == "plain" else (7,):
        resumed = tmp_path / f"{step}"
        load = {"checkpoint__load_dir": str(saved_at(whole, step))}
        train(options(sets, resumed, **CASES[case], **load), WORLD)
        assert different(resumed / "1", whole / "1") == [], step
        assert losses_of(resumed) == {s: x for s, x in losses.items() if s > step}


def test_each_data_set_keeps_its_names_and_labels(sets, tmp_path):
    """The names of the classes are its folders'; one that is new is refused for its own head."""
    for name, classes in {"faces": "ab", "glyphs": "pq"}.items():
        for number, label in enumerate(classes):
            (tmp_path / name / label).mkdir(parents=True)
            for image in range(2):
                source = sets / f"{name}/images/{number}_{image}.png"
                shutil.copy(source, tmp_path / name / label)
    train(options(tmp_path, tmp_path / "run", train__epochs=1), WORLD)
    found = {key: tensor for (_, key), tensor in tensors_of(tmp_path / "run/0").items()}
    for name, text in {"faces": b"ab", "glyphs": b"pq"}.items():
        assert bytes(found[f"class_names.{name}.bytes"].numpy()) == text
        assert found[f"class_names.{name}.ends"].tolist() == [1, 2]
    shutil.copytree(tmp_path / "glyphs/q", tmp_path / "glyphs/o")
    more = {"train__epochs": 2, "checkpoint__load_dir": str(tmp_path / "run/0")}
    with pytest.raises(CheckpointError, match=r"lacks 1 of the 3 classes of .* glyphs, .* 'o'"):
        train(options(tmp_path, tmp_path / "new", **more), WORLD)


def test_the_log_has_the_losses_of_each_head_and_their_mean_over_the_images(trained):
    lines = map(json.loads, (trained / "metrics.jsonl").read_text().splitlines())
    entries = [line for line in lines if "loss" in line]
    assert entries
    for entry in entries:
        assert entry["loss/faces"] != entry["loss/glyphs"]
        for what in ("loss", "accuracy", "effective_rank"):
            mean = (4 * entry[f"{what}/faces"] + 2 * entry[f"{what}/glyphs"]) / 6
            assert entry[what] == pytest.approx(mean)


def test_the_terminal_names_the_data_sets_and_their_losses(sets, tmp_path, capsys):
    train(options(sets, tmp_path / "run", train__steps=1), WORLD)
    said = capsys.readouterr().out
    assert "2 heads, 10 classes, 26 images" in said
    assert "glyphs): 8 images, 4 classes" in said
    assert "cosface, 2 of the 6 images per step" in said
    assert " loss/faces " in said
    assert " loss/glyphs " in said


def resumed_run(sets, trained, tmp_path, *names, at=7, **settings):
    """Return a run with the state of the checkpoint of a step, and what was said."""
    path = saved_at(trained, at)
    torch.manual_seed(9)
    made = options(sets, tmp_path / "new", *names, **{**CASES["plain"], **settings})
    run = build_run(made, WORLD, UserParts(Drawing()))
    return run, restore(run, path, read_manifest(path)), path


def state_of(run):
    found = collect_tensors(run.network, run.heads, run.optimizer)
    return {role.key: local_of(value) for role, value in found.items()}


def test_a_data_set_can_be_left_out_and_another_added_when_a_run_goes_on(sets, trained, tmp_path):
    before = tensors_of(saved_at(trained, 7))
    run, said, path = resumed_run(sets, trained, tmp_path, "cars", "glyphs")
    assert [line.split(";")[0] for line in said] == [
        "datasets removed: faces", "datasets added: cars",
    ]  # fmt: skip
    saved = {key: tensor for (_, key), tensor in tensors_of(path).items()}
    state = state_of(run)
    fresh = build_run(options(sets, tmp_path / "x", "cars", **CASES["plain"]), WORLD, UserParts(Drawing()))
    for key, tensor in state.items():
        is_new = ".cars." in f".{key}"
        assert tensor.equal(state_of(fresh)[key] if is_new else saved[key]), key
    assert {key for key in saved if "faces" in key} == {
        "heads.faces.weight", "heads.faces.margin.mean", "heads.faces.margin.std",
        "rows.faces.weight.momentum_buffer",
    }  # fmt: skip
    assert saved.keys() - state.keys() - {"rank0.random"} == {k for k in saved if "faces" in k}
    train(
        options(
            sets,
            tmp_path / "run",
            "cars",
            "glyphs",
            **CASES["plain"],
            checkpoint__load_dir=str(path),
        ),
        WORLD,
    )
    manifest = read_manifest(tmp_path / "run/1")
    assert list(manifest.heads) == ["cars", "glyphs"]
    # 14 images would be an epoch of 3 steps: that of the run stays, and the schedule with it.
    assert (manifest.step, manifest.scalars["steps_per_epoch"]) == (10, 5)
    after = tensors_of(path)
    assert all(tensor.equal(after[key]) for key, tensor in before.items())


def test_the_optimizers_state_of_a_dense_head_that_is_left_out_is_passed_over(sets, trained, tmp_path):
    run, said, path = resumed_run(sets, trained, tmp_path, "faces")
    assert len(said) == 1
    assert "momentum.heads.glyphs.weight" in read_manifest(path).tensors
    assert "momentum.backbone.fc.weight" in state_of(run)
    assert not any("glyphs" in key for key in state_of(run))


def test_runs_with_one_head_and_with_several_do_not_go_on_from_each_other(sets, trained, tmp_path):
    one = run_options(sets / "faces", tmp_path / "one", train__batch_size=6, train__epochs=1)
    train(one, WORLD)
    several = options(sets, tmp_path / "a", checkpoint__load_dir=str(tmp_path / "one/0"))
    with pytest.raises(CheckpointError, match=r"has a single head, .* use set_pretrained"):
        train(several, WORLD)
    back = run_options(sets / "faces", tmp_path / "b", checkpoint__load_dir=str(trained / "1"))
    with pytest.raises(CheckpointError, match="datasets faces, glyphs, but this run has a single dataset"):
        train(back, WORLD)
    assert not (tmp_path / "a/0").exists()
    assert not (tmp_path / "b/0").exists()


def test_a_head_that_changed_is_refused(sets, trained, tmp_path):
    def refused(said, *names, **settings):
        with pytest.raises(CheckpointError, match=said) as caught:
            resumed_run(sets, trained, tmp_path, *names, **settings)
        assert "\n" not in str(caught.value)

    refused("heads of the datasets faces, glyphs, but this run only has others: cars", "cars")
    refused("loss type dist_adaface for the dataset faces", head__loss_type="dist_arcface")
    other = tmp_path / "sets"
    shutil.copytree(sets, other)
    lines = (other / "faces/label.txt").read_text().splitlines()
    (other / "faces/label.txt").write_text("\n".join(lines[:-1]) + "\n")
    with pytest.raises(CheckpointError, match=r"epoch of 18 images for the dataset faces, .* now has 17"):
        resumed_run(other, trained, tmp_path)
    resumed_run(other, trained, tmp_path, at=5)  # at the end of an epoch a dataset may change
    (other / "faces/label.txt").write_text("\n".join(lines[:-3]) + "\n")
    with pytest.raises(CheckpointError, match=r"classes 6 for the dataset faces, .* has 5"):
        resumed_run(other, trained, tmp_path, at=5)


@pytest.mark.parametrize("damage", [[], {}, {"../x": {}}, {"faces": 3}, {"faces\n": {}}])
def test_damaged_words_about_heads_are_one_line(sets, trained, tmp_path, damage):
    path = tmp_path / "0"
    shutil.copytree(trained / "0", path)
    manifest = json.loads((path / "manifest.json").read_text())
    manifest["heads"] = damage
    (path / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(CheckpointError) as caught:
        train(options(sets, tmp_path / "run", checkpoint__load_dir=str(path)), WORLD)
    assert "\n" not in str(caught.value)


def test_a_data_set_has_the_runs_head_but_for_what_it_says_itself(sets, tmp_path):
    made = options(
        sets, tmp_path, "faces", "glyphs", "cars", head__margin=0.4, head__scale="auto",
        head__sample_ratio=0.5, head__row_dtype="bfloat16",
    )  # fmt: skip
    made.set("data.datasets", [*made.data.datasets[:2], {
        "name": "cars", "path": str(sets / "cars"), "loss_type": "dist_softmax", "sample_ratio": 0.9,
        "class_num": 11,
    }])  # fmt: skip
    heads = build_run(made, WORLD, UserParts(Drawing())).heads.by_name
    faces, glyphs, cars = (heads[name] for name in ("faces", "glyphs", "cars"))
    assert isinstance(faces, ShardedHead)
    assert (faces.margin.margin, faces.sampling.ratio_at(0)) == (0.4, 0.5)
    assert faces.margin.scale == pytest.approx(math.sqrt(2) * math.log(6 - 1))
    assert (faces.weight.dtype, faces.class_num) == (torch.bfloat16, 6)
    assert isinstance(glyphs, DenseHead)
    assert (glyphs.margin.margin, glyphs.margin.scale) == (0.35, 30.0)
    assert glyphs.weight.dtype == torch.float32
    assert (cars.margin.name, cars.sampling.ratio_at(0), cars.class_num) == ("softmax", 0.9, 11)
    assert not faces.weight[:3].equal(cars.weight[:3])
    other = options_of(made, made.data_sets()[1])
    assert other.head.loss_type == "cosface"
    assert made.head.loss_type == "dist_arcface"  # the run's own are left alone


def test_the_margins_of_all_heads_rise_over_the_warm_up(sets, tmp_path):
    """A quarter of cosface's margin is in effect at the first of 4 steps."""

    def first_losses(name, margin, warmup):
        made = options(
            sets, tmp_path / name, "faces", head__loss_type="dist_cosface", head__margin=margin,
            head__margin_warmup_steps=warmup, head__scale=64.0, train__steps=1,
        )  # fmt: skip
        made.add_data_set(**GLYPHS | {"margin": margin, "name": "glyphs", "path": str(sets / "glyphs")})
        train(made, WORLD)
        line = json.loads((tmp_path / name / "metrics.jsonl").read_text().splitlines()[0])
        return [line["loss/faces"], line["loss/glyphs"]]

    warm, low, full = (first_losses(*one) for one in [("a", 0.4, 4), ("b", 0.1, 0), ("c", 0.4, 0)])
    assert warm == pytest.approx(low, rel=1e-6)
    assert all(mine < theirs - 1 for mine, theirs in zip(warm, full, strict=True))


def changed(sets, tmp_path, **values):
    made = options(sets, tmp_path, "faces")
    made.add_data_set(**{"name": "glyphs", "path": str(sets / "glyphs"), **values})
    return made


def test_what_does_not_go_together_is_refused_before_training(sets, tmp_path):
    def refused(said, kind=OptionError, reader=None, **settings):
        values = settings.pop("values", {})
        made = changed(sets, tmp_path, **values)
        for path, value in settings.items():
            made.set(path.replace("__", "."), value)
        with pytest.raises(kind, match=said) as caught:
            build_run(made, WORLD, UserParts(Drawing(), train_reader=reader))
        assert "\n" not in str(caught.value)

    refused(
        "dataset glyphs: .*missing does not exist",
        DataError,
        values={"path": str(sets / "missing")},
    )
    refused("a step of 1 images cannot contain one image of each of 2", train__batch_size=1)
    refused("pass class_num to add_dataset", head__class_num=9)
    refused("'rank_files' cannot be used with several", data__order="rank_files")
    refused("last_batch 'keep'", data__last_batch="keep")
    refused("both train_reader and data.datasets", reader=lambda: iter(()))
    refused("dataset glyphs: head.sample_ratio .* only if class weights are sharded", values={
        "loss_type": "cosface", "sample_ratio": 0.5})  # fmt: skip
    refused("dataset glyphs: .*softmax", values={"loss_type": "dist_softmax", "margin": 0.5})
    refused(r"dataset glyphs: label 3 .* outside 0\.\.2", DataError, values={"class_num": 3})
    refused("'drop' leaves no step", DataError, data__last_batch="drop", train__batch_size=30)


def test_the_length_of_an_epoch_can_be_set_over_several_data_sets_only(sets, tmp_path):
    made = options(sets, tmp_path, train__epoch_steps=3)
    assert build_run(made, WORLD, UserParts(Drawing())).total_steps == 6
    made.set("data.datasets", [])
    with pytest.raises(OptionError, match=r"epoch_steps is 3, .* only if there are several datasets"):
        build_run(made, WORLD, UserParts(Drawing()))


def test_a_label_out_of_range_is_passed_over_and_never_a_class_of_the_next_data_set(sets, tmp_path):
    made = changed(sets, tmp_path / "run")
    first, *others = made.data.datasets
    made.set("data.datasets", [{**first, "class_num": 5}, *others])
    made.set("data.bad_images", "skip")
    run = build_run(made, WORLD, UserParts(Drawing()))
    labels = np.concatenate([batch.labels for batch in run.data.loader.epoch(0)])
    assert set(labels) == set(range(5 + 4))
    assert sum(batch.skipped for batch in run.data.loader.epoch(0)) == 5 * 6 - len(labels) >= 3
    train(made, WORLD)
    assert (tmp_path / "run/bad_samples.txt").read_text().count("label\tfaces: ") == 3


def test_the_checkpoint_commands_know_several_heads(trained, tmp_path, capsys):
    assert main(["checkpoint", "list", str(trained)]) == 0
    assert "10 classes of 2 heads" in capsys.readouterr().out
    assert main(["checkpoint", "show", str(trained / "1")]) == 0
    shown = yaml.safe_load(capsys.readouterr().out)
    assert shown["heads"]["faces"]["class_ranges"] == [[0, 6]]
    assert main(["checkpoint", "classes", str(trained / "1"), str(tmp_path / "x"), "--grow", "2"])
    assert "has several heads" in capsys.readouterr().err
    with pytest.raises(CheckpointError, match="single head"):
        change_classes(trained / "1", tmp_path / "x", grow=2)
    assert not (tmp_path / "x").exists()


def test_the_network_is_used_and_begun_with_as_that_of_a_single_head(sets, trained, tmp_path):
    load = run_options(sets / "cars", tmp_path, checkpoint__load_dir=str(trained / "1"))
    found = run_prediction(load, WORLD, UserParts(Drawing()))
    assert found.embeddings.shape == (6, 8)
    with pytest.raises(CheckpointError, match="only if it has a single"):
        run_dominant(load, WORLD, UserParts(Drawing()), tmp_path / "y")
    begin = options(sets, tmp_path / "run", "glyphs", "cars", train__steps=1, optim__lr=1e-9)
    begin.set("model.pretrained", str(trained / "1"))
    result = train(begin, WORLD)
    assert result.warm_start.head == ["heads.glyphs.weight"]
    saved = {key: tensor for (_, key), tensor in tensors_of(tmp_path / "run/0-step1").items()}
    for (_, key), tensor in tensors_of(trained / "1").items():
        if key in ("heads.glyphs.weight", "backbone.fc.weight"):
            torch.testing.assert_close(saved[key], tensor, rtol=0, atol=1e-6)


def test_one_of_several_heads_classifies(sets, trained, tmp_path):
    path, place = trained / "1", str(sets / "glyphs")
    ins = Entry()
    ins.options = run_options(place, tmp_path, checkpoint__load_dir=str(path))
    ins.set_model(Drawing())
    found = ins.predict()
    x = F.normalize(torch.from_numpy(found.embeddings))
    logits = {
        name: scale * x @ F.normalize(load_weights(path, "class_weights", name)["weight"]).T
        for name, scale in {"faces": math.sqrt(2) * math.log(6 - 1), "glyphs": 30.0}.items()
    }
    for name in ("faces", "glyphs"):
        probs, ids = logits[name].softmax(dim=1).max(dim=1)
        classified = ins.predict(field=["id", "prob"], head=name)
        assert np.array_equal(classified.ids, ids.numpy())
        np.testing.assert_allclose(classified.probs, probs.numpy(), rtol=1e-5)
    ins.set_val_dir(place)
    correct = logits["glyphs"].argmax(dim=1).numpy() == found.labels
    assert ins.test(head="glyphs") == {"val": ClassificationResult(correct.mean(), 1.0, 8)}

    for call in (lambda: ins.predict(field="id"), ins.test):
        with pytest.raises(CheckpointError, match=r"has several heads; set head to one of: faces, glyphs$"):
            call()
    with pytest.raises(CheckpointError, match=r"no head 'face'; known: faces, glyphs; did you mean 'faces'"):
        ins.predict(field="id", head="face")
    with pytest.raises(OptionError, match=r"head is glyphs, but field is .*add 'id' or 'prob'"):
        ins.predict(head="glyphs")
    with pytest.raises(OptionError, match="head is for the images of set_val_dir"):
        ins.test("pairs", head="glyphs")
    alone = train(run_options(place, tmp_path / "alone", train__epochs=1), WORLD).checkpoint
    ins.set_checkpoint_dir(alone)
    with pytest.raises(CheckpointError, match="has a single head, which has no name; remove head"):
        ins.predict(field="id", head="glyphs")


def test_the_commands_take_the_name_of_a_head(sets, trained, tmp_path, messages):
    used = ["--checkpoint.load_dir", str(trained / "1"), "--data.dataset_dir", str(sets / "glyphs")]
    used += ["--model.name", "tests.resuming:Drawing", "--data.num_workers", "0"]
    predict = ["predict", *used, "--field", "id", "--output", str(tmp_path / "out")]
    assert main([*predict, "--head", "glyphs"]) == 0
    assert open_embeddings(tmp_path / "out")["ids"][:].max() < 4
    assert main([*predict, "--head", "faces"]) == 1  # the folder has classes of the other head
    assert "different model" in messages[-1]
    assert main(["test", *used, "--data.val_dir", str(sets / "glyphs"), "--head", "glyphs"]) == 0
    assert "val: top-1" in messages[-1]


def test_a_gallery_and_an_export_have_the_classes_of_one_head(trained, tmp_path, messages):
    pytest.importorskip("faiss", reason="plsc[search] is not installed")
    path, network = str(trained / "1"), ["--model.name", "tests.resuming:Drawing"]
    expected = F.normalize(load_weights(path, "class_weights", "glyphs")["weight"]).numpy()
    for made in (["index", path], ["export", path, "--graph", "none", "--classes"]):
        command = [*made, str(tmp_path / made[0]), *network]
        assert main(command) == 1
        assert "has several heads; set head to one of: faces, glyphs" in messages[-1]
        assert main([*command, "--head", "glyphs"]) == 0
    assert main(["index", str(tmp_path / "export"), str(tmp_path / "other"), "--head", "glyphs"]) == 1
    assert "which has the classes of one head; remove head" in messages[-1]
    gallery = open_gallery(tmp_path / "index")
    assert gallery.search(expected, 1)[1].ravel().tolist() == [0, 1, 2, 3]
    weight = load_file(tmp_path / "export" / "classes.safetensors")["weight"]
    np.testing.assert_allclose(weight.numpy(), expected, rtol=1e-6)
