"""Batches of images become batches of embeddings, or reasons; other processes load the same model."""

import os
import pickle
import shutil
from dataclasses import replace
from pathlib import Path

import fsspec
import numpy as np
import pyarrow as pa
import pytest
from PIL import Image

from plsc.errors import CheckpointError, OptionError
from plsc.export import batch_embedder, open_model
from tests.images import photo
from tests.serving import export_model

pytest.importorskip("onnxruntime", reason="plsc-torch[export] is not installed")


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    return export_model(tmp_path_factory.mktemp("batches"))


@pytest.fixture(scope="module")
def paths(model):
    return [str(path) for path in sorted((model.parent / "faces/images").iterdir())]


@pytest.fixture(scope="module")
def expected(model, paths):
    opened = open_model(model)
    return opened.embed(np.stack([opened.preprocess(Path(path).read_bytes()) for path in paths]))


@pytest.mark.parametrize("make", [pa.table, pa.RecordBatch.from_pydict])
def test_an_arrow_batch_gets_the_embeddings_of_open_model_and_the_fingerprint(model, paths, expected, make):
    images = [*(Path(path).read_bytes() for path in paths), b"no image", None]
    images[0] = photo(Image.open(paths[0]), 6, "PNG")  # is turned upright
    embedder = pickle.loads(pickle.dumps(batch_embedder(model)))
    given = make({"error": ["old"] * len(images), "image": images, "embedding": [[1.0]] * len(images)})
    found = embedder(given.replace_schema_metadata({"plsc.fingerprint": "old", "mine": "kept"}))
    assert type(found) is type(given)
    assert found.schema.names == ["image", "embedding", "error"]
    about = found.schema.metadata
    assert about[b"plsc.fingerprint"].decode() == open_model(model).fingerprint
    assert about[b"mine"] == b"kept"
    assert b"(x - 127.5) / 128" in about[b"plsc.input"]
    rows = found["embedding"].to_pylist()
    assert np.array_equal(np.array(rows[:-2], np.float32), expected)
    assert rows[-2:] == [None, None]
    *fine, damaged, missing = found["error"].to_pylist()
    assert set(fine) == {None}
    assert damaged
    assert missing
    assert embedder(found.slice(0, 0).select(["image"])).num_rows == 0


def test_a_dict_takes_paths_urls_and_structs_and_marks_failures_by_nan(model, paths, expected, tmp_path):
    embedder = batch_embedder(model, "where")
    structs = [{"bytes": Path(paths[0]).read_bytes(), "path": None}, {"bytes": None, "path": paths[1]}]
    found = embedder({"where": [*structs, *paths[2:-1], f"file://{paths[-1]}", str(tmp_path / "no.png")]})
    assert np.array_equal(found["embedding"][:-1], expected)
    assert np.isnan(found["embedding"][-1]).all()
    assert found["error"][:-1] == [""] * len(paths)
    assert "missing" in found["error"][-1]


def test_a_cell_names_no_server_and_no_pipe_unless_it_is_allowed(model, paths, expected, tmp_path, s3):
    os.mkfifo(tmp_path / "pipe")
    fsspec.filesystem("s3").put(paths[0], f"{s3}/a.png")
    cells = [f"{s3}/a.png", f"{s3}/b::http://127.0.0.1:9/refs.json", "http://127.0.0.1:9/a.png"]
    cells += [str(tmp_path / "pipe"), f"file://{tmp_path}/pipe", "/etc/passwd"]
    found = batch_embedder(model)({"image": cells})
    assert np.isnan(found["embedding"]).all()
    assert "allowed" in found["error"][0]
    found = pickle.loads(pickle.dumps(batch_embedder(model, allowed=[s3])))({"image": cells})
    assert np.array_equal(found["embedding"][:1], expected[:1])
    assert np.isnan(found["embedding"][1:]).all()


def test_a_relative_path_shows_no_bytes_of_a_file_that_is_no_image(
    model, paths, expected, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    Path("key").write_text("hunter2")
    found = batch_embedder(model)({"image": ["key", f"../{tmp_path.name}/key", os.path.relpath(paths[0])]})
    assert all("not an image" in error for error in found["error"][:2])
    assert "hunter2" not in str(found["error"])
    assert np.array_equal(found["embedding"][2:], expected[:1])


def test_what_is_wrong_with_all_images_or_with_the_model_stops_the_job(model, tmp_path):
    embedder, moved = batch_embedder(model), batch_embedder(shutil.copytree(model, tmp_path / "model"))
    with pytest.raises(KeyError, match="image"):
        embedder({"images": [], "label": []})
    with pytest.raises(OptionError, match="ndarray"):
        embedder({"image": [np.zeros((16, 16, 3), np.uint8)]})
    with pytest.raises(CheckpointError, match="another model"):
        replace(embedder, metadata={"plsc.fingerprint": "0" * 64})({"image": []})
    shutil.rmtree(tmp_path / "model")
    with pytest.raises(CheckpointError, match=r"model\.json"):
        moved({"image": []})
